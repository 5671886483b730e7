//! Gradients as a job of FSDP1 has them on each rank: `parameter.grad` of the wrapped model's `named_parameters()`.
//!
//! With `use_orig_params` a gradient is as long as what the rank holds of its parameter, and not there where that is
//! nothing. Without, a flat parameter has one, as long as a shard, with zeros where padding is.
//!
//! Source: `FlatParamHandle.prepare_gradient_for_optim`, `_use_sharded_grad_views` in
//! `torch/distributed/fsdp/_flat_param.py`.

use indexmap::IndexMap;

use super::groups::{GroupMember, of_member};
use super::metadata::wrapped_name;
use super::params::ParameterNames;
use super::plan::{FlatPlan, Padding, ParameterIndex, StorageContent, TensorRole};
use crate::catalog::path::{StateLeaf, leaves};
use crate::catalog::{Dict, Path, TensorId, Value};
use crate::error::{Error, Result};

/// The dict, with numbers of items for tensors.
pub fn plan(dict: &Dict, path: &Path, names: &ParameterNames<'_>, plan: &mut FlatPlan<'_>) -> Result<Value> {
    let mut gradients: IndexMap<ParameterIndex, TensorId> = IndexMap::new();
    let mut entries = Vec::new();
    for (key, leaf) in leaves(&Value::Dict(dict.clone())) {
        let name = key.to_string();
        match (leaf, names.find(&name)) {
            (StateLeaf::Tensor(id), Some(at)) => {
                let (own, param) = (&plan.source.tensor(id).shape, plan.param(at));
                if *own != param.shape {
                    let (own, shape) = (own.as_slice(), param.shape.as_slice());
                    return Err(unfit(path, &format!("{name} has the shape {own:?}, its parameter {shape:?}")));
                }
                // A tied parameter has one, under whichever of its names.
                match gradients.get(&at) {
                    Some(kept) if *kept != id => plan.merged.push((*kept, id)),
                    Some(_) => {}
                    None => drop(gradients.insert(at, id)),
                }
            }
            (StateLeaf::Tensor(id), None) => {
                entries.push((Value::Str(name.into()), plan.whole_value(&Value::Tensor(id))))
            }
            (StateLeaf::Object(value), _) => entries.push((Value::Str(name.into()), plan.whole_value(value))),
        }
    }
    let layout = plan.layout;
    let own = if layout.use_orig_params {
        let own = gradients.iter().map(|(at, id)| {
            let item = if plan.is_sharded() {
                let dtype = plan.source.tensor(*id).dtype;
                let storage = plan.storage(dtype, StorageContent::Slice { at: *at, tensor: *id });
                plan.item(storage, TensorRole::Gradient(*at))
            } else {
                plan.whole_value(&Value::Tensor(*id))
            };
            (Value::Str(wrapped_name(plan.param(*at).fqn.as_str(), layout).into()), item)
        });
        own.collect()
    } else {
        of_units(&gradients, path, plan)?
    };
    let entries = own.into_iter().chain(entries).collect();
    Ok(Value::Dict(Dict { kind: dict.kind, entries, attributes: None }))
}

/// The gradients of flat parameters, of all that they hold.
fn of_units(
    gradients: &IndexMap<ParameterIndex, TensorId>,
    path: &Path,
    plan: &mut FlatPlan<'_>,
) -> Result<Vec<(Value, Value)>> {
    let mut entries = Vec::new();
    for (unit, known) in plan.layout.units.iter().enumerate() {
        let params = of_member(GroupMember::Unit(unit), plan);
        let tensors: Vec<TensorId> = params.iter().filter_map(|at| gradients.get(at).copied()).collect();
        let Some(first) = tensors.first() else { continue };
        let dtype = plan.source.tensor(*first).dtype;
        if let Some(lacking) = params.iter().find(|at| !gradients.contains_key(*at)) {
            let fqn = &plan.param(*lacking).fqn;
            return Err(unfit(path, &format!("{} has one gradient, and there is none of {fqn}", known.describe())));
        }
        if tensors.iter().any(|id| plan.source.tensor(*id).dtype != dtype) {
            return Err(unfit(path, &format!("{} has one gradient, and theirs differ in dtype", known.describe())));
        }
        let storage = plan.storage(dtype, StorageContent::Shard { unit, tensors, padding: Padding::Zero });
        let name = wrapped_name(known.key().as_str(), plan.layout);
        entries.push((Value::Str(name.into()), plan.item(storage, TensorRole::State)));
    }
    Ok(entries)
}

fn unfit(path: &Path, what: &str) -> Error {
    // Of a series of its own.
    let at = if path.0.is_empty() { String::from("grads") } else { path.to_string() };
    Error::unsupported(format!("{at}: {what}"), format!("options::exclude {at} leaves gradients out"))
}
