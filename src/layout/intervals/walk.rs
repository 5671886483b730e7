//! The intersection of two interval lists.
//!
//! Positions count indices along one dim. An iterator returns the intervals of a list in ascending order, each with its
//! position in the list. The iterator can also *seek*: within a run (equal intervals at equal distances), a division
//! finds the next interval that ends after an index. So the cost of intersecting one interval with a run of 10^5
//! intervals depends on the number of results, not on the number of skipped intervals.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::{IntervalRun, Intervals};

/// A range of indices that two lists share: the position of the range in each list, and the length of the range.
///
/// In `0:2+4:6` and `1:5` the common indices 1 and 4 are two ranges: `{left: 1, right: 0, len: 1}` and
/// `{left: 2, right: 3, len: 1}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommonRange {
    /// The position in the first list.
    pub left: u64,
    /// The position in the second list.
    pub right: u64,
    pub len: u64,
}

/// The common ranges of two lists, ascending in both lists. A single common range, the usual case, is stored without
/// allocation.
pub type Segments = SmallVec<[CommonRange; 1]>;

/// An interval of a list, and the position of its first element in the list.
#[derive(Clone, Debug)]
pub(in crate::layout) struct Piece {
    pub position: u64,
    pub range: Range<u64>,
}

/// An iterator over the intervals of a list, each with its position.
#[derive(Clone, Debug)]
pub(in crate::layout) struct Pieces<'a> {
    runs: &'a [IntervalRun],
    /// The index, within the first run of `runs`, of the interval that the iterator returns next.
    next: u64,
    position: u64,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(runs: &'a [IntervalRun]) -> Self {
        Self { runs, next: 0, position: 0 }
    }

    /// Skips every interval that ends at `index` or before.
    fn seek(&mut self, index: u64) {
        while let [run, rest @ ..] = self.runs {
            let passed = match index.checked_sub(run.start + run.len) {
                None => 0,
                Some(_) if run.last().end <= index => run.count,
                Some(beyond_first) => beyond_first / run.step + 1,
            };
            let skipped = passed.saturating_sub(self.next);
            self.position += skipped * run.len;
            self.next += skipped;
            if self.next < run.count {
                return;
            }
            (self.runs, self.next) = (rest, 0);
        }
    }
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let [run, rest @ ..] = self.runs else {
            return None;
        };
        let piece = Piece { position: self.position, range: run.interval(self.next) };
        self.position += run.len;
        self.next += 1;
        if self.next == run.count {
            (self.runs, self.next) = (rest, 0);
        }
        Some(piece)
    }
}

impl Intervals {
    /// Returns the intervals, each with its position in the list.
    pub(in crate::layout) fn positioned(&self) -> Pieces<'_> {
        self.pieces()
    }

    /// Returns the ranges of indices that two lists share, ascending. Two ranges are merged if their positions follow each
    /// other without a gap in both lists.
    pub fn intersect(&self, other: &Self) -> Segments {
        if let (Some(a), Some(b)) = (self.as_single(), other.as_single()) {
            let (start, end) = (a.start.max(b.start), a.end.min(b.end));
            let common = || CommonRange { left: start - a.start, right: start - b.start, len: end - start };
            return (start < end).then(common).into_iter().collect();
        }
        if self == other {
            // Equal lists share one range, however many intervals they have.
            let all = CommonRange { left: 0, right: 0, len: self.len() };
            return if self.is_empty() { smallvec![] } else { smallvec![all] };
        }
        let mut segments = Segments::new();
        for (_, found) in self.common(other) {
            match segments.last_mut() {
                Some(last) if last.left + last.len == found.left && last.right + last.len == found.right => {
                    last.len += found.len;
                }
                _ => segments.push(found),
            }
        }
        segments
    }

    /// Returns the first range of indices that two lists share, or `None` if they share no index.
    pub(in crate::layout) fn first_common(&self, other: &Self) -> Option<Range<u64>> {
        self.common(other).next().map(|(range, _)| range)
    }

    /// Returns whether any index in `range` is in the list.
    pub(in crate::layout) fn intersects(&self, range: &Range<u64>) -> bool {
        let mut pieces = self.pieces();
        pieces.seek(range.start);
        pieces.next().is_some_and(|piece| piece.range.start < range.end)
    }

    fn common<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (Range<u64>, CommonRange)> + 'a {
        let (mut lefts, mut rights) = (self.pieces(), other.pieces());
        let (mut left, mut right) = (lefts.next(), rights.next());
        std::iter::from_fn(move || {
            while let (Some(a), Some(b)) = (&left, &right) {
                let start = a.range.start.max(b.range.start);
                let end = a.range.end.min(b.range.end);
                let found = (start < end).then(|| {
                    let left = a.position + (start - a.range.start);
                    let right = b.position + (start - b.range.start);
                    (start..end, CommonRange { left, right, len: end - start })
                });
                // The piece that ends first has no more common elements. Its list can skip to the start of the other
                // piece.
                if a.range.end <= b.range.end {
                    lefts.seek(b.range.start);
                    left = lefts.next();
                } else {
                    rights.seek(a.range.start);
                    right = rights.next();
                }
                if found.is_some() {
                    return found;
                }
            }
            None
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(left: u64, right: u64, len: u64) -> CommonRange {
        CommonRange { left, right, len }
    }

    #[test]
    fn common_range_has_positions_in_both_lists() {
        let stripes = Intervals::progression(0, 4, 2, 2);
        assert_eq!(stripes.intersect(&Intervals::single(1, 4)).to_vec(), [segment(1, 0, 1), segment(2, 3, 1)]);
        assert_eq!(Intervals::single(3, 5).intersect(&Intervals::single(6, 9)).to_vec(), [segment(3, 0, 2)]);
        assert_eq!(Intervals::single(3, 5).intersect(&Intervals::single(8, 1)).to_vec(), []);
        assert_eq!(Intervals::empty().intersect(&Intervals::empty()).to_vec(), []);
    }

    #[test]
    fn ranges_contiguous_in_both_lists_are_merged() {
        let stripes = Intervals::progression(0, 10, 100_000, 3);
        assert_eq!(stripes.intersect(&stripes).to_vec(), [segment(0, 0, 300_000)]);
        let longer = Intervals::progression(0, 10, 100_001, 3);
        assert_eq!(stripes.intersect(&longer).to_vec(), [segment(0, 0, 300_000)]);
    }

    #[test]
    fn seek_skips_pieces_in_constant_time() {
        // Iterating over 2^60 pieces would never end.
        let stripes = Intervals::progression(0, 4, 1 << 60, 1);
        let far = Intervals::single(1 << 61, 8);
        assert_eq!(stripes.intersect(&far).to_vec(), [segment(1 << 59, 0, 1), segment((1 << 59) + 1, 4, 1)]);
        assert_eq!(far.intersect(&stripes).to_vec(), [segment(0, 1 << 59, 1), segment(4, (1 << 59) + 1, 1)]);
    }
}
