//! `consolidate`: the model, merged, to ship.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::config::{self, CONFIG};
use super::conflicts::TargetFiles;
use super::parts::carried_file;
use super::prepared::Prepared;
use super::reading::check_flat;
use super::run::Run;
use super::source::ConversionSource;
use super::target_format::target_format;
use super::whole::{check_tied, elsewhere, names_to_write, placing_like, shape_of, whole_writer};
use crate::catalog::{Dtype, Fqn, TensorId, model, optimizer, path};
use crate::convert::options::{Assets, ConsolidateOptions};
use crate::error::{Error, Result};
use crate::exec::sidecar_files::SidecarFile;
use crate::format::known_files::is_asset;
use crate::format::{Checkpoint, Format, WholeTarget};
use crate::publish::DestinationKind;
use crate::quantity::count;
use crate::storage::lookup;

/// Lays out the destination of `consolidate`.
///
/// # Errors
/// `Usage` if the source has no model, for a format that holds no whole tensors, or options that have no effect.
pub fn prepare(args: &ConsolidateOptions, mut source: ConversionSource, run: &Run<'_>) -> Result<Prepared> {
    let like = args.shards.like.as_deref();
    let destination = args.convert.dst.as_deref();
    let to = target_format(&args.convert.destination, destination, Format::Safetensors)?;
    let placing = placing_like(&args.convert, like, to)?;
    check_flat(&args.convert.source, like.filter(|_| placing.is_none()), &[&source.checkpoint])?;
    source.settle(args.convert.checks, TargetFiles::Together, run)?;
    // Each walks through all of the state dict.
    let state = &source.wanted.catalog.state;
    let (tensors, left_out) = rayon::join(|| model::all_tensors(state), || path::object_names(state));
    check_model(args, &source, &tensors)?;
    let mut notes = source.settled.notes(None);
    let writer = whole_writer("consolidate", to)?;
    check_tied(args.convert.tied, to)?;
    let (written, tied) = names_to_write(&source, tensors, args.convert.tied);
    let dtypes = source.wanted.catalog.dtypes();
    // Names, dtypes and shapes are all that a format needs which does not keep strides.
    if !to.keeps_order() {
        source.forget_wishes();
    }
    let ConversionSource { checkpoint, wanted, .. } = &source;
    notes.extend(elsewhere(placing.as_ref(), &written));
    let mut reservation = writer.reserve(WholeTarget {
        source: if to.keeps_order() { &wanted.catalog } else { &checkpoint.catalog },
        dtypes: &dtypes,
        tensors: &written,
        aliases: &tied,
        destination,
        max_shard_bytes: args.shards.max_shard_size,
        placing,
    })?;
    let shape = shape_of(writer, destination);
    reservation.left_out = left_out;
    let mut carried = Vec::new();
    let no_assets = args.assets == Assets::None;
    if shape == DestinationKind::Folder {
        carried = assets(args, &source.checkpoint)?;
        notes.extend(dtype_note(&carried, &source)?);
        if !carried.iter().any(|file| file.to == Path::new(CONFIG)) && !no_assets {
            notes.push(format!(
                "no {CONFIG} found, which loaders want beside the weights: options::assets DIR copies it"
            ));
        }
    } else if let Assets::From(_) = &args.assets {
        return Err(Error::usage(
            "options::assets: DST is one file, which has no place for them",
            "let DST be a folder, or leave options::assets out",
        ));
    }
    Ok(Prepared { source, reservation, carried, shape, to, tied, notes })
}

/// What is shipped is a model: something, and no optimizer in it that nobody asked for.
fn check_model(args: &ConsolidateOptions, source: &ConversionSource, tensors: &[(Fqn, TensorId)]) -> Result<()> {
    if tensors.is_empty() {
        return Err(Error::usage(
            format!("{} has no model tensors", args.convert.src.display()),
            if args.everything {
                "`dtshard inspect` shows what it holds; consolidate writes tensors only"
            } else {
                "`dtshard inspect` shows what it holds; options::root or options::everything takes something else"
            },
        ));
    }
    let is_float = |(_, id): &(Fqn, TensorId)| source.wanted.catalog.tensor(*id).dtype.is_float();
    if !args.everything && !tensors.iter().any(is_float) {
        return Err(Error::usage(
            format!(
                "{}: none of its {} is of floating point",
                args.convert.src.display(),
                count(tensors.len(), "tensor")
            ),
            "this is no model, but state of something else; options::everything takes it all the same",
        ));
    }
    let select = &args.convert.select;
    let asked = args.everything || select.root.is_some() || !select.include.is_empty() || select.include_from.is_some();
    match tensors.par_iter().find_first(|(fqn, _)| optimizer::reads_as_optimizer_state(fqn.as_str())) {
        Some((fqn, _)) if !asked => Err(Error::usage(
            format!("{fqn}: reads as state of an optimizer, but the file does not record where the model ends"),
            "say what the model is with options::root PATH (names below model: options::root model) or options::include, or take options::everything",
        )),
        _ => Ok(()),
    }
}

/// Loaders go by the dtype that the configuration names, whatever the weights are.
///
/// # Errors
/// `Io` where the configuration cannot be read.
fn dtype_note(carried: &[SidecarFile], source: &ConversionSource) -> Result<Option<String>> {
    let found = carried.iter().find(|file| file.to == Path::new(CONFIG));
    let Some(found) = found.filter(|file| file.len < config::MAX_BYTES) else { return Ok(None) };
    let text = std::fs::read(&found.read_path).map_err(Error::io("read", &found.from))?;
    Ok(serde_json::from_slice(&text).ok().and_then(|config| differing_dtype(&config, source)))
}

fn differing_dtype(config: &serde_json::Value, source: &ConversionSource) -> Option<String> {
    let named = ["dtype", "torch_dtype"].iter().find_map(|key| config.get(key)?.as_str())?;
    let named = Dtype::from_name(named)?;
    let cast = source.wanted.casts.cast.iter().find(|(_, to, _)| *to != named);
    cast.map(|(_, to, _)| {
        format!(
            "{CONFIG} says {}, which loaders go by, and the weights are cast to {to}: change its dtype, or load with \
             dtype=torch.{}",
            named.torch_name(),
            to.torch_name()
        )
    })
}

/// The files that make a folder of weights a model: those of `--assets`, else of the source's folder, of `huggingface`
/// in it, and of the folders above up to the one that was given.
fn assets(args: &ConsolidateOptions, checkpoint: &Checkpoint) -> Result<Vec<SidecarFile>> {
    let folders = match &args.assets {
        Assets::None => return Ok(Vec::new()),
        Assets::From(folder) if !lookup::is_folder(folder)? => {
            return Err(Error::usage(
                format!("options::assets {}: no such folder", folder.display()),
                "give the folder that has config.json, or none",
            ));
        }
        Assets::From(folder) => vec![folder.clone()],
        Assets::Found => config::folders(checkpoint)?,
    };
    let mut found: BTreeMap<PathBuf, SidecarFile> = BTreeMap::new();
    for folder in folders {
        for name in [PathBuf::new(), PathBuf::from("additional_chat_templates")] {
            let within = folder.join(&name);
            if !lookup::is_folder(&within)? {
                continue;
            }
            for entry in lookup::list(&within)? {
                let to = name.join(&entry.name);
                if is_asset(&to) && !found.contains_key(&to) && entry.is_file()? {
                    found.insert(to.clone(), carried_file(checkpoint, entry.path, to)?);
                }
            }
        }
    }
    Ok(found.into_values().collect())
}
