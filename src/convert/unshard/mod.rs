//! `unshard` writes whole tensors and keeps the nested state dict: one file, or rank files with `--all-ranks` or
//! `--unit`. This module chooses the target format and lays out the output files.

mod ranks;

use super::differing_values::TargetFiles;
use super::prepared::Prepared;
use super::run::Run;
use super::source::ConversionSource;
use super::source_options::check_flat;
use super::target_format::target_format;
use super::whole::{check_tied, elsewhere, names_to_write, placing_like, shape_of, whole_writer};
use crate::catalog::{path, state_dict};
use crate::convert::options::{ConvertOptions, UnshardOptions};
use crate::error::{Error, Result};
use crate::format::{Format, WholeTarget};
use crate::publish::DestinationKind;

/// Lays out the destination of `unshard`.
///
/// # Errors
/// `Usage` for a format that cannot hold whole tensors, and for options without effect.
pub fn prepare(
    args: &UnshardOptions,
    convert: &ConvertOptions,
    mut source: ConversionSource,
    run: &Run<'_>,
) -> Result<Prepared> {
    let like = args.shards.like.as_deref();
    let in_rank_files = args.all_ranks || !args.unit.is_empty();
    let destination = convert.dst.as_deref();
    let whole = (!in_rank_files).then(|| target_format(&convert.destination, destination, Format::Torch));
    let whole = whole.transpose()?;
    let placing = whole.map(|to| placing_like(convert, like, to)).transpose()?.flatten();
    check_flat(&convert.source, like.filter(|_| placing.is_none()), &[&source.checkpoint])?;
    if args.with_grads && !has_gradients(&source) {
        return Err(Error::usage(
            "options::with_grads: the source has no gradients",
            "omit options::with_grads; gradients are a subtree or a series of rank files called grads or gradients",
        ));
    }
    source.resolve_conflicts(
        convert.checks,
        if in_rank_files { TargetFiles::Apart } else { TargetFiles::Together },
        run,
    )?;
    let mut tied = Vec::new();
    let mut notes = source.conflicts.notes(None);
    let (to, reservation, shape) = if let Some(to) = whole {
        let writer = whole_writer("unshard", to)?;
        check_tied(convert.tied, to)?;
        let selected = &source.selection.catalog;
        let reservation = if let Some(nested) = writer.reserve_state(selected, destination)? {
            nested
        } else {
            let written;
            (written, tied) = names_to_write(&source, source.tensors(), convert.tied);
            notes.extend(elsewhere(placing.as_ref(), &written));
            let mut reservation = writer.reserve(WholeTarget {
                source: selected,
                dtypes: &selected.dtypes(),
                tensors: &written,
                aliases: &tied,
                destination,
                max_shard_bytes: args.shards.max_shard_size,
                placing,
            })?;
            reservation.left_out = path::object_names(&selected.state);
            reservation
        };
        let shape = shape_of(writer, destination);
        (to, reservation, shape)
    } else {
        let to = target_format(&convert.destination, None, ranks::default_format(args, &source)?)?;
        check_tied(convert.tied, to)?;
        let (reservation, more) = ranks::reserve(args, convert, &source, to, run)?;
        notes.extend(more);
        (to, reservation, DestinationKind::Folder)
    };
    Ok(Prepared { source, reservation, carried: Vec::new(), shape, to, tied, notes })
}

fn has_gradients(source: &ConversionSource) -> bool {
    let state = &source.selection.catalog.state;
    state_dict::gradients_root(state, &state_dict::model_root(state)).is_some()
}
