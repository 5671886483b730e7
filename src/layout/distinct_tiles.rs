//! The distinct tiles of a tensor on a mesh, and the ranks that hold each tile.
//!
//! Offsets and sizes count elements. Each mesh dim shards at most one tensor dim, so the indices that a rank holds of a
//! tensor dim depend only on the rank's coordinates on the mesh dims that shard this tensor dim. Each tensor dim is
//! therefore split once for all ranks, and the tile of a rank is looked up in constant time. This matters when 16,384
//! ranks share thousands of tensors.
//!
//! ```text
//!     (S(0), S(1)) on dp=2,tp=2       dim 0: dp=0 a, dp=1 b       rank 2 at (1, 0): b x c
//!                                     dim 1: tp=0 c, tp=1 d
//! ```
//!
//! A part is the set of indices of one tensor dim that a rank holds. Invariant: the parts of a tensor dim are disjoint,
//! so if two parts are equal, both are empty. The PyTorch code is `compute_local_shape_and_global_offset` in
//! `torch/distributed/tensor/_utils.py`.

use smallvec::SmallVec;

use super::shard::{DimCut, check_counts};
use super::{DeviceMesh, Dims, Intervals, LayoutError, MeshDim, Placement, Rank, Split, Tile, local_part};

/// A mesh, and the placements of one tensor on it.
#[derive(Clone, Copy, Debug)]
pub struct MeshPlacement<'a> {
    pub mesh: &'a DeviceMesh,
    pub shared: &'a SharedTensor,
}

/// The placements of one tensor: how its elements are distributed over the ranks of a mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedTensor {
    /// One placement for each mesh dim.
    pub placements: Vec<Placement>,
    /// One split rule for each mesh dim. The list is empty if all split rules are `torch.chunk`, as for DTensors.
    pub splits: Vec<Split>,
    /// If the tensor is on a slice of the mesh, the mesh dims of this slice; otherwise `None`. On mesh dims that are
    /// not in the slice, the tensor is replicated.
    pub slice: Option<Vec<MeshDim>>,
}

impl From<Vec<Placement>> for SharedTensor {
    fn from(placements: Vec<Placement>) -> Self {
        Self { placements, splits: Vec::new(), slice: None }
    }
}

impl SharedTensor {
    /// Returns whether the ranks hold partial values, which must be reduced to get the tensor.
    pub fn is_partial(&self) -> bool {
        self.placements.iter().any(|placement| placement.is_partial())
    }

    /// Returns the tile of the rank at `coordinate`.
    ///
    /// # Errors
    /// The errors of [`local_part`].
    pub fn part(&self, shape: &[u64], mesh: &DeviceMesh, coordinate: &[u64]) -> Result<Tile, LayoutError> {
        local_part(shape, mesh.shape(), &self.placements, &self.splits, coordinate)
    }
}

/// A tile, and the ranks that hold this tile, in ascending order.
pub type HeldTile = (Tile, SmallVec<[Rank; 4]>);

/// The distinct parts of one tensor dim (a part is a set of indices that a rank holds), and the part of each mesh
/// coordinate.
struct DimParts {
    parts: Vec<Intervals>,
    /// The index in `parts` of the empty part, if there is one.
    empty: Option<u32>,
    /// For each combination of coordinates on the mesh dims that shard this tensor dim, the index in `parts` of the
    /// part that ranks at these coordinates hold. The combinations are in row-major order.
    part_of: Vec<u32>,
    /// For each mesh dim, the stride in `part_of`: how far the index in `part_of` advances if the coordinate on this
    /// mesh dim increases by one. The stride is 0 for mesh dims that do not shard this tensor dim.
    steps: Dims,
}

impl DimParts {
    fn whole(n: u64, mesh_ndim: usize) -> Self {
        let empty = (n == 0).then_some(0);
        Self { parts: vec![Intervals::full(n)], empty, part_of: vec![0], steps: smallvec::smallvec![0; mesh_ndim] }
    }

    /// Splits every part (a set of indices of this tensor dim) further by the mesh dim `mesh_dim`: into one part for
    /// each coordinate of this mesh dim.
    fn cut(&mut self, mesh_dim: usize, cut: &DimCut<'_>) -> Result<(), LayoutError> {
        let whole = std::mem::take(&mut self.parts);
        let of = std::mem::take(&mut self.part_of);
        self.empty = None;
        for part in of {
            for r in 0..cut.parts {
                let part = cut.part(&whole[part as usize], r)?;
                let number = match self.empty.filter(|_| part.is_empty()) {
                    Some(empty) => empty,
                    None => {
                        let number = u32::try_from(self.parts.len()).expect("no more parts than ranks");
                        self.empty = self.empty.or(part.is_empty().then_some(number));
                        self.parts.push(part);
                        number
                    }
                };
                self.part_of.push(number);
            }
        }
        self.steps.iter_mut().for_each(|step| *step *= cut.parts);
        self.steps[mesh_dim] = 1;
        Ok(())
    }

    fn part_at(&self, coordinate: &[u64]) -> usize {
        let at: u64 = self.steps.iter().zip(coordinate).map(|(step, at)| step * at).sum();
        self.part_of[usize::try_from(at).expect("an index of a list")] as usize
    }
}

/// Returns the distinct tiles of a tensor, each with the ranks that hold it. The tiles are in the order in which they
/// first occur if the ranks of the mesh are visited in row-major order.
///
/// # Errors
/// `LayoutError` if the placements do not fit the shape.
pub fn shards(shape: &[u64], MeshPlacement { mesh, shared }: MeshPlacement<'_>) -> Result<Vec<HeldTile>, LayoutError> {
    check_counts(mesh.shape(), &shared.placements, &shared.splits)?;
    let mut axes: SmallVec<[DimParts; 4]> = shape.iter().map(|&n| DimParts::whole(n, mesh.ndim())).collect();
    for mesh_dim in 0..mesh.ndim() {
        if let Some(cut) = DimCut::new(shape, mesh.shape(), &shared.placements, &shared.splits, mesh_dim)? {
            axes[cut.dim.0].cut(mesh_dim, &cut)?;
        }
    }
    const NEW: u32 = u32::MAX;
    let mut shards: Vec<HeldTile> = Vec::new();
    // For each cell (a combination of parts), the index of its tile in `shards`. Each cell belongs to at least one rank,
    // so there are no more cells than ranks.
    let mut known = vec![NEW; axes.iter().map(|axis| axis.parts.len()).product()];
    for (rank, coordinate) in mesh.coordinates() {
        let parts: SmallVec<[usize; 4]> = axes.iter().map(|axis| axis.part_at(&coordinate)).collect();
        let cell = axes.iter().zip(&parts).fold(0, |cell, (axis, part)| cell * axis.parts.len() + part);
        if known[cell] == NEW {
            known[cell] = u32::try_from(shards.len()).expect("no more tiles than ranks");
            let tile = Tile::new(axes.iter().zip(&parts).map(|(axis, &part)| axis.parts[part].clone()));
            shards.push((tile, SmallVec::new()));
        }
        shards[known[cell] as usize].1.push(rank);
    }
    shards.iter_mut().for_each(|(_, ranks)| ranks.sort_unstable());
    Ok(shards)
}

#[cfg(test)]
mod tests {
    use indexmap::IndexMap;
    use proptest::prelude::*;

    use super::super::TensorDim;
    use super::*;

    fn placement() -> impl Strategy<Value = Placement> {
        let dim = (0..2_usize).prop_map(TensorDim);
        prop_oneof![
            Just(Placement::Replicate),
            dim.clone().prop_map(Placement::Shard),
            (dim, 1..5_u64).prop_map(|(dim, split_factor)| Placement::StridedShard { dim, split_factor }),
        ]
    }

    proptest! {
        #[test]
        fn tile_of_every_rank_equals_its_local_part(
            shape in prop::collection::vec(0..9_u64, 2),
            dims in prop::collection::vec((1..4_u64, placement(), any::<bool>()), 1..4),
            reversed in any::<bool>(),
        ) {
            let sizes: Dims = dims.iter().map(|(size, ..)| *size).collect();
            let mut ranks: Vec<Rank> = (0..u32::try_from(sizes.iter().product::<u64>()).unwrap()).map(Rank).collect();
            if reversed {
                ranks.reverse();
            }
            let mesh = DeviceMesh::new(sizes, ranks, None).unwrap();
            let splits = dims.iter().map(|(.., balanced)| if *balanced { Split::Balanced } else { Split::Chunk });
            let placements = dims.iter().map(|(_, placement, _)| *placement).collect();
            let shared = SharedTensor { placements, splits: splits.collect(), slice: None };
            let mut expected: IndexMap<Tile, Vec<Rank>> = IndexMap::new();
            let each = mesh.coordinates().map(|(rank, at)| Ok((shared.part(&shape, &mesh, &at)?, rank)));
            let each: Result<Vec<(Tile, Rank)>, LayoutError> = each.collect();
            let found = shards(&shape, MeshPlacement { mesh: &mesh, shared: &shared });
            // If a layout has several errors, `shards` and `part` may report different errors.
            prop_assert_eq!(found.is_err(), each.is_err());
            let (Ok(found), Ok(each)) = (found, each) else { return Ok(()) };
            each.into_iter().for_each(|(tile, rank)| expected.entry(tile).or_default().push(rank));
            expected.values_mut().for_each(|ranks| ranks.sort_unstable());
            let found: Vec<(Tile, Vec<Rank>)> = found.into_iter().map(|(tile, ranks)| (tile, ranks.to_vec())).collect();
            prop_assert_eq!(found, expected.into_iter().collect::<Vec<_>>());
        }
    }
}
