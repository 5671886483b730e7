//! Draft: what goes from whom to whom for some ranges of a tensor, and what that takes of each process.
//!
//! All processes make the same draft. What lies in a range of a tensor, in row-major order, is one stretch of each source
//! chunk and one of each target tile: so what is read and what is written is contiguous, and only the moves between the
//! two, in memory, are strided.
//!
//! Counts bytes, but for ranges of elements. Invariant: what one process sends another is in the order of the transfers.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::demand::{Demand, Wanted};
use super::readers::{Parties, Reader};
use crate::error::Result;
use crate::plan::{Piece, Pieces};

/// A tensor's elements that are moved together: ranges of them, disjoint, in row-major order of the whole tensor.
#[derive(Clone)]
pub struct Unit<'a> {
    pub demand: Arc<Demand<'a>>,
    /// Of the reservation's tensors.
    pub number: usize,
    pub ranges: Vec<Range<u64>>,
}

/// Part of a target tile that a process gets.
#[derive(Clone, Debug)]
pub struct Target {
    /// Of the reservation's tensors.
    pub tensor: usize,
    pub wanted: Arc<Wanted>,
    pub rank: u32,
    /// Of the tile's local tensor.
    pub elements: Range<u64>,
    /// Of one of its summands.
    pub part_bytes: u64,
}

impl Target {
    /// All its summands, one behind the other.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.part_bytes * self.wanted.parts.len() as u64
    }
}

/// A stretch of a source chunk that a process reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stretch {
    pub reader: Reader,
    /// Which of the unit's ranges it is of: those of one chunk need not touch.
    pub range: usize,
}

/// A strided copy of a stretch's bytes into a target's.
#[derive(Clone, Debug)]
pub struct Transfer {
    pub from: Stretch,
    /// Index of the target, and which of its summands.
    pub to: usize,
    pub part: usize,
    /// From the chunk's element 0 to the start of the summand.
    pub piece: Piece,
}

/// What one process has in memory for a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub read: u64,
    pub sent: u64,
    pub received: u64,
    pub unpacked: u64,
}

impl Load {
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.read.max(self.sent).max(self.received).max(self.unpacked)
    }

    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            read: self.read + other.read,
            sent: self.sent + other.sent,
            received: self.received + other.received,
            unpacked: self.unpacked + other.unpacked,
        }
    }
}

/// The moves of a unit.
pub struct Draft<'a> {
    pub unit: Unit<'a>,
    pub targets: Vec<Target>,
    /// With the bytes of the chunk, counted from its element 0 as if it were contiguous.
    pub stretches: BTreeMap<Stretch, Range<u64>>,
    pub transfers: Vec<Transfer>,
    /// By rank.
    pub loads: Vec<Load>,
}

impl<'a> Draft<'a> {
    /// # Errors
    /// As [`Parties::readers`].
    pub fn new(unit: Unit<'a>, parties: &Parties) -> Result<Self> {
        let mut draft = Draft {
            targets: Vec::new(),
            stretches: BTreeMap::new(),
            transfers: Vec::new(),
            loads: vec![Load::default(); parties.nodes.len()],
            unit,
        };
        draft.aim();
        draft.choose_readers(parties)?;
        draft.weigh();
        Ok(draft)
    }

    /// Bytes that this rank gets from others, and those that it sends.
    #[must_use]
    pub fn load(&self, rank: u32) -> Load {
        self.loads[rank as usize]
    }

    /// Find the targets, and the transfers into them from the chunks that plans name.
    fn aim(&mut self) {
        let Self { unit, targets, transfers, .. } = self;
        let entry = unit.demand.source.entry;
        let itemsize = entry.dtype.itemsize();
        for (number, range) in unit.ranges.iter().enumerate() {
            for wanted in &unit.demand.tiles {
                let held = wanted.tile.before(&entry.shape, range.start)..wanted.tile.before(&entry.shape, range.end);
                for (rank, need) in &wanted.needs {
                    let elements = need.start.max(held.start)..need.end.min(held.end);
                    if elements.is_empty() {
                        continue;
                    }
                    for (part, planned) in wanted.parts.iter().enumerate() {
                        let pieces = Pieces::new(&planned.plan, &planned.strides, itemsize);
                        let Ok(()): Result<(), Infallible> = pieces.visit(elements.clone(), |piece| {
                            let chunk = planned.plan.overlaps[piece.overlap].chunk;
                            let from = Stretch { reader: Reader { rank: *rank, chunk }, range: number };
                            transfers.push(Transfer { from, to: targets.len(), part, piece });
                            Ok(())
                        });
                    }
                    targets.push(Target {
                        tensor: unit.number,
                        wanted: Arc::clone(wanted),
                        rank: *rank,
                        part_bytes: (elements.end - elements.start) * itemsize,
                        elements,
                    });
                }
            }
        }
    }

    /// Let the transfers come from who is to read.
    fn choose_readers(&mut self, parties: &Parties) -> Result<()> {
        let Self { unit, targets, transfers, .. } = self;
        // By range and chunk, then by the rank that needs it.
        let mut needs: BTreeMap<(usize, u32), BTreeMap<u32, u64>> = BTreeMap::new();
        for Transfer { from, to, piece, .. } in transfers.iter() {
            let of_stretch = needs.entry((from.range, from.reader.chunk)).or_default();
            *of_stretch.entry(targets[*to].rank).or_default() += piece.len_bytes();
        }
        let mut readers: BTreeMap<(usize, u32, u32), Reader> = BTreeMap::new();
        for (turn, ((range, chunk), of_ranks)) in needs.into_iter().enumerate() {
            let of_ranks: SmallVec<[(u32, u64); 8]> = of_ranks.into_iter().collect();
            let holders = parties.counting.holders(unit.demand.holders(chunk));
            // A tensor that is a single stretch is not always the first rank's to read.
            let chosen = parties.readers(unit.demand.source.entry, holders, &of_ranks, turn + unit.number)?;
            for ((rank, _), reader) in of_ranks.iter().zip(chosen) {
                readers.insert((range, chunk, *rank), reader);
            }
        }
        for Transfer { from, to, .. } in transfers {
            from.reader = readers[&(from.range, from.reader.chunk, targets[*to].rank)];
        }
        Ok(())
    }

    /// Find what is read, and count what everybody has in memory.
    fn weigh(&mut self) {
        for Transfer { from, to, piece, .. } in &self.transfers {
            let (start, end) = (piece.source, piece.source + piece.source_span());
            let read = self.stretches.entry(*from).or_insert(start..end);
            *read = read.start.min(start)..read.end.max(end);
            let (reader, rank) = (from.reader.rank, self.targets[*to].rank);
            if reader != rank {
                self.loads[reader as usize].sent += piece.len_bytes();
                self.loads[rank as usize].received += piece.len_bytes();
            }
        }
        for (stretch, read) in &self.stretches {
            self.loads[stretch.reader.rank as usize].read += read.end - read.start;
        }
        for target in &self.targets {
            self.loads[target.rank as usize].unpacked += target.bytes();
        }
    }
}
