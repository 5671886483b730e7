//! Transfers: strided copies from stretches that one process reads into parts of tiles that others get.
//!
//! Counts bytes, but for ranges of elements. Invariant: who takes a transfer is one of the takers of its target.

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use super::demand::{Demand, Ranks, WantedTile};
use super::nccl_reduce::ReductionKind;
use super::phase::Message;
use super::readers::Reader;
use crate::plan::Piece;

/// A tensor's elements that are moved together: ranges of them, disjoint, in row-major order of the whole tensor.
#[derive(Clone)]
pub struct Unit<'a> {
    pub demand: Arc<Demand<'a>>,
    /// The index among the reservation's tensors.
    pub number: usize,
    pub ranges: Vec<Range<u64>>,
}

/// Part of a target tile that some processes get.
#[derive(Clone, Debug)]
pub struct TransferTarget {
    /// The index among the reservation's tensors.
    pub tensor: usize,
    pub wanted: Arc<WantedTile>,
    /// A range of the tile's local tensor.
    pub elements: Range<u64>,
    /// The length of one of its summands, and of what they become.
    pub part_bytes: u64,
    /// The ranks that need it.
    pub ranks: Ranks,
    /// The one of them that makes it of its summands and passes it on; `None` where each has it from the source.
    pub maker: Option<u32>,
    /// The reduction by which NCCL makes it, if that does: of summands that are not transferred.
    pub folding: Option<ReductionKind>,
}

impl Unit<'_> {
    /// Return whether it is all of the tensor, in one range.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        matches!(self.ranges.as_slice(), [range] if *range == (0..self.demand.source.numel()))
    }

    /// Give another number for each range that comes along in turn, of so many ranks.
    #[must_use]
    pub fn turn(&self, range: usize, ranks: usize) -> usize {
        self.number + part(self.ranges[range].start, self.demand.source.numel(), ranks)
    }
}

impl TransferTarget {
    /// The ranks that get what it is made of.
    #[must_use]
    pub fn takers(&self) -> &[u32] {
        self.maker.as_ref().map_or(&self.ranks, slice::from_ref)
    }

    /// All its summands, one behind the other.
    #[must_use]
    pub fn summands_bytes(&self) -> u64 {
        self.part_bytes * self.wanted.parts.len() as u64
    }

    /// The rank that gets it of NCCL, if that makes it.
    #[must_use]
    pub fn folded(&self) -> Option<(u32, ReductionKind)> {
        self.folding.map(|folding| (self.takers()[0], folding))
    }

    /// The sending by which its maker passes it on.
    #[must_use]
    pub fn passing(&self) -> Option<Message<'_>> {
        self.maker.map(|from| Message { from, takers: &self.ranks, len: self.part_bytes })
    }
}

/// A stretch of a source chunk that a process reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceRange {
    pub reader: Reader,
    /// The index of the unit's range that it is of: those of one chunk need not touch.
    pub range: usize,
}

/// A strided copy of a stretch's bytes into a target's.
#[derive(Clone, Debug)]
pub struct Transfer {
    pub from: SourceRange,
    /// The ranks that get it, of those that get what the target is made of.
    pub takers: Ranks,
    /// The index of the target.
    pub to: usize,
    /// The index of the summand.
    pub part: usize,
    /// The copy from the chunk's element 0 to the start of the summand.
    pub piece: Piece,
}

impl Transfer {
    /// The sending of its reader.
    #[must_use]
    pub fn sending(&self) -> Message<'_> {
        Message { from: self.from.reader.rank, takers: &self.takers, len: self.piece.len_bytes() }
    }
}

/// The index of the one, of so many equal parts of all elements, that an element is in.
fn part(element: u64, numel: u64, parts: usize) -> usize {
    let part = u128::from(element) * parts as u128 / u128::from(numel.max(1));
    usize::try_from(part).expect("fewer than there are parts")
}
