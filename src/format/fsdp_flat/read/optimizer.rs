//! Converts optimizer state of flat parameters to state with the names and shapes of the parameters, as
//! `FSDP.optim_state_dict` would return it.
//!
//! In `optimizer.state_dict()`, each tensor that the optimizer updates has a number (its parameter id). Without
//! `use_orig_params` these tensors are flat parameters, and the state of a flat parameter has the length of the rank's
//! shard, including padding. With `use_orig_params` these tensors are parameters, and the state of a parameter is as
//! long as the slice of the parameter in the rank's shard. If this slice is empty, the rank has no state for the
//! parameter. A 0-d state tensor (a step counter) applies to all parameters in a flat parameter. dtshard copies the
//! counter for each parameter, because an optimizer would increment a tensor several times if several parameters shared
//! the tensor. Unit of lengths: elements.
//!
//! Source: `_flatten_optim_state_dict`, `_unflatten_optim_state` in `torch/distributed/fsdp/_optim_utils.py`.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path as FilePath;

use super::survey::visit_dicts;
use super::totals::{LayoutMismatch, OPTIMIZER_HINT};
use super::unflatten::{UnitShard, boxes, flat_parameters};
use crate::catalog::flat::{FlatLayout, FlatUnit, flat_module};
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::path::key_text;
use crate::catalog::{Dict, Fqn, Path, TensorId, Value};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::unknown_layout_error;
use crate::format::torch::RankFile;
use crate::format::torch::reader::ArchiveContents;
use crate::format::torch::{ProcessGroup, TensorNode, View};
use crate::layout::Rank;
use crate::layout::flat::FlatParameter;

/// Returns the paths of plain optimizers: dicts with the keys `state` and `param_groups` that refer to parameters by
/// number.
pub fn find(files: &[RankFile]) -> Vec<Path> {
    let mut paths = Vec::new();
    let Some(first) = files.first() else { return paths };
    visit_dicts(&first.contents.value, &Path::default(), &mut |path, dict| {
        if group_numbers(dict).is_some_and(|groups| groups.iter().any(|group| !group.is_empty())) {
            paths.push(path.clone());
        }
    });
    paths
}

/// Returns whether the state of an optimizer may be state of flat parameters: every state tensor is a plain tensor with
/// at most 1 dim.
pub fn may_be_flat(files: &[RankFile], at: &Path) -> bool {
    let flat = |file: &RankFile| {
        let ids = optimizer_state(&file.contents.value, at).map(Value::tensor_ids).unwrap_or_default();
        ids.iter()
            .all(|id| matches!(&file.contents.tensors[id.0 as usize], TensorNode::Plain(view) if view.sizes.len() < 2))
    };
    files.iter().all(flat)
}

/// Returns whether an optimizer has state for each parameter that its groups list.
pub fn has_state_of_all(value: &Value, at: &Path) -> bool {
    let numbers = at.find(value).and_then(Value::as_dict).and_then(group_numbers).unwrap_or_default();
    let states = optimizer_state(value, at).and_then(Value::as_dict).map_or(0, |states| states.entries.len());
    states == numbers.iter().flatten().count()
}

/// Returns the state of the optimizer at a path.
pub fn optimizer_state<'a>(value: &'a Value, at: &Path) -> Option<&'a Value> {
    at.find(value)?.as_dict()?.get(STATE)
}

/// Returns the state of the optimizer at a path, for modification.
fn optimizer_state_mut<'a>(value: &'a mut Value, at: &Path) -> Option<&'a mut Value> {
    let Value::Dict(dict) = at.find_mut(value)? else { return None };
    dict.entries.iter_mut().find(|(key, _)| key.as_str() == Some(STATE)).map(|(_, state)| state)
}

/// Returns the parameter ids (numbers) of each group. Returns `None` if the dict is not the state dict of an optimizer,
/// or if the optimizer refers to parameters by name.
pub fn group_numbers(dict: &Dict) -> Option<Vec<Vec<i64>>> {
    let (Value::Dict(states), Value::List(groups)) = (dict.get(STATE)?, dict.get(GROUPS)?) else {
        return None;
    };
    states.entries.iter().all(|(key, _)| key.as_i64().is_some()).then_some(())?;
    let group = |group: &Value| match group.as_dict()?.get(PARAMS)? {
        Value::List(params) => params.iter().map(Value::as_i64).collect::<Option<Vec<i64>>>(),
        _ => None,
    };
    groups.iter().map(group).collect()
}

/// The information that, together with the flat layout, gives the name for each parameter id.
#[derive(Clone, Copy)]
pub struct OptimizerOrder<'a> {
    /// The names of the parameters in the order of their parameter ids, for an optimizer with one parameter group. Used
    /// if the layout has no parameter groups.
    pub default: Option<&'a [Fqn]>,
    /// The names of all tensors of the model that are not flat parameters; `None` if these names are not known. The
    /// parameters outside all units are among them, and an optimizer may update these parameters, too.
    pub plain: Option<&'a HashSet<Fqn>>,
    /// The flat layout file, for messages; `None` if the layout comes from the files of the checkpoint.
    pub document: Option<&'a FilePath>,
}

impl OptimizerOrder<'_> {
    /// Returns the error for names that do not match the optimizer. `are_listed` is true if the layout lists these names in
    /// `optimizer`.
    fn wrong_names(self, what: String, are_listed: bool) -> Error {
        let Some(path) = self.document else { return unknown_layout_error(what) };
        let what = format!("{what} (the flat layout is {})", path.display());
        if are_listed {
            return Error::unsupported(what, OPTIMIZER_HINT);
        }
        Error::unsupported(
            what,
            "add `optimizer` to the flat layout, as flat_layout(model, optimizer) in docs/how-to/fsdp1.md writes it, or \
             leave the optimizer out with options::series model",
        )
    }
}

/// The names of the parameters or flat parameters of an optimizer that identifies them by parameter ids. There is one
/// list per parameter group, in the order of the parameter ids.
pub struct NumberedParameters {
    names: Vec<Vec<Fqn>>,
}

/// Replaces the parameter ids (numbers) of an optimizer by names, and the state of flat parameters by state of their
/// parameters, in the files of all ranks. State of parameters outside all units stays as it is. Returns the names of
/// each group.
///
/// # Errors
/// `Unsupported` if the names for the parameter ids are unknown, `Malformed` for state of an unexpected size.
pub fn unflatten(
    files: &mut [RankFile],
    at: &Path,
    layout: &FlatLayout,
    order: OptimizerOrder<'_>,
) -> Result<Vec<Vec<Fqn>>> {
    let numbered = NumberedParameters::new(files, at, layout, order)?;
    let flat_params = flat_parameters(layout);
    let mut used: BTreeSet<i64> = BTreeSet::new();
    for file in files.iter() {
        if let Some(Value::Dict(states)) = optimizer_state(&file.contents.value, at) {
            used.extend(states.entries.iter().filter_map(|(key, _)| key.as_i64()));
        }
    }
    let slots = parameter_slots(layout);
    for file in files {
        let Some(rank) = file.rank else { continue };
        let unflattener = RankUnflattener::new(layout, &flat_params, &slots, rank, &file.path, order.document);
        let Some(Value::Dict(mut state)) =
            optimizer_state_mut(&mut file.contents.value, at).map(|state| std::mem::replace(state, Value::None))
        else {
            continue;
        };
        state.entries = unflattener.named_states(&mut file.contents, &state.entries, &used, (&numbered, order))?;
        let Some(Value::Dict(dict)) = at.find_mut(&mut file.contents.value) else { continue };
        for (key, value) in &mut dict.entries {
            match (key.as_str(), value) {
                (Some(STATE), value) => *value = Value::Dict(std::mem::take(&mut state)),
                (Some(GROUPS), Value::List(groups)) => unflattener.name_groups(groups, &numbered),
                _ => {}
            }
        }
    }
    Ok(numbered.names)
}

impl NumberedParameters {
    fn new(files: &[RankFile], at: &Path, layout: &FlatLayout, order: OptimizerOrder<'_>) -> Result<Self> {
        let mut counts: Option<Vec<usize>> = None;
        for file in files {
            let dict = at.find(&file.contents.value).and_then(Value::as_dict);
            let Some(groups) = dict.and_then(group_numbers) else {
                return Err(Error::malformed(
                    &file.path,
                    describe_path(at),
                    "an optimizer with numbered parameters, as on other ranks",
                    "none",
                ));
            };
            if !(0..).zip(groups.iter().flatten()).all(|(index, number)| index == *number) {
                let found = "other numbers or another order";
                return Err(Error::malformed(
                    &file.path,
                    format!("{} param_groups", describe_path(at)),
                    "numbers from 0 on",
                    found,
                ));
            }
            let own: Vec<usize> = groups.iter().map(Vec::len).collect();
            if counts.get_or_insert_with(|| own.clone()) != &own {
                let expected = "the parameter groups of other ranks";
                return Err(Error::malformed(&file.path, describe_path(at), expected, format!("groups of {own:?}")));
            }
        }
        let counts = counts.unwrap_or_default();
        let names: Vec<Vec<Fqn>> = match (&layout.optimizer, order.default, counts.as_slice()) {
            (Some(groups), ..) => groups.clone(),
            (None, Some(default), [_]) => vec![default.to_vec()],
            (None, ..) => {
                return Err(unknown_groups(at, counts.len()));
            }
        };
        let own: Vec<usize> = names.iter().map(Vec::len).collect();
        if own != counts {
            let what = format!(
                "{}: the flat layout has parameter groups of the sizes {own:?}, but SRC has groups of the sizes {counts:?}",
                describe_path(at)
            );
            return Err(order.wrong_names(what, layout.optimizer.is_some()));
        }
        Ok(Self { names })
    }
}

/// Returns the error for an optimizer whose parameter ids have no known names. `groups` is the number of its parameter
/// groups.
pub fn unknown_groups(at: &Path, groups: usize) -> Error {
    let lacking = match groups {
        1 => String::from("the order of its parameters is unknown"),
        _ => format!("the parameters of its {groups} groups are unknown"),
    };
    Error::unsupported(
        format!("{}: {lacking}", describe_path(at)),
        "give options::flat_layout FILE with `optimizer`, as flat_layout(model, optimizer) in docs/how-to/fsdp1.md writes it, \
         or leave the optimizer out with options::series model",
    )
}

fn describe_path(at: &Path) -> String {
    if at.0.is_empty() { String::from("the optimizer") } else { format!("the optimizer at {at}") }
}

/// The tensor that a parameter id or name of an optimizer refers to: the flat parameter of a unit (`Unit` has the index
/// of the unit), or one parameter of a unit (`Param` has the indices of the unit and of the parameter in the unit).
#[derive(Clone, Copy)]
pub enum ParameterSlot {
    Unit(usize),
    Param(usize, usize),
}

/// Maps the names that an optimizer can use to the parameters or flat parameters of a layout.
pub fn parameter_slots(layout: &FlatLayout) -> HashMap<Fqn, ParameterSlot> {
    let mut slots = HashMap::new();
    for (index, unit) in layout.units.iter().enumerate() {
        if layout.use_orig_params {
            let params = unit.params.iter().enumerate();
            slots.extend(params.map(|(param, known)| (known.fqn.clone(), ParameterSlot::Param(index, param))));
        } else {
            slots.insert(unit.key(), ParameterSlot::Unit(index));
        }
    }
    slots
}

/// Converts the optimizer state and gradients in the file of one rank from flat parameters to parameters.
pub struct RankUnflattener<'a> {
    layout: &'a FlatLayout,
    flat_params: &'a [FlatParameter],
    slots: &'a HashMap<Fqn, ParameterSlot>,
    shard: u64,
    group: ProcessGroup,
    path: &'a FilePath,
    document: Option<&'a FilePath>,
}

impl<'a> RankUnflattener<'a> {
    /// Returns a converter for the file of a rank. `document` is the flat layout file, for messages; `None` if the layout
    /// comes from the files of the checkpoint.
    pub fn new(
        layout: &'a FlatLayout,
        flat_params: &'a [FlatParameter],
        slots: &'a HashMap<Fqn, ParameterSlot>,
        rank: Rank,
        path: &'a FilePath,
        document: Option<&'a FilePath>,
    ) -> Self {
        let group = ProcessGroup { rank: rank.0, sizes: Some((layout.shard_group_size, layout.world_size)) };
        Self { layout, flat_params, slots, shard: layout.shard_of(rank.0), group, path, document }
    }
}

impl RankUnflattener<'_> {
    /// Returns the rank's shard of a unit.
    pub fn unit_shard(&self, unit: usize) -> UnitShard<'_> {
        UnitShard {
            unit: &self.layout.units[unit],
            flat: &self.flat_params[unit],
            shard: self.shard,
            group: self.group,
        }
    }

    /// Returns the flat parameter or the parameter with this name; `None` for a parameter outside all units, whose
    /// state stays as it is.
    fn find_slot(&self, name: &Fqn, order: OptimizerOrder<'_>) -> Result<Option<ParameterSlot>> {
        if let Some(slot) = self.slots.get(name) {
            return Ok(Some(*slot));
        }
        let is_flat = flat_module(name.as_str()).is_some();
        let is_in_unit = self.layout.params().any(|(_, param)| param.fqn == *name);
        if !is_flat && !is_in_unit && order.plain.is_none_or(|plain| plain.contains(name)) {
            return Ok(None);
        }
        let kind = if self.layout.use_orig_params { "parameter" } else { "flat parameter" };
        let shared = self.layout.units.iter().flat_map(|unit| &unit.shared).find(|shared| shared.fqn == *name);
        let rest = match shared {
            Some(shared) => format!(": it is a further name of {}", shared.with),
            None if is_flat || is_in_unit => String::new(),
            None => String::from(", and the files have no tensor with this name"),
        };
        let what = format!("{name}: the optimizer lists this name, but the flat layout has no such {kind}{rest}");
        Err(order.wrong_names(what, self.layout.optimizer.is_some()))
    }

    /// Returns the optimizer state by parameter name. If this rank has no state for a parameter for which another rank
    /// has state, this rank gets empty tensors. So all ranks have equal lists of names.
    fn named_states(
        &self,
        contents: &mut ArchiveContents,
        states: &[(Value, Value)],
        used: &BTreeSet<i64>,
        (numbered, order): (&NumberedParameters, OptimizerOrder<'_>),
    ) -> Result<Vec<(Value, Value)>> {
        let by_number: HashMap<i64, &Value> =
            states.iter().filter_map(|(key, value)| Some((key.as_i64()?, value))).collect();
        let names: Vec<&Fqn> = numbered.names.iter().flatten().collect();
        let mut entries = Vec::new();
        for number in used {
            let Some(name) = usize::try_from(*number).ok().and_then(|number| names.get(number).copied()) else {
                let expected = format!("a number below {}", names.len());
                return Err(Error::malformed(self.path, "the optimizer's state", expected, number.to_string()));
            };
            let empty = Value::Dict(Dict::default());
            let state = by_number.get(number).copied().unwrap_or(&empty);
            match self.find_slot(name, order)? {
                Some(ParameterSlot::Unit(unit)) => entries.extend(self.unflatten_unit_state(contents, unit, state)?),
                Some(ParameterSlot::Param(unit, param)) => {
                    entries.push(self.unflatten_param_state(contents, unit, param, state)?);
                }
                // Every rank has the whole state of a parameter outside all units.
                None => entries.push((Value::Str(name.into()), state.clone())),
            }
        }
        Ok(entries)
    }

    /// Splits the optimizer state of a flat parameter into one state for each parameter in the flat parameter.
    pub fn unflatten_unit_state(
        &self,
        contents: &mut ArchiveContents,
        unit: usize,
        state: &Value,
    ) -> Result<Vec<(Value, Value)>> {
        let unit_shard = self.unit_shard(unit);
        let mut new_ids: HashMap<TensorId, Vec<TensorId>> = HashMap::new();
        for id in state.tensor_ids() {
            let tensors = match &contents.tensors[id.0 as usize] {
                TensorNode::Plain(view) => match view.sizes.as_slice() {
                    [] => vec![TensorNode::Plain(view.clone()); unit_shard.unit.params.len()],
                    [len] if *len == unit_shard.flat.shard_len() => unit_shard.parameters(view.dtype, Some(view)),
                    _ => {
                        let expected =
                            format!("state of {} elements (the length of its shard)", unit_shard.flat.shard_len());
                        return Err(self.wrong_size_error(&unit_shard.unit.key(), state, id, expected, view));
                    }
                },
                // A DTensor or ShardedTensor in the state has no part for each parameter, so every parameter gets the
                // same tensor.
                other => vec![other.clone(); unit_shard.unit.params.len()],
            };
            new_ids.insert(id, tensors.into_iter().map(|found| contents.push(found)).collect());
        }
        let states = unit_shard.unit.params.iter().enumerate().map(|(index, param)| {
            let mut own = state.clone();
            own.map_tensors(&mut |id| new_ids[&id][index]);
            (Value::Str((&param.fqn).into()), own)
        });
        Ok(states.collect())
    }

    /// Converts the optimizer state of one parameter of a job with `use_orig_params`.
    pub fn unflatten_param_state(
        &self,
        contents: &mut ArchiveContents,
        unit: usize,
        param: usize,
        state: &Value,
    ) -> Result<(Value, Value)> {
        let unit_shard = self.unit_shard(unit);
        let known = &unit_shard.unit.params[param];
        let start = unit_shard.flat.params()[param].start;
        let part = unit_shard.flat.part(param, self.shard);
        let piece = (!part.is_empty()).then(|| part.start - start..part.end - start);
        let numel = piece.as_ref().map_or(0, |elements| elements.end - elements.start);
        let empty = Value::Dict(Dict::default());
        // Some optimizers create state even for parameters of which the rank has no part. Such state is never updated,
        // so it is left out.
        let state = if piece.is_none() && known.numel() > 0 {
            self.check_without_elements(contents, &known.fqn, state)?;
            &empty
        } else {
            state
        };
        let mut new_ids: HashMap<TensorId, TensorId> = HashMap::new();
        for id in state.tensor_ids() {
            let tensor = match &contents.tensors[id.0 as usize] {
                // Without sharding, state already has the shape of its parameter.
                TensorNode::Plain(view) if self.layout.shard_group_size == 1 && view.sizes == known.shape => continue,
                TensorNode::Plain(view) => match (view.sizes.as_slice(), &piece) {
                    ([], _) => continue,
                    ([len], Some(elements)) if *len == numel => {
                        unit_shard.sharded(known, view.dtype, boxes(known, elements.clone(), view, view.offset))
                    }
                    ([0], None) => unit_shard.sharded(known, view.dtype, Vec::new()),
                    _ => {
                        let expected = format!("state of {numel} elements (the rank's part of the parameter)");
                        return Err(self.wrong_size_error(&known.fqn, state, id, expected, view));
                    }
                },
                _ => continue,
            };
            new_ids.insert(id, contents.push(tensor));
        }
        let mut own = state.clone();
        own.map_tensors(&mut |id| new_ids.get(&id).copied().unwrap_or(id));
        Ok((Value::Str((&known.fqn).into()), own))
    }

    /// Checks the state of a parameter that has no element in the rank's shard: each state tensor must be 0-d or have
    /// no elements.
    fn check_without_elements(&self, contents: &ArchiveContents, name: &Fqn, state: &Value) -> Result<()> {
        for id in state.tensor_ids() {
            if let TensorNode::Plain(view) = &contents.tensors[id.0 as usize]
                && !view.sizes.is_empty()
                && view.sizes.iter().all(|size| *size > 0)
            {
                let expected = String::from("state without elements (the rank has no part of the parameter)");
                return Err(self.wrong_size_error(name, state, id, expected, view));
            }
        }
        Ok(())
    }

    fn wrong_size_error(&self, name: &Fqn, state: &Value, id: TensorId, expected: String, view: &View) -> Error {
        let key = state.as_dict().and_then(|dict| {
            let (key, _) = dict.entries.iter().find(|(_, value)| matches!(value, Value::Tensor(own) if *own == id))?;
            Some(format!("{name}.{}", key_text(key)))
        });
        let at = key.unwrap_or_else(|| name.to_string());
        let found = format!("shape {:?}", view.sizes.as_slice());
        match self.document {
            Some(document) => {
                let source = document.display().to_string();
                LayoutMismatch { file: self.path, source: &source }.state_error(&at, expected, found)
            }
            None => Error::malformed(self.path, at, expected, found),
        }
    }

    /// Replaces the parameter ids in each parameter group by parameter names.
    fn name_groups(&self, groups: &mut [Value], numbered: &NumberedParameters) {
        let units: HashMap<Fqn, &FlatUnit> = self.layout.units.iter().map(|unit| (unit.key(), unit)).collect();
        for (group, names) in groups.iter_mut().zip(&numbered.names) {
            let Value::Dict(group) = group else { continue };
            let names = names.iter().flat_map(|name| match units.get(name) {
                Some(unit) if !self.layout.use_orig_params => {
                    unit.params.iter().map(|param| Value::Str((&param.fqn).into())).collect()
                }
                _ => vec![Value::Str(name.into())],
            });
            if let Some((_, params)) = group.entries.iter_mut().find(|(key, _)| key.as_str() == Some(PARAMS)) {
                *params = Value::List(names.collect());
            }
        }
    }
}

/// Removes the state of an optimizer whose parameter ids cannot be resolved to parameter names.
pub fn drop_state(files: &mut [RankFile], at: &Path) {
    for file in files {
        if let Some(state) = optimizer_state_mut(&mut file.contents.value, at) {
            *state = Value::Dict(Dict::default());
        }
    }
}
