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
//! Who makes what follows from where it lies in the tensor, so that all make some of one that is cut into ranges.
//!
//! Counts bytes, but for ranges of elements. Invariant: what one process sends another is in the order of the transfers,
//! and what is passed on in the order of the targets, and then of the transfers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::demand::Ranks;
use super::load::{Load, PartLoads};
use super::nccl_reduce::{self, ReductionKind};
use super::phase::Message;
use super::readers::{Reader, Topology};
use super::transfers::{SourceRange, Transfer, TransferTarget, Unit};
use crate::error::Result;
use crate::exec::reduce::ReductionMethod;
use crate::plan::Pieces;

/// Strided copies that all processes together pack in a round, at the most: each knows those of all. They take memory, too,
/// where runs are of a few elements.
pub const MOST_COPIES: usize = 1 << 13;

/// The moves of a unit.
pub struct TransferPlan<'a> {
    pub unit: Unit<'a>,
    pub targets: Vec<TransferTarget>,
    /// Ascending, with the bytes of the chunk, counted from its element 0 as if it were contiguous.
    pub stretches: Vec<(SourceRange, Range<u64>)>,
    pub transfers: Vec<Transfer>,
    /// Strided copies that all ranks together pack, by which none unpacks more.
    pub copies: usize,
}

/// A draft that goes along with others if that is not too much.
pub struct SizedPlan<'a> {
    pub draft: TransferPlan<'a>,
    pub loads: PartLoads,
}

impl<'a> TransferPlan<'a> {
    /// `None` where it takes more than so many copies.
    ///
    /// # Errors
    /// As [`Parties::readers`].
    pub fn weighed(unit: Unit<'a>, parties: &Topology, most_copies: usize) -> Result<Option<SizedPlan<'a>>> {
        let ranks = parties.nodes.len();
        let (targets, stretches, transfers) = (Vec::new(), Vec::new(), Vec::new());
        let mut draft = TransferPlan { unit, targets, stretches, transfers, copies: 0 };
        if !draft.aim(parties, most_copies) {
            return Ok(None);
        }
        draft.choose_readers(parties)?;
        settle_folds(&mut draft.targets, &draft.transfers, ranks);
        draft.find_stretches();
        draft.count(ranks);
        Ok((draft.copies <= most_copies).then(|| SizedPlan { loads: draft.loads(ranks), draft }))
    }

    /// What goes by messages, or is told to all.
    pub fn sendings(&self) -> impl Iterator<Item = Message<'_>> {
        self.transfers.iter().filter(|transfer| self.targets[transfer.to].folding.is_none()).map(Transfer::sending)
    }

    /// What then is passed on so.
    pub fn passings(&self) -> impl Iterator<Item = Message<'_>> {
        self.targets.iter().filter_map(TransferTarget::passing)
    }

    /// Find the targets, and the transfers into them from the chunks that plans name. False where those are too many.
    fn aim(&mut self, parties: &Topology, most_copies: usize) -> bool {
        let Self { unit, targets, transfers, .. } = self;
        let ranks = parties.nodes.len();
        let entry = unit.demand.source;
        let itemsize = entry.dtype.itemsize();
        for (number, range) in unit.ranges.iter().enumerate() {
            let turn = unit.turn(number, ranks);
            for wanted in &unit.demand.tiles {
                let held = wanted.tile.count_before(&entry.shape, range.start)
                    ..wanted.tile.count_before(&entry.shape, range.end);
                if held.is_empty() {
                    continue;
                }
                let folding = match parties.reducing {
                    ReductionMethod::InRankOrder => None,
                    ReductionMethod::Nccl => ReductionKind::of(wanted, ranks),
                };
                let first = wanted.needs.partition_point(|need| need.elements.end <= held.start);
                for need in wanted.needs[first..].iter().take_while(|need| need.elements.start < held.end) {
                    let elements = need.elements.start.max(held.start)..need.elements.end.min(held.end);
                    let is_passed_on = wanted.parts.len() > 1 && need.ranks.len() > 1;
                    let target = TransferTarget {
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
                            let from = SourceRange { reader: Reader { rank: takers[0], chunk }, range: number };
                            let (takers, to) = (takers.clone(), targets.len());
                            transfers.push(Transfer { from, takers, to, part, piece });
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
    fn choose_readers(&mut self, parties: &Topology) -> Result<()> {
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
                let from = SourceRange { reader, ..transfer.from };
                Transfer { from, takers, ..transfer.clone() }
            }));
        }
        transfers.append(&mut others);
        Ok(())
    }

    fn count(&mut self, ranks: usize) {
        let folded = self.transfers.iter().filter(|transfer| self.targets[transfer.to].folding.is_some()).count();
        let sent = self.sendings().chain(self.passings());
        self.copies = 1 + folded + sent.map(|sending| sending.copies(ranks)).sum::<usize>();
    }

    /// Find what is read.
    fn find_stretches(&mut self) {
        let mut stretches: BTreeMap<SourceRange, Range<u64>> = BTreeMap::new();
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
        let mut loads = vec![Load::default(); ranks];
        for (stretch, read) in stretches {
            loads[stretch.reader.rank as usize].read += read.end - read.start;
        }
        for target in targets {
            target.ranks.iter().for_each(|rank| loads[*rank as usize].unpacked += target.part_bytes);
            if let Some((root, _)) = target.folded() {
                nccl_reduce::weigh(root, target.part_bytes, &mut loads);
            } else if target.wanted.reducer.is_some() {
                target.takers().iter().for_each(|rank| loads[*rank as usize].unpacked += target.summands_bytes());
            }
            if let Some(passing) = target.passing() {
                passing.weigh(&mut loads, |load| &mut load.second);
            }
        }
        for transfer in transfers.iter().filter(|transfer| targets[transfer.to].folding.is_none()) {
            transfer.sending().weigh(&mut loads, |load| &mut load.first);
        }
        PartLoads::new(&loads)
    }
}

/// Leave folding to those targets of which each rank reads another summand, and that whole.
fn settle_folds(targets: &mut [TransferTarget], transfers: &[Transfer], ranks: usize) {
    const NOBODY: u32 = u32::MAX;
    let mut readers: Vec<Vec<u32>> =
        targets.iter().map(|target| vec![NOBODY; if target.folding.is_some() { ranks } else { 0 }]).collect();
    for Transfer { from, to, part, .. } in transfers {
        let (rank, Some(known)) = (from.reader.rank, readers[*to].get_mut(*part)) else { continue };
        if *known == NOBODY || *known == rank {
            *known = rank;
        } else {
            targets[*to].folding = None;
        }
    }
    for (target, mut readers) in targets.iter_mut().zip(readers) {
        readers.sort_unstable();
        if !readers.into_iter().eq(0..u32::try_from(ranks).expect("fewer than 2^32 ranks")) {
            target.folding = None;
        }
    }
}
