//! The proof that tiles hold every element of a tensor exactly once, kept as a look-up.
//!
//! Counts elements. A hole, an overlap or a tile out of bounds means a damaged or a misread
//! checkpoint, and must be an error that names the place: zeros in a hole look like weights.
//! Whoever holds a [`Cover`] need not ask again, and can find the tiles under a region without
//! trying them all. Replicas are not overlaps; the caller picks one holder of each tile first.
//!
//! There are two ways to the proof, neither of them by pairs:
//!
//! - a [`Grid`]: along each dim the tiles fall into a few disjoint classes of
//!   intervals, and every combination of classes is one tile. Every `DTensor` layout is one,
//!   also when it interleaves, because `torch/distributed/tensor/_utils.py` splits each dim by
//!   itself.
//! - [`Slabs`]: any other boxes, as flat parameters and hand-made chunks give them.
//!   Cut the tensor where no tile is cut, and go on within each slab.
//!
//! ```text
//!     grid             slabs
//!     a a | b b        a a | b b        first cut between rows 0 and 1, then the upper slab
//!     ----+----        ----+----        between its columns 1 and 2, the lower between 0 and 1
//!     c c | d d        c | d d d
//! ```
//!
//! Invariant: disjoint, within bounds, and as many elements as the tensor; hence a tiling.

mod gap;
mod grid;
mod slabs;

use smallvec::SmallVec;

use super::{Intervals, Region, Tile, numel};
use grid::Grid;
use slabs::Slabs;

/// Why tiles do not cover a tensor exactly once.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CoverError {
    #[error("tile {tile} at {region} reaches beyond the tensor")]
    OutOfBounds { tile: usize, region: Region },
    #[error("tiles {first} and {second} both hold {region}")]
    Overlap { first: usize, second: usize, region: Region },
    /// The region begins at the first element, in row-major order, that no tile holds.
    #[error("no tile holds {region}")]
    Gap { region: Region },
    #[error("tile {tile}: expected {expected} dims, found {found}")]
    Ndim { tile: usize, expected: usize, found: usize },
}

/// Tiles that are known to cover a shape exactly once, and where each lies.
#[derive(Clone, Debug)]
pub struct Cover {
    index: CoverIndex,
}

#[derive(Clone, Debug)]
enum CoverIndex {
    /// A tensor without elements needs no tiles.
    Nothing,
    /// One tile holds everything.
    Whole(usize),
    Grid(Grid),
    Slabs(Slabs),
}

/// A tile that is not empty, with its index in the caller's list.
type Numbered<'a> = (usize, &'a Tile);

/// Tiles that were found: a handful, for most targets.
type Found = SmallVec<[usize; 8]>;

impl Cover {
    /// Proves that `tiles` hold every element of `shape` exactly once. Empty tiles hold nothing
    /// and are ignored, wherever they claim to be.
    ///
    /// # Errors
    /// The first violation found, in the order: dims, bounds, overlaps, gaps.
    pub fn prove(shape: &[u64], tiles: &[Tile]) -> Result<Self, CoverError> {
        let held: SmallVec<[Numbered<'_>; 1]> = tiles.iter().enumerate().filter(|(_, tile)| !tile.is_empty()).collect();
        for &(index, tile) in &held {
            check_bounds(shape, index, tile)?;
        }
        let index = match numel(shape) {
            Some(0) => CoverIndex::Nothing,
            Some(_)
                if let [(index, tile)] = held.as_slice()
                    && is_whole(shape, tile) =>
            {
                CoverIndex::Whole(*index)
            }
            Some(numel) => match Grid::prove(shape, &held) {
                Some(grid) => CoverIndex::Grid(grid?),
                None => CoverIndex::Slabs(Slabs::prove(shape, numel, &held)?),
            },
            // No storage holds 2^64 elements, so whatever the tiles claim, most of it is missing.
            None => {
                return Err(CoverError::Gap { region: Region::whole(shape) });
            }
        };
        Ok(Self { index })
    }

    /// The tiles that hold some of `tile`, as indices into the list that was proved, ascending.
    pub fn overlapping<'a>(&'a self, tile: &Tile) -> impl Iterator<Item = usize> + use<'a> {
        let mut found = Found::new();
        match &self.index {
            CoverIndex::Nothing => {}
            _ if tile.is_empty() => {}
            CoverIndex::Whole(index) => found.push(*index),
            CoverIndex::Grid(grid) => grid.overlapping(tile, &mut found),
            CoverIndex::Slabs(slabs) => slabs.overlapping(tile, &mut found),
        }
        found.sort_unstable();
        found.into_iter()
    }
}

/// Whether a tile within the shape is all of it.
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

/// The first index that a dim of a tile holds, which is not empty.
fn start(dim: &Intervals) -> u64 {
    dim.bounds().start
}

#[cfg(test)]
mod tests;
