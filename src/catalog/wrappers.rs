//! Removes the components that wrapper modules add to parameter names.
//!
//! FSDP1, `torch.compile` and activation checkpointing wrap modules, and the attribute in which a wrapper holds the
//! wrapped module becomes a component of parameter names, such as `_orig_mod`. Invariant: names with and without these
//! components refer to the same parameter. DDP wraps the whole model in a module with the attribute `module`. Because
//! many models have a module of this name, `module` is a wrapper only if every name of the model begins with it.
//!
//! Source: `torch/distributed/fsdp/_common_utils.py`, `torch/_dynamo/eval_frame.py`,
//! `torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py` and `torch/nn/parallel/distributed.py`.

use super::Path;

/// The component that FSDP1 adds to parameter names: the attribute that holds the wrapped module.
pub const FSDP_WRAPPED: &str = "_fsdp_wrapped_module";

/// The components that FSDP1, `torch.compile` and activation checkpointing add to parameter names: the attributes that
/// hold wrapped modules.
pub const WRAPPERS: [&str; 3] = [FSDP_WRAPPED, "_orig_mod", "_checkpoint_wrapped_module"];

/// Returns a name without wrapper components. A final dot, as in `model.layers.`, is kept.
pub fn clean_name(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
    parts.join(".")
}

/// Returns whether a name contains a wrapper component.
pub fn has_wrapper(text: &str) -> bool {
    // Each wrapper component starts with an underscore. This function is called for every name, so it tests only the
    // parts of the name that start with an underscore.
    let begins = |(at, _): (usize, &str)| WRAPPERS.iter().any(|wrapper| text[at..].starts_with(wrapper));
    text.match_indices('_').any(begins)
}

/// Appends to the list, for each name with wrapper components, the name without these components.
pub fn with_clean(names: &mut Vec<String>) {
    for index in 0..names.len() {
        if has_wrapper(&names[index]) {
            names.push(clean_name(&names[index]));
        }
    }
}

/// The component that DDP adds at the start of all names of a model, with its dot.
const DDP: &str = "module.";

/// The wrapper components in the names of one model, including the component of DDP.
#[derive(Debug)]
pub struct ModelWrappers {
    /// The path of the model in the state dict, with a dot at its end; empty if the model is at the top level.
    root: String,
    /// True if every name of the model begins with `module.`, the component that DDP adds.
    has_ddp: bool,
}

impl ModelWrappers {
    /// Finds the wrappers of the model at the path `root` of the state dict. `names` are the names of all tensors of the
    /// model, relative to `root`.
    pub fn new<'n>(root: &Path, names: impl IntoIterator<Item = &'n str>) -> Self {
        let mut names = names.into_iter().peekable();
        let has_ddp = names.peek().is_some() && names.all(|name| clean_name(name).starts_with(DDP));
        let root = if root.0.is_empty() { String::new() } else { format!("{root}.") };
        Self { root, has_ddp }
    }

    /// Returns the name of a tensor in the model without wrapper components.
    pub fn clean(&self, name: &str) -> String {
        let clean = clean_name(name);
        clean.strip_prefix(DDP).filter(|_| self.has_ddp).map(str::to_owned).unwrap_or(clean)
    }

    /// Appends to the list, for each name with wrapper components, the name without these components. A name is a path
    /// in the state dict, or a name in the model.
    pub fn with_clean(&self, names: &mut Vec<String>) {
        with_clean(names);
        let without_ddp = |name: &String| match name.strip_prefix(&self.root).and_then(|rest| rest.strip_prefix(DDP)) {
            Some(rest) => Some(format!("{}{rest}", self.root)),
            None => name.strip_prefix(DDP).map(str::to_owned),
        };
        if self.has_ddp {
            names.extend(names.iter().filter_map(without_ddp).collect::<Vec<String>>());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Key;

    #[test]
    fn ddp_prefix_is_removed_if_all_names_have_it() {
        let root = Path(vec![Key::Name("model".into())]);
        let names = |wrappers: &ModelWrappers, name: &str| {
            let mut names = vec![format!("model.{name}"), name.to_owned()];
            wrappers.with_clean(&mut names);
            names.split_off(2)
        };
        let ddp = ModelWrappers::new(&root, ["module.up.w", "module._orig_mod.module.b"]);
        assert_eq!(names(&ddp, "module.up.w"), ["model.up.w", "up.w"]);
        assert_eq!(names(&ddp, "module.module.b"), ["model.module.b", "module.b"]);
        assert_eq!((ddp.clean("module.up.w"), ddp.clean("_orig_mod.module.w")), ("up.w".into(), "w".into()));
        let compiled = ModelWrappers::new(&root, ["_orig_mod.module.w"]);
        let last = |wrappers, name| names(wrappers, name).pop();
        assert_eq!(last(&compiled, "_orig_mod.module.w").as_deref(), Some("w"));
        let other = ModelWrappers::new(&root, ["module.w", "head.w"]);
        assert!(names(&other, "module.w").is_empty());
        assert_eq!(other.clean("module.w"), "module.w");
        assert_eq!(names(&ModelWrappers::new(&Path::default(), ["module.w"]), "module.w"), ["w"]);
    }

    #[test]
    fn wrapper_components_are_detected_and_removed() {
        assert_eq!(clean_name("m._orig_mod.a."), "m.a.");
        assert!(WRAPPERS.iter().all(|wrapper| has_wrapper(wrapper) && has_wrapper(&format!("a.b_{wrapper}.c"))));
        assert!(!has_wrapper("a._orig.mod_orig_m") && !has_wrapper(""));
        let mut names = ["m._orig_mod.w", "m.b"].map(String::from).to_vec();
        with_clean(&mut names);
        assert_eq!(names, ["m._orig_mod.w", "m.b", "m.w"]);
    }
}
