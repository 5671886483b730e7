//! What the state dict of an optimizer tells of parameters: by their names, or by numbers.
//!
//! `get_optimizer_state_dict` has names for keys and in `params`. `optimizer.state_dict()` has numbers, in the order in
//! which the optimizer was given its parameters, and nothing says whose they are.
//!
//! Source: `Optimizer.state_dict` in `torch/optim/optimizer.py`, `torch/distributed/checkpoint/state_dict.py`.

use super::{Fqn, Key, Path, Value};

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
