//! Lays out a destination that has the complete state of a training job in files that do not depend on a mesh.

use crate::catalog::TensorId;
use crate::convert::differing_values::TargetFiles;
use crate::convert::optimizer_names::name_for_dcp;
use crate::convert::options::{ConvertOptions, ReshardOptions};
use crate::convert::prepared::Prepared;
use crate::convert::run::Run;
use crate::convert::source::ConversionSource;
use crate::convert::source_options::check_flat;
use crate::convert::target_format::holds_whole_tensors;
use crate::convert::target_parts::{NewJob, carry_along, warn_of_carried};
use crate::convert::whole::check_tied;
use crate::error::{Error, Result};
use crate::format::{Format, StateTarget, read_scalar};
use crate::publish::DestinationKind;

/// Lays out the destination.
///
/// # Errors
/// `Usage` for options that need a mesh, and for a format that does not have the state of a training job; the errors of
/// laying out the files.
pub fn prepare(
    args: &ReshardOptions,
    convert: &ConvertOptions,
    mut source: ConversionSource,
    to: Format,
    run: &Run<'_>,
) -> Result<Prepared> {
    let Some(writer) = to.entry().writers.state else { return Err(holds_whole_tensors(to)) };
    refuse_mesh(args, to)?;
    check_flat(&convert.source, None, &[&source.checkpoint])?;
    check_tied(convert.tied, to)?;
    let notes_of_names = name_for_dcp(&mut source);
    source.resolve_conflicts(convert.checks, TargetFiles::Together, run)?;
    let mut notes = source.notes_of_ranks(None);
    notes.extend(notes_of_names);
    let selected = &source.selection.catalog;
    // Another process may have the file of a tensor, and all processes must make the same plan.
    let is_alone = source.peers.is_none() && source.checkpoint.mirror.is_none();
    let number = |id: TensorId| match source.checkpoint.catalog.tensor(id) {
        entry if is_alone => read_scalar(&source.checkpoint.files, entry),
        _ => Ok(None),
    };
    let mut reservation = writer.reserve(StateTarget { source: selected, state: &selected.state, number: &number })?;
    let job = NewJob { world_size: 1, fsdp_version: None };
    let carried = carry_along(&source, to, job, &mut reservation)?;
    warn_of_carried(&carried, &mut source, run.progress);
    Ok(Prepared { source, reservation, carried, shape: DestinationKind::Folder, to, tied: Vec::new(), notes })
}

/// Refuses the options that describe a mesh or placements.
fn refuse_mesh(args: &ReshardOptions, to: Format) -> Result<()> {
    let given = [
        (!args.mesh.is_empty(), "mesh"),
        (!args.mesh_ranks.is_empty(), "mesh_ranks"),
        (!args.placements.is_empty(), "placements"),
        (args.layout.is_some(), "layout"),
        (args.plan.is_some(), "plan"),
        (args.tp.is_some(), "tp"),
        (args.fsdp.is_some(), "fsdp"),
        (args.replicate.is_some(), "replicate"),
        (args.ddp.is_some(), "ddp"),
        (args.split.is_some(), "split"),
        (args.tensor_class.is_some(), "tensor_class"),
    ];
    match given.iter().find(|(is_given, _)| *is_given) {
        None => Ok(()),
        Some((_, name)) => Err(Error::usage(
            format!("options::{name} does not apply to {to}, which has whole tensors and no mesh"),
            format!("omit options::{name}: a job of any size loads the same files"),
        )),
    }
}
