//! `flatten`: FSDP1 flat parameters, whatever the source is.

mod numbering;
mod target;
mod units;

use std::path::PathBuf;

use super::Status;
use super::conflicts::Ranks;
use super::consolidate::check_tied;
use super::convert::{Conversion, convert, target_format};
use super::parts::{carry_along, check_room, parts};
use super::printer::Printer;
use super::run::Run;
use super::source::{Defaults, Source};
use crate::catalog::flat::FlatLayout;
use crate::catalog::{Path, Reservation, TensorId, model};
use crate::cli::{ConvertArgs, Flatten};
use crate::error::{Error, Result};
use crate::exec::staging::Shape;
use crate::exec::{Silent, compare};
use crate::format::{Format, fsdp_flat};
pub use target::{Group, Wish};

pub fn run(args: &Flatten, printer: &Printer) -> Result<Status> {
    let run = Run::begin(&args.convert.source, !args.convert.destination.no_sync, printer)?;
    let like = args.flat.like.as_deref();
    let mut source =
        Source::open(&args.convert, like, Defaults::everything(), &run)?.with(None, like, &args.convert, &run)?;
    let destination = args.convert.dst.as_deref();
    let to = target_format(&args.convert.destination, destination, Format::FsdpFlat)?;
    if to != Format::FsdpFlat {
        return Err(Error::usage(
            format!("flatten writes flat parameters, not {to}"),
            "`dtshard unshard` and `dtshard consolidate` write whole tensors, `dtshard reshard` DTensors",
        ));
    }
    let wish = Wish::of_arguments(args, &source)?;
    perform(&wish, &args.convert, &mut source, &run)
}

/// Write flat parameters.
pub fn perform(wish: &Wish, args: &ConvertArgs, source: &mut Source, run: &Run<'_>) -> Result<Status> {
    check_tied(args.tied, Format::FsdpFlat)?;
    source.settle(args.checks, Ranks::Apart, run)?;
    let (layout, mut notes) = wish.layout(source)?;
    notes.extend(source.settled.notes(Some(layout.world_size)));
    check_room(u64::from(layout.world_size), source.tensors().len(), 0, args.source.max_memory.0)?;
    let mut reservation = reserve(source, &layout, run)?;
    let carried = carry_along(source, Format::FsdpFlat, layout.world_size, &mut reservation)?;
    let conversion = Conversion {
        source,
        reservation,
        carried,
        shape: Shape::Folder,
        to: Format::FsdpFlat,
        tied: Vec::new(),
        notes,
    };
    convert(&conversion, args, run)
}

/// Lay out every series of the source, once it is certain that nothing is lost: what has one place in a flat parameter
/// must be the same under all of its names.
pub fn reserve(source: &Source, layout: &FlatLayout, run: &Run<'_>) -> Result<Reservation> {
    let wanted = &source.wanted.catalog;
    let root = model::model_root(&wanted.state);
    let gradients = model::gradients_root(&wanted.state, &root);
    let mut whole = Reservation::default();
    for part in parts(source, Format::FsdpFlat) {
        let names = part.names.as_ref().expect("rank files have names");
        let within = |path: &Path| path.0.strip_prefix(part.at.0.as_slice()).map(|rest| Path(rest.to_vec()));
        let target = fsdp_flat::FlatTarget {
            layout,
            model: within(&root),
            gradients: gradients.as_ref().and_then(within),
            name: &|rank| PathBuf::from(names.render(rank.0, layout.world_size)),
        };
        for (kept, other) in fsdp_flat::merged(wanted, &part.state, &target)? {
            require_same(source, kept, other, run)?;
        }
        whole.append(&part.folder, fsdp_flat::reserve(wanted, &part.state, target)?);
    }
    Ok(whole)
}

/// Two tensors of which one is written, and the other read back from it.
fn require_same(source: &Source, kept: TensorId, other: TensorId, run: &Run<'_>) -> Result<()> {
    let checkpoint = &source.checkpoint;
    let entries = [kept, other].map(|id| checkpoint.catalog.tensor(id));
    let [left, right] = entries.map(|entry| (super::input(checkpoint), entry));
    let found = compare::first_difference(left, right, left.1.dtype, &run.options, &Silent, &run.stop)?;
    match found {
        None => Ok(()),
        Some(difference) => Err(Error::Conflict {
            fqn: entries[1].fqn.to_string(),
            what: "a tensor",
            between: format!("it and {}", entries[0].fqn),
            detail: format!("a flat parameter has one place for both: {}", difference.detail(entries[0].numel())),
            hint: Some(String::from(
                "another --flat-layout keeps tensors apart, --use-orig-params the state of each parameter; --exclude \
                 leaves them out",
            )),
        }),
    }
}
