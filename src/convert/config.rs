//! The folders where the configuration of a model lies beside its weights.

use std::path::PathBuf;

use serde_json::Value as Json;

use crate::error::Result;
use crate::format::Checkpoint;
use crate::format::index::is_index;
use crate::storage::{lookup, regular_file};

/// The file without which loaders do not know what to build.
pub const CONFIG: &str = "config.json";

/// Larger ones are none.
pub const MAX_BYTES: u64 = 1 << 20;

/// The source's folder with `huggingface` in it, and the same of the folders above up to the one that was given; the
/// nearest come first. The folder of an index that was given is the source's.
///
/// # Errors
/// `Io` where the file system does not tell what the root is.
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

/// The configuration, where there is one.
///
/// # Errors
/// `Io` where it cannot be read.
pub fn read(checkpoint: &Checkpoint) -> Result<Option<Json>> {
    for folder in folders(checkpoint)? {
        let file = folder.join(CONFIG);
        if lookup::is_file(&file)? {
            if regular_file(&file)?.len() >= MAX_BYTES {
                return Ok(None);
            }
            let text = std::fs::read(&file).map_err(lookup::refused("read", &file))?;
            return Ok(serde_json::from_slice(&text).ok());
        }
    }
    Ok(None)
}
