//! Parses TOML or JSON to a tree of values with line numbers, so that errors can name a line.
//!
//! TOML and JSON give the same tree. Lines count from 1. Invariant: the entries of a table are in the order of the
//! text, and keys are distinct.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Number, Value as Json};
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use crate::json_text;

/// The maximum nesting depth of a file in JSON. Tables of styles nest like modules, and no model is nested this
/// deep.
const MAX_DEPTH: usize = 64;

/// A value, and the line where it starts.
#[derive(Clone, Debug)]
pub struct FileNode {
    /// The line, counted from 1.
    pub line: usize,
    pub value: FileValue,
}

/// A value in a file.
#[derive(Clone, Debug)]
pub enum FileValue {
    Text(String),
    Number(Number),
    Bool(bool),
    Null,
    List(Vec<FileNode>),
    Table(Vec<FileEntry>),
}

/// A key of a table, with its value.
#[derive(Clone, Debug)]
pub struct FileEntry {
    pub line: usize,
    pub key: String,
    pub value: FileNode,
}

/// A syntax error in a file, with its line.
#[derive(Debug)]
pub struct ParseFault {
    pub line: usize,
    pub problem: String,
}

impl FileValue {
    /// Returns the kind of the value for messages: `expected text, found a list`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Number(_) => "a number",
            Self::Bool(true) => "true",
            Self::Bool(false) => "false",
            Self::Null => "null",
            Self::List(_) => "a list",
            Self::Table(_) => "a table",
        }
    }
}

impl FileNode {
    /// Converts the value to JSON, without line numbers.
    pub fn to_json(&self) -> Json {
        match &self.value {
            FileValue::Text(text) => Json::String(text.clone()),
            FileValue::Number(number) => Json::Number(number.clone()),
            FileValue::Bool(truth) => Json::Bool(*truth),
            FileValue::Null => Json::Null,
            FileValue::List(items) => items.iter().map(FileNode::to_json).collect(),
            FileValue::Table(entries) => {
                entries.iter().map(|entry| (entry.key.clone(), entry.value.to_json())).collect()
            }
        }
    }
}

/// The offsets of the line breaks in a text, by which line numbers are found.
struct LineIndex<'t> {
    text: &'t str,
    ends: Vec<usize>,
}

impl<'t> LineIndex<'t> {
    fn new(text: &'t str) -> Self {
        Self { text, ends: text.match_indices('\n').map(|(at, _)| at).collect() }
    }

    fn at(&self, offset: usize) -> usize {
        self.ends.partition_point(|end| *end < offset) + 1
    }

    /// Returns the number of the line in which a slice of the text starts.
    fn line_of(&self, part: &str) -> usize {
        self.at(part.as_ptr() as usize - self.text.as_ptr() as usize)
    }
}

/// Parses a TOML document.
pub fn parse_toml(text: &str) -> Result<FileNode, ParseFault> {
    let lines = LineIndex::new(text);
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| lines.at(span.start));
        let problem = match error.message() {
            // TOML's message for a value that begins like an unquoted word.
            message if message.starts_with("string values must be quoted") => "string values must be quoted".to_owned(),
            message if message.contains("recursion") => "lists and tables are nested too deeply".to_owned(),
            message => message.replace('\n', ", "),
        };
        ParseFault { line, problem }
    })?;
    Ok(FileNode { line: 1, value: toml_table(&lines, table.into_inner())? })
}

fn toml_table(lines: &LineIndex<'_>, table: DeTable<'_>) -> Result<FileValue, ParseFault> {
    let mut entries: Vec<(usize, FileEntry)> = Vec::new();
    for (key, value) in table {
        let at = key.span().start;
        let value = toml_node(lines, value)?;
        entries.push((at, FileEntry { line: lines.at(at), key: key.into_inner().into_owned(), value }));
    }
    entries.sort_by_key(|(at, _)| *at);
    Ok(FileValue::Table(entries.into_iter().map(|(_, entry)| entry).collect()))
}

fn toml_node(lines: &LineIndex<'_>, value: Spanned<DeValue<'_>>) -> Result<FileNode, ParseFault> {
    let line = lines.at(value.span().start);
    let none =
        |what: &str| ParseFault { line, problem: format!("expected text, a number, a list or a table, found {what}") };
    let value = match value.into_inner() {
        DeValue::String(text) => FileValue::Text(text.into_owned()),
        DeValue::Integer(number) => FileValue::Number(integer(&number).ok_or_else(|| none("a number beyond 64 bits"))?),
        DeValue::Float(number) => {
            let number = number.as_str().parse().ok().and_then(Number::from_f64);
            FileValue::Number(number.ok_or_else(|| none("nan or an infinity"))?)
        }
        DeValue::Boolean(truth) => FileValue::Bool(truth),
        DeValue::Datetime(_) => return Err(none("a date")),
        DeValue::Array(items) => {
            FileValue::List(items.into_iter().map(|item| toml_node(lines, item)).collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => toml_table(lines, table)?,
    };
    Ok(FileNode { line, value })
}

fn integer(number: &DeInteger<'_>) -> Option<Number> {
    let (text, radix) = (number.as_str(), number.radix());
    let natural = u64::from_str_radix(text, radix).map(Number::from);
    natural.or_else(|_| i64::from_str_radix(text, radix).map(Number::from)).ok()
}

/// Parses a JSON document.
pub fn parse_json(text: &str) -> Result<FileNode, ParseFault> {
    let lines = LineIndex::new(text);
    let whole: &RawValue = serde_json::from_str(text).map_err(|error| fault(1, &error))?;
    json_node(&lines, whole, MAX_DEPTH)
}

fn fault(first_line: usize, error: &serde_json::Error) -> ParseFault {
    let json_text::JsonMismatch { expected, found } = json_text::mismatch(error, "JSON");
    let problem = format!("expected {expected}, found {found}");
    ParseFault { line: first_line + error.line().saturating_sub(1), problem }
}

/// Parses one level of JSON. Nested values are kept as unparsed slices of the text, because the address of a slice
/// gives the line number.
fn json_node(lines: &LineIndex<'_>, raw: &RawValue, depth: usize) -> Result<FileNode, ParseFault> {
    let source = raw.get();
    let line = lines.line_of(source);
    let fault = |error| fault(line, &error);
    let deeper = depth.checked_sub(1).ok_or(ParseFault { line, problem: format!("nested more than {MAX_DEPTH} deep") });
    let value = match source.as_bytes().first() {
        Some(b'{') => {
            let RawObject(raw) = serde_json::from_str(source).map_err(fault)?;
            let mut entries: Vec<FileEntry> = Vec::with_capacity(raw.len());
            let mut seen = std::collections::HashSet::new();
            let deeper = deeper?;
            for (key, value) in raw {
                let line = lines.line_of(key.get());
                let key: String = serde_json::from_str(key.get()).map_err(fault)?;
                if !seen.insert(key.clone()) {
                    return Err(ParseFault { line, problem: format!("duplicate key `{key}`") });
                }
                entries.push(FileEntry { line, key, value: json_node(lines, value, deeper)? });
            }
            FileValue::Table(entries)
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(source).map_err(fault)?;
            let deeper = deeper?;
            FileValue::List(items.into_iter().map(|item| json_node(lines, item, deeper)).collect::<Result<_, _>>()?)
        }
        _ => match serde_json::from_str(source).map_err(fault)? {
            Json::String(text) => FileValue::Text(text),
            Json::Number(number) => FileValue::Number(number),
            Json::Bool(truth) => FileValue::Bool(truth),
            _ => FileValue::Null,
        },
    };
    Ok(FileNode { line, value })
}

/// A JSON object whose keys and values are unparsed slices of the text.
struct RawObject<'t>(Vec<(&'t RawValue, &'t RawValue)>);

impl<'t> Deserialize<'t> for RawObject<'t> {
    fn deserialize<D: Deserializer<'t>>(deserializer: D) -> Result<Self, D::Error> {
        struct FileEntries;
        impl<'t> Visitor<'t> for FileEntries {
            type Value = RawObject<'t>;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'t>>(self, mut map: A) -> Result<RawObject<'t>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(RawObject(entries))
            }
        }
        deserializer.deserialize_map(FileEntries)
    }
}
