//! The model's dict as a rank's file has it.
//!
//! Flat parameters stand where PyTorch's walk of the modules puts them. Without `use_orig_params` they are the only
//! parameters, and the first that their modules have; with it they are added when a module is done, behind everything
//! below it:
//!
//! ```text
//! without   _flat_param, freqs, layers.0._flat_param, layers.0.scale
//! with      freqs, emb.weight, layers.0.scale, layers.0.w, layers.0._flat_param, head.weight, _flat_param
//! ```
//!
//! Where nothing is sharded there are none, and the dict is that of the whole model.

use std::collections::{HashMap, HashSet};

use super::metadata;
use super::params::{self, ParameterNames, UnitTensors};
use super::plan::{FlatPlan, Padding, ParameterIndex, StorageContent, TensorRole};
use crate::catalog::modules::is_within;
use crate::catalog::path::{StateLeaf, leaves};
use crate::catalog::{Dict, DictKind, Fqn, TensorId, Value};
use crate::error::{Error, Result};

/// What stands under a name.
enum ModelEntry<'v> {
    Parameter(ParameterIndex),
    Other(TensorId),
    Object(&'v Value),
}

/// The dict, with numbers of items for tensors.
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
    notes.extend(tell_others(&entries));

    let flats = FlatParameters::new(plan, units)?;
    let (before, after) = flats.places(&entries, plan);
    let mut written = Vec::new();
    for (index, (name, entry)) in entries.into_iter().enumerate() {
        written.extend(before.get(&index).into_iter().flatten().map(|&unit| flats.flat(unit, plan)));
        match entry {
            ModelEntry::Parameter(at) => {
                written.extend(flats.parameter(at, plan).map(|value| (Value::Str(name.into()), value)));
            }
            ModelEntry::Other(id) => written.push((Value::Str(name.into()), plan.whole_value(&Value::Tensor(id)))),
            ModelEntry::Object(value) => written.push((Value::Str(name.into()), plan.whole_value(value))),
        }
        written.extend(after.get(&index).into_iter().flatten().map(|&unit| flats.flat(unit, plan)));
    }
    let attributes = model.attributes.as_deref().and_then(|own| metadata::wrapped(own, plan.layout)).map(Box::new);
    Ok(Dict { kind: DictKind::Ordered, entries: written, attributes })
}

/// Names of tied parameters that the source left out come behind the others of their unit.
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

/// What is not in the layout is taken for buffers.
fn tell_others(entries: &[(String, ModelEntry<'_>)]) -> Option<String> {
    let others = entries.iter().filter(|(_, entry)| matches!(entry, ModelEntry::Other(_))).count();
    let what = if others == 1 { "tensor that is no parameter" } else { "tensors that are no parameters" };
    (others > 0).then(|| format!("{others} {what}: whole on every rank"))
}

/// The storages of the units' shards.
struct FlatParameters {
    units: Vec<UnitStorage>,
}

/// Where a unit's parameters are.
enum UnitStorage {
    /// In one storage, `empty` is another one for what a rank does not hold.
    Shard { storage: usize, empty: usize },
    /// Whole, each in its own.
    Whole(Vec<usize>),
}

impl FlatParameters {
    fn new(plan: &mut FlatPlan<'_>, units: Vec<UnitTensors>) -> Result<Self> {
        let layout = plan.layout;
        let mut storages = Vec::with_capacity(units.len());
        for (unit, UnitTensors { dtype, tensors }) in units.into_iter().enumerate() {
            if !plan.is_sharded() {
                storages.push(UnitStorage::Whole(tensors.into_iter().map(|id| plan.whole_storage(id)).collect()));
                continue;
            }
            if !tensors.is_empty() && plan.flats[unit].total() == 0 {
                return Err(Error::unsupported(
                    format!("{}: its parameters have no elements", layout.units[unit].describe()),
                    "FSDP1 cannot shard such a unit; leave it in the unit around it",
                ));
            }
            let storage = plan.storage(dtype, StorageContent::Shard { unit, tensors, padding: Padding::Parameter });
            let empty = plan.storage(dtype, StorageContent::Nothing);
            storages.push(UnitStorage::Shard { storage, empty });
        }
        Ok(Self { units: storages })
    }

    /// Before and behind which entries flat parameters stand.
    fn places(&self, entries: &[(String, ModelEntry<'_>)], plan: &FlatPlan<'_>) -> (Places, Places) {
        let (mut before, mut after) = (Places::new(), Places::new());
        if entries.is_empty() || !plan.is_sharded() {
            return (before, after);
        }
        let layout = plan.layout;
        let mut order: Vec<usize> =
            (0..self.units.len()).filter(|&unit| !layout.units[unit].params.is_empty()).collect();
        // Outer modules first.
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
        (Value::Str((&plan.layout.units[unit].key()).into()), plan.item(storage, TensorRole::Flat))
    }

    /// What a parameter is in its own name, if anything.
    fn parameter(&self, at: ParameterIndex, plan: &mut FlatPlan<'_>) -> Option<Value> {
        match &self.units[at.unit] {
            UnitStorage::Whole(storages) => Some(plan.item(storages[at.param], TensorRole::Whole)),
            UnitStorage::Shard { storage, empty } if plan.layout.use_orig_params => {
                Some(plan.item(*storage, TensorRole::View { at, empty: *empty }))
            }
            UnitStorage::Shard { .. } => None,
        }
    }
}

/// Units by the entry they stand before, or behind.
type Places = HashMap<usize, Vec<usize>>;
