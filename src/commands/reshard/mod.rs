//! `reshard`: another mesh, other placements; everything is carried.

mod chooser;
mod flat;
mod like;
mod sharded;
mod target;

use std::path::PathBuf;

use regex::bytes::Regex;

use super::Status;
use super::conflicts::Ranks;
use super::consolidate::check_tied;
use super::convert::{Conversion, convert, not_written, target_format};
use super::printer::Printer;
use super::run::Run;
use super::source::{Defaults, Source};
use crate::catalog::path::key_text;
use crate::catalog::{Catalog, Class, Dict, Key, OutputFile, Path, Reservation, Value};
use crate::cli::Reshard;
use crate::error::{Error, Result};
use crate::exec::carry::Carried;
use crate::exec::staging::Shape;
use crate::format::{Checkpoint, Content, Format, Part, RankName, RankNames, SeriesChoice, Want, dcp, torch};
use crate::layout::DeviceMesh;
use crate::layout::target::TargetLayout;
use crate::quantity::human_bytes;
use crate::select::{Root, Wrappers};
use chooser::{Chooser, tensor_class};
use like::Like;
pub use target::own_mesh;
use target::target_layout;

pub fn run(args: &Reshard, printer: &Printer) -> Result<Status> {
    let run = Run::begin(&args.convert.source, !args.convert.destination.no_sync, printer)?;
    let defaults = Defaults {
        want: Want::All,
        series: SeriesChoice::All,
        root: Root::Whole,
        wrappers: Wrappers::Match,
        without_gradients: false,
    };
    let source = Source::open(&args.convert, args.like.as_deref(), defaults, &run)?;
    let mut source = source.with(args.fill_from.as_deref(), args.like.as_deref(), &args.convert, &run)?;
    let destination = args.convert.dst.as_deref();
    let to = target_format(&args.convert.destination, destination, default_format(example_of(&source).format))?;
    let ranks = match to {
        Format::Dcp => Ranks::Together,
        Format::TorchRanks => Ranks::Apart,
        Format::FsdpFlat => return flat::run(args, &mut source, &run),
        Format::DcpHf => return Err(not_written(to)),
        _ => {
            return Err(Error::usage(
                format!("{to} holds whole tensors, which have no mesh"),
                "--to dcp and --to torch-ranks write shards; `dtshard unshard` and `dtshard consolidate` write whole \
                 tensors",
            ));
        }
    };
    check_tied(args.convert.tied, to)?;
    let of_flat = (source.checkpoint.format == Format::FsdpFlat).then_some(Class::DTensor);
    let class = tensor_class(args.tensor_class, to)?.or(of_flat);
    source.settle(args.convert.checks, ranks, &run)?;
    let layout = target_layout(args, &source)?;
    let world_size = ranks_of(&layout.mesh);
    let mut notes = source.settled.notes((to == Format::TorchRanks).then_some(world_size));
    let renamed = renamed_dims(&source.wanted.catalog, &layout.mesh);
    notes.extend(renamed.filter(|_| to == Format::TorchRanks && source.like.is_none()));
    let wrappers = if args.convert.select.keep_names { Wrappers::Keep } else { Wrappers::Match };
    check_room(&source, &layout.mesh, class, to, args.convert.source.max_memory.0)?;
    let (mut reservation, more) = reserve(&source, &layout, wrappers, class, to)?;
    notes.extend(more);
    let carried = carry_along(&source, to, world_size, &mut reservation)?;
    let conversion =
        Conversion { source: &source, reservation, carried, shape: Shape::Folder, to, tied: Vec::new(), notes };
    convert(&conversion, &args.convert, &run)
}

/// Lay out every part of the source by itself, and say what there is to say about the layout.
fn reserve(
    source: &Source,
    layout: &TargetLayout,
    wrappers: Wrappers,
    class: Option<Class>,
    to: Format,
) -> Result<(Reservation, Vec<String>)> {
    let wanted = &source.wanted.catalog;
    let world_size = ranks_of(&layout.mesh);
    let style = style(source)?;
    let like = source.like.as_ref().map(|like| Like::new(like, wrappers));
    let mut chooser = Chooser::new(wanted, layout, wrappers, class).like(like);
    let mut whole = Reservation::default();
    for part in parts(source, to) {
        let full = |path: &Path| Path(part.at.0.iter().chain(&path.0).cloned().collect());
        let reservation = match &part.names {
            None => dcp::reserve(wanted, &part.state, &mut |_, path, entry| chooser.shards(&full(path), entry))?,
            Some(names) => torch::reserve_ranks(
                wanted,
                &part.state,
                torch::RankTarget {
                    mesh: &layout.mesh,
                    style: &style,
                    name: &|rank| PathBuf::from(names.render(rank.0, world_size)),
                    layout: &mut |_, path, entry| chooser.rank_layout(&full(path), entry),
                },
            )?,
        };
        whole.append(&part.folder, reservation);
    }
    Ok((whole, chooser.finish()?))
}

/// The checkpoint whose format, and forms of it, are those of the result.
fn example_of(source: &Source) -> &Checkpoint {
    source.like.as_ref().unwrap_or(&source.checkpoint)
}

/// Rank files are written for the PyTorch, and with the device, of the rank files they come from.
pub fn style(source: &Source) -> Result<torch::Style> {
    let Checkpoint { files, format, .. } = example_of(source);
    let first = files.ids().next().filter(|_| *format == Format::TorchRanks);
    let known = first.map(|first| torch::Style::of_file(files, first)).transpose()?;
    Ok(known.flatten().unwrap_or_default())
}

/// A job takes DTensors on a mesh whose dims are called as those of its own.
fn renamed_dims(source: &Catalog, mesh: &DeviceMesh) -> Option<String> {
    let (own, new) = (source.meshes.first()?.names()?, mesh.names()?);
    let none_in_common = !own.iter().any(|name| new.contains(name));
    none_in_common.then(|| {
        let (own, new) = (own.join(","), new.join(","));
        format!("mesh dims are called {new} now, {own} in SRC: a job loads what is called as in the job")
    })
}

/// Every rank's file names every tensor, and all of that is laid out before the first byte is written.
fn check_room(source: &Source, mesh: &DeviceMesh, class: Option<Class>, to: Format, max_memory: u64) -> Result<()> {
    /// What the pickle of a DTensor takes at the least, as far as it is not that of other ranks.
    const TENSOR_BYTES: u64 = 128;
    /// What a ShardedTensor says of a rank: kept once, and in the pickle that is being made.
    const BOX_BYTES: u64 = 2 * 40;
    /// Every file lists the ranks of the mesh, as a tensor and as a tuple.
    const RANK_BYTES: u64 = 16;
    let (ranks, named) = (mesh.world_size() as u64, source.tensors());
    let boxes = named.iter().map(|(_, id)| {
        let entry = source.wanted.catalog.tensor(*id);
        let is_sharded = class.unwrap_or(entry.class) == Class::ShardedTensor;
        entry.shape.first().filter(|_| is_sharded).map_or(0, |rows| ranks.min(*rows))
    });
    let boxes = boxes.fold(0, u64::saturating_add);
    let tensors = named.len() as u64;
    let a_file = tensors.saturating_mul(TENSOR_BYTES).saturating_add(ranks.saturating_mul(RANK_BYTES));
    let needed = ranks.saturating_mul(a_file).saturating_add(boxes.saturating_mul(BOX_BYTES));
    if to != Format::TorchRanks || needed <= max_memory {
        return Ok(());
    }
    Err(Error::usage(
        format!(
            "--max-memory: files of {} ranks that name {tensors} tensors each take {} at the least to lay out",
            mesh.world_size(),
            human_bytes(needed)
        ),
        "allow more memory, or write a DCP directory (--to dcp), which names each tensor once",
    ))
}

/// How many ranks a mesh has.
fn ranks_of(mesh: &DeviceMesh) -> u32 {
    u32::try_from(mesh.world_size()).expect("ranks are 32-bit numbers")
}

/// A checkpoint to write: some of the state dict, in a folder of the destination.
pub struct Target {
    pub folder: PathBuf,
    pub state: Value,
    /// Where in the whole state dict it is.
    pub at: Path,
    /// How its rank files are called; a DCP directory has fixed names.
    pub names: Option<RankNames>,
}

/// The state dict divided as it was in the source, as far as the target format divides at all.
pub fn parts(source: &Source, to: Format) -> Vec<Target> {
    let state = &source.wanted.catalog.state;
    let parts = &example_of(source).parts;
    let whole = |names| Target { folder: PathBuf::new(), state: state.clone(), at: Path::default(), names };
    if to.has_rank_files() {
        if let [Part { content: Content::Whole, names: Some(names), .. }] = source.checkpoint.parts.as_slice()
            && *parts == source.checkpoint.parts
        {
            return vec![whole(Some(names.clone()))];
        }
        let known: Vec<(&str, RankNames)> = parts
            .iter()
            .filter_map(|part| match (&part.content, &part.names) {
                (Content::Below(key), Some(names)) => Some((key.as_str(), names.clone())),
                _ => None,
            })
            .collect();
        let names_of = |key: &str| {
            let own = known.iter().find(|(name, _)| *name == key).map(|(_, names)| names.clone());
            own.unwrap_or_else(|| RankNames::new_series(key))
        };
        return match series(state) {
            Some(series) => series
                .into_iter()
                .map(|(key, state)| Target {
                    folder: PathBuf::new(),
                    state: state.clone(),
                    names: Some(names_of(&key)),
                    at: Path(vec![Key::Name(key)]),
                })
                .collect(),
            None => {
                let only = || parts.first().filter(|_| parts.len() == 1).and_then(|part| part.names.clone());
                let model = || source.like.is_some().then(|| names_of("model"));
                vec![whole(only().or_else(model).or_else(|| Some(RankNames::new_series("model"))))]
            }
        };
    }
    folders(source).unwrap_or_else(|| vec![whole(None)])
}

/// A state dict that is a series of rank files each key: nothing but dicts at the top, one of them the model.
///
/// Keys are text from a file, and become file names: one that such a name would not give back (`../model`, or `model_`
/// beside `model`) names no series.
fn series(state: &Value) -> Option<Vec<(Box<str>, &Value)>> {
    let dict = state.as_dict()?;
    let names_series = |key: &str| {
        let file = PathBuf::from(RankNames::new_series(key).render(0, 1));
        RankName::parse(&file).is_some_and(|name| name.series == key)
    };
    let is_series = |(key, value): &(Value, Value)| key.as_str().is_some_and(names_series) && value.as_dict().is_some();
    let has_model = dict.entries.len() > 1 && dict.get("model").is_some();
    (has_model && dict.entries.iter().all(is_series))
        .then(|| dict.entries.iter().map(|(key, value)| (key_text(key), value)).collect())
}

/// A folder each, where the source was several and every entry of the state dict still is one of theirs.
fn folders(source: &Source) -> Option<Vec<Target>> {
    let parts = &source.checkpoint.parts;
    let dict = source.wanted.catalog.state.as_dict()?;
    if parts.len() < 2 {
        return None;
    }
    let mut targets = Vec::new();
    let mut taken = 0;
    for part in parts {
        let Content::Keys(keys) = &part.content else { return None };
        let own = |(key, _): &&(Value, Value)| keys.iter().any(|name| *name == *key_text(key));
        let entries: Vec<_> = dict.entries.iter().filter(own).cloned().collect();
        taken += entries.len();
        if !entries.is_empty() {
            let state = Value::Dict(Dict { entries, ..Dict::default() });
            targets.push(Target { folder: part.folder.clone(), state, at: Path::default(), names: None });
        }
    }
    (taken == dict.entries.len()).then_some(targets)
}

/// The files beside the checkpoint go along. One of them may know the world size.
pub fn carry_along(
    source: &Source,
    to: Format,
    world_size: u32,
    reservation: &mut Reservation,
) -> Result<Vec<Carried>> {
    let root = &source.checkpoint.root;
    let mut carried = Vec::new();
    for to_path in &source.checkpoint.beside {
        let from = root.join(to_path);
        let len = std::fs::metadata(&from).map_err(Error::io("look at", &from))?.len();
        if to.has_rank_files() && to_path.ends_with(FSDP_CONFIG) && len < 1 << 20 {
            let text = std::fs::read(&from).map_err(Error::io("read", &from))?;
            let mut file = OutputFile::new(to_path);
            file.push_literal(with_world_size(&text, world_size));
            reservation.files.push(file);
        } else {
            carried.push(Carried { from, to: to_path.clone(), len });
        }
    }
    Ok(carried)
}

/// Where trainers note how many ranks wrote the files.
const FSDP_CONFIG: &str = "fsdp_config.json";

fn with_world_size(text: &[u8], world_size: u32) -> Vec<u8> {
    let number = Regex::new(r#"("world_size"\s*:\s*)\d+"#).expect("a regular expression");
    number.replace(text, format!("${{1}}{world_size}").as_bytes()).into_owned()
}

/// The source's own format; a single file becomes a DCP directory, since it has no place for shards.
fn default_format(source: Format) -> Format {
    match source {
        Format::TorchRanks => Format::TorchRanks,
        Format::FsdpFlat => Format::FsdpFlat,
        Format::Dcp | Format::Torch | Format::Safetensors | Format::DcpHf => Format::Dcp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_world_size_of_a_config_changes() {
        let text = b"{\n    \"FSDP_version\": 2,\n    \"world_size\": 4\n}";
        assert_eq!(with_world_size(text, 16), b"{\n    \"FSDP_version\": 2,\n    \"world_size\": 16\n}");
        assert_eq!(with_world_size(b"{}", 16), b"{}");
    }

    #[test]
    fn a_series_each_needs_a_model_among_dicts() {
        let dict = |keys: &[&str], value: &Value| {
            let entries = keys.iter().map(|key| (Value::Str((*key).into()), value.clone())).collect();
            Value::Dict(Dict { entries, ..Dict::default() })
        };
        let empty = dict(&[], &Value::None);
        assert_eq!(series(&dict(&["model", "optim"], &empty)).unwrap().len(), 2);
        assert!(series(&dict(&["model"], &empty)).is_none());
        assert!(series(&dict(&["weights", "optim"], &empty)).is_none());
        assert!(series(&dict(&["model", "step"], &Value::Int(1))).is_none());
    }

    #[test]
    fn keys_that_are_no_file_names_are_no_series() {
        let empty = || Value::Dict(Dict::default());
        let with_model = |key: &str| {
            let entries = vec![(Value::Str("model".into()), empty()), (Value::Str(key.into()), empty())];
            Value::Dict(Dict { entries, ..Dict::default() })
        };
        for key in ["extra_state", "ema.0", "a_rank_3", "b_world_size_2"] {
            assert!(series(&with_model(key)).is_some(), "{key}");
        }
        for key in ["../evil", "/tmp/evil", "a/b", "..", ".", "model_", "_model", ".hidden"] {
            assert!(series(&with_model(key)).is_none(), "{key}");
        }
    }
}
