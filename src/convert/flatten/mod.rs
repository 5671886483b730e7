//! `flatten` writes FSDP1 flat parameters from a source of any format. This module checks the target format, lays out
//! the rank files, and checks that two tensors which share one position in a flat parameter are equal.

mod numbering;
mod target;
mod units;

use std::path::PathBuf;

use super::differing_values::TargetFiles;
use super::fill::with_others;
use super::prepared::Prepared;
use super::run::Run;
use super::source::ConversionSource;
use super::target_format::target_format;
use super::target_parts::{NewJob, PartTarget, carry_along, check_room, parts, warn_of_carried};
use super::whole::check_tied;
use crate::catalog::flat::FlatLayout;
use crate::catalog::{Path, Reservation, TensorId, state_dict};
use crate::convert::options::{ConvertOptions, FlattenOptions};
use crate::error::{CatalogError, Error, Result};
use crate::format::fsdp_flat::{FlatTarget, PartSurvey};
use crate::format::{Format, TensorStorage, fsdp_flat};
use crate::layout::Rank;
use crate::publish::DestinationKind;
pub use target::{FlattenRequest, GroupSize, unknown_padding};

/// Lays out the destination of `flatten`.
///
/// # Errors
/// `Usage` for another format than flat parameters; the errors of [`FlattenRequest::layout`].
pub fn prepare(
    args: &FlattenOptions,
    convert: &ConvertOptions,
    source: ConversionSource,
    run: &Run<'_>,
) -> Result<Prepared> {
    let source = with_others(source, (None, args.flat.like.as_deref()), convert, run)?;
    let destination = convert.dst.as_deref();
    let to = target_format(&convert.destination, destination, Format::FsdpFlat)?;
    if to.tensors() != TensorStorage::Flat {
        return Err(Error::usage(
            format!("flatten writes flat parameters, not {to}"),
            "use `dtshard unshard` or `dtshard consolidate` to write whole tensors, `dtshard reshard` to write \
             DTensors",
        ));
    }
    let request = FlattenRequest::of_arguments(args, convert, &source)?;
    lay_out(&request, convert, source, to, run)
}

/// Lays out flat parameters.
///
/// # Errors
/// The errors of [`FlattenRequest::layout`] and [`reserve`].
pub fn lay_out(
    request: &FlattenRequest,
    args: &ConvertOptions,
    mut source: ConversionSource,
    to: Format,
    run: &Run<'_>,
) -> Result<Prepared> {
    check_tied(args.tied, to)?;
    source.resolve_conflicts(args.checks, TargetFiles::Apart, run)?;
    let (layout, mut notes) = request.layout(&source)?;
    if layout.has_assumed_alignment && layout.shard_group_size > 1 {
        return Err(unknown_padding(&source));
    }
    notes.extend(source.notes_of_ranks(Some(layout.world_size)));
    check_room(u64::from(layout.world_size), source.tensors().len(), 0, args.source.max_memory)?;
    let mut reservation = reserve(&source, &layout, to, run)?;
    let job = NewJob { world_size: layout.world_size, fsdp_version: Some(1) };
    let carried = carry_along(&source, to, job, &mut reservation)?;
    warn_of_carried(&carried, &mut source, run.progress);
    Ok(Prepared { source, reservation, carried, shape: DestinationKind::Folder, to, tied: Vec::new(), notes })
}

/// Lays out every series of the source. Two tensors may share one position in a flat parameter; only one of them is
/// written, so both must be equal. The layout file beside the rank files records the parameter ids of the optimizer.
///
/// # Errors
/// `Conflict` if two tensors that share one position differ.
pub fn reserve(source: &ConversionSource, layout: &FlatLayout, to: Format, run: &Run<'_>) -> Result<Reservation> {
    let selected = &source.selection.catalog;
    let root = state_dict::model_root(&selected.state);
    let gradients = state_dict::gradients_root(&selected.state, &root);
    let parts = parts(source, to);
    let within = |path: &Path, at: &Path| path.0.strip_prefix(at.0.as_slice()).map(|rest| Path(rest.to_vec()));
    let model = |part: &PartTarget| within(&root, &part.at);
    let gradients = |part: &PartTarget| gradients.as_ref().and_then(|path| within(path, &part.at));
    let mut layout = layout.clone();
    for part in &parts {
        let name = &|_: Rank| PathBuf::new();
        let target = FlatTarget { layout: &layout, model: model(part), gradients: gradients(part), name };
        let PartSurvey { merged, numbered } = fsdp_flat::survey(selected, &part.state, &target)?;
        for (kept, other) in merged {
            require_same(source, kept, other, run)?;
        }
        layout.optimizer = layout.optimizer.or(numbered);
    }
    let mut whole = Reservation::default();
    for part in &parts {
        let names = part.names.as_ref().expect("rank files have names");
        let name = &|rank: Rank| PathBuf::from(names.render(rank.0, layout.world_size));
        let target = FlatTarget { layout: &layout, model: model(part), gradients: gradients(part), name };
        whole.append(&part.folder, fsdp_flat::reserve(selected, &part.state, target)?);
    }
    Ok(whole)
}

/// Lays out the rank files of an optimizer that has state of flat parameters. Its model is not written as flat
/// parameters.
///
/// # Errors
/// `Conflict` if the target stores one value for the state of two parameters, but the states of these parameters
/// differ.
pub fn reserve_optimizer(
    source: &ConversionSource,
    part: &PartTarget,
    layout: &FlatLayout,
    run: &Run<'_>,
) -> Result<Reservation> {
    let selected = &source.selection.catalog;
    let names = part.names.as_ref().expect("rank files have names");
    let name = &|rank: Rank| PathBuf::from(names.render(rank.0, layout.world_size));
    let target = FlatTarget { layout, model: None, gradients: None, name };
    for (kept, other) in fsdp_flat::survey(selected, &part.state, &target)?.merged {
        require_same(source, kept, other, run)?;
    }
    fsdp_flat::reserve(selected, &part.state, target)
}

/// Checks that two tensors are equal. Only `kept` is written, because the two tensors share one position in a flat
/// parameter.
fn require_same(source: &ConversionSource, kept: TensorId, other: TensorId, run: &Run<'_>) -> Result<()> {
    let [kept_entry, entry] = [kept, other].map(|id| source.checkpoint.catalog.tensor(id));
    match source.difference([kept, other], kept_entry.dtype, run)? {
        None => Ok(()),
        Some(difference) => Err(Error::Catalog(CatalogError::Conflict {
            fqn: entry.fqn.to_string(),
            what: "the value",
            between: format!("{} and {}, which share one value in a flat parameter", entry.fqn, kept_entry.fqn),
            detail: difference.clone(),
            hint: Some(String::from(
                "give units that separate the tensors with options::layout FILE, or leave one out with options::exclude; \
                 `flatten` can keep the state of each parameter (options::use_orig_params)",
            )),
        })),
    }
}
