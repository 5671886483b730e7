//! Gives the optimizer state of a source the keys that it has in DCP directories: parameter names.
//!
//! Jobs that save files with `torch.save` store `optimizer.state_dict()`, whose keys are parameter ids (numbers). Jobs
//! that save or load DCP directories use `get_optimizer_state_dict`, whose keys are parameter names. A job that loads a
//! DCP directory with parameter ids as keys does not find the state.

use std::collections::HashMap;

use super::source::ConversionSource;
use crate::catalog::optimizer;
use crate::catalog::parameter_names::{
    is_named_optimizer, named_optimizers, number_parameters, numbered_optimizers, parameter_names,
    parameter_names_like, set_parameter_names,
};
use crate::catalog::path::tensors;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Catalog, Fqn, Path, TensorId, Value, state_dict};
use crate::quantity::count;

/// Replaces the parameter ids (numbers) that are keys in the selected optimizers by the names that the parameters have
/// in DST. If SRC does not record the names, they come from the checkpoint of `--like`. In the optimizers of the
/// checkpoint of `--like`, parameter ids are replaced, too. Returns notes about optimizers with and without names.
pub fn name_for_dcp(source: &mut ConversionSource) -> Vec<String> {
    let selected = &mut source.selection.catalog;
    let notes = name_selected(&source.checkpoint.catalog, selected, source.like.as_ref().map(|like| &like.catalog));
    if let Some(like) = &mut source.like {
        name_like(&mut like.catalog, selected);
    }
    notes
}

/// Replaces the parameter ids (numbers) that are keys in the selected optimizers by parameter names. The names come
/// from the source `stored`, otherwise from the checkpoint `like`. Returns notes for the user.
fn name_selected(stored: &Catalog, selected: &mut Catalog, like: Option<&Catalog>) -> Vec<String> {
    let numbered = numbered_optimizers(&selected.state);
    if numbered.is_empty() {
        return Vec::new();
    }
    let optimizers = numbered_optimizers(&stored.state);
    let new_names = new_names(stored, selected);
    let mut notes = Vec::new();
    for optimizer in numbered {
        let of = if optimizer.0.is_empty() { String::new() } else { format!(" `{optimizer}`") };
        let names = stored_path(stored, &optimizers, selected, &optimizer)
            .and_then(|path| parameter_names(stored, path).or_else(|| parameter_names_like(stored, path, like?)));
        let names = names.map(|names| renamed(names, &new_names));
        notes.push(match names.filter(|names| set_parameter_names(&mut selected.state, &optimizer, names)) {
            Some(names) => format!(
                "the state of the optimizer{of} is stored by parameter index in SRC ({}), and by parameter name in DST, \
                 as in get_optimizer_state_dict",
                count(names.len(), "parameter")
            ),
            None => format!(
                "the state of the optimizer{of} is stored by parameter index, also in DST, because the names of its \
                 parameters are unknown: a job that loads the state by parameter name does not find it. Convert the \
                 optimizer together with its model, or save it with get_optimizer_state_dict"
            ),
        });
    }
    rename_entries(selected);
    notes
}

/// Replaces the parameter names that are keys in the selected optimizers by parameter ids (numbers), because the files
/// of SRC have parameter ids, too. This concerns optimizers with state of flat parameters. A parameter id is the
/// position of the parameter in the model, as in `optimizer.state_dict()`. If SRC has no model, the names stay.
pub fn number_flat_optimizers(source: &mut ConversionSource) {
    let (stored, selected) = (&source.checkpoint.catalog, &mut source.selection.catalog);
    if is_named_optimizer(&stored.state) {
        return;
    }
    let model = state_dict::model(&stored.state).tensors;
    let parameters: HashMap<&Fqn, TensorId> = model.iter().map(|(name, id)| (name, *id)).collect();
    // Once the keys are numbers, the parameter of a state tensor cannot be found, so the state gets the layout of its parameter
    // first.
    let mut followers = Vec::new();
    tensors(&stored.state, &Path::default(), &mut |path, id| {
        let parameter = optimizer::optimizer_parameter(path).and_then(|name| parameters.get(&name));
        followers.extend(parameter.map(|parameter| (id, *parameter)));
    });
    for (id, parameter) in followers {
        let parameter = selected.tensor(parameter);
        if parameter.shape == selected.tensor(id).shape {
            let sharding = parameter.sharding.clone();
            selected.tensors[id.0 as usize].sharding = sharding;
        }
    }
    let names: Vec<Fqn> = model.into_iter().map(|(name, _)| clean_name(name.as_str()).into()).collect();
    let new_names = new_names(stored, selected);
    let renamed = names.iter().zip(0..).filter_map(|(name, position)| Some((new_names.get(name)?.clone(), position)));
    // The optimizer has a new name where `--rename` gives one; other options change only the names of the model.
    let positions: HashMap<Fqn, usize> = names.iter().cloned().zip(0..).chain(renamed).collect();
    for optimizer in named_optimizers(&selected.state) {
        number_parameters(&mut selected.state, &optimizer, &|name| positions.get(name).copied());
    }
    rename_entries(selected);
}

/// Returns, for each parameter of the model whose name changes, its old name and its new name, both without wrapper
/// prefixes. If a tied parameter loses one of its names, the new name is the first of its remaining names.
pub(super) fn new_names(stored: &Catalog, selected: &Catalog) -> HashMap<Fqn, Fqn> {
    let clean = |name: &Fqn| Fqn::from(clean_name(name.as_str()));
    let model = state_dict::model(&selected.state).tensors;
    let kept: HashMap<Fqn, TensorId> = model.iter().map(|(name, id)| (clean(name), *id)).collect();
    let new: HashMap<TensorId, Fqn> = model.into_iter().rev().map(|(name, id)| (id, name)).collect();
    let old = state_dict::model(&stored.state).tensors.into_iter().map(|(name, id)| (clean(&name), id));
    let changed = old.filter(|(name, id)| kept.get(name) != Some(id));
    changed.filter_map(|(name, id)| Some((name, clean(new.get(&id)?)))).collect()
}

pub(super) fn renamed(names: Vec<Fqn>, new_names: &HashMap<Fqn, Fqn>) -> Vec<Fqn> {
    names.into_iter().map(|name| new_names.get(&name).cloned().unwrap_or(name)).collect()
}

/// Returns which of `paths`, the optimizers of the source, is the selected optimizer at the path `optimizer`: the one
/// that has the first state tensor of the selected optimizer, or else the only optimizer in `paths`.
pub(super) fn stored_path<'p>(
    stored: &Catalog,
    paths: &'p [Path],
    selected: &Catalog,
    optimizer: &Path,
) -> Option<&'p Path> {
    let of = |catalog: &Catalog, path: &Path| path.find(&catalog.state).map(Value::tensor_ids);
    let first = of(selected, optimizer)?.first().copied();
    let has_first = |path: &&Path| first.is_some_and(|id| of(stored, path).is_some_and(|ids| ids.contains(&id)));
    let only = if paths.len() == 1 { paths.first() } else { None };
    paths.iter().find(has_first).or(only)
}

/// Makes the optimizer keys of two checkpoints comparable. If an optimizer in one of them has parameter names as keys,
/// the parameter ids (numbers) in both checkpoints are replaced by names, where the names are known.
pub fn name_for_comparison(source: &mut Catalog, other: &mut Catalog) {
    if [&source.state, &other.state].into_iter().any(|state| !named_optimizers(state).is_empty()) {
        name_like(source, other);
        name_like(other, source);
    }
}

/// Replaces the parameter ids (numbers) that are keys in optimizers by parameter names, where the catalog has the names.
pub fn name_optimizers(catalog: &mut Catalog) {
    name_by(catalog, |_, _| None);
}

fn name_like(catalog: &mut Catalog, named: &Catalog) {
    name_by(catalog, |catalog, optimizer| parameter_names_like(catalog, optimizer, named));
}

/// Replaces parameter ids by names. `others` returns the names of the parameters of an optimizer that the catalog does not have.
fn name_by(catalog: &mut Catalog, others: impl Fn(&Catalog, &Path) -> Option<Vec<Fqn>>) {
    let numbered = numbered_optimizers(&catalog.state);
    if numbered.is_empty() {
        return;
    }
    for optimizer in numbered {
        let names = parameter_names(catalog, &optimizer).or_else(|| others(catalog, &optimizer));
        if let Some(names) = names {
            set_parameter_names(&mut catalog.state, &optimizer, &names);
        }
    }
    rename_entries(catalog);
}

/// Sets the name in the catalog entry of each tensor of optimizer state to the path of the tensor in the state dict.
pub(super) fn rename_entries(catalog: &mut Catalog) {
    let mut names = Vec::new();
    tensors(&catalog.state, &Path::default(), &mut |path, id| {
        if optimizer::optimizer_state(path).is_some() {
            names.push((id, path.fqn()));
        }
    });
    for (id, name) in names.into_iter().rev() {
        catalog.tensors[id.0 as usize].fqn = name;
    }
}
