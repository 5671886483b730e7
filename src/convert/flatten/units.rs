//! The units of a model that is not flat yet: which parameters FSDP1 would put into which flat parameter, in which
//! order.
//!
//! That order is the one in which modules registered their parameters. A state dict has it, a sorted list of names has
//! not, and with a wrong one parameters of equal shapes change places in silence: what has no order is refused.
//!
//! Source: `_get_orig_params`, `FlatParamHandle._init_flat_param_and_metadata` in `torch/distributed/fsdp`.

use std::collections::{HashMap, HashSet};

use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit, SharedName};
use crate::catalog::modules::is_within;
use crate::catalog::optimizer::named_groups;
use crate::catalog::{Catalog, Fqn, TensorEntry, TensorId, Value, model};
use crate::error::{Error, Result};
use crate::format::Checkpoint;
use crate::format::fsdp_flat;
use crate::format::fsdp_flat::order::{self, ElementOrder};
use crate::layout::Pattern;
use crate::name_list::{FEW, short_list_of_counted};
use crate::nearest;
use crate::quantity::count;

/// A model whose order is taken.
pub struct OrderedModel<'a> {
    /// Where its tensors are stored.
    pub checkpoint: &'a Checkpoint,
    /// The tensors by the same numbers, as they are wanted.
    pub catalog: &'a Catalog,
    /// Its state dict, in the order of registration.
    pub state: &'a Value,
}

/// What FSDP is told of the model.
pub struct WrapPolicy<'a> {
    /// Modules that are units.
    pub wrap: &'a [Pattern],
    /// Tensors that are no parameters.
    pub buffers: &'a [Pattern],
}

/// Last parts of names that PyTorch's own modules and common models give to buffers of floats.
const BUFFERS: [&str; 4] = ["running_mean", "running_var", "inv_freq", "original_inv_freq"];

/// The layout for one rank, without its optimizer; and what to tell the user.
pub fn derive(model: &OrderedModel<'_>, wrapping: &WrapPolicy<'_>) -> Result<(FlatLayout, Vec<String>)> {
    let tensors = model::model(model.state).tensors;
    let names: Vec<String> = tensors.iter().map(|(fqn, _)| fqn.to_string()).collect();
    refuse_reordered(&names)?;
    let modules = wrapped_modules(&names, wrapping.wrap)?;
    let ModelTensors { parameters, shared, mut notes } = divide(model, &tensors, wrapping.buffers)?;
    let with_root = std::iter::once("").chain(modules.iter().map(String::as_str));
    let mut units: Vec<FlatUnit> = with_root.map(|module| FlatUnit::new(module, None)).collect();
    // The innermost module that holds it.
    let unit_of = |fqn: &Fqn| {
        let holders = (1..).zip(&modules).filter(|(_, module)| is_within(fqn.as_str(), module));
        holders.max_by_key(|(_, module)| module.len()).map_or(0, |(index, _)| index)
    };
    for (fqn, id, entry) in &parameters {
        let unit = &mut units[unit_of(fqn)];
        unit.dtype.get_or_insert(entry.dtype);
        let stride = match ElementOrder::from_entry(model.checkpoint.catalog.tensor(*id), model.checkpoint.format) {
            ElementOrder::RowMajor => None,
            ElementOrder::Strides(stride) => Some(stride),
            ElementOrder::Unknown => return Err(unordered_elements(fqn, entry)),
        };
        unit.params.push(FlatParam { fqn: fqn.clone(), shape: entry.shape.clone(), stride });
    }
    for alias in shared {
        let unit = unit_of(&alias.fqn);
        if unit != unit_of(&alias.with) {
            return Err(tied_across(&alias));
        }
        units[unit].shared.push(alias);
    }
    // A module without parameters of its own has no flat parameter.
    units.retain(|unit| !unit.params.is_empty());
    let layout = FlatLayout { world_size: 1, shard_group_size: 1, use_orig_params: false, units, optimizer: None };
    let params = layout.params().map(|(_, param)| (&param.fqn, &*param.shape, param.stride.is_none()));
    notes.extend(order::row_major_warning(&model.checkpoint.root, params));
    Ok((layout, notes))
}

/// Adds the names of a state dict that are tied to a parameter and that the layout, which is of another checkpoint, lacks.
///
/// # Errors
/// `Unsupported` where both names would be in two units.
pub fn add_tied(layout: &mut FlatLayout, state: &Value) -> Result<()> {
    let tensors = model::model(state).tensors;
    let in_units = layout.units.iter().enumerate();
    let places: HashMap<&Fqn, usize> =
        in_units.flat_map(|(index, unit)| unit.params.iter().map(move |param| (&param.fqn, index))).collect();
    let shared: HashSet<&Fqn> = layout.units.iter().flat_map(|unit| &unit.shared).map(|shared| &shared.fqn).collect();
    let of_tensor: HashMap<TensorId, &Fqn> =
        tensors.iter().filter(|(fqn, _)| places.contains_key(fqn)).map(|(fqn, id)| (*id, fqn)).collect();
    let mut added = Vec::new();
    let is_new = |fqn: &Fqn| !places.contains_key(fqn) && !shared.contains(fqn);
    for (fqn, id) in tensors.iter().filter(|(fqn, _)| is_new(fqn)) {
        let Some(with) = of_tensor.get(id) else { continue };
        let alias = SharedName { fqn: fqn.clone(), with: (*with).clone() };
        let innermost = (0..layout.units.len())
            .filter(|index| is_within(fqn.as_str(), &layout.units[*index].module))
            .max_by_key(|index| layout.units[*index].module.len());
        if innermost != Some(places[with]) {
            return Err(tied_across(&alias));
        }
        added.push((places[with], alias));
    }
    added.into_iter().for_each(|(unit, alias)| layout.units[unit].shared.push(alias));
    Ok(())
}

/// A state dict in another order than that of registration tells nothing of that.
fn refuse_reordered(names: &[String]) -> Result<()> {
    let names = || names.iter().map(String::as_str);
    if order::is_sorted(names()) {
        return Err(unordered(
            "the names in the state dict are sorted, which is not the order in which modules register them",
        ));
    }
    if order::has_interleaved_modules(names()) {
        return Err(unordered(
            "the state dict has tensors of other modules between those of one, as files that were made from DCP have",
        ));
    }
    Ok(())
}

/// The error for a model without an order.
pub fn unordered(why: &str) -> Error {
    fsdp_flat::unknown_layout_error(format!("the order of parameters in flat parameters is not known: {why}"))
}

fn unordered_elements(fqn: &Fqn, entry: &TensorEntry) -> Error {
    let shape = entry.shape.as_slice();
    fsdp_flat::unknown_layout_error(format!(
        "{fqn}: of shape {shape:?}, it may lie by rows or channels last, and the checkpoint does not tell"
    ))
}

/// FSDP1 makes two parameters of it, of which only one has a state.
fn tied_across(alias: &SharedName) -> Error {
    Error::unsupported(
        format!("{} is tied to {}, and they would be in two units", alias.fqn, alias.with),
        "FSDP1 shares parameters within a unit: options::wrap neither of their modules, or one around both",
    )
}

/// The modules that patterns mean, in the order of the state dict.
fn wrapped_modules(names: &[String], patterns: &[Pattern]) -> Result<Vec<String>> {
    let mut modules: Vec<&str> = Vec::new();
    let mut seen = HashSet::new();
    for name in names {
        let ends = name.match_indices('.').map(|(at, _)| at);
        modules.extend(ends.map(|at| &name[..at]).filter(|module| seen.insert(*module)));
    }
    for pattern in patterns {
        if !modules.iter().any(|module| pattern.matches(module)) {
            let modules: Vec<String> = modules.iter().map(ToString::to_string).collect();
            return Err(Error::usage(
                format!("options::wrap {pattern}: no module has a path like that"),
                nearest::pattern_hint(pattern.as_str(), &modules),
            ));
        }
    }
    modules.retain(|module| patterns.iter().any(|pattern| pattern.matches(module)));
    Ok(modules.into_iter().map(str::to_owned).collect())
}

/// The tensors of a model by what they are.
struct ModelTensors<'a> {
    parameters: Vec<(Fqn, TensorId, &'a TensorEntry)>,
    shared: Vec<SharedName>,
    notes: Vec<String>,
}

fn divide<'a>(model: &OrderedModel<'a>, tensors: &[(Fqn, TensorId)], buffers: &[Pattern]) -> Result<ModelTensors<'a>> {
    let trained: Option<HashSet<Fqn>> = named_groups(model.state).map(|groups| groups.into_iter().flatten().collect());
    let mut used = vec![false; buffers.len()];
    let mut first_names: HashMap<TensorId, Fqn> = HashMap::new();
    let mut divided = ModelTensors { parameters: Vec::new(), shared: Vec::new(), notes: Vec::new() };
    let mut doubtful: Vec<&Fqn> = Vec::new();
    let mut taken_for_buffers: Vec<&str> = Vec::new();
    for (fqn, id) in tensors {
        let entry = model.catalog.tensor(*id);
        let named = buffers.iter().zip(&mut used).filter(|(pattern, _)| pattern.covers(fqn.as_str()));
        let is_named = named.map(|(_, used)| *used = true).count() > 0;
        if is_named || !entry.dtype.is_float() {
            continue;
        }
        if let Some(first) = first_names.get(id) {
            divided.shared.push(SharedName { fqn: fqn.clone(), with: first.clone() });
            continue;
        }
        let is_trained = trained.as_ref().map(|names| names.contains(fqn));
        let last = fqn.as_str().rsplit('.').next().unwrap_or_default();
        // FSDP1 has no parameters without dims.
        if is_trained != Some(true) && (BUFFERS.contains(&last) || entry.shape.is_empty()) {
            taken_for_buffers.push(fqn.as_str());
            continue;
        }
        if is_trained == Some(false) {
            doubtful.push(fqn);
        }
        first_names.insert(*id, fqn.clone());
        divided.parameters.push((fqn.clone(), *id, entry));
    }
    if let Some(unused) = used.iter().position(|used| !used) {
        let names: Vec<String> = tensors.iter().map(|(fqn, _)| fqn.to_string()).collect();
        let pattern = buffers[unused].as_str();
        return Err(Error::usage(
            format!("options::buffers {pattern}: no tensor of the model has a name like that"),
            nearest::pattern_hint(pattern, &names),
        ));
    }
    if !doubtful.is_empty() {
        return Err(doubt(&doubtful, &divided.parameters));
    }
    if !taken_for_buffers.is_empty() {
        let number = count(taken_for_buffers.len(), "tensor");
        divided.notes.push(format!("{number} taken for buffers: {}", short_list_of_counted(&taken_for_buffers, FEW)));
    }
    if trained.is_none() {
        let number = count(divided.parameters.len(), "tensor");
        divided.notes.push(format!(
            "no optimizer state by names tells parameters from buffers: {number} of floats taken for parameters \
             (options::buffers names those that are none)"
        ));
    }
    Ok(divided)
}

/// The error for tensors of floats that the optimizer does not know.
fn doubt(names: &[&Fqn], parameters: &[(Fqn, TensorId, &TensorEntry)]) -> Error {
    let texts: Vec<&str> = names.iter().map(|fqn| fqn.as_str()).collect();
    let shape_of = |name: &Fqn| parameters.iter().find(|(fqn, ..)| fqn == name).map(|(.., entry)| &entry.shape);
    let twin = names.iter().find_map(|name| {
        let shape = shape_of(name)?;
        let alike = |(fqn, _, entry): &&(Fqn, TensorId, &TensorEntry)| !names.contains(&fqn) && entry.shape == *shape;
        parameters.iter().find(alike).map(|(fqn, ..)| format!(" (is {name} tied to {fqn}, which has its shape?)"))
    });
    Error::unsupported(
        format!(
            "{} of floats without a place in the optimizer: {}{}",
            count(names.len(), "tensor"),
            short_list_of_counted(&texts, FEW),
            twin.unwrap_or_default()
        ),
        "options::buffers PATTERN says that they are buffers; tied and frozen parameters have to be told by options::flat_layout FILE",
    )
    .naming(&texts)
}
