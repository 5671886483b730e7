//! Descriptions of a checkpoint's contents and layout, for `inspect`.
//!
//! Programs read one JSON document. People read a summary and a table of all tensors, or, for single tensors, tables of
//! chunks or drawings.

mod document;
mod draw;
mod groups;
mod layout;
mod maps;
pub(crate) mod report;
mod summary;
mod table;

pub use maps::{MapListing, is_map_file, map_file};

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::catalog::{Catalog, Chunk, FileLocation, Fqn, TensorEntry, TensorId, Unreadable, state_dict};
use crate::convert::{InspectOptions, Run, input};
use crate::error::{Error, Result};
use crate::exec::compare;
use crate::format::Checkpoint;
use crate::layout::Pattern;
use crate::nearest::nearest;
use crate::progress::Task;
use crate::text::escape_invisible;
pub use document::object_document;
use draw::{ChunkHolder, PictureSize};

/// The description of a checkpoint: the tensors to describe, under every name of each tensor, in the order of the state
/// dict. If the user asked for digests, the description also has the digest of each tensor that can be read.
pub struct Inspection<'a> {
    checkpoint: &'a Checkpoint,
    /// The weight map that was applied to the checkpoint, as a JSON document.
    map: Option<&'a serde_json::Value>,
    args: &'a InspectOptions,
    names: Vec<(Fqn, TensorId)>,
    /// The objects that cannot be read, because their classes are unknown.
    unreadable_objects: Vec<(Fqn, TensorId)>,
    digests: BTreeMap<TensorId, String>,
}

impl<'a> Inspection<'a> {
    /// Selects the tensors to show, and computes their digests if the user asked for digests.
    ///
    /// # Errors
    /// `Usage` for a name that no tensor has; errors of reading tensors if digests are asked for.
    pub fn new(
        checkpoint: &'a Checkpoint,
        map: Option<&'a serde_json::Value>,
        args: &'a InspectOptions,
        run: &Run<'_>,
    ) -> Result<Self> {
        // A declaration that does not fit is an error of the user, whatever else the checkpoint contains.
        let unreadable =
            checkpoint.catalog.tensors.iter().filter_map(|entry| Some((entry, entry.unreadable.as_ref()?)));
        let is_declared = !checkpoint.catalog.plain_may_be_parts;
        let is_misfit = |why: &Unreadable| why.is_misfit() || is_declared && why.is_of_unknown_layout();
        if let Some((entry, why)) = { unreadable }.find(|(_, why)| is_misfit(why)) {
            return Err(why.error(entry.fqn.as_str()));
        }
        if checkpoint.has_undeclared_shards() {
            run.progress.note(
                "the names of the files show that the tensors may be shards, and the files do not record the layout: name the side of \
                 a weight map that has the layout, such as options::map llama:meta:hf, or declare the layout with \
                 options::src_mesh and options::src_placements",
            );
        } else if checkpoint.catalog.is_layout_unknown() {
            run.progress.note(
                "the files do not record how ranks have cut the tensors: declare it with options::src_mesh and \
                 options::src_placements",
            );
        }
        let is_object = |(_, id): &(Fqn, TensorId)| checkpoint.catalog.tensor(*id).is_unreadable_object();
        let (unreadable_objects, names) =
            state_dict::all_tensors(&checkpoint.catalog.state).into_iter().partition(is_object);
        let names = choose(&args.tensor, model_root(&checkpoint.catalog), names)?;
        let digests = if args.digest { digests(checkpoint, &names, run)? } else { BTreeMap::new() };
        Ok(Self { checkpoint, map, args, names, unreadable_objects, digests })
    }

    /// Makes the description of all tensors of a checkpoint, without digests.
    pub(crate) fn complete(checkpoint: &'a Checkpoint, args: &'a InspectOptions) -> Self {
        let is_object = |(_, id): &(Fqn, TensorId)| checkpoint.catalog.tensor(*id).is_unreadable_object();
        let (unreadable_objects, names) =
            state_dict::all_tensors(&checkpoint.catalog.state).into_iter().partition(is_object);
        Self { checkpoint, map: None, args, names, unreadable_objects, digests: BTreeMap::new() }
    }

    /// Returns the summary of the checkpoint, with one line for each fact: format, parameters, step, meshes, dtypes,
    /// series and others.
    ///
    /// # Errors
    /// `Io` if the tensor that holds the training step cannot be read.
    pub fn summary(&self) -> Result<String> {
        summary::summary(self)
    }

    /// Returns the table of tensors: name, dtype, shape, placements, and the number of chunks or the digest. Equal tensors
    /// whose names differ only in numbers share a line, unless [`InspectOptions::all`] is set.
    #[must_use]
    pub fn tensor_table(&self) -> String {
        table::tensors(self)
    }

    /// Returns the chunks of each tensor, as a table for each.
    #[must_use]
    pub fn chunk_tables(&self) -> String {
        table::chunks(self)
    }

    /// Draws the boxes of each tensor, with the rank or file that stores each box. The drawings are at most `columns`
    /// characters wide.
    #[must_use]
    pub fn drawings(&self, columns: usize) -> Vec<Vec<Span>> {
        drawings(self, columns)
    }

    /// Returns a report to look at: an HTML page in one file, which loads nothing from a network and runs no scripts.
    /// [`html_frame`](crate::html_frame) makes the page a part of another page.
    ///
    /// # Errors
    /// `Io` if the tensor that holds the training step cannot be read.
    pub fn to_html(&self) -> Result<String> {
        Ok(report::page(self)?.document())
    }

    /// Returns the description of the checkpoint as a JSON document.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        document::document(self)
    }
}

/// A piece of a line of a drawing: text with one background colour, or without background colour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The text, which may contain any characters.
    pub text: String,
    /// The background colour, as a number of the 256-colour palette of terminals. `None` if the text has no background
    /// colour.
    pub ground: Option<u8>,
}

/// Returns the layout of a checkpoint as a layout file: a JSON document, and this document converted to TOML.
///
/// # Errors
/// `Unsupported` if the files do not record a layout, or record more than one.
pub fn layout(checkpoint: &Checkpoint) -> Result<(serde_json::Value, String)> {
    let document = layout::document(checkpoint)?;
    let text = layout::toml(&document);
    Ok((document, text))
}

/// Returns the path of the model in the state dict, or `None` if the model is the whole state dict. Users may omit this
/// path in the names of tensors.
fn model_root(catalog: &Catalog) -> Option<String> {
    Some(state_dict::model_root(&catalog.state)).filter(|root| !root.0.is_empty()).map(|root| root.to_string())
}

/// Returns the tensors that `requested` selects. Each entry of `requested` is an exact name, or a pattern if no tensor
/// has that name. If `requested` is empty, all tensors are returned.
fn choose(
    requested: &[String],
    model_root: Option<String>,
    names: Vec<(Fqn, TensorId)>,
) -> Result<Vec<(Fqn, TensorId)>> {
    if requested.is_empty() {
        return Ok(names);
    }
    let mut chosen = BTreeSet::new();
    for requested in requested {
        let within = model_root.as_ref().map(|root| format!("{root}.{requested}"));
        let is_it = |name: &Fqn| name.as_str() == requested || Some(name.as_str()) == within.as_deref();
        let exact = names.iter().position(|(name, _)| is_it(name));
        if let Some(index) = exact {
            chosen.insert(index);
            continue;
        }
        let pattern = Pattern::parse(requested)?;
        let inner = |name: &'_ str| Some(name.strip_prefix(model_root.as_deref()?)?.strip_prefix('.')?.to_owned());
        let covers = |name: &str| pattern.covers(name) || inner(name).is_some_and(|name| pattern.covers(&name));
        let covered = names.iter().enumerate().filter(|(_, (name, _))| covers(name.as_str()));
        let covered: Vec<usize> = covered.map(|(index, _)| index).collect();
        if covered.is_empty() {
            return Err(unknown(requested, &names));
        }
        chosen.extend(covered);
    }
    Ok(names.into_iter().enumerate().filter(|(index, _)| chosen.contains(index)).map(|(_, name)| name).collect())
}

fn unknown(requested: &str, names: &[(Fqn, TensorId)]) -> Error {
    let names: Vec<String> = names.iter().map(|(name, _)| name.to_string()).collect();
    let hint = match nearest(requested, &names).as_slice() {
        [] => String::from("the checkpoint has no tensors"),
        nearest => format!("the nearest names are {}", nearest.join(", ")),
    };
    Error::usage(format!("options::tensor {requested}: no tensor name matches"), hint)
}

fn digests(checkpoint: &Checkpoint, names: &[(Fqn, TensorId)], run: &Run<'_>) -> Result<BTreeMap<TensorId, String>> {
    let (options, stop) = (&run.options, &run.stop);
    let catalog = &checkpoint.catalog;
    let distinct: BTreeSet<TensorId> = names.iter().map(|(_, id)| *id).collect();
    let entries = distinct.into_iter().map(|id| (id, catalog.tensor(id), catalog.tensor(id).dtype));
    let entries = entries.filter(|(_, entry, _)| entry.unreadable.is_none());
    let (reduced, stored): (Vec<_>, Vec<_>) = entries.partition(|(_, entry, _)| entry.partial_values.is_some());
    let total = reduced.iter().chain(&stored).map(|(_, entry, _)| entry.len_bytes()).sum();
    let task = Task::start(run.progress, "hashing", total);
    let mut digests = compare::digests(input(checkpoint), &stored, options, &task, stop)?;
    for (id, entry, dtype) in reduced {
        match compare::digest(input(checkpoint), entry, dtype, options, &task, stop) {
            Ok(digest) => drop(digests.insert(id, digest)),
            Err(error) if compare::has_no_value(&error, &[entry]) => {
                run.progress.warning(&format!("cannot compute a digest: {error}"));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(digests)
}

impl Inspection<'_> {
    /// Returns one digest for all tensors shown. Returns `None` if one of them has no digest, or if the user asked for
    /// no digests. The digest is a BLAKE3 hash of one line `DIGEST "NAME"` for each tensor. The lines are sorted by
    /// name, and names are quoted as in JSON. So the digest depends neither on the layout nor on the format of the
    /// checkpoint.
    fn digest(&self) -> Option<String> {
        let mut listed: Vec<(&str, &String)> =
            self.names.iter().map(|(name, id)| Some((name.as_str(), self.digests.get(id)?))).collect::<Option<_>>()?;
        listed.sort_unstable();
        let mut hasher = blake3::Hasher::new();
        for (name, digest) in listed {
            hasher.update(format!("{digest} {}\n", serde_json::Value::from(name)).as_bytes());
        }
        (!self.digests.is_empty()).then(|| format!("blake3:{}", hasher.finalize().to_hex()))
    }
}

/// The maximum height of a picture, in lines of text. The legend of the picture is not counted.
const LINES: usize = 24;

fn drawings(view: &Inspection<'_>, columns: usize) -> Vec<Vec<Span>> {
    let mut drawn = Vec::new();
    for (name, id) in &view.names {
        let entry = view.checkpoint.catalog.tensor(*id);
        if entry.unreadable.is_some() {
            continue;
        }
        let chunks: Vec<_> =
            entry.chunks.iter().filter_map(|chunk| Some((holder(view, &chunk)?, chunk.tile))).collect();
        drawn.extend([vec![], vec![Span { text: heading(view, name.as_str(), entry), ground: None }]]);
        drawn.extend(draw::draw(&entry.shape, &chunks, PictureSize { columns, lines: LINES }));
    }
    drawn
}

/// Returns the heading of a drawing: `model.norm.weight: S(0),R on dp=2,tp=2`.
fn heading(view: &Inspection<'_>, name: &str, entry: &TensorEntry) -> String {
    match &entry.sharding {
        Some(sharding) => {
            let mesh = view.checkpoint.catalog.mesh(sharding);
            format!("{}: {} on {mesh}", escape_invisible(name), sharding.display_placements())
        }
        None => escape_invisible(name),
    }
}

/// Returns the holder of a chunk: its rank, or its file if the rank is unknown. An empty chunk may have neither.
fn holder(view: &Inspection<'_>, chunk: &Chunk) -> Option<ChunkHolder> {
    let file = || file_name(view, chunk.location).map(ChunkHolder::File);
    chunk.rank.map(ChunkHolder::Rank).or_else(file)
}

/// Returns the path of a chunk's file relative to the checkpoint, or `None` if the chunk is in no file.
fn file_name(view: &Inspection<'_>, place: FileLocation) -> Option<String> {
    let path = view.checkpoint.files.path(place.file()?);
    let inside = path.strip_prefix(&view.checkpoint.root).ok().filter(|rest| !rest.as_os_str().is_empty());
    Some(inside.or(path.file_name().map(Path::new)).unwrap_or(path).display().to_string())
}

/// A box of a tensor that is stored in one file. Offsets and sizes are in elements.
struct StoredBox {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    rank: Option<u32>,
    file: Option<String>,
}

/// Returns the stored boxes of a tensor, chunk by chunk. The local tensor of one rank may consist of several boxes of
/// the global tensor. An empty local tensor is one box with the offsets that PyTorch reports.
fn parts(view: &Inspection<'_>, entry: &TensorEntry) -> impl Iterator<Item = StoredBox> {
    entry.chunks.iter().flat_map(move |chunk| {
        let regions: Vec<_> = if chunk.tile.is_empty() {
            vec![(chunk.tile.global_offsets(&entry.shape), chunk.tile.sizes())]
        } else {
            chunk.tile.regions().map(|(region, _)| (region.offsets, region.sizes)).collect()
        };
        let (rank, file) = (chunk.rank.map(|rank| rank.0), file_name(view, chunk.location));
        let part = move |(offsets, sizes): (crate::layout::Dims, crate::layout::Dims)| StoredBox {
            offsets: offsets.to_vec(),
            sizes: sizes.to_vec(),
            rank,
            file: file.clone(),
        };
        regions.into_iter().map(part)
    })
}
