//! Reads the keys of a table of a file that users write, and makes errors with the position of a key in the file.
//!
//! Lines count from 1. Invariant: a table with an unknown key is an error.

use std::fmt::Display;

use super::DocumentError;
use super::node::{FileEntry, FileNode, FileValue};

/// A position in a file that users write, for messages.
#[derive(Clone, Copy, Debug)]
pub struct FilePosition<'a> {
    /// The name of the file.
    pub name: &'a str,
    pub line: usize,
    /// The table or key, such as `rules "**.norm"`; empty for the file itself.
    pub section: &'a str,
}

impl FilePosition<'_> {
    /// Returns the position for messages: `layout.toml line 12: rules "**.norm"`.
    pub fn describe(&self) -> String {
        let section = if self.section.is_empty() { String::new() } else { format!(": {}", self.section) };
        format!("{} line {}{section}", self.name, self.line)
    }

    /// Returns this position with another line number.
    pub fn at_line(self, line: usize) -> Self {
        Self { line, ..self }
    }

    /// Makes an error that names this position.
    pub fn error<E: From<DocumentError>>(&self, problem: impl Display, hint: Option<String>) -> E {
        let (file, position) = (self.name.to_owned(), self.describe());
        DocumentError { file, position, problem: problem.to_string(), hint }.into()
    }

    fn expected(&self, expected: &str, found: &FileValue) -> DocumentError {
        self.error(format!("expected {expected}, found {}", found.kind()), None)
    }
}

/// The entries of a table of a layout file. Every key is known: a table with an unknown key is an error.
pub struct Fields<'a> {
    pub at: FilePosition<'a>,
    entries: &'a [FileEntry],
}

impl<'a> Fields<'a> {
    /// Reads a table.
    ///
    /// # Errors
    /// If the value is not a table, or a key is not one of `keys`.
    pub fn new(at: FilePosition<'a>, node: &'a FileNode, keys: &[&str]) -> Result<Self, DocumentError> {
        let entries = table(at, node)?;
        match entries.iter().find(|entry| !keys.contains(&entry.key.as_str())) {
            None => Ok(Self { at, entries }),
            Some(entry) => {
                let problem = format!("unknown key `{}`", entry.key);
                Err(at.at_line(entry.line).error(problem, Some(did_you_mean(&entry.key, keys))))
            }
        }
    }

    /// Returns the entry with this key, or `None` if the table does not have the key.
    pub fn get(&self, key: &str) -> Option<&'a FileEntry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// Returns the text value of a key, with the position of the key, or `None` if the table does not have the key.
    pub fn text(&self, key: &'a str) -> Result<Option<(FilePosition<'a>, &'a str)>, DocumentError> {
        let Some(entry) = self.get(key) else { return Ok(None) };
        let section = if self.at.section.is_empty() { key } else { self.at.section };
        let at = FilePosition { section, ..self.at }.at_line(entry.line);
        text(at, &entry.value, key).map(|text| Some((at, text)))
    }
}

/// Returns the entries of a table. It is an error if the value is not a table.
pub fn table<'a>(at: FilePosition<'_>, node: &'a FileNode) -> Result<&'a [FileEntry], DocumentError> {
    match &node.value {
        FileValue::Table(entries) => Ok(entries),
        other => Err(at.at_line(node.line).expected("a table", other)),
    }
}

/// Returns the items of a list. If the value is not a list, the error says `expected a list of ...` with the word `of`.
pub fn list<'a>(at: FilePosition<'_>, node: &'a FileNode, of: &str) -> Result<&'a [FileNode], DocumentError> {
    match &node.value {
        FileValue::List(items) => Ok(items),
        other => Err(at.at_line(node.line).expected(&format!("a list of {of}"), other)),
    }
}

/// Returns the numbers of a list. If the value is not a list of non-negative integers, the error says `expected a list
/// of ...` with the word `of`.
pub fn numbers(at: FilePosition<'_>, node: &FileNode, of: &str) -> Result<Vec<u64>, DocumentError> {
    let number = |item: &FileNode| match &item.value {
        FileValue::Number(number) => number
            .as_u64()
            .ok_or_else(|| at.at_line(item.line).error(format!("expected a list of {of}, found {number} in it"), None)),
        other => Err(at.at_line(item.line).expected(&format!("a list of {of}"), other)),
    };
    list(at, node, of)?.iter().map(number).collect()
}

/// Returns the text of the value of `key`. It is an error if the value is not a text.
pub fn text<'a>(at: FilePosition<'_>, node: &'a FileNode, key: &str) -> Result<&'a str, DocumentError> {
    match &node.value {
        FileValue::Text(text) => Ok(text),
        other => Err(at.expected(&format!("`{key}` to be text"), other)),
    }
}

/// Returns a hint that lists all names. The hint first suggests the nearest name, if the edit distance between this name
/// and `word` is at most half the length of the longer one.
pub fn did_you_mean(word: &str, names: &[&str]) -> String {
    let distance = |name: &&&str| strsim::damerau_levenshtein(word, name);
    let is_near = |name: &&&str| 2 * distance(name) <= word.chars().count().max(name.chars().count());
    let all = names.join(", ");
    match names.iter().min_by_key(distance) {
        None => String::from("no names exist"),
        Some(nearest) if is_near(&nearest) => format!("did you mean `{nearest}`? use one of {all}"),
        Some(_) => format!("use one of {all}"),
    }
}
