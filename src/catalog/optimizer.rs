//! What the state dict of an optimizer tells of parameters: by their names, or by numbers.
//!
//! `get_optimizer_state_dict` has names for keys and in `params`. `optimizer.state_dict()` has numbers, in the order in
//! which the optimizer was given its parameters, and nothing says whose they are.
//!
//! Source: `Optimizer.state_dict` in `torch/optim/optimizer.py`, `torch/distributed/checkpoint/state_dict.py`.

use std::collections::HashSet;

use super::model::model;
use super::{Catalog, Fqn, Key, Path, TensorEntry, TensorId, Value};

/// Keys under which trainers put an optimizer.
const OPTIMIZER: [&str; 5] = ["optimizer", "optim", "optimizers", "optimizer_state_dict", "optimizer_states"];

/// Returns whether trainers put an optimizer under this key. Lightning numbers its optimizers: `optimizer_0`.
///
/// Source: `FSDPStrategy.save_checkpoint` in `lightning/pytorch/strategies/fsdp.py` (2.6).
#[must_use]
pub fn is_optimizer_key(key: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    OPTIMIZER.contains(&key) || key.strip_prefix("optimizer_").is_some_and(is_number)
}

/// State, a dict a parameter.
pub const STATE: &str = "state";
/// Parameter groups, a dict of options each.
pub const GROUPS: &str = "param_groups";
/// The parameters of a group.
pub const PARAMS: &str = "params";
/// Their names, which optimizers of named parameters have beside numbers since 2.6.
pub const PARAM_NAMES: &str = "param_names";

/// What the path of an optimizer's state tensor tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptimizerState {
    /// Where the optimizer is.
    pub optimizer: Path,
    /// The parameter it belongs to, by its name or by a number.
    pub parameter: Fqn,
}

/// `optim.state.FQN.exp_avg` is state of FQN, be `state` a dict or, as `flatten_optimizer_state_dict` writes it, the
/// beginning of a key.
#[must_use]
pub fn optimizer_state(path: &Path) -> Option<OptimizerState> {
    let is = |key: &Key, names: &[&str]| matches!(key, Key::Name(name) if names.contains(&name.as_ref()));
    let at = path.0.iter().position(|key| matches!(key, Key::Name(name) if is_optimizer_key(name)))?;
    let to = |end: usize| Path(path.0[..end].to_vec());
    if let [Key::Name(last)] = &path.0[at + 1..] {
        let (parameter, _) = last.strip_prefix("state.")?.rsplit_once('.')?;
        return Some(OptimizerState { optimizer: to(at + 1), parameter: Fqn::from(parameter) });
    }
    let state = at + 1 + path.0[at + 1..].iter().position(|key| is(key, &["state"]))?;
    let parameter = &path.0[state + 1..path.0.len().checked_sub(1)?.max(state + 1)];
    (!parameter.is_empty()).then(|| OptimizerState { optimizer: to(state), parameter: Path(parameter.to_vec()).fqn() })
}

/// The parameter an optimizer's state tensor belongs to.
#[must_use]
pub fn optimizer_parameter(path: &Path) -> Option<Fqn> {
    optimizer_state(path).map(|state| state.parameter)
}

/// Whether a flat name looks like state of an optimizer: `optim.state.w.exp_avg`, where no nesting says so.
#[must_use]
pub fn reads_as_optimizer_state(name: &str) -> bool {
    let mut parts = name.split('.');
    parts.any(is_optimizer_key) && parts.next() == Some("state")
}

/// The parameters an optimizer knows by their names, group by group; `None` where none knows any.
#[must_use]
pub fn named_groups(state: &Value) -> Option<Vec<Vec<Fqn>>> {
    /// `app.optim.param_groups`
    const DEPTH: usize = 2;
    groups_within(state, DEPTH)
}

fn groups_within(state: &Value, depth: usize) -> Option<Vec<Vec<Fqn>>> {
    let dict = state.as_dict()?;
    let own = || names_of(dict.get(GROUPS)?);
    let below = || dict.entries.iter().find_map(|(_, value)| groups_within(value, depth.checked_sub(1)?));
    own().or_else(below)
}

/// `params` of each group, where they are names.
fn names_of(groups: &Value) -> Option<Vec<Vec<Fqn>>> {
    let Value::List(groups) = groups else { return None };
    let names = |group: &Value| match group.as_dict()?.get(PARAMS)? {
        Value::List(names) => names.iter().map(|name| name.as_str().map(Fqn::from)).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    let groups: Vec<Vec<Fqn>> = groups.iter().map(names).collect::<Option<_>>()?;
    (!groups.is_empty()).then_some(groups)
}

/// The parameters that an optimizer of plain `optimizer.state_dict()` knows by numbers: `numbers[i]` is parameter `i`.
///
/// Such a state dict does not say which parameter a number stands for. PyTorch numbers them in the order of
/// `model.parameters()`, which is that of the model's state dict without its buffers and whatever is not trained.
/// `None` unless there is only one reading: one parameter group, numbered from 0, and one way to go through the model
/// in order such that all state tensors with dims have the shape of their parameter and are DTensors where it is one.
/// Only tensors that may be parameters are gone through.
#[must_use]
pub fn numbered_parameters(
    catalog: &Catalog,
    optimizer: &Value,
    may_be: &dyn Fn(&Fqn) -> bool,
) -> Option<Vec<(Fqn, TensorId)>> {
    let dict = optimizer.as_dict()?;
    let (Value::List(groups), Value::Dict(states)) = (dict.get(GROUPS)?, dict.get(STATE)?) else {
        return None;
    };
    let [Value::Dict(group)] = groups.as_slice() else { return None };
    let Value::List(numbers) = group.get(PARAMS)? else { return None };
    if !(0..).zip(numbers).all(|(index, number)| number.as_i64() == Some(index)) {
        return None;
    }
    let mut kept: Vec<Vec<&TensorEntry>> = vec![Vec::new(); numbers.len()];
    for (number, state) in &states.entries {
        let number = usize::try_from(number.as_i64()?).ok()?;
        let tensors = state.tensor_ids().into_iter().map(|id| catalog.tensor(id));
        *kept.get_mut(number)? = tensors.filter(|entry| !entry.shape.is_empty()).collect();
    }
    let mut seen = HashSet::new();
    let mut floats = model(&catalog.state).tensors;
    floats.retain(|(fqn, id)| catalog.tensor(*id).dtype.is_float() && may_be(fqn) && seen.insert(*id));
    let fits = |number: usize, (_, id): &(Fqn, TensorId)| {
        let parameter = catalog.tensor(*id);
        let alike = |state: &&TensorEntry| {
            state.shape == parameter.shape && state.sharding.is_some() == parameter.sharding.is_some()
        };
        kept[number].iter().all(alike)
    };
    // Where the leftmost and the rightmost way are one, there is no other between them.
    let mut rest = floats.iter().enumerate();
    let leftmost = (0..kept.len()).map(|number| rest.find(|(_, float)| fits(number, float)).map(|(at, _)| at));
    let leftmost: Vec<usize> = leftmost.collect::<Option<_>>()?;
    let mut rest = floats.iter().enumerate().rev();
    let rightmost = (0..kept.len()).rev().map(|number| rest.find(|(_, float)| fits(number, float)).map(|(at, _)| at));
    let rightmost: Vec<usize> = rightmost.collect::<Option<_>>()?;
    leftmost.iter().eq(rightmost.iter().rev()).then(|| leftmost.into_iter().map(|at| floats[at].clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::model::tests::{dict, tensor};
    use crate::catalog::{Dict, Dtype};
    use crate::storage::FileId;

    #[test]
    fn optimizer_state_knows_its_parameter() {
        let path = |steps: &[&str]| Path(steps.iter().map(|step| Key::Name((*step).into())).collect());
        let state = path(&["optim", "state", "layers.0.weight", "exp_avg"]);
        assert_eq!(optimizer_parameter(&state).unwrap().as_str(), "layers.0.weight");
        let flat = path(&["optimizer", "state.layers.0.weight.exp_avg"]);
        assert_eq!(optimizer_parameter(&flat).unwrap().as_str(), "layers.0.weight");
        assert_eq!(optimizer_parameter(&path(&["optimizer", "param_groups.layers.0.weight.lr"])), None);
        let numbered = path(&["optimizer_0", "state", "layers.0.weight", "exp_avg"]);
        assert_eq!(optimizer_parameter(&numbered).unwrap().as_str(), "layers.0.weight");
        assert_eq!(optimizer_parameter(&path(&["optimizer_", "state", "w", "exp_avg"])), None);
        assert_eq!(optimizer_parameter(&path(&["model", "w"])), None);
        assert_eq!(optimizer_parameter(&path(&["optim", "state"])), None);
        assert_eq!(optimizer_parameter(&path(&["optim"])), None);
    }

    #[test]
    fn numbers_stand_for_parameters_where_there_is_one_reading() {
        let float =
            |name: &str, size: u64| TensorEntry::whole(name.into(), Dtype::F32, [size].as_slice().into(), FileId(0), 0);
        // a [4], a buffer [2], b [3]; state of two parameters.
        let read = |sizes: [u64; 3], states: [u64; 2], groups: &[&[i64]]| {
            let mut catalog = Catalog::empty();
            let weights = dict(["a", "buffer", "b"].into_iter().zip((0..).map(tensor)).collect());
            catalog.tensors =
                ["a", "buffer", "b"].into_iter().zip(sizes).map(|(name, size)| float(name, size)).collect();
            catalog.tensors.extend(states.map(|size| float("state", size)));
            catalog.state = dict(vec![("model", weights)]);
            let state = |id| dict(vec![("exp_avg", tensor(id))]);
            let states = vec![(Value::Int(0), state(3)), (Value::Int(1), state(4))];
            let group = |numbers: &&[i64]| {
                dict(vec![("params", Value::List(numbers.iter().copied().map(Value::Int).collect()))])
            };
            let optimizer = dict(vec![
                ("state", Value::Dict(Dict { entries: states, ..Dict::default() })),
                ("param_groups", Value::List(groups.iter().map(group).collect())),
            ]);
            let found = numbered_parameters(&catalog, &optimizer, &|_| true)?;
            Some(found.iter().map(|(fqn, _)| fqn.to_string()).collect::<Vec<_>>())
        };
        assert_eq!(read([4, 2, 3], [4, 3], &[&[0, 1]]).unwrap(), ["a", "b"]);
        // The buffer could be the second parameter.
        assert_eq!(read([4, 3, 3], [4, 3], &[&[0, 1]]), None);
        assert_eq!(read([4, 2, 3], [4, 5], &[&[0, 1]]), None);
        // Groups are in an order of their own.
        assert_eq!(read([4, 2, 3], [4, 3], &[&[0], &[1]]), None);
        assert_eq!(read([4, 2, 3], [4, 3], &[&[1, 0]]), None);
    }
}
