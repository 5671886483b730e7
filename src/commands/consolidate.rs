//! `consolidate`: the model, merged, to ship.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::time::Instant;

use super::convert::{Conversion, convert, file_name, holds_shards, open_source, target_format};
use super::printer::Printer;
use super::{Status, unshard};
use crate::catalog::{Fqn, OutputFile, Reservation, TensorId, Value, model};
use crate::cli::Consolidate;
use crate::error::{Error, Result};
use crate::exec::staging::Shape;
use crate::format::{Format, SeriesChoice, distinct_names, natural_order, safetensors, torch};
use crate::quantity::{Quantity, count};

/// Files that loaders want beside the weights.
const ASSETS: [&str; 16] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "spiece.model",
    "sentencepiece.bpe.model",
];

pub fn run(args: &Consolidate, printer: &Printer) -> Result<Status> {
    let started = Instant::now();
    let checkpoint = open_source(&args.convert, SeriesChoice::Model)?;
    let catalog = &checkpoint.catalog;
    let mut tensors = choose(args, &catalog.state)?;
    if tensors.is_empty() {
        return Err(Error::usage(
            format!("{} has no model tensors", args.convert.src.display()),
            "`dtshard inspect` shows what it holds; --root or --everything takes something else",
        ));
    }
    tensors.sort_by(|(left, _), (right, _)| natural_order(left.as_str(), right.as_str()));
    let destination = args.convert.dst.as_deref();
    let to = target_format(&args.convert.destination, destination, Format::Safetensors);
    let (mut reservation, shape) = match to {
        Format::Safetensors => {
            let (shape, staged) = safetensors_shape(destination, args.shards.max_shard_size);
            (safetensors::reserve(catalog, &tensors, &[], &shape)?, staged)
        }
        Format::Torch => {
            distinct_names(tensors.iter().map(|(fqn, _)| fqn.as_str()), &[])?;
            let state = model::flat_state(&tensors);
            (torch::reserve(catalog, &state, file_name(destination, "pytorch_model.bin"))?, Shape::File)
        }
        Format::Dcp | Format::TorchRanks => return Err(holds_shards("consolidate", to)),
    };
    reservation.left_out = unshard::object_names(&catalog.state);
    let left_out = left_out(&catalog.state, &tensors);
    let mut notes = Vec::new();
    if shape == Shape::Folder {
        add_assets(args, &checkpoint.root, &mut reservation)?;
        let has_config = reservation.files.iter().any(|file| file.path == Path::new(ASSETS[0]));
        if !has_config && args.assets.is_none() {
            notes.push(String::from(
                "no config.json found, which loaders want beside the weights: --assets DIR copies it",
            ));
        }
    }
    let conversion =
        Conversion { started, checkpoint: &checkpoint, reservation, destination, shape, to, left_out, notes };
    convert(conversion, &args.convert, printer)
}

fn choose(args: &Consolidate, state: &Value) -> Result<Vec<(Fqn, TensorId)>> {
    if args.everything {
        return Ok(model::all_tensors(state));
    }
    let Some(root) = &args.root else { return Ok(model::model(state).tensors) };
    let tensors = model::subtree(state, root);
    if tensors.is_empty() {
        return Err(Error::usage(
            format!("--root {root}: there are no tensors under that path"),
            format!("the top of the state dict has {}", top_keys(state)),
        ));
    }
    Ok(tensors)
}

fn top_keys(state: &Value) -> String {
    const SHOWN: usize = 12;
    let keys = state.as_dict().map_or(&[][..], |dict| dict.entries.as_slice());
    let names: Vec<_> = keys.iter().take(SHOWN).map(|(key, _)| crate::catalog::path::key_text(key)).collect();
    let more = if keys.len() > SHOWN { format!(", ... ({} in all)", keys.len()) } else { String::new() };
    names.join(", ") + &more
}

/// What DST is: a file of its own, or a folder.
pub fn safetensors_shape(destination: Option<&Path>, max_shard_size: Quantity) -> (safetensors::Shape, Shape) {
    let is_file = destination.is_some_and(|path| path.extension().is_some_and(|suffix| suffix == "safetensors"));
    if is_file {
        (safetensors::Shape::File(file_name(destination, "model.safetensors")), Shape::File)
    } else {
        (safetensors::Shape::Folder { max_shard_bytes: max_shard_size.0 }, Shape::Folder)
    }
}

/// Tensors of the source that are not taken, by the top of their paths: `54 tensors (optim)`.
fn left_out(state: &Value, taken: &[(Fqn, TensorId)]) -> Vec<String> {
    let taken: HashSet<TensorId> = taken.iter().map(|(_, id)| *id).collect();
    let mut groups: BTreeMap<String, usize> = BTreeMap::new();
    crate::catalog::path::tensors(state, &crate::catalog::Path::default(), &mut |path, id| {
        if !taken.contains(&id) {
            let top = path.0.first().map_or_else(String::new, ToString::to_string);
            *groups.entry(top).or_default() += 1;
        }
    });
    groups.into_iter().map(|(top, number)| format!("{} ({top})", count(number, "tensor"))).collect()
}

/// Copy the small files that make a folder of weights a model.
fn add_assets(args: &Consolidate, source: &Path, reservation: &mut Reservation) -> Result<()> {
    let folders = match &args.assets {
        Some(none) if none.as_os_str() == "none" => return Ok(()),
        Some(folder) if !folder.is_dir() => {
            return Err(Error::usage(
                format!("--assets {}: no such folder", folder.display()),
                "give the folder that has config.json, or none",
            ));
        }
        Some(folder) => vec![folder.clone()],
        None if source.is_dir() => vec![source.join("huggingface"), source.to_path_buf()],
        None => return Ok(()),
    };
    for name in ASSETS {
        let Some(path) = folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file()) else { continue };
        let content = std::fs::read(&path).map_err(Error::io("read", &path))?;
        let mut file = OutputFile::new(name);
        file.push_literal(content);
        reservation.files.push(file);
    }
    Ok(())
}
