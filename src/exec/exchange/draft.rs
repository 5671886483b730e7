//! Draft: what goes from whom to whom for some ranges of a tensor, and what that takes of each process.
//!
//! All processes make the same draft. What lies in a range of a tensor, in row-major order, is one stretch of each source
//! chunk and one of each target tile: so what is read and what is written is contiguous, and only the moves between the
//! two, in memory, are strided.
//!
//! What several need of a tile that is reduced is made by one of them, which passes it on: so summands go to one, and what
//! they become, which is as long as one of them, goes to the others.
//!
//! ```text
//!     summands on 4 ranks, of which all need the value       each sent to all    made by one
//!     over the wire, as tensors                              4 * 3               3 + 3
//! ```
//!
//! Who makes what follows from where it lies in the tensor, so that all make some of one that is cut into ranges. What is
//! no sum and goes to several may be passed on by one of them, too, its [relay](super::relays).
//!
//! Counts bytes, but for ranges of elements. Invariant: what one process sends another is in the order of the transfers,
//! and what is passed on in the order of the targets, and then of the transfers.

use std::collections::BTreeMap;
use std::mem;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

use smallvec::SmallVec;

use super::demand::{Demand, Ranks, Wanted};
use super::folds::{self, Folding, Reducing};
use super::hop::Sending;
use super::load::{Load, PartLoads};
use super::readers::{Parties, Reader};
use super::relays;
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

/// Part of a target tile that some processes get.
#[derive(Clone, Debug)]
pub struct Target {
    /// Of the reservation's tensors.
    pub tensor: usize,
    pub wanted: Arc<Wanted>,
    /// Of the tile's local tensor.
    pub elements: Range<u64>,
    /// Of one of its summands, and of what they become.
    pub part_bytes: u64,
    /// Who need it.
    pub ranks: Ranks,
    /// Who of them makes it of its summands and passes it on; `None` where each has it from the source.
    pub maker: Option<u32>,
    /// How NCCL makes it, if that does: of summands that are not transferred.
    pub folding: Option<Folding>,
}

impl Unit<'_> {
    /// Whether it is all of the tensor, in one range.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        matches!(self.ranges.as_slice(), [range] if *range == (0..self.demand.source.numel()))
    }

    /// Another number for each range that comes along in turn, of so many ranks.
    #[must_use]
    pub fn turn(&self, range: usize, ranks: usize) -> usize {
        self.number + part(self.ranges[range].start, self.demand.source.numel(), ranks)
    }
}

impl Target {
    /// Who get what it is made of.
    #[must_use]
    pub fn takers(&self) -> &[u32] {
        self.maker.as_ref().map_or(&self.ranks, slice::from_ref)
    }

    /// All its summands, one behind the other.
    #[must_use]
    pub fn summands_bytes(&self) -> u64 {
        self.part_bytes * self.wanted.parts.len() as u64
    }

    /// Who gets it of NCCL, if that makes it.
    #[must_use]
    pub fn folded(&self) -> Option<(u32, Folding)> {
        self.folding.map(|folding| (self.takers()[0], folding))
    }

    /// What its maker passes on.
    #[must_use]
    pub fn passing(&self) -> Option<Sending<'_>> {
        self.maker.map(|from| Sending { from, takers: &self.ranks, len: self.part_bytes })
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
    /// Who get it, of those that get what the target is made of.
    pub takers: Ranks,
    /// Who of them passes it on to the others; `None` where each has it from its reader.
    pub relay: Option<u32>,
    /// Index of the target, and which of its summands.
    pub to: usize,
    pub part: usize,
    /// From the chunk's element 0 to the start of the summand.
    pub piece: Piece,
}

impl Transfer {
    /// What its reader sends.
    #[must_use]
    pub fn sending(&self) -> Sending<'_> {
        Sending { takers: self.relay.as_ref().map_or(&self.takers, slice::from_ref), ..self.direct() }
    }

    /// What its relay passes on.
    #[must_use]
    pub fn passing(&self) -> Option<Sending<'_>> {
        self.relay.map(|from| Sending { from, ..self.direct() })
    }

    /// What its reader sends where nobody passes it on.
    fn direct(&self) -> Sending<'_> {
        Sending { from: self.from.reader.rank, takers: &self.takers, len: self.piece.len_bytes() }
    }
}

/// The moves of a unit.
pub struct Draft<'a> {
    pub unit: Unit<'a>,
    pub targets: Vec<Target>,
    /// Ascending, with the bytes of the chunk, counted from its element 0 as if it were contiguous.
    pub stretches: Vec<(Stretch, Range<u64>)>,
    pub transfers: Vec<Transfer>,
    /// Strided copies that all ranks together pack, by which none unpacks more.
    pub copies: usize,
}

/// A draft that goes along with others if that is not too much.
pub struct Weighed<'a> {
    pub draft: Draft<'a>,
    pub loads: PartLoads,
}

impl<'a> Draft<'a> {
    /// `None` where it takes more than so many copies.
    ///
    /// # Errors
    /// As [`Parties::readers`].
    pub fn weighed(unit: Unit<'a>, parties: &Parties, most_copies: usize) -> Result<Option<Weighed<'a>>> {
        let ranks = parties.nodes.len();
        let (targets, stretches, transfers) = (Vec::new(), Vec::new(), Vec::new());
        let mut draft = Draft { unit, targets, stretches, transfers, copies: 0 };
        if !draft.aim(parties, most_copies) {
            return Ok(None);
        }
        draft.choose_readers(parties)?;
        folds::settle(&mut draft.targets, &draft.transfers, ranks);
        draft.name_relays(&parties.nodes);
        draft.find_stretches();
        draft.count(ranks);
        Ok((draft.copies <= most_copies).then(|| Weighed { loads: draft.loads(ranks), draft }))
    }

    /// Let readers send everything themselves.
    pub fn go_direct(&mut self) {
        self.transfers.iter_mut().for_each(|transfer| transfer.relay = None);
    }

    /// What goes by messages, or is told to all.
    pub fn sendings(&self) -> impl Iterator<Item = Sending<'_>> {
        self.transfers.iter().filter(|transfer| self.targets[transfer.to].folding.is_none()).map(Transfer::sending)
    }

    /// What then is passed on so.
    pub fn passings(&self) -> impl Iterator<Item = Sending<'_>> {
        let of_targets = self.targets.iter().filter_map(Target::passing);
        of_targets.chain(self.transfers.iter().filter_map(Transfer::passing))
    }

    /// Find the targets, and the transfers into them from the chunks that plans name. False where those are too many.
    fn aim(&mut self, parties: &Parties, most_copies: usize) -> bool {
        let Self { unit, targets, transfers, .. } = self;
        let ranks = parties.nodes.len();
        let entry = unit.demand.source;
        let itemsize = entry.dtype.itemsize();
        for (number, range) in unit.ranges.iter().enumerate() {
            let turn = unit.turn(number, ranks);
            for wanted in &unit.demand.tiles {
                let held = wanted.tile.before(&entry.shape, range.start)..wanted.tile.before(&entry.shape, range.end);
                if held.is_empty() {
                    continue;
                }
                let folding = match parties.reducing {
                    Reducing::InRankOrder => None,
                    Reducing::ByNccl => Folding::of(wanted, ranks),
                };
                let first = wanted.needs.partition_point(|need| need.elements.end <= held.start);
                for need in wanted.needs[first..].iter().take_while(|need| need.elements.start < held.end) {
                    let elements = need.elements.start.max(held.start)..need.elements.end.min(held.end);
                    let is_passed_on = wanted.parts.len() > 1 && need.ranks.len() > 1;
                    let target = Target {
                        tensor: unit.number,
                        wanted: Arc::clone(wanted),
                        part_bytes: (elements.end - elements.start) * itemsize,
                        elements,
                        maker: is_passed_on.then(|| need.ranks[turn % need.ranks.len()]),
                        ranks: need.ranks.clone(),
                        folding,
                    };
                    let takers: Ranks = target.takers().into();
                    for (part, planned) in wanted.parts.iter().enumerate() {
                        let pieces = Pieces::new(&planned.plan, |overlap| &planned.strides[overlap], itemsize);
                        let visited = pieces.visit(target.elements.clone(), |piece| {
                            let chunk = planned.plan.overlaps[piece.overlap].chunk;
                            let from = Stretch { reader: Reader { rank: takers[0], chunk }, range: number };
                            let (takers, to) = (takers.clone(), targets.len());
                            transfers.push(Transfer { from, takers, relay: None, to, part, piece });
                            if transfers.len() > most_copies { Err(()) } else { Ok(()) }
                        });
                        if visited.is_err() {
                            return false;
                        }
                    }
                    targets.push(target);
                }
            }
        }
        // There are thousands of drafts of one.
        targets.shrink_to_fit();
        true
    }

    /// Let the transfers come from who is to read. Takers may have different readers.
    fn choose_readers(&mut self, parties: &Parties) -> Result<()> {
        let Self { unit, transfers, .. } = self;
        // By range and chunk, then by the rank that takes it.
        let mut needs: BTreeMap<(usize, u32), BTreeMap<u32, u64>> = BTreeMap::new();
        for Transfer { from, takers, piece, .. } in transfers.iter() {
            let of_stretch = needs.entry((from.range, from.reader.chunk)).or_default();
            takers.iter().for_each(|taker| *of_stretch.entry(*taker).or_default() += piece.len_bytes());
        }
        let mut readers: BTreeMap<(usize, u32, u32), Reader> = BTreeMap::new();
        for (turn, ((range, chunk), of_ranks)) in needs.into_iter().enumerate() {
            let of_ranks: SmallVec<[(u32, u64); 8]> = of_ranks.into_iter().collect();
            let holders = parties.counting.holders(unit.demand.holders(chunk));
            // A tensor that is a single stretch is not always the first rank's to read.
            let chosen = parties.readers(unit.demand.source, holders, &of_ranks, turn + unit.number)?;
            for ((rank, _), reader) in of_ranks.iter().zip(chosen) {
                readers.insert((range, chunk, *rank), reader);
            }
        }
        let mut others = Vec::new();
        for transfer in transfers.iter_mut() {
            let reader = |taker: u32| readers[&(transfer.from.range, transfer.from.reader.chunk, taker)];
            let mut by_reader: SmallVec<[(Reader, Ranks); 1]> = SmallVec::new();
            for (reader, taker) in transfer.takers.iter().map(|taker| (reader(*taker), *taker)) {
                match by_reader.iter_mut().find(|(other, _)| *other == reader) {
                    Some((_, takers)) => takers.push(taker),
                    None => by_reader.push((reader, std::iter::once(taker).collect())),
                }
            }
            let mut own = by_reader.into_iter();
            let Some((reader, takers)) = own.next() else { continue };
            (transfer.from.reader, transfer.takers) = (reader, takers);
            others.extend(own.map(|(reader, takers)| {
                let from = Stretch { reader, ..transfer.from };
                Transfer { from, takers, ..transfer.clone() }
            }));
        }
        transfers.append(&mut others);
        Ok(())
    }

    fn name_relays(&mut self, nodes: &[u32]) {
        self.transfers = relays::named(&self.unit, &self.targets, mem::take(&mut self.transfers), nodes);
    }

    fn count(&mut self, ranks: usize) {
        let folded = self.transfers.iter().filter(|transfer| self.targets[transfer.to].folding.is_some()).count();
        let sent = self.sendings().chain(self.passings());
        self.copies = 1 + folded + sent.map(|sending| sending.copies(ranks)).sum::<usize>();
    }

    /// Find what is read.
    fn find_stretches(&mut self) {
        let mut stretches: BTreeMap<Stretch, Range<u64>> = BTreeMap::new();
        for Transfer { from, piece, .. } in &self.transfers {
            let (start, end) = (piece.source, piece.source + piece.source_span());
            let read = stretches.entry(*from).or_insert(start..end);
            *read = read.start.min(start)..read.end.max(end);
        }
        self.stretches = stretches.into_iter().collect();
    }

    /// What each of so many ranks has in memory.
    #[must_use]
    pub fn loads(&self, ranks: usize) -> PartLoads {
        let Self { targets, transfers, stretches, .. } = self;
        let mut direct = vec![Load::default(); ranks];
        for (stretch, read) in stretches {
            direct[stretch.reader.rank as usize].read += read.end - read.start;
        }
        for target in targets {
            target.ranks.iter().for_each(|rank| direct[*rank as usize].unpacked += target.part_bytes);
            if let Some((root, _)) = target.folded() {
                folds::weigh(root, target.part_bytes, &mut direct);
            } else if target.wanted.reducer.is_some() {
                target.takers().iter().for_each(|rank| direct[*rank as usize].unpacked += target.summands_bytes());
            }
            if let Some(passing) = target.passing() {
                passing.weigh(&mut direct, |load| &mut load.second);
            }
        }
        let mut relayed = direct.clone();
        for transfer in transfers.iter().filter(|transfer| targets[transfer.to].folding.is_none()) {
            transfer.direct().weigh(&mut direct, |load| &mut load.first);
            transfer.sending().weigh(&mut relayed, |load| &mut load.first);
            if let Some(passing) = transfer.passing() {
                passing.weigh(&mut relayed, |load| &mut load.second);
            }
        }
        PartLoads::new(&direct, &relayed)
    }
}

/// Which of so many equal parts of all elements one is in.
fn part(element: u64, numel: u64, parts: usize) -> usize {
    let part = u128::from(element) * parts as u128 / u128::from(numel.max(1));
    usize::try_from(part).expect("fewer than there are parts")
}
