//! Reads a checkpoint into a catalog. Each checkpoint item that the user chose is read on its own and becomes a subtree
//! of the state dict.

use std::path::Path;

use super::item_files::{CheckpointItem, ItemFiles};
use super::metadata::{CheckpointMetadata, Encoding};
use super::{METADATA, metadata_of, safetensors_item, torch_item};
use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::format::parts::{CheckpointPart, LoadedFolder, join_series, nest};
use crate::format::reading::ReadFindings;
use crate::format::series::{SeriesChoice, SeriesSet};
use crate::format::shortfall::Shortfall;
use crate::name_list::{FEW, short_list};

/// Returns the missing files of the chosen checkpoint items; `None` if no file is missing. The checkpoint can be read
/// without these files only if an option allows it and replicas on other ranks have their data.
///
/// # Errors
/// `Io`; the errors of reading the metadata.
pub fn shortfall(folder: &Path, choice: &SeriesChoice) -> Result<Option<Shortfall>> {
    let metadata = read_metadata(folder)?;
    let files = ItemFiles::of(folder, &metadata)?;
    let chosen = as_series(folder, &files).choose(choice)?.names();
    let items = files.items.iter().filter(|item| chosen.contains(&item.name));
    let missing: Vec<String> = items.flat_map(|item| item.missing.values().cloned()).collect();
    if missing.is_empty() {
        return Ok(None);
    }
    let error = Error::missing(
        &folder.join(METADATA),
        "items",
        format!("the files of {} ranks", metadata.world_size),
        short_list(&missing, FEW),
    );
    let allowed = format!(
        "{} is read without {}; dtshard cannot detect a value that only a missing file had",
        folder.display(),
        short_list(&missing, FEW)
    );
    Ok(Some(Shortfall { allowed: Some(allowed), ..Shortfall::new(missing, error) }))
}

/// Returns each checkpoint item as a series. The user chooses items with the options that choose series.
fn as_series(folder: &Path, files: &ItemFiles<'_>) -> SeriesSet {
    SeriesSet::of_items(folder, files.items.iter().map(|item| (item.name.clone(), item.files.clone())).collect())
}

fn read_metadata(folder: &Path) -> Result<CheckpointMetadata> {
    let path = folder.join(METADATA);
    let bytes = metadata_of(folder)?;
    let bytes =
        bytes.ok_or_else(|| Error::malformed(&path, "content", "metadata of torch_checkpointing", "other content"))?;
    CheckpointMetadata::parse(&path, &bytes)
}

/// Reads the checkpoint items that the user chose.
///
/// # Errors
/// `Usage` if an item is chosen that does not exist, or if a layout is declared; the errors of reading items.
pub fn read(reading: &mut ReadFindings<'_>, folder: &Path) -> Result<LoadedFolder> {
    if reading.options.declared_layout.is_some() {
        return Err(Error::usage(
            format!("{}: its {METADATA} already describes the layout of its tensors", folder.display()),
            "remove options::src_mesh, options::src_placements, options::src_split, options::src_plan, \
             options::src_layout and options::reduce",
        ));
    }
    let path = folder.join(METADATA);
    let metadata = read_metadata(folder)?;
    let files = ItemFiles::of(folder, &metadata)?;
    reading.files.add(&path)?;
    let chosen = reading.choose(as_series(folder, &files))?.names();
    let mut read = Vec::new();
    for item in files.items.iter().filter(|item| chosen.contains(&item.name)) {
        let mut catalog = read_item(reading, &path, item)?;
        if item.metadata.is_none() && item.files.len() == 1 && metadata.world_size > 1 {
            catalog.warnings.push(format!(
                "only rank 0 has a file of the checkpoint item `{}`, so dtshard uses this file for all ranks",
                item.name
            ));
        }
        read.push((item.name.clone(), CheckpointPart::whole(None, metadata.world_size), catalog));
    }
    // An item is a key of the state dict. The model alone is read without its key, like a series of rank files.
    if let [(name, _, catalog)] = read.as_mut_slice()
        && reading.options.series == SeriesChoice::All
        && metadata.root_item.as_ref() != Some(name)
    {
        nest(catalog, name);
    }
    Ok(join_series(read))
}

fn read_item(reading: &mut ReadFindings<'_>, path: &Path, item: &CheckpointItem<'_>) -> Result<Catalog> {
    match item.encoding {
        Encoding::Safetensors => safetensors_item::read(&mut reading.files, path, item),
        Encoding::Torch | Encoding::Other(_) => {
            torch_item::read(&mut reading.files, path, item, reading.options.unknown())
        }
    }
}
