//! Optimizer state whose keys are dotted names: `{'state.w.exp_avg': .., 'param_groups.w.lr': ..}`. PyTorch writes such
//! state if the option `flatten_optimizer_state_dict` is set.
//!
//! Such state has options for each parameter, but no parameter groups and no order of parameters. The flat layout
//! provides both. If the layout has no groups, all flat parameters form one group; this needs `use_orig_params=False`
//! and equal options for all parameters.
//!
//! Source: `_flatten_optim_state_dict` in `torch/distributed/checkpoint/state_dict.py`.

use indexmap::IndexMap;

use super::groups::{message_prefix, same_options, unknown_parameter_error};
use super::params::ParameterNames;
use crate::catalog::flat::FlatLayout;
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::{Dict, Path, Value};
use crate::error::{Error, Result};

/// Returns whether a dict is optimizer state with dotted names: it has keys such as `state.w.exp_avg` and keys such as
/// `param_groups.w.lr`.
pub fn has_dotted_keys(dict: &Dict) -> bool {
    let has = |container: &str| dict.entries.iter().any(|(key, _)| strip_container(container, key).is_some());
    has(STATE) && has(GROUPS)
}

/// Returns optimizer state with dotted keys as nested dicts. If the layout has parameter groups, the result has one
/// group for each parameter, and the caller then forms the groups of the layout. Otherwise the result has one group
/// with all parameters.
///
/// # Errors
/// `Unsupported` if the layout has no parameter groups, and `use_orig_params` is true or parameters differ in their
/// options; `Unsupported` for state of an unknown parameter.
pub fn nest(dict: &Dict, path: &Path, names: &ParameterNames<'_>, layout: &FlatLayout) -> Result<Dict> {
    let mut states: IndexMap<&str, Dict> = IndexMap::new();
    let mut options: IndexMap<&str, Dict> = IndexMap::new();
    let mut others = Vec::new();
    for (key, value) in &dict.entries {
        let (found, rest) = match (strip_container(STATE, key), strip_container(GROUPS, key)) {
            (Some(rest), _) => (&mut states, rest),
            (None, Some(rest)) => (&mut options, rest),
            (None, None) => {
                others.push((key.clone(), value.clone()));
                continue;
            }
        };
        let (fqn, last) = rest
            .rsplit_once('.')
            .filter(|(fqn, _)| names.find_trained(fqn).is_some())
            .ok_or_else(|| unknown_parameter_error(path, rest))?;
        found.entry(fqn).or_default().entries.push((Value::Str(last.into()), value.clone()));
    }
    let groups = if layout.optimizer.is_some() {
        options.into_iter().map(|(fqn, options)| group(options, &[fqn])).collect()
    } else {
        let fqns: Vec<&str> = options.keys().copied().collect();
        let mut all = options.into_values();
        match all.next() {
            Some(first) if !layout.use_orig_params && all.all(|other| same_options(&first, &other)) => {
                vec![group(first, &fqns)]
            }
            _ => return Err(no_groups_error(path)),
        }
    };
    let states = states.into_iter().map(|(fqn, state)| (Value::Str(fqn.into()), Value::Dict(state))).collect();
    let states = Value::Dict(Dict { entries: states, ..Dict::default() });
    let mut entries = vec![(Value::Str(STATE.into()), states), (Value::Str(GROUPS.into()), Value::List(groups))];
    entries.extend(others);
    Ok(Dict { kind: dict.kind, entries, attributes: None })
}

fn strip_container<'k>(container: &str, key: &'k Value) -> Option<&'k str> {
    key.as_str()?.strip_prefix(container)?.strip_prefix('.')
}

fn group(mut options: Dict, fqns: &[&str]) -> Value {
    options.entries.retain(|(key, _)| key.as_str() != Some(PARAMS));
    let params = fqns.iter().map(|fqn| Value::Str((*fqn).into())).collect();
    options.entries.push((Value::Str(PARAMS.into()), Value::List(params)));
    Value::Dict(options)
}

fn no_groups_error(path: &Path) -> Error {
    Error::unsupported(
        format!(
            "{}optimizer state saved with flatten_optimizer_state_dict does not record parameter groups",
            message_prefix(path)
        ),
        "give a flat layout with `optimizer` (options::flat_layout), or leave the state out (options::exclude)",
    )
}
