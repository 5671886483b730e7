//! Where the first hole between tiles is. Only an error path comes here.
//!
//! Counts elements. The tiles are disjoint, so a slice of the tensor across a dim is full exactly
//! when the slices of the tiles it meets add up to it. The first slice that is not full holds the
//! first hole in row-major order; look on within that slice, along the next dim:
//!
//! ```text
//!     a a b b      rows 0 and 1 are full, row 2 has 3 of 4: the hole is in row 2
//!     a a b b      within it columns 0 to 2 have 1 of 1, column 3 has none
//!     c c c .      so the first hole is [2:3, 3:4]
//! ```

use super::Numbered;
use crate::layout::{Dims, Intervals, Region, Tile};

/// The first hole that disjoint `tiles` leave in `shape`; they leave one.
pub(super) fn first(shape: &[u64], tiles: &[Numbered<'_>]) -> Region {
    let mut hole = Region { offsets: Dims::new(), sizes: Dims::new() };
    let mut across: Vec<&Tile> = tiles.iter().map(|&(_, tile)| tile).collect();
    for dim in 0..shape.len() {
        let full = shape[dim + 1..].iter().product();
        let slice = first_not_full(shape[dim], dim, full, &across);
        hole.offsets.push(slice.start);
        hole.sizes.push(slice.end - slice.start);
        across.retain(|tile| tile.dims()[dim].meets(&slice));
    }
    grown(hole, shape, tiles)
}

/// The first stretch of `dim` whose slices of `full` elements are not filled by these tiles.
fn first_not_full(n: u64, dim: usize, full: u64, tiles: &[&Tile]) -> std::ops::Range<u64> {
    // (index, elements that a slice gains there, elements it loses)
    let mut changes: Vec<(u64, u64, u64)> = Vec::new();
    for tile in tiles {
        let slice = tile.dims()[dim + 1..].iter().map(Intervals::len).product();
        for interval in tile.dims()[dim].iter() {
            changes.push((interval.start, slice, 0));
            changes.push((interval.end, 0, slice));
        }
    }
    changes.sort_unstable();
    let (mut held, mut from) = (0, 0);
    for same in changes.chunk_by(|a, b| a.0 == b.0) {
        let at = same[0].0;
        if from < at && held < full {
            return from..at;
        }
        held = same.iter().map(|change| change.1).sum::<u64>() + held - same.iter().map(|change| change.2).sum::<u64>();
        from = at;
    }
    from..n
}

/// The hole made as large as it goes without meeting a tile, innermost dim first.
pub(super) fn grown(mut hole: Region, shape: &[u64], tiles: &[Numbered<'_>]) -> Region {
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
