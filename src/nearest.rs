//! The names that somebody may have meant: what an error says of a pattern that no name matches.

use crate::layout::Pattern;

/// The names nearest to a pattern that matched none, by edit distance. Wildcards count for nothing, and a pattern is
/// held against as many components of a name as it has itself, wherever in the name they are: it may mean a module.
#[must_use]
pub fn nearest(pattern: &str, names: &[String]) -> Vec<String> {
    const SHOWN: usize = 3;
    let wanted: Vec<&str> = pattern.split('.').skip_while(|part| part.chars().all(|c| c == '*')).collect();
    let text = |parts: &[&str]| parts.join(".").replace(['*', '?', '{', '}'], "");
    let wanted_text = text(&wanted);
    let distance = |name: &str| {
        let parts: Vec<&str> = name.split('.').collect();
        let windows = parts.windows(wanted.len().clamp(1, parts.len()));
        windows.map(|window| strsim::damerau_levenshtein(&wanted_text, &text(window))).min()
    };
    let mut ranked: Vec<(Option<usize>, &String)> = names.iter().map(|name| (distance(name), name)).collect();
    ranked.sort();
    ranked.dedup();
    ranked.into_iter().take(SHOWN).map(|(_, name)| name.clone()).collect()
}

/// What to say where no name is like a pattern: that it would be with `**.` before it, or the nearest names.
#[must_use]
pub fn hint(pattern: &str, names: &[String]) -> String {
    let anywhere = format!("**.{pattern}");
    let covers = Pattern::parse(&anywhere).is_ok_and(|anywhere| names.iter().any(|name| anywhere.covers(name)));
    if covers {
        return format!("names are matched from their beginning: {anywhere} matches it wherever it is");
    }
    listed(pattern, names)
}

/// What to say where there is no such name: the nearest ones.
#[must_use]
pub fn listed(name: &str, names: &[String]) -> String {
    match nearest(name, names).as_slice() {
        [] => String::from("there are no names at all"),
        names => format!("the nearest names are {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_names_come_first() {
        let names = ["layers.0.w1.weight", "head.weight", "layers.0.w2.bias"].map(String::from);
        assert_eq!(nearest("layers.0.w1.wieght", &names)[0], "layers.0.w1.weight");
        assert_eq!(nearest("**.w11.weight", &names)[0], "layers.0.w1.weight");
        assert_eq!(nearest("layers.*.w2.bais", &names)[0], "layers.0.w2.bias");
        // Modules.
        assert_eq!(nearest("layrs.0.w2", &names)[0], "layers.0.w2.bias");
        assert_eq!(nearest("**.haed", &names)[0], "head.weight");
        assert_eq!(nearest("**", &names).len(), 3);
        assert_eq!(nearest("**.haed", &[names.clone(), names].concat()).len(), 3, "each of them once");
        assert_eq!(nearest("a", &["b", "b"].map(String::from)), ["b"]);
    }
}
