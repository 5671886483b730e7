//! Whole tensors in safetensors files: under which names, and in which files.

use std::collections::HashSet;
use std::path::Path;

use rayon::prelude::*;

use super::source::ConversionSource;
use super::target_format::file_name;
use crate::catalog::{Fqn, TensorId};
use crate::convert::options::{ConvertOptions, Tied};
use crate::error::{Error, Result};
use crate::format::safetensors::{self, FileAssignment};
use crate::format::{Checkpoint, Format, ReadOptions, Want, natural_order};
use crate::publish::DestinationKind;
use crate::quantity::count;

/// A name that is recorded, not written, and the one that is.
type Alias = (Fqn, Fqn);

/// Those of the tensors that are taken which a safetensors target has, in natural order, and the names that are only
/// recorded, with what they name.
pub fn names_to_write(
    source: &ConversionSource,
    mut tensors: Vec<(Fqn, TensorId)>,
    tied: Tied,
) -> (Vec<(Fqn, TensorId)>, Vec<Alias>) {
    let mut aliases = Vec::new();
    if tied == Tied::Drop {
        for (kept, others) in source.wanted.ties() {
            aliases.extend(others.into_iter().map(|alias| (alias, kept.clone())));
        }
    }
    let recorded: HashSet<&Fqn> = aliases.iter().map(|(alias, _)| alias).collect();
    tensors.retain(|(fqn, _)| !recorded.contains(fqn));
    tensors.par_sort_by(|(left, _), (right, _)| natural_order(left.as_str(), right.as_str()));
    (tensors, aliases)
}

/// Only safetensors has a place to record the names that are dropped.
pub fn check_tied(tied: Tied, to: Format) -> Result<()> {
    if tied != Tied::Drop {
        return Ok(());
    }
    Err(Error::usage(
        format!("options::tied drop: {to} cannot record the names that are dropped"),
        "leave it out: a torch file stores tied tensors once anyway",
    ))
}

/// What DST is: a file of its own, or a folder.
pub fn safetensors_shape(
    destination: Option<&Path>,
    max_shard_size: u64,
    placing: Option<FileAssignment>,
) -> (safetensors::FileDivision, DestinationKind) {
    match placing {
        _ if is_file(destination) => {
            (safetensors::FileDivision::File(file_name(destination, "model.safetensors")), DestinationKind::File)
        }
        Some(placing) => (safetensors::FileDivision::Like(placing), DestinationKind::Folder),
        None => (safetensors::FileDivision::Folder { max_shard_bytes: max_shard_size }, DestinationKind::Folder),
    }
}

fn is_file(destination: Option<&Path>) -> bool {
    destination.is_some_and(|path| path.extension().is_some_and(|suffix| suffix == "safetensors"))
}

/// Which files the tensors of `--like` are in, where that is a folder of safetensors files and DST is to be one.
///
/// # Errors
/// As reading it.
pub fn placing_like(args: &ConvertOptions, like: Option<&Path>, to: Format) -> Result<Option<FileAssignment>> {
    let Some(like) = like.filter(|_| to == Format::Safetensors && !is_file(args.dst.as_deref())) else {
        return Ok(None);
    };
    let options = ReadOptions { io: args.source.io, want: Want::State, ..ReadOptions::default() };
    let checkpoint = Checkpoint::open(like, &options).map_err(|error| error.within(like))?;
    let is_one = checkpoint.format == Format::Safetensors;
    Ok(Some(checkpoint).filter(|_| is_one).and_then(|like| FileAssignment::of(&like.catalog, &like.files)))
}

/// Tensors that `--like` has in none of its files.
pub fn elsewhere(placing: Option<&FileAssignment>, written: &[(Fqn, TensorId)]) -> Option<String> {
    let unknown: Vec<&Fqn> =
        written.iter().map(|(fqn, _)| fqn).filter(|fqn| !placing.is_none_or(|it| it.has(fqn))).collect();
    let first = unknown.first()?;
    Some(format!("{} that options::like lacks, such as {first}: beside the one before", count(unknown.len(), "tensor")))
}
