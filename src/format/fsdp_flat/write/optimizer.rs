//! Plans optimizer state as `optimizer.state_dict()` of an FSDP1 job has it on each rank.
//!
//! Each parameter has a number (its parameter id), counted from 0 in the order of the parameter groups. With
//! `use_orig_params` each parameter has its own state, which is as long as the slice of the parameter in the rank's
//! shard. If this slice is empty, the rank has no state for the parameter. Without `use_orig_params`, the optimizer
//! updates flat parameters instead of the parameters in them: state tensors with the shape of their parameter are
//! concatenated like the flat parameter, and any other state value must be equal for all parameters of the unit.
//! Lengths count elements.
//!
//! Source: `Optimizer.state_dict` in `torch/optim/optimizer.py`, `_flatten_optim_state` in
//! `torch/distributed/fsdp/_optim_utils.py`.

use super::groups::{GroupMember, SourceOptimizer, unit_parameters};
use super::params::ParameterNames;
use super::plan::{FlatPlan, Padding, ParameterIndex, StorageContent, TensorRole, TrainedParameter};
use crate::catalog::optimizer::{GROUPS, PARAM_NAMES, PARAMS, STATE};
use crate::catalog::path::key_text;
use crate::catalog::{Dict, Path, TensorId, Value};
use crate::error::Result;

/// Returns whether a dict is the state dict of an optimizer. DCP drops an empty `state`, so it may be absent.
pub fn is_optimizer(dict: &Dict) -> bool {
    let Some(Value::List(groups)) = dict.get(GROUPS) else { return false };
    let is_group = |group: &Value| group.as_dict().is_some_and(|options| options.get(PARAMS).is_some());
    groups.iter().all(is_group) && matches!(dict.get(STATE), None | Some(Value::Dict(_)))
}

/// Adds an optimizer to the plan, and returns its state dict for the target. The tensors in this dict are indices of
/// [`FlatPlan::tensors`].
pub fn plan(dict: &Dict, path: &Path, names: &ParameterNames<'_>, plan: &mut FlatPlan<'_>) -> Result<Value> {
    let source = SourceOptimizer::read(dict, path, names, plan)?;
    let groups = source.target_groups(names, plan)?;
    let numbered = groups.iter().map(|(_, members)| members.iter().map(|member| member.name(plan)).collect());
    let numbered = numbered.collect();
    plan.numbered.get_or_insert(numbered);
    let mut states = Vec::new();
    let mut written = Vec::new();
    let mut next = 0;
    for (options, members) in groups {
        let first = next;
        for member in &members {
            let state = match member {
                GroupMember::Parameter(at) => source.parameter_state(*at, plan)?,
                GroupMember::Unit(unit) => source.unit_state(*unit, plan)?,
                GroupMember::Outside(index) => source.outside_state(*index, plan),
            };
            let state = state.map(|entries| Value::Dict(Dict { entries, ..Dict::default() }));
            states.extend(state.map(|state| (Value::Int(next), state)));
            next += 1;
        }
        written.push(write_group(options, first..next, &members, plan));
    }
    // PyTorch writes `state` before `param_groups`.
    let states = Value::Dict(Dict { entries: states, ..Dict::default() });
    let mut entries = vec![(Value::Str(STATE.into()), states), (Value::Str(GROUPS.into()), Value::List(written))];
    let others = dict.entries.iter().filter(|(key, _)| !matches!(key.as_str(), Some(STATE | GROUPS)));
    entries.extend(others.map(|(key, value)| (key.clone(), plan.replicated_value(value))));
    Ok(Value::Dict(Dict { kind: dict.kind, entries, attributes: None }))
}

fn write_group(
    options: &Dict,
    numbers: std::ops::Range<i64>,
    members: &[GroupMember],
    plan: &mut FlatPlan<'_>,
) -> Value {
    let names: Vec<Value> = members.iter().map(|member| Value::Str((&member.name(plan)).into())).collect();
    let entries = options.entries.iter().map(|(key, value)| {
        let value = match key.as_str() {
            Some(PARAMS) => Value::List(numbers.clone().map(Value::Int).collect()),
            Some(PARAM_NAMES) => Value::List(names.clone()),
            _ => plan.replicated_value(value),
        };
        (key.clone(), value)
    });
    Value::Dict(Dict { kind: options.kind, entries: entries.collect(), attributes: None })
}

impl SourceOptimizer<'_> {
    fn parameter_state(&self, at: ParameterIndex, plan: &mut FlatPlan<'_>) -> Result<Option<Vec<(Value, Value)>>> {
        let Some(state) = self.states.get(&TrainedParameter::InUnit(at)) else { return Ok(None) };
        let entries = state.entries.iter().map(|(key, value)| {
            let value = match self.classify(at, key, value, plan)? {
                StateKind::Object => value.clone(),
                StateKind::ParamShaped(id) if plan.is_sharded() => {
                    let dtype = plan.source.tensor(id).dtype;
                    let storage = plan.add_storage(dtype, StorageContent::Slice { at, tensor: id });
                    plan.add_tensor(storage, TensorRole::Slice(at))
                }
                StateKind::ParamShaped(id) => replicated_tensor(id, TensorRole::Whole, plan),
                StateKind::Scalar(id) if plan.is_sharded() => {
                    replicated_tensor(id, TensorRole::WithParameter(at), plan)
                }
                StateKind::Scalar(id) => replicated_tensor(id, TensorRole::Whole, plan),
            };
            Ok((key.clone(), value))
        });
        Ok(Some(entries.collect::<Result<_>>()?))
    }

    /// Returns the state of a parameter outside all units. Every rank stores this state whole.
    fn outside_state(&self, index: usize, plan: &mut FlatPlan<'_>) -> Option<Vec<(Value, Value)>> {
        let state = self.states.get(&TrainedParameter::Outside(index))?;
        Some(state.entries.iter().map(|(key, value)| (key.clone(), plan.replicated_value(value))).collect())
    }

    fn unit_state(&self, unit: usize, plan: &mut FlatPlan<'_>) -> Result<Option<Vec<(Value, Value)>>> {
        let params = unit_parameters(unit, plan);
        let stored: Vec<(ParameterIndex, &Dict)> =
            params.iter().filter_map(|at| Some((*at, *self.states.get(&TrainedParameter::InUnit(*at))?))).collect();
        let Some((first, state)) = stored.first().copied() else { return Ok(None) };
        let differ = |plan: &FlatPlan<'_>, other: ParameterIndex, what: &str| {
            let (own, other) = (&plan.param(first).fqn, &plan.param(other).fqn);
            self.unsupported_error(
                format!("`{own}` and `{other}` are in one flat parameter, but {what}"),
                "leave out the parameters together with their state, or leave the optimizer out; `flatten` can keep the state \
                 of each parameter (options::use_orig_params)",
            )
        };
        if let Some(other) = params.iter().find(|at| !self.states.contains_key(&TrainedParameter::InUnit(**at))) {
            return Err(differ(plan, *other, "only one of them has state"));
        }
        if let Some((other, _)) = stored.iter().find(|(_, other)| !same_keys(state, other)) {
            return Err(differ(plan, *other, "they have different state entries"));
        }
        let mut entries = Vec::with_capacity(state.entries.len());
        for (key, value) in &state.entries {
            let name = key_text(key);
            let kind = self.classify(first, key, value, plan)?;
            let mut tensors = Vec::with_capacity(stored.len());
            for (at, other) in &stored {
                let other = other.entries.iter().find(|(own, _)| own == key).map_or(&Value::None, |(_, value)| value);
                match (kind, self.classify(*at, key, other, plan)?) {
                    (StateKind::Object, StateKind::Object) if value == other => {}
                    (StateKind::Scalar(kept), StateKind::Scalar(id)) if same_dtype(plan, kept, id) => {
                        if kept != id {
                            plan.merged.push((kept, id));
                        }
                    }
                    (StateKind::ParamShaped(kept), StateKind::ParamShaped(id)) if same_dtype(plan, kept, id) => {
                        tensors.push(id);
                    }
                    _ => return Err(differ(plan, *at, &format!("they differ in `{name}`"))),
                }
            }
            let value = match kind {
                StateKind::Object => value.clone(),
                StateKind::Scalar(id) => replicated_tensor(id, TensorRole::Whole, plan),
                StateKind::ParamShaped(id) => {
                    let dtype = plan.source.tensor(id).dtype;
                    let storage =
                        plan.add_storage(dtype, StorageContent::Shard { unit, tensors, padding: Padding::Zero });
                    plan.add_tensor(storage, TensorRole::State)
                }
            };
            entries.push((key.clone(), value));
        }
        Ok(Some(entries))
    }

    fn classify(&self, at: ParameterIndex, key: &Value, value: &Value, plan: &FlatPlan<'_>) -> Result<StateKind> {
        let shape = match value {
            Value::Tensor(id) => {
                let entry = plan.source.tensor(*id);
                if entry.shape == plan.param(at).shape {
                    return Ok(StateKind::ParamShaped(*id));
                }
                if entry.shape.is_empty() {
                    return Ok(StateKind::Scalar(*id));
                }
                format!("a tensor of shape {:?}", entry.shape.as_slice())
            }
            value if value.contains_tensor() => format!("a {} of tensors", value.type_name()),
            _ => return Ok(StateKind::Object),
        };
        let param = plan.param(at);
        Err(self.unsupported_error(
            format!(
                "`{}` of `{}` is {shape}, but the parameter has shape {:?}",
                key_text(key),
                param.fqn,
                param.shape.as_slice()
            ),
            "leave this optimizer out: FSDP1 flattens only state that has the shape of its parameter",
        ))
    }
}

/// The kind of one entry of optimizer state.
#[derive(Clone, Copy)]
enum StateKind {
    /// A tensor with the shape of its parameter, such as `exp_avg`.
    ParamShaped(TensorId),
    Scalar(TensorId),
    Object,
}

fn replicated_tensor(id: TensorId, role: TensorRole, plan: &mut FlatPlan<'_>) -> Value {
    let storage = plan.replicated_storage(id);
    plan.add_tensor(storage, role)
}

fn same_dtype(plan: &FlatPlan<'_>, left: TensorId, right: TensorId) -> bool {
    plan.source.tensor(left).dtype == plan.source.tensor(right).dtype
}

fn same_keys(left: &Dict, right: &Dict) -> bool {
    let has = |key: &Value| right.entries.iter().any(|(other, _)| other == key);
    left.entries.len() == right.entries.len() && left.entries.iter().all(|(key, _)| has(key))
}
