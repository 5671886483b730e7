//! The row of the table of formats for DCP's Hugging Face storage.

use super::reserve;
use crate::catalog::Reservation;
use crate::error::Result;
use crate::format::registry::{Entry, ShardedTarget, TensorStorage, WriteShards};

/// The row of the table of formats.
pub static ENTRY: Entry = Entry {
    name: "dcp-hf",
    about: "shards of DCP's Hugging Face storage",
    files: "`shard-RRRRR-model-00001-of-00001.safetensors`",
    suffixes: &[],
    tensors: TensorStorage::Boxes,
    holds_objects: false,
    has_rank_files: false,
    keeps_order: false,
    is_in_module_order: false,
    names_tensors_by_rank: true,
    write_shards: Some(&Writer),
};

/// Writes the shards.
struct Writer;

impl WriteShards for Writer {
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation> {
        let ShardedTarget { source, state, layouts, .. } = target;
        reserve(source, state, &mut |_, path, entry| layouts.shards(path, entry))
    }
}
