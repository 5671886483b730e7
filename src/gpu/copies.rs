//! Strided copies as a device does them: between addresses, in lanes of up to 16 bytes, cut into blocks.
//!
//! Counts bytes, units of a lane where a name says so. Invariant: what is listed copies what
//! [`StridedCopy::copy`] does, and lies in the buffers it was listed for.

use nccl::DeviceBuffer;
use smallvec::SmallVec;

use super::table::{Job, Jobs};
use crate::exchange::StridedCopy;

/// Loops that the kernel has around a run.
const MOST_LOOPS: usize = 4;
/// Units that one block of threads copies.
const BLOCK_UNITS: u32 = 4096;
/// Units of a copy: the kernel counts them in 32 bits.
const MOST_UNITS: u64 = 1 << 31;
/// The widest access that a device has.
const WIDEST: u64 = 16;

/// A loop nest of runs of bytes between addresses. No loop is of one turn, and none could be part of the run or of the
/// loop around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nest {
    pub source: u64,
    pub target: u64,
    pub run: u64,
    /// Outermost first.
    pub loops: SmallVec<[Loop; 4]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    pub count: u64,
    pub source_step: u64,
    pub target_step: u64,
}

impl Nest {
    /// A copy out of the one buffer into the other; `base` is where its target is counted from. `None` where nothing is
    /// to be copied.
    ///
    /// # Panics
    /// Where it leaves the buffers, as [`StridedCopy::copy`].
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
        assert!(fits(copy.source, span(|level| level.source_step), from.bytes()), "a copy out of its buffer: {copy:?}");
        assert!(fits(target, span(|level| level.target_step), into.bytes()), "a copy into its buffer: {copy:?}");
        Some(Self::merged(from.address() + copy.source, into.address() + target, copy.run_bytes, loops(copy)))
    }

    /// With as few loops as say the same.
    fn merged(source: u64, target: u64, run: u64, loops: impl DoubleEndedIterator<Item = Loop>) -> Self {
        let mut nest = Self { source, target, run, loops: SmallVec::new() };
        for level in loops.rev().filter(|level| level.count > 1) {
            match nest.loops.last_mut() {
                None if level.source_step == nest.run && level.target_step == nest.run => nest.run *= level.count,
                Some(inner) if inner.goes_on_as(&level) => inner.count *= level.count,
                _ => nest.loops.push(level),
            }
        }
        nest.loops.reverse();
        nest
    }

    pub fn len_bytes(&self) -> u64 {
        self.loops.iter().map(|level| level.count).product::<u64>() * self.run
    }

    /// The widest access by which all runs can be copied, a power of two.
    pub fn lane(&self) -> u64 {
        let steps = self.loops.iter().fold(0, |bits, level| bits | level.source_step | level.target_step);
        let bits = self.source | self.target | self.run | steps | WIDEST;
        1 << bits.trailing_zeros()
    }

    /// As `struct Copy` of the kernel.
    fn job(&self) -> Job<{ 2 + 3 * MOST_LOOPS }, 5> {
        let word = |value: u64| u32::try_from(value).expect("a copy was cut to what the kernel counts");
        let mut longs = [0; 2 + 3 * MOST_LOOPS];
        longs[..2].copy_from_slice(&[self.source, self.target]);
        for (place, level) in longs[2..].as_chunks_mut::<3>().0.iter_mut().zip(&self.loops) {
            *place = [level.source_step, level.target_step, word(level.count).into()];
        }
        let lane = self.lane();
        let units = self.len_bytes() / lane;
        let words = [lane, units, self.run / lane, self.loops.len() as u64, 0].map(word);
        Job { longs, words, units }
    }

    /// The same as nests of at most so many loops and units each.
    pub fn cut(self, most_loops: usize, most_units: u64, cut: &mut impl FnMut(Self)) {
        let is_long = self.len_bytes() / self.lane() > most_units;
        if self.loops.len() <= most_loops && !is_long {
            return cut(self);
        }
        let parts = match self.loops.first() {
            // Runs stay aligned where they are cut.
            None => Loop { count: self.run.div_ceil(most_units), source_step: most_units, target_step: most_units },
            Some(outer) => *outer,
        };
        for part in 0..parts.count {
            let (source, target) = (part * parts.source_step, part * parts.target_step);
            let run = if self.loops.is_empty() { parts.source_step.min(self.run - source) } else { self.run };
            let loops = self.loops.iter().skip(1).copied().collect();
            Self { source: self.source + source, target: self.target + target, run, loops }
                .cut(most_loops, most_units, cut);
        }
    }
}

impl Loop {
    /// Whether the turns of a loop around this one begin where this one's end.
    fn goes_on_as(&self, outer: &Self) -> bool {
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

/// Copies as the kernel does them, at the end of a table.
pub fn tabulate(nests: impl IntoIterator<Item = Nest>, table: &mut Vec<u8>) -> Jobs {
    let mut jobs = Jobs::behind(table, BLOCK_UNITS);
    for nest in nests {
        nest.cut(MOST_LOOPS, MOST_UNITS, &mut |nest| jobs.push(&nest.job(), table));
    }
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(count: u64, source_step: u64, target_step: u64) -> Loop {
        Loop { count, source_step, target_step }
    }

    fn nest(run: u64, loops: &[Loop]) -> Nest {
        Nest::merged(0x1000, 0x2000, run, loops.iter().copied())
    }

    #[test]
    fn loops_that_go_on_are_one() {
        let rows = nest(4, &[level(3, 40, 60), level(1, 7, 7), level(5, 8, 12), level(2, 4, 4)]);
        assert_eq!((rows.run, &rows.loops[..]), (8, &[level(15, 8, 12)][..]));
        let whole = nest(4, &[level(6, 20, 20), level(5, 4, 4)]);
        assert_eq!((whole.run, whole.loops.len()), (120, 0));
        let columns = nest(2, &[level(3, 2, 20), level(5, 6, 2)]);
        assert_eq!(columns.loops[..], [level(3, 2, 20), level(5, 6, 2)]);
    }

    #[test]
    fn lanes_are_as_wide_as_everything_allows() {
        assert_eq!(nest(48, &[level(3, 64, 96)]).lane(), 16);
        assert_eq!(nest(48, &[level(3, 64, 104)]).lane(), 8);
        assert_eq!(nest(12, &[]).lane(), 4);
        assert_eq!(Nest { source: 0x1002, ..nest(48, &[]) }.lane(), 2);
        assert_eq!(Nest { target: 0x2001, ..nest(48, &[]) }.lane(), 1);
    }

    #[test]
    fn what_is_too_much_is_cut() {
        let cut = |nest: Nest, loops, units| {
            let mut parts = Vec::new();
            nest.cut(loops, units, &mut |nest| parts.push((nest.source, nest.target, nest.run, nest.loops.len())));
            parts
        };
        assert_eq!(cut(nest(5, &[]), 0, 2), [(0x1000, 0x2000, 2, 0), (0x1002, 0x2002, 2, 0), (0x1004, 0x2004, 1, 0)]);
        let deep = nest(1, &[level(2, 50, 100), level(3, 7, 9)]);
        assert_eq!(cut(deep.clone(), 1, 100), [(0x1000, 0x2000, 1, 1), (0x1032, 0x2064, 1, 1)]);
        assert_eq!(cut(deep.clone(), 2, 3).len(), 2);
        assert_eq!(cut(deep, 0, 100).len(), 6);
    }

    #[test]
    fn a_table_gives_each_copy_its_blocks() {
        let long = u64::from(BLOCK_UNITS) * 16 + 16;
        let mut table = vec![0; 24];
        let jobs = tabulate([nest(long, &[]), nest(3, &[level(2, 5, 7)])], &mut table);
        assert_eq!(jobs, Jobs { offset: 24, count: 2, blocks: 3, block_units: BLOCK_UNITS });
        assert_eq!(table.len(), 24 + 2 * 136);
        let word = |at: usize| u32::from_le_bytes(table[at..at + 4].try_into().unwrap());
        assert_eq!([136, 140, 144, 148, 152].map(word), [0, 16, BLOCK_UNITS + 1, BLOCK_UNITS + 1, 0]);
        assert_eq!([272, 276, 280, 284, 288].map(word), [2, 1, 6, 3, 1]);
        let long = |at: usize| u64::from_le_bytes(table[at..at + 8].try_into().unwrap());
        assert_eq!([160, 168, 176, 184, 192, 200].map(long), [0x1000, 0x2000, 5, 7, 2, 0]);
    }
}
