//! Covers of irregular tiles: the tensor is split recursively along lines that split no tile.
//!
//! Shapes and offsets count elements. Tiles are sorted along a dim. If all earlier tiles end before the next tile
//! starts, the tensor is split at the start of the next tile into two slabs, which are disjoint in this dim. Each slab
//! is split again in the same way, along any dim. Tiles that cannot be separated (a pinwheel, interleaved tiles, or an
//! overlap) form a leaf of the tree, and a sweep compares these tiles with each other.
//!
//! ```text
//!     a a b       a pinwheel: every straight line splits a tile, so five tiles are one leaf
//!     d e b
//!     d c c
//! ```
//!
//! Invariant: tiles in different slabs are disjoint by construction, and tiles in one leaf were compared with each
//! other. All tiles together have as many elements as the tensor.

use std::ops::Range;

use super::{CoverError, IndexedTile, TileIndices, gap, start};
use crate::layout::Tile;

/// The maximum depth of nested slabs. Real tilings need one or two levels for each dim. At the maximum depth, the tiles
/// of a slab are compared with each other, and the slab is not split further. So the recursion does not overflow the
/// stack, even if a hostile tiling would need thousands of levels.
const MAX_DEPTH: usize = 32;

/// A tree of slabs, with tiles at the leaves.
#[derive(Clone, Debug)]
pub(super) struct Slabs {
    root: SlabNode,
}

#[derive(Clone, Debug)]
enum SlabNode {
    /// A leaf with one tile, which fills its slab.
    One(usize),
    /// A leaf with several tiles. A sweep has compared these tiles and found no overlap.
    Swept(Vec<(usize, Tile)>),
    /// A slab that is split along `dim`. The child slabs are ascending and disjoint.
    Cut { dim: usize, slabs: Vec<(Range<u64>, SlabNode)> },
}

impl Slabs {
    /// Proves that non-empty tiles within bounds cover the shape exactly once.
    pub(super) fn prove(shape: &[u64], numel: u64, tiles: &[IndexedTile<'_>]) -> Result<Self, CoverError> {
        let root = SlabNode::build(shape.len(), &mut tiles.to_vec(), 0)?;
        // The tiles are disjoint and within bounds, so the sum cannot exceed the number of elements of the tensor.
        if tiles.iter().map(|(_, tile)| tile.numel()).sum::<u64>() < numel {
            return Err(CoverError::Gap { region: gap::first_gap(shape, tiles) });
        }
        Ok(Self { root })
    }

    /// Appends to `found` the indices of the tiles that overlap `tile`.
    pub(super) fn overlapping(&self, tile: &Tile, found: &mut TileIndices) {
        self.root.overlapping(tile, found);
    }
}

impl SlabNode {
    fn build(ndim: usize, tiles: &mut [IndexedTile<'_>], depth: usize) -> Result<Self, CoverError> {
        if let [(index, _)] = tiles {
            return Ok(Self::One(*index));
        }
        for dim in (0..ndim).filter(|_| depth < MAX_DEPTH) {
            tiles.sort_by_key(|(_, tile)| start(&tile.dims()[dim]));
            let ends = cuts(tiles, dim);
            if ends.len() < 2 {
                continue;
            }
            let mut slabs = Vec::with_capacity(ends.len());
            let (mut rest, mut begin) = (tiles, 0);
            for (last, end) in ends {
                let (slab, others) = rest.split_at_mut(last - begin);
                let from = start(&slab[0].1.dims()[dim]);
                slabs.push((from..end, Self::build(ndim, slab, depth + 1)?));
                (rest, begin) = (others, last);
            }
            return Ok(Self::Cut { dim, slabs });
        }
        sweep(ndim, tiles)?;
        Ok(Self::Swept(tiles.iter().map(|&(index, tile)| (index, tile.clone())).collect()))
    }

    fn overlapping(&self, tile: &Tile, found: &mut TileIndices) {
        match self {
            Self::One(index) => found.push(*index),
            Self::Swept(tiles) => {
                let common = tiles.iter().filter(|(_, other)| other.first_common(tile).is_some());
                found.extend(common.map(|(index, _)| *index));
            }
            Self::Cut { dim, slabs } => {
                let dim = &tile.dims()[*dim];
                let target = dim.bounds();
                let from = slabs.partition_point(|(slab, _)| slab.end <= target.start);
                let within = slabs[from..].iter().take_while(|(slab, _)| slab.start < target.end);
                for (_, node) in within.filter(|(slab, _)| dim.intersects(slab)) {
                    node.overlapping(tile, found);
                }
            }
        }
    }
}

/// Returns the positions at which tiles, sorted along `dim`, can be separated. Each pair has the number of tiles before
/// the split, and the largest end of these tiles along `dim`. The last pair is not a split: it has the number of all
/// tiles, and the largest end of all tiles.
fn cuts(tiles: &[IndexedTile<'_>], dim: usize) -> Vec<(usize, u64)> {
    let mut cuts = Vec::new();
    let mut end = 0;
    for (before, (_, tile)) in tiles.iter().enumerate() {
        let bounds = tile.dims()[dim].bounds();
        if before > 0 && bounds.start >= end {
            cuts.push((before, end));
        }
        end = end.max(bounds.end);
    }
    cuts.push((tiles.len(), end));
    cuts
}

/// Checks that no two tiles overlap. The tiles are sorted along the dim in which they have the most distinct starts.
/// Each tile is compared with the earlier tiles that end, in this dim, after the tile starts.
fn sweep(ndim: usize, tiles: &mut [IndexedTile<'_>]) -> Result<(), CoverError> {
    let distinct = |dim: usize| {
        let mut starts: Vec<u64> = tiles.iter().map(|(_, tile)| start(&tile.dims()[dim])).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let Some(dim) = (0..ndim).max_by_key(|&dim| distinct(dim)) else {
        return Ok(());
    };
    tiles.sort_by_key(|(_, tile)| start(&tile.dims()[dim]));
    let mut open: Vec<IndexedTile<'_>> = Vec::new();
    for &(index, tile) in tiles.iter() {
        let begin = start(&tile.dims()[dim]);
        open.retain(|(_, other)| other.dims()[dim].bounds().end > begin);
        for &(other, earlier) in &open {
            if let Some(region) = tile.first_common(earlier) {
                let (first, second) = (index.min(other), index.max(other));
                return Err(CoverError::Overlap { first, second, region });
            }
        }
        open.push((index, tile));
    }
    Ok(())
}
