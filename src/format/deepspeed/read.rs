//! Reads the files of a checkpoint into a catalog.

use std::path::Path;

use super::assemble::{OptimizerParts, Parts};
use super::bytes::{check_padding, check_steps};
use super::folder::{StatesFiles, refused};
use super::model::{ModelStates, OWN_KEYS, check_optimizer_file};
use super::names::{Role, StatesName};
use super::{mappings, optimizer, whole_masters};
use crate::catalog::{Catalog, Dtype, Weights};
use crate::error::{Error, Result};
use crate::format::foreign::{first_bytes, refuse_file};
use crate::format::list;
use crate::format::reading::ReadFindings;
use crate::format::torch::{RankFile, dropped_objects, load};
use torch_pickle::pickle::Unknown;

/// Reads a checkpoint.
///
/// # Errors
/// `Unsupported` for kinds of DeepSpeed checkpoints that dtshard does not read; `Missing`, `Malformed`, `Io`.
pub fn read(reading: &mut ReadFindings<'_>, folder: &Path) -> Result<Catalog> {
    let mut names = list(folder)?;
    names.sort_unstable();
    let found = StatesFiles::find(folder, &names)?;
    for path in found.model.values().chain(found.optimizer.values()) {
        refuse_file(path, &first_bytes(path)?)?;
    }
    let unknown = reading.options.unknown();
    let model_files = load::load(&mut reading.files, &found.model, unknown)?;
    let model = ModelStates::read(folder, &found, &model_files)?;
    // The objects of DeepSpeed's own classes are not part of the result, so they never matter.
    let optimizer_files = load::load(&mut reading.files, &found.optimizer, Unknown::Refuse)?;
    let mut catalog = if optimizer_files.is_empty() {
        read_without_partitions(reading, folder, &model)?
    } else {
        read_partitions(reading, folder, &found, &model, &optimizer_files)?
    };
    let all = model_files.iter().chain(&optimizer_files);
    catalog.archives = all.map(|file| file.contents.file_range()).collect();
    catalog.dropped = dropped_objects(&model_files);
    let is_own = |dropped: &str| {
        OWN_KEYS.iter().any(|key| {
            dropped
                .strip_prefix(key)
                .is_some_and(|rest| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_'))
        })
    };
    catalog.dropped.retain(|dropped| !is_own(dropped));
    Ok(catalog)
}

fn read_partitions(
    reading: &ReadFindings<'_>,
    folder: &Path,
    found: &StatesFiles,
    model: &ModelStates<'_>,
    files: &[RankFile],
) -> Result<Catalog> {
    let Some(shapes) = model.param_shapes()? else {
        return Err(model.first().wrong("param_shapes", "the shapes of the parameters of each group", "none"));
    };
    let states = optimizer::read(folder, found, files, shapes)?;
    model.check_partitions(files.len())?;
    mappings::check(model, files, &states.groups)?;
    let mut warnings = Vec::new();
    for file in files {
        // One warning is enough: other files of the same job would repeat it.
        let warning = check_optimizer_file(model.first(), file)?;
        warnings.extend(warning.filter(|_| warnings.is_empty()));
    }
    // A metadata mirror has no data of tensors, so neither counters nor padding.
    if reading.options.holdings.is_empty() {
        let steps = check_steps(&reading.files, files, &states)?;
        check_padding(&reading.files, files, &states)?;
        warnings.extend(steps.and_then(|steps| other_steps(model, steps)));
    }
    let refs: Vec<&RankFile> = files.iter().collect();
    let weights = reading.options.weights.unwrap_or(Weights::Master);
    if weights == Weights::Module && found.is_stage3 {
        return Err(without_module(folder));
    }
    let optimizer = OptimizerParts::Partitioned(&refs, &states);
    let parts = Parts { folder, model, is_stage3: found.is_stage3, weights, optimizer };
    let mut catalog = parts.catalog()?;
    catalog.warnings.extend(warnings);
    let masters = states.groups.first().and_then(|group| group.masters.first()).map(|master| master.dtype);
    if !found.is_stage3 {
        catalog.notes.extend(note_of_master_weights(reading, folder, masters, model));
    }
    Ok(catalog)
}

/// Returns the error for a checkpoint of stage 3 whose module is requested.
fn without_module(folder: &Path) -> Error {
    Error::usage(
        format!(
            "options::weights module: {} is a checkpoint of ZeRO stage 3, which has master weights only",
            folder.display()
        ),
        "leave options::weights out; or give the file that save_16bit_model wrote, or that accelerate wrote beside the \
         checkpoint, as SRC",
    )
}

/// Returns a warning if the optimizer has made another number of steps than the job.
fn other_steps(model: &ModelStates<'_>, steps: f64) -> Option<String> {
    let updates = model.updates()?;
    #[allow(clippy::cast_precision_loss, reason = "no job makes 2^53 steps")]
    let is_same = (updates as f64 - steps).abs() < 0.5;
    (!is_same).then(|| {
        format!(
            "{}: the job made {updates} steps (global_steps without skipped_steps), and its optimizer {steps}: this is right \
             only if the optimizer did not begin with the job",
            model.first().path().display()
        )
    })
}

/// Reads a checkpoint without optimizer files. At ZeRO stage 0, the model file has the optimizer.
fn read_without_partitions(reading: &ReadFindings<'_>, folder: &Path, model: &ModelStates<'_>) -> Result<Catalog> {
    let (first, weights) = (model.first(), reading.options.weights);
    let module = Parts { folder, model, is_stage3: false, weights: Weights::Module, optimizer: OptimizerParts::None };
    let Some(optimizer) = first.get("optimizer") else {
        if weights == Some(Weights::Module) {
            return module.catalog();
        }
        let name = StatesName { role: Role::Optimizer, partition: 0, model_parallel: 0, is_bf16: false };
        return Err(optimizer::missing(folder, &name.of_partition(0)));
    };
    let has = |key: &str| optimizer.as_dict().is_some_and(|dict| dict.get(key).is_some());
    if !["fp32_groups", "fp32_groups_flat"].into_iter().any(has) {
        // The module has f32 parameters, and they are the master weights.
        let weights = weights.unwrap_or(Weights::Master);
        return Parts { weights, optimizer: OptimizerParts::Numbered(optimizer), ..module }.catalog();
    }
    if weights == Some(Weights::Module) {
        let mut catalog = module.catalog()?;
        catalog.warnings.push(format!(
            "{}: the optimizer is left out, because its state has no names of parameters",
            first.path().display()
        ));
        return Ok(catalog);
    }
    // A metadata mirror has no values to compare.
    if has("fp32_groups_flat") || !reading.options.holdings.is_empty() {
        return Err(refused(
            folder,
            "of ZeRO stage 0 with 16-bit parameters, whose master weights have no names",
            "read the parameters of the module, without the optimizer, with options::weights module",
        ));
    }
    let groups = whole_masters::find_names(folder, &reading.files, model)?;
    let mut catalog =
        Parts { weights: Weights::Master, optimizer: OptimizerParts::Whole(&groups), ..module }.catalog()?;
    catalog.notes.extend(note_of_master_weights(reading, folder, Some(Dtype::F32), model));
    Ok(catalog)
}

/// Returns the note that says which weights are read, unless an option chose them, or both have one dtype.
fn note_of_master_weights(
    reading: &ReadFindings<'_>,
    folder: &Path,
    masters: Option<Dtype>,
    model: &ModelStates<'_>,
) -> Option<String> {
    let (master, module) = masters.zip(model.dtype())?;
    (reading.options.weights.is_none() && master != module).then(|| {
        format!(
            "{}: parameters have their master weights ({master}), which the optimizer updates; options::weights module reads \
             those of the module ({module})",
            folder.display()
        )
    })
}
