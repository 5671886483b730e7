//! A document as a tree in which everything knows its line, so that what is said of it can point there.
//!
//! TOML and JSON give the same tree. Entries of a table stand in the order of the text, and no key is there twice.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Number, Value as Json};
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

/// More than any layout has: tables of styles nest as modules do.
const MAX_DEPTH: usize = 64;

/// Something that is said, and where.
#[derive(Clone, Debug)]
pub struct Node {
    /// From 1.
    pub line: usize,
    pub value: Value,
}

#[derive(Clone, Debug)]
pub enum Value {
    Text(String),
    Number(Number),
    Truth(bool),
    Null,
    List(Vec<Node>),
    Table(Vec<Entry>),
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub line: usize,
    pub key: String,
    pub value: Node,
}

/// Why a text is no document.
#[derive(Debug)]
pub struct Fault {
    pub line: usize,
    pub problem: String,
}

impl Value {
    /// For `expected text, found a list`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Number(_) => "a number",
            Self::Truth(_) => "true or false",
            Self::Null => "null",
            Self::List(_) => "a list",
            Self::Table(_) => "a table",
        }
    }
}

impl Node {
    /// Without lines.
    pub fn json(&self) -> Json {
        match &self.value {
            Value::Text(text) => Json::String(text.clone()),
            Value::Number(number) => Json::Number(number.clone()),
            Value::Truth(truth) => Json::Bool(*truth),
            Value::Null => Json::Null,
            Value::List(items) => items.iter().map(Node::json).collect(),
            Value::Table(entries) => entries.iter().map(|entry| (entry.key.clone(), entry.value.json())).collect(),
        }
    }
}

/// Where lines begin.
struct Lines<'t> {
    text: &'t str,
    ends: Vec<usize>,
}

impl<'t> Lines<'t> {
    fn of(text: &'t str) -> Self {
        Self { text, ends: text.match_indices('\n').map(|(at, _)| at).collect() }
    }

    fn at(&self, offset: usize) -> usize {
        self.ends.partition_point(|end| *end < offset) + 1
    }

    /// The line of a slice of the text.
    fn of_part(&self, part: &str) -> usize {
        self.at(part.as_ptr() as usize - self.text.as_ptr() as usize)
    }
}

/// The tree of a TOML document.
pub fn of_toml(text: &str) -> Result<Node, Fault> {
    let lines = Lines::of(text);
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| lines.at(span.start));
        Fault { line, problem: error.message().replace('\n', ", ") }
    })?;
    Ok(Node { line: 1, value: toml_table(&lines, table.into_inner())? })
}

fn toml_table(lines: &Lines<'_>, table: DeTable<'_>) -> Result<Value, Fault> {
    let mut entries: Vec<(usize, Entry)> = Vec::new();
    for (key, value) in table {
        let at = key.span().start;
        let value = toml_node(lines, value)?;
        entries.push((at, Entry { line: lines.at(at), key: key.into_inner().into_owned(), value }));
    }
    entries.sort_by_key(|(at, _)| *at);
    Ok(Value::Table(entries.into_iter().map(|(_, entry)| entry).collect()))
}

fn toml_node(lines: &Lines<'_>, value: Spanned<DeValue<'_>>) -> Result<Node, Fault> {
    let line = lines.at(value.span().start);
    let none =
        |what: &str| Fault { line, problem: format!("expected text, a number, a list or a table, found {what}") };
    let value = match value.into_inner() {
        DeValue::String(text) => Value::Text(text.into_owned()),
        DeValue::Integer(number) => Value::Number(integer(&number).ok_or_else(|| none("a number beyond 64 bits"))?),
        DeValue::Float(number) => {
            let number = number.as_str().parse().ok().and_then(Number::from_f64);
            Value::Number(number.ok_or_else(|| none("a number that is none"))?)
        }
        DeValue::Boolean(truth) => Value::Truth(truth),
        DeValue::Datetime(_) => return Err(none("a date")),
        DeValue::Array(items) => {
            Value::List(items.into_iter().map(|item| toml_node(lines, item)).collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => toml_table(lines, table)?,
    };
    Ok(Node { line, value })
}

fn integer(number: &DeInteger<'_>) -> Option<Number> {
    let (text, radix) = (number.as_str(), number.radix());
    let natural = u64::from_str_radix(text, radix).map(Number::from);
    natural.or_else(|_| i64::from_str_radix(text, radix).map(Number::from)).ok()
}

/// The tree of a JSON document.
pub fn of_json(text: &str) -> Result<Node, Fault> {
    let lines = Lines::of(text);
    let whole: &RawValue = serde_json::from_str(text).map_err(|error| fault(1, &error))?;
    json_node(&lines, whole, MAX_DEPTH)
}

fn fault(first_line: usize, error: &serde_json::Error) -> Fault {
    let text = error.to_string();
    let end = text.rfind(" at line ").unwrap_or(text.len());
    Fault { line: first_line + error.line().saturating_sub(1), problem: text[..end].to_owned() }
}

/// Level by level: what is borrowed raw tells where it stands.
fn json_node(lines: &Lines<'_>, raw: &RawValue, depth: usize) -> Result<Node, Fault> {
    let source = raw.get();
    let line = lines.of_part(source);
    let fault = |error| fault(line, &error);
    let deeper = depth.checked_sub(1).ok_or(Fault { line, problem: format!("nested more than {MAX_DEPTH} deep") });
    let value = match source.as_bytes().first() {
        Some(b'{') => {
            let Raw(raw) = serde_json::from_str(source).map_err(fault)?;
            let mut entries: Vec<Entry> = Vec::with_capacity(raw.len());
            let mut seen = std::collections::HashSet::new();
            let deeper = deeper?;
            for (key, value) in raw {
                let line = lines.of_part(key.get());
                let key: String = serde_json::from_str(key.get()).map_err(fault)?;
                if !seen.insert(key.clone()) {
                    return Err(Fault { line, problem: format!("`{key}` is said twice") });
                }
                entries.push(Entry { line, key, value: json_node(lines, value, deeper)? });
            }
            Value::Table(entries)
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(source).map_err(fault)?;
            let deeper = deeper?;
            Value::List(items.into_iter().map(|item| json_node(lines, item, deeper)).collect::<Result<_, _>>()?)
        }
        _ => match serde_json::from_str(source).map_err(fault)? {
            Json::String(text) => Value::Text(text),
            Json::Number(number) => Value::Number(number),
            Json::Bool(truth) => Value::Truth(truth),
            _ => Value::Null,
        },
    };
    Ok(Node { line, value })
}

/// An object as it stands in the text.
struct Raw<'t>(Vec<(&'t RawValue, &'t RawValue)>);

impl<'t> Deserialize<'t> for Raw<'t> {
    fn deserialize<D: Deserializer<'t>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'t> Visitor<'t> for Entries {
            type Value = Raw<'t>;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'t>>(self, mut map: A) -> Result<Raw<'t>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Raw(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
