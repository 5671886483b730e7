//! Strided copies: what moves are made of.
//!
//! Counts bytes. Invariant: messages are dense, so one side's copies of a message pack what the other's unpack.

use smallvec::SmallVec;

use crate::exec::runs::copy_runs;
use crate::plan::Piece;
use crate::plan::lower::LoopLevel;

/// A loop nest of runs of bytes, from one buffer to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedCopy {
    pub source: u64,
    pub target: u64,
    pub run_bytes: u64,
    /// Outermost first.
    pub levels: SmallVec<[LoopLevel; 4]>,
}

impl StridedCopy {
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.levels.iter().map(|level| level.count).product::<u64>() * self.run_bytes
    }

    /// Do it, in memory.
    pub fn copy(&self, source: &[u8], target: &mut [u8]) {
        let at = |offset: u64| usize::try_from(offset).expect("an offset in memory");
        copy_runs(&source[at(self.source)..], &mut target[at(self.target)..], self.run_bytes, &self.levels);
    }

    /// Of bytes that lie behind each other.
    #[must_use]
    pub fn run(source: u64, target: u64, len: u64) -> Self {
        Self { source, target, run_bytes: len, levels: SmallVec::new() }
    }

    /// Of a piece, between these starts.
    pub(super) fn of(piece: &Piece, source: u64, target: u64) -> Self {
        Self { source, target, run_bytes: piece.run_bytes, levels: piece.levels.clone() }
    }

    /// With the target's runs behind each other from `target` on.
    pub(super) fn packed(piece: &Piece, source: u64, target: u64) -> Self {
        let levels = dense(&piece.levels, |level, step| LoopLevel { target_step: step, ..level }, piece.run_bytes);
        Self { source, target, run_bytes: piece.run_bytes, levels }
    }

    /// With the source's runs behind each other from `source` on.
    pub(super) fn unpacked(piece: &Piece, source: u64, target: u64) -> Self {
        let levels = dense(&piece.levels, |level, step| LoopLevel { source_step: step, ..level }, piece.run_bytes);
        Self { source, target, run_bytes: piece.run_bytes, levels }
    }
}

/// The levels with steps on one side as if nothing were between the runs.
fn dense(
    levels: &[LoopLevel],
    with_step: impl Fn(LoopLevel, u64) -> LoopLevel,
    run_bytes: u64,
) -> SmallVec<[LoopLevel; 4]> {
    let mut step = run_bytes;
    let mut dense: SmallVec<[LoopLevel; 4]> = SmallVec::from_slice(levels);
    for level in dense.iter_mut().rev() {
        *level = with_step(*level, step);
        step *= level.count;
    }
    dense
}
