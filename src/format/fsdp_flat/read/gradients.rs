//! Converts gradients of flat parameters to gradients with the names and shapes of the parameters.
//!
//! A job saves the gradients as `{name: parameter.grad}` of the wrapped model's `named_parameters()`. Without
//! `use_orig_params` there is one gradient per flat parameter. The gradient has the length of the rank's shard,
//! including padding (zeros). With `use_orig_params` there is one gradient per parameter. The gradient is as long as
//! the slice of the parameter in the rank's shard, and is `None` if this slice is empty. In both cases the gradients
//! have the form of optimizer state, so the functions for optimizer state convert them. Unit of lengths: elements.
//!
//! Source: `FlatParamHandle.prepare_gradient_for_optim`, `_use_sharded_grad_views` in
//! `torch/distributed/fsdp/_flat_param.py`.

use std::collections::HashMap;
use std::path::Path as FilePath;

use indexmap::IndexMap;

use super::SeriesFiles;
use super::optimizer::{ParameterSlot, RankUnflattener, parameter_slots};
use super::survey::visit_dicts;
use super::unflatten::{UnitShard, flat_parameters};
use crate::catalog::flat::{FlatLayout, flat_module};
use crate::catalog::state_dict::GRADIENTS;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Dict, Dtype, Fqn, Key, Path, TensorId, Value};
use crate::error::Result;
use crate::format::torch::RankFile;
use crate::format::torch::TensorNode;
use crate::format::torch::reader::ArchiveContents;

/// Returns the paths of dicts that may hold gradients of flat parameters: the key of the dict is a usual name for
/// gradients, and the dict contains 1-d tensors.
pub fn find(series: &SeriesFiles) -> Vec<Path> {
    let mut paths: Vec<Path> = Vec::new();
    for file in &series.files {
        visit_dicts(&file.contents.value, &Path::default(), &mut |path, dict| {
            let name = match path.0.last() {
                Some(Key::Name(name)) => name,
                None => series.name.as_str(),
                Some(Key::Index(_)) => return,
            };
            let is_flat = |value: &Value| matches!(plain_tensor(&file.contents, value), Some((_, _, 1)));
            if GRADIENTS.contains(&name) && !paths.contains(path) && dict.entries.iter().any(|(_, v)| is_flat(v)) {
                paths.push(path.clone());
            }
        });
    }
    paths
}

/// Returns the id, the dtype and the number of dims of a plain tensor; `None` for any other value.
fn plain_tensor(contents: &ArchiveContents, value: &Value) -> Option<(TensorId, Dtype, usize)> {
    let Value::Tensor(id) = value else { return None };
    match &contents.tensors[id.0 as usize] {
        TensorNode::Plain(view) => Some((*id, view.dtype, view.sizes.len())),
        _ => None,
    }
}

/// Replaces gradients of flat parameters by gradients of parameters, in the files of all ranks. `document` is the file
/// of the flat layout, which errors name; `None` if the layout comes from the checkpoint.
///
/// # Errors
/// `Malformed` for a gradient of an unexpected size.
pub fn unflatten(files: &mut [RankFile], at: &Path, layout: &FlatLayout, document: Option<&FilePath>) -> Result<()> {
    let slots = parameter_slots(layout);
    let names = GradientNames { layout, slots: &slots };
    let Some(known) = names.known_gradients(files, at) else { return Ok(()) };
    let flat_params = flat_parameters(layout);
    for file in files {
        let Some(rank) = file.rank else { continue };
        let unflattener = RankUnflattener::new(layout, &flat_params, &slots, rank, &file.path, document);
        let Some(Value::Dict(dict)) = at.find_mut(&mut file.contents.value) else { continue };
        let stored = std::mem::take(dict);
        let entries = names.entries(&stored, &known, &unflattener, &mut file.contents)?;
        if let Some(Value::Dict(dict)) = at.find_mut(&mut file.contents.value) {
            *dict = Dict { entries, ..stored };
        }
    }
    Ok(())
}

/// Maps the keys of a dict of gradients to parameters and flat parameters of the layout.
struct GradientNames<'a> {
    layout: &'a FlatLayout,
    slots: &'a HashMap<Fqn, ParameterSlot>,
}

impl GradientNames<'_> {
    /// Returns the flat parameter that a key names, or with `use_orig_params` the parameter that the key names.
    fn find(&self, key: &Value) -> Option<(Fqn, ParameterSlot)> {
        let name = Fqn::from(clean_name(key.as_str()?));
        let slot = self.slots.get(&name).copied();
        let flat = || {
            let module = flat_module(key.as_str()?)?;
            let unit = self.layout.units.iter().position(|unit| unit.module == module)?;
            Some(ParameterSlot::Unit(unit))
        };
        Some((name.clone(), slot.or_else(flat)?))
    }

    /// Returns every name that has a gradient on any rank, with its dtype. Returns `None` if the gradients have the
    /// full shapes of parameters or are ShardedTensors: such gradients are not converted.
    fn known_gradients(&self, files: &[RankFile], at: &Path) -> Option<IndexMap<Fqn, (ParameterSlot, Dtype)>> {
        let mut known = IndexMap::new();
        for file in files {
            let dict = at.find(&file.contents.value).and_then(Value::as_dict);
            for (key, value) in dict.map(|dict| dict.entries.as_slice()).unwrap_or_default() {
                let (Some((name, slot)), Value::Tensor(_)) = (self.find(key), value) else { continue };
                let (_, dtype, dims) = plain_tensor(&file.contents, value)?;
                if dims > 1 && self.layout.shard_group_size > 1 {
                    return None;
                }
                known.entry(name).or_insert((slot, dtype));
            }
        }
        Some(known)
    }

    /// Returns the gradients of one rank by parameter name. If this rank has no gradient for a name that another rank
    /// has, this rank gets an empty tensor. So all ranks have equal lists of names.
    fn entries(
        &self,
        stored: &Dict,
        known: &IndexMap<Fqn, (ParameterSlot, Dtype)>,
        unflattener: &RankUnflattener<'_>,
        contents: &mut ArchiveContents,
    ) -> Result<Vec<(Value, Value)>> {
        let mut own: HashMap<Fqn, &Value> = HashMap::new();
        let mut others = Vec::new();
        for (key, value) in &stored.entries {
            match (self.find(key), value) {
                (Some((name, _)), Value::Tensor(_)) => drop(own.insert(name, value)),
                (Some(_), Value::None) => {}
                _ => others.push((key.clone(), value.clone())),
            }
        }
        let mut entries = Vec::new();
        for (name, (slot, dtype)) in known {
            match (own.get(name), *slot) {
                (Some(value), ParameterSlot::Unit(unit)) => {
                    entries.extend(unflattener.unflatten_unit_state(contents, unit, value)?);
                }
                (Some(value), ParameterSlot::Param(unit, param)) => {
                    entries.push(unflattener.unflatten_param_state(contents, unit, param, value)?);
                }
                (None, ParameterSlot::Unit(unit)) => {
                    let UnitShard { unit: params, .. } = unflattener.unit_shard(unit);
                    let nothing = unflattener.unit_shard(unit).parameters(*dtype, None);
                    entries.extend(
                        params.params.iter().zip(nothing).map(|(param, found)| {
                            (Value::Str((&param.fqn).into()), Value::Tensor(contents.push(found)))
                        }),
                    );
                }
                (None, ParameterSlot::Param(unit, param)) => {
                    let unit_shard = unflattener.unit_shard(unit);
                    let known = &unit_shard.unit.params[param];
                    let found = unit_shard.sharded(known, *dtype, Vec::new());
                    entries.push((Value::Str((&known.fqn).into()), Value::Tensor(contents.push(found))));
                }
            }
        }
        entries.extend(others);
        Ok(entries)
    }
}
