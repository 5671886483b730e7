//! Applies the filters and new names of a selection to the flat layout of SRC.

use std::collections::{HashMap, HashSet};

use crate::catalog::flat::{FlatLayout, FlatUnit};
use crate::catalog::optimizer::STATE;
use crate::catalog::parameter_names::named_optimizers;
use crate::catalog::path::key_text;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Catalog, Fqn, Path, TensorId, state_dict};

/// Removes from the flat layout of SRC the parameters that are not selected, and gives the remaining parameters their
/// new names. A parameter is selected if the model or the optimizer state in `selected` has it. Returns true if a
/// parameter was removed.
pub fn select_parameters(layout: &mut FlatLayout, stored: &Catalog, selected: &Catalog) -> bool {
    let new_names: HashMap<TensorId, Fqn> =
        parameters(selected).into_iter().rev().map(|(name, id)| (id, name)).collect();
    let mut renamed: HashMap<Fqn, Option<Fqn>> = HashMap::new();
    for (name, id) in parameters(stored) {
        let new_name = renamed.entry(name).or_default();
        *new_name = new_name.take().or_else(|| new_names.get(&id).cloned());
    }
    // A name that SRC does not have stays, so that a later step reports it.
    let rename = |name: &mut Fqn| match renamed.get(name) {
        Some(Some(new_name)) => {
            *name = new_name.clone();
            true
        }
        Some(None) => false,
        None => true,
    };
    let count = |layout: &FlatLayout| layout.params().count();
    let before = count(layout);
    for unit in &mut layout.units {
        unit.params.retain_mut(|param| rename(&mut param.fqn));
        unit.shared
            .retain_mut(|shared| rename(&mut shared.fqn) && rename(&mut shared.with) && shared.fqn != shared.with);
    }
    let empty: HashSet<Fqn> = layout.units.iter().filter(|unit| unit.params.is_empty()).map(FlatUnit::key).collect();
    layout.units.retain(|unit| !unit.params.is_empty());
    for group in layout.optimizer.iter_mut().flatten() {
        group.retain_mut(|name| rename(name) && !empty.contains(name));
    }
    count(layout) < before
}

/// Returns the names of the parameters of the model, and then of the optimizer state. Each name has a tensor: the
/// parameter itself, or its state. By this tensor, a parameter is found again under a new name.
fn parameters(catalog: &Catalog) -> Vec<(Fqn, TensorId)> {
    let optimizers = named_optimizers(&catalog.state);
    let is_alone = optimizers.contains(&Path::default());
    let mut found = if is_alone { Vec::new() } else { state_dict::model(&catalog.state).tensors };
    // All parameters in a flat parameter share one 0-d tensor with the step.
    let is_own = |id: &TensorId| !catalog.tensor(*id).shape.is_empty();
    for optimizer in optimizers {
        let states = optimizer.find(&catalog.state).and_then(|optimizer| optimizer.as_dict()?.get(STATE)?.as_dict());
        for (name, state) in states.into_iter().flat_map(|states| &states.entries) {
            let name = Fqn::from(key_text(name));
            found.extend(state.tensor_ids().into_iter().filter(is_own).map(|id| (name.clone(), id)));
        }
    }
    found.into_iter().map(|(name, id)| (Fqn::from(clean_name(name.as_str())), id)).collect()
}
