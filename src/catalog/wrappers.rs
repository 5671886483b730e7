//! Removes the components that wrapper modules add to parameter names.
//!
//! FSDP1, `torch.compile` and activation checkpointing wrap modules, and the attribute in which a wrapper holds the
//! wrapped module becomes a component of parameter names, such as `_orig_mod`. Invariant: names with and without these
//! components refer to the same parameter.
//!
//! Source: `torch/distributed/fsdp/_common_utils.py`, `torch/_dynamo/eval_frame.py` and
//! `torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`.

/// The component that FSDP1 adds to parameter names: the attribute that holds the wrapped module.
pub const FSDP_WRAPPED: &str = "_fsdp_wrapped_module";

/// The components that FSDP1, `torch.compile` and activation checkpointing add to parameter names: the attributes that
/// hold wrapped modules.
pub const WRAPPERS: [&str; 3] = [FSDP_WRAPPED, "_orig_mod", "_checkpoint_wrapped_module"];

/// Returns a name without wrapper components. A final dot, as in `model.layers.`, is kept.
#[must_use]
pub fn clean_name(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
    parts.join(".")
}

/// Returns whether a name contains a wrapper component.
#[must_use]
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

#[cfg(test)]
mod tests {
    use super::*;

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
