//! Moves: the work of one process in one round, as reads and as strided copies between four buffers. All sizes and
//! offsets are in bytes, and no offset counts from the start of a file. Invariant: all processes know whether the round
//! has a second phase.
//!
//! ```text
//!     files --reads--> stage --packs--> outgoing --wire--> incoming --+
//!                        |                                            +--copies--> unpacked
//!                        +--------------------------------------------+
//!
//!     unpacked = | output: values of tiles to write           | partial values |
//!                      ^   |        ^                             |
//!                      |   +-packs--|--> outgoing --wire--> incoming --+
//!                      +------------+---reduced-------------------+    |
//!                      +------------------------second phase ----------+
//! ```
//!
//! If the process that reads bytes also needs them, it copies them from the stage directly to the unpacked buffer. If
//! several processes need reduced values, these values are sent in a second [phase](TransferPhase). Partial values that
//! NCCL reduces are packed into the outgoing buffer as well, and NCCL writes the result to the output
//! ([`NcclReduction`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::casts::{CastTile, Casts, Portion};
use super::demand::NeededTile;
use super::nccl_reduce::NcclReduction;
use super::phase::{PhaseSchedule, TransferPhase, buffer_range};
use super::rounds::Round;
use super::strided::StridedCopy;
use super::transfer_plan::TransferPlan;
use super::transfers::{SourceRange, Transfer};
use crate::catalog::{Catalog, Reservation, Reserved, TensorId};
use crate::exec::Extents;
use crate::exec::cast::Cast;
use crate::exec::reduce::Reducer;

/// The alignment in bytes of source ranges in the stage buffer, and of tiles in the unpacked buffer. The alignment is
/// the size of the largest element, and also the width of the widest memory access of a GPU.
const ALIGNMENT: u64 = 16;

/// A range of a source chunk that this process reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceRead {
    /// The id of the source tensor.
    pub tensor: TensorId,
    /// The index of the chunk in its tensor.
    pub chunk: u32,
    /// The index of the first element to read, in the chunk's local tensor.
    pub first_element: u64,
    /// The byte range of the stage buffer into which the bytes are read.
    pub stage: Range<usize>,
}

/// The buffer from which the bytes of a tile are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteOrigin {
    /// The stage buffer, which contains the bytes that this process has read.
    Stage,
    /// The incoming buffer, which contains the bytes that other processes have sent.
    Incoming,
}

/// A target tile, or some of its elements, that this process writes to its output files.
#[derive(Clone, Debug)]
pub struct ArrivingTile {
    /// The index of the target tensor in the reservation.
    pub tensor: usize,
    /// The complete target tile. In this round, the process may get only some of its elements.
    pub needed: Arc<NeededTile>,
    /// The elements of the tile that the process gets in this round, as a range of indices in the tile's local tensor.
    pub elements: Range<u64>,
    /// The byte range of the output buffer that contains the values of `elements`.
    pub value_range: Range<usize>,
    /// The way in which this process obtains the values.
    pub value_source: ValueSource,
    /// The copies from the incoming buffer of the second phase to `value_range`. Their target offsets count from the
    /// start of `value_range`. Empty if the values do not arrive in the second phase.
    pub second_phase_copies: Vec<StridedCopy>,
}

/// The way in which a process obtains values of a target tile.
#[derive(Clone, Debug)]
pub enum ValueSource {
    /// The values are copied from the stage buffer (bytes that this process has read), and from the incoming buffer of
    /// the first phase (bytes that other processes have sent). The list is empty if the values arrive in the second
    /// phase.
    Copied(OriginCopies),
    /// The values are computed by reducing partial values. The partial values are first copied to `partial_range` of
    /// the unpacked buffer, one after the other.
    Reduced { partial_range: Range<usize>, copies: OriginCopies, reducer: Reducer },
    /// An NCCL reduction writes the values; see [`Moves::nccl_reductions`].
    ReducedByNccl,
}

/// Copies, each with the buffer from which it reads. Target offsets count from the start of the byte range that all
/// these copies together fill.
pub type OriginCopies = Vec<(ByteOrigin, StridedCopy)>;

/// The range of the unpacked buffer that the copies of one tile write.
#[derive(Clone, Copy, Debug)]
pub struct CopyDestination<'a> {
    /// The byte range of the unpacked buffer that the copies write.
    pub range: &'a Range<usize>,
    /// The copies, each with the buffer from which it reads.
    pub copies: &'a [(ByteOrigin, StridedCopy)],
    /// True if the copies may leave parts of the range unwritten. These parts must be 0.
    pub has_gaps: bool,
}

impl ArrivingTile {
    /// Returns the byte range of the unpacked buffer that is filled after the first phase, and the copies that fill it.
    /// Returns `None` if NCCL writes the values.
    fn copy_destination(&self) -> Option<CopyDestination<'_>> {
        let (range, copies) = match &self.value_source {
            ValueSource::Copied(copies) => (&self.value_range, copies),
            ValueSource::Reduced { partial_range, copies, .. } => (partial_range, copies),
            ValueSource::ReducedByNccl => return None,
        };
        let has_gaps = self.needed.share.as_ref().is_some_and(|share| share.within.is_some());
        Some(CopyDestination { range, copies, has_gaps })
    }

    /// Returns the copies from the stage buffer and from the incoming buffer of the first phase.
    fn copies(&mut self) -> &mut OriginCopies {
        match &mut self.value_source {
            ValueSource::Copied(copies) | ValueSource::Reduced { copies, .. } => copies,
            ValueSource::ReducedByNccl => unreachable!("NCCL reductions have no copies"),
        }
    }
}

/// The reads and copies that one process makes in one round.
#[derive(Debug, Default)]
pub struct Moves {
    /// The ranges of source chunks that this process reads.
    pub reads: Vec<SourceRead>,
    /// The length in bytes of the stage buffer, into which source bytes are read.
    pub stage_len: usize,
    /// The first phase, which sends bytes of the stage buffer.
    pub first_phase: TransferPhase,
    /// The NCCL reductions of the round, in the same order on each process. NCCL reductions run at the same time as the
    /// first phase. Their partial values follow the messages of the first phase in the outgoing buffer.
    pub nccl_reductions: Vec<NcclReduction>,
    /// The parts of target tiles that this process writes.
    pub arriving_tiles: Vec<ArrivingTile>,
    /// The length of the output, in bytes. The output contains the values and is at the beginning of the unpacked
    /// buffer.
    pub output_len: usize,
    /// The length of the unpacked buffer, in bytes. It contains the output, followed by the partial values that this
    /// process reduces.
    pub unpacked_len: usize,
    /// The second phase, which sends bytes of the output. `None` if no process sends anything in it.
    pub second_phase: Option<TransferPhase>,
    /// The layout of the output after casts; `None` if the shuffle casts no value in this round.
    pub casts: Option<Casts>,
    /// True if the round transfers the last elements of its tensors; see [`Round::completes_tensors`].
    pub completes_tensors: bool,
}

impl Moves {
    /// Returns the reads and copies that process `rank` makes in a round.
    #[must_use]
    pub fn new(round: &Round<'_>, rank: u32) -> Self {
        let ranks = round.loads.len();
        let second_phase_messages = || round.plans.iter().flat_map(TransferPlan::second_phase_messages);
        let mut first =
            PhaseSchedule::new(round.plans.iter().flat_map(TransferPlan::first_phase_messages), rank, ranks);
        let mut second = PhaseSchedule::new(second_phase_messages(), rank, ranks);
        let mut moves = Self { completes_tensors: round.completes_tensors, ..Self::default() };
        let (mut partial_values_len, mut outgoing_len) = (0, first.phase.outgoing_len());
        for plan in &round.plans {
            let offsets = moves.plan_reads(plan, rank);
            let mut arriving = moves.plan_arriving_tiles(plan, rank, &mut partial_values_len, &mut second);
            plan_transfers(plan, rank, &offsets, &mut arriving, &mut first);
            moves.nccl_reductions.extend(plan_nccl_reductions(plan, rank, &offsets, &arriving, &mut outgoing_len));
            moves.arriving_tiles.extend(arriving.into_values());
        }
        // In the unpacked buffer, the partial values follow after all values.
        let partial_start = moves.output_len.next_multiple_of(usize::try_from(ALIGNMENT).expect("a few bytes"));
        for tile in &mut moves.arriving_tiles {
            if let ValueSource::Reduced { partial_range, .. } = &mut tile.value_source {
                *partial_range = partial_start + partial_range.start..partial_start + partial_range.end;
            }
        }
        moves.unpacked_len =
            if partial_values_len == 0 { moves.output_len } else { partial_start + partial_values_len };
        moves.first_phase = first.phase;
        moves.second_phase = second_phase_messages().next().is_some().then_some(second.phase);
        moves
    }

    /// Adds the casts of the values; called only if the shuffle casts. `todo` contains the bytes that this process
    /// writes; this process counts the values that casts lose in these bytes.
    #[must_use]
    pub fn with_casts(self, catalog: &Catalog, reservation: &Reservation, todo: &Extents) -> Self {
        let mut len = 0;
        let cast_tile = |tile: &ArrivingTile| {
            let tensor = &reservation.tensors[tile.tensor];
            let (from, to) = (catalog.tensor(tensor.source).dtype, tensor.dtype());
            let cast = Cast::new(from, to).filter(|_| to.itemsize() <= from.itemsize());
            let numel = tile.elements.end - tile.elements.start;
            let itemsize = cast.map_or(from, |cast| cast.to()).itemsize();
            let range = allocate(&mut len, numel * itemsize);
            CastTile {
                range,
                cast: cast.map(|cast| (cast, Portion::all(numel, elements_to_count(tensor, tile, todo)))),
            }
        };
        let tiles: Vec<_> = self.arriving_tiles.iter().map(cast_tile).collect();
        let casts = tiles.iter().any(|tile| tile.cast.is_some()).then_some(Casts { tiles, len });
        Self { casts, ..self }
    }

    /// Returns the lengths in bytes of the outgoing buffer and of the incoming buffer. Both phases use the same two
    /// buffers, so each length is the larger of the two lengths that the phases need. The outgoing buffer also has
    /// space for the partial values of NCCL reductions.
    pub fn wire_buffer_lens(&self) -> (usize, usize) {
        let phases = || std::iter::once(&self.first_phase).chain(&self.second_phase);
        let longest = |of: fn(&TransferPhase) -> usize| phases().map(of).max().unwrap_or(0);
        let reductions_end = self.nccl_reductions.last().map_or(0, |reduction| reduction.partial_range.end);
        (longest(TransferPhase::outgoing_len).max(reductions_end), longest(TransferPhase::incoming_len))
    }

    /// Returns the byte ranges of the unpacked buffer that are filled after the first phase, in ascending order. Each
    /// range has its copies, from the stage buffer or from the incoming buffer.
    pub fn copy_destinations(&self) -> Vec<CopyDestination<'_>> {
        let mut destinations: Vec<_> = self.arriving_tiles.iter().filter_map(ArrivingTile::copy_destination).collect();
        destinations.sort_unstable_by_key(|destination| destination.range.start);
        destinations
    }

    /// Returns true if this process reduces partial values itself, without NCCL.
    pub fn has_reductions(&self) -> bool {
        self.unpacked_len > self.output_len
    }

    /// Returns the tiles, or parts of tiles, that this process gets by a transfer plan. The keys of the map are indices
    /// in `plan.targets`. The caller has to add the copies of the first phase. Also schedules the messages of the
    /// second phase.
    fn plan_arriving_tiles(
        &mut self,
        plan: &TransferPlan<'_>,
        rank: u32,
        partial_values_len: &mut usize,
        second: &mut PhaseSchedule,
    ) -> BTreeMap<usize, ArrivingTile> {
        let mut arriving = BTreeMap::new();
        for (index, target) in plan.targets.iter().enumerate() {
            let is_needed = target.ranks.contains(&rank);
            let range = if is_needed { allocate(&mut self.output_len, target.part_bytes) } else { 0..0 };
            let value = range.start as u64;
            let second_phase_copies = target.second_phase_message().and_then(|message| {
                second.schedule(&message, |at| StridedCopy::contiguous(value, at, target.part_bytes))
            });
            if !is_needed {
                continue;
            }
            let second_phase_copies: Vec<_> =
                second_phase_copies.map(|at| StridedCopy::contiguous(at, 0, target.part_bytes)).into_iter().collect();
            let value_source = match target.needed.reducer.filter(|_| second_phase_copies.is_empty()) {
                // Most tiles need one copy.
                None => ValueSource::Copied(Vec::with_capacity(usize::from(second_phase_copies.is_empty()))),
                Some(_) if target.nccl_reduction.is_some() => ValueSource::ReducedByNccl,
                Some(reducer) => {
                    let partial_range = allocate(partial_values_len, target.partial_values_bytes());
                    ValueSource::Reduced { partial_range, copies: Vec::new(), reducer }
                }
            };
            let (needed, elements) = (Arc::clone(&target.needed), target.elements.clone());
            arriving.insert(
                index,
                ArrivingTile {
                    tensor: target.tensor,
                    needed,
                    elements,
                    value_range: range,
                    value_source,
                    second_phase_copies,
                },
            );
        }
        arriving
    }

    /// Reserves space in the stage buffer for the source ranges that this process reads. Returns, for each range, the
    /// offset in the stage buffer minus the offset in the chunk. This difference may be negative, so it is a wrapping
    /// number.
    fn plan_reads(&mut self, plan: &TransferPlan<'_>, rank: u32) -> StageOffsets {
        let itemsize = plan.unit.demand.source.dtype.itemsize();
        let mut offsets = BTreeMap::new();
        for (source_range, bytes) in
            plan.source_ranges.iter().filter(|(source_range, _)| source_range.reader.rank == rank)
        {
            let stage = allocate(&mut self.stage_len, bytes.end - bytes.start);
            offsets.insert(*source_range, (stage.start as u64).wrapping_sub(bytes.start));
            let tensor = plan.unit.demand.tensor.source;
            let first_element = bytes.start / itemsize;
            self.reads.push(SourceRead { tensor, chunk: source_range.reader.chunk, first_element, stage });
        }
        offsets
    }
}

/// For each source range, a number that converts offsets: the offset in the chunk plus this number is the offset in the
/// stage buffer. The sum wraps, because the number may be negative.
type StageOffsets = BTreeMap<SourceRange, u64>;

/// Adds the copies of the first phase: copies into outgoing messages, and copies into the tiles of this process.
fn plan_transfers(
    plan: &TransferPlan<'_>,
    rank: u32,
    offsets: &StageOffsets,
    arriving: &mut BTreeMap<usize, ArrivingTile>,
    first: &mut PhaseSchedule,
) {
    for transfer in plan.transfers.iter().filter(|transfer| plan.targets[transfer.target].nccl_reduction.is_none()) {
        let Transfer { from, receivers, target, partial_index, piece, .. } = transfer;
        let source = || offsets[from].wrapping_add(piece.source);
        let incoming = first.schedule(&transfer.message(), |at| StridedCopy::packed(piece, source(), at));
        if !receivers.contains(&rank) {
            continue;
        }
        let range = plan.targets[*target].part_bytes * *partial_index as u64 + piece.target;
        let tile = arriving.get_mut(target).expect("a target of this rank");
        tile.copies().push(match incoming {
            Some(at) => (ByteOrigin::Incoming, StridedCopy::unpacked(piece, at, range)),
            None => (ByteOrigin::Stage, StridedCopy::from_piece(piece, source(), range)),
        });
    }
}

/// Returns the NCCL reductions of a transfer plan, with the copies that pack this process's partial values.
fn plan_nccl_reductions(
    plan: &TransferPlan<'_>,
    rank: u32,
    offsets: &StageOffsets,
    arriving: &BTreeMap<usize, ArrivingTile>,
    outgoing_len: &mut usize,
) -> impl Iterator<Item = NcclReduction> {
    let mut reductions = BTreeMap::new();
    for (index, target) in plan.targets.iter().enumerate() {
        let Some((root, kind)) = target.nccl_root() else { continue };
        let partial_range = allocate(outgoing_len, target.part_bytes);
        let value_range = (root == rank).then(|| arriving[&index].value_range.clone());
        reductions.insert(index, NcclReduction { kind, root, partial_range, packs: Vec::new(), value_range });
    }
    for Transfer { from, target, piece, .. } in
        plan.transfers.iter().filter(|transfer| transfer.from.reader.rank == rank)
    {
        if let Some(reduction) = reductions.get_mut(target) {
            reduction.packs.push(StridedCopy::from_piece(
                piece,
                offsets[from].wrapping_add(piece.source),
                piece.target,
            ));
        }
    }
    reductions.into_values()
}

/// Returns the elements of a tile for which this process counts values lost by casts, in ascending order. To count each
/// element once, a process counts the elements whose first byte it writes in the first replica.
fn elements_to_count(tensor: &Reserved, tile: &ArrivingTile, todo: &Extents) -> impl Iterator<Item = Range<u64>> {
    let itemsize = tensor.dtype().itemsize();
    let range = tile.needed.chunks.first().and_then(|first| tensor.file_offset(*first));
    let bytes = range.into_iter().flat_map(move |(file, offset)| {
        let [start, end] = [tile.elements.start, tile.elements.end].map(|element| offset + element * itemsize);
        todo.within(file, start..end).map(move |bytes| bytes.start - start..bytes.end - start)
    });
    let elements = bytes.map(move |bytes| bytes.start.div_ceil(itemsize)..bytes.end.div_ceil(itemsize));
    elements.filter(|elements| !elements.is_empty())
}

/// Appends an aligned range to a buffer whose current length is `len`, and increases `len`. Returns the range.
fn allocate(len: &mut usize, bytes: u64) -> Range<usize> {
    let range = buffer_range((*len as u64).next_multiple_of(ALIGNMENT), bytes);
    *len = range.end;
    range
}
