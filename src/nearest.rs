//! Finds the names nearest to a pattern that matches nothing, for the hints of errors.
//!
//! A distance is the number of edited characters.

use crate::layout::Pattern;

/// Returns at most three names, those with the smallest edit distance from a pattern. Wildcards are ignored. A pattern
/// of `n` components is compared with every `n` consecutive components of a name, because the pattern may name a
/// module.
pub fn nearest(pattern: &str, names: &[String]) -> Vec<String> {
    const SHOWN: usize = 3;
    let pattern_parts: Vec<&str> = pattern.split('.').skip_while(|part| part.chars().all(|c| c == '*')).collect();
    let text = |parts: &[&str]| parts.join(".").replace(['*', '?', '{', '}'], "");
    let pattern_text = text(&pattern_parts);
    let distance = |name: &str| {
        let parts: Vec<&str> = name.split('.').collect();
        let windows = parts.windows(pattern_parts.len().clamp(1, parts.len()));
        windows.map(|window| strsim::damerau_levenshtein(&pattern_text, &text(window))).min()
    };
    let mut ranked: Vec<(Option<usize>, &String)> = names.iter().map(|name| (distance(name), name)).collect();
    ranked.sort();
    ranked.dedup();
    ranked.into_iter().take(SHOWN).map(|(_, name)| name.clone()).collect()
}

/// Returns the hint for a pattern that matches nothing: a proposal to put `**.` before it, or the nearest names.
pub fn pattern_hint(pattern: &str, names: &[String]) -> String {
    let anywhere = format!("**.{pattern}");
    let covers = Pattern::parse(&anywhere).is_ok_and(|anywhere| names.iter().any(|name| anywhere.covers(name)));
    if covers {
        return format!("patterns match complete names; use {anywhere} to match at any depth");
    }
    name_hint(pattern, names)
}

/// Returns the hint for a name that does not exist: the nearest names.
pub fn name_hint(name: &str, names: &[String]) -> String {
    match nearest(name, names).as_slice() {
        [] => String::from("there are no names to match"),
        names => format!("the nearest names are {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_names_are_sorted_by_distance() {
        let names = ["layers.0.w1.weight", "head.weight", "layers.0.w2.bias"].map(String::from);
        assert_eq!(nearest("layers.0.w1.wieght", &names)[0], "layers.0.w1.weight");
        assert_eq!(nearest("**.w11.weight", &names)[0], "layers.0.w1.weight");
        assert_eq!(nearest("layers.*.w2.bais", &names)[0], "layers.0.w2.bias");
        // The pattern names a module.
        assert_eq!(nearest("layrs.0.w2", &names)[0], "layers.0.w2.bias");
        assert_eq!(nearest("**.haed", &names)[0], "head.weight");
        assert_eq!(nearest("**", &names).len(), 3);
        assert_eq!(nearest("**.haed", &[names.clone(), names].concat()).len(), 3, "each of them once");
        assert_eq!(nearest("a", &["b", "b"].map(String::from)), ["b"]);
    }
}
