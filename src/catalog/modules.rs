//! Modules in names: which module a tensor is of, and the modules that a state dict lists.
//!
//! A name is the path of a module, a dot and an attribute, `layers.0.weight`; the path of the root is empty.
//!
//! Source: `Module.state_dict` in `torch/nn/modules/module.py`.

use super::wrappers::clean_name;
use super::{Dict, Value};

/// Under which a state dict, among its attributes, has the versions of modules by their paths.
pub const METADATA: &str = "_metadata";

/// The module that has a tensor of this name, or a module as its child.
#[must_use]
pub fn module_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}

/// Whether a name is of something in this module, however deep.
#[must_use]
pub fn is_within(name: &str, module: &str) -> bool {
    module.is_empty() || name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}

/// `_metadata` of a state dict, where it has PyTorch's.
#[must_use]
pub fn metadata(dict: &Dict) -> Option<&Dict> {
    dict.attributes.as_ref()?.as_dict()?.get(METADATA)?.as_dict()
}

/// The modules of a model in the order of registration, without wrappers, where the state dict tells. What is wrapped
/// is there twice.
#[must_use]
pub fn registered(dict: &Dict) -> Option<Vec<String>> {
    let paths = metadata(dict)?.entries.iter().filter_map(|(path, _): &(Value, Value)| path.as_str());
    Some(paths.map(clean_name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_within_modules_at_dots() {
        assert_eq!((module_of("layers.0.weight"), module_of("weight")), ("layers.0", ""));
        let within = |name| is_within(name, "layers.0");
        assert_eq!(["layers.0.w", "layers.0.a.w", "layers.0", "layers.01.w"].map(within), [true, true, false, false]);
        assert!(is_within("weight", ""));
    }
}
