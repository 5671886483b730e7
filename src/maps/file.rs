//! Parses a map file to a [`WeightMap`].
//!
//! ```toml
//! family = "llama"
//!
//! [sides]                          # conventions, in this order
//! hf = { model_type = "llama", tied = { "lm_head.weight" = "model.embed_tokens.weight" } }
//! titan = {}
//! "titan-0.2" = { like = "titan" } # cells and prefixes that are not given are those of titan
//!
//! [sizes]                          # axes whose size the shapes do not show
//! h = "num_attention_heads | n_heads"   # keys of config.json, or other sizes; the first that is known
//! p = "h / k"                      # an exact quotient
//! r = 2
//!
//! [[map]]                          # a block; the text of a side stands before the names of this side
//! hf = "model.layers.{l}."
//! titan = "layers.{l}."
//! rows = [{ hf = "self_attn.q_proj.weight [(h r j) i]", titan = "attention.wq.weight [(h j r) i]" }]
//! ```
//!
//! JSON has the same keys. Invariant: every row of a parsed map is complete ([`Row::complete`]).

use std::collections::BTreeSet;
use std::fmt;

use super::cell::{Axis, CellError, TensorPattern};
use super::cut::{Cut, FileName};
use super::row::{Row, RowFault};
use crate::document::{
    DocumentError, Fields, FileEntry, FileNode, FilePosition, FileValue, did_you_mean, list, parse, table, text,
};
use crate::layout::PlacementSpec;

const KEYS: [&str; 4] = ["family", "sides", "sizes", "map"];
const SIDE_KEYS: [&str; 6] = ["decoded", "like", "model_type", "tied", "files", "cut"];
/// The values of the key `decoded`.
const ENCODINGS: [&str; 2] = ["fp8", "mxfp4"];

/// A map: the conventions in which the weights of one model family are stored, and the rows that connect them.
#[derive(Clone, Debug)]
pub struct WeightMap {
    /// The name of the file, for messages.
    pub name: String,
    /// The text by which options name the map: the family of a built-in map, or the path of a file.
    pub reference: String,
    pub family: String,
    pub sides: Vec<Side>,
    pub sizes: Vec<SizeRule>,
    /// The rows of all blocks, in the order of the file. The first row that matches a name applies.
    pub rows: Vec<Row>,
}

/// A convention: the names of tensors, and the order of their elements.
#[derive(Clone, Debug)]
pub struct Side {
    pub name: String,
    /// The values of `model_type` in `config.json` of models that are stored in this convention.
    pub model_types: Vec<String>,
    /// For each name that may be missing, the name of the tensor that it is tied to.
    pub tied: Vec<(String, String)>,
    /// The encoding, such as `mxfp4`, whose decoded tensors this side describes. `None` if the side describes tensors as
    /// files store them. A side with an encoding cannot be the target of a conversion.
    pub decoded: Option<String>,
    /// The names of the files in which models of this convention are published.
    pub files: Vec<FileName>,
    /// The placements of tensors in files of ranks. A tensor without a placement is whole on every rank.
    pub cut: Vec<Cut>,
    /// The index of the side whose cells this side has where a row gives none.
    like: Option<usize>,
}

impl Side {
    /// Returns whether the convention is for other models than those whose configuration has this `model_type`. A side that names
    /// no types may be the convention of any model of its family.
    pub fn is_for_other(&self, model_type: &str) -> bool {
        !self.model_types.is_empty() && self.model_types.iter().all(|known| known != model_type)
    }
}

/// A size of the map: an axis whose size the shapes of tensors may not show.
#[derive(Clone, Debug)]
pub struct SizeRule {
    pub axis: Axis,
    pub value: SizeValue,
}

/// The origin of a size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SizeValue {
    Number(u64),
    /// The first of these that is known.
    FirstOf(Vec<SizeKey>),
    /// The exact quotient of two sizes.
    Quotient(Axis, Axis),
}

/// A size, or a key of a model's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SizeKey {
    Size(Axis),
    /// A key of `config.json` or `params.json`; dots separate the keys of nested objects.
    Config(String),
}

impl Side {
    /// Returns whether models of this convention are published in files of these names.
    pub fn is_published_in(&self, files: &[String]) -> bool {
        !files.is_empty() && files.iter().all(|name| self.files.iter().any(|file| file.matches(name)))
    }
}

impl fmt::Display for SizeRule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} = {}", self.axis, self.value)
    }
}

impl fmt::Display for SizeValue {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(formatter, "{number}"),
            Self::Quotient(dividend, divisor) => write!(formatter, "{dividend} / {divisor}"),
            Self::FirstOf(keys) => {
                let names = keys.iter().map(|key| match key {
                    SizeKey::Size(axis) => &**axis,
                    SizeKey::Config(key) if key.is_empty() => "the shapes",
                    SizeKey::Config(key) => key,
                });
                write!(formatter, "{}", names.collect::<Vec<_>>().join(" | "))
            }
        }
    }
}

impl WeightMap {
    /// Parses a map file. The suffix of `name`, `.json` or `.toml`, selects the syntax; otherwise the text does.
    ///
    /// # Errors
    /// [`DocumentError`] with the line, the side and the problem.
    pub fn parse(name: &str, text: &str) -> Result<Self, DocumentError> {
        let node = parse(name, text, "a map")?;
        let top = FilePosition { name, line: node.line, section: "" };
        let fields = Fields::new(top, &node, &KEYS)?;
        let family = fields.text("family")?.map(|(_, family)| family.to_owned());
        let Some(family) = family else {
            return Err(top.error("expected the key `family`", Some("give the name of the family".to_owned())));
        };
        let sides = sides(FilePosition { section: "sides", ..top }, fields.get("sides"))?;
        let sizes = sizes(FilePosition { section: "sizes", ..top }, fields.get("sizes"))?;
        let Some(blocks) = fields.get("map") else {
            return Err(top.error("expected at least one block `[[map]]`", Some("add a block with `rows`".to_owned())));
        };
        let at = FilePosition { section: "map", ..top }.at_line(blocks.line);
        let mut rows = Vec::new();
        for block in list(at, &blocks.value, "tables")? {
            rows.extend(Block::parse(at.at_line(block.line), block, &sides)?);
        }
        Ok(Self { name: name.to_owned(), reference: name.to_owned(), family, sides, sizes, rows })
    }

    /// Returns the values of `model_type` of all sides.
    pub fn model_types(&self) -> Vec<&str> {
        self.sides.iter().flat_map(|side| &side.model_types).map(String::as_str).collect()
    }

    /// Returns whether the map is for models whose configuration has this `model_type`. A map that names no types is for all
    /// models.
    pub fn is_for(&self, model_type: &str) -> bool {
        let types = self.model_types();
        types.is_empty() || types.contains(&model_type)
    }

    /// Returns the names of the sides.
    pub fn side_names(&self) -> Vec<&str> {
        self.sides.iter().map(|side| side.name.as_str()).collect()
    }

    /// Returns the axes of the rows.
    pub fn row_axes(&self) -> BTreeSet<&Axis> {
        let patterns = self.rows.iter().flat_map(|row| row.cells.iter().flatten());
        patterns.flat_map(|pattern| pattern.name.axes().chain(pattern.all_dim_axes())).collect()
    }

    /// Returns all axes of the rows and sizes, sorted.
    pub fn axes(&self) -> Vec<&Axis> {
        let of_rows = self.row_axes().into_iter();
        let mut axes: Vec<&Axis> = of_rows.chain(self.sizes.iter().map(|rule| &rule.axis)).collect();
        axes.sort();
        axes.dedup();
        axes
    }

    /// Returns whether the tensors of a side are decoded from these encodings, or from none if no side of the map is for them.
    pub fn is_decoded_from(&self, side: usize, encodings: &[&str]) -> bool {
        let is_one = |side: &Side| side.decoded.as_deref().is_some_and(|decoded| encodings.contains(&decoded));
        is_one(&self.sides[side]) || self.sides[side].decoded.is_none() && !self.sides.iter().any(is_one)
    }

    /// Returns the index of the side with this name.
    pub fn side(&self, name: &str) -> Option<usize> {
        self.sides.iter().position(|side| side.name == name)
    }
}

fn sides(at: FilePosition<'_>, entry: Option<&FileEntry>) -> Result<Vec<Side>, DocumentError> {
    let entries = match entry {
        Some(entry) => table(at.at_line(entry.line), &entry.value)?,
        None => &[],
    };
    let mut sides: Vec<Side> = Vec::new();
    for FileEntry { line, key, value } in entries {
        let section = format!("sides \"{key}\"");
        let at = FilePosition { section: &section, ..at }.at_line(*line);
        if key.is_empty() || key.contains([':', '/', '\\']) || key.chars().any(char::is_whitespace) {
            return Err(at.error("expected a name without `:`, slashes and spaces", Some("rename the side".to_owned())));
        }
        let fields = Fields::new(at, value, &SIDE_KEYS)?;
        let like = match fields.text("like")? {
            None => None,
            Some((at, name)) => {
                Some(sides.iter().position(|side| side.name == name).ok_or_else(|| -> DocumentError {
                    let names: Vec<&str> = sides.iter().map(|side| side.name.as_str()).collect();
                    at.error(format!("no side `{name}` stands before this side"), Some(did_you_mean(name, &names)))
                })?)
            }
        };
        let model_types = match fields.get("model_type") {
            None => Vec::new(),
            Some(entry) => texts(at.at_line(entry.line), &entry.value, "model_type")?,
        };
        let decoded = match fields.text("decoded")? {
            Some((at, name)) if !ENCODINGS.contains(&name) => {
                return Err(at.error(format!("`{name}` is not an encoding"), Some(did_you_mean(name, &ENCODINGS))));
            }
            decoded => decoded.map(|(_, name)| name.to_owned()),
        };
        let tied = match fields.get("tied") {
            None => like.map(|like| sides[like].tied.clone()).unwrap_or_default(),
            Some(entry) => table(at, &entry.value)?
                .iter()
                .map(|tie| Ok((tie.key.clone(), text(at.at_line(tie.line), &tie.value, &tie.key)?.to_owned())))
                .collect::<Result<_, _>>()?,
        };
        let files = match fields.get("files") {
            None => Vec::new(),
            Some(entry) => texts(at.at_line(entry.line), &entry.value, "files")?,
        };
        let files = files.iter().map(|file| FileName::new(file)).collect();
        let cut = match fields.get("cut") {
            None => Vec::new(),
            Some(entry) => table(at, &entry.value)?
                .iter()
                .map(|entry| cut(at.at_line(entry.line), &entry.key, &entry.value))
                .collect::<Result<_, _>>()?,
        };
        sides.push(Side { name: key.clone(), model_types, tied, decoded, files, cut, like });
    }
    if sides.len() < 2 {
        return Err(at.error(
            format!("expected at least two sides, found {}", sides.len()),
            Some("name both conventions under [sides]".to_owned()),
        ));
    }
    Ok(sides)
}

/// Parses the placements of the tensors of one key of `cut`.
fn cut(at: FilePosition<'_>, key: &str, value: &FileNode) -> Result<Cut, DocumentError> {
    let placement = |text: &String| {
        let placement = text.parse().ok().filter(|placement| !matches!(placement, PlacementSpec::Partial(_)));
        placement.ok_or_else(|| at.error(format!("cut: expected a placement such as S(0) or R, found `{text}`"), None))
    };
    let placements: Vec<PlacementSpec> =
        texts(at, value, key)?.iter().map(placement).collect::<Result<_, DocumentError>>()?;
    if placements.is_empty() {
        return Err(at.error("cut: expected a placement such as S(0) or R, found an empty list", None));
    }
    let fault = |error: CellError| at.error(format!("cut: expected {}, found {}", error.expected, error.found), None);
    Cut::new(key, placements).map_err(fault)
}

/// Returns the text of a value that is a text or a list of texts.
fn texts(at: FilePosition<'_>, node: &FileNode, key: &str) -> Result<Vec<String>, DocumentError> {
    match &node.value {
        FileValue::List(items) => {
            items.iter().map(|item| Ok(text(at.at_line(item.line), item, key)?.to_owned())).collect()
        }
        _ => Ok(vec![text(at, node, key)?.to_owned()]),
    }
}

fn sizes(at: FilePosition<'_>, entry: Option<&FileEntry>) -> Result<Vec<SizeRule>, DocumentError> {
    let Some(entry) = entry else { return Ok(Vec::new()) };
    let entries = table(at.at_line(entry.line), &entry.value)?;
    let names: Vec<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
    let is_size = |name: &str| names.contains(&name);
    let mut rules = Vec::new();
    for FileEntry { line, key, value } in entries {
        let section = format!("sizes \"{key}\"");
        let at = FilePosition { section: &section, ..at }.at_line(*line);
        let known = |name: &str| -> Result<Axis, DocumentError> {
            if is_size(name) {
                Ok(name.into())
            } else {
                Err(at.error(format!("`{name}` is not a size"), Some(did_you_mean(name, &names))))
            }
        };
        let value = match &value.value {
            FileValue::Number(number) => match number.as_u64().filter(|number| *number > 0) {
                Some(number) => SizeValue::Number(number),
                None => return Err(at.error(format!("expected a number of at least 1, found {number}"), None)),
            },
            FileValue::Text(text) => match text.split_once('/') {
                Some((dividend, divisor)) => SizeValue::Quotient(known(dividend.trim())?, known(divisor.trim())?),
                None => {
                    let is_key = |name: &str| name.chars().all(|char| char.is_alphanumeric() || "_-.".contains(char));
                    let key = |name: &str| match name {
                        name if is_size(name) => Ok(SizeKey::Size(name.into())),
                        name if is_key(name) => Ok(SizeKey::Config(name.to_owned())),
                        _ => Err(at.error(
                            format!("expected a size or a key of the configuration, found `{name}`"),
                            Some(
                                "separate several keys by `|`, or give the quotient of two sizes, such as `h / k`"
                                    .to_owned(),
                            ),
                        )),
                    };
                    let keys: Result<_, DocumentError> = text.split('|').map(str::trim).map(key).collect();
                    SizeValue::FirstOf(keys?)
                }
            },
            other => return Err(at.error(format!("expected a number or text, found {}", other.kind()), None)),
        };
        rules.push(SizeRule { axis: key.as_str().into(), value });
    }
    Ok(rules)
}

/// A block of rows, with the text that stands before the names of each side.
struct Block<'a> {
    at: FilePosition<'a>,
    sides: &'a [Side],
    /// For each side, the texts before its names. The rows are repeated for each text of a list.
    prefixes: Vec<Vec<String>>,
}

impl<'a> Block<'a> {
    fn parse(at: FilePosition<'a>, node: &FileNode, sides: &'a [Side]) -> Result<Vec<Row>, DocumentError> {
        let names: Vec<&str> = sides.iter().map(|side| side.name.as_str()).collect();
        let keys: Vec<&str> = names.iter().copied().chain(["rows"]).collect();
        let fields = Fields::new(at, node, &keys)?;
        let mut block = Block { at, sides, prefixes: Vec::new() };
        for side in sides {
            let given = fields.get(&side.name).map(|entry| texts(at.at_line(entry.line), &entry.value, &side.name));
            let inherited = || side.like.map(|like| block.prefixes[like].clone());
            let prefixes = given.transpose()?.or_else(inherited).unwrap_or_else(|| vec![String::new()]);
            block.prefixes.push(prefixes);
        }
        let repeats = block.prefixes.iter().map(Vec::len).max().unwrap_or(1);
        if let Some(side) = (0..sides.len()).find(|side| ![1, repeats].contains(&block.prefixes[*side].len())) {
            let found = block.prefixes[side].len();
            return Err(at.error(
                format!("`{}` has {found} prefixes, and another side has {repeats}", names[side]),
                Some("give one prefix, or as many as the other sides".to_owned()),
            ));
        }
        let Some(rows) = fields.get("rows") else { return Err(at.error("expected `rows`, a list of rows", None)) };
        let rows = list(at.at_line(rows.line), &rows.value, "rows")?;
        let mut parsed = Vec::new();
        for repeat in 0..repeats {
            for row in rows {
                parsed.push(block.row(row, repeat)?);
            }
        }
        Ok(parsed)
    }

    fn row(&self, node: &FileNode, repeat: usize) -> Result<Row, DocumentError> {
        let at = FilePosition { section: "row", ..self.at }.at_line(node.line);
        let names: Vec<&str> = self.sides.iter().map(|side| side.name.as_str()).collect();
        let keys: Vec<&str> = names.iter().copied().chain(["add"]).collect();
        let fields = Fields::new(at, node, &keys)?;
        let mut written: Vec<Vec<String>> = Vec::new();
        for side in self.sides {
            let given = fields.get(&side.name).map(|entry| texts(at.at_line(entry.line), &entry.value, &side.name));
            let inherited = || side.like.map(|like| written[like].clone());
            written.push(given.transpose()?.or_else(inherited).unwrap_or_default());
        }
        let mut cells = Vec::new();
        for (side, tensors) in written.iter().enumerate() {
            let prefixes = &self.prefixes[side];
            let prefix = prefixes.get(repeat).unwrap_or(&prefixes[0]);
            let tensors = tensors.iter().filter(|text| !text.is_empty());
            let parsed: Result<Vec<TensorPattern>, _> =
                tensors.map(|text| TensorPattern::parse(prefix, text)).collect();
            cells.push(parsed.map_err(|error| fault(at, RowFault::of_cell(names[side], error)))?);
        }
        let mut add: Vec<Option<f64>> = vec![None; self.sides.len()];
        if let Some(entry) = fields.get("add") {
            for value in table(at.at_line(entry.line), &entry.value)? {
                let at = at.at_line(value.line);
                let Some(side) = names.iter().position(|name| *name == value.key) else {
                    return Err(
                        at.error(format!("add: `{}` is not a side", value.key), Some(did_you_mean(&value.key, &names)))
                    );
                };
                match &value.value.value {
                    FileValue::Number(number) => add[side] = number.as_f64(),
                    other => return Err(at.error(format!("add: expected a number, found {}", other.kind()), None)),
                }
            }
        }
        // A side that takes its cell from another side has the values of that side, too.
        for (index, side) in self.sides.iter().enumerate() {
            if let (None, Some(like), None) = (add[index], side.like, fields.get(&side.name)) {
                add[index] = add[like];
            }
        }
        let add = add.into_iter().map(Option::unwrap_or_default).collect();
        let mut row = Row { line: node.line, cells, add };
        row.complete(&names).map_err(|error| fault(at, error))?;
        Ok(row)
    }
}

/// Adds the position of a row to its fault.
fn fault(at: FilePosition<'_>, RowFault { problem, hint }: RowFault) -> DocumentError {
    at.error(problem, Some(hint))
}
