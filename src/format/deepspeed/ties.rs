//! Tied parameters: several names of one parameter of the module.
//!
//! `shared_params` in a model file lists the further names, each with the name under which the parameter is listed. In the
//! module, both names have one tensor. But the files of experts and of the layers of a pipeline have a clone for each name:
//! of a tied parameter, the clones have the values of the module, and only the listed name has a master weight.
//!
//! Source: `_get_shared_params` and `_save_moe_checkpoint` in `deepspeed/runtime/engine.py`, `save_state_dict` in
//! `deepspeed/runtime/pipe/module.py`.

use std::borrow::Cow;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::bytes::{BoxOfShard, first_values, is_rounded};
use super::experts::split_expert;
use super::join::Job;
use super::model::{ModelStates, Module, StoredValue};
use super::optimizer::FlatGroup;
use super::partitions::Placed;
use crate::catalog::{Dtype, Fqn, Weights};
use crate::error::{Error, Result};
use crate::format::reading::ReadFindings;
use crate::layout::{Dims, Region};
use crate::name_list::{FEW, short_list};
use crate::quantity::count;
use crate::storage::Files;

/// The beginning of the names of layers that several stages of a pipeline use.
pub const TIED_LAYERS: &str = "tied_modules.";

/// A further name of a parameter, and the name under which the parameter is listed.
pub type Tie<'a> = (Cow<'a, str>, Cow<'a, str>);

/// Returns the tied names of all model-parallel ranks. With weights of the module, clones are not tied: each name has its own
/// values.
///
/// # Errors
/// `Malformed` for damaged shapes.
pub fn ties<'a>(jobs: &[Job<'a>], module: &Module<'a>, is_stage3: bool, weights: Weights) -> Result<Vec<Tie<'a>>> {
    // DeepSpeed compares addresses, which are equal for all parameters without elements. At stages 1 and 2, the module shows
    // whether two names have one tensor.
    let is_tie = |(alias, with): &Tie<'a>| {
        match module.get(alias).zip(module.get(with)).filter(|_| !is_stage3) {
            Some((alias, with)) => {
                alias.tensor() == with.tensor() || weights == Weights::Master && is_clone(alias, with)
            }
            // With weights of the module, a tied layer of a pipeline has another name, that of its file.
            None => weights == Weights::Master || !with.starts_with(TIED_LAYERS),
        }
    };
    let mut found = Vec::new();
    for job in jobs {
        found.extend(of_model(&job.model)?.into_iter().filter(is_tie));
    }
    Ok(found)
}

/// Returns whether two tensors can be clones of one tensor.
fn is_clone(first: &StoredValue<'_>, other: &StoredValue<'_>) -> bool {
    let [first, other] = [first, other].map(|stored| stored.fields.view(stored.value));
    first.zip(other).is_some_and(|(first, other)| {
        first.dtype == other.dtype && first.sizes == other.sizes && !first.sizes.contains(&0)
    })
}

/// Returns the tied names in the files of one model-parallel rank. Expert-parallel ranks count their own experts from 0 on,
/// and all of them have the ties of the first one.
fn of_model<'a>(model: &ModelStates<'a>) -> Result<Vec<Tie<'a>>> {
    let mut numbers: HashMap<&str, HashSet<u64>> = HashMap::new();
    let shapes = if model.experts.is_empty() { None } else { model.param_shapes()? };
    for (name, _) in shapes.iter().flatten().flatten() {
        if let Some((prefix, number, _)) = split_expert(name.as_str())
            && let Some((prefix, _)) = model.experts.get_key_value(prefix)
        {
            numbers.entry(prefix).or_default().insert(number);
        }
    }
    let mut found = Vec::new();
    for &(alias, with) in &model.shared {
        let Some((prefix, number, rest)) =
            split_expert(alias).filter(|(prefix, ..)| model.experts.contains_key(prefix))
        else {
            found.push((alias.into(), with.into()));
            continue;
        };
        let own = numbers.get(prefix).map_or(0, |numbers| numbers.len() as u64);
        let of_rank = (0..model.experts[prefix]).filter(|global| own > 0 && global % own == number);
        // Both names are of one expert, or the listed name is that of a parameter outside of experts.
        match split_expert(with) {
            Some((other, with_number, with_rest)) if (other, with_number) == (prefix, number) => {
                found.extend(of_rank.map(|global| {
                    (format!("{prefix}{global}.{rest}").into(), format!("{prefix}{global}.{with_rest}").into())
                }));
            }
            _ => found.extend(of_rank.map(|global| (format!("{prefix}{global}.{rest}").into(), with.into()))),
        }
    }
    Ok(found)
}

/// The master weights of a trained parameter of a pipeline on one tensor-parallel rank, to compare with tensors of the module.
pub struct ShardMasters<'a> {
    /// The name in `param_shapes`.
    pub fqn: &'a Fqn,
    /// The shape of the shard.
    pub shape: &'a Dims,
    /// The vectors that have the master weights, and the position of the parameter in them.
    pub group: &'a FlatGroup<'a>,
    pub placed: &'a Placed,
    /// Boxes of the master weights, each with the box of the shard that has the same elements.
    pub boxes: Vec<[Region; 2]>,
}

impl ShardMasters<'_> {
    /// Returns a box of the master weights.
    fn master<'b>(&'b self, region: &'b Region) -> BoxOfShard<'b> {
        BoxOfShard { group: self.group, placed: self.placed, views: &self.group.masters, region }
    }

    /// Returns whether a tensor of the module has the rounded values of the master weights. The tensor has the shape of the
    /// shard.
    ///
    /// # Errors
    /// `Io`.
    fn has_rounded_values(&self, files: &Files, module: &FlatGroup<'_>) -> Result<bool> {
        for [from, to] in &self.boxes {
            if !is_rounded(files, self.master(from), BoxOfShard::of_tensor(module, to))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the layers in the state dict of one tensor-parallel rank that several stages use, by their names.
///
/// The first stage that uses a tied layer writes a file of it, in which the layer has the number of a layer; `param_shapes`
/// has it under the name of the tie.
pub fn tied_layers<'a, 'b>(
    reading: &ReadFindings<'_>,
    module: &Module<'_>,
    trained: &HashSet<&str>,
    ties: &'b [ShardMasters<'a>],
) -> Result<HashMap<String, &'b ShardMasters<'a>>> {
    let mut by_key: HashMap<&str, Vec<&'b ShardMasters<'a>>> = HashMap::new();
    for tied in ties {
        let key = tied.fqn.as_str().strip_prefix(TIED_LAYERS).and_then(|name| name.split_once('.'));
        if let Some((_, key)) = key {
            by_key.entry(key).or_default().push(tied);
        }
    }
    // For each tie, the layers that have its values.
    let mut found: HashMap<&Fqn, (&'b ShardMasters<'a>, Vec<String>)> = HashMap::new();
    for (name, stored) in module.iter().filter(|(name, _)| !trained.contains(&***name)) {
        let key = name.split_once('.').map_or("", |(_, key)| key);
        for tied in by_key.get(key).into_iter().flatten() {
            let Some(view) = stored.fields.view(stored.value) else { continue };
            if view.sizes != *tied.shape {
                continue;
            }
            // A metadata mirror has no values to compare.
            if !reading.options.holdings.is_empty() {
                return Err(Error::unsupported(
                    format!("{}: only values show which layer is tied", stored.fields.path().display()),
                    "start processes that see all files of SRC, without options::source per-rank",
                ));
            }
            let Some(own) = FlatGroup::of_tensor(tied.fqn.clone(), stored.fields.file, view) else { continue };
            if tied.has_rounded_values(&reading.files, &own)? {
                found.entry(tied.fqn).or_insert_with(|| (tied, Vec::new())).1.push(name.to_string());
            }
        }
    }
    // A frozen layer can have the same values. Then it is not known which of the layers is the tied one, and all are kept.
    let known = found.into_values().filter(|(_, names)| names.len() == 1);
    Ok(known.flat_map(|(tied, names)| names.into_iter().map(move |name| (name, tied))).collect())
}

/// Returns a warning about the names of a pipeline that may be further names of a trained parameter, because they have its rounded
/// values. `shared_params` lists the tied names of one stage only, that of rank 0, and not those of two names in one module.
/// `params` has the trained parameters on one tensor-parallel rank, and `module` is the state dict of this rank.
///
/// # Errors
/// `Io`.
pub fn unrecorded_ties(
    reading: &ReadFindings<'_>,
    jobs: &[Job<'_>],
    module: &Module<'_>,
    params: &[ShardMasters<'_>],
) -> Result<Option<String>> {
    let ties = ties(jobs, module, false, Weights::Master)?;
    let known: HashSet<&str> = (ties.iter().map(|(alias, _)| &**alias))
        .chain(jobs.iter().flat_map(|job| job.model.buffers.iter().copied()))
        .chain(params.iter().map(|param| param.fqn.as_str()))
        .collect();
    let mut by_shape: HashMap<&Dims, Vec<&ShardMasters<'_>>> = HashMap::new();
    for param in params.iter().filter(|param| !param.shape.contains(&0)) {
        by_shape.entry(param.shape).or_default().push(param);
    }
    // The first elements of each parameter, by its name, rounded to the dtype of the module.
    let mut firsts: HashMap<(&Fqn, Dtype), Vec<u64>> = HashMap::new();
    let mut found = Vec::new();
    // A metadata mirror has no values to compare.
    let names = module.iter().filter(|(name, _)| reading.options.holdings.is_empty() && !known.contains(&***name));
    for (name, stored) in names {
        let Some(view) = stored.fields.view(stored.value).filter(|view| view.dtype.is_float()) else { continue };
        let Some(alike) = by_shape.get(&view.sizes) else { continue };
        let Some(own) = FlatGroup::of_tensor((&**name).into(), stored.fields.file, view) else { continue };
        let mut own_first: Option<(&Region, Vec<u64>)> = None;
        for param in alike.iter().filter(|param| param.group.masters[0].dtype != view.dtype) {
            let Some([from, to]) = param.boxes.first() else { continue };
            let first = match firsts.entry((param.fqn, view.dtype)) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(first_values(&reading.files, param.master(from), view.dtype)?),
            };
            let own_first = match &mut own_first {
                Some((region, values)) if *region == to => values,
                other => {
                    let own = BoxOfShard::of_tensor(&own, to);
                    &mut other.insert((to, first_values(&reading.files, own, view.dtype)?)).1
                }
            };
            if first == own_first && param.has_rounded_values(&reading.files, &own)? {
                found.push(format!("{name} of {}", param.fqn));
                break;
            }
        }
    }
    let first = jobs[0].model.first().path();
    Ok((!found.is_empty()).then(|| {
        format!(
            "{}: {} of the pipeline {} the rounded values of a trained parameter ({}), and DeepSpeed does not list all tied parameters of a \
             pipeline: leave the names that are tied, and not frozen, out with options::exclude, and tie them in the new job",
            first.parent().unwrap_or(first).display(),
            count(found.len(), "name"),
            if found.len() == 1 { "has" } else { "have" },
            short_list(&found, FEW)
        )
    }))
}
