//! Name patterns: globs over dotted names.
//!
//! `*` and `?` stay inside one dotted component, `**` crosses components, `{a,b}` alternates. A pattern that matches
//! a module covers everything below it: `layers.*` covers `layers.0.attn.weight`.

use std::fmt;

use globset::GlobBuilder;
use regex::bytes::{Regex, RegexBuilder};

use super::LayoutError;

/// A compiled pattern.
#[derive(Clone, Debug)]
pub struct Pattern {
    text: String,
    matcher: Regex,
}

impl Pattern {
    /// # Errors
    /// `Pattern` where the text is no glob.
    pub fn parse(text: &str) -> Result<Self, LayoutError> {
        let error = |problem: String| LayoutError::Pattern { text: text.to_owned(), problem };
        if text.is_empty() {
            return Err(error(String::from("it is empty")));
        }
        // Names are matched as paths whose separator is the dot. Brackets are ordinary characters in names.
        let glob = as_path(text).replace('[', "[[]");
        let glob = GlobBuilder::new(&glob)
            .literal_separator(true)
            .backslash_escape(false)
            .build()
            .map_err(|problem| error(problem.kind().to_string()))?;
        // Not by the glob's own matcher, which takes it for granted that no text is too long or too deep.
        let matcher = RegexBuilder::new(glob.regex())
            .dot_matches_new_line(true)
            .build()
            .map_err(|_| error(String::from("it is too long, or its braces too deep")))?;
        Ok(Self { text: text.to_owned(), matcher })
    }

    /// # Errors
    /// As [`Pattern::parse`], for the first of them that is none.
    pub fn parse_all(texts: &[String]) -> Result<Vec<Self>, LayoutError> {
        texts.iter().map(|text| Self::parse(text)).collect()
    }

    /// Whether it matches the name or a module above it.
    #[must_use]
    pub fn covers(&self, name: &str) -> bool {
        let path = as_path(name);
        let modules = path.match_indices('/').map(|(at, _)| &path[..at]);
        modules.chain(std::iter::once(path.as_str())).any(|module| self.matcher.is_match(module.as_bytes()))
    }

    /// Whether it matches this name itself.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        self.matcher.is_match(as_path(name).as_bytes())
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(&self.text)
    }
}

/// Dots become separators; a slash in a name, which is rare, becomes something that is not one.
fn as_path(name: &str) -> String {
    name.replace('/', "\u{1}").replace('.', "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(pattern: &str, name: &str) -> bool {
        Pattern::parse(pattern).unwrap().covers(name)
    }

    #[test]
    fn stars_respect_components() {
        assert!(covers("layers.*.w1.weight", "layers.12.w1.weight"));
        assert!(!covers("layers.*.weight", "layers.12.w1.weight"));
        assert!(covers("layers.**.weight", "layers.12.w1.weight"));
        assert!(covers("**.weight", "weight"));
        assert!(covers("**.{w1,w3}.weight", "a.b.w3.weight"));
        assert!(covers("h?ad.weight", "head.weight"));
        assert!(covers("a[0].weight", "a[0].weight"));
        assert!(covers("ü.*", "ü.a\nb.c"));
        assert!(!covers("head", "header.weight"));
    }

    #[test]
    fn a_module_covers_what_is_below_it() {
        assert!(covers("layers.0", "layers.0.attn.wq.weight"));
        assert!(covers("layers.*", "layers.0.attn.wq.weight"));
        assert!(!covers("layers.0", "layers.01.attn"));
        assert!(covers("*", "anything.at.all"));
    }

    #[test]
    fn a_bad_pattern_is_an_error() {
        assert!(Pattern::parse("").is_err());
        assert!(Pattern::parse("a.{b").is_err());
        assert!(Pattern::parse(&"a".repeat(1 << 20)).is_err());
        assert!(Pattern::parse(&("{a,".repeat(300) + &"}".repeat(300))).is_err());
    }
}
