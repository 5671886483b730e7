//! Converts a layout to a JSON document, and such a JSON document to TOML.
//!
//! Unit of sizes: elements. Invariant: reading the output gives an equal layout.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json, json};

use crate::layout::rules::{Fallback, MeshLayout, PlacementChoice, PlacementList, Rule};
use crate::layout::{DeviceMesh, comma_list};

/// Returns a layout as a JSON document. If the fallback is "the placements of the source", the document has no
/// fallback, because no key of the document can express it.
pub fn document(layout: &MeshLayout) -> Json {
    let mut document = Map::new();
    let mesh = &layout.mesh;
    document.insert("mesh".into(), mesh.names().map_or_else(|| json!(mesh.shape()), |_| json!(mesh.to_string())));
    if !mesh.ranks_are_row_major() {
        let ranks: Vec<u32> = mesh.ranks().iter().map(|rank| rank.0).collect();
        document.insert("mesh_ranks".into(), json!(ranks));
    }
    if let Fallback::Placements(list) = &layout.fallback {
        document.insert("placements".into(), json!(comma_list(list)));
    }
    if let Some(split) = &layout.split {
        document.insert("split".into(), json!(split.to_string()));
    }
    if !layout.rules.is_empty() {
        document.insert("rules".into(), layout.rules.iter().map(|one| rule(one, mesh)).collect());
    }
    Json::Object(document)
}

fn rule(rule: &Rule, mesh: &DeviceMesh) -> Json {
    let mut document = Map::new();
    document.insert("tensors".into(), json!(rule.pattern.as_str()));
    let PlacementChoice::Shared(PlacementList { placements: list, splits, slice }) = &rule.choice else {
        document.insert("placements".into(), json!("plain"));
        return Json::Object(document);
    };
    document.insert("placements".into(), json!(comma_list(list)));
    if let (Some(dims), Some(names)) = (slice, mesh.names()) {
        let dims: Vec<&str> = dims.iter().map(|dim| names[dim.0].as_str()).collect();
        document.insert("slice".into(), json!(dims.join(",")));
    }
    match splits.as_slice() {
        [] => {}
        [first, rest @ ..] if rest.iter().all(|split| split == first) => {
            document.insert("split".into(), json!(first.to_string()));
        }
        splits => {
            document.insert("split".into(), json!(comma_list(splits)));
        }
    }
    Json::Object(document)
}

/// Converts a JSON document to TOML. Plain values are written before tables.
///
/// # Panics
/// If the document is not an object.
pub fn toml(document: &Json) -> String {
    let mut text = String::new();
    let table = document.as_object().expect("a document is a table");
    write_table(&mut text, "", table);
    text
}

fn write_table(text: &mut String, path: &str, table: &Map<String, Json>) {
    let (tables, plain): (Vec<_>, Vec<_>) = table.iter().partition(|(_, value)| is_section(path, value));
    for (key, value) in plain {
        let _ = writeln!(text, "{} = {}", key_text(key), inline(value, true));
    }
    for (key, value) in tables {
        let path = if path.is_empty() { key_text(key) } else { format!("{path}.{}", key_text(key)) };
        let (header, items) = match value {
            Json::Array(items) => (format!("[[{path}]]"), items.as_slice()),
            one => (format!("[{path}]"), std::slice::from_ref(one)),
        };
        for table in items.iter().filter_map(Json::as_object) {
            let gap = if text.is_empty() { "" } else { "\n" };
            let _ = writeln!(text, "{gap}{header}");
            write_table(text, &path, table);
        }
    }
}

/// Returns whether a value becomes a TOML table with a header. Any other value is written inline, after `key =`.
fn is_section(path: &str, value: &Json) -> bool {
    let shallow = path.matches('.').count() == 0;
    match value {
        Json::Object(_) => shallow,
        Json::Array(items) => shallow && !items.is_empty() && items.iter().all(Json::is_object),
        _ => false,
    }
}

/// Formats a value as TOML text to the right of `key =`. If `may_break` is true, a list has one item per line, except
/// for a list of numbers.
fn inline(value: &Json, may_break: bool) -> String {
    match value {
        Json::Array(items) => {
            let long = may_break && items.iter().any(|item| item.is_object() || item.is_array() || item.is_string());
            let items: Vec<String> = items.iter().map(|item| inline(item, false)).collect();
            match items.as_slice() {
                [] => String::from("[]"),
                items if long => format!("[\n  {},\n]", items.join(",\n  ")),
                items => format!("[{}]", items.join(", ")),
            }
        }
        Json::Object(table) => {
            let entries: Vec<String> =
                table.iter().map(|(key, value)| format!("{} = {}", key_text(key), inline(value, false))).collect();
            if entries.is_empty() { String::from("{}") } else { format!("{{ {} }}", entries.join(", ")) }
        }
        Json::String(text) => quoted(text),
        // TOML has no null, and layout documents contain none.
        other => other.to_string(),
    }
}

fn key_text(key: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    if !key.is_empty() && key.chars().all(plain) { key.to_owned() } else { quoted(key) }
}

/// Quotes a text and escapes characters that a terminal may interpret, because names come from untrusted checkpoints.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            ' '..='~' => quoted.push(c),
            c if c.is_alphanumeric() => quoted.push(c),
            c => {
                let _ = write!(quoted, "\\U{:08X}", u32::from(c));
            }
        }
    }
    quoted.push('"');
    quoted
}
