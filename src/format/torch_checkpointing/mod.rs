//! Checkpoints of the package torch_checkpointing: one file for each checkpoint item and rank, and `metadata.pkl`. A
//! checkpoint item is a key of the dict that a job saves, such as `model`.
//!
//! ```text
//! metadata.pkl                                    the sharding of every tensor, and the file of every item and rank
//! model_0.pt  model_1.pt  ...                     an item as torch.save writes it, with DTensors
//! model_0.safetensors  model_1.safetensors  ...   or the local tensors of an item
//! progress_0.pt  progress_1.pt  ...               an item without tensors to reshard, which `metadata.pkl` does not list
//! ```
//!
//! Only `metadata.pkl` records how the tensors in safetensors files are sharded. The content of `metadata.pkl` is
//! untrusted.
//!
//! Source: `torch_checkpointing/distributed_metadata.py`, `dtensor_metadata.py`, `default_metadata.py`,
//! `checkpoint_layout.py`, `checkpoint_writer.py` (0.1.1).

pub(super) mod entry;
mod item_files;
mod lost_metadata;
mod metadata;
mod read;
mod safetensors_item;
mod torch_item;
mod write;

use std::path::Path;

pub use item_files::part_of_checkpoint;
pub use lost_metadata::{hint_if_missing, refuse_damaged, refuse_lone_rank};

use crate::error::Result;
use crate::format::json::read_document;
use crate::storage::lookup;
use memchr::memmem;
use torch_pickle::pickle;

/// The name of the metadata file in the folder of a checkpoint.
pub const METADATA: &str = "metadata.pkl";

/// Texts that all occur in a `metadata.pkl` of this package. Other programs also write files with this name.
const MARKS: [&[u8]; 3] = [b"rank_to_layout_info", b"world_size", b"version"];

/// Returns the bytes of `metadata.pkl` in a folder; `None` if the file does not exist or is not from this package.
///
/// # Errors
/// `Io`.
fn metadata_of(folder: &Path) -> Result<Option<Vec<u8>>> {
    let path = folder.join(METADATA);
    if !lookup::is_file(&path)? || std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() > pickle::MAX_BYTES) {
        return Ok(None);
    }
    let bytes = read_document(&path, pickle::MAX_BYTES)?;
    let is_own = bytes.starts_with(b"\x80") && MARKS.iter().all(|mark| memmem::find(&bytes, mark).is_some());
    Ok(is_own.then_some(bytes))
}
