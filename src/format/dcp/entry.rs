//! The row of the table of formats for DCP directories.

use super::reserve;
use crate::catalog::Reservation;
use crate::error::Result;
use crate::format::registry::{Entry, ShardedTarget, TensorStorage, WriteShards};

/// The row of the table of formats.
pub static ENTRY: Entry = Entry {
    name: "dcp",
    about: "PyTorch Distributed Checkpoint directory",
    files: "`__R_0.distcp`, `.metadata`",
    suffixes: &[],
    tensors: TensorStorage::Boxes,
    holds_objects: true,
    has_rank_files: false,
    keeps_order: false,
    is_in_module_order: false,
    names_tensors_by_rank: false,
    write_shards: Some(&Writer),
};

/// Writes DCP directories.
struct Writer;

impl WriteShards for Writer {
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation> {
        let ShardedTarget { source, state, layouts, .. } = target;
        reserve(source, state, &mut |_, path, entry| layouts.shards(path, entry))
    }
}
