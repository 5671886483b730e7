//! Converts placements to elements: the tile of the rank at one mesh coordinate.
//!
//! Shapes and offsets count elements. Mesh dims are evaluated from left to right. For each mesh dim that shards a
//! tensor dim, the remaining indices of this tensor dim are split, and the coordinate on the mesh dim selects one part.
//! Tensor dims are independent, so the result is a product over dims: a [`Tile`]. The distinct tiles of all coordinates
//! cover the tensor exactly once.
//!
//! The rules are PyTorch's: `Shard` and `_StridedShard` in `torch/distributed/tensor/placement_types.py`, their
//! composition in `_utils.py`, and `shard_order` in `_dtensor_spec.py`. Dims are split by `torch.chunk`, whose parts
//! may differ in size. Two splits in sequence differ from a single split into as many parts:
//!
//! ```text
//!     5 elements, S(0) over 4                      0 1 | 2 3 | 4 | -
//!     5 elements, (S(0), S(0)) over (2, 2)         0 1 | 2 | 3 | 4
//!     8 elements, _S(0,2) over 2                   0 1 4 5 | 2 3 6 7
//! ```

use std::ops::Range;

use smallvec::SmallVec;

use super::{AsTuple, Intervals, LayoutError, MeshDim, Placement, Split, TensorDim, Tile};

/// The maximum number of intervals of a local shard along one dim.
///
/// Real split factors are products of mesh sizes, so no job reaches this limit. With this limit, a split factor of 2^60
/// in a damaged file gives an error instead of an endless loop.
pub(super) const MAX_INTERVALS: u64 = 1 << 20;

/// Returns part `r` of `n` elements split into `k` parts by `torch.chunk`: the first parts have `ceil(n / k)` elements,
/// and the last parts may be shorter or empty.
///
/// # Panics
/// If `k` is 0.
pub fn chunk(n: u64, k: u64, r: u64) -> Range<u64> {
    let len = n.div_ceil(k);
    let start = r.saturating_mul(len).min(n);
    start..start.saturating_add(len).min(n)
}

/// Divides `n` positions into `blocks` blocks, splits each block into `k` parts, and returns part `r` of every block.
///
/// All blocks except the last have the same length, so the result is at most one run of equal intervals and one last
/// interval, for any number of blocks.
fn strided_chunk(n: u64, k: u64, r: u64, blocks: u64) -> Intervals {
    if n == 0 {
        return Intervals::empty();
    }
    let block = n.div_ceil(blocks);
    let (whole, rest) = (n / block, n % block);
    let part = chunk(block, k, r);
    let mut positions = Intervals::progression(part.start, block, whole, part.end - part.start);
    let part = chunk(rest, k, r);
    positions.push(whole * block + part.start..whole * block + part.end);
    positions
}

/// Returns the tile of the rank at `coordinate`, split as PyTorch splits DTensors.
///
/// Mesh dims with `Replicate` or `Partial` do not split the tensor.
///
/// # Errors
/// If the number of placements or coordinates differs from the number of mesh dims, the coordinate is outside the mesh,
/// a placement names a dim that the tensor does not have, or a split factor is 0 or creates too many intervals.
pub fn local_shard(
    shape: &[u64],
    mesh_shape: &[u64],
    placements: &[Placement],
    coordinate: &[u64],
) -> Result<Tile, LayoutError> {
    local_part(shape, mesh_shape, placements, &[], coordinate)
}

/// Returns the tile of the rank at `coordinate`, with one split rule for each mesh dim. If `splits` is empty, all mesh
/// dims split by `torch.chunk`.
///
/// # Errors
/// The errors of [`local_shard`]. It is also an error if explicit sizes do not fit, if a `StridedShard` has explicit
/// sizes, or if a `StridedShard` has the rule `balanced` or `makani` and its tensor dim does not divide evenly.
pub fn local_part(
    shape: &[u64],
    mesh_shape: &[u64],
    placements: &[Placement],
    splits: &[Split],
    coordinate: &[u64],
) -> Result<Tile, LayoutError> {
    check_counts(mesh_shape, placements, splits)?;
    let within = coordinate.len() == mesh_shape.len() && coordinate.iter().zip(mesh_shape).all(|(at, size)| at < size);
    if !within {
        let mesh = AsTuple(mesh_shape).to_string();
        return Err(LayoutError::Coordinate { mesh, found: AsTuple(coordinate).to_string() });
    }

    let mut dims: SmallVec<[Intervals; 4]> = shape.iter().map(|&n| Intervals::full(n)).collect();
    for (mesh_dim, &r) in coordinate.iter().enumerate() {
        let Some(cut) = DimCut::new(shape, mesh_shape, placements, splits, mesh_dim)? else { continue };
        let indices = &mut dims[cut.dim.0];
        *indices = cut.part(indices, r)?;
    }
    Ok(Tile::new(dims))
}

/// The split of one tensor dim by one mesh dim.
pub(super) struct DimCut<'a> {
    pub dim: TensorDim,
    /// The number of parts: the size of the mesh dim.
    pub parts: u64,
    mesh_dim: MeshDim,
    placement: Placement,
    split: &'a Split,
}

impl<'a> DimCut<'a> {
    /// Returns how the mesh dim `mesh_dim` splits a tensor dim, or `None` if `mesh_dim` shards no tensor dim.
    pub fn new(
        shape: &[u64],
        mesh_shape: &[u64],
        placements: &[Placement],
        splits: &'a [Split],
        mesh_dim: usize,
    ) -> Result<Option<Self>, LayoutError> {
        let placement = placements[mesh_dim];
        let Some(dim) = placement.sharded_dim() else { return Ok(None) };
        let (parts, split) = (mesh_shape[mesh_dim], splits.get(mesh_dim).unwrap_or(&Split::Chunk));
        let (mesh_dim, ndim) = (MeshDim(mesh_dim), shape.len());
        match placement {
            _ if dim.0 >= ndim => Err(LayoutError::NoSuchDim { mesh_dim, dim, ndim }),
            Placement::StridedShard { split_factor: 0, .. } => Err(LayoutError::ZeroSplitFactor { mesh_dim }),
            _ => Ok(Some(Self { dim, parts, mesh_dim, placement, split })),
        }
    }

    /// Returns the part of `indices` that the coordinate `r` of the mesh dim holds.
    pub fn part(&self, indices: &Intervals, r: u64) -> Result<Intervals, LayoutError> {
        let Placement::StridedShard { split_factor, .. } = self.placement else {
            return Ok(indices.slice(self.split.part(indices.len(), self.parts, r)?));
        };
        let even = split_factor.checked_mul(self.parts).is_some_and(|parts| indices.len().is_multiple_of(parts));
        if *self.split != Split::Chunk && (!even || matches!(self.split, Split::Sizes(_))) {
            let (mesh_dim, split, numel) = (self.mesh_dim, self.split.to_string(), indices.len());
            return Err(LayoutError::SplitStrided { mesh_dim, split, split_factor, numel });
        }
        let positions = strided_chunk(indices.len(), self.parts, r, split_factor);
        let pieces = indices.count().saturating_add(positions.count());
        if pieces > MAX_INTERVALS {
            return Err(LayoutError::Fragmented { dim: self.dim, limit: MAX_INTERVALS, found: pieces });
        }
        Ok(indices.select(&positions))
    }
}

/// Converts placements with an explicit shard order to placements that are read from left to right.
///
/// Each entry of `order` has a tensor dim, and the mesh dims that shard this tensor dim, in the order in which they
/// split the tensor dim. A mesh dim gets a `StridedShard` if mesh dims to its right split the tensor dim before it
/// does. The split factor is the product of the sizes of these mesh dims. For example, `S(0),S(0)` on `dp=2,tp=4`,
/// where tp splits first, becomes `_S(0,4),S(0)`. A tensor dim without an entry in `order` is split by its mesh dims
/// from left to right. If a tensor dim already has a `StridedShard`, its placements stay unchanged.
///
/// # Errors
/// If an entry does not list exactly the mesh dims that shard its tensor dim, or a tensor dim has two entries.
pub fn from_shard_order(
    mesh_shape: &[u64],
    placements: &[Placement],
    order: &[(TensorDim, Vec<MeshDim>)],
) -> Result<Vec<Placement>, LayoutError> {
    check_count(mesh_shape, placements)?;
    let mut converted = placements.to_vec();
    for &(dim, ref mesh_dims) in order {
        let error = |expected, found: String| LayoutError::ShardOrder { dim, expected, found };
        let sharders: Vec<MeshDim> = (placements.iter().enumerate())
            .filter(|(_, placement)| placement.sharded_dim() == Some(dim))
            .map(|(mesh_dim, _)| MeshDim(mesh_dim))
            .collect();
        let mut sorted = mesh_dims.clone();
        sorted.sort_unstable();
        if sorted != sharders || order.iter().filter(|entry| entry.0 == dim).count() > 1 {
            let found = mesh_dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(error(
                "a list of exactly the mesh dims that shard this tensor dim",
                format!("mesh dims ({found})"),
            ));
        }
        // PyTorch 2.10 derives the order from split factors and stores both. Then the split factors are enough.
        if sharders.iter().any(|mesh_dim| placements[mesh_dim.0] != Placement::Shard(dim)) {
            continue;
        }
        for (i, &mesh_dim) in mesh_dims.iter().enumerate() {
            let overtaken = mesh_dims[..i].iter().filter(|&&earlier| earlier > mesh_dim);
            let split_factor = overtaken.map(|earlier| mesh_shape[earlier.0]).try_fold(1, u64::checked_mul);
            match split_factor {
                Some(1) => {}
                Some(split_factor) => {
                    converted[mesh_dim.0] = Placement::StridedShard { dim, split_factor };
                }
                None => {
                    return Err(error("a mesh of fewer than 2^64 ranks", AsTuple(mesh_shape).to_string()));
                }
            }
        }
    }
    Ok(converted)
}

/// Checks that there is one placement for each mesh dim, and either one split rule for each mesh dim or none at all.
pub(super) fn check_counts(mesh_shape: &[u64], placements: &[Placement], splits: &[Split]) -> Result<(), LayoutError> {
    check_count(mesh_shape, placements)?;
    if splits.is_empty() || splits.len() == mesh_shape.len() {
        return Ok(());
    }
    Err(LayoutError::SplitCount { expected: mesh_shape.len(), found: splits.len() })
}

fn check_count(mesh_shape: &[u64], placements: &[Placement]) -> Result<(), LayoutError> {
    let (expected, found) = (mesh_shape.len(), placements.len());
    if expected == found { Ok(()) } else { Err(LayoutError::PlacementCount { expected, found }) }
}

#[cfg(test)]
mod tests {
    use super::{Placement::Replicate, *};
    use crate::layout::{DeviceMesh, parse_placements};

    const S0: Placement = Placement::Shard(TensorDim(0));

    fn strided(split_factor: u64) -> Placement {
        Placement::StridedShard { dim: TensorDim(0), split_factor }
    }

    /// Returns, for each coordinate of the mesh, the indices of a 1-d tensor that the rank at this coordinate holds.
    fn indices(n: u64, mesh: &[u64], placements: &[Placement]) -> Vec<Vec<u64>> {
        let world_size = u32::try_from(mesh.iter().product::<u64>()).unwrap();
        let ranks = (0..world_size).map(crate::layout::Rank).collect();
        let mesh = DeviceMesh::new(mesh, ranks, None).unwrap();
        mesh.coordinates()
            .map(|(_, at)| local_shard(&[n], mesh.shape(), placements, &at).unwrap())
            .map(|tile| tile.dims()[0].iter().flatten().collect())
            .collect()
    }

    #[test]
    fn chunk_equals_torch_chunk() {
        let parts = |n, k| (0..k).map(|r| chunk(n, k, r)).map(|c| (c.end - c.start, c.start)).collect::<Vec<_>>();
        assert_eq!(parts(10, 4), [(3, 0), (3, 3), (3, 6), (1, 9)]);
        assert_eq!(parts(5, 4), [(2, 0), (2, 2), (1, 4), (0, 5)]);
        assert_eq!(parts(9, 8), [(2, 0), (2, 2), (2, 4), (2, 6), (1, 8), (0, 9), (0, 9), (0, 9)]);
        assert_eq!(parts(1, 4), [(1, 0), (0, 1), (0, 1), (0, 1)]);
        assert_eq!(parts(0, 2), [(0, 0), (0, 0)]);
        assert_eq!(chunk(u64::MAX, 2, u64::MAX), u64::MAX..u64::MAX);
    }

    #[test]
    fn explicit_splits_replace_torch_chunk() {
        let indices = |n, splits: &[Split]| -> Vec<Vec<u64>> {
            let part = |r: u64| local_part(&[n], &[2, 2], &[S0, S0], splits, &[r / 2, r % 2]).unwrap();
            (0..4).map(|r| part(r).dims()[0].iter().flatten().collect()).collect()
        };
        assert_eq!(indices(5, &[]), [vec![0, 1], vec![2], vec![3], vec![4]]);
        let sizes = |list: &[u64]| Split::Sizes(list.into());
        assert_eq!(indices(5, &[sizes(&[1, 4]), Split::Chunk]), [vec![0], vec![], vec![1, 2], vec![3, 4]]);
        assert_eq!(indices(6, &[sizes(&[3, 3]), sizes(&[1, 2])]), [vec![0], vec![1, 2], vec![3], vec![4, 5]]);
        let part = |n, split| local_part(&[n], &[2], &[strided(2)], &[split], &[0]).map(|tile| tile.to_string());
        assert_eq!(part(8, Split::Makani), Ok("[0:2+4:6]".to_owned()));
        assert!(part(9, Split::Makani).unwrap_err().to_string().contains("makani"));
        assert!(part(8, sizes(&[4, 4])).is_err());
        assert!(local_part(&[4], &[2], &[S0], &[Split::Chunk, Split::Chunk], &[0]).is_err());
        assert!(local_part(&[4], &[2], &[S0], &[sizes(&[4, 1])], &[0]).unwrap_err().to_string().contains("4+1"));
    }

    #[test]
    fn two_mesh_dims_on_one_tensor_dim_split_in_sequence() {
        assert_eq!(indices(8, &[2, 2], &[S0, S0]), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(indices(5, &[2, 2], &[S0, S0]), [vec![0, 1], vec![2], vec![3], vec![4]]);
        assert_eq!(indices(3, &[2, 2], &[S0, S0]), [vec![0], vec![1], vec![2], vec![]]);
        let sizes: Vec<_> = indices(7, &[2, 3], &[S0, S0]).iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 2, 0, 1, 1, 1]);
        assert_eq!(indices(3, &[2], &[Replicate]), [[0, 1, 2], [0, 1, 2]]);
    }

    #[test]
    fn empty_shard_has_the_global_size_as_its_offset() {
        let tile = local_shard(&[7], &[2, 3], &[S0, S0], &[0, 2]).unwrap();
        assert_eq!((tile.sizes().to_vec(), tile.global_offsets(&[7]).to_vec()), (vec![0], vec![7]));
        let tile = local_shard(&[7], &[2, 3], &[S0, S0], &[1, 1]).unwrap();
        assert_eq!(tile.global_offsets(&[7]).to_vec(), [5]);
    }

    #[test]
    fn strided_shard_takes_a_part_of_each_block() {
        assert_eq!(indices(8, &[2], &[strided(2)]), [[0, 1, 4, 5], [2, 3, 6, 7]]);
        assert_eq!(indices(9, &[4], &[strided(2)]), [vec![0, 1, 5], vec![2, 3, 6], vec![4, 7], vec![8]]);
        assert_eq!(indices(5, &[2], &[strided(2)]), [vec![0, 1, 3], vec![2, 4]]);
        assert_eq!(indices(10, &[4], &[strided(3)]), [vec![0, 4, 8], vec![1, 5, 9], vec![2, 6], vec![3, 7]]);
        assert_eq!(indices(3, &[2], &[strided(4)]), [vec![0, 1, 2], vec![]]);
        assert_eq!(indices(8, &[2, 2], &[S0, strided(2)]), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    }

    #[test]
    fn fsdp_over_tp_splits_tp_first_and_is_contiguous() {
        let fsdp_tp = |n| indices(n, &[2, 2], &[strided(2), S0]);
        assert_eq!(fsdp_tp(8), [[0, 1], [4, 5], [2, 3], [6, 7]]);
        assert_eq!(fsdp_tp(5), [vec![0, 1], vec![3], vec![2], vec![4]]);
        assert_eq!(fsdp_tp(7), [vec![0, 1], vec![4, 5], vec![2, 3], vec![6]]);
        assert_eq!(fsdp_tp(10), [vec![0, 1, 2], vec![5, 6, 7], vec![3, 4], vec![8, 9]]);
    }

    #[test]
    fn explicit_shard_order_becomes_split_factors() {
        let order = |dims: &[usize]| vec![(TensorDim(0), dims.iter().copied().map(MeshDim).collect())];
        let convert = |mesh: &[u64], dims: &[usize]| from_shard_order(mesh, &vec![S0; mesh.len()], &order(dims));
        assert_eq!(convert(&[4, 3, 2], &[2, 0, 1]), Ok(vec![strided(2), strided(2), S0]));
        assert_eq!(convert(&[2, 2], &[1, 0]), Ok(vec![strided(2), S0]));
        assert_eq!(convert(&[4, 3, 2], &[0, 1, 2]), Ok(vec![S0, S0, S0]));
        assert_eq!(from_shard_order(&[2, 2], &[S0, Replicate], &[]), Ok(vec![S0, Replicate]));
        for wrong in [&[0][..], &[0, 0], &[0, 1, 2], &[0, 7]] {
            assert!(convert(&[2, 2], wrong).is_err(), "{wrong:?}");
        }
        let stored_both = [strided(2), S0];
        assert_eq!(from_shard_order(&[2, 2], &stored_both, &order(&[1, 0])), Ok(stored_both.to_vec()));
        assert!(convert(&[1, 1 << 40, 1 << 40], &[2, 1, 0]).is_err());
    }

    #[test]
    fn mismatch_error_names_expected_and_found() {
        let parse = |text| parse_placements(text).unwrap()[0].resolve(1).unwrap();
        let error = |shape: &[u64], mesh: &[u64], placement, at: &[u64]| {
            local_shard(shape, mesh, &[placement], at).unwrap_err().to_string()
        };
        assert!(error(&[], &[2], parse("S(0)"), &[0]).contains("shards dim 0, but the tensor has 0 dims"));
        assert!(error(&[4], &[2, 2], parse("R"), &[0, 0]).contains("expected one placement for each of 2"));
        assert!(error(&[4], &[2], parse("R"), &[2]).contains("(2,), found (2,)"));
        assert!(error(&[4], &[2], parse("R"), &[]).contains("found ()"));
        assert!(error(&[4], &[2], strided(0), &[0]).contains("has the split factor 0"));
        assert!(error(&[u64::MAX], &[2], strided(1 << 60), &[0]).contains("supports at most 1048576"));
    }

    #[test]
    fn interleaved_shard_is_one_run() {
        let tile = local_shard(&[1_000_000], &[10], &[strided(100_000)], &[3]).unwrap();
        assert_eq!(tile.dims()[0], Intervals::progression(3, 10, 100_000, 1));
    }
}
