//! Writes the `_metadata` of a model's state dict, which maps the path of each module to its version.
//!
//! A wrapped module has two entries, one for the wrapper and one for the module inside: `layers.0` and
//! `layers.0._fsdp_wrapped_module`. The component `_fsdp_wrapped_module` is also in the names of all modules and
//! parameters inside the wrapped module.
//!
//! Source: `Module.state_dict` in `torch/nn/modules/module.py`, `FSDP_WRAPPED_MODULE` in
//! `torch/distributed/fsdp/_common_utils.py`.

use std::collections::HashSet;

use indexmap::IndexMap;

use crate::catalog::flat::{FlatLayout, FlatUnit};
use crate::catalog::modules::METADATA;
use crate::catalog::wrappers::{FSDP_WRAPPED, clean_name};
use crate::catalog::{Dict, Fqn, Value};

/// Returns the name of a parameter or flat parameter in the wrapped model's `named_parameters()`. `name` has no wrapper
/// prefixes.
pub fn wrapped_name(name: &str, layout: &FlatLayout) -> String {
    let (module, last) = name.rsplit_once('.').unwrap_or(("", name));
    let path = wrapped_path(module, layout);
    let inner = if is_unit(module, layout) { join(&path, FSDP_WRAPPED) } else { path };
    join(&inner, last)
}

/// Returns the attributes of the state dict of a model in which FSDP1 wraps the units of `layout`. If the source has
/// wrappers around exactly these modules, its attributes are returned unchanged. Otherwise the wrappers of the source
/// are removed, and the wrappers of `layout` are added. Returns `None` if the source has other attributes than
/// `_metadata`; the target then has no attributes.
pub fn wrap_attributes(attributes: &Value, layout: &FlatLayout) -> Option<Value> {
    let Value::Dict(attributes) = attributes else { return None };
    let Some(Value::Dict(metadata)) = attributes.get(METADATA) else { return None };
    if attributes.entries.len() != 1 || metadata.entries.iter().any(|(_, value)| value.contains_tensor()) {
        return None;
    }
    let paths: Vec<&str> = metadata.entries.iter().map(|(path, _)| path.as_str()).collect::<Option<_>>()?;
    let units = layout.units.iter().map(|unit| join(&wrapped_path(&unit.module, layout), FSDP_WRAPPED));
    let known: HashSet<&str> = paths.iter().copied().collect();
    let wrappers = paths.iter().filter(|path| path.rsplit('.').next() == Some(FSDP_WRAPPED)).count();
    let entries = if units.clone().all(|unit| known.contains(unit.as_str())) && wrappers == units.count() {
        metadata.entries.clone()
    } else {
        // A wrapper and its module have the same clean name. The module comes second, so its entry replaces that of the
        // wrapper.
        let modules: IndexMap<String, &Value> =
            paths.iter().zip(&metadata.entries).map(|(path, (_, value))| (clean_name(path), value)).collect();
        modules.iter().flat_map(|(module, value)| wrapped_entries(module, value, layout)).collect()
    };
    let metadata = Dict { kind: metadata.kind, entries, attributes: None };
    let entries = vec![(Value::Str(METADATA.into()), Value::Dict(metadata))];
    Some(Value::Dict(Dict { kind: attributes.kind, entries, attributes: None }))
}

/// Returns the `_metadata` entries of a module. A unit has two entries: first the entry of the wrapper, then the entry
/// of the module inside.
fn wrapped_entries(module: &str, value: &Value, layout: &FlatLayout) -> Vec<(Value, Value)> {
    let outside = wrapped_path(module, layout);
    if !is_unit(module, layout) {
        return vec![(Value::Str(outside.into()), value.clone())];
    }
    let version = Dict { entries: vec![(Value::Str("version".into()), Value::Int(1))], ..Dict::default() };
    let inside = join(&outside, FSDP_WRAPPED);
    vec![(Value::Str(outside.into()), Value::Dict(version)), (Value::Str(inside.into()), value.clone())]
}

/// Returns the path of a module, including the wrapper components of the modules that contain the module, but without
/// the component of its own wrapper.
fn wrapped_path(module: &str, layout: &FlatLayout) -> String {
    let mut path = String::new();
    let mut plain = String::new();
    for part in module.split('.').filter(|part| !part.is_empty()) {
        if is_unit(&plain, layout) {
            path = join(&path, FSDP_WRAPPED);
        }
        path = join(&path, part);
        plain = join(&plain, part);
    }
    path
}

/// Returns whether FSDP1 wraps a module. FSDP1 wraps the root module, even if all parameters are in inner units. The
/// exception is a model with several roots of FSDP1: its root module is not wrapped, and the optimizer of the layout
/// lists parameters outside all units.
fn is_unit(module: &str, layout: &FlatLayout) -> bool {
    let is_listed = layout.units.iter().any(|unit| *unit.module == *module);
    is_listed || module.is_empty() && !trains_outside_units(layout)
}

/// Returns whether the optimizer of the layout has parameters outside all units.
fn trains_outside_units(layout: &FlatLayout) -> bool {
    let known: HashSet<Fqn> = if layout.use_orig_params {
        layout.params().map(|(_, param)| param.fqn.clone()).collect()
    } else {
        layout.units.iter().map(FlatUnit::key).collect()
    };
    layout.optimizer.iter().flatten().flatten().any(|fqn| !known.contains(fqn))
}

fn join(path: &str, part: &str) -> String {
    if path.is_empty() { part.to_owned() } else { format!("{path}.{part}") }
}
