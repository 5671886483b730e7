//! The `consolidate` verb: writes the model of a checkpoint as whole tensors, and the files that loaders need in
//! addition, such as `config.json`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::differing_values::TargetFiles;
use super::model_config::{self, CONFIG};
use super::prepared::Prepared;
use super::run::Run;
use super::source::ConversionSource;
use super::source_options::check_flat;
use super::target_format::target_format;
use super::target_parts::{carried_file, warn_of_empty};
use super::whole::{check_tied, elsewhere, names_to_write, placing_like, shape_of, whole_writer};
use crate::catalog::{Dtype, Fqn, TensorId, optimizer, path, state_dict};
use crate::convert::options::{Assets, ConsolidateOptions, ConvertOptions, MapOptions};
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
/// `Usage` if the source has no model, if the format cannot store whole tensors, or if an option has no effect.
pub fn prepare(
    args: &ConsolidateOptions,
    convert: &ConvertOptions,
    mut source: ConversionSource,
    run: &Run<'_>,
) -> Result<Prepared> {
    let like = args.shards.like.as_deref();
    let destination = convert.dst.as_deref();
    let to = target_format(&convert.destination, destination, Format::Safetensors)?;
    let placing = placing_like(convert, like, to)?;
    check_flat(&convert.source, like.filter(|_| placing.is_none()), &[&source.checkpoint])?;
    source.resolve_conflicts(convert.checks, TargetFiles::Together, run)?;
    // Both functions traverse the whole state dict, so they run in parallel.
    let state = &source.selection.catalog.state;
    let (tensors, left_out) = rayon::join(|| state_dict::all_tensors(state), || path::object_names(state));
    check_model(args, convert, &source, &tensors)?;
    let mut notes = source.conflicts.notes(None);
    notes.extend(prefix_note(args, convert, &source));
    let writer = whole_writer("consolidate", to)?;
    check_tied(convert.tied, to)?;
    let (written, tied) = names_to_write(&source, tensors, convert.tied);
    let dtypes = source.selection.catalog.dtypes();
    // A format that does not keep strides needs only names, dtypes and shapes, so the selection can be freed.
    if !to.keeps_order() {
        source.drop_selection();
    }
    let ConversionSource { checkpoint, selection, .. } = &source;
    notes.extend(elsewhere(placing.as_ref(), &written));
    let mut reservation = writer.reserve(WholeTarget {
        source: if to.keeps_order() { &selection.catalog } else { &checkpoint.catalog },
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
        carried = assets(args, &convert.select.map, &source.checkpoint)?;
        warn_of_empty(&carried, &mut source, run.progress);
        notes.extend(dtype_note(&carried, &source)?);
        if !carried.iter().any(|file| file.to == Path::new(CONFIG)) && !no_assets {
            notes.push(format!(
                "no {CONFIG} found, but loaders need it beside the weights: copy it with options::assets DIR"
            ));
        }
    } else if let Assets::From(_) = &args.assets {
        return Err(Error::usage(
            "options::assets needs a folder as DST, but DST is one file",
            "use a folder as DST, or remove options::assets",
        ));
    }
    Ok(Prepared { source, reservation, carried, shape, to, tied, notes })
}

/// Checks that the selected tensors can be a model: one of them has a floating-point dtype, and none looks like
/// optimizer state. Optimizer state is allowed if `--everything`, `--root` or `--include` is given. With
/// `--everything`, the dtype does not matter.
fn check_model(
    args: &ConsolidateOptions,
    convert: &ConvertOptions,
    source: &ConversionSource,
    tensors: &[(Fqn, TensorId)],
) -> Result<()> {
    if tensors.is_empty() {
        return Err(Error::usage(
            format!("{} has no model tensors", convert.src.display()),
            if args.everything {
                "run `dtshard inspect` to list its contents; consolidate writes only tensors"
            } else {
                "run `dtshard inspect` to list its contents, then select other tensors with options::root or \
                 options::everything"
            },
        ));
    }
    let is_float = |(_, id): &(Fqn, TensorId)| source.selection.catalog.tensor(*id).dtype.is_float();
    if !args.everything && !tensors.iter().any(is_float) {
        return Err(Error::usage(
            format!(
                "{}: none of its {} has a floating-point dtype, so it is not a model",
                convert.src.display(),
                count(tensors.len(), "tensor")
            ),
            "use options::everything to write these tensors anyway",
        ));
    }
    let select = &convert.select;
    let asked = args.everything || select.root.is_some() || !select.include.is_empty() || select.include_from.is_some();
    match tensors.par_iter().find_first(|(fqn, _)| optimizer::reads_as_optimizer_state(fqn.as_str())) {
        Some((fqn, _)) if !asked => Err(Error::usage(
            format!("`{fqn}` looks like optimizer state, but the file does not record which tensors are the model"),
            "select the model with options::root PATH (for names below `model`: options::root model) or \
             options::include, or write all tensors with options::everything",
        )),
        _ => Ok(()),
    }
}

/// Returns a note if all names of the result begin with one prefix that is not a known key of a model, because loaders
/// do not expect such a prefix. Returns `None` if options choose the names.
fn prefix_note(args: &ConsolidateOptions, convert: &ConvertOptions, source: &ConversionSource) -> Option<String> {
    let select = &convert.select;
    let asked = args.everything || select.root.is_some() || select.nest.is_some() || select.add_prefix.is_some();
    if asked || !state_dict::model_root(&source.checkpoint.catalog.state).0.is_empty() {
        return None;
    }
    let common = state_dict::common_path(&source.selection.catalog.state);
    let prefix = (!common.0.is_empty()).then(|| common.fqn())?;
    Some(format!(
        "all names begin with `{prefix}.`, which is not a known key of a model: remove this prefix with \
         options::root {prefix}"
    ))
}

/// Returns a note if tensors are cast to another dtype than `config.json` names, because loaders use the dtype in
/// `config.json`. `carried` are the files that are copied beside the weights.
///
/// # Errors
/// `Io` if `config.json` cannot be read.
fn dtype_note(carried: &[SidecarFile], source: &ConversionSource) -> Result<Option<String>> {
    let found = carried.iter().find(|file| file.to == Path::new(CONFIG));
    let Some(found) = found.filter(|file| file.len < model_config::MAX_BYTES) else { return Ok(None) };
    let text = std::fs::read(&found.read_path).map_err(Error::io("read", &found.from))?;
    Ok(serde_json::from_slice(&text).ok().and_then(|config| differing_dtype(&config, source)))
}

fn differing_dtype(config: &serde_json::Value, source: &ConversionSource) -> Option<String> {
    let named = ["dtype", "torch_dtype"].iter().find_map(|key| config.get(key)?.as_str())?;
    let named = Dtype::from_name(named)?;
    let cast = source.selection.casts.cast.iter().find(|(_, to, _)| *to != named);
    cast.map(|(_, to, _)| {
        format!(
            "{CONFIG} has dtype {}, which loaders use, but the weights are cast to {to}: change the dtype in {CONFIG}, \
             or load with dtype=torch.{}",
            named.torch_name(),
            to.torch_name()
        )
    })
}

/// Returns the files to copy beside the weights (configuration, tokenizer). With `--assets`, they come from that
/// folder.
///
/// Without `--assets`, the `config.json` of `--config` comes first. Then the source's folder and its parents up to the
/// path that the user named are searched, each after its `huggingface` subfolder. If several folders have a file, the
/// nearest one provides it. A `config.json` of a training run is not copied, because loaders would take it for the
/// configuration of the model.
fn assets(args: &ConsolidateOptions, map: &MapOptions, checkpoint: &Checkpoint) -> Result<Vec<SidecarFile>> {
    let folders = match &args.assets {
        Assets::None => return Ok(Vec::new()),
        Assets::From(folder) if !lookup::is_folder(folder)? => {
            return Err(Error::usage(
                format!("options::assets {}: no such folder", folder.display()),
                "name the folder that contains config.json, or use options::assets none",
            ));
        }
        Assets::From(folder) => vec![folder.clone()],
        Assets::Found => model_config::folders(checkpoint)?,
    };
    let mut found: BTreeMap<PathBuf, SidecarFile> = BTreeMap::new();
    let given = map.config.as_deref().map(model_config::in_folder).transpose()?;
    let is_config =
        |path: &PathBuf| matches!(args.assets, Assets::Found) && path.file_name().is_some_and(|name| name == CONFIG);
    if let Some(path) = given.filter(is_config) {
        found.insert(PathBuf::from(CONFIG), SidecarFile::new(path, CONFIG.into())?);
    }
    for folder in folders {
        for name in [PathBuf::new(), PathBuf::from("additional_chat_templates")] {
            let within = folder.join(&name);
            if !lookup::is_folder(&within)? {
                continue;
            }
            for entry in lookup::list(&within)? {
                let to = name.join(&entry.name);
                let is_new = is_asset(&to) && !found.contains_key(&to) && entry.is_file()?;
                let is_found = matches!(args.assets, Assets::Found);
                if is_new && !(is_found && to == Path::new(CONFIG) && model_config::is_of_training(&entry.path)?) {
                    found.insert(to.clone(), carried_file(checkpoint, entry.path, to)?);
                }
            }
        }
    }
    Ok(found.into_values().collect())
}
