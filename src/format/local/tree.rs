//! A JSON tree with stricter rules than `serde_json`: keys are distinct, integers stay distinct from floats, and short
//! values are rendered on one line.

use std::fmt;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::json;

use crate::format::json::distinct_entries;

/// A JSON value with distinct keys.
#[derive(Clone, Debug, PartialEq)]
pub enum Tree {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<Tree>),
    /// An object with distinct keys.
    Map(Vec<(String, Tree)>),
}

impl Tree {
    #[must_use]
    /// Returns a string.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// Returns an object with one key.
    #[must_use]
    pub fn tagged(tag: &str, value: Self) -> Self {
        Self::Map(vec![(tag.to_owned(), value)])
    }

    /// Returns the kind of the value, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Int(_) => "a whole number",
            Self::Float(_) => "a number",
            Self::Text(_) => "a text",
            Self::List(_) => "a list",
            Self::Map(_) => "an object",
        }
    }

    /// Renders the value: on one line if it is short, otherwise one item per line. `column` is the indentation of the
    /// line on which the value starts.
    pub fn render(&self, column: usize) -> String {
        const LINE: usize = 96;
        let (open, close, items) = match self {
            Self::Null => return String::from("null"),
            Self::Bool(value) => return value.to_string(),
            Self::Int(value) => return value.to_string(),
            Self::Float(value) => return json!(value).to_string(),
            Self::Text(text) => return json!(text).to_string(),
            Self::List(items) => ('[', ']', items.iter().map(|item| item.render(column + 2)).collect::<Vec<_>>()),
            Self::Map(entries) => {
                let entry = |(key, value): &(String, Self)| format!("{}: {}", json!(key), value.render(column + 2));
                ('{', '}', entries.iter().map(entry).collect())
            }
        };
        let is_short = items.iter().map(|item| item.len() + 2).sum::<usize>() <= LINE;
        if is_short && !items.iter().any(|item| item.contains('\n')) {
            return format!("{open}{}{close}", items.join(", "));
        }
        let items: Vec<String> = items.into_iter().map(|item| format!("\n{:column$}  {item}", "")).collect();
        format!("{open}{}\n{:column$}{close}", items.join(","), "")
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree::Int(value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Tree, E> {
        i64::try_from(value)
            .map(Tree::Int)
            .map_err(|_| E::custom(format_args!("the number {value}, which does not fit into a signed 64-bit integer")))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Tree, E> {
        Ok(Tree::Float(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<Tree, E> {
        Ok(Tree::text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Tree::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Tree, A::Error> {
        distinct_entries(map).map(Tree::Map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rendered_tree_is_read_back_equal() {
        let long = Tree::List((0..40).map(|at| Tree::Int(at - 20)).collect());
        let numbers = [0.1, 1.0, -0.0, 1e16, 1e-8, 5e-324, f64::MAX].map(Tree::Float).to_vec();
        let tree = Tree::Map(vec![
            (String::from("a\"\n"), Tree::List(numbers)),
            (String::from("b"), Tree::tagged("c", long)),
            (String::new(), Tree::List(vec![Tree::Null, Tree::Bool(true), Tree::text("ü"), Tree::Int(i64::MIN)])),
        ]);
        let text = tree.render(0);
        let read: Tree = serde_json::from_str(&text).unwrap();
        assert_eq!(format!("{read:?}"), format!("{tree:?}"), "{text}");
        assert!(text.contains("\n  \"\": [null, true, \"ü\", -9223372036854775808]\n}"), "{text}");
    }

    #[test]
    fn ambiguous_json_is_an_error() {
        for text in [r#"{"a": 1, "a": 2}"#, r#"{"b": {"a": 1, "a": 2}}"#, "18446744073709551615", &"[".repeat(1000)] {
            assert!(serde_json::from_str::<Tree>(text).is_err(), "{text}");
        }
    }
}
