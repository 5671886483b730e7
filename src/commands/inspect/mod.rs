//! `inspect`: what a checkpoint holds and how it is laid out.
//!
//! One document for programs; for people a summary, then a table, or for single tensors their chunks or a drawing.

mod document;
mod draw;
mod layout;
mod summary;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::path::Path;

use super::memory::{Pace, start_threads, work_options};
use super::printer::{Printer, Span, harmless};
use super::progress::Progress;
use super::source::announce;
use super::told::told;
use super::verify::has_no_value;
use super::{Status, check_flat, check_series, input, read_options};
use crate::cli::Inspect;
pub use document::object_document;
use draw::{Holder, Room};
use dtshard::catalog::{Catalog, Chunk, Fqn, Place, TensorEntry, TensorId, model};
use dtshard::error::{Error, Result};
use dtshard::exec::{Stop, compare};
use dtshard::format::{Checkpoint, SeriesChoice, Want};
use dtshard::layout::Pattern;
use dtshard::nearest::nearest;

/// What is shown: tensors under every name they have, in the order of the state dict, and digests where asked for.
struct View<'a> {
    checkpoint: &'a Checkpoint,
    names: Vec<(Fqn, TensorId)>,
    digests: BTreeMap<TensorId, String>,
}

pub fn run(args: &Inspect, printer: &Printer) -> Result<Status> {
    if args.draw && printer.json() {
        return Err(Error::usage(
            "--draw draws for people, --json is for programs",
            "leave one of them out; the chunks in the JSON document say the same as the drawing",
        ));
    }
    if !args.digest {
        start_threads(std::thread::available_parallelism().map_or(1, NonZero::get));
    }
    let mut options = read_options(&args.source, args.shapes.like.as_deref(), SeriesChoice::All, Want::State);
    options.flat.raw = !args.layout;
    options.show_incomplete = true;
    options.told = told(&args.source.told, false)?;
    let checkpoint = Checkpoint::open(&args.src, &options)?;
    check_series(&args.source, &[&checkpoint])?;
    check_flat(&args.source, args.shapes.like.as_deref(), &[&checkpoint])?;
    let names = choose(&args.tensor, model_root(&checkpoint.catalog), model::all_tensors(&checkpoint.catalog.state))?;
    let digests = if args.digest { digests(args, &checkpoint, &names, printer)? } else { BTreeMap::new() };
    announce(&checkpoint, printer);
    for conflict in checkpoint.catalog.conflicts() {
        printer.warning(&conflict.to_string());
    }
    if args.layout {
        let document = layout::document(&checkpoint)?;
        printer.data(&layout::toml(&document))?;
        printer.document(&document)?;
        return Ok(Status::Done);
    }
    let view = View { checkpoint: &checkpoint, names, digests };
    if printer.json() {
        printer.document(&document::document(args, &view))?;
    } else if args.tensor.is_empty() {
        printer.data(&summary::summary(args, &view)?)?;
        if !args.brief {
            printer.data(&format!("\n{}", table::tensors(&view)))?;
        }
    } else {
        printer.data(&table::tensors(&view))?;
        if args.draw {
            drawings(&view, printer)?;
        } else if !args.brief {
            printer.data(&table::chunks(&view))?;
        }
    }
    Ok(Status::Done)
}

/// Names may be given as the model has them.
fn model_root(catalog: &Catalog) -> Option<String> {
    Some(model::model_root(&catalog.state)).filter(|root| !root.0.is_empty()).map(|root| root.to_string())
}

/// The tensors that are asked for: those of a name, or else those that a pattern covers; all where nothing is asked.
fn choose(wanted: &[String], model_root: Option<String>, names: Vec<(Fqn, TensorId)>) -> Result<Vec<(Fqn, TensorId)>> {
    if wanted.is_empty() {
        return Ok(names);
    }
    let mut chosen = BTreeSet::new();
    for wanted in wanted {
        let within = model_root.as_ref().map(|root| format!("{root}.{wanted}"));
        let is_it = |name: &Fqn| name.as_str() == wanted || Some(name.as_str()) == within.as_deref();
        let exact = names.iter().position(|(name, _)| is_it(name));
        if let Some(index) = exact {
            chosen.insert(index);
            continue;
        }
        let pattern = Pattern::parse(wanted)?;
        let inner = |name: &'_ str| Some(name.strip_prefix(model_root.as_deref()?)?.strip_prefix('.')?.to_owned());
        let covers = |name: &str| pattern.covers(name) || inner(name).is_some_and(|name| pattern.covers(&name));
        let covered = names.iter().enumerate().filter(|(_, (name, _))| covers(name.as_str()));
        let covered: Vec<usize> = covered.map(|(index, _)| index).collect();
        if covered.is_empty() {
            return Err(unknown(wanted, &names));
        }
        chosen.extend(covered);
    }
    Ok(names.into_iter().enumerate().filter(|(index, _)| chosen.contains(index)).map(|(_, name)| name).collect())
}

fn unknown(wanted: &str, names: &[(Fqn, TensorId)]) -> Error {
    let names: Vec<String> = names.iter().map(|(name, _)| name.to_string()).collect();
    let hint = match nearest(wanted, &names).as_slice() {
        [] => String::from("the checkpoint holds no tensors"),
        nearest => format!("the nearest names are {}", nearest.join(", ")),
    };
    Error::usage(format!("--tensor {wanted}: no tensor has a name like that"), hint)
}

fn digests(
    args: &Inspect,
    checkpoint: &Checkpoint,
    names: &[(Fqn, TensorId)],
    printer: &Printer,
) -> Result<BTreeMap<TensorId, String>> {
    let options = work_options(&args.source, false, Pace::Processor, None)?;
    let stop = Stop::on_signals()?;
    let catalog = &checkpoint.catalog;
    let distinct: BTreeSet<TensorId> = names.iter().map(|(_, id)| *id).collect();
    let entries = distinct.into_iter().map(|id| (id, catalog.tensor(id), catalog.tensor(id).dtype));
    let (reduced, stored): (Vec<_>, Vec<_>) = entries.partition(|(_, entry, _)| entry.summands.is_some());
    let total = reduced.iter().chain(&stored).map(|(_, entry, _)| entry.len_bytes()).sum();
    let progress = Progress::start(printer, "hashing", total);
    let mut digests = compare::digests(input(checkpoint), &stored, &options, &progress, &stop)?;
    for (id, entry, dtype) in reduced {
        match compare::digest(input(checkpoint), entry, dtype, &options, &progress, &stop) {
            Ok(digest) => drop(digests.insert(id, digest)),
            Err(error) if has_no_value(&error, &[entry]) => printer.warning(&format!("no digest: {error}")),
            Err(error) => return Err(error),
        }
    }
    Ok(digests)
}

impl View<'_> {
    /// One digest for all tensors that are shown, the same in every layout and format: BLAKE3 of a line `DIGEST "NAME"`
    /// for each, in the order of names, which are written as in JSON. `None` where a tensor has none.
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

/// The most room a drawing takes.
const ROOM: Room = Room { columns: 100, lines: 24 };

fn drawings(view: &View<'_>, printer: &Printer) -> Result<()> {
    let room = Room { columns: Printer::columns(ROOM.columns), ..ROOM };
    for (name, id) in &view.names {
        let entry = view.checkpoint.catalog.tensor(*id);
        let chunks: Vec<_> =
            entry.chunks.iter().filter_map(|chunk| Some((holder(view, &chunk)?, chunk.tile))).collect();
        let mut lines = vec![vec![], vec![Span { text: heading(view, name.as_str(), entry), ground: None }]];
        lines.extend(draw::draw(&entry.shape, &chunks, room));
        printer.picture(&lines)?;
    }
    Ok(())
}

/// `model.norm.weight: S(0),R on dp=2,tp=2`
fn heading(view: &View<'_>, name: &str, entry: &TensorEntry) -> String {
    match &entry.sharding {
        Some(sharding) => {
            let mesh = view.checkpoint.catalog.mesh(sharding);
            format!("{}: {} on {mesh}", harmless(name), sharding.display_placements())
        }
        None => harmless(name),
    }
}

/// The rank or file of a chunk; an empty one may have neither.
fn holder(view: &View<'_>, chunk: &Chunk) -> Option<Holder> {
    let file = || file_name(view, chunk.place).map(Holder::File);
    chunk.rank.map(Holder::Rank).or_else(file)
}

/// The file of a chunk, relative to the checkpoint.
fn file_name(view: &View<'_>, place: Place) -> Option<String> {
    let path = view.checkpoint.files.path(place.file()?);
    let inside = path.strip_prefix(&view.checkpoint.root).ok().filter(|rest| !rest.as_os_str().is_empty());
    Some(inside.or(path.file_name().map(Path::new)).unwrap_or(path).display().to_string())
}

/// A stored box of a tensor.
struct Part {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    rank: Option<u32>,
    file: Option<String>,
}

/// The boxes of a tensor, chunk by chunk. A local tensor may be several boxes of the whole; an empty one is shown as
/// PyTorch reports it.
fn parts(view: &View<'_>, entry: &TensorEntry) -> impl Iterator<Item = Part> {
    entry.chunks.iter().flat_map(move |chunk| {
        let regions: Vec<_> = if chunk.tile.is_empty() {
            vec![(chunk.tile.global_offsets(&entry.shape), chunk.tile.sizes())]
        } else {
            chunk.tile.regions().map(|(region, _)| (region.offsets, region.sizes)).collect()
        };
        let (rank, file) = (chunk.rank.map(|rank| rank.0), file_name(view, chunk.place));
        let part = move |(offsets, sizes): (dtshard::layout::Dims, dtshard::layout::Dims)| Part {
            offsets: offsets.to_vec(),
            sizes: sizes.to_vec(),
            rank,
            file: file.clone(),
        };
        regions.into_iter().map(part)
    })
}
