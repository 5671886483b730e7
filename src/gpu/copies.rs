//! Strided copies on a device: between device addresses, with memory accesses of up to 16 bytes, split into thread
//! blocks. Sizes and offsets are in bytes; where the name contains `units`, they count memory accesses. Invariant: a
//! job copies the same bytes as [`StridedCopy::copy`], and does not leave its two buffers.

use nccl::DeviceBuffer;
use smallvec::SmallVec;

use super::table::{Job, Jobs};
use crate::exchange::StridedCopy;

/// The maximum number of loops of one copy job in the kernel.
const MAX_LOOPS: usize = 4;
/// The number of units that one thread block copies. A unit is one memory access.
const BLOCK_UNITS: u32 = 4096;
/// The maximum number of units of one copy job, so that the kernel can count units with 32 bits.
const MAX_UNITS: u64 = 1 << 31;
/// The width in bytes of the widest memory access of one thread.
const MAX_ACCESS_BYTES: u64 = 16;

/// A copy between device addresses. It consists of nested loops over contiguous runs of bytes. Every loop has more than
/// one iteration. Two adjacent loops are merged if one longer loop can replace them. The innermost loop is replaced by
/// a longer run if its runs follow each other without a gap in the source and in the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopNest {
    /// The device address of the first run in the source.
    pub source: u64,
    /// The device address of the first run in the target.
    pub target: u64,
    /// The length of each run in bytes.
    pub run_bytes: u64,
    /// The loops over the runs, with the outermost loop first.
    pub loops: SmallVec<[Loop; 4]>,
}

/// One loop of a [`LoopNest`]: the number of iterations, and the distance between two iterations in the source and in
/// the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// The number of iterations.
    pub count: u64,
    /// The distance in bytes between two iterations in the source.
    pub source_step: u64,
    /// The distance in bytes between two iterations in the target.
    pub target_step: u64,
}

impl LoopNest {
    /// Returns the loop nest for `copy` from buffer `from` to buffer `into`. The target offset of `copy` counts from
    /// byte `base` of `into`. Returns `None` if the copy is empty.
    ///
    /// # Panics
    /// Panics if the copy reads or writes outside the buffers, like [`StridedCopy::copy`].
    pub fn new(copy: &StridedCopy, from: &impl DeviceBuffer, into: &impl DeviceBuffer, base: usize) -> Option<Self> {
        if copy.len_bytes() == 0 {
            return None;
        }
        let span = |steps: fn(&Loop) -> u64| {
            let steps = loops(copy).try_fold(copy.run_bytes, |span, level| {
                span.checked_add((level.count - 1).checked_mul(steps(&level))?)
            });
            steps.expect("a copy in memory")
        };
        let target = base as u64 + copy.target;
        let fits = |start: u64, span: u64, len: usize| start.checked_add(span).is_some_and(|end| end <= len as u64);
        assert!(
            fits(copy.source, span(|level| level.source_step), from.bytes()),
            "a copy reads beyond its buffer: {copy:?}"
        );
        assert!(
            fits(target, span(|level| level.target_step), into.bytes()),
            "a copy writes beyond its buffer: {copy:?}"
        );
        Some(Self::merged(from.address() + copy.source, into.address() + target, copy.run_bytes, loops(copy)))
    }

    /// Returns the loop nest for a copy with runs of `run` bytes and these `loops`. Merges loops, so that as few as
    /// possible remain.
    fn merged(source: u64, target: u64, run: u64, loops: impl DoubleEndedIterator<Item = Loop>) -> Self {
        let mut nest = Self { source, target, run_bytes: run, loops: SmallVec::new() };
        for level in loops.rev().filter(|level| level.count > 1) {
            match nest.loops.last_mut() {
                None if level.source_step == nest.run_bytes && level.target_step == nest.run_bytes => {
                    nest.run_bytes *= level.count;
                }
                Some(inner) if inner.continues_into(&level) => inner.count *= level.count,
                _ => nest.loops.push(level),
            }
        }
        nest.loops.reverse();
        nest
    }

    /// Returns the number of bytes that are copied.
    pub fn len_bytes(&self) -> u64 {
        self.loops.iter().map(|level| level.count).product::<u64>() * self.run_bytes
    }

    /// Returns the width in bytes of the widest memory access with which all runs can be copied: a power of two that
    /// divides all addresses, steps and lengths.
    pub fn access_bytes(&self) -> u64 {
        let steps = self.loops.iter().fold(0, |bits, level| bits | level.source_step | level.target_step);
        let bits = self.source | self.target | self.run_bytes | steps | MAX_ACCESS_BYTES;
        1 << bits.trailing_zeros()
    }

    /// Returns the entry of this copy in the job table: the fields of the kernel's `struct Copy`.
    fn job(&self) -> Job<{ 2 + 3 * MAX_LOOPS }, 5> {
        let word = |value: u64| u32::try_from(value).expect("a copy was cut to what the kernel counts");
        let mut longs = [0; 2 + 3 * MAX_LOOPS];
        longs[..2].copy_from_slice(&[self.source, self.target]);
        for (place, level) in longs[2..].as_chunks_mut::<3>().0.iter_mut().zip(&self.loops) {
            *place = [level.source_step, level.target_step, word(level.count).into()];
        }
        let lane = self.access_bytes();
        let units = self.len_bytes() / lane;
        let words = [lane, units, self.run_bytes / lane, self.loops.len() as u64, 0].map(word);
        Job { longs, words, units }
    }

    /// Splits the loop nest into loop nests with at most `most_loops` loops and `most_units` memory accesses each.
    /// Calls `cut` with each of them.
    pub fn split(self, most_loops: usize, most_units: u64, cut: &mut impl FnMut(Self)) {
        let is_long = self.len_bytes() / self.access_bytes() > most_units;
        if self.loops.len() <= most_loops && !is_long {
            return cut(self);
        }
        let parts = match self.loops.first() {
            // Splitting a run keeps its parts aligned.
            None => {
                Loop { count: self.run_bytes.div_ceil(most_units), source_step: most_units, target_step: most_units }
            }
            Some(outer) => *outer,
        };
        for part in 0..parts.count {
            let (source, target) = (part * parts.source_step, part * parts.target_step);
            let run =
                if self.loops.is_empty() { parts.source_step.min(self.run_bytes - source) } else { self.run_bytes };
            let loops = self.loops.iter().skip(1).copied().collect();
            Self { source: self.source + source, target: self.target + target, run_bytes: run, loops }
                .split(most_loops, most_units, cut);
        }
    }
}

impl Loop {
    /// Returns true if each iteration of `outer` begins where all iterations of this loop have ended. The two loops can
    /// then be merged.
    fn continues_into(&self, outer: &Self) -> bool {
        let ends = |step: u64| step.checked_mul(self.count);
        ends(self.source_step) == Some(outer.source_step) && ends(self.target_step) == Some(outer.target_step)
    }
}

fn loops(copy: &StridedCopy) -> impl DoubleEndedIterator<Item = Loop> {
    copy.levels.iter().map(|level| Loop {
        count: level.count,
        source_step: level.source_step,
        target_step: level.target_step,
    })
}

/// Builds the copy jobs of loop nests, and appends them to `table`. Splits a loop nest that is too large for one job.
pub fn append_jobs(nests: impl IntoIterator<Item = LoopNest>, table: &mut Vec<u8>) -> Jobs {
    let mut jobs = Jobs::at_end_of(table, BLOCK_UNITS);
    for nest in nests {
        nest.split(MAX_LOOPS, MAX_UNITS, &mut |nest| jobs.push(&nest.job(), table));
    }
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(count: u64, source_step: u64, target_step: u64) -> Loop {
        Loop { count, source_step, target_step }
    }

    fn nest(run: u64, loops: &[Loop]) -> LoopNest {
        LoopNest::merged(0x1000, 0x2000, run, loops.iter().copied())
    }

    #[test]
    fn contiguous_loops_are_merged() {
        let rows = nest(4, &[level(3, 40, 60), level(1, 7, 7), level(5, 8, 12), level(2, 4, 4)]);
        assert_eq!((rows.run_bytes, &rows.loops[..]), (8, &[level(15, 8, 12)][..]));
        let whole = nest(4, &[level(6, 20, 20), level(5, 4, 4)]);
        assert_eq!((whole.run_bytes, whole.loops.len()), (120, 0));
        let columns = nest(2, &[level(3, 2, 20), level(5, 6, 2)]);
        assert_eq!(columns.loops[..], [level(3, 2, 20), level(5, 6, 2)]);
    }

    #[test]
    fn access_width_follows_the_alignment() {
        assert_eq!(nest(48, &[level(3, 64, 96)]).access_bytes(), 16);
        assert_eq!(nest(48, &[level(3, 64, 104)]).access_bytes(), 8);
        assert_eq!(nest(12, &[]).access_bytes(), 4);
        assert_eq!(LoopNest { source: 0x1002, ..nest(48, &[]) }.access_bytes(), 2);
        assert_eq!(LoopNest { target: 0x2001, ..nest(48, &[]) }.access_bytes(), 1);
    }

    #[test]
    fn large_copies_are_split() {
        let cut = |nest: LoopNest, loops, units| {
            let mut parts = Vec::new();
            nest.split(loops, units, &mut |nest| {
                parts.push((nest.source, nest.target, nest.run_bytes, nest.loops.len()));
            });
            parts
        };
        assert_eq!(cut(nest(5, &[]), 0, 2), [(0x1000, 0x2000, 2, 0), (0x1002, 0x2002, 2, 0), (0x1004, 0x2004, 1, 0)]);
        let deep = nest(1, &[level(2, 50, 100), level(3, 7, 9)]);
        assert_eq!(cut(deep.clone(), 1, 100), [(0x1000, 0x2000, 1, 1), (0x1032, 0x2064, 1, 1)]);
        assert_eq!(cut(deep.clone(), 2, 3).len(), 2);
        assert_eq!(cut(deep, 0, 100).len(), 6);
    }

    #[test]
    fn table_assigns_blocks_to_each_copy() {
        let long = u64::from(BLOCK_UNITS) * 16 + 16;
        let mut table = vec![0; 24];
        let jobs = append_jobs([nest(long, &[]), nest(3, &[level(2, 5, 7)])], &mut table);
        assert_eq!(jobs, Jobs { offset: 24, count: 2, blocks: 3, block_units: BLOCK_UNITS });
        assert_eq!(table.len(), 24 + 2 * 136);
        let word = |at: usize| u32::from_le_bytes(table[at..at + 4].try_into().unwrap());
        assert_eq!([136, 140, 144, 148, 152].map(word), [0, 16, BLOCK_UNITS + 1, BLOCK_UNITS + 1, 0]);
        assert_eq!([272, 276, 280, 284, 288].map(word), [2, 1, 6, 3, 1]);
        let long = |at: usize| u64::from_le_bytes(table[at..at + 8].try_into().unwrap());
        assert_eq!([160, 168, 176, 184, 192, 200].map(long), [0x1000, 0x2000, 5, 7, 2, 0]);
    }
}
