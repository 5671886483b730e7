//! Finds the parameter that owns an optimizer state tensor or a gradient, and the names of this tensor that placement
//! rules match.
//!
//! Optimizer state and gradients follow their parameter: a rule for the parameter `layers.0.w1` also applies to the
//! gradient and the moments of this parameter. An optimizer refers to parameters by name or by number; see
//! [`optimizer`]. Invariant: a number is resolved to a parameter only if exactly one assignment of numbers to
//! parameters is possible.

use std::collections::{HashMap, HashSet};

use super::optimizer::{self, GROUPS, OptimizerState, PARAMS, STATE, listed_names};
use super::wrappers::clean_name;
use super::{Catalog, Fqn, Path, TensorEntry, TensorId, Value, state_dict};

/// The parameter that an optimizer state tensor or a gradient belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// True if the optimizer refers to the parameter by number instead of name.
    pub by_number: bool,
    /// The name of the parameter; `None` for a number that could not be resolved.
    pub name: Option<Fqn>,
    /// The tensor of the parameter, if the model contains the parameter.
    pub id: Option<TensorId>,
}

/// A lookup of the parameter that owns an optimizer state tensor or a gradient.
#[derive(Debug)]
pub struct Owners<'a> {
    catalog: &'a Catalog,
    pub model_root: Path,
    /// The tensors of the model, by name.
    pub parameters: HashMap<Fqn, TensorId>,
    /// A cache: for each optimizer that was looked up, the parameters in the order of their numbers, or `None` if the
    /// numbers could not be resolved.
    numbered: HashMap<Path, Option<Vec<(Fqn, TensorId)>>>,
    /// True if a plain state tensor matches a sharded parameter of the same local shape.
    by_local_shape: bool,
}

impl<'a> Owners<'a> {
    /// Prepares the lookup for a catalog.
    #[must_use]
    pub fn new(catalog: &'a Catalog) -> Self {
        let found = state_dict::model(&catalog.state);
        let parameters = found.tensors.into_iter().collect();
        Self { catalog, model_root: found.root, parameters, numbered: HashMap::new(), by_local_shape: false }
    }

    /// Prepares the lookup for a catalog whose optimizer state may be plain tensors with the local parts of the state.
    #[must_use]
    pub fn by_local_shape(catalog: &'a Catalog) -> Self {
        Self { by_local_shape: true, ..Self::new(catalog) }
    }

    /// Returns the owner of the tensor at this path, or `None` if the tensor is neither optimizer state nor a gradient.
    pub fn owner_of(&mut self, path: &Path) -> Option<Owner> {
        let beside_model = self.model_root.0.is_empty() || !path.0.starts_with(&self.model_root.0);
        if let Some(parameter) = state_dict::gradient_parameter(path).filter(|_| beside_model) {
            let id = self.parameters.get(&parameter).copied();
            return Some(Owner { by_number: false, id, name: Some(parameter) });
        }
        let OptimizerState { optimizer, parameter } = optimizer::optimizer_state(path)?;
        let Ok(number) = parameter.as_str().parse::<usize>() else {
            let id = self.parameters.get(&parameter).copied();
            return Some(Owner { by_number: false, id, name: Some(parameter) });
        };
        let (catalog, by_local_shape) = (self.catalog, self.by_local_shape);
        let alike = |state: &TensorEntry, parameter: &TensorEntry| {
            is_alike(state, parameter)
                || by_local_shape && !state.is_shared() && state.local_shapes() == parameter.local_shapes()
        };
        let resolve = |optimizer: &Path| {
            let optimizer = optimizer.find(&catalog.state)?;
            listed_parameters(catalog, optimizer).or_else(|| match_numbers(catalog, optimizer, &|_| true, &alike))
        };
        let numbered = self.numbered.entry(optimizer).or_insert_with_key(resolve);
        let known = numbered.as_ref().and_then(|parameters| parameters.get(number));
        Some(match known {
            Some((name, id)) => Owner { by_number: true, name: Some(name.clone()), id: Some(*id) },
            None => Owner { by_number: true, name: None, id: None },
        })
    }

    /// Returns the names of a tensor that placement rules are compared with. `other_shape` is true if the shape of an
    /// optimizer state tensor differs from the shape of its parameter (a step, a factored moment), so placement rules
    /// for the parameter do not apply to the state tensor. A parameter number is never returned as a name.
    #[must_use]
    pub fn rule_names(&self, path: &Path, owner: Option<&Owner>, other_shape: bool) -> Vec<String> {
        let mut names = state_dict::rule_names(path, &self.model_root);
        if other_shape && !self.parameters.is_empty() || owner.is_some_and(|owner| owner.by_number) {
            names.truncate(1);
        }
        if let Some(Owner { by_number: true, name: Some(name), .. }) = owner.filter(|_| !other_shape) {
            names.push(format!("{}.{name}", self.model_root));
            names.push(name.to_string());
        }
        names
    }
}

/// Resolves the numbered parameters of a plain `optimizer.state_dict()`: item `i` of the result is parameter `i`.
///
/// Since PyTorch 2.6, the groups of an optimizer that was created with named parameters list the names
/// (`param_names`). Other state dicts do not record which parameter a number belongs to. PyTorch numbers parameters in
/// the order of `model.parameters()`, which is the order of the model's state dict without buffers and frozen
/// parameters.
///
/// Without listed names, returns `None` unless exactly one assignment is possible: there is one parameter group, numbered
/// from 0, and exactly one subsequence of the model's tensors matches the state. A subsequence matches if every state
/// tensor with at least one dim has the shape of its parameter, and is a DTensor if and only if its parameter is a
/// DTensor. The function `may_be` returns false for tensors that are not parameters.
#[must_use]
pub fn numbered_parameters(
    catalog: &Catalog,
    optimizer: &Value,
    may_be: &dyn Fn(&Fqn) -> bool,
) -> Option<Vec<(Fqn, TensorId)>> {
    listed_parameters(catalog, optimizer).or_else(|| match_numbers(catalog, optimizer, may_be, &is_alike))
}

/// Returns the parameters that the groups of the optimizer list by name, if the model has all of them.
fn listed_parameters(catalog: &Catalog, optimizer: &Value) -> Option<Vec<(Fqn, TensorId)>> {
    let names = listed_names(optimizer.as_dict()?)?;
    let model = state_dict::model(&catalog.state).tensors.into_iter();
    let known: HashMap<String, (Fqn, TensorId)> =
        model.map(|(fqn, id)| (clean_name(fqn.as_str()), (fqn, id))).collect();
    // DistributedDataParallel adds `module.` to the names that the job gave the optimizer.
    let find = |name: &Fqn| {
        let name = name.as_str();
        known.get(name).or_else(|| known.get(name.strip_prefix("module.")?)).cloned()
    };
    names.iter().map(find).collect()
}

fn is_alike(state: &TensorEntry, parameter: &TensorEntry) -> bool {
    state.shape == parameter.shape && state.sharding.is_some() == parameter.sharding.is_some()
}

/// Resolves numbered parameters by their order, like [`numbered_parameters`] without listed names. The function `alike`
/// returns whether a state tensor has the shape of a parameter.
fn match_numbers(
    catalog: &Catalog,
    optimizer: &Value,
    may_be: &dyn Fn(&Fqn) -> bool,
    alike: &dyn Fn(&TensorEntry, &TensorEntry) -> bool,
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
    let mut floats = state_dict::model(&catalog.state).tensors;
    floats.retain(|(fqn, id)| catalog.tensor(*id).dtype.may_be_trained() && may_be(fqn) && seen.insert(*id));
    let fits = |number: usize, (_, id): &(Fqn, TensorId)| {
        let parameter = catalog.tensor(*id);
        kept[number].iter().all(|state| alike(state, parameter))
    };
    // If the leftmost and the rightmost assignment are equal, there is no other assignment.
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
    use crate::catalog::state_dict::tests::{dict, tensor};
    use crate::catalog::{Dict, Dtype};
    use crate::storage::FileId;

    #[test]
    fn numbers_are_resolved_only_if_one_assignment_exists() {
        let float =
            |name: &str, size: u64| TensorEntry::whole(name.into(), Dtype::F32, [size].as_slice().into(), FileId(0), 0);
        // The model has a [4], a buffer [2] and b [3]; the optimizer has state for two parameters.
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
        // The optimizer state could also belong to the buffer, so the assignment is not unique.
        assert_eq!(read([4, 3, 3], [4, 3], &[&[0, 1]]), None);
        assert_eq!(read([4, 2, 3], [4, 5], &[&[0, 1]]), None);
        // With several groups, the order of the parameters is unknown.
        assert_eq!(read([4, 2, 3], [4, 3], &[&[0], &[1]]), None);
        assert_eq!(read([4, 2, 3], [4, 3], &[&[1, 0]]), None);
    }
}
