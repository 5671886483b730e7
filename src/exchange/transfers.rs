//! Transfers: strided copies from source ranges that one process reads to parts of tiles that the same or other
//! processes write. Sizes are in bytes; ranges of a tensor count elements. Invariant: each receiver of a transfer is
//! also a receiver of its target.

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use super::demand::{Demand, NeededTile, Ranks};
use super::nccl_reduce::ReductionKind;
use super::phase::Message;
use super::readers::Reader;
use crate::plan::Piece;

/// An exchange unit: the elements of one tensor that are exchanged in the same round, as disjoint ranges in row-major
/// order of the whole tensor. If an exchange unit does not fit into a round, it is split. (The units of FSDP1 are
/// something else: modules.)
#[derive(Clone)]
pub struct Unit<'a> {
    /// The elements of the tensor that each process needs.
    pub demand: Arc<Demand<'a>>,
    /// The index of the target tensor in the reservation.
    pub number: usize,
    /// The disjoint element ranges of the tensor that are exchanged.
    pub ranges: Vec<Range<u64>>,
}

/// Elements of a target tile that the same processes need.
#[derive(Clone, Debug)]
pub struct TransferTarget {
    /// The index of the target tensor in the reservation.
    pub tensor: usize,
    /// The complete target tile.
    pub needed: Arc<NeededTile>,
    /// The elements of the tile that the processes need, as a range of indices in the tile's local tensor.
    pub elements: Range<u64>,
    /// The length of the values of `elements` in bytes. Each partial value of these elements has this length, too.
    pub part_bytes: u64,
    /// The processes that need these elements.
    pub ranks: Ranks,
    /// The process that gets the reduced values and sends them to the other processes that need them. `None` if no
    /// values are sent on: each process in `ranks` gets the source bytes, or is the root of the NCCL reduction.
    pub reducing_rank: Option<u32>,
    /// The NCCL reduction that computes the values. `None` if NCCL does not reduce them; then the partial values are
    /// sent as messages.
    pub nccl_reduction: Option<ReductionKind>,
}

impl Unit<'_> {
    /// Returns true if this exchange unit is the whole tensor, as one range of elements.
    pub fn is_whole(&self) -> bool {
        matches!(self.ranges.as_slice(), [range] if *range == (0..self.demand.source.numel()))
    }

    /// Returns a number from which the process that reads or reduces a range is chosen; `range` is an index in
    /// `ranges`. Consecutive ranges normally have different numbers, so that the work is distributed among the
    /// processes.
    pub fn rotation(&self, range: usize, ranks: usize) -> usize {
        self.number + section_index(self.ranges[range].start, self.demand.source.numel(), ranks)
    }
}

impl TransferTarget {
    /// Returns the processes that receive the source bytes of this target.
    pub fn receivers(&self) -> &[u32] {
        self.reducing_rank.as_ref().map_or(&self.ranks, slice::from_ref)
    }

    /// Returns the total length of all partial values of this target, in bytes.
    pub fn partial_values_bytes(&self) -> u64 {
        self.part_bytes * self.needed.sources.len() as u64
    }

    /// Returns the root process and the kind of the NCCL reduction. Returns `None` if NCCL does not reduce this target.
    pub fn nccl_root(&self) -> Option<(u32, ReductionKind)> {
        self.nccl_reduction.map(|kind| (self.receivers()[0], kind))
    }

    /// Returns the message of the second phase, in which the reducing process sends the reduced values to the other
    /// processes. Returns `None` if there is no reducing process.
    pub fn second_phase_message(&self) -> Option<Message<'_>> {
        self.reducing_rank.map(|from| Message { sender: from, receivers: &self.ranks, len: self.part_bytes })
    }
}

/// A range of a source chunk that one process reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceRange {
    /// The process that reads the range, and the index of the chunk.
    pub reader: Reader,
    /// The index of the element range in [`Unit::ranges`]. The ranges of one chunk may have gaps between them.
    pub range: usize,
}

/// A strided copy of bytes from a source range to a target.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// The source range that contains the bytes.
    pub from: SourceRange,
    /// The processes that receive the bytes: some or all of the processes that receive source bytes of the target.
    pub receivers: Ranks,
    /// The index of the target in `TransferPlan::targets`.
    pub target: usize,
    /// The index of the partial value to which the bytes belong; 0 if there are no partial values.
    pub partial_index: usize,
    /// The strided copy. Source offsets count from the start of the source chunk, and target offsets from the start of
    /// the partial value.
    pub piece: Piece,
}

impl Transfer {
    /// Returns the message with which the reader sends the bytes.
    pub fn message(&self) -> Message<'_> {
        Message { sender: self.from.reader.rank, receivers: &self.receivers, len: self.piece.len_bytes() }
    }
}

/// Returns the index of the section that contains `element`, if all elements are divided into `parts` equal sections.
fn section_index(element: u64, numel: u64, parts: usize) -> usize {
    let part = u128::from(element) * parts as u128 / u128::from(numel.max(1));
    usize::try_from(part).expect("fewer than there are parts")
}
