//! Lookup of a model's configuration, which is `config.json` in the folder of the weights.

use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::error::Result;
use crate::format::Checkpoint;
use crate::format::index::is_index;
use crate::storage::{lookup, regular_file};

/// Name of the configuration file, from which loaders build the model.
pub const CONFIG: &str = "config.json";

/// Size limit in bytes of a configuration file. A file of this size or larger is not read as a configuration.
pub const MAX_BYTES: u64 = 1 << 20;

/// Returns the folders that may contain the configuration: the source's folder and its parents up to the path that the
/// user named, each preceded by its `huggingface` subfolder. The nearest folders come first. If the source is an index
/// file, the source's folder is the folder that contains this file.
///
/// # Errors
/// `Io` if the root cannot be examined.
pub fn folders(checkpoint: &Checkpoint) -> Result<Vec<PathBuf>> {
    let names_a_set = checkpoint.root.file_name().is_some_and(|name| is_index(&name.to_string_lossy()));
    let root = match checkpoint.root.parent() {
        _ if lookup::is_folder(&checkpoint.place(&checkpoint.root))? => &checkpoint.root,
        Some(folder) if names_a_set => folder,
        _ => return Ok(Vec::new()),
    };
    let given = checkpoint.resolved_from.as_deref().unwrap_or(root);
    let above = root.ancestors().take_while(|folder| folder.starts_with(given));
    let folders = above
        .flat_map(|folder| [folder.join("huggingface"), folder.to_path_buf()].map(|folder| checkpoint.place(&folder)));
    Ok(folders.collect())
}

/// Returns the content of the model's configuration file. Returns `None` if there is no such file, or if the nearest
/// one is too large or is not JSON.
///
/// # Errors
/// `Io` if it cannot be read.
pub fn read(checkpoint: &Checkpoint) -> Result<Option<Json>> {
    read_named(checkpoint, CONFIG)
}

/// Returns the content of the nearest file of this name, as [`read`] does for `config.json`.
///
/// # Errors
/// `Io` if it cannot be read.
pub fn read_named(checkpoint: &Checkpoint, name: &str) -> Result<Option<Json>> {
    for folder in folders(checkpoint)? {
        let file = folder.join(name);
        if lookup::is_file(&file)? {
            return read_file(&file);
        }
    }
    Ok(None)
}

/// Returns the content of a JSON file, or `None` if the file is too large or is not JSON.
///
/// # Errors
/// `Io` if it cannot be read.
pub fn read_file(file: &Path) -> Result<Option<Json>> {
    if regular_file(file)?.len() >= MAX_BYTES {
        return Ok(None);
    }
    let text = std::fs::read(file).map_err(lookup::refused("read", file))?;
    Ok(serde_json::from_slice(&text).ok())
}

/// Returns whether a file is the configuration of a training run with OLMo-core, which has the same name as the
/// configuration of a model. OLMo-core stores the class of the model in it (`model._CLASS_`).
///
/// # Errors
/// `Io` if the file cannot be read.
pub fn is_of_training(file: &Path) -> Result<bool> {
    Ok(read_file(file)?.is_some_and(|config| config.pointer("/model/_CLASS_").is_some()))
}
