//! Replaces the parameter numbers of a plain `optimizer.state_dict()` by parameter names, and names by numbers.
//!
//! `get_optimizer_state_dict` of `torch/distributed/checkpoint/state_dict.py` also replaces numbers by names before a
//! job saves a DCP directory: names become the keys of `state` and the items of `params`. All other values stay as they
//! are.

use std::collections::HashMap;

use super::optimizer::{GROUPS, PARAMS, STATE, by_number, clean, listed_names, names_of, numbers};
use super::owner::{contradicts_listed, contradicts_order, numbered_parameters};
use super::path::key_text;
use super::{Catalog, Dict, Fqn, Key, Path, Value, state_dict};

/// The maximum number of keys above an optimizer state dict, as in `state.optimizers.0`.
const DEPTH: usize = 4;

/// Returns the paths of the optimizer state dicts that refer to parameters by number.
pub fn numbered_optimizers(state: &Value) -> Vec<Path> {
    optimizers(state, &|dict| numbers(dict).is_some())
}

/// Returns the paths of the optimizer state dicts that refer to parameters by name.
pub fn named_optimizers(state: &Value) -> Vec<Path> {
    optimizers(state, &|dict| dict.get(GROUPS).and_then(names_of).is_some())
}

/// Returns whether the complete state dict is the state dict of one optimizer that refers to parameters by name. Such a
/// state dict has no model beside the optimizer.
pub fn is_named_optimizer(state: &Value) -> bool {
    named_optimizers(state) == [Path::default()]
}

/// Returns the paths of the dicts that `is_optimizer` accepts.
fn optimizers(state: &Value, is_optimizer: &dyn Fn(&Dict) -> bool) -> Vec<Path> {
    let mut found = Vec::new();
    find(state, &Path::default(), is_optimizer, &mut found);
    found
}

fn find(value: &Value, path: &Path, is_optimizer: &dyn Fn(&Dict) -> bool, found: &mut Vec<Path>) {
    match value {
        Value::Dict(dict) if is_optimizer(dict) => found.push(path.clone()),
        Value::Dict(dict) if path.0.len() < DEPTH => {
            for (key, child) in &dict.entries {
                find(child, &path.child(Key::Name(key_text(key))), is_optimizer, found);
            }
        }
        Value::List(items) if path.0.len() < DEPTH => {
            for (index, child) in (0..).zip(items) {
                find(child, &path.child(Key::Index(index)), is_optimizer, found);
            }
        }
        _ => {}
    }
}

/// Returns the parameter names of an optimizer that refers to parameters by number: item `i` is the name of parameter
/// `i`. The names come from the model ([`numbered_parameters`]), or, if the state dict has no model, from the lists
/// `param_names` of the parameter groups. Returns `None` if the name of a parameter is unknown.
pub fn parameter_names(catalog: &Catalog, optimizer: &Path) -> Option<Vec<Fqn>> {
    let optimizer = optimizer.find(&catalog.state)?;
    let of_model = || {
        let parameters = numbered_parameters(catalog, optimizer, &|_| true)?;
        Some(parameters.into_iter().map(|(name, _)| clean(name.as_str())).collect())
    };
    let has_model = !state_dict::model(&catalog.state).tensors.is_empty();
    of_model().or_else(|| listed_names(optimizer.as_dict()?).filter(|_| !has_model))
}

/// The parameter names of an optimizer that refers to parameters by number, or the reason why they are unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// The parameter groups list the names (`param_names`). Item `i` is the name of parameter `i`.
    Listed(Vec<Fqn>),
    /// The parameter groups list no names, but the shapes of the state permit exactly one assignment of the numbers to
    /// the model's parameters in the order of the model. Item `i` is the name of parameter `i`.
    InModelOrder(Vec<Fqn>),
    /// The names of the parameters are unknown: none are listed, and the model does not determine them.
    Unknown,
    /// The parameter groups list names that contradict the shapes of the state.
    ContradictsNames,
    /// The parameter groups list no names, and the shapes of the state contradict the order of the model's parameters.
    ContradictsOrder,
}

/// Finds the name of each numbered parameter of the optimizer at the path `optimizer`.
pub fn numbering(catalog: &Catalog, optimizer: &Path) -> Numbering {
    let Some(value) = optimizer.find(&catalog.state) else { return Numbering::Unknown };
    let Some(listed) = value.as_dict().and_then(listed_names) else {
        return match parameter_names(catalog, optimizer) {
            Some(names) => Numbering::InModelOrder(names),
            None if contradicts_order(catalog, value) => Numbering::ContradictsOrder,
            None => Numbering::Unknown,
        };
    };
    match contradicts_listed(catalog, value) {
        Some(true) => Numbering::ContradictsNames,
        Some(false) => Numbering::Listed(parameter_names(catalog, optimizer).unwrap_or(listed)),
        None => Numbering::Listed(listed),
    }
}

/// Returns the parameter names in each parameter group of an optimizer: the items of `params`, or, if these items are
/// numbers, the names in `param_names`. Returns `None` if the items are numbers, and `param_names` is missing or
/// contradicts the shapes of the state.
pub fn groups_of_names(catalog: &Catalog, optimizer: &Path) -> Option<Vec<Vec<Fqn>>> {
    let dict = optimizer.find(&catalog.state)?.as_dict()?;
    if let Some(groups) = names_of(dict.get(GROUPS)?) {
        return Some(groups);
    }
    let Numbering::Listed(names) = numbering(catalog, optimizer) else { return None };
    let of_number = |number: &usize| names.get(*number).cloned();
    numbers(dict)?.iter().map(|group| group.iter().map(of_number).collect()).collect()
}

/// Returns the first two consecutive parameters of a group that are in the opposite order in the model, or `None` if
/// every group has the order of the model. Names that the model lacks are skipped.
pub fn out_of_order(catalog: &Catalog, groups: &[Vec<Fqn>]) -> Option<(Fqn, Fqn)> {
    let model = state_dict::model(&catalog.state).tensors;
    let positions: HashMap<Fqn, usize> = model.iter().map(|(name, _)| clean(name.as_str())).zip(0..).collect();
    let in_model = |group: &Vec<Fqn>| -> Vec<(usize, Fqn)> {
        let known = group.iter().map(|name| clean(name.as_str()));
        known.filter_map(|name| Some((*positions.get(&name)?, name))).collect()
    };
    groups.iter().find_map(|group| {
        let group = in_model(group);
        let pair = group.windows(2).find(|pair| pair[0].0 > pair[1].0)?;
        Some((pair[0].1.clone(), pair[1].1.clone()))
    })
}

/// Returns the parameter names of the optimizer at `path`, taken from `like`, another checkpoint of the job: from the
/// only optimizer in `like`, or, if there are several, from the one at `path`. Item `i` is the name of parameter `i`.
/// Returns `None` unless the parameter groups of the two optimizers have equal numbers of parameters.
pub fn parameter_names_like(catalog: &Catalog, path: &Path, like: &Catalog) -> Option<Vec<Fqn>> {
    let groups = numbers(path.find(&catalog.state)?.as_dict()?)?;
    let at_path = |found: Vec<Path>| match found.as_slice() {
        [only] => Some(only.clone()),
        several => several.iter().find(|other| *other == path).cloned(),
    };
    let named = || names_of(at_path(named_optimizers(&like.state))?.find(&like.state)?.as_dict()?.get(GROUPS)?);
    let numbered = || {
        let other = at_path(numbered_optimizers(&like.state))?;
        let names = parameter_names(like, &other)?;
        let of_number = |number: &usize| names.get(*number).cloned();
        let group = |group: &Vec<usize>| group.iter().map(of_number).collect::<Option<Vec<Fqn>>>();
        numbers(other.find(&like.state)?.as_dict()?)?.iter().map(group).collect::<Option<Vec<_>>>()
    };
    let named = named().or_else(numbered)?;
    let is_alike =
        groups.len() == named.len() && groups.iter().zip(&named).all(|(own, other)| own.len() == other.len());
    is_alike.then(|| by_number(&groups, named.iter().flatten().map(|name| clean(name.as_str())).collect()))?
}

/// Returns whether the parameter groups of two optimizers list equal parameter numbers.
pub fn has_equal_groups(optimizer: &Value, other: &Value) -> bool {
    let groups = |optimizer: &Value| optimizer.as_dict().and_then(numbers);
    groups(optimizer) == groups(other)
}

/// Returns whether an optimizer state dict refers to parameters by number, either in the keys of `state` or in the
/// parameter groups. The dict may lack `state` or the groups.
pub fn has_numbers(optimizer: &Value) -> bool {
    let Some(dict) = optimizer.as_dict() else { return false };
    let states = dict.get(STATE).and_then(Value::as_dict);
    states.is_some_and(|states| states.entries.iter().any(|(key, _)| key.as_i64().is_some())) || numbers(dict).is_some()
}

/// Replaces each parameter number `i` of an optimizer by `names[i]`. Returns false, and changes nothing, if a number
/// has no name in `names`.
pub fn set_parameter_names(state: &mut Value, optimizer: &Path, names: &[Fqn]) -> bool {
    let name = |key: &Value| names.get(usize::try_from(key.as_i64()?).ok()?).map(|name| Value::Str(name.into()));
    replace_parameters(state, optimizer, &name)
}

/// Replaces the names of an optimizer's parameters by their positions in `names`. Returns false, and changes nothing,
/// if the optimizer has a name that is not in `names`.
pub fn set_parameter_numbers(state: &mut Value, optimizer: &Path, names: &[Fqn]) -> bool {
    // If a name occurs twice, the map has its first number.
    let numbers: HashMap<&Fqn, usize> = names.iter().enumerate().rev().map(|(number, name)| (name, number)).collect();
    let number = |key: &Value| Some(Value::Int((*numbers.get(&clean(key.as_str()?))?).try_into().ok()?));
    replace_parameters(state, optimizer, &number)
}

/// Replaces the names of an optimizer's parameters by numbers, as in `optimizer.state_dict()`. The parameters are
/// numbered group by group, and inside a group in the order of `position`. Returns false, and changes nothing, if the
/// groups do not list names, or if the state has a name that no group lists.
pub fn number_parameters(state: &mut Value, optimizer: &Path, position: &dyn Fn(&Fqn) -> Option<usize>) -> bool {
    let groups = optimizer.find(state).and_then(Value::as_dict).and_then(|dict| names_of(dict.get(GROUPS)?));
    let Some(mut groups) = groups else { return false };
    for group in &mut groups {
        group.sort_by_key(|name| position(&clean(name.as_str())).unwrap_or(usize::MAX));
    }
    let names: Vec<Fqn> = groups.iter().flatten().map(|name| clean(name.as_str())).collect();
    if !set_parameter_numbers(state, optimizer, &names) {
        return false;
    }
    let Some(Value::Dict(dict)) = optimizer.find_mut(state) else { return true };
    for (key, value) in &mut dict.entries {
        match (key.as_str(), value) {
            (Some(STATE), Value::Dict(states)) => states.entries.sort_by_key(|(key, _)| key.as_i64()),
            (Some(GROUPS), Value::List(groups)) => groups.iter_mut().for_each(sort_params),
            _ => {}
        }
    }
    true
}

/// Sorts the numbers of a parameter group.
fn sort_params(group: &mut Value) {
    let Value::Dict(group) = group else { return };
    for (key, params) in &mut group.entries {
        if let (Some(PARAMS), Value::List(params)) = (key.as_str(), params) {
            params.sort_by_key(Value::as_i64);
        }
    }
}

/// Replaces the keys of the state of an optimizer, and the items of `params` of its groups, by the results of `new`.
/// Returns false, and changes nothing, if `new` returns `None` for a key or an item.
fn replace_parameters(state: &mut Value, optimizer: &Path, new: &dyn Fn(&Value) -> Option<Value>) -> bool {
    let Some(Value::Dict(optimizer)) = optimizer.find_mut(state) else { return false };
    let mut replaced = optimizer.clone();
    let replace = |key: &mut Value| {
        *key = new(key)?;
        Some(())
    };
    let done = replaced.entries.iter_mut().try_for_each(|(key, value)| match (key.as_str(), value) {
        (Some(STATE), Value::Dict(states)) => states.entries.iter_mut().try_for_each(|(key, _)| replace(key)),
        (Some(GROUPS), Value::List(groups)) => groups.iter_mut().try_for_each(|group| {
            let Value::Dict(group) = group else { return None };
            let params = group.entries.iter_mut().find(|(key, _)| key.as_str() == Some(PARAMS));
            let Some((_, Value::List(params))) = params else { return None };
            params.iter_mut().try_for_each(replace)
        }),
        _ => Some(()),
    });
    if done.is_some() {
        *optimizer = replaced;
    }
    done.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::state_dict::tests::{dict, tensor};
    use crate::catalog::{Dtype, TensorEntry};
    use crate::storage::FileId;

    fn list<T>(items: &[T], value: impl Fn(&T) -> Value) -> Value {
        Value::List(items.iter().map(value).collect())
    }

    /// Returns an optimizer state dict. Each item of `groups` has the parameter numbers of a group, and the names that
    /// the group lists; without names, the group has no `param_names`.
    fn optimizer(states: &[i64], groups: &[(&[i64], &[&str])]) -> Value {
        let state = states.iter().map(|number| (Value::Int(*number), dict(vec![("step", Value::Int(7))]))).collect();
        let group = |(numbers, names): &(&[i64], &[&str])| {
            let mut entries = vec![("lr", Value::Float(0.1)), (PARAMS, list(numbers, |number| Value::Int(*number)))];
            if !names.is_empty() {
                entries.push(("param_names", list(names, |name| Value::Str((*name).into()))));
            }
            dict(entries)
        };
        let state = Value::Dict(crate::catalog::Dict { entries: state, ..Default::default() });
        dict(vec![(STATE, state), (GROUPS, list(groups, group))])
    }

    fn catalog(parameters: &[&str], optimizer: Value) -> Catalog {
        let mut catalog = Catalog::empty();
        let entry = |name: &&str| TensorEntry::whole((*name).into(), Dtype::F32, [2].as_slice().into(), FileId(0), 0);
        catalog.tensors = parameters.iter().map(entry).collect();
        let model = dict(parameters.iter().copied().zip((0..).map(tensor)).collect());
        catalog.state = dict(vec![("model", model), ("optim", optimizer)]);
        catalog
    }

    fn path() -> Path {
        Path(vec![Key::Name("optim".into())])
    }

    fn names(catalog: &Catalog) -> Option<Vec<String>> {
        Some(parameter_names(catalog, &path())?.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn listed_names_are_used_in_the_order_of_the_numbers() {
        let groups: [(&[i64], &[&str]); 2] = [(&[0, 2], &["module.b", "module._orig_mod.c"]), (&[1], &["module.a"])];
        let found = catalog(&["a", "b", "c"], optimizer(&[0, 1], &groups));
        assert_eq!(names(&found).unwrap(), ["b", "a", "c"]);
        // Names are refused if the model lacks a name, a name occurs twice, or a number has no name.
        let groups: [(&[i64], &[&str]); 1] = [(&[0, 1], &["a", "x"])];
        assert_eq!(names(&catalog(&["a", "b", "c"], optimizer(&[], &groups))), None);
        let groups: [(&[i64], &[&str]); 1] = [(&[0, 1], &["a", "a"])];
        assert_eq!(names(&catalog(&["a", "b", "c"], optimizer(&[], &groups))), None);
        let groups: [(&[i64], &[&str]); 1] = [(&[0, 2], &["a", "b"])];
        assert_eq!(names(&catalog(&["a", "b", "c"], optimizer(&[], &groups))), None);
    }

    #[test]
    fn numbers_become_names_and_names_numbers() {
        let saved = optimizer(&[0, 1], &[(&[1], &[]), (&[0], &[])]);
        let mut state = dict(vec![("optim", saved.clone())]);
        let names = ["a", "b"].map(Fqn::from);
        assert_eq!(numbered_optimizers(&state), [path()]);
        assert!(!set_parameter_names(&mut state, &path(), &names[..1]));
        assert_eq!(state, dict(vec![("optim", saved.clone())]), "a number without a name changes nothing");
        assert!(set_parameter_names(&mut state, &path(), &names));
        assert_eq!(
            format!("{state:.1000}"),
            "{'optim': {'state': {'a': {'step': 7}, 'b': {'step': 7}}, \
             'param_groups': [{'lr': 0.1, 'params': ['b']}, {'lr': 0.1, 'params': ['a']}]}}"
        );
        assert!(numbered_optimizers(&state).is_empty());
        assert!(!set_parameter_numbers(&mut state, &path(), &names[..1]));
        assert!(set_parameter_numbers(&mut state, &path(), &names));
        assert_eq!(state, dict(vec![("optim", saved)]));
    }

    #[test]
    fn names_of_another_checkpoint_are_used_if_its_groups_have_the_same_sizes() {
        let saved = catalog(&[], optimizer(&[0], &[(&[0], &[]), (&[1, 2], &[])]));
        let like = |sizes: &[&[&str]]| {
            let group = |names: &&[&str]| dict(vec![(PARAMS, list(names, |name| Value::Str((*name).into())))]);
            let state = dict(vec![(STATE, dict(vec![])), (GROUPS, list(sizes, group))]);
            Catalog { state: dict(vec![("optimizer", state)]), ..Catalog::empty() }
        };
        let found = parameter_names_like(&saved, &path(), &like(&[&["x"], &["y", "z"]])).unwrap();
        assert_eq!(found.iter().map(Fqn::as_str).collect::<Vec<_>>(), ["x", "y", "z"]);
        assert_eq!(parameter_names_like(&saved, &path(), &like(&[&["x", "y"], &["z"]])), None);
        let numbered = catalog(&["p", "q", "r"], optimizer(&[], &[(&[2], &["r"]), (&[0, 1], &["p", "q"])]));
        let found = parameter_names_like(&saved, &path(), &numbered).unwrap();
        assert_eq!(found.iter().map(Fqn::as_str).collect::<Vec<_>>(), ["r", "p", "q"]);
    }
}
