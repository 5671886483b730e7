//! Derives the FSDP units of a model that is not flat yet: the parameters that FSDP1 would put into each flat
//! parameter, and their order.
//!
//! FSDP1 uses the order in which modules register their parameters. A state dict keeps that order, a sorted list of
//! names does not. With a wrong order, parameters of equal shape would be swapped silently, so a model of unknown order
//! is an error.
//!
//! Source: `_get_orig_params`, `FlatParamHandle._init_flat_param_and_metadata` in `torch/distributed/fsdp`.

use std::collections::{HashMap, HashSet};

use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit, SharedName};
use crate::catalog::modules::is_within;
use crate::catalog::optimizer::named_groups;
use crate::catalog::{Catalog, Fqn, TensorEntry, TensorId, Value, state_dict};
use crate::error::{Error, Result};
use crate::format::Checkpoint;
use crate::format::fsdp_flat;
use crate::format::fsdp_flat::order::{self, ElementOrder};
use crate::layout::Pattern;
use crate::name_list::{FEW, short_list_of_counted};
use crate::nearest;
use crate::quantity::count;

/// A model whose state dict gives the order of parameters.
pub struct OrderedModel<'a> {
    /// The checkpoint that stores the tensors.
    pub checkpoint: &'a Checkpoint,
    /// The selected tensors, with their target dtypes. The tensor ids are the ids of `checkpoint`.
    pub catalog: &'a Catalog,
    /// The state dict, in the order of registration.
    pub state: &'a Value,
}

/// The modules that FSDP wraps, and the tensors that are buffers.
pub struct WrapPolicy<'a> {
    /// Patterns of modules that become units.
    pub wrap: &'a [Pattern],
    /// Patterns of tensors that are buffers, not parameters.
    pub buffers: &'a [Pattern],
    /// The flat layout of SRC, if SRC has flat parameters and another checkpoint gives the order. FSDP flattens parameters
    /// only, so this layout shows which tensors are parameters, which of their names are tied, and their memory order.
    pub source: Option<&'a FlatLayout>,
    /// The state dict of SRC. If it has optimizer state with parameter names, the optimizer shows which tensors are
    /// parameters.
    pub state: &'a Value,
}

/// Last components of tensor names that PyTorch's modules and common models use for floating-point buffers.
const BUFFERS: [&str; 4] = ["running_mean", "running_var", "inv_freq", "original_inv_freq"];

/// Returns the flat layout for a world size of 1, and notes for the user. The layout does not contain the parameter ids
/// of an optimizer.
///
/// # Errors
/// `Unsupported` if the order of parameters or elements is not known, or if the model lacks a parameter of SRC; `Usage`
/// for a pattern that matches nothing.
pub fn derive(model: &OrderedModel<'_>, wrapping: &WrapPolicy<'_>) -> Result<(FlatLayout, Vec<String>)> {
    let tensors = state_dict::model(model.state).tensors;
    let names: Vec<String> = tensors.iter().map(|(fqn, _)| fqn.to_string()).collect();
    refuse_reordered(&names)?;
    let modules = wrapped_modules(&names, wrapping.wrap)?;
    let ModelTensors { parameters, shared, mut notes } = match wrapping.source {
        Some(source) => divide_like(model, &tensors, wrapping.buffers, source)?,
        None => divide(model, &tensors, wrapping)?,
    };
    let known = wrapping.source.map(names_of).unwrap_or_default();
    let with_root = std::iter::once("").chain(modules.iter().map(String::as_str));
    let mut units: Vec<FlatUnit> = with_root.map(|module| FlatUnit::new(module, None)).collect();
    // The unit of a parameter is its innermost wrapped module.
    let unit_of = |fqn: &Fqn| {
        let holders = (1..).zip(&modules).filter(|(_, module)| is_within(fqn.as_str(), module));
        holders.max_by_key(|(_, module)| module.len()).map_or(0, |(index, _)| index)
    };
    for (fqn, id, entry) in &parameters {
        let unit = &mut units[unit_of(fqn)];
        unit.dtype.get_or_insert(entry.dtype);
        if let Some(param) = known.get(fqn) {
            unit.params.push(FlatParam { fqn: fqn.clone(), ..(*param).clone() });
            continue;
        }
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
    // A module whose parameters are all in child units has no flat parameter.
    units.retain(|unit| !unit.params.is_empty());
    let layout = FlatLayout {
        world_size: 1,
        shard_group_size: 1,
        use_orig_params: false,
        has_assumed_alignment: false,
        units,
        optimizer: None,
    };
    if wrapping.source.is_none() {
        let params = layout.params().map(|(_, param)| (&param.fqn, &*param.shape, param.stride.is_none()));
        notes.extend(order::row_major_warning(&model.checkpoint.root, params));
    }
    Ok((layout, notes))
}

/// Adds to `layout` the names in `state` that are tied to a parameter of the layout. These names may be missing in the
/// layout, because it was derived from another checkpoint.
///
/// # Errors
/// `Unsupported` if the parameter and the name tied to it would be in different units.
pub fn add_tied(layout: &mut FlatLayout, state: &Value) -> Result<()> {
    let tensors = state_dict::model(state).tensors;
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

/// Refuses a state dict whose names show that it is not in the order of registration.
fn refuse_reordered(names: &[String]) -> Result<()> {
    let names = || names.iter().map(String::as_str);
    if order::is_sorted(names()) {
        return Err(unordered(
            "the names in the state dict are sorted, which is not the order in which modules register them",
        ));
    }
    if order::has_interleaved_modules(names()) {
        return Err(unordered("the state dict mixes the tensors of different modules, as files converted from DCP do"));
    }
    Ok(())
}

/// Returns the error for a model whose order is not known.
pub fn unordered(why: &str) -> Error {
    fsdp_flat::unknown_layout_error(format!("the order of parameters in flat parameters is not known: {why}"))
}

fn unordered_elements(fqn: &Fqn, entry: &TensorEntry) -> Error {
    let shape = entry.shape.as_slice();
    fsdp_flat::unknown_layout_error(format!(
        "{fqn}: a tensor of shape {shape:?} may be row-major or channels-last, and the checkpoint does not record \
         which"
    ))
}

/// Returns the error for tied parameters in two units. FSDP1 would make two separate parameters of the tied tensor, and
/// only one of these parameters would have optimizer state.
fn tied_across(alias: &SharedName) -> Error {
    Error::unsupported(
        format!("`{}` is tied to `{}`, but they would be in two units", alias.fqn, alias.with),
        "FSDP1 shares parameters only within one unit: wrap neither of their modules with options::wrap, or wrap a \
         module that contains both",
    )
}

/// Returns the names of the modules that the patterns match, in the order of the state dict.
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
                format!("options::wrap {pattern}: no module path matches"),
                nearest::pattern_hint(pattern.as_str(), &modules),
            ));
        }
    }
    modules.retain(|module| patterns.iter().any(|pattern| pattern.matches(module)));
    Ok(modules.into_iter().map(str::to_owned).collect())
}

/// The parameters of a model, the names tied to them, and notes for the user.
struct ModelTensors<'a> {
    parameters: Vec<(Fqn, TensorId, &'a TensorEntry)>,
    shared: Vec<SharedName>,
    notes: Vec<String>,
}

fn divide<'a>(
    model: &OrderedModel<'a>,
    tensors: &[(Fqn, TensorId)],
    wrapping: &WrapPolicy<'_>,
) -> Result<ModelTensors<'a>> {
    let buffers = wrapping.buffers;
    let groups = named_groups(wrapping.state).or_else(|| named_groups(model.state));
    let trained: Option<HashSet<Fqn>> = groups.map(|groups| groups.into_iter().flatten().collect());
    let mut used = vec![false; buffers.len()];
    let mut first_names: HashMap<TensorId, Fqn> = HashMap::new();
    let mut divided = ModelTensors { parameters: Vec::new(), shared: Vec::new(), notes: Vec::new() };
    let mut without_state: Vec<&Fqn> = Vec::new();
    let mut buffer_names: Vec<&str> = Vec::new();
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
        // A 0-d tensor without optimizer state is a buffer, because FSDP1 does not support 0-d parameters.
        if is_trained != Some(true) && (BUFFERS.contains(&last) || entry.shape.is_empty()) {
            buffer_names.push(fqn.as_str());
            continue;
        }
        if is_trained == Some(false) {
            without_state.push(fqn);
        }
        first_names.insert(*id, fqn.clone());
        divided.parameters.push((fqn.clone(), *id, entry));
    }
    let mut used = used.into_iter();
    refuse_unused(buffers, tensors, |_| used.next() == Some(true))?;
    if !without_state.is_empty() {
        return Err(missing_state(&without_state, &divided.parameters));
    }
    if !buffer_names.is_empty() {
        let number = count(buffer_names.len(), "tensor");
        let treated = if buffer_names.len() == 1 { "is treated as a buffer" } else { "are treated as buffers" };
        divided.notes.push(format!("{number} {treated}: {}", short_list_of_counted(&buffer_names, FEW)));
    }
    if trained.is_none() {
        let number = divided.parameters.len();
        let tensors = match number {
            1 => String::from("the only float tensor is treated as a parameter"),
            _ => format!("all {number} float tensors are treated as parameters"),
        };
        divided.notes.push(format!(
            "no optimizer state with parameter names found, so {tensors}; name buffers with \
             options::buffers"
        ));
    }
    Ok(divided)
}

/// Returns the parameter for each name in a flat layout. A tied parameter has several names.
fn names_of(layout: &FlatLayout) -> HashMap<&Fqn, &FlatParam> {
    let mut names: HashMap<&Fqn, &FlatParam> = layout.params().map(|(_, param)| (&param.fqn, param)).collect();
    for SharedName { fqn, with } in layout.units.iter().flat_map(|unit| &unit.shared) {
        if let Some(param) = names.get(with).copied() {
            names.insert(fqn, param);
        }
    }
    names
}

/// Divides the tensors of a model into parameters and buffers, as the flat layout of SRC does: a tensor is a parameter
/// if the layout lists it. A tied parameter gets the first of its names in the model.
fn divide_like<'a>(
    model: &OrderedModel<'a>,
    tensors: &[(Fqn, TensorId)],
    buffers: &[Pattern],
    source: &FlatLayout,
) -> Result<ModelTensors<'a>> {
    let known = names_of(source);
    let mut first_names: HashMap<&Fqn, Fqn> = HashMap::new();
    let mut divided = ModelTensors { parameters: Vec::new(), shared: Vec::new(), notes: Vec::new() };
    for (fqn, id) in tensors {
        let Some(param) = known.get(fqn) else { continue };
        if let Some(pattern) = buffers.iter().find(|pattern| pattern.covers(fqn.as_str())) {
            return Err(Error::usage(
                format!(
                    "options::buffers {}: SRC has `{fqn}` in a flat parameter, so it is a parameter",
                    pattern.as_str()
                ),
                "omit options::buffers; every tensor that is not in a flat parameter of SRC is a buffer",
            ));
        }
        if let Some(first) = first_names.get(&param.fqn) {
            divided.shared.push(SharedName { fqn: fqn.clone(), with: first.clone() });
            continue;
        }
        first_names.insert(&param.fqn, fqn.clone());
        divided.parameters.push((fqn.clone(), *id, model.catalog.tensor(*id)));
    }
    refuse_unused(buffers, tensors, |pattern| tensors.iter().any(|(fqn, _)| pattern.covers(fqn.as_str())))?;
    let missing = source.params().filter(|(_, param)| !first_names.contains_key(&param.fqn));
    let missing: Vec<&str> = missing.map(|(_, param)| param.fqn.as_str()).collect();
    if !missing.is_empty() {
        return Err(Error::unsupported(
            format!(
                "{} lacks {} that the flat parameters of SRC contain: {}",
                model.checkpoint.root.display(),
                count(missing.len(), "parameter"),
                short_list_of_counted(&missing, FEW)
            ),
            "give options::like CKPT with a torch file of the same model, with the names of SRC",
        )
        .naming(&missing));
    }
    Ok(divided)
}

/// Refuses a pattern of buffers that matches no tensor of the model.
fn refuse_unused(
    buffers: &[Pattern],
    tensors: &[(Fqn, TensorId)],
    mut is_used: impl FnMut(&Pattern) -> bool,
) -> Result<()> {
    let Some(unused) = buffers.iter().find(|pattern| !is_used(pattern)) else { return Ok(()) };
    let names: Vec<String> = tensors.iter().map(|(fqn, _)| fqn.to_string()).collect();
    let pattern = unused.as_str();
    Err(Error::usage(
        format!("options::buffers {pattern}: no tensor name of the model matches"),
        nearest::pattern_hint(pattern, &names),
    ))
}

/// Returns the error for floating-point tensors that have no optimizer state although other tensors have optimizer
/// state.
fn missing_state(names: &[&Fqn], parameters: &[(Fqn, TensorId, &TensorEntry)]) -> Error {
    let texts: Vec<&str> = names.iter().map(|fqn| fqn.as_str()).collect();
    let shape_of = |name: &Fqn| parameters.iter().find(|(fqn, ..)| fqn == name).map(|(.., entry)| &entry.shape);
    let tied = names.iter().find_map(|name| {
        let shape = shape_of(name)?;
        let has_shape =
            |(fqn, _, entry): &&(Fqn, TensorId, &TensorEntry)| !names.contains(&fqn) && entry.shape == *shape;
        parameters
            .iter()
            .find(has_shape)
            .map(|(fqn, ..)| format!(" (`{name}` may be tied to `{fqn}`, which has the same shape)"))
    });
    Error::unsupported(
        format!(
            "{} no optimizer state, so dtshard cannot know whether {}: {}{}",
            if names.len() == 1 {
                String::from("1 float tensor has")
            } else {
                format!("{} float tensors have", names.len())
            },
            if names.len() == 1 { "it is a parameter" } else { "they are parameters" },
            short_list_of_counted(&texts, FEW),
            tied.unwrap_or_default()
        ),
        "mark buffers with options::buffers PATTERN; list tied and frozen parameters in options::flat_layout FILE",
    )
    .naming(&texts)
}
