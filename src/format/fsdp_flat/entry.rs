//! The row of the table of formats for FSDP1's flat parameters.

use crate::format::registry::{Entry, TensorStorage};

/// The row of the table of formats.
pub static ENTRY: Entry = Entry {
    name: "fsdp-flat",
    about: "the same with FSDP1's flat parameters",
    files: "`model_world_size_N_rank_R.pt`, `flat_layout.json`",
    suffixes: &[],
    tensors: TensorStorage::Flat,
    holds_objects: true,
    has_rank_files: true,
    keeps_order: false,
    is_in_module_order: false,
    names_tensors_by_rank: true,
    write_shards: None,
};
