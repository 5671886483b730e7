//! Finds the module in the name of a tensor, and the modules that a state dict lists.
//!
//! A tensor name is the path of its module, a dot and an attribute, as in `layers.0.weight`. The path of the root
//! module is empty.
//!
//! Source: `Module.state_dict` in `torch/nn/modules/module.py`.

pub use crate::layout::parallelize::module_of;

use super::wrappers::clean_name;
use super::{Dict, Value};

/// The name of the attribute of a state dict that maps the path of each module to the version of the module.
pub const METADATA: &str = "_metadata";

/// Returns whether a name is inside a module, at any depth.
pub fn is_within(name: &str, module: &str) -> bool {
    module.is_empty() || name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}

/// Returns PyTorch's `_metadata` of a state dict, if there is one.
pub fn metadata(dict: &Dict) -> Option<&Dict> {
    dict.attributes.as_ref()?.as_dict()?.get(METADATA)?.as_dict()
}

/// Returns PyTorch's `_metadata` of a state dict, for modification.
pub fn metadata_mut(state: &mut Value) -> Option<&mut Dict> {
    let Value::Dict(dict) = state else { return None };
    let Value::Dict(attributes) = dict.attributes.as_deref_mut()? else { return None };
    match attributes.entries.iter_mut().find(|(key, _)| key.as_str() == Some(METADATA)) {
        Some((_, Value::Dict(metadata))) => Some(metadata),
        _ => None,
    }
}

/// Returns the paths of the modules of a model in registration order, without wrapper components, if the state dict
/// records them. A wrapped module appears twice in the list: once for the wrapper, once for the module itself.
pub fn registered_modules(dict: &Dict) -> Option<Vec<String>> {
    let paths = metadata(dict)?.entries.iter().filter_map(|(path, _): &(Value, Value)| path.as_str());
    Some(paths.map(clean_name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_within_a_module_only_at_a_dot() {
        assert_eq!((module_of("layers.0.weight"), module_of("weight")), ("layers.0", ""));
        let within = |name| is_within(name, "layers.0");
        assert_eq!(["layers.0.w", "layers.0.a.w", "layers.0", "layers.01.w"].map(within), [true, true, false, false]);
        assert!(is_within("weight", ""));
    }
}
