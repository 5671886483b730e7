//! Optimizer state of flat parameters, as `FSDP.optim_state_dict` would give it: by names, in shapes of parameters.
//!
//! `optimizer.state_dict()` numbers what the optimizer updates: flat parameters, whose state is as long as a shard in
//! memory with its padding; or, with `use_orig_params`, parameters, whose state is as long as what the rank holds, and
//! absent where that is nothing. A state tensor without dims belongs to all that a flat parameter holds: every
//! parameter gets a tensor of its own, for an optimizer that steps a shared one would step it many times.
//!
//! Source: `_flatten_optim_state_dict`, `_unflatten_optim_state` in `torch/distributed/fsdp/_optim_utils.py`.

use std::collections::{BTreeSet, HashMap};
use std::path::Path as FilePath;

use super::survey::visit_dicts;
use super::unflatten::{UnitShard, boxes, flat_parameters};
use crate::catalog::flat::{FlatLayout, FlatUnit};
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::path::key_text;
use crate::catalog::{Dict, Fqn, Path, TensorId, Value};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::refuse;
use crate::format::torch::ranks::RankFile;
use crate::format::torch::reader::ArchiveContents;
use crate::format::torch::{ProcessGroup, TensorNode, View};
use crate::layout::Rank;
use crate::layout::flat::FlatParameter;

/// Where plain optimizers are: dicts with `state` and `param_groups` that go by numbers.
#[must_use]
pub fn find(files: &[RankFile]) -> Vec<Path> {
    let mut paths = Vec::new();
    let Some(first) = files.first() else { return paths };
    visit_dicts(&first.contents.value, &Path::default(), &mut |path, dict| {
        if numbers(dict).is_some_and(|groups| groups.iter().any(|group| !group.is_empty())) {
            paths.push(path.clone());
        }
    });
    paths
}

/// Whether the state of an optimizer looks like that of flat parameters: nothing has more than 1 dim.
#[must_use]
pub fn may_be_flat(files: &[RankFile], at: &Path) -> bool {
    let flat = |file: &RankFile| {
        let ids = state_of(&file.contents.value, at).map(Value::tensor_ids).unwrap_or_default();
        ids.iter()
            .all(|id| matches!(&file.contents.tensors[id.0 as usize], TensorNode::Plain(view) if view.sizes.len() < 2))
    };
    files.iter().all(flat)
}

/// The state of the optimizer at a path.
fn state_of<'a>(value: &'a Value, at: &Path) -> Option<&'a Value> {
    at.find(value)?.as_dict()?.get(STATE)
}

/// The same, to be changed.
fn state_of_mut<'a>(value: &'a mut Value, at: &Path) -> Option<&'a mut Value> {
    let Value::Dict(dict) = at.find_mut(value)? else { return None };
    dict.entries.iter_mut().find(|(key, _)| key.as_str() == Some(STATE)).map(|(_, state)| state)
}

/// The numbers of each parameter group; `None` where it is no optimizer's state dict, or one that goes by names.
fn numbers(dict: &Dict) -> Option<Vec<Vec<i64>>> {
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

/// What the numbers of an optimizer stand for, a list a group.
pub struct NumberedParameters {
    names: Vec<Vec<Fqn>>,
}

/// Put names in the place of an optimizer's numbers and parameters in the place of flat ones, in the files of all ranks;
/// `default` are the names of a model in order, for an optimizer of one group. Gives the names by group.
///
/// # Errors
/// `Unsupported` where the order of numbers is not known, `Malformed` for state of another size.
pub fn unflatten(
    files: &mut [RankFile],
    at: &Path,
    layout: &FlatLayout,
    default: Option<&[Fqn]>,
) -> Result<Vec<Vec<Fqn>>> {
    let numbered = NumberedParameters::new(files, at, layout, default)?;
    let flats = flat_parameters(layout);
    let mut used: BTreeSet<i64> = BTreeSet::new();
    for file in files.iter() {
        if let Some(Value::Dict(states)) = state_of(&file.contents.value, at) {
            used.extend(states.entries.iter().filter_map(|(key, _)| key.as_i64()));
        }
    }
    let places = places(layout);
    for file in files {
        let Some(rank) = file.rank else { continue };
        let one = OneRank::new(layout, &flats, &places, rank, &file.path);
        let Some(Value::Dict(mut state)) =
            state_of_mut(&mut file.contents.value, at).map(|state| std::mem::replace(state, Value::None))
        else {
            continue;
        };
        state.entries = one.states(&mut file.contents, &state.entries, &used, &numbered)?;
        let Some(Value::Dict(dict)) = at.find_mut(&mut file.contents.value) else { continue };
        for (key, value) in &mut dict.entries {
            match (key.as_str(), value) {
                (Some(STATE), value) => *value = Value::Dict(std::mem::take(&mut state)),
                (Some(GROUPS), Value::List(groups)) => one.name_groups(groups, &numbered),
                _ => {}
            }
        }
    }
    Ok(numbered.names)
}

impl NumberedParameters {
    fn new(files: &[RankFile], at: &Path, layout: &FlatLayout, default: Option<&[Fqn]>) -> Result<Self> {
        let mut counts: Option<Vec<usize>> = None;
        for file in files {
            let dict = at.find(&file.contents.value).and_then(Value::as_dict);
            let Some(groups) = dict.and_then(numbers) else {
                return Err(Error::malformed(
                    &file.path,
                    shown(at),
                    "an optimizer by numbers, as on other ranks",
                    "none",
                ));
            };
            if !(0..).zip(groups.iter().flatten()).all(|(index, number)| index == *number) {
                let found = "other numbers, or in another order";
                return Err(Error::malformed(
                    &file.path,
                    format!("{} param_groups", shown(at)),
                    "numbers from 0 on",
                    found,
                ));
            }
            let own: Vec<usize> = groups.iter().map(Vec::len).collect();
            if counts.get_or_insert_with(|| own.clone()) != &own {
                let expected = "the parameter groups of other ranks";
                return Err(Error::malformed(&file.path, shown(at), expected, format!("groups of {own:?}")));
            }
        }
        let counts = counts.unwrap_or_default();
        let names: Vec<Vec<Fqn>> = match (&layout.optimizer, default, counts.as_slice()) {
            (Some(groups), ..) => groups.clone(),
            (None, Some(default), [_]) => vec![default.to_vec()],
            (None, ..) => {
                return Err(Error::unsupported(
                    format!("{}: which parameters its {} groups hold is not known", shown(at), counts.len()),
                    "a flat layout with `optimizer` tells, as flat_layout(model, optimizer) of docs/how-to/fsdp1.md makes it; \
                     options::series model leaves the optimizer out",
                ));
            }
        };
        let own: Vec<usize> = names.iter().map(Vec::len).collect();
        if own != counts {
            return Err(refuse(format!("{}: expected parameter groups of {own:?}, found {counts:?}", shown(at))));
        }
        Ok(Self { names })
    }
}

fn shown(at: &Path) -> String {
    if at.0.is_empty() { String::from("the optimizer") } else { format!("the optimizer at {at}") }
}

/// What a number stands for.
#[derive(Clone, Copy)]
pub enum ParameterSlot {
    Unit(usize),
    Param(usize, usize),
}

pub fn places(layout: &FlatLayout) -> HashMap<Fqn, ParameterSlot> {
    let mut places = HashMap::new();
    for (index, unit) in layout.units.iter().enumerate() {
        if layout.use_orig_params {
            let params = unit.params.iter().enumerate();
            places.extend(params.map(|(param, known)| (known.fqn.clone(), ParameterSlot::Param(index, param))));
        } else {
            places.insert(unit.key(), ParameterSlot::Unit(index));
        }
    }
    places
}

/// One rank's file.
pub struct OneRank<'a> {
    layout: &'a FlatLayout,
    flats: &'a [FlatParameter],
    places: &'a HashMap<Fqn, ParameterSlot>,
    shard: u64,
    group: ProcessGroup,
    path: &'a FilePath,
}

impl<'a> OneRank<'a> {
    pub fn new(
        layout: &'a FlatLayout,
        flats: &'a [FlatParameter],
        places: &'a HashMap<Fqn, ParameterSlot>,
        rank: Rank,
        path: &'a FilePath,
    ) -> Self {
        let group = ProcessGroup { rank: rank.0, sizes: Some((layout.shard_group_size, layout.world_size)) };
        Self { layout, flats, places, shard: layout.shard_of(rank.0), group, path }
    }
}

impl OneRank<'_> {
    pub fn held(&self, unit: usize) -> UnitShard<'_> {
        UnitShard { unit: &self.layout.units[unit], flat: &self.flats[unit], shard: self.shard, group: self.group }
    }

    fn place(&self, name: &Fqn) -> Result<ParameterSlot> {
        let kind = if self.layout.use_orig_params { "a parameter" } else { "a flat parameter" };
        let place = self.places.get(name).copied();
        place.ok_or_else(|| refuse(format!("{name}: the optimizer's order has it, and it is not {kind} of the layout")))
    }

    /// The state by names. What this rank has none of is there, empty, for all ranks to have one order.
    fn states(
        &self,
        contents: &mut ArchiveContents,
        states: &[(Value, Value)],
        used: &BTreeSet<i64>,
        numbered: &NumberedParameters,
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
            match self.place(name)? {
                ParameterSlot::Unit(unit) => entries.extend(self.state_of_unit(contents, unit, state)?),
                ParameterSlot::Param(unit, param) => entries.push(self.state_of_param(contents, unit, param, state)?),
            }
        }
        Ok(entries)
    }

    /// State of a flat parameter, as that of each of its parameters.
    pub fn state_of_unit(
        &self,
        contents: &mut ArchiveContents,
        unit: usize,
        state: &Value,
    ) -> Result<Vec<(Value, Value)>> {
        let held = self.held(unit);
        let mut made: HashMap<TensorId, Vec<TensorId>> = HashMap::new();
        for id in state.tensor_ids() {
            let tensors = match &contents.tensors[id.0 as usize] {
                TensorNode::Plain(view) => match view.sizes.as_slice() {
                    [] => vec![TensorNode::Plain(view.clone()); held.unit.params.len()],
                    [len] if *len == held.flat.shard_len() => held.parameters(view.dtype, Some(view)),
                    _ => {
                        let expected = format!("state of {} elements, as its shard has", held.flat.shard_len());
                        return Err(self.wrong_size(&held.unit.key(), state, id, expected, view));
                    }
                },
                // By names, and so what it is of.
                other => vec![other.clone(); held.unit.params.len()],
            };
            made.insert(id, tensors.into_iter().map(|found| contents.push(found)).collect());
        }
        let states = held.unit.params.iter().enumerate().map(|(index, param)| {
            let mut own = state.clone();
            own.map_tensors(&mut |id| made[&id][index]);
            (Value::Str((&param.fqn).into()), own)
        });
        Ok(states.collect())
    }

    /// State of a parameter that stands beside flat ones.
    pub fn state_of_param(
        &self,
        contents: &mut ArchiveContents,
        unit: usize,
        param: usize,
        state: &Value,
    ) -> Result<(Value, Value)> {
        let held = self.held(unit);
        let known = &held.unit.params[param];
        let (whole, shard) = (&held.flat.params()[param], held.flat.shard(self.shard));
        let (start, end) = (whole.start.max(shard.start), whole.end.min(shard.end));
        let piece = (start < end).then(|| start - whole.start..end - whole.start);
        let numel = piece.as_ref().map_or(0, |elements| elements.end - elements.start);
        let empty = Value::Dict(Dict::default());
        // Optimizers that make state at once have some for what the rank does not hold, and never step it.
        let state = if piece.is_none() && known.numel() > 0 { &empty } else { state };
        let mut made: HashMap<TensorId, TensorId> = HashMap::new();
        for id in state.tensor_ids() {
            let tensor = match &contents.tensors[id.0 as usize] {
                // Where nothing is sharded, state has the shape of its parameter.
                TensorNode::Plain(view) if self.layout.shard_group_size == 1 && view.sizes == known.shape => continue,
                TensorNode::Plain(view) => match (view.sizes.as_slice(), &piece) {
                    ([], _) => continue,
                    ([len], Some(elements)) if *len == numel => {
                        held.sharded(known, view.dtype, boxes(known, elements.clone(), view, view.offset))
                    }
                    ([0], None) => held.sharded(known, view.dtype, Vec::new()),
                    _ => {
                        let expected = format!("state of {numel} elements, as the rank holds of it");
                        return Err(self.wrong_size(&known.fqn, state, id, expected, view));
                    }
                },
                _ => continue,
            };
            made.insert(id, contents.push(tensor));
        }
        let mut own = state.clone();
        own.map_tensors(&mut |id| made.get(&id).copied().unwrap_or(id));
        Ok((Value::Str((&known.fqn).into()), own))
    }

    fn wrong_size(&self, name: &Fqn, state: &Value, id: TensorId, expected: String, view: &View) -> Error {
        let key = state.as_dict().and_then(|dict| {
            let (key, _) = dict.entries.iter().find(|(_, value)| matches!(value, Value::Tensor(own) if *own == id))?;
            Some(format!("{name}.{}", key_text(key)))
        });
        let at = key.unwrap_or_else(|| name.to_string());
        Error::malformed(self.path, at, expected, format!("shape {:?}", view.sizes.as_slice()))
    }

    /// The parameters of each group, by names.
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

/// Leave out the state of an optimizer whose numbers nobody knows.
pub fn drop_state(files: &mut [RankFile], at: &Path) {
    for file in files {
        if let Some(state) = state_of_mut(&mut file.contents.value, at) {
            *state = Value::Dict(Dict::default());
        }
    }
}
