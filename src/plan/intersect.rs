//! One target tile against the chunks of its source tensor, in elements.
//!
//! ```text
//!   source: S(0) over 3 ranks          target tile: columns 2..5, all rows
//!   +-------+ rank 0                       +---+
//!   |       |                   overlap    | a |  rows of rank 0
//!   +-------+ rank 1             ==>       | b |  rows of rank 1
//!   |       |                              | c |  rows of rank 2
//!   +-------+ rank 2                       +---+
//! ```
//!
//! Source boxes go to target boxes directly: there is no whole tensor in between, and each byte moves once.

use smallvec::SmallVec;

use crate::catalog::{TensorEntry, Tiling};
use crate::error::Result;
use crate::layout::{Dims, Segment, Tile};

/// A source tensor, proven and ready to be planned against.
#[derive(Debug)]
pub struct Source<'a> {
    pub entry: &'a TensorEntry,
    pub tiling: Tiling,
}

impl<'a> Source<'a> {
    /// # Errors
    /// As [`TensorEntry::tiling`].
    pub fn new(entry: &'a TensorEntry) -> Result<Self> {
        Ok(Self { entry, tiling: entry.tiling()? })
    }

    /// What a target tile takes from the source, or `None` where the tile is empty.
    #[must_use]
    pub fn plan(&self, target: &Tile) -> TilePlan {
        let mut overlaps = Vec::new();
        if !target.is_empty() {
            for index in self.tiling.cover.overlapping(target) {
                if let Some(segments) = overlap(&self.tiling.tiles[index], target) {
                    let tile = &self.tiling.tiles[index];
                    overlaps.push(Overlap {
                        chunk: self.tiling.holders[index][0],
                        source_sizes: tile.sizes(),
                        segments,
                    });
                }
            }
        }
        TilePlan { sizes: target.sizes(), overlaps }
    }
}

/// Where the contents of a target tile come from: overlaps that together hold every element of it exactly once.
#[derive(Debug)]
pub struct TilePlan {
    /// Sizes of the target's local tensor.
    pub sizes: Dims,
    pub overlaps: Vec<Overlap>,
}

/// The common part of one source chunk and the target tile, as a product over dims.
#[derive(Debug)]
pub struct Overlap {
    /// Index into the source tensor's chunk table.
    pub chunk: u32,
    /// Sizes of that chunk's local tensor, from which its strides follow where it is contiguous.
    pub source_sizes: Dims,
    /// For each dim the common stretches: `left` counts in the source's local tensor, `right` in the target's.
    pub segments: SmallVec<[Vec<Segment>; 4]>,
}

/// `None` where the tiles have nothing in common.
fn overlap(source: &Tile, target: &Tile) -> Option<SmallVec<[Vec<Segment>; 4]>> {
    let mut segments = SmallVec::with_capacity(source.dims().len());
    for (left, right) in source.dims().iter().zip(target.dims()) {
        let common = left.intersect(right);
        if common.is_empty() {
            return None;
        }
        segments.push(common);
    }
    Some(segments)
}
