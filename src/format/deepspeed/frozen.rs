//! Frozen parameters: those of the module that the optimizer does not train. They have the dtype of the module. At stage 3 each
//! model file has a part of them, otherwise the module has them.

use std::collections::HashSet;
use std::path::Path;

use super::fields::Fields;
use super::folder::{GATHER, leftover, refused};
use super::join::Job;
use super::model::{ModelStates, Module, StoredValue};
use super::optimizer::FlatGroup;
use super::partitions::Partitioned;
use super::ties::ties;
use crate::catalog::Weights;
use crate::error::{Error, Result};
use crate::format::torch::View;

const FRAGMENTS: &str = "frozen_param_fragments";

/// Returns whether the first model file has a part of a frozen parameter.
///
/// # Errors
/// `Malformed` for a damaged file.
pub fn is_partitioned(model: &ModelStates<'_>, name: &str) -> Result<bool> {
    Ok(model.first().dict(FRAGMENTS)?.is_some_and(|fragments| fragments.dict.get(name).is_some()))
}

/// Returns the parts of a frozen parameter at stage 3.
///
/// # Errors
/// `Malformed` for parts that contradict each other, `Unsupported` for quantized parameters.
pub fn partitioned<'a>(folder: &Path, model: &ModelStates<'a>, name: &str) -> Result<FlatGroup<'a>> {
    let ModelStates { files, .. } = model;
    let first = model.first();
    let at = format!("frozen_param_shapes[{name:?}]");
    let shapes =
        first.get("frozen_param_shapes").map(|value| first.shapes("frozen_param_shapes", value)).transpose()?;
    let param = shapes.into_iter().flatten().find(|(own, _)| own.as_str() == name);
    let Some(param) = param else { return Err(first.wrong(&at, "a shape", "none")) };
    let partitioned = Partitioned::by_parameter(vec![param], files.len() as u64)
        .ok_or_else(|| first.wrong(&at, "fewer than 2^64 elements", "more"))?;
    let mut views: Vec<&View> = Vec::new();
    for (partition, fields) in files.iter().enumerate() {
        let at = format!("{FRAGMENTS}[{name:?}]");
        let fragment = fields.dict(FRAGMENTS)?.and_then(|fragments| fragments.dict.get(name));
        let Some(fragment) = fragment else {
            return Err(leftover(fields.path(), &at, "a part of the frozen parameter", "none"));
        };
        let view = fields.vector(&at, fragment)?;
        if !view.dtype.is_float() {
            let kind = format!("with quantized frozen parameters ({name} has dtype {})", view.dtype);
            return Err(refused(folder, &kind, GATHER));
        }
        let first_dtype = views.first().map_or(view.dtype, |first| first.dtype);
        if view.sizes[0] != partitioned.len() || view.dtype != first_dtype {
            let expected = format!("{} elements of dtype {first_dtype} in partition {partition}", partitioned.len());
            let found = format!("{} of dtype {}", view.sizes[0], view.dtype);
            return Err(leftover(fields.path(), &at, expected, found));
        }
        views.push(view);
    }
    let files = files.iter().map(|fields| fields.file).collect();
    Ok(FlatGroup { files, partitioned, masters: views, state: Vec::new() })
}

/// Returns the shards of the frozen parameters on all tensor-parallel ranks. `modules` has the state dict of each rank,
/// and `trained` the names of the parameters that get their master weights.
///
/// # Errors
/// `Malformed` for ranks that contradict each other, and the errors of [`partitioned`].
pub fn shards<'a>(
    folder: &Path,
    jobs: &[Job<'a>],
    modules: &[&Module<'a>],
    trained: &HashSet<&str>,
    (is_stage3, weights): (bool, Weights),
) -> Result<Vec<Vec<FlatGroup<'a>>>> {
    let all = || jobs.iter().map(|job| &job.model);
    let buffers: HashSet<&str> = all().flat_map(|model| model.buffers.iter().copied()).collect();
    let ties = ties(jobs, modules[0], is_stage3, weights)?;
    let ties: HashSet<&str> = ties.iter().map(|(alias, _)| &**alias).collect();
    let tensors: HashSet<_> =
        trained.iter().filter_map(|name| modules[0].get(*name)?.tensor().filter(|_| !is_stage3)).collect();
    let names = modules[1..].iter().flat_map(|module| *module);
    if let Some((name, stored)) = names.into_iter().find(|(name, _)| !modules[0].contains_key(&***name)) {
        let with = jobs[0].model.first().file_name();
        return Err(leftover(stored.fields.path(), "module", format!("the names in {with}"), format!("`{name}`, too")));
    }
    let mut found = Vec::new();
    for (name, stored) in modules[0] {
        let name: &str = name;
        let is_known = stored.tensor().is_none_or(|tensor| tensors.contains(&tensor));
        let is_lost = is_stage3 && !buffers.contains(name) && !is_partitioned(&jobs[0].model, name)?;
        if trained.contains(name) || ties.contains(name) || is_known || is_lost {
            continue;
        }
        let mut shards = Vec::with_capacity(modules.len());
        for (module, job) in modules.iter().zip(jobs) {
            let Some(own) = module.get(name) else {
                let file = stored.fields.file_name();
                let expected = format!("`{name}` as in {file}");
                return Err(leftover(job.model.first().path(), "module", expected, "none"));
            };
            if buffers.contains(name) {
                check_buffer(name, stored, own)?;
            } else if is_stage3 {
                shards.push(partitioned(folder, &job.model, name)?);
            } else {
                shards.push(whole(name, own)?);
            }
        }
        if !buffers.contains(name) {
            found.push(shards);
        }
    }
    Ok(found)
}

/// Checks that two ranks have buffers of the same shape: the buffer of the first rank is that of the result.
fn check_buffer(name: &str, first: &StoredValue<'_>, own: &StoredValue<'_>) -> Result<()> {
    let show = |stored: &StoredValue<'_>| match stored.fields.view(stored.value) {
        Some(view) => format!("{} {:?}", view.dtype, view.sizes.as_slice()),
        None => stored.value.type_name().into_owned(),
    };
    let (expected, found) = (show(first), show(own));
    if expected == found {
        return Ok(());
    }
    let file = first.fields.file_name();
    let at = format!("the buffer `{name}`");
    Err(leftover(own.fields.path(), &at, format!("{expected} as in {file}"), found))
}

/// Returns a frozen parameter of the module as one partition.
fn whole<'a>(name: &str, stored: &StoredValue<'a>) -> Result<FlatGroup<'a>> {
    let fields: Fields<'a> = stored.fields;
    let Some(view) = fields.view(stored.value) else {
        return Err(fields.wrong(name, "a tensor", stored.value.type_name()));
    };
    FlatGroup::of_tensor(name.into(), fields.file, view).ok_or_else(|| {
        let (file, strides) = (fields.path().display(), view.strides.as_slice());
        Error::unsupported(
            format!("{file}: {name} has strides {strides:?}: its elements are not in row-major order without gaps"),
            "before the job saves, make the parameter contiguous",
        )
    })
}
