//! Transfer plan: which process sends which bytes to which process, for some ranges of one tensor, and how much memory
//! each process needs for these transfers. All processes build the same plan. Sizes are in bytes; ranges of a tensor
//! count elements. Invariant: messages of the first phase are in the order of the transfers, and messages of the second
//! phase are in the order of the targets.
//!
//! A range of a tensor, in row-major order, is one contiguous range of each source chunk and one contiguous range of
//! each target tile. Therefore reads and writes are contiguous, and only the copies in memory between them are strided.
//!
//! If several processes need the same part of a reduced tile, one of them reduces the partial values and sends the
//! result to the others. The result is as long as one partial value:
//!
//! ```text
//!     partial values on 4 ranks; all 4 need the result    all to all    one rank reduces and sends the result
//!     tensors sent over the network                       4 * 3         3 + 3
//! ```
//!
//! The process that reduces depends on the position in the tensor. Therefore each process reduces some ranges of a
//! large tensor.

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

/// The maximum number of strided copies that all processes together make to pack messages in one round. Only a round
/// with one element may have more. Every process plans the copies of all processes, and these plans need memory,
/// especially if runs have only a few elements.
pub const MAX_COPIES: usize = 1 << 13;

/// The plan of all transfers of one exchange unit ([`Unit`]).
pub struct TransferPlan<'a> {
    /// The elements of a tensor that are transferred.
    pub unit: Unit<'a>,
    /// The parts of target tiles that the transfers fill.
    pub targets: Vec<TransferTarget>,
    /// The source ranges that are read, in ascending order, each with its byte range in the chunk. Bytes count from
    /// element 0 of the chunk, as if the chunk were contiguous.
    pub source_ranges: Vec<(SourceRange, Range<u64>)>,
    /// The copies from source ranges to targets.
    pub transfers: Vec<Transfer>,
    /// An upper bound for the number of strided copies that all processes together make to pack messages. No process
    /// unpacks more copies than this.
    pub copies: usize,
}

/// A transfer plan with the memory that it needs. A round contains several plans if all of them fit.
pub struct SizedPlan<'a> {
    /// The transfer plan whose memory `loads` states.
    pub plan: TransferPlan<'a>,
    /// The memory that the plan needs on each process that takes part.
    pub loads: PartLoads,
}

impl<'a> TransferPlan<'a> {
    /// Plans the transfers of an exchange unit. Returns `None` if the transfers need more than `max_copies` strided
    /// copies; the caller then splits the exchange unit.
    ///
    /// # Errors
    /// Returns the errors of [`Topology::choose_readers`].
    pub fn build(unit: Unit<'a>, topology: &Topology, max_copies: usize) -> Result<Option<SizedPlan<'a>>> {
        let ranks = topology.nodes.len();
        let (targets, source_ranges, transfers) = (Vec::new(), Vec::new(), Vec::new());
        let mut plan = TransferPlan { unit, targets, source_ranges, transfers, copies: 0 };
        if !plan.add_targets(topology, max_copies) {
            return Ok(None);
        }
        plan.choose_readers(topology)?;
        drop_ineligible_reductions(&mut plan.targets, &plan.transfers, ranks);
        plan.find_source_ranges();
        plan.count_copies(ranks);
        Ok((plan.copies <= max_copies).then(|| SizedPlan { loads: plan.loads(ranks), plan }))
    }

    /// Returns the messages of the first phase, which send source bytes. Each message goes to one or more processes.
    pub fn first_phase_messages(&self) -> impl Iterator<Item = Message<'_>> {
        self.transfers
            .iter()
            .filter(|transfer| self.targets[transfer.target].nccl_reduction.is_none())
            .map(Transfer::message)
    }

    /// Returns the messages of the second phase, which send reduced values from one process to the others.
    pub fn second_phase_messages(&self) -> impl Iterator<Item = Message<'_>> {
        self.targets.iter().filter_map(TransferTarget::second_phase_message)
    }

    /// Adds the parts of target tiles that contain elements which this plan transfers, and the transfers from source
    /// chunks to these parts. Returns false if there are more than `max_copies` transfers.
    fn add_targets(&mut self, topology: &Topology, max_copies: usize) -> bool {
        let Self { unit, targets, transfers, .. } = self;
        let ranks = topology.nodes.len();
        let entry = unit.demand.source;
        let itemsize = entry.dtype.itemsize();
        for (number, range) in unit.ranges.iter().enumerate() {
            let turn = unit.rotation(number, ranks);
            for needed in &unit.demand.tiles {
                let within = needed.tile.count_before(&entry.shape, range.start)
                    ..needed.tile.count_before(&entry.shape, range.end);
                if within.is_empty() {
                    continue;
                }
                let nccl_reduction = match topology.reducing {
                    ReductionMethod::InRankOrder => None,
                    ReductionMethod::Nccl => ReductionKind::for_tile(needed, ranks),
                };
                let first = needed.needs.partition_point(|need| need.elements.end <= within.start);
                for need in needed.needs[first..].iter().take_while(|need| need.elements.start < within.end) {
                    let elements = need.elements.start.max(within.start)..need.elements.end.min(within.end);
                    let is_forwarded = needed.sources.len() > 1 && need.ranks.len() > 1;
                    let target = TransferTarget {
                        tensor: unit.number,
                        needed: Arc::clone(needed),
                        part_bytes: (elements.end - elements.start) * itemsize,
                        elements,
                        reducing_rank: is_forwarded.then(|| need.ranks[turn % need.ranks.len()]),
                        ranks: need.ranks.clone(),
                        nccl_reduction,
                    };
                    let receivers: Ranks = target.receivers().into();
                    for (partial_index, planned) in needed.sources.iter().enumerate() {
                        let pieces = Pieces::new(&planned.plan, |overlap| &planned.strides[overlap], itemsize);
                        let visited = pieces.visit(target.elements.clone(), |piece| {
                            let chunk = planned.plan.overlaps[piece.overlap].chunk;
                            let from = SourceRange { reader: Reader { rank: receivers[0], chunk }, range: number };
                            let (receivers, target) = (receivers.clone(), targets.len());
                            transfers.push(Transfer { from, receivers, target, partial_index, piece });
                            if transfers.len() > max_copies { Err(()) } else { Ok(()) }
                        });
                        if visited.is_err() {
                            return false;
                        }
                    }
                    targets.push(target);
                }
            }
        }
        // The spare capacity is freed, because a round has thousands of small tensors with one target each.
        targets.shrink_to_fit();
        true
    }

    /// Sets the process that reads the source bytes of each transfer. Splits a transfer if its receivers get the bytes
    /// from different readers.
    fn choose_readers(&mut self, topology: &Topology) -> Result<()> {
        let Self { unit, transfers, .. } = self;
        // For each range and chunk, the number of bytes that each receiving rank needs.
        let mut needs: BTreeMap<(usize, u32), BTreeMap<u32, u64>> = BTreeMap::new();
        for Transfer { from, receivers, piece, .. } in transfers.iter() {
            let range_needs = needs.entry((from.range, from.reader.chunk)).or_default();
            receivers.iter().for_each(|receiver| *range_needs.entry(*receiver).or_default() += piece.len_bytes());
        }
        let mut readers: BTreeMap<(usize, u32, u32), Reader> = BTreeMap::new();
        for (turn, ((range, chunk), rank_needs)) in needs.into_iter().enumerate() {
            let rank_needs: SmallVec<[(u32, u64); 8]> = rank_needs.into_iter().collect();
            let holders = topology.replica_choice.allowed_holders(unit.demand.holders(chunk));
            // The number of the tensor is added, so that the small tensors of a round, with one source range each, are
            // read by different ranks.
            let chosen = topology.choose_readers(unit.demand.source, holders, &rank_needs, turn + unit.number)?;
            for ((rank, _), reader) in rank_needs.iter().zip(chosen) {
                readers.insert((range, chunk, *rank), reader);
            }
        }
        let mut others = Vec::new();
        for transfer in transfers.iter_mut() {
            let reader = |receiver: u32| readers[&(transfer.from.range, transfer.from.reader.chunk, receiver)];
            let mut by_reader: SmallVec<[(Reader, Ranks); 1]> = SmallVec::new();
            for (reader, receiver) in transfer.receivers.iter().map(|receiver| (reader(*receiver), *receiver)) {
                match by_reader.iter_mut().find(|(other, _)| *other == reader) {
                    Some((_, receivers)) => receivers.push(receiver),
                    None => by_reader.push((reader, std::iter::once(receiver).collect())),
                }
            }
            let mut own = by_reader.into_iter();
            let Some((reader, receivers)) = own.next() else { continue };
            (transfer.from.reader, transfer.receivers) = (reader, receivers);
            others.extend(own.map(|(reader, receivers)| {
                let from = SourceRange { reader, ..transfer.from };
                Transfer { from, receivers, ..transfer.clone() }
            }));
        }
        transfers.append(&mut others);
        Ok(())
    }

    fn count_copies(&mut self, ranks: usize) {
        let by_nccl =
            self.transfers.iter().filter(|transfer| self.targets[transfer.target].nccl_reduction.is_some()).count();
        let sent = self.first_phase_messages().chain(self.second_phase_messages());
        self.copies = 1 + by_nccl + sent.map(|message| message.max_copies(ranks)).sum::<usize>();
    }

    /// Finds the byte ranges of source chunks that have to be read.
    fn find_source_ranges(&mut self) {
        let mut source_ranges: BTreeMap<SourceRange, Range<u64>> = BTreeMap::new();
        for Transfer { from, piece, .. } in &self.transfers {
            let (start, end) = (piece.source, piece.source + piece.source_span());
            let read = source_ranges.entry(*from).or_insert(start..end);
            *read = read.start.min(start)..read.end.max(end);
        }
        self.source_ranges = source_ranges.into_iter().collect();
    }

    /// Returns the memory that each of `ranks` processes needs for this plan.
    pub fn loads(&self, ranks: usize) -> PartLoads {
        let Self { targets, transfers, source_ranges, .. } = self;
        let mut loads = vec![Load::default(); ranks];
        for (source_range, read) in source_ranges {
            loads[source_range.reader.rank as usize].read += read.end - read.start;
        }
        for target in targets {
            target.ranks.iter().for_each(|rank| loads[*rank as usize].unpacked += target.part_bytes);
            if let Some((root, _)) = target.nccl_root() {
                nccl_reduce::add_loads(root, target.part_bytes, &mut loads);
            } else if target.needed.reducer.is_some() {
                target
                    .receivers()
                    .iter()
                    .for_each(|rank| loads[*rank as usize].unpacked += target.partial_values_bytes());
            }
            if let Some(message) = target.second_phase_message() {
                message.add_load(&mut loads, |load| &mut load.second_phase);
            }
        }
        for transfer in transfers.iter().filter(|transfer| targets[transfer.target].nccl_reduction.is_none()) {
            transfer.message().add_load(&mut loads, |load| &mut load.first_phase);
        }
        PartLoads::new(&loads)
    }
}

/// Removes the NCCL reduction from each target that NCCL cannot reduce. NCCL can reduce a target if each process reads
/// exactly one partial value of it, and no two processes read the same partial value.
fn drop_ineligible_reductions(targets: &mut [TransferTarget], transfers: &[Transfer], ranks: usize) {
    const NONE: u32 = u32::MAX;
    let mut readers: Vec<Vec<u32>> =
        targets.iter().map(|target| vec![NONE; if target.nccl_reduction.is_some() { ranks } else { 0 }]).collect();
    for Transfer { from, target, partial_index, .. } in transfers {
        let (rank, Some(reader)) = (from.reader.rank, readers[*target].get_mut(*partial_index)) else { continue };
        if *reader == NONE || *reader == rank {
            *reader = rank;
        } else {
            targets[*target].nccl_reduction = None;
        }
    }
    for (target, mut readers) in targets.iter_mut().zip(readers) {
        readers.sort_unstable();
        if !readers.into_iter().eq(0..u32::try_from(ranks).expect("fewer than 2^32 ranks")) {
            target.nccl_reduction = None;
        }
    }
}
