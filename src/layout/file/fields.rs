//! What a table of a layout file says, key by key, and what is wrong with it, with its place.

use std::fmt::Display;

use super::node::{FileEntry, FileNode, FileValue};
use crate::layout::LayoutError;

/// The place of something in a layout file, for messages.
#[derive(Clone, Copy, Debug)]
pub struct FilePosition<'a> {
    /// Of the file.
    pub name: &'a str,
    pub line: usize,
    /// `rules "**.norm"`; empty for the file itself.
    pub what: &'a str,
}

impl FilePosition<'_> {
    /// `layout.toml line 12: rules "**.norm"`
    pub fn said(&self) -> String {
        let what = if self.what.is_empty() { String::new() } else { format!(": {}", self.what) };
        format!("{} line {}{what}", self.name, self.line)
    }

    pub fn on(self, line: usize) -> Self {
        Self { line, ..self }
    }

    pub fn wrong(&self, problem: impl Display, hint: Option<String>) -> LayoutError {
        let (file, said) = (self.name.to_owned(), self.said());
        LayoutError::File { file, said, problem: problem.to_string(), hint }
    }

    /// Another error, which happened here.
    pub fn within(&self) -> impl Fn(LayoutError) -> LayoutError {
        |error| match error {
            LayoutError::File { .. } => error,
            error => self.wrong(error, None),
        }
    }

    fn expected(&self, expected: &str, found: &FileValue) -> LayoutError {
        self.wrong(format!("expected {expected}, found {}", found.kind()), None)
    }
}

/// A table of which every key is known.
pub struct Fields<'a> {
    pub at: FilePosition<'a>,
    entries: &'a [FileEntry],
}

impl<'a> Fields<'a> {
    /// # Errors
    /// Where it is no table, or has a key that is none of `keys`.
    pub fn of(at: FilePosition<'a>, node: &'a FileNode, keys: &[&str]) -> Result<Self, LayoutError> {
        let entries = table(at, node)?;
        match entries.iter().find(|entry| !keys.contains(&entry.key.as_str())) {
            None => Ok(Self { at, entries }),
            Some(entry) => {
                let problem = format!("there is no key `{}`", entry.key);
                Err(at.on(entry.line).wrong(problem, Some(did_you_mean(&entry.key, keys))))
            }
        }
    }

    pub fn get(&self, key: &str) -> Option<&'a FileEntry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// A text, and its place.
    pub fn text(&self, key: &'a str) -> Result<Option<(FilePosition<'a>, &'a str)>, LayoutError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        let what = if self.at.what.is_empty() { key } else { self.at.what };
        let at = FilePosition { what, ..self.at }.on(entry.line);
        text(at, &entry.value, key).map(|text| Some((at, text)))
    }
}

/// The entries of a table.
pub fn table<'a>(at: FilePosition<'_>, node: &'a FileNode) -> Result<&'a [FileEntry], LayoutError> {
    match &node.value {
        FileValue::Table(entries) => Ok(entries),
        other => Err(at.on(node.line).expected("a table", other)),
    }
}

pub fn list<'a>(at: FilePosition<'_>, node: &'a FileNode, of: &str) -> Result<&'a [FileNode], LayoutError> {
    match &node.value {
        FileValue::List(items) => Ok(items),
        other => Err(at.on(node.line).expected(&format!("a list of {of}"), other)),
    }
}

pub fn numbers(at: FilePosition<'_>, node: &FileNode, of: &str) -> Result<Vec<u64>, LayoutError> {
    let number = |item: &FileNode| match &item.value {
        FileValue::Number(number) => number
            .as_u64()
            .ok_or_else(|| at.on(item.line).wrong(format!("expected a list of {of}, found {number} in it"), None)),
        other => Err(at.on(item.line).expected(&format!("a list of {of}"), other)),
    };
    list(at, node, of)?.iter().map(number).collect()
}

pub fn text<'a>(at: FilePosition<'_>, node: &'a FileNode, key: &str) -> Result<&'a str, LayoutError> {
    match &node.value {
        FileValue::Text(text) => Ok(text),
        other => Err(at.expected(&format!("`{key}` to be text"), other)),
    }
}

/// The nearest of some names where half of its letters are right, and all of them.
#[must_use]
pub fn did_you_mean(word: &str, names: &[&str]) -> String {
    let distance = |name: &&&str| strsim::damerau_levenshtein(word, name);
    let is_near = |name: &&&str| 2 * distance(name) <= word.chars().count().max(name.chars().count());
    let all = names.join(", ");
    match names.iter().min_by_key(distance) {
        None => String::from("there are none"),
        Some(nearest) if is_near(&nearest) => format!("did you mean `{nearest}`? there are {all}"),
        Some(_) => format!("there are {all}"),
    }
}
