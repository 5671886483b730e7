//! The row of the table of formats for dtshard's own format.

use super::{LocalTarget, reserve};
use crate::catalog::{Path, Reservation, TensorEntry};
use crate::error::Result;
use crate::format::registry::{Entry, ShardedTarget, TensorStorage, WriteShards};

/// The row of the table of formats.
pub static ENTRY: Entry = Entry {
    name: "local",
    about: "plain safetensors of what each rank holds, and `layout.json`",
    files: "`rank-00000.safetensors`, ..., `layout.json`",
    suffixes: &[],
    tensors: TensorStorage::Ranks,
    holds_objects: true,
    has_rank_files: false,
    keeps_order: false,
    is_in_module_order: true,
    names_tensors_by_rank: true,
    write_shards: Some(&Writer),
};

/// Writes rank files and their document.
struct Writer;

impl WriteShards for Writer {
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation> {
        let ShardedTarget { source, state, mesh, world_size, layouts, .. } = target;
        let layout = &mut |path: &Path, entry: &TensorEntry| layouts.local_layout(path, entry);
        reserve(source, state, LocalTarget { mesh, world_size, layout })
    }
}
