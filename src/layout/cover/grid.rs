//! Tiles that are all combinations of a few classes per dim.
//!
//! Counts elements, and cells: one combination of classes is a cell. Invariant: the classes of an
//! axis are disjoint and together the whole dim, and every cell is held by one tile. So tiles
//! are disjoint and leave nothing out, whatever the classes look like; interleaved ones too:
//!
//! ```text
//!     axis 0: {0:1+2:3, 1:2+3:4}, axis 1: {0:2, 2:4}        a a b b
//!     cells 00=a 01=b 10=c 11=d                             c c d d
//!                                                           a a b b
//!                                                           c c d d
//! ```
//!
//! That every `DTensor` layout is such a product follows from the per-dim rules in
//! `torch/distributed/tensor/_utils.py`.

use smallvec::SmallVec;

use super::{CoverError, Numbered, gap, start};
use crate::layout::{Dims, Intervals, Tile, numel, unravel};

/// One tile for every combination of one class per axis.
#[derive(Clone, Debug)]
pub(super) struct Grid {
    axes: SmallVec<[Axis; 4]>,
    /// The tile of each cell, row-major.
    cells: Vec<usize>,
}

impl Grid {
    /// `None` when the tiles are no grid, complete or not, and some other proof is needed.
    pub(super) fn prove(shape: &[u64], tiles: &[Numbered<'_>]) -> Option<Result<Self, CoverError>> {
        let axes = (0..shape.len())
            .map(|dim| Axis::new(shape[dim], tiles.iter().map(|(_, tile)| &tile.dims()[dim])))
            .collect::<Option<SmallVec<[Axis; 4]>>>()?;
        let extent: Dims = axes.iter().map(|axis| axis.classes.len() as u64).collect();
        let count = numel(&extent)?;

        let mut cells: Vec<(u64, Numbered<'_>)> = Vec::with_capacity(tiles.len());
        for &(index, tile) in tiles {
            let classes = axes.iter().zip(tile.dims());
            let cell = classes
                .fold(0, |cell, (axis, dim)| cell * axis.classes.len() as u64 + axis.class_at(start(dim)) as u64);
            cells.push((cell, (index, tile)));
        }
        cells.sort_unstable_by_key(|&(cell, (index, _))| (cell, index));

        if let Some([(_, (first, tile)), (_, (second, _))]) = cells.array_windows().find(|[a, b]| a.0 == b.0) {
            let (first, second) = (*first, *second);
            let region = tile.first_region().expect("empty tiles were left out");
            return Some(Err(CoverError::Overlap { first, second, region }));
        }
        // No cell twice, so the first one out of step is the first one missing. Classes are in
        // order of their first index, which makes it the first in row-major order as well.
        let missing = (0..count).zip(&cells).find(|(expected, (cell, _))| expected != cell);
        let missing = missing.map_or(cells.len() as u64, |(cell, _)| cell);
        if missing < count {
            let classes = axes.iter().zip(unravel(missing, &extent));
            let cell = Tile::new(classes.map(|(axis, class)| axis.class(class).clone()));
            let region = cell.first_region().expect("no class is empty");
            return Some(Err(CoverError::Gap { region: gap::grown(region, shape, tiles) }));
        }
        Some(Ok(Self { axes, cells: cells.into_iter().map(|(_, (index, _))| index).collect() }))
    }

    /// Appends the tiles that hold some of `tile`.
    pub(super) fn overlapping(&self, tile: &Tile, found: &mut Vec<usize>) {
        let mut cells = vec![0];
        for (axis, dim) in self.axes.iter().zip(tile.dims()) {
            let classes: SmallVec<[usize; 8]> = axis.overlapping(dim).collect();
            let rows = cells.iter().map(|cell| cell * axis.classes.len());
            cells = rows.flat_map(|row| classes.iter().map(move |class| row + class)).collect();
        }
        found.extend(cells.into_iter().map(|cell| self.cells[cell]));
    }
}

/// The classes of one dim, by their first index.
#[derive(Clone, Debug)]
struct Axis {
    classes: Vec<Intervals>,
    /// Whether every class is one interval, so that their ends ascend as well.
    single: bool,
}

impl Axis {
    /// `None` when two of the classes are different and not disjoint. What no class holds of the
    /// dim becomes one more class, whose cells will be found to be missing.
    fn new<'a>(n: u64, held: impl Iterator<Item = &'a Intervals>) -> Option<Self> {
        let mut classes: Vec<&Intervals> = held.collect();
        classes.sort_unstable_by_key(|class| start(class));
        classes.dedup();
        // Classes that are disjoint hold no more than the dim. Asked first, because a few wide
        // ones that overlap may have very many intervals.
        classes.iter().try_fold(n, |left, class| left.checked_sub(class.len()))?;

        // A stable sort merges ascending runs, which is what the classes are.
        let mut intervals: Vec<_> = classes.iter().flat_map(|class| class.iter()).collect();
        intervals.sort_by_key(|interval| interval.start);
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

        let mut classes: Vec<Intervals> = classes.into_iter().cloned().collect();
        if !rest.is_empty() {
            let place = classes.partition_point(|class| start(class) < start(&rest));
            classes.insert(place, rest);
        }
        let single = classes.iter().all(|class| class.as_single().is_some());
        Some(Self { classes, single })
    }

    #[expect(clippy::cast_possible_truncation, reason = "the index of an element of a Vec")]
    fn class(&self, index: u64) -> &Intervals {
        &self.classes[index as usize]
    }

    /// The class whose first index this is: disjoint classes have different ones.
    fn class_at(&self, first: u64) -> usize {
        self.classes.partition_point(|class| start(class) < first)
    }

    /// The classes that hold some of `dim`.
    fn overlapping<'a>(&'a self, dim: &'a Intervals) -> impl Iterator<Item = usize> + 'a {
        let wanted = dim.bounds();
        let from =
            if self.single { self.classes.partition_point(|class| class.bounds().end <= wanted.start) } else { 0 };
        let to = self.classes.partition_point(|class| start(class) < wanted.end);
        (from..to).filter(|&class| self.classes[class].first_common(dim).is_some())
    }
}
