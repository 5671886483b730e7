//! From the tree of a document to what it says, key by key. Everything that needs no mesh is checked here.

use super::fields::{At, Fields, list, numbers, table, text};
use super::node::{Entry, Node, Value};
use super::written::{Written, WrittenLies, WrittenSpec};
use super::{LayoutFile, PlanSaid, Said, did_you_mean};
use crate::layout::parallelize::{Style, StyleRule};
use crate::layout::{DeviceMesh, Dims, LayoutError, Pattern, PlacementSpec, Rank, Split, parse_placements};

const KEYS: [&str; 12] = [
    "version",
    "mesh",
    "mesh_ranks",
    "placements",
    "split",
    "plan",
    "tp",
    "fsdp",
    "replicate",
    "styles",
    "rules",
    "flat",
];

const RULE_KEYS: [&str; 5] = ["tensors", "placements", "slice", "split", "sizes"];

/// What a tensor is that no mesh shares.
const PLAIN: &str = "plain";

const VERSION: u64 = 1;

pub fn layout(name: &str, node: &Node) -> Result<LayoutFile, LayoutError> {
    let top = At { name, line: node.line, what: "" };
    let fields = Fields::of(top, node, &KEYS)?;
    if let Some(entry) = fields.get("version") {
        version(At { what: "version", ..top }.on(entry.line), &entry.value)?;
    }
    let said = |key: &'static str| -> Result<Option<Said<String>>, LayoutError> {
        let text = fields.text(key)?;
        Ok(text.map(|(at, text)| Said { value: text.to_owned(), name: name.to_owned(), line: at.line, what: key }))
    };
    let styles = match fields.get("styles") {
        None => Vec::new(),
        Some(entry) => styles(At { what: "styles", ..top }, entry)?,
    };
    let rules = match fields.get("rules") {
        None => Vec::new(),
        Some(entry) => {
            let items = list(At { what: "rules", ..top }, &entry.value, "tables")?;
            items.iter().map(|item| rule(top, item)).collect::<Result<_, _>>()?
        }
    };
    let flat = match fields.get("flat") {
        None => None,
        Some(entry) => {
            table(At { what: "flat", ..top }, &entry.value)?;
            Some(Said { value: entry.value.json(), name: name.to_owned(), line: entry.line, what: "flat" })
        }
    };
    Ok(LayoutFile {
        name: name.to_owned(),
        mesh: mesh(&fields)?,
        fallback: fallback(&fields)?,
        split: fields.text("split")?.map(|(at, text)| split_of_all(at, text)).transpose()?,
        rules,
        plan: PlanSaid {
            name: said("plan")?,
            styles,
            tp: said("tp")?,
            fsdp: said("fsdp")?,
            replicate: said("replicate")?,
        },
        flat,
    })
}

fn version(at: At<'_>, node: &Node) -> Result<(), LayoutError> {
    match &node.value {
        Value::Number(number) if number.as_u64() == Some(VERSION) => Ok(()),
        Value::Number(number) => {
            let problem = format!("version {number} of the layout file; this version of dtshard knows {VERSION}");
            Err(at.wrong(problem, Some(String::from("write version = 1, or use a newer dtshard"))))
        }
        other => Err(at.wrong(format!("expected {VERSION}, found {}", other.kind()), None)),
    }
}

fn mesh(fields: &Fields<'_>) -> Result<Option<Said<DeviceMesh>>, LayoutError> {
    let ranks = fields.get("mesh_ranks");
    let Some(entry) = fields.get("mesh") else {
        return match ranks {
            None => Ok(None),
            Some(entry) => {
                let at = At { what: "mesh_ranks", ..fields.at }.on(entry.line);
                Err(at.wrong("there is no mesh", Some(String::from("say its dims: mesh = \"dp=2,tp=2\""))))
            }
        };
    };
    let at = At { what: "mesh", ..fields.at }.on(entry.line);
    let mut mesh = match &entry.value.value {
        Value::Text(text) => DeviceMesh::parse(text).map_err(at.within())?,
        Value::List(_) => unnamed(at, &entry.value)?,
        other => {
            let hint = String::from("name the dims, outermost first: mesh = \"dp=2,tp=2\"");
            return Err(at.wrong(format!("expected text, found {}", other.kind()), Some(hint)));
        }
    };
    if let Some(entry) = ranks {
        let at = At { what: "mesh_ranks", ..fields.at }.on(entry.line);
        let beyond = |_| at.wrong("expected ranks below 2^32", None);
        let ranks = numbers(at, &entry.value, "ranks")?.into_iter().map(|rank| u32::try_from(rank).map(Rank));
        let ranks = ranks.collect::<Result<Vec<_>, _>>().map_err(beyond)?;
        mesh = mesh.with_ranks(ranks).map_err(at.within())?;
    }
    Ok(Some(Said { value: mesh, name: fields.at.name.to_owned(), line: entry.line, what: "mesh" }))
}

/// A mesh of which only the sizes are said.
fn unnamed(at: At<'_>, node: &Node) -> Result<DeviceMesh, LayoutError> {
    let sizes = Dims::from(numbers(at, node, "sizes")?);
    let numbered: Vec<(String, u64)> = sizes.iter().enumerate().map(|(dim, size)| (dim.to_string(), *size)).collect();
    let named = DeviceMesh::row_major(&numbered).map_err(at.within())?;
    DeviceMesh::new(sizes, named.ranks().to_vec(), None).map_err(at.within())
}

fn fallback(fields: &Fields<'_>) -> Result<Option<Said<Vec<PlacementSpec>>>, LayoutError> {
    let Some((at, text)) = fields.text("placements")? else { return Ok(None) };
    if text == PLAIN {
        let hint = String::from("a rule may have it: tensors = \"**\" and placements = \"plain\"");
        return Err(at.wrong("plain is for rules", Some(hint)));
    }
    let value = parse_placements(text).map_err(at.within())?;
    Ok(Some(Said { value, name: at.name.to_owned(), line: at.line, what: "placements" }))
}

fn split_of_all(at: At<'_>, text: &str) -> Result<Split, LayoutError> {
    match text.parse() {
        Ok(Split::Sizes(_)) | Err(_) => {
            let problem = format!("expected chunk, balanced or makani, found `{text}`");
            Err(at.wrong(problem, Some(String::from("sizes are those of some tensors: say them in rules"))))
        }
        Ok(split) => Ok(split),
    }
}

fn rule(top: At<'_>, node: &Node) -> Result<Written, LayoutError> {
    // Where it can be, a rule is called by its pattern, also where it has other faults.
    let entries = table(At { what: "rules", ..top }, node)?;
    let named = entries.iter().find(|entry| entry.key == "tensors");
    let (line, what) = match named.map(|entry| (entry.line, &entry.value.value)) {
        Some((line, Value::Text(tensors))) => (line, format!("rules \"{tensors}\"")),
        _ => (node.line, String::from("rules")),
    };
    let fields = Fields::of(At { what: &what, ..top }.on(line), node, &RULE_KEYS)?;
    let Some((at, tensors)) = fields.text("tensors")? else {
        return Err(fields.at.wrong("expected `tensors`, the pattern of their names", None));
    };
    let pattern = Pattern::parse(tensors).map_err(at.within())?;
    let lies = match fields.text("placements")? {
        None => return Err(fields.at.wrong("expected `placements`, as in \"S(0),R\", or \"plain\"", None)),
        Some((at, PLAIN)) => match ["slice", "split", "sizes"].into_iter().find(|key| fields.get(key).is_some()) {
            Some(key) => return Err(at.wrong(format!("plain tensors are whole, and have no {key}"), None)),
            None => WrittenLies::Plain,
        },
        Some((at, text)) => WrittenLies::Shared(WrittenSpec {
            placements: parse_placements(text).map_err(at.within())?,
            slice: fields.text("slice")?.map(|(at, text)| (at.line, names(text))),
            split: fields.text("split")?.map(|(at, text)| splits(at, text)).transpose()?,
            sizes: fields.get("sizes").map(|entry| sizes(fields.at, entry)).transpose()?.unwrap_or_default(),
        }),
    };
    Ok(Written { line, what, pattern, lies })
}

fn names(text: &str) -> Vec<String> {
    text.split(',').map(|name| name.trim().to_owned()).collect()
}

fn splits(at: At<'_>, text: &str) -> Result<(usize, Vec<Split>), LayoutError> {
    let splits = text.split(',').map(|split| split.trim().parse()).collect::<Result<_, _>>().map_err(at.within())?;
    Ok((at.line, splits))
}

fn sizes(at: At<'_>, entry: &Entry) -> Result<Vec<(usize, String, Vec<u64>)>, LayoutError> {
    let one = |entry: &Entry| {
        let at = at.on(entry.line);
        Ok((entry.line, entry.key.clone(), numbers(at, &entry.value, "sizes")?))
    };
    table(at.on(entry.line), &entry.value)?.iter().map(one).collect()
}

/// Patterns of modules, with those of the tables around them before them.
fn styles(at: At<'_>, entry: &Entry) -> Result<Vec<StyleRule>, LayoutError> {
    let mut found = Vec::new();
    collect_styles(at, &entry.value, "", &mut found)?;
    // The order in which they are written, also where a table is opened again.
    found.sort_by_key(|(line, _)| *line);
    Ok(found.into_iter().map(|(_, style)| style).collect())
}

fn collect_styles(
    at: At<'_>,
    node: &Node,
    prefix: &str,
    found: &mut Vec<(usize, StyleRule)>,
) -> Result<(), LayoutError> {
    for entry in table(at, node)? {
        let key = if prefix.is_empty() { entry.key.clone() } else { format!("{prefix}.{}", entry.key) };
        let what = format!("styles \"{key}\"");
        let at = At { what: &what, ..at }.on(entry.line);
        if matches!(entry.value.value, Value::Table(_)) {
            collect_styles(at, &entry.value, &key, found)?;
            continue;
        }
        let name = text(at, &entry.value, &key)?;
        let style = name.parse().map_err(|error: LayoutError| {
            let word = name.split('(').next().unwrap_or_default();
            at.wrong(error, Some(did_you_mean(word, &Style::NAMES)))
        })?;
        let pattern = Pattern::parse(&key).map_err(at.within())?;
        found.push((entry.line, StyleRule { pattern, style, said: at.said() }));
    }
    Ok(())
}
