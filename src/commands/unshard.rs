//! `unshard`: every tensor whole, the nested state dict kept.

use std::time::Instant;

use super::Status;
use super::convert::{Conversion, convert, file_name, holds_shards, open_source, target_format};
use super::printer::Printer;
use crate::catalog::{Value, model, path};
use crate::cli::Unshard;
use crate::error::Result;
use crate::exec::staging::Shape;
use crate::format::{Format, SeriesChoice, natural_order, safetensors, torch};

pub fn run(args: &Unshard, printer: &Printer) -> Result<Status> {
    let started = Instant::now();
    let checkpoint = open_source(&args.convert, SeriesChoice::Model)?;
    let catalog = &checkpoint.catalog;
    catalog.check_agreement()?;
    let destination = args.convert.dst.as_deref();
    let to = target_format(&args.convert.destination, destination, Format::Torch);
    let (reservation, shape) = match to {
        Format::Torch => {
            let name = file_name(destination, "checkpoint.pt");
            (torch::reserve(catalog, &catalog.state, name)?, Shape::File)
        }
        Format::Safetensors => {
            let mut tensors = model::all_tensors(&catalog.state);
            tensors.sort_by(|(left, _), (right, _)| natural_order(left.as_str(), right.as_str()));
            let (shape, staged) = super::consolidate::safetensors_shape(destination, args.shards.max_shard_size);
            let mut reservation = safetensors::reserve(catalog, &tensors, &[], &shape)?;
            reservation.left_out = object_names(&catalog.state);
            (reservation, staged)
        }
        Format::Dcp | Format::TorchRanks => return Err(holds_shards("unshard", to)),
    };
    let conversion = Conversion {
        started,
        checkpoint: &checkpoint,
        reservation,
        destination,
        shape,
        to,
        left_out: Vec::new(),
        notes: Vec::new(),
    };
    convert(conversion, &args.convert, printer)
}

/// Names of everything in a state dict that is not a tensor.
pub fn object_names(state: &Value) -> Vec<String> {
    path::objects(state).into_iter().map(|(path, _)| path.to_string()).collect()
}
