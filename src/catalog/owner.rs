//! Which parameter a tensor is state or gradient of, and so which names a rule may know it by.
//!
//! Optimizer state and gradients follow their parameter: what somebody says of `layers.0.w1` is said of its gradient and
//! of its moments too. An optimizer knows parameters by name or by number; see [`optimizer`].

use std::collections::{HashMap, HashSet};

use super::optimizer::{self, GROUPS, OptimizerState, PARAMS, STATE};
use super::{Catalog, Fqn, Path, TensorEntry, TensorId, Value, model};

/// The parameter that a tensor is state or gradient of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub by_number: bool,
    /// `None` where it is known by a number that stands for nobody knows which.
    pub name: Option<Fqn>,
    pub id: Option<TensorId>,
}

/// Finds owners.
#[derive(Debug)]
pub struct Owners<'a> {
    catalog: &'a Catalog,
    pub model_root: Path,
    /// Tensors of the model by name.
    pub parameters: HashMap<Fqn, TensorId>,
    /// For each optimizer the parameters it knows by numbers, where they can be told.
    numbered: HashMap<Path, Option<Vec<(Fqn, TensorId)>>>,
}

impl<'a> Owners<'a> {
    #[must_use]
    pub fn new(catalog: &'a Catalog) -> Self {
        let found = model::model(&catalog.state);
        let parameters = found.tensors.into_iter().collect();
        Self { catalog, model_root: found.root, parameters, numbered: HashMap::new() }
    }

    /// The owner of what is at this path; `None` for what stands for itself.
    pub fn of(&mut self, path: &Path) -> Option<Owner> {
        let beside_model = self.model_root.0.is_empty() || !path.0.starts_with(&self.model_root.0);
        if let Some(parameter) = model::gradient_parameter(path).filter(|_| beside_model) {
            let id = self.parameters.get(&parameter).copied();
            return Some(Owner { by_number: false, id, name: Some(parameter) });
        }
        let OptimizerState { optimizer, parameter } = optimizer::optimizer_state(path)?;
        let Ok(number) = parameter.as_str().parse::<usize>() else {
            let id = self.parameters.get(&parameter).copied();
            return Some(Owner { by_number: false, id, name: Some(parameter) });
        };
        let catalog = self.catalog;
        let numbered = self
            .numbered
            .entry(optimizer)
            .or_insert_with_key(|optimizer| numbered_parameters(catalog, optimizer.find(&catalog.state)?, &|_| true));
        let known = numbered.as_ref().and_then(|parameters| parameters.get(number));
        Some(match known {
            Some((name, id)) => Owner { by_number: true, name: Some(name.clone()), id: Some(*id) },
            None => Owner { by_number: true, name: None, id: None },
        })
    }

    /// The names a rule may know a tensor by. State that is a `stray`, of another shape than its parameter (a step, a
    /// factored moment), is not meant by what is said of that, and a number is no name.
    #[must_use]
    pub fn rule_names(&self, path: &Path, owner: Option<&Owner>, stray: bool) -> Vec<String> {
        let mut names = model::rule_names(path, &self.model_root);
        if stray && !self.parameters.is_empty() || owner.is_some_and(|owner| owner.by_number) {
            names.truncate(1);
        }
        if let Some(Owner { by_number: true, name: Some(name), .. }) = owner.filter(|_| !stray) {
            names.push(format!("{}.{name}", self.model_root));
            names.push(name.to_string());
        }
        names
    }
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
    let mut floats = model::model(&catalog.state).tensors;
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
