//! Lookup of a model's configuration, which is `config.json` in the folder of the weights.

use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::error::{Error, Result};
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

/// Returns the path of a configuration: the path itself, or `config.json` in it if it is a folder.
///
/// # Errors
/// `Io` if the path cannot be examined.
pub fn in_folder(path: &Path) -> Result<PathBuf> {
    Ok(if lookup::is_folder(path)? { path.join(CONFIG) } else { path.to_path_buf() })
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

/// The configuration of the model, with the name of its file for messages.
pub struct Configuration {
    name: String,
    value: Option<Json>,
}

impl Configuration {
    /// Reads the given file, or `config.json` or `params.json` beside the source.
    ///
    /// # Errors
    /// `Usage` if the given file is not a JSON object; `Io`.
    pub fn read(checkpoint: &Checkpoint, given: Option<&Path>) -> Result<Self> {
        if let Some(path) = given {
            let path = in_folder(path)?;
            let name = path.display().to_string();
            let value = read_file(&path)?.filter(Json::is_object).ok_or_else(|| {
                Error::usage(
                    format!("options::config {name}: expected a JSON object of less than 1 MiB"),
                    "give the config.json or params.json of the model",
                )
            })?;
            return Ok(Self { name, value: Some(value) });
        }
        for name in [CONFIG, "params.json"] {
            let found = match (read_named(checkpoint, name)?, checkpoint.root.parent()) {
                (None, Some(folder))
                    if !lookup::is_folder(&checkpoint.root)? && lookup::is_file(&folder.join(name))? =>
                {
                    read_file(&folder.join(name))?
                }
                (found, _) => found,
            };
            if let Some(value) = found {
                return Ok(Self { name: name.to_owned(), value: Some(value) });
            }
        }
        Ok(Self { name: String::new(), value: None })
    }

    /// Returns the name of the file, or an empty text if there is no configuration.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the configuration, if there is one.
    pub fn value(&self) -> Option<&Json> {
        self.value.as_ref()
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.value.as_ref()?.get(key)
    }

    /// Returns the `model_type` of the configuration.
    pub fn model_type(&self) -> Option<&str> {
        self.value.as_ref()?.get("model_type")?.as_str()
    }
}
