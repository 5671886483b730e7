//! Infers the mesh of ShardedTensors, which do not record a mesh.
//!
//! FSDP1 splits the rows (dim 0) of each ShardedTensor over the ranks of one group: all ranks, or, with replicas,
//! groups of consecutive ranks. The rows that each rank stores show which group size was used.
//!
//! Source: `_ext_chunk_tensor` in `torch/distributed/fsdp/_fsdp_extensions.py`.

use crate::catalog::{Class, TensorEntry};
use crate::layout::{DeviceMesh, Placement, TensorDim, chunk};

/// Name of the last mesh dimension, over which rows of tensors are sharded.
const FULL: &str = "fsdp";
/// Name of the first mesh dimension, over which shards are replicated.
const COPIES: &str = "replicate";

/// Returns the mesh on which FSDP1 sharded all ShardedTensors among `entries`. Returns `None` if there are no
/// ShardedTensors, or if FSDP1 did not shard them.
pub fn mesh_of_rows(entries: &[&TensorEntry]) -> Option<DeviceMesh> {
    let ranks = entries.iter().flat_map(|entry| (0..entry.chunks.len()).filter_map(|at| entry.chunks.rank(at)));
    let world_size = ranks.max()?.0.checked_add(1)?;
    let has_rows = |entry: &&TensorEntry| entry.class == Class::ShardedTensor && !entry.shape.contains(&0);
    let sharded: Vec<&TensorEntry> = entries.iter().copied().filter(has_rows).collect();
    let most = sharded.iter().map(|entry| entry.chunks.len()).min()?;
    // Every replica has at least one chunk of each tensor, so there are at most `most` replicas.
    let mut copies = (1..=world_size).take(most).filter(|copies| world_size.is_multiple_of(*copies));
    let fits = |copies: &u32| sharded.iter().all(|entry| is_cut(entry, world_size, world_size / copies));
    let mesh = match copies.find(fits)? {
        1 => format!("{FULL}={world_size}"),
        copies => format!("{COPIES}={copies},{FULL}={}", world_size / copies),
    };
    DeviceMesh::parse(&mesh).ok()
}

/// Returns true if every rank has the rows that it gets when `torch.chunk` splits all rows over groups of `group_size`
/// ranks.
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

/// Returns placements that shard rows over the last mesh dimension and replicate over the other mesh dimensions.
pub fn rows(mesh: &DeviceMesh) -> Vec<Placement> {
    let mut placements = vec![Placement::Replicate; mesh.ndim()];
    if let Some(last) = placements.last_mut() {
        *last = Placement::Shard(TensorDim(0));
    }
    placements
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Chunk, ChunkTable, Dtype, FileLocation};
    use crate::layout::{Rank, Region, Tile};

    /// Returns a tensor of `rows` rows and 3 columns. Its rows are sharded over groups of `group_size` ranks; if
    /// `group_size` is `None`, it is a plain tensor, and every rank has a copy.
    fn entry(rows: u64, world_size: u32, group_size: Option<u32>) -> TensorEntry {
        let mut chunks = ChunkTable::new(2);
        for rank in 0..world_size {
            let own = group_size.map_or(0..rows, |size| chunk(rows, size.into(), (rank % size).into()));
            let mut region = Region::whole(&[rows, 3]);
            (region.offsets[0], region.sizes[0]) = (own.start, own.end - own.start);
            if !region.is_empty() {
                let tile = Tile::from_region(&region);
                chunks.push(Chunk {
                    tile,
                    location: FileLocation::Empty,
                    strides: None,
                    rank: Some(Rank(rank)),
                    view: None,
                });
            }
        }
        let class = if group_size.is_some() { Class::ShardedTensor } else { Class::Tensor };
        let shape = [rows, 3].as_slice().into();
        TensorEntry { class, chunks, ..TensorEntry::new("w".into(), Dtype::F32, shape) }
    }

    fn mesh(entries: &[TensorEntry]) -> Option<String> {
        mesh_of_rows(&entries.iter().collect::<Vec<_>>()).map(|mesh| mesh.to_string())
    }

    #[test]
    fn mesh_is_inferred_from_the_rows_of_each_rank() {
        let plain = || entry(2, 6, None);
        let of_groups = |size: u32| [entry(7, 6, Some(size)), entry(1, 6, Some(size)), plain()];
        assert_eq!(mesh(&of_groups(6)).as_deref(), Some("fsdp=6"));
        assert_eq!(mesh(&of_groups(3)).as_deref(), Some("replicate=2,fsdp=3"));
        assert_eq!(mesh(&of_groups(2)).as_deref(), Some("replicate=3,fsdp=2"));
        // A tensor of one row is on one rank, or on one rank of each group.
        assert_eq!(mesh(&[entry(1, 6, Some(6)), plain()]).as_deref(), Some("fsdp=6"));
        assert_eq!(mesh(&[entry(1, 6, Some(3)), plain()]).as_deref(), Some("replicate=2,fsdp=3"));
        assert_eq!(mesh(&[plain()]), None);
        assert_eq!(mesh(&[entry(7, 6, Some(6)), entry(7, 6, Some(3))]), None);
        assert_eq!(mesh(&[entry(7, 6, Some(4)), plain()]), None);
    }
}
