//! Finds the parameter that owns an optimizer state tensor or a gradient, and the names of this tensor that placement
//! rules match.
//!
//! Optimizer state and gradients follow their parameter: a rule for the parameter `layers.0.w1` also applies to the
//! gradient and the moments of this parameter. An optimizer refers to parameters by name or by number; see
//! [`optimizer`]. Invariant: a number is resolved to a parameter only if exactly one assignment of numbers to
//! parameters is possible.
//!
//! The names in an optimizer may lack a prefix that the names of the model have, or the reverse: Fabric saves the model
//! under a key that the user chooses, and `DistributedDataParallel` adds `module`. See [`OptimizerNames`].

use std::collections::{HashMap, HashSet};

use super::optimizer::{self, GROUPS, OptimizerState, PARAMS, STATE, listed_names, numbers};
use super::wrappers::clean_name;
use super::{Catalog, Dict, Fqn, Path, TensorEntry, TensorId, Value, path, state_dict};

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
    /// A cache: the parameters of all optimizers by the names that the optimizers use. `None` until a name that the
    /// model does not have is looked up.
    named: Option<OptimizerNames>,
    /// True if a plain state tensor of a numbered parameter may match a sharded parameter with equal local shapes.
    by_local_shape: bool,
}

impl<'a> Owners<'a> {
    /// Prepares the lookup for a catalog.
    #[must_use]
    pub fn new(catalog: &'a Catalog) -> Self {
        let found = state_dict::model(&catalog.state);
        let parameters = found.tensors.into_iter().collect();
        let numbered = HashMap::new();
        Self { catalog, model_root: found.root, parameters, numbered, named: None, by_local_shape: false }
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
            if let Some(id) = self.parameters.get(&parameter).copied() {
                return Some(Owner { by_number: false, id: Some(id), name: Some(parameter) });
            }
            let (catalog, parameters) = (self.catalog, &self.parameters);
            let named = self.named.get_or_insert_with(|| OptimizerNames::new(catalog, parameters));
            return Some(match named.parameter(&optimizer, &parameter) {
                Some((name, id)) => Owner { by_number: false, id: Some(id), name: Some(name) },
                None => Owner { by_number: false, id: None, name: Some(parameter) },
            });
        };
        let (catalog, by_local_shape) = (self.catalog, self.by_local_shape);
        let alike = |state: &TensorEntry, parameter: &TensorEntry| {
            is_alike(state, parameter)
                || by_local_shape && !state.is_shared() && state.local_shapes() == parameter.local_shapes()
        };
        let resolve = |optimizer: &Path| resolve_numbers(catalog, optimizer.find(&catalog.state)?, &|_| true, &alike);
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
    pub fn rule_names(&self, path: &Path, owner: Option<&Owner>, other_shape: bool) -> Vec<String> {
        let mut names = state_dict::rule_names(path, &self.model_root);
        if other_shape && !self.parameters.is_empty() || owner.is_some_and(|owner| owner.by_number) {
            names.truncate(1);
        }
        if let Some(Owner { name: Some(name), .. }) = owner.filter(|_| !other_shape) {
            let root = Some(&self.model_root).filter(|root| !root.0.is_empty());
            for name in root.map(|root| format!("{root}.{name}")).into_iter().chain([name.to_string()]) {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        names
    }
}

/// For each optimizer, by its path, the parameter of each name that the optimizer uses. An optimizer and the model may
/// name a parameter differently: the names may differ in wrapper components ([`clean_name`]), and in one prefix that
/// all names of the optimizer lack or have in addition.
///
/// Invariant: the names of an optimizer are resolved only if exactly one prefix, added to all names of this optimizer
/// or removed from them, gives a parameter of the model for every name.
#[derive(Debug)]
struct OptimizerNames(HashMap<Path, HashMap<Fqn, (Fqn, TensorId)>>);

impl OptimizerNames {
    fn new(catalog: &Catalog, parameters: &HashMap<Fqn, TensorId>) -> Self {
        let mut of_optimizers: HashMap<Path, HashSet<Fqn>> = HashMap::new();
        path::tensors(&catalog.state, &Path::default(), &mut |path, _| {
            if let Some(OptimizerState { optimizer, parameter }) = optimizer::optimizer_state(path) {
                of_optimizers.entry(optimizer).or_default().insert(parameter);
            }
        });
        let Some(clean) = by_clean_name(parameters) else { return Self(HashMap::new()) };
        let resolve = |(optimizer, names): (Path, HashSet<Fqn>)| Some((optimizer, with_one_prefix(&names, &clean)?));
        Self(of_optimizers.into_iter().filter_map(resolve).collect())
    }

    fn parameter(&self, optimizer: &Path, name: &Fqn) -> Option<(Fqn, TensorId)> {
        self.0.get(optimizer)?.get(name).cloned()
    }
}

/// Returns the parameter of each name of an optimizer. Returns `None` unless exactly one prefix, added to all names or
/// removed from all names, gives a parameter for every name. `parameters` has the parameters of the model by their
/// names without wrapper components.
fn with_one_prefix(
    names: &HashSet<Fqn>,
    parameters: &HashMap<String, (&Fqn, TensorId)>,
) -> Option<HashMap<Fqn, (Fqn, TensorId)>> {
    let own: Vec<(&Fqn, String)> = names.iter().map(|name| (name, clean_name(name.as_str()))).collect();
    // Few prefixes fit the longest name.
    let (_, longest) = own.iter().max_by_key(|(_, name)| (name.len(), name))?;
    let to_add =
        |name: &String| name.strip_suffix(longest.as_str()).filter(|prefix| is_prefix(prefix)).map(str::to_owned);
    let added = parameters.keys().filter_map(to_add).map(|prefix| (prefix, String::new()));
    let removed = longest.match_indices('.').map(|(at, _)| (String::new(), longest[..=at].to_owned()));
    let mut fitting = added.chain(removed).filter_map(|(add, remove)| {
        let renamed = |(name, own): &(&Fqn, String)| {
            let (parameter, id) = parameters.get(&format!("{add}{}", own.strip_prefix(&remove)?))?;
            Some(((*name).clone(), ((*parameter).clone(), *id)))
        };
        own.iter().map(renamed).collect::<Option<HashMap<_, _>>>()
    });
    let only = fitting.next()?;
    fitting.next().is_none().then_some(only)
}

/// Returns whether a text is empty or consists of complete components of a name, as in `model.`.
fn is_prefix(text: &str) -> bool {
    text.is_empty() || text.ends_with('.')
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
pub fn numbered_parameters(
    catalog: &Catalog,
    optimizer: &Value,
    may_be: &dyn Fn(&Fqn) -> bool,
) -> Option<Vec<(Fqn, TensorId)>> {
    resolve_numbers(catalog, optimizer, may_be, &is_alike)
}

/// Resolves numbered parameters like [`numbered_parameters`]. The function `alike` returns whether a state tensor may
/// belong to a parameter, according to their shapes.
fn resolve_numbers(
    catalog: &Catalog,
    optimizer: &Value,
    may_be: &dyn Fn(&Fqn) -> bool,
    alike: &dyn Fn(&TensorEntry, &TensorEntry) -> bool,
) -> Option<Vec<(Fqn, TensorId)>> {
    match listed_parameters(catalog, optimizer) {
        Some(listed) => (!contradicts_shapes(catalog, optimizer, &listed)).then_some(listed),
        None => match_numbers(catalog, optimizer, may_be, alike),
    }
}

/// The keys of state that PyTorch's optimizers keep for each element of a parameter.
const ELEMENTWISE: [&str; 5] = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"];

/// Returns whether a state tensor that must have one element for each element of its parameter ([`ELEMENTWISE`]) has
/// another shape than the parameter. Unreadable state tensors, and tensors that are sharded or replicated over ranks
/// ([`TensorEntry::is_shared`]), are not compared.
fn contradicts_shapes(catalog: &Catalog, optimizer: &Value, parameters: &[(Fqn, TensorId)]) -> bool {
    let states = optimizer.as_dict().and_then(|dict| dict.get(STATE)?.as_dict());
    let differs = |state: &TensorEntry, parameter: &TensorEntry| {
        let are_whole = !state.is_shared() && !parameter.is_shared() && state.unreadable.is_none();
        are_whole && state.shape != parameter.shape
    };
    states.into_iter().flat_map(|states| &states.entries).any(|(number, state)| {
        let parameter = number.as_i64().and_then(|number| parameters.get(usize::try_from(number).ok()?));
        let (Some((_, parameter)), Some(state)) = (parameter, state.as_dict()) else { return false };
        elementwise(catalog, Some(state)).any(|state| differs(state, catalog.tensor(*parameter)))
    })
}

/// Returns whether the parameter names that the groups of an optimizer list (`param_names`) contradict the shapes of
/// its state. Returns `None` if the groups list no names, or if the model lacks a listed name.
pub(super) fn contradicts_listed(catalog: &Catalog, optimizer: &Value) -> Option<bool> {
    Some(contradicts_shapes(catalog, optimizer, &listed_parameters(catalog, optimizer)?))
}

/// Returns whether the shapes of an optimizer's state contradict the order of the model's parameters. This is the case
/// if, for some parameter group, the numbers of the group cannot be assigned to parameters in the order of the model
/// such that every state tensor has the shape of its parameter. Returns false if there is no model.
pub(super) fn contradicts_order(catalog: &Catalog, optimizer: &Value) -> bool {
    let model = state_dict::model(&catalog.state).tensors;
    let parts = optimizer.as_dict().and_then(|dict| Some((numbers(dict)?, dict.get(STATE)?.as_dict()?)));
    let Some((groups, states)) = parts.filter(|_| !model.is_empty()) else { return false };
    let states: HashMap<i64, &Value> =
        states.entries.iter().filter_map(|(key, state)| Some((key.as_i64()?, state))).collect();
    let fits = |number: usize, parameter: TensorId| {
        let parameter = catalog.tensor(parameter);
        let state = i64::try_from(number).ok().and_then(|number| states.get(&number)?.as_dict());
        parameter.dtype.may_be_trained()
            && elementwise(catalog, state)
                .all(|state| !are_comparable(state, parameter) || state.shape == parameter.shape)
    };
    groups.iter().any(|group| {
        let mut rest = model.iter();
        !group.iter().all(|number| rest.any(|(_, parameter)| fits(*number, *parameter)))
    })
}

/// Returns the state tensors of a parameter that have one element for each element of the parameter ([`ELEMENTWISE`]).
fn elementwise<'c>(catalog: &'c Catalog, state: Option<&'c Dict>) -> impl Iterator<Item = &'c TensorEntry> {
    ELEMENTWISE.iter().filter_map(move |key| match state?.get(key) {
        Some(Value::Tensor(id)) => Some(catalog.tensor(*id)),
        _ => None,
    })
}

/// Returns whether the shapes of a state tensor and a parameter can be compared: the state tensor is readable, and
/// [`TensorEntry::is_shared`] (known to be sharded or replicated over ranks) is equal for the two tensors.
fn are_comparable(state: &TensorEntry, parameter: &TensorEntry) -> bool {
    state.is_shared() == parameter.is_shared() && state.unreadable.is_none()
}

/// Returns the parameters that the groups of the optimizer list by name (`param_names`), in the order of their numbers.
/// Returns `None` if the model lacks one of them. All names of the optimizer may lack one prefix that the names of the
/// model have, or have one prefix that the names of the model lack.
fn listed_parameters(catalog: &Catalog, optimizer: &Value) -> Option<Vec<(Fqn, TensorId)>> {
    let names = listed_names(optimizer.as_dict()?)?;
    let model: HashMap<Fqn, TensorId> = state_dict::model(&catalog.state).tensors.into_iter().collect();
    let parameters = by_clean_name(&model)?;
    let find = |name: &Fqn| parameters.get(name.as_str()).map(|(name, id)| ((*name).clone(), *id));
    names.iter().map(find).collect::<Option<Vec<_>>>().or_else(|| {
        let renamed = with_one_prefix(&names.iter().cloned().collect(), &parameters)?;
        names.iter().map(|name| renamed.get(name).cloned()).collect()
    })
}

/// Returns the parameters by their names without wrapper components. Returns `None` if the names of two parameters
/// differ only by wrapper components, so that clean names do not tell them apart.
fn by_clean_name(parameters: &HashMap<Fqn, TensorId>) -> Option<HashMap<String, (&Fqn, TensorId)>> {
    let clean: HashMap<String, (&Fqn, TensorId)> =
        parameters.iter().map(|(name, id)| (clean_name(name.as_str()), (name, *id))).collect();
    (clean.len() == parameters.len()).then_some(clean)
}

fn is_alike(state: &TensorEntry, parameter: &TensorEntry) -> bool {
    state.shape == parameter.shape && state.sharding.is_some() == parameter.sharding.is_some()
}

/// Resolves the numbered parameters of an optimizer that lists no names, by the order and the shapes of the model's
/// tensors; see [`numbered_parameters`].
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
    use crate::catalog::Dtype;
    use crate::catalog::state_dict::tests::{dict, tensor};
    use crate::storage::FileId;

    /// Returns the owner of the state of each parameter of an optimizer.
    fn owners_by_name(model: &[&str], optimizer: &[&str]) -> Vec<Option<String>> {
        let names = || model.iter().chain(optimizer);
        let mut catalog = Catalog::empty();
        let entry = |name: &&str| TensorEntry::whole((*name).into(), Dtype::F32, [2].as_slice().into(), FileId(0), 0);
        catalog.tensors = names().map(entry).collect();
        let state = (0..).skip(model.len()).zip(optimizer);
        let state = dict(state.map(|(id, name)| (*name, dict(vec![("exp_avg", tensor(id))]))).collect());
        let model = (0..).zip(model).map(|(id, name)| (*name, tensor(id)));
        catalog.state = dict(model.chain([("optimizer", dict(vec![("state", state)]))]).collect());
        let mut owners = Owners::new(&catalog);
        let mut found = Vec::new();
        path::tensors(&catalog.state, &Path::default(), &mut |path, _| {
            if let Some(owner) = owners.owner_of(path) {
                let names = owners.rule_names(path, Some(&owner), false);
                assert!(names.contains(&owner.name.as_ref().unwrap().to_string()), "{names:?}");
                found.push(owner.id.map(|id| catalog.tensor(id).fqn.to_string()));
            }
        });
        found
    }

    #[test]
    fn state_belongs_to_the_parameter_whose_name_differs_by_a_prefix() {
        for (model, optimizer, expected) in [
            ("net.0.w net.1.w", "0.w 1.w", Some("net.0.w net.1.w")),
            ("module.a.w module.b", "b", Some("module.b")),
            ("a.w b", "module.b module.a.w", Some("b a.w")),
            ("_orig_mod.a.w b", "a.w b", Some("_orig_mod.a.w b")),
            ("m._orig_mod.a.w", "_fsdp_wrapped_module.a.w", Some("m._orig_mod.a.w")),
            // A prefix must be one for all names, must be unique, and must consist of complete components.
            ("net.a other.b", "a b", None),
            ("gen.0.w disc.0.w", "0.w", None),
            ("xa.w", "a.w", None),
        ] {
            let [model, optimizer] = [model, optimizer].map(|names| names.split(' ').collect::<Vec<_>>());
            let expected: Vec<Option<String>> = match expected {
                Some(names) => names.split(' ').map(|name| Some(name.to_owned())).collect(),
                None => vec![None; optimizer.len()],
            };
            assert_eq!(owners_by_name(&model, &optimizer), expected, "{model:?} {optimizer:?}");
        }
    }

    #[test]
    fn listed_names_may_differ_from_the_model_by_one_prefix() {
        let found = |model: &[&str], listed: &[&str]| {
            let mut catalog = Catalog::empty();
            // With equal shapes, only the listed names tell the parameters apart.
            let entry =
                |name: &&str| TensorEntry::whole((*name).into(), Dtype::F32, [2].as_slice().into(), FileId(0), 0);
            catalog.tensors = model.iter().map(entry).collect();
            catalog.state = dict(vec![("model", dict(model.iter().copied().zip((0..).map(tensor)).collect()))]);
            let numbers = (0..).zip(listed).map(|(number, _)| Value::Int(number)).collect();
            let names = listed.iter().map(|name| Value::Str((*name).into())).collect();
            let group = dict(vec![("params", Value::List(numbers)), ("param_names", Value::List(names))]);
            let optimizer = dict(vec![("state", dict(Vec::new())), ("param_groups", Value::List(vec![group]))]);
            let found = numbered_parameters(&catalog, &optimizer, &|_| true)?;
            Some(found.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>())
        };
        let swapped = Some(vec![String::from("b.w"), String::from("a.w")]);
        assert_eq!(found(&["a.w", "b.w", "c.w"], &["b.w", "a.w"]), swapped);
        assert_eq!(found(&["a.w", "b.w", "c.w"], &["module.b.w", "module.a.w"]), swapped);
        let swapped = Some(vec![String::from("module.b.w"), String::from("module.a.w")]);
        assert_eq!(found(&["module.a.w", "module.b.w", "module.c.w"], &["b.w", "a.w"]), swapped);
        assert_eq!(found(&["net.a.w", "gen.a.w"], &["a.w"]), None);
        assert_eq!(found(&["a.w", "b.w", "c.w"], &["module.b.w", "other.a.w"]), None);
    }

    #[test]
    fn listed_names_that_contradict_the_shapes_are_not_used() {
        let entry = |name: &str, shape: &[u64]| TensorEntry::whole(name.into(), Dtype::F32, shape.into(), FileId(0), 0);
        let named = |listed: [&str; 2]| {
            let mut catalog = Catalog::empty();
            let shapes: [(&str, &[u64]); 4] =
                [("a", &[2, 3]), ("b", &[4]), ("0.exp_avg", &[2, 3]), ("1.exp_avg", &[4])];
            catalog.tensors = shapes.into_iter().map(|(name, shape)| entry(name, shape)).collect();
            catalog.state = dict(vec![("model", dict(vec![("a", tensor(0)), ("b", tensor(1))]))]);
            let states = [2, 3].map(|id| dict(vec![("exp_avg", tensor(id))]));
            let states = (0..).zip(states).map(|(number, state)| (Value::Int(number), state)).collect();
            let names = listed.map(|name| Value::Str(name.into())).to_vec();
            let numbers = Value::List(vec![Value::Int(0), Value::Int(1)]);
            let group = dict(vec![("params", numbers), ("param_names", Value::List(names))]);
            let state = Value::Dict(Dict { entries: states, ..Dict::default() });
            let optimizer = dict(vec![("state", state), ("param_groups", Value::List(vec![group]))]);
            let found = numbered_parameters(&catalog, &optimizer, &|_| true)?;
            Some(found.into_iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>())
        };
        assert_eq!(named(["a", "b"]).unwrap(), ["a", "b"]);
        assert_eq!(named(["b", "a"]), None);
    }

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
