//! Strided copies between buffers. The work of a round consists of such copies. All sizes and offsets are in bytes.
//! Invariant: messages have no gaps, so the sender packs exactly the bytes that the receiver unpacks.

use smallvec::SmallVec;

use crate::exec::runs::copy_runs;
use crate::plan::Piece;
use crate::plan::lower::LoopLevel;

/// A copy from one buffer to another. It consists of nested loops over contiguous runs of bytes of equal length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedCopy {
    /// The offset of the first run in the source buffer.
    pub source: u64,
    /// The offset of the first run in the target buffer.
    pub target: u64,
    /// The length of each run in bytes.
    pub run_bytes: u64,
    /// The loops over the runs, with the outermost loop first.
    pub levels: SmallVec<[LoopLevel; 4]>,
}

impl StridedCopy {
    /// Returns the number of bytes that are copied.
    pub fn len_bytes(&self) -> u64 {
        self.levels.iter().map(|level| level.count).product::<u64>() * self.run_bytes
    }

    /// Performs the copy in host memory.
    pub fn copy(&self, source: &[u8], target: &mut [u8]) {
        let at = |offset: u64| usize::try_from(offset).expect("an offset in memory");
        copy_runs(&source[at(self.source)..], &mut target[at(self.target)..], self.run_bytes, &self.levels);
    }

    /// Returns the copy of one contiguous range of `len` bytes.
    #[must_use]
    pub fn contiguous(source: u64, target: u64, len: u64) -> Self {
        Self { source, target, run_bytes: len, levels: SmallVec::new() }
    }

    /// Returns the copy for a piece (the elements that a tile and a source chunk share). The copy is strided in both
    /// buffers.
    pub(super) fn from_piece(piece: &Piece, source: u64, target: u64) -> Self {
        Self { source, target, run_bytes: piece.run_bytes, levels: piece.levels.clone() }
    }

    /// Returns the copy that packs a piece (elements that a tile and a source chunk share) into a message. The bytes
    /// are contiguous in the message.
    pub(super) fn packed(piece: &Piece, source: u64, target: u64) -> Self {
        let levels =
            dense_levels(&piece.levels, |level, step| LoopLevel { target_step: step, ..level }, piece.run_bytes);
        Self { source, target, run_bytes: piece.run_bytes, levels }
    }

    /// Returns the copy that unpacks a piece (elements that a tile and a source chunk share) from a message. The bytes
    /// are contiguous in the message.
    pub(super) fn unpacked(piece: &Piece, source: u64, target: u64) -> Self {
        let levels =
            dense_levels(&piece.levels, |level, step| LoopLevel { source_step: step, ..level }, piece.run_bytes);
        Self { source, target, run_bytes: piece.run_bytes, levels }
    }
}

/// Returns the loops of a copy that is contiguous in one of its buffers. `with_step` sets the step of that buffer in a
/// loop.
fn dense_levels(
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
