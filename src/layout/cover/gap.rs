//! Finds the first gap between tiles, for error messages.
//!
//! Shapes and offsets count elements. A slice is the part of the tensor at one index of a dim. The tiles are disjoint,
//! so a slice is full if and only if the number of elements that all tiles together hold in the slice is the size of the
//! slice. The first slice that is not full contains the first gap in row-major order. The search continues in that
//! slice, along the next dim:
//!
//! ```text
//!     a a b b      rows 0 and 1 are full, row 2 has 3 of 4 elements: the gap is in row 2
//!     a a b b      in row 2, columns 0 to 2 have 1 of 1 element, and column 3 has none
//!     c c c .      so the first gap is [2:3, 3:4]
//! ```

use super::IndexedTile;
use crate::layout::{Dims, Intervals, Region, Tile};

/// Returns a box that no tile overlaps. The box starts at the first element, in row-major order, that no tile holds. The
/// tiles must be disjoint, and at least one element must be in no tile.
pub(super) fn first_gap(shape: &[u64], tiles: &[IndexedTile<'_>]) -> Region {
    let mut hole = Region { offsets: Dims::new(), sizes: Dims::new() };
    let mut across: Vec<&Tile> = tiles.iter().map(|&(_, tile)| tile).collect();
    for dim in 0..shape.len() {
        let full = shape[dim + 1..].iter().product();
        let slice = first_not_full(shape[dim], dim, full, &across);
        hole.offsets.push(slice.start);
        hole.sizes.push(slice.end - slice.start);
        across.retain(|tile| tile.dims()[dim].intersects(&slice));
    }
    grow(hole, shape, tiles)
}

/// Returns the first range of indices along `dim` that has a gap: at each of these indices, the part of the tensor has
/// `full` elements, and the tiles hold fewer. `n` is the size of the dim.
fn first_not_full(n: u64, dim: usize, full: u64, tiles: &[&Tile]) -> std::ops::Range<u64> {
    // Each triple is a change at an index along `dim`: the number of elements that a tile holds in each slice from this
    // index on, or the number of elements that it holds only in the slices before this index. The other number is 0.
    let mut changes: Vec<(u64, u64, u64)> = Vec::new();
    for tile in tiles {
        let slice = tile.dims()[dim + 1..].iter().map(Intervals::len).product();
        for interval in tile.dims()[dim].iter() {
            changes.push((interval.start, slice, 0));
            changes.push((interval.end, 0, slice));
        }
    }
    changes.sort_unstable();
    let (mut count, mut from) = (0, 0);
    for same in changes.chunk_by(|a, b| a.0 == b.0) {
        let at = same[0].0;
        if from < at && count < full {
            return from..at;
        }
        count =
            same.iter().map(|change| change.1).sum::<u64>() + count - same.iter().map(|change| change.2).sum::<u64>();
        from = at;
    }
    from..n
}

/// Extends a gap along each dim until the gap would overlap a tile. The innermost dim is extended first.
pub(super) fn grow(mut hole: Region, shape: &[u64], tiles: &[IndexedTile<'_>]) -> Region {
    for dim in (0..shape.len()).rev() {
        let mut tallest = hole.clone();
        tallest.sizes[dim] = shape[dim] - hole.offsets[dim];
        let tallest = Tile::from_region(&tallest);
        let met = tiles.iter().filter_map(|(_, tile)| tile.first_common(&tallest));
        let end = met.map(|region| region.offsets[dim]).min().unwrap_or(shape[dim]);
        hole.sizes[dim] = end - hole.offsets[dim];
    }
    hole
}
