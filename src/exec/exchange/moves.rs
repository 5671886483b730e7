//! Moves: what one process does in a round, as reads and strided copies between four buffers.
//!
//! ```text
//!     files --reads--> stage --packs--> outgoing --wire--> incoming --+
//!                        |                                            +--unpacks--> unpacked --> tiles to write
//!                        +--------------------------------------------+
//! ```
//!
//! What stays with its reader goes from the stage to its place without being packed. Counts bytes; all offsets are within
//! the buffers. Invariant: both sides of a message have the same copies of it in the same order, so it needs no description.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::demand::Wanted;
use super::draft::{Draft, Stretch};
use super::rounds::Round;
use crate::catalog::TensorId;
use crate::exec::runs::copy_runs;
use crate::plan::Piece;
use crate::plan::lower::Level;

/// Stretches begin at multiples of this in the stage, and tiles in what is unpacked: the widest element, and the widest
/// access of a device.
const ALIGNMENT: u64 = 16;

/// A stretch of a source chunk to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    pub tensor: TensorId,
    pub chunk: u32,
    /// Of the chunk's local tensor.
    pub first: u64,
    /// In the stage.
    pub stage: Range<usize>,
}

/// A loop nest of runs of bytes, from one buffer to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedCopy {
    pub source: u64,
    pub target: u64,
    pub run_bytes: u64,
    /// Outermost first.
    pub levels: SmallVec<[Level; 4]>,
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

    /// With the target's runs behind each other from `target` on.
    fn packed(piece: &Piece, source: u64, target: u64) -> Self {
        let levels = dense(&piece.levels, |level, step| Level { target_step: step, ..level }, piece.run_bytes);
        Self { source, target, run_bytes: piece.run_bytes, levels }
    }

    /// With the source's runs behind each other from `source` on.
    fn unpacked(piece: &Piece, source: u64, target: u64) -> Self {
        let levels = dense(&piece.levels, |level, step| Level { source_step: step, ..level }, piece.run_bytes);
        Self { source, target, run_bytes: piece.run_bytes, levels }
    }
}

/// The levels with steps on one side as if nothing were between the runs.
fn dense(levels: &[Level], with_step: impl Fn(Level, u64) -> Level, run_bytes: u64) -> SmallVec<[Level; 4]> {
    let mut step = run_bytes;
    let mut dense: SmallVec<[Level; 4]> = SmallVec::from_slice(levels);
    for level in dense.iter_mut().rev() {
        *level = with_step(*level, step);
        step *= level.count;
    }
    dense
}

/// Where bytes of a tile come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Stage,
    Incoming,
}

/// Part of a target tile that this process gets.
#[derive(Clone, Debug)]
pub struct Arriving {
    /// Of the reservation's tensors.
    pub tensor: usize,
    pub wanted: Arc<Wanted>,
    /// Of the tile's local tensor.
    pub elements: Range<u64>,
    /// In what is unpacked: its summands, one behind the other.
    pub place: Range<usize>,
    /// Targets are counted from the start of its place.
    pub copies: Vec<(Origin, StridedCopy)>,
}

impl Arriving {
    /// Whether its copies may leave out some of it, which is 0.
    #[must_use]
    pub fn has_gaps(&self) -> bool {
        self.wanted.share.as_ref().is_some_and(|share| share.within.is_some())
    }
}

/// What a process does in a round.
#[derive(Debug, Default)]
pub struct Moves {
    pub reads: Vec<Read>,
    pub stage_len: usize,
    /// By rank: from the stage to the start of the message.
    pub packs: Vec<Vec<StridedCopy>>,
    /// By rank: the message to it, within what is outgoing, and the one from it, within what is incoming.
    pub to: Vec<Range<usize>>,
    pub from: Vec<Range<usize>>,
    pub arriving: Vec<Arriving>,
    pub unpacked_len: usize,
    /// See [`Round::ends_whole`].
    pub ends_whole: bool,
}

impl Moves {
    /// Those of `rank`.
    #[must_use]
    pub fn new(round: &Round<'_>, rank: u32) -> Self {
        let ranks = round.drafts.first().map_or(0, |draft| draft.loads.len());
        let mut moves = Self {
            packs: vec![Vec::new(); ranks],
            to: vec![0..0; ranks],
            from: vec![0..0; ranks],
            ends_whole: round.ends_whole,
            ..Self::default()
        };
        let mut lens = vec![Lens::default(); ranks];
        for draft in &round.drafts {
            for transfer in &draft.transfers {
                let (reader, needer) = (transfer.from.reader.rank, draft.targets[transfer.to].rank);
                let len = transfer.piece.len_bytes();
                if reader == rank && needer != rank {
                    lens[needer as usize].to += len;
                } else if reader != rank && needer == rank {
                    lens[reader as usize].from += len;
                }
            }
        }
        let (mut to, mut from) = (0, 0);
        for (rank, lens) in lens.iter_mut().enumerate() {
            moves.to[rank] = range(to, lens.to);
            moves.from[rank] = range(from, lens.from);
            (to, from) = (to + lens.to, from + lens.from);
            *lens = Lens::default();
        }
        round.drafts.iter().for_each(|draft| moves.add(draft, rank, &mut lens));
        moves
    }

    /// Bytes that this process sends.
    #[must_use]
    pub fn outgoing_len(&self) -> usize {
        self.to.last().map_or(0, |range| range.end)
    }

    /// Bytes that it receives.
    #[must_use]
    pub fn incoming_len(&self) -> usize {
        self.from.last().map_or(0, |range| range.end)
    }

    /// `packed` is how much of each message has been dealt with.
    fn add(&mut self, draft: &Draft<'_>, rank: u32, packed: &mut [Lens]) {
        let staged = self.stage(draft, rank);
        let mut arriving: BTreeMap<usize, Arriving> = BTreeMap::new();
        for (index, target) in draft.targets.iter().enumerate().filter(|(_, target)| target.rank == rank) {
            let start = (self.unpacked_len as u64).next_multiple_of(ALIGNMENT);
            let place = range(start, target.bytes());
            self.unpacked_len = place.end;
            let (wanted, elements) = (Arc::clone(&target.wanted), target.elements.clone());
            arriving.insert(index, Arriving { tensor: target.tensor, wanted, elements, place, copies: Vec::new() });
        }
        for transfer in &draft.transfers {
            let target = &draft.targets[transfer.to];
            let (piece, len) = (&transfer.piece, transfer.piece.len_bytes());
            let source = || staged[&transfer.from].wrapping_add(piece.source);
            let place = target.part_bytes * transfer.part as u64 + piece.target;
            let reader = transfer.from.reader.rank;
            if target.rank != rank {
                if reader == rank {
                    let message = &mut packed[target.rank as usize];
                    self.packs[target.rank as usize].push(StridedCopy::packed(piece, source(), message.to));
                    message.to += len;
                }
                continue;
            }
            let copy = if reader == rank {
                let (source, levels) = (source(), piece.levels.clone());
                (Origin::Stage, StridedCopy { source, target: place, run_bytes: piece.run_bytes, levels })
            } else {
                let message = &mut packed[reader as usize];
                let at = self.from[reader as usize].start as u64 + message.from;
                message.from += len;
                (Origin::Incoming, StridedCopy::unpacked(piece, at, place))
            };
            arriving.get_mut(&transfer.to).expect("a target of this rank").copies.push(copy);
        }
        self.arriving.extend(arriving.into_values());
    }

    /// Give the stretches that this rank reads their places in the stage. What is added to an offset in a chunk to have
    /// the one in the stage may be less than nothing: it wraps around.
    fn stage(&mut self, draft: &Draft<'_>, rank: u32) -> BTreeMap<Stretch, u64> {
        let itemsize = draft.unit.demand.source.entry.dtype.itemsize();
        let mut staged = BTreeMap::new();
        for (stretch, bytes) in draft.stretches.iter().filter(|(stretch, _)| stretch.reader.rank == rank) {
            let start = (self.stage_len as u64).next_multiple_of(ALIGNMENT);
            let stage = range(start, bytes.end - bytes.start);
            self.stage_len = stage.end;
            let tensor = draft.unit.demand.tensor.source;
            let first = bytes.start / itemsize;
            self.reads.push(Read { tensor, chunk: stretch.reader.chunk, first, stage });
            staged.insert(*stretch, start.wrapping_sub(bytes.start));
        }
        staged
    }
}

/// Bytes of the messages to a rank and from it.
#[derive(Clone, Copy, Debug, Default)]
struct Lens {
    to: u64,
    from: u64,
}

fn range(start: u64, len: u64) -> Range<usize> {
    let at = |offset: u64| usize::try_from(offset).expect("a round fits memory");
    at(start)..at(start + len)
}
