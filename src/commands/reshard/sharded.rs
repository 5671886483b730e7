//! The mesh of ShardedTensors, which do not record one.
//!
//! FSDP1 cuts the rows of each over the ranks of a group: all of them, or, with copies, groups of neighbours. Which of
//! these it was follows from who has which rows.
//!
//! Source: `_ext_chunk_tensor` in `torch/distributed/fsdp/_fsdp_extensions.py`.

use crate::catalog::{Class, TensorEntry};
use crate::layout::{DeviceMesh, Placement, TensorDim, chunk};

/// The ranks that share rows are the last dim.
const FULL: &str = "fsdp";
const COPIES: &str = "replicate";

/// The mesh on which all ShardedTensors among these lie; `None` where there are none, or they lie otherwise.
pub fn mesh_of_rows(entries: &[&TensorEntry]) -> Option<DeviceMesh> {
    let ranks = entries.iter().flat_map(|entry| (0..entry.chunks.len()).filter_map(|at| entry.chunks.rank(at)));
    let world_size = ranks.max()?.0.checked_add(1)?;
    let sharded: Vec<&TensorEntry> =
        entries.iter().copied().filter(|entry| entry.class == Class::ShardedTensor).collect();
    let most = sharded.iter().map(|entry| entry.chunks.len()).min()?;
    // Every copy has a chunk.
    let mut copies = (1..=world_size).take(most).filter(|copies| world_size.is_multiple_of(*copies));
    let fits = |copies: &u32| sharded.iter().all(|entry| is_cut(entry, world_size, world_size / copies));
    let mesh = match copies.find(fits)? {
        1 => format!("{FULL}={world_size}"),
        copies => format!("{COPIES}={copies},{FULL}={}", world_size / copies),
    };
    DeviceMesh::parse(&mesh).ok()
}

/// Whether every rank has the rows that `torch.chunk` over groups of this size gives it.
fn is_cut(entry: &TensorEntry, world_size: u32, group_size: u32) -> bool {
    let Some(rows) = entry.shape.first() else { return false };
    let has_own = entry.chunks.iter().all(|part| {
        let bounds = part.tile.bounds();
        let own = part.rank.map(|rank| chunk(*rows, group_size.into(), u64::from(rank.0 % group_size)));
        own.is_some_and(|own| own.start == bounds.offsets[0] && own.end - own.start == bounds.sizes[0])
            && bounds.sizes[1..] == entry.shape[1..]
    });
    let holders = rows.div_ceil(rows.div_ceil(group_size.into()).max(1)) * u64::from(world_size / group_size);
    has_own && entry.chunks.len() as u64 == holders
}

/// Rows over the last dim of a mesh, copies along the others.
pub fn rows(mesh: &DeviceMesh) -> Vec<Placement> {
    let mut placements = vec![Placement::Replicate; mesh.ndim()];
    if let Some(last) = placements.last_mut() {
        *last = Placement::Shard(TensorDim(0));
    }
    placements
}
