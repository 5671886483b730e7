//! Lowers the overlaps of a tile from elements to bytes: each overlap becomes a few strided copies.
//!
//! All sizes and offsets are in bytes, except where the name contains `element`. A [`Piece`] is a small loop nest over
//! runs of bytes that are contiguous in source and target: `run_bytes` at `source`, repeated along a few levels of
//! (count, source step, target step). Neighbouring dims that are contiguous in source and target are merged. So rows
//! that are copied without change are a single piece without levels, for a tensor of any shape.

use std::ops::Range;

use smallvec::SmallVec;

use super::intersect::{Overlap, TilePlan};
use crate::layout::{CommonRange, Dims, Region};

/// One level of a loop nest: a number of repetitions, with a source step and a target step in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopLevel {
    pub count: u64,
    pub source_step: u64,
    pub target_step: u64,
}

/// A strided copy from one source chunk into a write block of the target. A write block is a unit of writing: a byte
/// range of one output file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The index of the overlap in [`TilePlan::overlaps`].
    pub overlap: usize,
    /// The offset in bytes of the first source byte, relative to element 0 of the source chunk.
    pub source: u64,
    /// The offset in bytes of the first target byte, relative to the start of the write block.
    pub target: u64,
    pub run_bytes: u64,
    /// The levels of the loop nest, outermost first.
    pub levels: SmallVec<[LoopLevel; 4]>,
}

impl Piece {
    /// Returns the number of contiguous runs of bytes that the piece copies.
    pub fn runs(&self) -> u64 {
        self.levels.iter().map(|level| level.count).product()
    }

    /// Returns the number of bytes copied.
    pub fn len_bytes(&self) -> u64 {
        self.runs() * self.run_bytes
    }

    /// Returns the number of source bytes from the first byte to the last byte that the piece reads.
    pub fn source_span(&self) -> u64 {
        self.levels.iter().map(|level| (level.count - 1) * level.source_step).sum::<u64>() + self.run_bytes
    }
}

/// The strided copies that fill a range of elements of the target's local tensor. The range is split into boxes, whose
/// copies are visited in row-major order of the boxes.
///
/// `strides` returns, for the index of an overlap, the strides in elements of its source chunk.
pub struct Pieces<'a, S> {
    plan: &'a TilePlan,
    strides: S,
    itemsize: u64,
}

impl<'a, S: Fn(usize) -> &'a Dims> Pieces<'a, S> {
    /// Prepares the pieces of a plan, for elements of `itemsize` bytes.
    #[must_use]
    pub fn new(plan: &'a TilePlan, strides: S, itemsize: u64) -> Self {
        Self { plan, strides, itemsize }
    }

    /// Calls `visit` for every piece of the elements `range` of the target. The target offsets of pieces are relative
    /// to the start of the range.
    ///
    /// # Errors
    /// The first error of `visit`, which ends the iteration.
    pub fn visit<E>(&self, range: Range<u64>, mut visit: impl FnMut(Piece) -> Result<(), E>) -> Result<(), E> {
        let target_strides = crate::catalog::contiguous_strides(&self.plan.sizes);
        for region in Region::cut(&self.plan.sizes, range.clone()) {
            for (index, overlap) in self.plan.overlaps.iter().enumerate() {
                let walk = OverlapWalk {
                    overlap: index,
                    region: &region,
                    source_strides: (self.strides)(index),
                    target_strides: &target_strides,
                    itemsize: self.itemsize,
                    first_element: range.start,
                };
                walk.visit(overlap, &mut visit)?;
            }
        }
        Ok(())
    }
}

/// The state of an iteration over the copies of one overlap that are inside one box of the target.
struct OverlapWalk<'a> {
    overlap: usize,
    region: &'a Region,
    source_strides: &'a [u64],
    target_strides: &'a [u64],
    itemsize: u64,
    first_element: u64,
}

impl OverlapWalk<'_> {
    fn visit<E>(&self, overlap: &Overlap, visit: &mut impl FnMut(Piece) -> Result<(), E>) -> Result<(), E> {
        let ndim = overlap.segments.len();
        let mut clipped: SmallVec<[&[CommonRange]; 4]> = SmallVec::with_capacity(ndim);
        for dim in 0..ndim {
            let (start, size) = (self.region.offsets[dim], self.region.sizes[dim]);
            let inside = within(&overlap.segments[dim], start, start + size);
            if inside.is_empty() {
                return Ok(());
            }
            clipped.push(inside);
        }
        // Iterate over all combinations of common ranges, the last dim fastest.
        let mut at: SmallVec<[usize; 4]> = SmallVec::from_elem(0, ndim);
        loop {
            visit(self.piece(&clipped, &at))?;
            let Some(dim) = (0..ndim).rev().find(|&dim| at[dim] + 1 < clipped[dim].len()) else {
                return Ok(());
            };
            at[dim] += 1;
            at[dim + 1..].fill(0);
        }
    }

    /// Returns the strided copy of one common range for each dim, clipped to the box `region`. `at` has the index of
    /// the common range of each dim.
    fn piece(&self, segments: &[&[CommonRange]], at: &[usize]) -> Piece {
        let (mut source, mut target) = (0, 0);
        let mut levels: SmallVec<[LoopLevel; 4]> = SmallVec::new();
        let mut run_bytes = self.itemsize;
        for dim in (0..segments.len()).rev() {
            let segment = segments[dim][at[dim]];
            let (start, end) = (self.region.offsets[dim], self.region.offsets[dim] + self.region.sizes[dim]);
            let first = segment.right.max(start);
            let count = (segment.right + segment.len).min(end) - first;
            source += (segment.left + (first - segment.right)) * self.source_strides[dim];
            target += first * self.target_strides[dim];
            if count == 1 {
                continue;
            }
            let source_step = self.source_strides[dim] * self.itemsize;
            let target_step = self.target_strides[dim] * self.itemsize;
            // Merge this dim with the contiguous run, or with the level inside it, if source and target are both
            // contiguous.
            match levels.first_mut() {
                None if source_step == run_bytes && target_step == run_bytes => run_bytes *= count,
                Some(inner)
                    if source_step == inner.source_step * inner.count
                        && target_step == inner.target_step * inner.count =>
                {
                    inner.count *= count;
                }
                _ => levels.insert(0, LoopLevel { count, source_step, target_step }),
            }
        }
        Piece {
            overlap: self.overlap,
            source: source * self.itemsize,
            target: (target - self.first_element) * self.itemsize,
            run_bytes,
            levels,
        }
    }
}

/// Returns the common ranges that overlap the target positions `start..end`. The common ranges ascend, so the first and
/// the last such range are found by bisection.
fn within(segments: &[CommonRange], start: u64, end: u64) -> &[CommonRange] {
    let first = segments.partition_point(|segment| segment.right + segment.len <= start);
    let last = segments.partition_point(|segment| segment.right < end);
    segments.get(first..last).unwrap_or(&[])
}
