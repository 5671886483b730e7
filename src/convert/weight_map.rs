//! Applies the weight map that the options name to an opened source: chooses the map and its sides, and reads the model's
//! configuration.
//!
//! The text of [`MapOptions::map`] is `FAMILY`, `FILE` or `auto`, then `:TO`, or `:FROM:TO`. Without FROM, the side of the source
//! is the one whose rows match all names of the model, and which is not for another `model_type`. Filters and wrapper components
//! apply to the names of the source, before the map; all other options apply to the names after the map.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::dequantize;
use super::join_shards::{ShardedSide, cut_rules, join_shards};
use super::model_config::Configuration;
use super::options::MapOptions;
use super::run::Run;
use super::source_checks;
use crate::catalog::TensorId;
use crate::error::{Error, Result};
use crate::format::{Checkpoint, RankNamePattern};
use crate::layout::LayoutError;
use crate::maps::{Fit, Row, Side, SizeRule, Sizes, WeightMap, families};
use crate::name_list::{FEW, short_list};
use crate::nearest::nearest;
use crate::quantity::count;
use crate::select::dequantized::Encoding;
use crate::select::mapped::{self, MapOutcome, MapRequest};
use crate::select::{self, LeftOut, MatchedNames, NameOptions, Root, Wrappers};
use crate::storage::{lookup, regular_file};

/// The text that stands for all built-in maps in [`MapOptions::map`].
const AUTO: &str = "auto";

/// A map that was applied to a source, perhaps after quantised weights were decoded.
#[derive(Debug)]
pub struct AppliedMap {
    /// The notes for the user: the side that SRC was read as, and the tensors that the map leaves out.
    pub notes: Vec<String>,
    /// Descriptions of the rows that were applied, one line for each row.
    pub details: Vec<String>,
    /// The map as a JSON document: family, sides, sizes with their origins, and the rows that were applied. `None` if quantised
    /// weights were decoded, and no map was applied.
    pub document: Option<Json>,
    /// Groups of tensors of the source whose values must be equal.
    pub equal: Vec<Vec<TensorId>>,
    /// Pairs of a tensor of the result and another copy of it in the source, which must have equal values.
    pub copies: Vec<[TensorId; 2]>,
    /// The names that the filters left out before the map.
    pub left_out: LeftOut,
    /// The options that remain for the names after the map.
    pub options: NameOptions,
}

/// Decodes quantised weights and applies the map, as the options say. Returns `None` if the options say neither.
///
/// # Errors
/// `Usage` for a map or side that does not exist, for a map that does not fit the source, and for options without effect; `Io`
/// and `Layout` for a map file or a configuration that cannot be read.
pub fn apply(checkpoint: &mut Checkpoint, args: &MapOptions, options: &NameOptions) -> Result<Option<AppliedMap>> {
    refuse_without_map(args)?;
    if args.map.is_none() && args.dequantize.is_none() {
        return Ok(None);
    }
    let config = Configuration::read(checkpoint, args.config.as_deref())?;
    let dequantized = args.dequantize.map(|dtype| dequantize::apply(checkpoint, dtype, &config)).transpose()?;
    let (encodings, note) = dequantized.map(|(found, note)| (found.encodings(), note)).unzip();
    let Some(text) = &args.map else {
        let (details, equal, left_out) = (Vec::new(), Vec::new(), LeftOut::default());
        let is_mxfp4 = encodings.is_some_and(|encodings| encodings.contains(&Encoding::Mxfp4.name()));
        let order = "the decoded experts have the dims (outputs, inputs), and transformers has (inputs, outputs): options::map \
                     gpt-oss:hf gives this order";
        return Ok(Some(AppliedMap {
            notes: note.into_iter().chain(is_mxfp4.then(|| order.to_owned())).collect(),
            details,
            document: None,
            equal,
            copies: Vec::new(),
            left_out,
            options: options.clone(),
        }));
    };
    if options.wrappers == Wrappers::Keep {
        return Err(Error::usage(
            "options::keep_names has no effect with options::map, because rows match names without wrapper prefixes",
            "leave options::keep_names out",
        ));
    }
    let has_shards = checkpoint.has_undeclared_shards();
    let filters = NameOptions {
        wrappers: Wrappers::Cut,
        include: options.include.clone(),
        exclude: options.exclude.clone(),
        without_gradients: options.without_gradients,
        allow_unknown_layouts: has_shards,
        root: if options.root == Root::Model { Root::Model } else { Root::Whole },
        matched: MatchedNames::BeforeMap,
        ..NameOptions::default()
    };
    let mut filtered = select::select(&checkpoint.catalog, &filters)?;
    let given = args.set.iter().map(|text| parse_size(text)).collect::<Result<Vec<_>>>()?;
    let names = mapped::model_names(&filtered.catalog);
    let files = file_names(checkpoint);
    let encodings = encodings.unwrap_or_default();
    let known = KnownSource { names: &names, files: &files, given: &given, config: &config, encodings: &encodings };
    let chosen = Chosen::new(text, &known)?;
    check_used(&chosen.map, &given)?;
    let mut notes = Vec::from_iter(note);
    let mut joined = None;
    if has_shards {
        // Files of these names would be read as shards of the side of SRC again.
        let patterns = checkpoint.parts.iter_mut().filter_map(|part| part.name_pattern.as_mut());
        patterns
            .filter(|pattern| pattern.has_shards())
            .for_each(|pattern| *pattern = RankNamePattern::new_series("model"));
        joined = Some(join_shards(checkpoint, &filtered.catalog, &chosen.shards())?);
        filtered = select::select(&checkpoint.catalog, &NameOptions { allow_unknown_layouts: false, ..filters })?;
    } else if chosen.side().is_published_in(&files) {
        // A single file may be that of the first rank.
        cut_rules(checkpoint, &filtered.catalog, &chosen.shards())?;
    }
    checkpoint.catalog.state = filtered.catalog.state;
    let sides = chosen.sides;
    let request = MapRequest { map: &chosen.map, sides, sizes: chosen.sizes.clone(), drops_state: args.drops_state };
    let outcome = mapped::map(&mut checkpoint.catalog, &mut checkpoint.files, request)?;
    notes.extend([filtered.notes, chosen.notes(&outcome)].concat());
    notes.extend(joined);
    notes.extend(chosen.note_of_other_families(&known)?);
    let (details, document) = (chosen.details(&outcome), Some(chosen.document(&outcome)));
    let remaining = NameOptions {
        wrappers: Wrappers::Keep,
        include: Vec::new(),
        exclude: Vec::new(),
        matched: MatchedNames::AfterMap,
        root: if options.root == Root::Model { Root::Whole } else { options.root.clone() },
        ..options.clone()
    };
    let MapOutcome { equal, copies, .. } = outcome;
    Ok(Some(AppliedMap { notes, details, document, equal, copies, left_out: filtered.left_out, options: remaining }))
}

/// Refuses options that need a map.
fn refuse_without_map(args: &MapOptions) -> Result<()> {
    let option = match args {
        MapOptions { map: Some(_), .. } => return Ok(()),
        MapOptions { config: Some(_), dequantize: None, .. } => {
            return Err(Error::usage(
                "options::config has no effect without options::map and options::dequantize",
                "leave options::config out",
            ));
        }
        MapOptions { set, .. } if !set.is_empty() => "options::set",
        MapOptions { drops_state: true, .. } => "options::map_state",
        _ => return Ok(()),
    };
    Err(Error::usage(format!("{option} has no effect without options::map"), "name the map with options::map"))
}

/// Parses a size such as `h=32`.
fn parse_size(text: &str) -> Result<(String, u64)> {
    let parsed = text.split_once('=').and_then(|(axis, value)| {
        let value: u64 = value.trim().parse().ok().filter(|value| *value > 0)?;
        Some((axis.trim().to_owned(), value)).filter(|(axis, _)| !axis.is_empty())
    });
    parsed.ok_or_else(|| {
        Error::usage(
            format!("options::set {text}: expected an axis and a number of at least 1"),
            "give, for example, options::set h=32",
        )
    })
}

/// Checks that each axis of `options::set` is an axis of the map.
fn check_used(map: &WeightMap, given: &[(String, u64)]) -> Result<()> {
    let axes = map.axes();
    match given.iter().find(|(axis, _)| !axes.iter().any(|known| known.as_ref() == axis)) {
        None => Ok(()),
        Some((axis, value)) => Err(Error::usage(
            format!("options::set {axis}={value}: no row of the map {} has the axis {axis}", map.family),
            format!("the axes are {}", axes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
        )),
    }
}

/// The facts about SRC by which its map and side are chosen.
struct KnownSource<'a> {
    /// The names of the tensors of the model.
    names: &'a [String],
    /// The names of the files.
    files: &'a [String],
    /// The sizes that the user gave.
    given: &'a [(String, u64)],
    config: &'a Configuration,
    /// The encodings from which tensors are decoded.
    encodings: &'a [&'static str],
}

/// The map and the sides between which it is applied.
struct Chosen {
    map: WeightMap,
    sides: [usize; 2],
    sizes: Sizes,
    /// The name of the configuration's file; empty if there is none.
    config: String,
}

/// A side that SRC may have: how well the names of SRC fit it, and the side to convert to, if it is known.
struct Candidate<'m> {
    map: &'m WeightMap,
    sizes: Sizes,
    from: usize,
    to: Option<usize>,
    fit: Fit,
    /// Whether the map names the `model_type` of the configuration.
    names_type: bool,
    /// Whether the side is for other values of `model_type` than the configuration has.
    is_for_other_type: bool,
    /// Whether models of the side are published in files with the names of SRC's files.
    is_published: bool,
}

impl Candidate<'_> {
    fn fits(&self) -> bool {
        self.fit.unmatched.is_empty() && self.fit.named > 0
    }

    /// Returns whether the side is the one to convert to.
    fn is_converted(&self) -> bool {
        self.to == Some(self.from)
    }

    /// Returns whether SRC gives the same result if it is read as the other side: the two sides differ only in rows that match no
    /// name of SRC.
    fn gives_same_result(&self, other: &Self) -> bool {
        let is_equal = |row: &usize| {
            let Row { cells, add, .. } = &self.map.rows[*row];
            cells[self.from] == cells[other.from] && add[self.from].total_cmp(&add[other.from]).is_eq()
        };
        self.map.family == other.map.family && self.fit.rows == other.fit.rows && self.fit.rows.iter().all(is_equal)
    }

    /// Returns `FAMILY:SIDE`.
    fn name(&self) -> String {
        format!("{}:{}", self.map.family, self.map.sides[self.from].name)
    }

    /// Returns the value of [`MapOptions::map`] that reads SRC as this side and converts it.
    fn option(&self) -> String {
        let to = self.to.map_or("TO", |to| &self.map.sides[to].name);
        format!("{}:{}:{to}", self.map.reference, self.map.sides[self.from].name)
    }

    fn chosen(&self, text: &str, config: &Configuration) -> Result<Chosen> {
        let Some(to) = self.to else { return Err(no_target(text, self)) };
        let config = config.name().to_owned();
        Ok(Chosen { map: self.map.clone(), sides: [self.from, to], sizes: self.sizes.clone(), config })
    }
}

/// Returns the candidates that fit best. Each of these rules leaves out the candidates that do not follow it, if any does: the map
/// names the `model_type` of the configuration; the side is for this type; the rows match most names by more than `**`; SRC has the
/// file names of the side. Of candidates that give the same result, the first one stays.
fn best<'c, 'm>(candidates: &'c [Candidate<'m>]) -> Vec<&'c Candidate<'m>> {
    let mut fitting: Vec<&Candidate<'_>> = candidates.iter().filter(|candidate| candidate.fits()).collect();
    if fitting.iter().any(|candidate| candidate.names_type) {
        fitting.retain(|candidate| candidate.names_type);
    }
    if fitting.iter().any(|candidate| !candidate.is_for_other_type) {
        fitting.retain(|candidate| !candidate.is_for_other_type);
    }
    let most = fitting.iter().map(|candidate| candidate.fit.named).max();
    fitting.retain(|candidate| Some(candidate.fit.named) == most);
    if fitting.iter().any(|candidate| candidate.is_published) {
        fitting.retain(|candidate| candidate.is_published);
    }
    let mut best: Vec<&Candidate<'_>> = Vec::new();
    for candidate in fitting {
        if !best.iter().any(|known| known.gives_same_result(candidate)) {
            best.push(candidate);
        }
    }
    best
}

impl Chosen {
    fn new(text: &str, known: &KnownSource<'_>) -> Result<Self> {
        let request = MapText::parse(text)?;
        let candidates = request.candidates(known)?;
        let best = best(&candidates);
        match best.as_slice() {
            [] => request.nearest(&candidates, known),
            [first, ..] if best.iter().all(|candidate| candidate.is_converted()) => {
                Err(already_converted(text, &first.name()))
            }
            [one] => one.chosen(text, known.config),
            several => Err(ambiguous(text, several)),
        }
    }

    /// Returns a note if the names of SRC fit other families as well, and neither the configuration nor the names of the files say
    /// which family the model is of.
    fn note_of_other_families(&self, known: &KnownSource<'_>) -> Result<Option<String>> {
        let KnownSource { names, files, config, .. } = *known;
        if config.model_type().is_some()
            || self.side().is_published_in(files)
            || families().iter().all(|family| family.name != self.map.family)
        {
            return Ok(None);
        }
        let own = self.map.matches_all(self.sides[0], names, &self.sizes);
        let mut others = Vec::new();
        for map in built_in_maps()?.into_iter().filter(|map| map.family != self.map.family) {
            let sizes = sizes(&map, &[], config)?;
            let fits = |side: &usize| map.matches_all(*side, names, &sizes).is_some_and(|named| Some(named) >= own);
            others
                .extend((0..map.sides.len()).find(fits).map(|side| format!("{}:{}", map.family, map.sides[side].name)));
        }
        Ok((!others.is_empty()).then(|| {
            format!(
                "the names of SRC also fit {}: give the config.json of the model with options::config to check the family",
                others.join(", ")
            )
        }))
    }

    /// Returns the side of SRC, which declares how ranks cut tensors.
    fn shards(&self) -> ShardedSide<'_> {
        ShardedSide { map: &self.map, side: self.sides[0], sizes: &self.sizes }
    }

    /// Returns the side of SRC.
    fn side(&self) -> &Side {
        &self.map.sides[self.sides[0]]
    }

    fn from(&self) -> &str {
        &self.side().name
    }

    fn notes(&self, outcome: &MapOutcome) -> Vec<String> {
        let to = &self.map.sides[self.sides[1]].name;
        let mut sizes = Vec::new();
        let of_rows = self.map.row_axes();
        for rule in self.map.sizes.iter().filter(|rule| of_rows.contains(&&rule.axis)) {
            if let Some(known) = outcome.mapping.sizes.known(&rule.axis) {
                sizes.push(format!("{} = {} by {}", rule.axis, known.value, known.origin.describe(&self.config)));
            }
        }
        let sizes = if sizes.is_empty() { String::new() } else { format!("; {}", sizes.join(", ")) };
        let mut notes =
            vec![format!("SRC is read as {}:{} and converted to {to}{sizes}", self.map.family, self.from())];
        let dropped = &outcome.dropped;
        if !dropped.is_empty() {
            let (tensors, names) = (count(dropped.len(), "tensor"), short_list(dropped, FEW));
            notes.push(format!("left out, because {to} has no such tensors: {tensors} ({names})"));
        }
        let dropped = &outcome.dropped_state;
        if !dropped.is_empty() {
            let (items, names) = (count(dropped.len(), "item"), short_list(dropped, FEW));
            notes.push(format!("left out, because the map cannot convert it: optimizer state ({items}: {names})"));
        }
        notes
    }

    /// Returns a line for each row that was applied.
    fn details(&self, outcome: &MapOutcome) -> Vec<String> {
        let cell = |row: usize, side: usize| {
            let cells = &self.map.rows[row].cells[side];
            cells.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        let line = |(row, counts): (&usize, &mapped::RowCounts)| {
            let [from, to] = self.sides.map(|side| cell(*row, side));
            let (sources, pieces) = (count(counts.sources, "tensor"), count(counts.pieces, "piece"));
            format!("{from} -> {to}: {sources} to {}, {pieces}", counts.targets)
        };
        outcome.rows.iter().map(line).collect()
    }

    fn document(&self, outcome: &MapOutcome) -> Json {
        let size = |rule: &SizeRule| {
            let known = outcome.mapping.sizes.known(&rule.axis)?;
            Some((
                rule.axis.to_string(),
                json!({ "value": known.value, "origin": known.origin.describe(&self.config) }),
            ))
        };
        let sizes: serde_json::Map<String, Json> = self.map.sizes.iter().filter_map(size).collect();
        let row = |(row, counts): (&usize, &mapped::RowCounts)| {
            let [from, to] = self.sides.map(|side| -> Vec<String> {
                self.map.rows[*row].cells[side].iter().map(ToString::to_string).collect()
            });
            json!({ "from": from, "to": to, "sources": counts.sources, "targets": counts.targets, "pieces": counts.pieces })
        };
        let left_out = [outcome.dropped.as_slice(), &outcome.dropped_state].concat();
        json!({
            "family": self.map.family,
            "from": self.from(),
            "to": self.map.sides[self.sides[1]].name,
            "sizes": sizes,
            "rows": outcome.rows.iter().map(row).collect::<Vec<_>>(),
            "left_out": left_out,
        })
    }
}

/// Returns the names of the files of a checkpoint.
pub fn file_names(checkpoint: &Checkpoint) -> Vec<String> {
    let names = checkpoint.files.ids().filter_map(|id| checkpoint.files.path(id).file_name());
    names.map(|name| name.to_string_lossy().into_owned()).collect()
}

/// Returns the sizes of a map that are known without the tensors.
///
/// # Errors
/// `Usage` if the configuration, the map and `given`, the sizes of the user, contradict each other.
pub fn sizes(map: &WeightMap, given: &[(String, u64)], config: &Configuration) -> Result<Sizes> {
    Sizes::new(&map.sizes, given, config.value()).map_err(|conflict| {
        Error::usage(format!("map {}: {conflict}", map.family), "correct options::set or the configuration")
    })
}

/// The parts of [`MapOptions::map`].
struct MapText<'t> {
    text: &'t str,
    /// The map that the text names, or all built-in maps for `auto`.
    maps: Vec<WeightMap>,
    is_auto: bool,
    from: Option<&'t str>,
    to: Option<&'t str>,
}

impl<'t> MapText<'t> {
    /// Finds the maps. Paths may have colons, too, so the longest text that names a map counts.
    fn parse(text: &'t str) -> Result<Self> {
        let (mut name, mut from, mut to) = (text, None, None);
        loop {
            if let Some(maps) = maps_named(name)? {
                return Ok(Self { text, maps, is_auto: name == AUTO, from, to });
            }
            match name.rsplit_once(':') {
                Some((before, side)) if from.is_none() => {
                    (name, from, to) = if to.is_none() { (before, None, Some(side)) } else { (before, Some(side), to) };
                }
                _ => break,
            }
        }
        let first = text.split(':').next().unwrap_or(text);
        if [".toml", ".json"].iter().any(|suffix| first.ends_with(suffix)) {
            return Err(Error::usage(
                format!("options::map {text}: {first} is not a file"),
                "give the path of a map file, or a family; `dtshard maps` lists the families",
            ));
        }
        let known: Vec<String> = families().iter().map(|family| family.name.to_owned()).collect();
        Err(Error::usage(
            format!("options::map {text}: expected a map family, a map file or `auto`, found {first}"),
            format!("the nearest families are {}; `dtshard maps` lists all", nearest(first, &known).join(", ")),
        ))
    }

    /// Compares the names of SRC with each side that SRC may have: FROM, or all sides of the maps that have the side TO and are for
    /// the model. TO comes first among the sides of its map.
    fn candidates(&self, known: &KnownSource<'_>) -> Result<Vec<Candidate<'_>>> {
        let KnownSource { names, files, given, config, encodings } = *known;
        let mut candidates = Vec::new();
        for map in &self.maps {
            let side = |name: &str| map.side(name).ok_or_else(|| no_side(map, name));
            match config.model_type().filter(|model_type| !map.is_for(model_type)) {
                Some(_) if self.is_auto => continue,
                Some(model_type) => return Err(other_model(map, model_type, config)),
                None => {}
            }
            let to = match self.to {
                Some(to) if self.is_auto && map.side(to).is_none() => continue,
                to => to.map(side).transpose()?,
            };
            if let Some(encoding) = to.and_then(|to| map.sides[to].decoded.as_deref()) {
                return Err(not_encoded(self.text, map, to, encoding));
            }
            let sources: Vec<usize> = match self.from.map(side).transpose()? {
                Some(from) if Some(from) == to => return Err(same_side(self.text, &map.sides[from].name)),
                Some(from) if !map.is_decoded_from(from, encodings) => {
                    return Err(other_encoding(self.text, map, from));
                }
                Some(from) => vec![from],
                None => {
                    let others = (0..map.sides.len()).filter(|side| Some(*side) != to);
                    to.into_iter().chain(others).filter(|side| map.is_decoded_from(*side, encodings)).collect()
                }
            };
            let sizes = sizes(map, given, config)?;
            candidates.extend(sources.into_iter().map(|from| Candidate {
                map,
                sizes: sizes.clone(),
                from,
                to: to.or((map.sides.len() == 2).then(|| 1 - from)),
                fit: map.fit(from, names.iter().map(String::as_str), &sizes),
                names_type: config.model_type().is_some_and(|of_model| map.model_types().contains(&of_model)),
                is_published: map.sides[from].is_published_in(files),
                is_for_other_type: config.model_type().is_some_and(|of_model| map.sides[from].is_for_other(of_model)),
            }));
        }
        Ok(candidates)
    }

    /// Returns the candidate that fits best if no candidate fits. Applying its map gives the error about the first name that no row
    /// matches.
    ///
    /// # Errors
    /// `Usage` if the nearest candidate has no names of SRC, or if SRC has the names of another side than FROM.
    fn nearest(&self, candidates: &[Candidate<'_>], known: &KnownSource<'_>) -> Result<Chosen> {
        let KnownSource { names, config, .. } = *known;
        let others = candidates.iter().rev().filter(|candidate| !candidate.is_converted());
        let Some(nearest) = others.max_by_key(|candidate| candidate.fit.named).filter(|_| !self.is_auto) else {
            return Err(nothing_fits(self.text, names));
        };
        let Candidate { map, sizes, .. } = nearest;
        let fits = |side: &usize| map.matches_all(*side, names, sizes).is_some();
        match (0..map.sides.len()).find(fits) {
            Some(side) if nearest.to == Some(side) => {
                Err(already_converted(self.text, &format!("{}:{}", map.family, map.sides[side].name)))
            }
            Some(side) if self.from.is_some() => Err(other_side(self.text, nearest, &map.sides[side].name)),
            _ if nearest.fit.named == 0 => Err(nothing_fits(self.text, names)),
            _ => nearest.chosen(self.text, config),
        }
    }
}

/// Returns the error about a side to convert to that only decoded tensors have.
fn not_encoded(text: &str, map: &WeightMap, to: Option<usize>, encoding: &str) -> Error {
    let names: Vec<&str> = map.sides.iter().filter(|side| side.decoded.is_none()).map(|side| &*side.name).collect();
    let side = to.map_or("", |to| &map.sides[to].name);
    Error::usage(
        format!("options::map {text}: the side {side} describes decoded {encoding} weights, which no format stores"),
        format!("convert to one of {}", names.join(", ")),
    )
}

/// Returns the error about a side of SRC that describes decoded weights although SRC is not decoded, or stored weights
/// although SRC is decoded.
fn other_encoding(text: &str, map: &WeightMap, from: usize) -> Error {
    let side = &map.sides[from];
    let (problem, hint) = match &side.decoded {
        Some(encoding) => (
            format!(
                "the side {} describes decoded {encoding} weights, but the weights of SRC are not decoded",
                side.name
            ),
            "decode SRC with options::dequantize, or name another side of SRC",
        ),
        None => (
            format!(
                "the side {} describes stored weights, but options::dequantize decodes the weights of SRC",
                side.name
            ),
            "omit the side of SRC: dtshard finds the side that describes the decoded weights",
        ),
    };
    Error::usage(format!("options::map {text}: {problem}"), hint)
}

/// Returns the maps of all built-in families.
///
/// # Errors
/// Only if a built-in map is damaged, which a test excludes.
pub fn built_in_maps() -> Result<Vec<WeightMap>> {
    families().iter().map(|family| family.map().map_err(|error| LayoutError::from(error).into())).collect()
}

/// Returns the maps of a name: all families for `auto`, a family, or a file. Returns `None` if there is no such map.
fn maps_named(name: &str) -> Result<Option<Vec<WeightMap>>> {
    if name == AUTO { built_in_maps().map(Some) } else { Ok(map_named(name)?.map(|map| vec![map])) }
}

/// Returns the map of a built-in family or a file. Returns `None` if there is no such map.
///
/// # Errors
/// `Layout` for a file that is not a map; `Io`.
pub fn map_named(name: &str) -> Result<Option<WeightMap>> {
    if let Some(family) = families().iter().find(|family| family.name == name) {
        return Ok(Some(family.map().map_err(LayoutError::from)?));
    }
    let path = Path::new(name);
    if !lookup::is_file(path)? {
        return Ok(None);
    }
    if regular_file(path)?.len() > crate::document::MAX_BYTES {
        return Err(Error::usage(format!("map {name}: the file is too large for a map"), "give a map file"));
    }
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    Ok(Some(WeightMap::parse(name, &text).map_err(LayoutError::from)?))
}

fn other_model(map: &WeightMap, model_type: &str, config: &Configuration) -> Error {
    Error::usage(
        format!(
            "the map {} is for models of the type {}, found the model_type {model_type} in {}",
            map.family,
            map.model_types().join(", "),
            config.name()
        ),
        "choose the map of this model; `dtshard maps SRC` lists the maps that fit. If the conventions are the same, add the type to a \
         copy of the map file",
    )
}

fn no_side(map: &WeightMap, name: &str) -> Error {
    Error::usage(
        format!("the map {} has no side `{name}`", map.family),
        format!("the sides are {}", map.side_names().join(", ")),
    )
}

fn same_side(text: &str, side: &str) -> Error {
    Error::usage(
        format!("options::map {text}: the side of SRC and the side to convert to are both {side}"),
        "choose two sides; `dtshard maps` lists them",
    )
}

fn other_side(text: &str, nearest: &Candidate<'_>, found: &str) -> Error {
    let WeightMap { family, reference, .. } = nearest.map;
    let to = nearest.to.map_or("TO", |to| &nearest.map.sides[to].name);
    Error::usage(
        format!(
            "options::map {text}: SRC does not have the names of {}, but those of {family}:{found}",
            nearest.name()
        ),
        format!("name the side of SRC: options::map {reference}:{found}:{to}"),
    )
}

fn no_target(text: &str, candidate: &Candidate<'_>) -> Error {
    let WeightMap { family, reference, .. } = candidate.map;
    let side = &candidate.map.sides[candidate.from].name;
    Error::usage(
        format!("options::map {text}: SRC fits the side {side} of {family}, and the side to convert to is not given"),
        format!("give options::map {reference}:TO, where TO is one of {}", candidate.map.side_names().join(", ")),
    )
}

fn ambiguous(text: &str, candidates: &[&Candidate<'_>]) -> Error {
    let names: Vec<String> = candidates.iter().map(|candidate| candidate.name()).collect();
    let (last, others) = names.split_last().map_or(("", &[][..]), |(last, others)| (last.as_str(), others));
    let example = candidates.iter().find(|candidate| !candidate.is_converted());
    let example = example.map_or_else(String::new, |candidate| candidate.option());
    Error::usage(
        format!("options::map {text}: the names of SRC fit {} and {last} equally well", others.join(", ")),
        format!("name the side of SRC, for example options::map {example}"),
    )
}

fn already_converted(text: &str, side: &str) -> Error {
    Error::usage(
        format!("options::map {text}: SRC already has the names of {side}"),
        "leave options::map out, or choose another side to convert to",
    )
}

fn nothing_fits(text: &str, names: &[String]) -> Error {
    let first = names.first().map_or("none", String::as_str);
    Error::usage(
        format!("options::map {text}: no side fits the names of the model; the first name is {first}"),
        "`dtshard maps SRC` shows how well each map fits",
    )
}

/// Returns the error about a map in a run whose processes exchange data.
pub fn not_between_processes(args: &MapOptions) -> Error {
    let option = if args.map.is_some() { "options::map" } else { "options::dequantize" };
    Error::unsupported(
        format!(
            "{option} cannot be used with options::backend and options::source, because views of chunks and computed values \
             cannot be exchanged yet"
        ),
        "leave options::backend and options::source out: several processes then divide the work, and each reads SRC",
    )
}

/// Checks that the tensors of which a map makes one tensor, such as the steps of joined parameters, are equal, and that copies are.
///
/// # Errors
/// `Usage` with the names of two tensors that differ; errors of reading.
pub fn check_joined(checkpoint: &Checkpoint, map: &AppliedMap, run: &Run<'_>) -> Result<()> {
    let difference = |pair: [TensorId; 2]| -> Result<_> {
        let [one, two] = pair.map(|id| checkpoint.catalog.tensor(id));
        let found = source_checks::difference(checkpoint, pair, one.dtype, run)?;
        Ok(found.map(|detail| (&one.fqn, &two.fqn, detail)))
    };
    for pair in &map.copies {
        if let Some((one, two, detail)) = difference(*pair)? {
            return Err(Error::usage(
                format!("{one}: {two} differs from the first copy: {detail}"),
                "the copies of SRC must be equal; convert from a checkpoint of another side",
            ));
        }
    }
    for group in &map.equal {
        for other in &group[1..] {
            if let Some((one, two, _)) = difference([group[0], *other])? {
                return Err(Error::usage(
                    format!("{one} and {two} differ, and the map joins them"),
                    "leave the optimizer out with options::exclude",
                ));
            }
        }
    }
    Ok(())
}
