//! Which parameter a tensor is state or gradient of, and so which names a rule may know it by.
//!
//! Optimizer state and gradients follow their parameter: what somebody says of `layers.0.w1` is said of its gradient and
//! of its moments too. An optimizer knows parameters by name or by number; see [`optimizer`].

use std::collections::HashMap;

use super::optimizer::{self, OptimizerState};
use super::{Catalog, Fqn, Path, TensorId, model};

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
        let numbered = self.numbered.entry(optimizer).or_insert_with_key(|optimizer| {
            optimizer::numbered_parameters(catalog, catalog.state.at(optimizer)?, &|_| true)
        });
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
