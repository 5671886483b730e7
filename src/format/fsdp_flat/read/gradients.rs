//! Gradients of flat parameters, by the names and in the shapes of parameters.
//!
//! A job keeps them as `{name: parameter.grad}` of the wrapped model's `named_parameters()`. Without `use_orig_params`
//! that is a flat parameter's: as long as a shard, with the zeros behind it. With it, a parameter's: what the rank holds
//! of that, and `None` where it holds nothing. Both are as an optimizer has state of them.
//!
//! Source: `FlatParamHandle.prepare_gradient_for_optim`, `_use_sharded_grad_views` in
//! `torch/distributed/fsdp/_flat_param.py`.

use std::collections::HashMap;

use indexmap::IndexMap;

use super::SeriesFiles;
use super::optimizer::{OneRank, ParameterSlot, places};
use super::survey::{flat_module, visit_dicts};
use super::unflatten::{UnitShard, flat_parameters};
use crate::catalog::flat::FlatLayout;
use crate::catalog::model::GRADIENTS;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Dict, Dtype, Fqn, Key, Path, TensorId, Value};
use crate::error::Result;
use crate::format::torch::TensorNode;
use crate::format::torch::ranks::RankFile;
use crate::format::torch::reader::ArchiveContents;

/// Where gradients are, that may be of flat parameters: dicts called so, with 1-d tensors in them.
#[must_use]
pub fn find(series: &SeriesFiles) -> Vec<Path> {
    let mut paths: Vec<Path> = Vec::new();
    for file in &series.files {
        visit_dicts(&file.contents.value, &Path::default(), &mut |path, dict| {
            let name = match path.0.last() {
                Some(Key::Name(name)) => name,
                None => series.name.as_str(),
                Some(Key::Index(_)) => return,
            };
            let is_flat = |value: &Value| matches!(tensor(&file.contents, value), Some((_, _, 1)));
            if GRADIENTS.contains(&name) && !paths.contains(path) && dict.entries.iter().any(|(_, v)| is_flat(v)) {
                paths.push(path.clone());
            }
        });
    }
    paths
}

/// A plain tensor, with its number of dims.
fn tensor(contents: &ArchiveContents, value: &Value) -> Option<(TensorId, Dtype, usize)> {
    let Value::Tensor(id) = value else { return None };
    match &contents.tensors[id.0 as usize] {
        TensorNode::Plain(view) => Some((*id, view.dtype, view.sizes.len())),
        _ => None,
    }
}

/// Put the gradients of parameters in the place of those of flat ones, in the files of all ranks.
///
/// # Errors
/// `Malformed` for a gradient of another size.
pub fn unflatten(files: &mut [RankFile], at: &Path, layout: &FlatLayout) -> Result<()> {
    let places = places(layout);
    let names = GradientNames { layout, places: &places };
    let Some(known) = names.dtypes(files, at) else { return Ok(()) };
    let flats = flat_parameters(layout);
    for file in files {
        let Some(rank) = file.rank else { continue };
        let one = OneRank::new(layout, &flats, &places, rank, &file.path);
        let Some(Value::Dict(dict)) = at.find_mut(&mut file.contents.value) else { continue };
        let stored = std::mem::take(dict);
        let entries = names.entries(&stored, &known, &one, &mut file.contents)?;
        if let Some(Value::Dict(dict)) = at.find_mut(&mut file.contents.value) {
            *dict = Dict { entries, ..stored };
        }
    }
    Ok(())
}

/// What the keys of gradients mean.
struct GradientNames<'a> {
    layout: &'a FlatLayout,
    places: &'a HashMap<Fqn, ParameterSlot>,
}

impl GradientNames<'_> {
    /// The flat parameter, or the parameter beside it, of a key.
    fn find(&self, key: &Value) -> Option<(Fqn, ParameterSlot)> {
        let name = Fqn::from(clean_name(key.as_str()?));
        let place = self.places.get(&name).copied();
        let flat = || {
            let module = flat_module(key.as_str()?)?;
            let unit = self.layout.units.iter().position(|unit| unit.module == module)?;
            Some(ParameterSlot::Unit(unit))
        };
        Some((name.clone(), place.or_else(flat)?))
    }

    /// What any rank has a gradient of, and its dtype; `None` where the gradients are whole, or sharded by themselves.
    fn dtypes(&self, files: &[RankFile], at: &Path) -> Option<IndexMap<Fqn, (ParameterSlot, Dtype)>> {
        let mut known = IndexMap::new();
        for file in files {
            let dict = at.find(&file.contents.value).and_then(Value::as_dict);
            for (key, value) in dict.map(|dict| dict.entries.as_slice()).unwrap_or_default() {
                let (Some((name, place)), Value::Tensor(_)) = (self.find(key), value) else { continue };
                let (_, dtype, dims) = tensor(&file.contents, value)?;
                if dims > 1 && self.layout.shard_group_size > 1 {
                    return None;
                }
                known.entry(name).or_insert((place, dtype));
            }
        }
        Some(known)
    }

    /// The entries by names. What this rank has none of is there, empty, for all ranks to have one order.
    fn entries(
        &self,
        stored: &Dict,
        known: &IndexMap<Fqn, (ParameterSlot, Dtype)>,
        one: &OneRank<'_>,
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
        for (name, (place, dtype)) in known {
            match (own.get(name), *place) {
                (Some(value), ParameterSlot::Unit(unit)) => entries.extend(one.state_of_unit(contents, unit, value)?),
                (Some(value), ParameterSlot::Param(unit, param)) => {
                    entries.push(one.state_of_param(contents, unit, param, value)?);
                }
                (None, ParameterSlot::Unit(unit)) => {
                    let UnitShard { unit: params, .. } = one.held(unit);
                    let nothing = one.held(unit).parameters(*dtype, None);
                    entries.extend(
                        params.params.iter().zip(nothing).map(|(param, found)| {
                            (Value::Str((&param.fqn).into()), Value::Tensor(contents.push(found)))
                        }),
                    );
                }
                (None, ParameterSlot::Param(unit, param)) => {
                    let held = one.held(unit);
                    let known = &held.unit.params[param];
                    let found = held.sharded(known, *dtype, Vec::new());
                    entries.push((Value::Str((&known.fqn).into()), Value::Tensor(contents.push(found))));
                }
            }
        }
        entries.extend(others);
        Ok(entries)
    }
}
