//! Patterns for names: globs over names joined with dots.
//!
//! `*` and `?` match within one component of a name, `**` matches across components, and `{a,b}` matches `a` or `b`. A
//! pattern that matches a module covers every name below it: `layers.*` covers `layers.0.attn.weight`.

use std::fmt;

use globset::GlobBuilder;
use regex::bytes::{Regex, RegexBuilder};

use super::LayoutError;

/// A compiled pattern for names of tensors.
#[derive(Clone, Debug)]
pub struct Pattern {
    text: String,
    matcher: Regex,
}

impl Pattern {
    /// Compiles a pattern.
    ///
    /// # Errors
    /// `Pattern` if the text is not a valid glob.
    pub fn parse(text: &str) -> Result<Self, LayoutError> {
        let error = |problem: String| LayoutError::Pattern { text: text.to_owned(), problem };
        if text.is_empty() {
            return Err(error(String::from("it is empty")));
        }
        // The dot is the path separator. Brackets are ordinary characters in names, so they are escaped.
        let glob = as_path(text).replace('[', "[[]");
        let glob = GlobBuilder::new(&glob)
            .literal_separator(true)
            .backslash_escape(false)
            .build()
            .map_err(|problem| error(problem.kind().to_string()))?;
        // The glob's own matcher panics on patterns that are too long or too deep, so the regex is built here.
        let matcher = RegexBuilder::new(glob.regex())
            .dot_matches_new_line(true)
            .build()
            .map_err(|_| error(String::from("it is too long, or its braces too deep")))?;
        Ok(Self { text: text.to_owned(), matcher })
    }

    /// Compiles several patterns.
    ///
    /// # Errors
    /// The error of [`Pattern::parse`] for the first invalid pattern.
    pub fn parse_all(texts: &[String]) -> Result<Vec<Self>, LayoutError> {
        texts.iter().map(|text| Self::parse(text)).collect()
    }

    /// Returns whether the pattern matches the name itself or the name of a module that contains the tensor.
    pub fn covers(&self, name: &str) -> bool {
        let path = as_path(name);
        let modules = path.match_indices('/').map(|(at, _)| &path[..at]);
        modules.chain(std::iter::once(path.as_str())).any(|module| self.matcher.is_match(module.as_bytes()))
    }

    /// Returns whether the pattern matches the name itself.
    pub fn matches(&self, name: &str) -> bool {
        self.matcher.is_match(as_path(name).as_bytes())
    }

    /// Returns the text of the pattern.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(&self.text)
    }
}

/// Converts a name to a file path for the glob: dots become slashes, and slashes become the character U+0001.
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
    fn single_star_stays_within_one_component() {
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
    fn pattern_of_a_module_covers_its_tensors() {
        assert!(covers("layers.0", "layers.0.attn.wq.weight"));
        assert!(covers("layers.*", "layers.0.attn.wq.weight"));
        assert!(!covers("layers.0", "layers.01.attn"));
        assert!(covers("*", "anything.at.all"));
    }

    #[test]
    fn invalid_pattern_is_an_error() {
        assert!(Pattern::parse("").is_err());
        assert!(Pattern::parse("a.{b").is_err());
        assert!(Pattern::parse(&"a".repeat(1 << 20)).is_err());
        assert!(Pattern::parse(&("{a,".repeat(300) + &"}".repeat(300))).is_err());
    }
}
