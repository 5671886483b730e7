//! Covers in which the tiles form a grid: each dim is divided into a few classes of indices, and each combination of
//! classes is one tile.
//!
//! Offsets and sizes count elements. A class is a set of indices of one dim, and a cell is one combination of classes.
//! Invariant: the classes of a dim are disjoint and cover the dim, and every cell is exactly one tile. So the tiles are
//! disjoint and leave no gap, even if the classes are interleaved:
//!
//! ```text
//!     axis 0: {0:1+2:3, 1:2+3:4}, axis 1: {0:2, 2:4}        a a b b
//!     cells 00=a 01=b 10=c 11=d                             c c d d
//!                                                           a a b b
//!                                                           c c d d
//! ```
//!
//! Every `DTensor` layout is such a grid, because `torch/distributed/tensor/_utils.py` splits each dim separately.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::{CoverError, IndexedTile, TileIndices, gap, start};
use crate::layout::{Dims, Intervals, Tile, unravel};

/// A cover whose tiles form a grid. A class is a set of indices of one dim, and there is one tile for every combination
/// of classes.
#[derive(Clone, Debug)]
pub(super) struct Grid {
    axes: SmallVec<[GridAxis; 4]>,
    /// For each cell, in row-major order, the index of its tile in the caller's list of tiles.
    cells: Vec<usize>,
}

impl Grid {
    /// Proves that the tiles form a grid and that each cell of the grid is one tile. Returns `None` if the tiles do not
    /// form a grid; the caller then uses another proof. A cell with two tiles or without a tile is an error.
    pub(super) fn prove(shape: &[u64], tiles: &[IndexedTile<'_>]) -> Option<Result<Self, CoverError>> {
        let mut axes: SmallVec<[GridAxis; 4]> = SmallVec::new();
        let mut cells: Vec<(u64, usize)> = (0..tiles.len()).map(|at| (0, at)).collect();
        let mut count: u64 = 1;
        for (dim, &n) in shape.iter().enumerate() {
            let (axis, classes) = GridAxis::new(n, tiles.iter().map(|(_, tile)| &tile.dims()[dim]))?;
            let extent = axis.classes.len() as u64;
            count = count.checked_mul(extent)?;
            cells.iter_mut().zip(classes).for_each(|((cell, _), class)| *cell = *cell * extent + u64::from(class));
            axes.push(axis);
        }
        // Sorts by cell, and equal cells by the index of their tile.
        cells.sort_unstable();

        if let Some([(_, first), (_, second)]) = cells.array_windows().find(|[a, b]| a.0 == b.0) {
            let ((first, tile), (second, _)) = (tiles[*first], tiles[*second]);
            let region = tile.first_region().expect("empty tiles were left out");
            return Some(Err(CoverError::Overlap { first, second, region }));
        }
        // Cells are distinct here, so the first unexpected cell shows the first missing cell. The classes of a dim are
        // sorted by their first index, so the missing cell is also the first gap in row-major order.
        let missing = (0..count).zip(&cells).find(|(expected, (cell, _))| expected != cell);
        let missing = missing.map_or(cells.len() as u64, |(cell, _)| cell);
        if missing < count {
            let extent: Dims = axes.iter().map(|axis| axis.classes.len() as u64).collect();
            let classes = axes.iter().zip(unravel(missing, &extent));
            let cell = Tile::new(classes.map(|(axis, class)| axis.class(class).clone()));
            let region = cell.first_region().expect("no class is empty");
            return Some(Err(CoverError::Gap { region: gap::grow(region, shape, tiles) }));
        }
        Some(Ok(Self { axes, cells: cells.into_iter().map(|(_, at)| tiles[at].0).collect() }))
    }

    /// Appends to `found` the indices of the tiles that overlap `tile`.
    pub(super) fn overlapping(&self, tile: &Tile, found: &mut TileIndices) {
        let mut cells: TileIndices = smallvec![0];
        for (axis, dim) in self.axes.iter().zip(tile.dims()) {
            let classes: TileIndices = axis.overlapping(dim).collect();
            let rows = cells.iter().map(|cell| cell * axis.classes.len());
            cells = rows.flat_map(|row| classes.iter().map(move |class| row + class)).collect();
        }
        found.extend(cells.into_iter().map(|cell| self.cells[cell]));
    }
}

/// The classes of one dim, sorted by their first index. A class is a set of indices, and the classes are disjoint.
#[derive(Clone, Debug)]
struct GridAxis {
    classes: Vec<Intervals>,
    /// True if every class is a single interval. In this case the ends of the classes ascend, as their starts always
    /// do.
    single: bool,
}

impl GridAxis {
    /// Returns the classes of a dim of size `n`, and for each tile the number of its class. `tile_dims` has the indices
    /// of this dim that each tile holds; each distinct set of indices is a class. Returns `None` if two different classes
    /// overlap. Indices that belong to no class form an additional class. No tile fills the cells of the additional
    /// class, so these cells are found as a gap.
    fn new<'a>(n: u64, tile_dims: impl Iterator<Item = &'a Intervals>) -> Option<(Self, Vec<u32>)> {
        let tile_dims: Vec<&Intervals> = tile_dims.collect();
        let mut order: Vec<(u64, u32)> = tile_dims.iter().map(|class| start(class)).zip(0..).collect();
        order.sort_unstable();
        let mut classes: Vec<Intervals> = Vec::new();
        let mut class_of = vec![0; tile_dims.len()];
        // Disjoint classes have together at most `n` indices. This is checked before intervals are compared, because
        // overlapping classes may have very many intervals.
        let mut left = n;
        for (first, at) in order {
            let class = tile_dims[at as usize];
            if classes.last().map(start) != Some(first) {
                left = left.checked_sub(class.len())?;
                classes.push(class.clone());
            } else if classes.last() != Some(class) {
                return None;
            }
            class_of[at as usize] = u32::try_from(classes.len() - 1).expect("fewer classes than tiles");
        }
        let single = classes.iter().all(|class| class.as_single().is_some());
        let rest = rest(n, &classes, single)?;
        if rest.is_empty() {
            return Some((Self { classes, single }, class_of));
        }
        let place = classes.partition_point(|class| start(class) < start(&rest));
        class_of.iter_mut().filter(|class| **class as usize >= place).for_each(|class| *class += 1);
        let single = single && rest.as_single().is_some();
        classes.insert(place, rest);
        Some((Self { classes, single }, class_of))
    }

    #[expect(clippy::cast_possible_truncation, reason = "the index of an element of a Vec")]
    fn class(&self, index: u64) -> &Intervals {
        &self.classes[index as usize]
    }

    /// Returns the numbers of the classes that share at least one index with `dim`.
    fn overlapping<'a>(&'a self, dim: &'a Intervals) -> impl Iterator<Item = usize> + 'a {
        let target = dim.bounds();
        let from =
            if self.single { self.classes.partition_point(|class| class.bounds().end <= target.start) } else { 0 };
        let both_single = self.single && dim.as_single().is_some();
        let within = self.classes[from..].iter().take_while(move |class| start(class) < target.end);
        let common = move |class: &Intervals| both_single || class.first_common(dim).is_some();
        (from..).zip(within).filter(move |(_, class)| common(class)).map(|(at, _)| at)
    }
}

/// Returns the indices of a dim of size `n` that belong to no class (set of indices), or `None` if two classes overlap.
/// The classes are sorted by their first index. `single` is true if every class is one interval.
fn rest(n: u64, classes: &[Intervals], single: bool) -> Option<Intervals> {
    // Each class is an ascending run, which a stable sort merges efficiently.
    let mut intervals: Vec<Range<u64>> = classes.iter().flat_map(Intervals::iter).collect();
    if !single {
        intervals.sort_by_key(|interval| interval.start);
    }
    let mut rest = Intervals::empty();
    let mut end = 0;
    for interval in intervals {
        if interval.start < end {
            return None;
        }
        rest.push(end..interval.start);
        end = interval.end;
    }
    rest.push(end..n);
    Some(rest)
}
