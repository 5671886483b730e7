//! Proves that tiles hold every element of a tensor exactly once, and keeps the proof as an index by which overlapping
//! tiles are found.
//!
//! Shapes and offsets count elements. A gap, an overlap or a tile out of bounds means that a checkpoint is damaged or
//! misread. Such damage must be an error that names the region, because zeros in a gap look like weights. A [`Cover`]
//! exists only for tiles that passed the proof, and finds the tiles that overlap a region without testing all of them.
//! Replicas of a tile are not overlaps: the caller passes each tile only once.
//!
//! There are two proofs, and neither compares all pairs of tiles:
//!
//! - [`Grid`]: along each dim the tiles fall into a few disjoint classes of intervals, and every combination of classes
//!   is one tile. Every `DTensor` layout is a grid, even an interleaved one, because
//!   `torch/distributed/tensor/_utils.py` splits each dim separately.
//! - [`Slabs`]: any other boxes, such as those of flat parameters. The tensor is split into slabs along lines that
//!   split no tile, and each slab is then split in this way again.
//!
//! ```text
//!     grid             slabs
//!     a a | b b        a a | b b        first cut between rows 0 and 1, then the upper slab
//!     ----+----        ----+----        between its columns 1 and 2, the lower between 0 and 1
//!     c c | d d        c | d d d
//! ```
//!
//! Invariant: the tiles are disjoint, within bounds, and have as many elements as the tensor, so they cover it.

mod gap;
mod grid;
mod slabs;

use smallvec::SmallVec;

use super::{Intervals, Region, Tile, numel};
use grid::Grid;
use slabs::Slabs;

/// The reason why tiles do not cover a tensor exactly once.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CoverError {
    #[error("tile {tile} at {region} reaches beyond the tensor")]
    OutOfBounds { tile: usize, region: Region },
    #[error("tiles {first} and {second} both hold {region}")]
    Overlap { first: usize, second: usize, region: Region },
    /// No tile holds the elements of `region`. The region starts at the first such element in row-major order.
    #[error("no tile holds {region}")]
    Gap { region: Region },
    #[error("tile {tile}: expected {expected} dims, found {found}")]
    Ndim { tile: usize, expected: usize, found: usize },
}

/// A set of tiles that together hold every element of a tensor exactly once, stored so that tiles which overlap a given
/// tile are found fast.
#[derive(Clone, Debug)]
pub struct Cover {
    index: CoverIndex,
}

#[derive(Clone, Debug)]
enum CoverIndex {
    /// The tensor has no elements, so it needs no tiles.
    Empty,
    /// A single tile is the complete tensor. The number is the index of this tile in the caller's list.
    Whole(usize),
    Grid(Grid),
    Slabs(Slabs),
}

/// A non-empty tile, with its index in the list of tiles that the caller gave to [`Cover::prove`].
type IndexedTile<'a> = (usize, &'a Tile);

/// Indices of tiles. A target tile usually overlaps only a few source tiles, and a few indices are stored without
/// allocation.
type TileIndices = SmallVec<[usize; 8]>;

impl Cover {
    /// Proves that `tiles` hold every element of `shape` exactly once. Empty tiles are ignored, even if they are out of
    /// bounds.
    ///
    /// # Errors
    /// `Ndim` or `OutOfBounds` for the first non-empty tile that does not fit the shape; otherwise an overlap;
    /// otherwise a gap.
    pub fn prove(shape: &[u64], tiles: &[Tile]) -> Result<Self, CoverError> {
        let non_empty: SmallVec<[IndexedTile<'_>; 1]> =
            tiles.iter().enumerate().filter(|(_, tile)| !tile.is_empty()).collect();
        for &(index, tile) in &non_empty {
            check_bounds(shape, index, tile)?;
        }
        let index = match numel(shape) {
            Some(0) => CoverIndex::Empty,
            Some(_)
                if let [(index, tile)] = non_empty.as_slice()
                    && is_whole(shape, tile) =>
            {
                CoverIndex::Whole(*index)
            }
            Some(numel) => match Grid::prove(shape, &non_empty) {
                Some(grid) => CoverIndex::Grid(grid?),
                None => CoverIndex::Slabs(Slabs::prove(shape, numel, &non_empty)?),
            },
            // No storage holds 2^64 elements, so most of the tensor is missing.
            None => {
                return Err(CoverError::Gap { region: Region::whole(shape) });
            }
        };
        Ok(Self { index })
    }

    /// Returns the tiles that overlap `tile`, as ascending indices into the list of tiles given to [`Cover::prove`].
    pub fn overlapping<'a>(&'a self, tile: &Tile) -> impl Iterator<Item = usize> + use<'a> {
        let mut found = TileIndices::new();
        match &self.index {
            CoverIndex::Empty => {}
            _ if tile.is_empty() => {}
            CoverIndex::Whole(index) => found.push(*index),
            CoverIndex::Grid(grid) => grid.overlapping(tile, &mut found),
            CoverIndex::Slabs(slabs) => slabs.overlapping(tile, &mut found),
        }
        found.sort_unstable();
        found.into_iter()
    }
}

/// Returns whether a tile within the shape is the complete tensor.
fn is_whole(shape: &[u64], tile: &Tile) -> bool {
    tile.dims().iter().zip(shape).all(|(dim, &size)| dim.len() == size)
}

fn check_bounds(shape: &[u64], index: usize, tile: &Tile) -> Result<(), CoverError> {
    let (expected, found) = (shape.len(), tile.ndim());
    if expected != found {
        return Err(CoverError::Ndim { tile: index, expected, found });
    }
    if tile.dims().iter().zip(shape).any(|(dim, &size)| dim.bounds().end > size) {
        return Err(CoverError::OutOfBounds { tile: index, region: tile.bounds() });
    }
    Ok(())
}

/// Returns the first index of a non-empty dim of a tile.
fn start(dim: &Intervals) -> u64 {
    dim.bounds().start
}

#[cfg(test)]
mod tests;
