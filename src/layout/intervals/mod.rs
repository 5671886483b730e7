//! The indices of one tensor dim that a shard holds: an ascending list of disjoint half-open intervals.
//!
//! Offsets and sizes count indices along that dim. With a `Shard`, a rank holds one interval. With a `_StridedShard`
//! (FSDP2 over TP on one dim, or an interleaved fused weight), a rank holds many intervals. PyTorch stores the indices
//! in a tensor: `_StridedShard.local_shard_size_and_offset` in `torch/distributed/tensor/placement_types.py`. Here,
//! equal intervals at equal distances are one *run*, so a shard of 10^5 interleaved intervals takes as little memory as
//! a shard of one interval:
//!
//! ```text
//!     0:2 + 4:6 + 8:10 + 11:12   =   Run {start 0, step 4, count 3, len 2}, Run {start 11, ..}
//! ```
//!
//! Invariants: intervals are not empty and do not touch (adjacent intervals are merged), and each run, from the left,
//! contains as many intervals as possible. So equal sets of indices have equal representations, and `==` and `Hash`
//! compare sets.
//!
//! There are two coordinates: the *index* of an element along the dim of the global tensor, and its *position* in the
//! list, which is the index of the element along the dim of the local tensor.

mod walk;

use std::{fmt, ops::Range};

use smallvec::{SmallVec, smallvec};

pub use walk::{CommonRange, Segments};
pub(super) use walk::{Piece, Pieces};

/// A run: `count` intervals of `len` elements. The first interval starts at `start`, and each later interval starts
/// `step` after the previous one.
///
/// `step` is larger than `len`, or 0 if there is only one interval.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct IntervalRun {
    start: u64,
    step: u64,
    count: u64,
    len: u64,
}

impl IntervalRun {
    fn interval(&self, k: u64) -> Range<u64> {
        let start = self.start + k * self.step;
        start..start + self.len
    }

    fn last(&self) -> Range<u64> {
        self.interval(self.count - 1)
    }

    fn numel(&self) -> u64 {
        self.count * self.len
    }

    /// Returns whether `interval` has the length of this run's intervals and starts `step` after the last of them, so
    /// that it extends the run. Returns false for a run of one interval, which has no step yet.
    fn continues_with(&self, interval: &Range<u64>) -> bool {
        self.count > 1
            && self.last().start.checked_add(self.step) == Some(interval.start)
            && self.len == interval.end - interval.start
    }
}

/// The indices of one dim that a shard holds: disjoint intervals in ascending order, compressed into runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Intervals {
    runs: SmallVec<[IntervalRun; 1]>,
}

impl Intervals {
    /// Makes an empty list.
    #[must_use]
    pub fn empty() -> Self {
        Self { runs: SmallVec::new() }
    }

    /// Makes a list of one interval. The end of the interval saturates, so untrusted numbers do not overflow.
    #[must_use]
    pub fn single(start: u64, len: u64) -> Self {
        match len.min(u64::MAX - start) {
            0 => Self::empty(),
            len => Self { runs: smallvec![IntervalRun { start, step: 0, count: 1, len }] },
        }
    }

    /// Makes the list of all indices of a dim of size `n`.
    #[must_use]
    pub fn full(n: u64) -> Self {
        Self::single(0, n)
    }

    /// Makes a list of `count` intervals of `len` elements. Each interval starts `step` after the previous one; `len`
    /// must not exceed `step`. The last interval must end within `u64`.
    #[must_use]
    pub fn progression(start: u64, step: u64, count: u64, len: u64) -> Self {
        debug_assert!(len <= step, "intervals of a progression are disjoint");
        if len == step || count <= 1 {
            return Self::single(start, count * len);
        }
        let runs = if len == 0 { smallvec![] } else { smallvec![IntervalRun { start, step, count, len }] };
        Self { runs }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> u64 {
        self.runs.iter().map(IntervalRun::numel).sum()
    }

    /// Returns whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns the first index of the list, or `None` if the list is empty.
    pub fn start(&self) -> Option<u64> {
        self.runs.first().map(|run| run.start)
    }

    /// Returns the last index of the list plus 1, or `None` if the list is empty.
    pub fn end(&self) -> Option<u64> {
        self.runs.last().map(|run| run.last().end)
    }

    /// Returns the smallest interval that contains all indices of the list, or `0..0` for an empty list.
    pub fn bounds(&self) -> Range<u64> {
        self.start().unwrap_or(0)..self.end().unwrap_or(0)
    }

    /// Returns the only interval of the list, or `None` if the list has no interval or several intervals.
    pub fn as_single(&self) -> Option<Range<u64>> {
        match self.runs.as_slice() {
            [run] if run.count == 1 => Some(run.last()),
            _ => None,
        }
    }

    /// Returns the number of elements of the list that are smaller than `index`. If the list contains `index`, this is
    /// the position of `index`; otherwise it is the position of the next larger element.
    pub fn count_before(&self, index: u64) -> u64 {
        let of_run = |run: &IntervalRun| {
            let Some(past) = index.checked_sub(run.start) else { return 0 };
            let whole = past.checked_div(run.step).unwrap_or(0).min(run.count - 1);
            whole * run.len + (past - whole * run.step).min(run.len)
        };
        self.runs.iter().map(of_run).sum()
    }

    /// Passes numbers that encode the list to `emit`, one by one, for a hash. Unequal lists have unequal encodings.
    pub fn encode(&self, emit: &mut impl FnMut(u64)) {
        emit(self.runs.len() as u64);
        self.runs.iter().flat_map(|run| [run.start, run.step, run.count, run.len]).for_each(emit);
    }

    /// Returns the number of intervals. Intervals that touch are stored as one interval.
    pub fn count(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    /// Returns the intervals in ascending order. Intervals that touch are stored as one interval.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.pieces().map(|piece| piece.range)
    }

    fn pieces(&self) -> Pieces<'_> {
        Pieces::new(&self.runs)
    }

    /// Appends an interval. An empty interval changes nothing.
    ///
    /// # Panics
    /// If the interval starts before the end of the list, because intervals must ascend: another order would describe
    /// another tensor.
    pub fn push(&mut self, mut interval: Range<u64>) {
        if interval.is_empty() {
            return;
        }
        let end = self.end().unwrap_or(0);
        assert!(interval.start >= end, "{interval:?} pushed after {end}: intervals ascend");
        if interval.start == end && !self.is_empty() {
            interval.start = self.pop().start;
        }
        let len = interval.end - interval.start;
        match self.runs.last_mut() {
            Some(run) if run.continues_with(&interval) => run.count += 1,
            Some(run) if run.count == 1 && run.len == len => {
                run.step = interval.start - run.start;
                run.count = 2;
            }
            _ => self.runs.push(IntervalRun { start: interval.start, step: 0, count: 1, len }),
        }
    }

    /// Removes and returns the last interval of a list that is not empty.
    fn pop(&mut self) -> Range<u64> {
        let run = self.runs.last_mut().expect("only a list with an interval is popped");
        let last = run.last();
        run.count -= 1;
        match run.count {
            0 => drop(self.runs.pop()),
            1 => run.step = 0,
            _ => {}
        }
        last
    }

    /// Appends every interval of a run. The first few intervals are appended one by one, and the remaining intervals in
    /// one step.
    fn push_run(&mut self, run: &IntervalRun) {
        for k in 0..run.count {
            let interval = run.interval(k);
            match self.runs.last_mut() {
                Some(last) if last.step == run.step && last.continues_with(&interval) => {
                    last.count += run.count - k;
                    return;
                }
                _ => self.push(interval),
            }
        }
    }

    /// Appends a list that starts at the end of this list, or later.
    ///
    /// # Panics
    /// If the other list starts before the end of this list.
    pub fn concat(&mut self, other: &Self) {
        other.runs.iter().for_each(|run| self.push_run(run));
    }

    /// Returns the elements at `positions` of the list. Positions beyond the end of the list are ignored.
    #[must_use]
    pub fn slice(&self, positions: Range<u64>) -> Self {
        let mut taken = Self::empty();
        let mut before = 0;
        for run in &self.runs {
            let from = positions.start.saturating_sub(before);
            let to = positions.end.saturating_sub(before).min(run.numel());
            before += run.numel();
            if from >= to {
                continue;
            }
            let (first, last) = (from / run.len, (to - 1) / run.len);
            let start = run.interval(first).start + from % run.len;
            let end = run.interval(last).start + (to - 1) % run.len + 1;
            if first == last {
                taken.push(start..end);
                continue;
            }
            taken.push(start..run.interval(first).end);
            taken.push_run(&IntervalRun { start: run.interval(first + 1).start, count: last - first - 1, ..*run });
            taken.push(run.interval(last).start..end);
        }
        taken
    }

    /// Returns the elements at a list of positions, all of which must exist. For a single range of positions,
    /// [`slice`](Self::slice) is faster.
    #[must_use]
    pub(super) fn select(&self, positions: &Self) -> Self {
        debug_assert!(positions.bounds().end <= self.len(), "positions in the list");
        if let Some(range) = positions.as_single() {
            return self.slice(range);
        }
        let mut taken = Self::empty();
        if let Some(Range { start, .. }) = self.as_single() {
            for run in &positions.runs {
                taken.push_run(&IntervalRun { start: start + run.start, ..*run });
            }
            return taken;
        }
        let mut pieces = self.pieces().peekable();
        for range in positions.iter() {
            while let Some(piece) = pieces.peek() {
                let len = piece.range.end - piece.range.start;
                let from = range.start.saturating_sub(piece.position);
                let to = range.end.saturating_sub(piece.position).min(len);
                if from < to {
                    taken.push(piece.range.start + from..piece.range.start + to);
                }
                if piece.position + len > range.end {
                    break;
                }
                pieces.next();
            }
        }
        taken
    }
}

impl FromIterator<Range<u64>> for Intervals {
    /// Collects ascending ranges.
    ///
    /// # Panics
    /// If the ranges do not ascend.
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Self {
        let mut intervals = Self::empty();
        ranges.into_iter().for_each(|range| intervals.push(range));
        intervals
    }
}

/// Displays the list as `0:2+4:6`, and an empty list as `0:0`. A list of more than 8 intervals is shortened.
impl fmt::Display for Intervals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: u64 = 8;
        if self.is_empty() {
            return f.write_str("0:0");
        }
        for (i, range) in self.iter().take(if self.count() > SHOWN { 3 } else { 8 }).enumerate() {
            let plus = if i == 0 { "" } else { "+" };
            write!(f, "{plus}{}:{}", range.start, range.end)?;
        }
        if self.count() > SHOWN {
            write!(f, "+..+({} intervals up to {})", self.count(), self.bounds().end)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ranges: &[Range<u64>]) -> Intervals {
        ranges.iter().cloned().collect()
    }

    #[test]
    fn equally_spaced_intervals_are_one_run() {
        let many: Intervals = (0..100_000).map(|i| 10 * i..10 * i + 3).collect();
        assert_eq!(many.runs.len(), 1);
        assert_eq!((many.count(), many.len(), many.end()), (100_000, 300_000, Some(999_993)));
        assert_eq!(many, Intervals::progression(0, 10, 100_000, 3));
        assert_eq!(many.to_string(), "0:3+10:13+20:23+..+(100000 intervals up to 999993)");
    }

    #[test]
    fn equal_sets_have_equal_values() {
        assert_eq!(list(&[0..2, 2..4, 4..5]), Intervals::full(5));
        assert_eq!(list(&[0..1, 4..5, 8..9, 9..10]), list(&[0..1, 4..5, 8..10]));
        assert_eq!(list(&[3..3, 7..7]), Intervals::empty());
        assert_eq!(Intervals::progression(5, 4, 3, 4), Intervals::single(5, 12));
        let mut joined = list(&[0..1, 4..5]);
        joined.concat(&list(&[8..9, 12..13, 16..17]));
        assert_eq!(joined, Intervals::progression(0, 4, 5, 1));
    }

    #[test]
    fn slices_cut_within_and_between_intervals() {
        let list = list(&[0..3, 10..13, 20..23, 30..40]);
        assert_eq!(list.slice(1..8).to_string(), "1:3+10:13+20:22");
        assert_eq!(list.slice(3..6).as_single(), Some(10..13));
        assert_eq!(list.slice(8..100).to_string(), "22:23+30:40");
        assert!(list.slice(19..25).is_empty() && list.slice(4..4).is_empty());
        assert_eq!(list.slice(0..u64::MAX), list);
    }

    #[test]
    fn huge_intervals_saturate() {
        assert!(Intervals::single(u64::MAX, 7).is_empty());
        let mut list = Intervals::single(u64::MAX - 1, 7);
        assert_eq!(list.as_single(), Some(u64::MAX - 1..u64::MAX));
        list.push(u64::MAX..u64::MAX);
        let mut wide = Intervals::single(0, 1);
        wide.push(u64::MAX - 3..u64::MAX - 2);
        wide.push(u64::MAX - 1..u64::MAX);
        assert_eq!((wide.len(), wide.count()), (3, 3));
    }

    #[test]
    #[should_panic(expected = "intervals ascend")]
    fn descending_intervals_panic() {
        list(&[4..5, 0..1]);
    }
}
