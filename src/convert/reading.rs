//! Reading of a source: options of the format's reader, and errors for options that have no effect on what was read.

use std::path::Path;

use super::options::{SelectOptions, SourceOptions};
use crate::error::{Error, Result};
use crate::exec::Input;
use crate::format::{Checkpoint, FlatKnowledge, ReadOptions, SeriesChoice, TensorStorage, Want, resolve};
use crate::quantity::count;

/// Returns how a source is read, with `default` where no series are asked for.
pub fn read_options(args: &SourceOptions, like: Option<&Path>, default: SeriesChoice, want: Want) -> ReadOptions {
    let series = match args.series.as_slice() {
        [] => default,
        [all] if all == "all" => SeriesChoice::All,
        names => SeriesChoice::Named(names.to_vec()),
    };
    ReadOptions {
        from: args.from,
        want,
        series,
        io: args.io,
        show_incomplete: false,
        allow_missing: args.allow_missing,
        drop_unknown: args.drop_unknown,
        declared_layout: None,
        holdings: std::sync::Arc::default(),
        flat: FlatKnowledge { layout: args.flat_layout.clone(), like: like.map(Path::to_path_buf), raw: false },
    }
}

/// Returns the checkpoint as an input of the steps that move bytes.
pub fn input(checkpoint: &Checkpoint) -> Input<'_> {
    Input { files: &checkpoint.files, catalog: &checkpoint.catalog, resolve: &resolve }
}

/// The error for a source of which nothing but objects would be read or written, unless options choose what is taken.
///
/// # Errors
/// `Usage`.
pub fn refuse_without_tensors(
    src: &Path,
    checkpoint: &Checkpoint,
    source: &SourceOptions,
    select: &SelectOptions,
) -> Result<()> {
    let chooses_series = !source.series.is_empty() && source.series != ["all"];
    let chooses_names = !select.include.is_empty() || select.include_from.is_some() || !select.exclude.is_empty();
    if chooses_series || chooses_names || select.root.is_some() {
        return Ok(());
    }
    let held = match checkpoint.catalog.tensors.len() {
        0 => String::from("it holds no tensors"),
        number => format!("none of its {} is taken", count(number, "tensor")),
    };
    Err(Error::usage(
        format!("{}: {held}", src.display()),
        "`dtshard inspect` shows what it holds; options::include or options::series chooses objects alone",
    ))
}

/// `--series` where there are no series would be an option without an effect.
pub fn check_series(args: &SourceOptions, checkpoints: &[&Checkpoint]) -> Result<()> {
    let named = !args.series.is_empty() && args.series != ["all"];
    if !named || checkpoints.iter().any(|checkpoint| !checkpoint.series.is_empty()) {
        return Ok(());
    }
    let checkpoint = checkpoints[0];
    Err(Error::usage(
        format!(
            "options::series {}: {} is {}, which has no series of rank files",
            args.series.join(","),
            checkpoint.root.display(),
            checkpoint.format
        ),
        "leave options::series out",
    ))
}

/// What tells of flat parameters would be without an effect where there are none.
pub fn check_flat(args: &SourceOptions, like: Option<&Path>, checkpoints: &[&Checkpoint]) -> Result<()> {
    let is_flat = |checkpoint: &&Checkpoint| {
        checkpoint.format.tensors() == TensorStorage::Flat || checkpoint.catalog.flat.is_some()
    };
    let option = match (&args.flat_layout, like) {
        (Some(_), _) => "options::flat_layout",
        (None, Some(_)) => "options::like",
        (None, None) => return Ok(()),
    };
    if checkpoints.iter().any(is_flat) {
        return Ok(());
    }
    let checkpoint = checkpoints[0];
    Err(Error::usage(
        format!(
            "{option} tells what FSDP1 flat parameters hold: {} is {}, which has none",
            checkpoint.root.display(),
            checkpoint.format
        ),
        format!("leave {option} out"),
    ))
}
