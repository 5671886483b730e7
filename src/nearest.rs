//! The names that somebody may have meant: what an error says of a pattern that no name matches.

/// The names nearest to a pattern that matched none, by edit distance. Wildcards count for nothing, and a pattern is
/// held against as many last components of a name as it has itself.
#[must_use]
pub fn nearest(pattern: &str, names: &[String]) -> Vec<String> {
    const SHOWN: usize = 3;
    let wanted: Vec<&str> = pattern.split('.').skip_while(|part| part.chars().all(|c| c == '*')).collect();
    let distance = |name: &str| {
        let parts: Vec<&str> = name.split('.').collect();
        let tail = &parts[parts.len().saturating_sub(wanted.len())..];
        let text = |parts: &[&str]| parts.join(".").replace(['*', '?', '{', '}'], "");
        strsim::damerau_levenshtein(&text(&wanted), &text(tail))
    };
    let mut ranked: Vec<(usize, &String)> = names.iter().map(|name| (distance(name), name)).collect();
    ranked.sort();
    ranked.into_iter().take(SHOWN).map(|(_, name)| name.clone()).collect()
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
    }
}
