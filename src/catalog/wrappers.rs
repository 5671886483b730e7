//! Components that wrapper modules put into names, and names without them.
//!
//! FSDP1, `torch.compile` and activation checkpointing wrap modules, and what a wrapped module is called within its
//! wrapper comes to stand in the names of its parameters. A model is the same with and without.
//!
//! Source: `torch/distributed/fsdp/_common_utils.py`, `torch/_dynamo/eval_frame.py` and
//! `torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`.

/// What FSDP1 calls the module within its wrapper.
pub const FSDP_WRAPPED: &str = "_fsdp_wrapped_module";

/// Those of FSDP1, `torch.compile` and activation checkpointing.
pub const WRAPPERS: [&str; 3] = [FSDP_WRAPPED, "_orig_mod", "_checkpoint_wrapped_module"];

/// A name of a module, or `model.layers.` with its last dot, without wrappers.
#[must_use]
pub fn clean_name(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
    parts.join(".")
}

/// Whether a wrapper has put something into a name.
#[must_use]
pub fn has_wrapper(text: &str) -> bool {
    // Each begins with it; this is asked of every name.
    let begins = |(at, _): (usize, &str)| WRAPPERS.iter().any(|wrapper| text[at..].starts_with(wrapper));
    text.match_indices('_').any(begins)
}

/// Add the names that names with wrappers have without them.
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
    fn names_are_known_with_and_without_wrappers() {
        assert_eq!(clean_name("m._orig_mod.a."), "m.a.");
        assert!(WRAPPERS.iter().all(|wrapper| has_wrapper(wrapper) && has_wrapper(&format!("a.b_{wrapper}.c"))));
        assert!(!has_wrapper("a._orig.mod_orig_m") && !has_wrapper(""));
        let mut names = ["m._orig_mod.w", "m.b"].map(String::from).to_vec();
        with_clean(&mut names);
        assert_eq!(names, ["m._orig_mod.w", "m.b", "m.w"]);
    }
}
