//! Paths into a value, spelled as in Python: `param_groups[0].lr`.
//!
//! Only errors need a path. So decoding keeps a stack of steps, and only an error turns the steps into text.

use std::fmt::Write;

use super::Ref;

const MAX_NAME: usize = 256;

#[derive(Clone, Copy)]
pub(super) enum Step<'a> {
    /// A step to the value of a dict key, or to an attribute of an object.
    Key(Ref<'a>),
    /// A step to an element of a sequence.
    Index(usize),
    /// A step to an argument of the call that makes an object.
    Argument(usize),
    /// A step to a part of an object for which Python has no subscript, such as its state.
    Part(&'static str),
}

pub(super) fn render(steps: &[Step<'_>]) -> String {
    let mut path = String::new();
    for step in steps {
        match step {
            Step::Index(index) => subscript(&mut path, index),
            Step::Argument(index) => {
                attribute(&mut path, "args");
                subscript(&mut path, index);
            }
            Step::Part(name) => attribute(&mut path, name),
            Step::Key(key) => match (key.as_str(), key.as_i64()) {
                (Some(name), _) if is_identifier(name) && name.len() <= MAX_NAME => attribute(&mut path, name),
                (Some(name), _) => text_subscript(&mut path, name),
                (_, Some(index)) => subscript(&mut path, index),
                _ => subscript(&mut path, format_args!("<{}>", key.describe())),
            },
        }
    }
    path
}

/// Returns the path that begins with `prefix` and continues with `path`.
pub(super) fn join(prefix: &str, path: &str) -> String {
    let dot = if prefix.is_empty() || path.is_empty() || path.starts_with('[') { "" } else { "." };
    format!("{prefix}{dot}{path}")
}

fn attribute(path: &mut String, name: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    path.push_str(name);
}

fn subscript(path: &mut String, index: impl std::fmt::Display) {
    // Writing to a String cannot fail.
    _ = write!(path, "[{index}]");
}

/// Appends a subscript with a text key. A text longer than any FQN is truncated.
fn text_subscript(path: &mut String, name: &str) {
    match name.char_indices().nth(MAX_NAME) {
        Some((end, _)) => subscript(path, format_args!("'{}…'", name[..end].escape_debug())),
        None => subscript(path, format_args!("'{}'", name.escape_debug())),
    }
}

fn is_identifier(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|first| first.is_alphabetic() || first == '_')
        && chars.all(|c| c.is_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pickle::{NoVisitor, parse};

    #[test]
    fn spells_paths_like_python() {
        let bytes = b"(X\x02\x00\x00\x00lrX\x08\x00\x00\x00layer.0'K\x03N)t.";
        let (pickle, _) = parse(bytes, &mut NoVisitor).unwrap();
        let keys: Vec<_> = pickle.root().as_tuple().unwrap().map(Step::Key).collect();
        assert_eq!(render(&keys[..]), r"lr['layer.0\''][3][<None>][<tuple>]");
        let steps = [Step::Argument(1), Step::Index(0), Step::Part("state"), keys[0]];
        assert_eq!(render(&steps), "args[1][0].state.lr");
        assert_eq!(join("a", "b"), "a.b");
        assert_eq!(join("a", "[0]"), "a[0]");
        assert_eq!(join("", "b"), "b");
    }
}
