//! The row of the table of formats for safetensors.

use crate::format::registry::{Entry, TensorStorage};

/// The row of the table of formats.
pub static ENTRY: Entry = Entry {
    name: "safetensors",
    about: "one file, or a folder with its index",
    files: "`model.safetensors`, or `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`",
    suffixes: &["safetensors"],
    tensors: TensorStorage::Whole,
    holds_objects: false,
    has_rank_files: false,
    keeps_order: false,
    is_in_module_order: false,
    names_tensors_by_rank: false,
    write_shards: None,
};
