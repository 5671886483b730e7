//! The folders where the configuration of a model lies beside its weights.

use std::path::PathBuf;

use serde_json::Value as Json;

use crate::format::Checkpoint;

/// The file without which loaders do not know what to build.
pub const CONFIG: &str = "config.json";

/// Larger ones are none.
pub const MAX_BYTES: u64 = 1 << 20;

/// The source's folder with `huggingface` in it, and the same of the folders above up to the one that was given; the
/// nearest come first.
pub fn folders(checkpoint: &Checkpoint) -> Vec<PathBuf> {
    if !checkpoint.place(&checkpoint.root).is_dir() {
        return Vec::new();
    }
    let given = checkpoint.resolved_from.as_deref().unwrap_or(&checkpoint.root);
    let above = checkpoint.root.ancestors().take_while(|folder| folder.starts_with(given));
    above
        .flat_map(|folder| [folder.join("huggingface"), folder.to_path_buf()].map(|folder| checkpoint.place(&folder)))
        .collect()
}

/// The configuration, where there is one.
pub fn read(checkpoint: &Checkpoint) -> Option<Json> {
    let mut files = folders(checkpoint).into_iter().map(|folder| folder.join(CONFIG));
    let file = files.find(|file| file.is_file())?;
    std::fs::metadata(&file).ok().filter(|metadata| metadata.len() < MAX_BYTES)?;
    serde_json::from_slice(&std::fs::read(file).ok()?).ok()
}
