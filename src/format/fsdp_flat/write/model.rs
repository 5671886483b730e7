//! Plans the dict of the model in the file of a rank.
//!
//! Flat parameters have the positions that PyTorch's traversal of the modules gives them. Without `use_orig_params`,
//! the dict has no other parameters, and a flat parameter is the first entry of its module. With `use_orig_params`, a
//! flat parameter comes after all entries of its module and of the modules inside this module:
//!
//! ```text
//! without   _flat_param, freqs, layers.0._flat_param, layers.0.scale
//! with      freqs, emb.weight, layers.0.scale, layers.0.w, layers.0._flat_param, head.weight, _flat_param
//! ```
//!
//! If the layout does not shard parameters, there are no flat parameters, and every file has the dict of the full
//! model.

use std::collections::{HashMap, HashSet};

use super::metadata;
use super::params::{self, ParameterNames, UnitTensors};
use super::plan::{FlatPlan, Padding, ParameterIndex, StorageContent, TensorRole};
use crate::catalog::modules::is_within;
use crate::catalog::path::{StateLeaf, leaves};
use crate::catalog::{Dict, DictKind, Fqn, TensorId, Value};
use crate::error::{Error, Result};

/// The kind of an entry in the model's dict.
enum ModelEntry<'v> {
    Parameter(ParameterIndex),
    Other(TensorId),
    Object(&'v Value),
}

/// Adds the model to the plan, and returns the dict of the model for the target. The tensors in this dict are indices
/// of [`FlatPlan::tensors`].
pub fn plan(
    model: &Dict,
    names: &ParameterNames<'_>,
    plan: &mut FlatPlan<'_>,
    notes: &mut Vec<String>,
) -> Result<Dict> {
    let mut entries: Vec<(String, ModelEntry<'_>)> = Vec::new();
    let mut tensors: HashMap<String, TensorId> = HashMap::new();
    let value = Value::Dict(model.clone());
    for (path, leaf) in leaves(&value) {
        let name = path.to_string();
        let entry = match leaf {
            StateLeaf::Object(value) => ModelEntry::Object(value),
            StateLeaf::Tensor(id) => {
                tensors.insert(name.clone(), id);
                names.find(&name).map_or(ModelEntry::Other(id), ModelEntry::Parameter)
            }
        };
        entries.push((name, entry));
    }
    let params::FoundParameters { units, ties } = params::find(plan.source, plan.layout, names, &tensors)?;
    plan.merged.extend(ties);
    plan.dtypes = Some(units.iter().map(|unit| unit.dtype).collect());
    add_missing_names(&mut entries, plan, names);
    notes.extend(buffers_note(&entries));

    let flat_params = FlatParameters::new(plan, units)?;
    let (before, after) = flat_params.flat_positions(&entries, plan);
    let mut written = Vec::new();
    for (index, (name, entry)) in entries.into_iter().enumerate() {
        written.extend(before.get(&index).into_iter().flatten().map(|&unit| flat_params.flat(unit, plan)));
        match entry {
            ModelEntry::Parameter(at) => {
                written.extend(flat_params.parameter(at, plan).map(|value| (Value::Str(name.into()), value)));
            }
            ModelEntry::Other(id) => written.push((Value::Str(name.into()), plan.replicated_value(&Value::Tensor(id)))),
            ModelEntry::Object(value) => written.push((Value::Str(name.into()), plan.replicated_value(value))),
        }
        written.extend(after.get(&index).into_iter().flatten().map(|&unit| flat_params.flat(unit, plan)));
    }
    let attributes =
        model.attributes.as_deref().and_then(|own| metadata::wrap_attributes(own, plan.layout)).map(Box::new);
    Ok(Dict { kind: DictKind::Ordered, entries: written, attributes })
}

/// Adds an entry for each missing name of a tied parameter, after the last parameter of the unit. Names can be missing,
/// because the source may have a tied parameter under only some of its names.
fn add_missing_names(entries: &mut Vec<(String, ModelEntry<'_>)>, plan: &FlatPlan<'_>, names: &ParameterNames<'_>) {
    let present: HashSet<String> = entries.iter().map(|(name, _)| name.clone()).collect();
    for (index, unit) in plan.layout.units.iter().enumerate() {
        let all = unit.params.iter().map(|param| &param.fqn).chain(unit.shared.iter().map(|shared| &shared.fqn));
        let missing: Vec<&str> = all.map(Fqn::as_str).filter(|fqn| !present.contains(*fqn)).collect();
        if missing.is_empty() {
            continue;
        }
        let is_own =
            |(_, entry): &(String, ModelEntry<'_>)| matches!(entry, ModelEntry::Parameter(at) if at.unit == index);
        let end = entries.iter().rposition(is_own).map_or(entries.len(), |last| last + 1);
        let added =
            missing.into_iter().filter_map(|fqn| Some((fqn.to_owned(), ModelEntry::Parameter(names.find(fqn)?))));
        entries.splice(end..end, added.collect::<Vec<_>>());
    }
}

/// Returns a note about tensors that are not in the layout. Every rank stores such tensors whole, like buffers.
fn buffers_note(entries: &[(String, ModelEntry<'_>)]) -> Option<String> {
    let others = entries.iter().filter(|(_, entry)| matches!(entry, ModelEntry::Other(_))).count();
    let what = if others == 1 {
        "tensor is not a parameter of the flat layout, so every rank stores it whole"
    } else {
        "tensors are not parameters of the flat layout, so every rank stores them whole"
    };
    (others > 0).then(|| format!("{others} {what}"))
}

/// For each unit, its storages: one storage with the rank's shard, or one storage for each parameter.
struct FlatParameters {
    units: Vec<UnitStorage>,
}

/// The storages of a unit's parameters.
enum UnitStorage {
    /// One storage with the rank's shard of the flat parameter. `empty` is the storage of parameters that have no
    /// element in the rank's shard.
    Shard { storage: usize, empty: usize },
    /// One storage per parameter, which holds the full parameter on every rank.
    Whole(Vec<usize>),
}

impl FlatParameters {
    fn new(plan: &mut FlatPlan<'_>, units: Vec<UnitTensors>) -> Result<Self> {
        let layout = plan.layout;
        let mut storages = Vec::with_capacity(units.len());
        for (unit, UnitTensors { dtype, tensors }) in units.into_iter().enumerate() {
            if !plan.is_sharded() {
                storages.push(UnitStorage::Whole(tensors.into_iter().map(|id| plan.replicated_storage(id)).collect()));
                continue;
            }
            if !tensors.is_empty() && plan.flat_params[unit].total() == 0 {
                return Err(Error::unsupported(
                    format!("{}: all parameters of this unit are empty", layout.units[unit].describe()),
                    "move them into the enclosing unit: FSDP1 cannot shard a unit without elements",
                ));
            }
            let storage = plan.add_storage(dtype, StorageContent::Shard { unit, tensors, padding: Padding::Parameter });
            let empty = plan.add_storage(dtype, StorageContent::Nothing);
            storages.push(UnitStorage::Shard { storage, empty });
        }
        Ok(Self { units: storages })
    }

    /// Returns the positions of flat parameters among the entries: the units whose flat parameter comes before each
    /// entry, and the units whose flat parameter comes after each entry.
    fn flat_positions(
        &self,
        entries: &[(String, ModelEntry<'_>)],
        plan: &FlatPlan<'_>,
    ) -> (UnitsByEntry, UnitsByEntry) {
        let (mut before, mut after) = (UnitsByEntry::new(), UnitsByEntry::new());
        if entries.is_empty() || !plan.is_sharded() {
            return (before, after);
        }
        let layout = plan.layout;
        let mut order: Vec<usize> =
            (0..self.units.len()).filter(|&unit| !layout.units[unit].params.is_empty()).collect();
        // A module has a shorter path than the modules in it, so outer units come first.
        order.sort_by_key(|&unit| layout.units[unit].module.len());
        let below = |unit: usize, name: &str| is_within(name, &layout.units[unit].module);
        if layout.use_orig_params {
            for unit in order.into_iter().rev() {
                let last = entries.iter().rposition(|(name, _)| below(unit, name));
                after.entry(last.unwrap_or(entries.len() - 1)).or_default().push(unit);
            }
        } else {
            for unit in order {
                match entries.iter().position(|(name, _)| below(unit, name)) {
                    Some(first) => before.entry(first).or_default().push(unit),
                    None => after.entry(entries.len() - 1).or_default().push(unit),
                }
            }
        }
        (before, after)
    }

    fn flat(&self, unit: usize, plan: &mut FlatPlan<'_>) -> (Value, Value) {
        let UnitStorage::Shard { storage, .. } = self.units[unit] else {
            unreachable!("only shards have a place");
        };
        (Value::Str((&plan.layout.units[unit].key()).into()), plan.add_tensor(storage, TensorRole::Flat))
    }

    /// Returns the planned tensor for a parameter; `None` if the state dict has no entry for the parameter, but only
    /// for its flat parameter.
    fn parameter(&self, at: ParameterIndex, plan: &mut FlatPlan<'_>) -> Option<Value> {
        match &self.units[at.unit] {
            UnitStorage::Whole(storages) => Some(plan.add_tensor(storages[at.param], TensorRole::Whole)),
            UnitStorage::Shard { storage, empty } if plan.layout.use_orig_params => {
                Some(plan.add_tensor(*storage, TensorRole::View { at, empty: *empty }))
            }
            UnitStorage::Shard { .. } => None,
        }
    }
}

/// A map from the index of an entry to the units whose flat parameters come directly before, or directly after, this
/// entry.
type UnitsByEntry = HashMap<usize, Vec<usize>>;
