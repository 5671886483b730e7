//! Finds the parameter of each tensor in an optimizer state dict.
//!
//! `get_optimizer_state_dict` uses parameter names as keys and in `params`. `optimizer.state_dict()` uses numbers, in
//! the order in which parameters were given to the optimizer, and does not record the names of parameters.
//!
//! Source: `Optimizer.state_dict` in `torch/optim/optimizer.py`, `torch/distributed/checkpoint/state_dict.py`.

use std::collections::HashSet;

use super::wrappers::clean_name;
use super::{Dict, Fqn, Key, Path, Value};

/// The keys under which trainers store an optimizer.
const OPTIMIZER: [&str; 5] = ["optimizer", "optim", "optimizers", "optimizer_state_dict", "optimizer_states"];

/// Returns whether trainers store an optimizer under this key. Lightning adds numbers: `optimizer_0`.
///
/// Source: `FSDPStrategy.save_checkpoint` in `lightning/pytorch/strategies/fsdp.py` (2.6).
pub fn is_optimizer_key(key: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    OPTIMIZER.contains(&key) || key.strip_prefix("optimizer_").is_some_and(is_number)
}

/// The key of an optimizer state dict under which the state is stored: one dict for each parameter.
pub const STATE: &str = "state";
/// The key of an optimizer state dict under which the parameter groups are stored: a list of dicts of options.
pub const GROUPS: &str = "param_groups";
/// The key of a parameter group under which the parameters of the group are listed.
pub const PARAMS: &str = "params";
/// The key of a parameter group under which PyTorch 2.6 and later list the names of the group's parameters, in addition
/// to the list of their numbers.
pub const PARAM_NAMES: &str = "param_names";

/// The optimizer and the parameter of a state tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptimizerState {
    /// The path of the optimizer.
    pub optimizer: Path,
    /// The name or number of the parameter, as text.
    pub parameter: Fqn,
}

/// Returns the optimizer and the parameter of a path such as `optim.state.FQN.exp_avg`. The component `state` may be a
/// key of its own, or the start of a longer key that `flatten_optimizer_state_dict` has written.
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

/// Returns the name or number of the parameter to which an optimizer state tensor at this path belongs.
pub fn optimizer_parameter(path: &Path) -> Option<Fqn> {
    optimizer_state(path).map(|state| state.parameter)
}

/// Returns whether a name of a flat state dict looks like the name of an optimizer state tensor:
/// `optim.state.w.exp_avg`.
pub fn reads_as_optimizer_state(name: &str) -> bool {
    let mut parts = name.split('.');
    parts.any(is_optimizer_key) && parts.next() == Some("state")
}

/// Returns the parameter names of each group of the first optimizer that records names, or `None` if no optimizer
/// records names.
pub fn named_groups(state: &Value) -> Option<Vec<Vec<Fqn>>> {
    /// The maximum number of keys above `param_groups`, as in `app.optim.param_groups`.
    const DEPTH: usize = 2;
    groups_within(state, DEPTH)
}

fn groups_within(state: &Value, depth: usize) -> Option<Vec<Vec<Fqn>>> {
    let dict = state.as_dict()?;
    let own = || names_of(dict.get(GROUPS)?);
    let below = || dict.entries.iter().find_map(|(_, value)| groups_within(value, depth.checked_sub(1)?));
    own().or_else(below)
}

/// Returns the list `params` of each parameter group, or `None` if these lists do not contain names.
pub(super) fn names_of(groups: &Value) -> Option<Vec<Vec<Fqn>>> {
    let Value::List(groups) = groups else { return None };
    let names = |group: &Value| match group.as_dict()?.get(PARAMS)? {
        Value::List(names) => names.iter().map(|name| name.as_str().map(Fqn::from)).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    let groups: Vec<Vec<Fqn>> = groups.iter().map(names).collect::<Option<_>>()?;
    (!groups.is_empty()).then_some(groups)
}

/// Returns the parameter numbers that each parameter group of an optimizer state dict lists in `params`. Returns `None`
/// if a group lists anything else, if all groups are empty, or if the dict is not an optimizer state dict.
pub(super) fn numbers(optimizer: &Dict) -> Option<Vec<Vec<usize>>> {
    let (Value::List(groups), Value::Dict(_)) = (optimizer.get(GROUPS)?, optimizer.get(STATE)?) else { return None };
    let number = |value: &Value| usize::try_from(value.as_i64()?).ok();
    let of_group = |group: &Value| match group.as_dict()?.get(PARAMS)? {
        Value::List(params) => params.iter().map(number).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    let groups: Vec<Vec<usize>> = groups.iter().map(of_group).collect::<Option<_>>()?;
    groups.iter().any(|group| !group.is_empty()).then_some(groups)
}

/// Returns the names in the lists `param_names` of all groups: item `i` of the result is the name of parameter `i`.
/// Returns `None` if a group has no such list, or if the lists do not give every number a name of its own.
pub(super) fn listed_names(optimizer: &Dict) -> Option<Vec<Fqn>> {
    let Value::List(groups) = optimizer.get(GROUPS)? else { return None };
    let mut listed = Vec::new();
    for group in groups {
        let Value::List(names) = group.as_dict()?.get(PARAM_NAMES)? else { return None };
        for name in names {
            listed.push(clean(name.as_str()?));
        }
    }
    by_number(&numbers(optimizer)?, listed)
}

/// Sorts parameter names by parameter number. `groups` has the numbers, and `names` has the names in the same order.
/// Returns `None` unless the numbers are 0, 1, 2, ... without gaps or duplicates, each has one name, and all names
/// differ.
pub(super) fn by_number(groups: &[Vec<usize>], names: Vec<Fqn>) -> Option<Vec<Fqn>> {
    let numbers: Vec<usize> = groups.iter().flatten().copied().collect();
    if numbers.len() != names.len() {
        return None;
    }
    let mut pairs: Vec<(usize, Fqn)> = numbers.into_iter().zip(names).collect();
    pairs.sort_unstable();
    let is_complete = pairs.iter().enumerate().all(|(index, (number, _))| index == *number);
    let distinct: HashSet<&Fqn> = pairs.iter().map(|(_, name)| name).collect();
    (is_complete && distinct.len() == pairs.len()).then(|| pairs.into_iter().map(|(_, name)| name).collect())
}

/// Returns the name of a parameter without wrapper components.
pub(super) fn clean(name: &str) -> Fqn {
    Fqn::from(clean_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_path_gives_its_parameter() {
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
}
