//! Tiles of any shape, found by cutting the tensor where no tile is cut.
//!
//! Counts elements. A set of tiles is sorted along a dim; wherever all tiles so far have ended
//! before the next begins, there is a cut, and the slabs on its two sides can be told apart by that
//! dim alone. Each slab goes on along the other dims. What cannot be cut (a pinwheel, interleaved
//! tiles, or an overlap) stays together and is swept.
//!
//! ```text
//!     a a b       a pinwheel: every straight line cuts a tile, so five tiles are one leaf
//!     d e b
//!     d c c
//! ```
//!
//! Invariant: tiles in different slabs are disjoint by construction, those in one leaf because they
//! were compared; and together they have as many elements as the tensor.

use std::ops::Range;

use super::{CoverError, Found, Numbered, gap, start};
use crate::layout::Tile;

/// How deep slabs may lie within slabs. Real tilings need one or two levels per dim; a tiling made
/// to need thousands is swept from here on instead of exhausting the stack.
const MAX_DEPTH: usize = 32;

/// Slabs within slabs, down to tiles.
#[derive(Clone, Debug)]
pub(super) struct Slabs {
    root: SlabNode,
}

#[derive(Clone, Debug)]
enum SlabNode {
    /// One tile, which fills its slab.
    One(usize),
    /// Tiles that no cut separates.
    Swept(Vec<(usize, Tile)>),
    /// Slabs along a dim, ascending and disjoint.
    Cut { dim: usize, slabs: Vec<(Range<u64>, SlabNode)> },
}

impl Slabs {
    pub(super) fn prove(shape: &[u64], numel: u64, tiles: &[Numbered<'_>]) -> Result<Self, CoverError> {
        let root = SlabNode::build(shape.len(), &mut tiles.to_vec(), 0)?;
        // Disjoint and within bounds, so the sum is at most the tensor's own.
        if tiles.iter().map(|(_, tile)| tile.numel()).sum::<u64>() < numel {
            return Err(CoverError::Gap { region: gap::first(shape, tiles) });
        }
        Ok(Self { root })
    }

    /// Appends the tiles that hold some of `tile`.
    pub(super) fn overlapping(&self, tile: &Tile, found: &mut Found) {
        self.root.overlapping(tile, found);
    }
}

impl SlabNode {
    fn build(ndim: usize, tiles: &mut [Numbered<'_>], depth: usize) -> Result<Self, CoverError> {
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

    fn overlapping(&self, tile: &Tile, found: &mut Found) {
        match self {
            Self::One(index) => found.push(*index),
            Self::Swept(tiles) => {
                let common = tiles.iter().filter(|(_, held)| held.first_common(tile).is_some());
                found.extend(common.map(|(index, _)| *index));
            }
            Self::Cut { dim, slabs } => {
                let dim = &tile.dims()[*dim];
                let wanted = dim.bounds();
                let from = slabs.partition_point(|(slab, _)| slab.end <= wanted.start);
                let within = slabs[from..].iter().take_while(|(slab, _)| slab.start < wanted.end);
                for (_, node) in within.filter(|(slab, _)| dim.meets(slab)) {
                    node.overlapping(tile, found);
                }
            }
        }
    }
}

/// Where tiles that are sorted along `dim` can be cut: after how many of them, and at which index.
/// The last cut is the end of them all.
fn cuts(tiles: &[Numbered<'_>], dim: usize) -> Vec<(usize, u64)> {
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

/// Compares every tile with those that are still open where it begins, along the dim on which
/// tiles are most apart.
fn sweep(ndim: usize, tiles: &mut [Numbered<'_>]) -> Result<(), CoverError> {
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
    let mut open: Vec<Numbered<'_>> = Vec::new();
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
