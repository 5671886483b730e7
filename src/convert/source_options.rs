//! Options for reading a source, and errors for reading options that would have no effect.

use std::path::Path;

use super::options::{SelectOptions, SourceOptions};
use crate::catalog::Weights;
use crate::error::{Error, Result};
use crate::exec::Input;
use crate::format::{Checkpoint, FlatKnowledge, ReadOptions, SeriesChoice, TensorStorage, Want, resolve};
use crate::name_list::{FEW, short_list};
use crate::quantity::count;

/// Returns the options for reading a checkpoint. `default` selects the series of rank files if the user names none.
/// `like` is a checkpoint of the same model that provides shapes for flat parameters.
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
        weights: args.weights,
        declared_layout: None,
        holdings: std::sync::Arc::default(),
        flat: FlatKnowledge {
            layout: args.flat_layout.clone(),
            like: like.map(Path::to_path_buf),
            ..FlatKnowledge::default()
        },
    }
}

/// Returns the catalog and the files of a checkpoint, as the input of the steps that copy bytes.
pub fn input(checkpoint: &Checkpoint) -> Input<'_> {
    Input { files: &checkpoint.files, catalog: &checkpoint.catalog, resolve: &resolve }
}

/// Refuses a source from which no tensor would be read or written, unless options select names or series.
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
        0 => String::from("has no tensors"),
        number => format!("has {}, but none is selected", count(number, "tensor")),
    };
    Err(Error::usage(
        format!("{} {held}", src.display()),
        "run `dtshard inspect` to list its contents; to select only objects, use options::include or options::series",
    ))
}

/// Refuses `--series` if no checkpoint has series of rank files, because the option would have no effect.
///
/// # Errors
/// `Usage`.
pub fn check_series(args: &SourceOptions, checkpoints: &[&Checkpoint]) -> Result<()> {
    let named = !args.series.is_empty() && args.series != ["all"];
    if !named || checkpoints.iter().any(|checkpoint| !checkpoint.series.is_empty()) {
        return Ok(());
    }
    let checkpoint = checkpoints[0];
    Err(Error::usage(
        format!(
            "options::series {}: {} has format {}, which has no series of rank files",
            args.series.join(","),
            checkpoint.root.display(),
            checkpoint.format
        ),
        match checkpoint.skipped_folders.as_slice() {
            [] => String::from("leave options::series out"),
            folders => hint_for_folders(&checkpoint.root, folders),
        },
    ))
}

/// Refuses `--weights` if no checkpoint has master weights beside the parameters of the module.
///
/// # Errors
/// `Usage`.
pub fn check_weights(args: &SourceOptions, checkpoints: &[&Checkpoint]) -> Result<()> {
    let Some(weights) = args.weights else { return Ok(()) };
    if checkpoints.iter().any(|checkpoint| checkpoint.catalog.weights.is_some()) {
        return Ok(());
    }
    let checkpoint = checkpoints[0];
    let weights = match weights {
        Weights::Master => "master",
        Weights::Module => "module",
    };
    Err(Error::usage(
        format!(
            "options::weights {weights}: {} has format {}, which has only one value of each parameter",
            checkpoint.root.display(),
            checkpoint.format
        ),
        "leave options::weights out",
    ))
}

/// Returns the hint that names the options with which folders beside the folder of the model are read.
fn hint_for_folders(model: &Path, folders: &[String]) -> String {
    let other = model.with_file_name(&folders[0]);
    format!(
        "use options::series all to read {} too, with options::root optimizer to choose the optimizer; or give {} as SRC",
        short_list(folders, FEW),
        other.display()
    )
}

/// Refuses `--root` if it chooses the optimizer, but the folder of the optimizer is not read.
///
/// # Errors
/// `Usage`.
pub fn check_root(root: Option<&str>, checkpoint: &Checkpoint) -> Result<()> {
    let Some(root) = root else { return Ok(()) };
    let first = root.split('.').next().unwrap_or(root);
    let is_folder = |name: &String| name.split('_').next() == first.split('_').next();
    let is_read = checkpoint.catalog.state.as_dict().is_some_and(|state| state.get(first).is_some());
    if is_read || !checkpoint.skipped_folders.iter().any(is_folder) {
        return Ok(());
    }
    Err(Error::usage(
        format!(
            "options::root {root}: only the model in {} is read, not {}",
            checkpoint.root.display(),
            short_list(&checkpoint.skipped_folders, FEW)
        ),
        hint_for_folders(&checkpoint.root, &checkpoint.skipped_folders),
    ))
}

/// Refuses `--flat-layout` and `--like` if no checkpoint has flat parameters, because the option would have no effect.
///
/// # Errors
/// `Usage`.
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
            "{option} describes FSDP1 flat parameters, but {} has format {}, which has no flat parameters",
            checkpoint.root.display(),
            checkpoint.format
        ),
        format!("leave {option} out"),
    ))
}
