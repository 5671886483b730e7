//! Plans gradients as an FSDP1 job has them on each rank: `parameter.grad` of the wrapped model's `named_parameters()`.
//!
//! With `use_orig_params` there is one gradient per parameter. It is as long as the slice of the parameter in the
//! rank's shard, and is absent if this slice is empty. Without `use_orig_params`, there is one gradient per flat
//! parameter. It has the length of the rank's shard, including padding (zeros). Lengths count elements.
//!
//! Source: `FlatParamHandle.prepare_gradient_for_optim`, `_use_sharded_grad_views` in
//! `torch/distributed/fsdp/_flat_param.py`.

use indexmap::IndexMap;

use super::groups::unit_parameters;
use super::metadata::wrapped_name;
use super::params::ParameterNames;
use super::plan::{FlatPlan, Padding, ParameterIndex, StorageContent, TensorRole};
use crate::catalog::path::{StateLeaf, leaves};
use crate::catalog::{Dict, Path, TensorId, Value};
use crate::error::{Error, Result};

/// Adds the gradients to the plan, and returns the dict of gradients for the target. The tensors in this dict are
/// indices of [`FlatPlan::tensors`].
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
                    return Err(unsupported_error(
                        path,
                        &format!("`{name}` has the shape {own:?}, but its parameter has {shape:?}"),
                    ));
                }
                // A tied parameter has one gradient. The source may store it under any name of the parameter.
                match gradients.get(&at) {
                    Some(kept) if *kept != id => plan.merged.push((*kept, id)),
                    Some(_) => {}
                    None => drop(gradients.insert(at, id)),
                }
            }
            (StateLeaf::Tensor(id), None) => {
                entries.push((Value::Str(name.into()), plan.replicated_value(&Value::Tensor(id))));
            }
            (StateLeaf::Object(value), _) => entries.push((Value::Str(name.into()), plan.replicated_value(value))),
        }
    }
    let layout = plan.layout;
    let own = if layout.use_orig_params {
        let own = gradients.iter().map(|(at, id)| {
            let item = if plan.is_sharded() {
                let dtype = plan.source.tensor(*id).dtype;
                let storage = plan.add_storage(dtype, StorageContent::Slice { at: *at, tensor: *id });
                plan.add_tensor(storage, TensorRole::Gradient(*at))
            } else {
                plan.replicated_value(&Value::Tensor(*id))
            };
            (Value::Str(wrapped_name(plan.param(*at).fqn.as_str(), layout).into()), item)
        });
        own.collect()
    } else {
        unit_gradients(&gradients, path, plan)?
    };
    let entries = own.into_iter().chain(entries).collect();
    Ok(Value::Dict(Dict { kind: dict.kind, entries, attributes: None }))
}

/// Adds one gradient for each flat parameter to the plan (without `use_orig_params`).
fn unit_gradients(
    gradients: &IndexMap<ParameterIndex, TensorId>,
    path: &Path,
    plan: &mut FlatPlan<'_>,
) -> Result<Vec<(Value, Value)>> {
    let mut entries = Vec::new();
    for (unit, known) in plan.layout.units.iter().enumerate() {
        let params = unit_parameters(unit, plan);
        let tensors: Vec<TensorId> = params.iter().filter_map(|at| gradients.get(at).copied()).collect();
        let Some(first) = tensors.first() else { continue };
        let dtype = plan.source.tensor(*first).dtype;
        if let Some(lacking) = params.iter().find(|at| !gradients.contains_key(*at)) {
            let fqn = &plan.param(*lacking).fqn;
            return Err(unsupported_error(
                path,
                &format!("{} needs a gradient for each of its parameters, but `{fqn}` has none", known.describe()),
            ));
        }
        if tensors.iter().any(|id| plan.source.tensor(*id).dtype != dtype) {
            return Err(unsupported_error(
                path,
                &format!(
                    "{} needs gradients of one dtype, but the gradients of its parameters differ in dtype",
                    known.describe()
                ),
            ));
        }
        let storage = plan.add_storage(dtype, StorageContent::Shard { unit, tensors, padding: Padding::Zero });
        let name = wrapped_name(known.key().as_str(), plan.layout);
        entries.push((Value::Str(name.into()), plan.add_tensor(storage, TensorRole::State)));
    }
    Ok(entries)
}

fn unsupported_error(path: &Path, what: &str) -> Error {
    // An empty path means that the gradients are a series of their own, which is called `grads`.
    let at = if path.0.is_empty() { String::from("grads") } else { path.to_string() };
    Error::unsupported(format!("{at}: {what}"), format!("leave the gradients out with options::exclude {at}"))
}
