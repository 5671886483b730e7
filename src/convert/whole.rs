//! Destinations with whole tensors: the names and the files under which the tensors are written.

use std::collections::HashSet;
use std::path::Path;

use rayon::prelude::*;

use super::source::ConversionSource;
use super::target_format::holds_shards;
use crate::catalog::{Fqn, TensorId};
use crate::convert::options::{ConvertOptions, Tied};
use crate::error::{Error, Result};
use crate::format::{Checkpoint, Format, Placing, ReadOptions, Want, WriteWhole, natural_order};
use crate::publish::DestinationKind;

/// A pair of tied names: the name that is only recorded, and the name under which the tensor is written.
type Alias = (Fqn, Fqn);

/// Returns the tensors to write with their names, sorted in natural order. Also returns the tied names that are only
/// recorded, each with the name under which its tensor is written.
pub fn names_to_write(
    source: &ConversionSource,
    mut tensors: Vec<(Fqn, TensorId)>,
    tied: Tied,
) -> (Vec<(Fqn, TensorId)>, Vec<Alias>) {
    let mut aliases = Vec::new();
    if tied == Tied::Drop {
        for (kept, others) in source.selection.ties() {
            aliases.extend(others.into_iter().map(|alias| (alias, kept.clone())));
        }
    }
    let recorded: HashSet<&Fqn> = aliases.iter().map(|(alias, _)| alias).collect();
    tensors.retain(|(fqn, _)| !recorded.contains(fqn));
    tensors.par_sort_by(|(left, _), (right, _)| natural_order(left.as_str(), right.as_str()));
    (tensors, aliases)
}

/// Checks that a format can record tied names, if tied names are not written as tensors.
///
/// # Errors
/// `Usage` if the format cannot record tied names.
pub fn check_tied(tied: Tied, to: Format) -> Result<()> {
    if tied != Tied::Drop || to.entry().writers.whole.is_some_and(WriteWhole::records_aliases) {
        return Ok(());
    }
    Err(Error::usage(
        format!("options::tied drop: {to} files cannot record dropped names"),
        "omit options::tied; a torch file stores tied tensors once, and keeps all their names",
    ))
}

/// Returns the writer that stores whole tensors in a format.
///
/// # Errors
/// `Usage` for a format that stores only shards.
pub fn whole_writer(verb: &str, to: Format) -> Result<&'static dyn WriteWhole> {
    to.entry().writers.whole.ok_or_else(|| holds_shards(verb, to))
}

/// Returns whether the destination is one file or a folder. `destination` is the path of DST, if it is known.
pub fn shape_of(writer: &dyn WriteWhole, destination: Option<&Path>) -> DestinationKind {
    if writer.is_one_file(destination) { DestinationKind::File } else { DestinationKind::Folder }
}

/// Returns, for each tensor, the file in which the checkpoint of `--like` stores it. Returns `None` unless that
/// checkpoint and DST are both folders and have the same format.
///
/// # Errors
/// Errors from reading the checkpoint.
pub fn placing_like(args: &ConvertOptions, like: Option<&Path>, to: Format) -> Result<Option<Placing>> {
    let is_folder = |writer: &dyn WriteWhole| !writer.is_one_file(args.dst.as_deref());
    let Some(like) = like.filter(|_| to.entry().writers.whole.is_some_and(is_folder)) else { return Ok(None) };
    let options = ReadOptions { io: args.source.io, want: Want::State, ..ReadOptions::default() };
    let checkpoint = Checkpoint::open(like, &options).map_err(|error| error.within(like))?;
    let is_same = checkpoint.format == to;
    Ok(Some(checkpoint).filter(|_| is_same).and_then(|like| Placing::of(&like.catalog, &like.files)))
}

/// Returns a note about tensors to write that the checkpoint of `--like` does not have, and about their files.
pub fn elsewhere(placing: Option<&Placing>, written: &[(Fqn, TensorId)]) -> Option<String> {
    let unknown: Vec<&Fqn> =
        written.iter().map(|(fqn, _)| fqn).filter(|fqn| !placing.is_none_or(|it| it.has(fqn))).collect();
    let first = unknown.first()?;
    Some(match unknown.len() {
        1 => format!("options::like lacks `{first}`, which is written to the file of the preceding tensor"),
        number => format!(
            "options::like lacks {number} tensors, such as `{first}`; each of them is written to the file of the preceding \
             tensor"
        ),
    })
}
