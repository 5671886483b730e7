//! Parses the tree of a document to a [`LayoutFile`], key by key.
//!
//! Unit of sizes: elements. Invariant: everything that does not depend on the mesh in use is checked here.

use super::written::{WrittenPlacements, WrittenRule, WrittenSpec};
use super::{DeclaredPlan, LayoutFile, Positioned, within};
use crate::document::{Fields, FileEntry, FileNode, FilePosition, FileValue, did_you_mean, list, numbers, table, text};
use crate::layout::parallelize::{RuleStyle, StyleRule};
use crate::layout::{DeviceMesh, Dims, LayoutError, Pattern, PlacementSpec, Rank, Split, parse_placements};

const KEYS: [&str; 13] = [
    "version",
    "mesh",
    "mesh_ranks",
    "placements",
    "split",
    "plan",
    "tp",
    "fsdp",
    "replicate",
    "ddp",
    "styles",
    "rules",
    "flat",
];

const RULE_KEYS: [&str; 5] = ["tensors", "placements", "slice", "split", "sizes"];

/// The value of the key `placements` for a plain tensor, which is not a DTensor.
const PLAIN: &str = "plain";

const VERSION: u64 = 1;

/// Parses the top level of a layout file.
pub fn layout(name: &str, node: &FileNode) -> Result<LayoutFile, LayoutError> {
    let top = FilePosition { name, line: node.line, section: "" };
    let fields = Fields::new(top, node, &KEYS)?;
    if let Some(entry) = fields.get("version") {
        version(FilePosition { section: "version", ..top }.at_line(entry.line), &entry.value)?;
    }
    let text_of = |key: &'static str| -> Result<Option<Positioned<String>>, LayoutError> {
        let text = fields.text(key)?;
        Ok(text.map(|(at, text)| Positioned {
            value: text.to_owned(),
            name: name.to_owned(),
            line: at.line,
            section: key,
        }))
    };
    let styles = match fields.get("styles") {
        None => Vec::new(),
        Some(entry) => styles(FilePosition { section: "styles", ..top }, entry)?,
    };
    let rules = match fields.get("rules") {
        None => Vec::new(),
        Some(entry) => {
            let items = list(FilePosition { section: "rules", ..top }, &entry.value, "tables")?;
            items.iter().map(|item| rule(top, item)).collect::<Result<_, _>>()?
        }
    };
    let flat = match fields.get("flat") {
        None => None,
        Some(entry) => {
            table(FilePosition { section: "flat", ..top }, &entry.value)?;
            Some(Positioned { value: entry.value.to_json(), name: name.to_owned(), line: entry.line, section: "flat" })
        }
    };
    Ok(LayoutFile {
        name: name.to_owned(),
        mesh: mesh(&fields)?,
        fallback: fallback(&fields)?,
        split: fields.text("split")?.map(|(at, text)| default_split(at, text)).transpose()?,
        rules,
        plan: DeclaredPlan {
            name: text_of("plan")?,
            styles,
            tp: text_of("tp")?,
            fsdp: text_of("fsdp")?,
            replicate: text_of("replicate")?,
            ddp: text_of("ddp")?,
        },
        flat,
    })
}

fn version(at: FilePosition<'_>, node: &FileNode) -> Result<(), LayoutError> {
    match &node.value {
        FileValue::Number(number) if number.as_u64() == Some(VERSION) => Ok(()),
        FileValue::Number(number) => {
            let problem = format!("expected layout file version {VERSION}, found {number}");
            Err(at.error(problem, Some(String::from("write version = 1, or use a newer dtshard"))))
        }
        other => Err(at.error(format!("expected {VERSION}, found {}", other.kind()), None)),
    }
}

fn mesh(fields: &Fields<'_>) -> Result<Option<Positioned<DeviceMesh>>, LayoutError> {
    let ranks = fields.get("mesh_ranks");
    let Some(entry) = fields.get("mesh") else {
        return match ranks {
            None => Ok(None),
            Some(entry) => {
                let at = FilePosition { section: "mesh_ranks", ..fields.at }.at_line(entry.line);
                Err(at.error(
                    "expected `mesh` too, found only `mesh_ranks`",
                    Some(String::from("add the mesh dims: mesh = \"dp=2,tp=2\"")),
                ))
            }
        };
    };
    let at = FilePosition { section: "mesh", ..fields.at }.at_line(entry.line);
    let mut mesh = match &entry.value.value {
        FileValue::Text(text) => DeviceMesh::parse(text).map_err(within(at))?,
        FileValue::List(_) => unnamed(at, &entry.value)?,
        other => {
            let hint = String::from("name the dims, outermost first: mesh = \"dp=2,tp=2\"");
            return Err(at.error(format!("expected text, found {}", other.kind()), Some(hint)));
        }
    };
    if let Some(entry) = ranks {
        let at = FilePosition { section: "mesh_ranks", ..fields.at }.at_line(entry.line);
        let beyond = |_| -> LayoutError { at.error("expected ranks below 2^32", None) };
        let ranks = numbers(at, &entry.value, "ranks")?.into_iter().map(|rank| u32::try_from(rank).map(Rank));
        let ranks = ranks.collect::<Result<Vec<_>, _>>().map_err(beyond)?;
        mesh = mesh.with_ranks(ranks).map_err(within(at))?;
    }
    Ok(Some(Positioned { value: mesh, name: fields.at.name.to_owned(), line: entry.line, section: "mesh" }))
}

/// Parses a mesh that is a list of sizes, without names of mesh dims.
fn unnamed(at: FilePosition<'_>, node: &FileNode) -> Result<DeviceMesh, LayoutError> {
    let sizes = Dims::from(numbers(at, node, "sizes")?);
    let numbered: Vec<(String, u64)> = sizes.iter().enumerate().map(|(dim, size)| (dim.to_string(), *size)).collect();
    let named = DeviceMesh::row_major(&numbered).map_err(within(at))?;
    DeviceMesh::new(sizes, named.ranks().to_vec(), None).map_err(within(at))
}

fn fallback(fields: &Fields<'_>) -> Result<Option<Positioned<Vec<PlacementSpec>>>, LayoutError> {
    let Some((at, text)) = fields.text("placements")? else { return Ok(None) };
    if text == PLAIN {
        let hint = String::from("use a rule with tensors = \"**\" and placements = \"plain\"");
        return Err(at.error("`plain` is allowed in rules only", Some(hint)));
    }
    let value = parse_placements(text).map_err(within(at))?;
    Ok(Some(Positioned { value, name: at.name.to_owned(), line: at.line, section: "placements" }))
}

fn default_split(at: FilePosition<'_>, text: &str) -> Result<Split, LayoutError> {
    match text.parse() {
        Ok(Split::Sizes(_)) | Err(_) => {
            let problem = format!("expected chunk, balanced or makani, found `{text}`");
            let hint = "use one of these names; give explicit sizes in a rule, because they fit only some tensors";
            Err(at.error(problem, Some(String::from(hint))))
        }
        Ok(split) => Ok(split),
    }
}

fn rule(top: FilePosition<'_>, node: &FileNode) -> Result<WrittenRule, LayoutError> {
    // Errors name the rule by its pattern if possible, even if other keys are invalid.
    let entries = table(FilePosition { section: "rules", ..top }, node)?;
    let named = entries.iter().find(|entry| entry.key == "tensors");
    let (line, section) = match named.map(|entry| (entry.line, &entry.value.value)) {
        Some((line, FileValue::Text(tensors))) => (line, format!("rules \"{tensors}\"")),
        _ => (node.line, String::from("rules")),
    };
    let fields = Fields::new(FilePosition { section: &section, ..top }.at_line(line), node, &RULE_KEYS)?;
    let Some((at, tensors)) = fields.text("tensors")? else {
        return Err(fields.at.error("expected `tensors`, a pattern for names", None));
    };
    let pattern = Pattern::parse(tensors).map_err(within(at))?;
    let placements = match fields.text("placements")? {
        None => return Err(fields.at.error("expected `placements`, as in \"S(0),R\", or \"plain\"", None)),
        Some((at, PLAIN)) => match ["slice", "split", "sizes"].into_iter().find(|key| fields.get(key).is_some()) {
            Some(key) => {
                return Err(at.error(format!("plain tensors are not sharded, so `{key}` is not allowed"), None));
            }
            None => WrittenPlacements::Plain,
        },
        Some((at, text)) => WrittenPlacements::Shared(WrittenSpec {
            placements: parse_placements(text).map_err(within(at))?,
            slice: fields.text("slice")?.map(|(at, text)| (at.line, names(text))),
            split: fields.text("split")?.map(|(at, text)| splits(at, text)).transpose()?,
            sizes: fields.get("sizes").map(|entry| sizes(fields.at, entry)).transpose()?.unwrap_or_default(),
        }),
    };
    Ok(WrittenRule { line, section, pattern, placements })
}

fn names(text: &str) -> Vec<String> {
    text.split(',').map(|name| name.trim().to_owned()).collect()
}

fn splits(at: FilePosition<'_>, text: &str) -> Result<(usize, Vec<Split>), LayoutError> {
    let splits = text.split(',').map(|split| split.trim().parse()).collect::<Result<_, _>>().map_err(within(at))?;
    Ok((at.line, splits))
}

fn sizes(at: FilePosition<'_>, entry: &FileEntry) -> Result<Vec<(usize, String, Vec<u64>)>, LayoutError> {
    let one = |entry: &FileEntry| {
        let at = at.at_line(entry.line);
        Ok((entry.line, entry.key.clone(), numbers(at, &entry.value, "sizes")?))
    };
    table(at.at_line(entry.line), &entry.value)?.iter().map(one).collect()
}

/// Parses styles. The keys of nested tables are joined with dots to patterns.
fn styles(at: FilePosition<'_>, entry: &FileEntry) -> Result<Vec<StyleRule>, LayoutError> {
    let mut found = Vec::new();
    collect_styles(at, &entry.value, "", &mut found)?;
    // Keeps the order of the text, even if a table is continued after another table.
    found.sort_by_key(|(line, _)| *line);
    Ok(found.into_iter().map(|(_, style)| style).collect())
}

fn collect_styles(
    at: FilePosition<'_>,
    node: &FileNode,
    prefix: &str,
    found: &mut Vec<(usize, StyleRule)>,
) -> Result<(), LayoutError> {
    for entry in table(at, node)? {
        let key = if prefix.is_empty() { entry.key.clone() } else { format!("{prefix}.{}", entry.key) };
        let what = format!("styles \"{key}\"");
        let at = FilePosition { section: &what, ..at }.at_line(entry.line);
        if matches!(entry.value.value, FileValue::Table(_)) {
            collect_styles(at, &entry.value, &key, found)?;
            continue;
        }
        let name = text(at, &entry.value, &key)?;
        let style = name.parse().map_err(|error: LayoutError| -> LayoutError {
            let word = name.split('(').next().unwrap_or_default().trim();
            let is_name = RuleStyle::NAMES.contains(&word);
            at.error(error, (!is_name).then(|| did_you_mean(word, &RuleStyle::NAMES)))
        })?;
        let pattern = Pattern::parse(&key).map_err(within(at))?;
        found.push((entry.line, StyleRule { pattern, style, origin: at.describe() }));
    }
    Ok(())
}
