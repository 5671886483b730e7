//! Moves: what one process does in a round, as reads and strided copies between four buffers.
//!
//! ```text
//!     files --reads--> stage --packs--> outgoing --wire--> incoming --+
//!                        |                                            +--copies--> unpacked
//!                        +--------------------------------------------+
//!
//!     unpacked = | given: values, which become tiles to write | summands |
//!                      ^   |        ^                             |
//!                      |   +-packs--|--> outgoing --wire--> incoming --+
//!                      +------------+---reduced-------------------+    |
//!                      +------------------------------passed on -------+
//! ```
//!
//! What stays with its reader goes from the stage to its place without being packed. Values that others need as well take a
//! second [hop](Hop), where they were made of summands. Summands that NCCL reduces are
//! packed into what is outgoing, too, and come to their place as values ([`Fold`]). Counts bytes; all offsets are within the
//! buffers. Invariant: whether there is a second hop all ranks know alike.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::casts::{CastTile, Casts, Portion};
use super::demand::WantedTile;
use super::nccl_reduce::NcclReduction;
use super::phase::{PhaseSchedule, TransferPhase, range};
use super::rounds::Round;
use super::strided::StridedCopy;
use super::transfer_plan::TransferPlan;
use super::transfers::{SourceRange, Transfer};
use crate::catalog::{Catalog, Reservation, Reserved, TensorId};
use crate::exec::Extents;
use crate::exec::cast::Cast;
use crate::exec::reduce::Reducer;

/// Stretches begin at multiples of this in the stage, and tiles in what is unpacked: the widest element, and the widest
/// access of a device.
const ALIGNMENT: u64 = 16;

/// A stretch of a source chunk to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceRead {
    pub tensor: TensorId,
    pub chunk: u32,
    /// Of the chunk's local tensor.
    pub first: u64,
    /// In the stage.
    pub stage: Range<usize>,
}

/// Where bytes of a tile come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteOrigin {
    Stage,
    Incoming,
}

/// Part of a target tile that this process gets.
#[derive(Clone, Debug)]
pub struct Arriving {
    /// Of the reservation's tensors.
    pub tensor: usize,
    pub wanted: Arc<WantedTile>,
    /// Of the tile's local tensor.
    pub elements: Range<u64>,
    /// Of its values, in what is given.
    pub place: Range<usize>,
    pub making: Making,
    /// From what the second hop brings to the start of that place.
    pub passed: Vec<StridedCopy>,
}

/// How values come to their place.
#[derive(Clone, Debug)]
pub enum Making {
    /// They are copied there, what the second hop does not bring.
    Copied(Copies),
    /// Their summands are copied to a place of what is unpacked, one behind the other, and become values.
    Reduced { summands: Range<usize>, copies: Copies, reducer: Reducer },
    /// NCCL puts them there, see [`Moves::folds`].
    Folded,
}

/// Targets are counted from the start of where they go.
pub type Copies = Vec<(ByteOrigin, StridedCopy)>;

/// Where copies go.
#[derive(Clone, Copy, Debug)]
pub struct Landing<'a> {
    /// In what is unpacked.
    pub place: &'a Range<usize>,
    pub copies: &'a [(ByteOrigin, StridedCopy)],
    /// Whether they may leave out some of it, which is 0.
    pub has_gaps: bool,
}

impl Arriving {
    fn landing(&self) -> Option<Landing<'_>> {
        let (place, copies) = match &self.making {
            Making::Copied(copies) => (&self.place, copies),
            Making::Reduced { summands, copies, .. } => (summands, copies),
            Making::Folded => return None,
        };
        let has_gaps = self.wanted.share.as_ref().is_some_and(|share| share.within.is_some());
        Some(Landing { place, copies, has_gaps })
    }

    fn copies(&mut self) -> &mut Copies {
        match &mut self.making {
            Making::Copied(copies) | Making::Reduced { copies, .. } => copies,
            Making::Folded => unreachable!("a target that this rank takes from the source"),
        }
    }
}

/// What a process does in a round.
#[derive(Debug, Default)]
pub struct Moves {
    pub reads: Vec<SourceRead>,
    pub stage_len: usize,
    /// From the stage.
    pub first: TransferPhase,
    /// Of all ranks, in the same order, beside the first hop; their summands are outgoing behind its messages.
    pub folds: Vec<NcclReduction>,
    pub arriving: Vec<Arriving>,
    /// Of what is unpacked the values, which come first.
    pub given_len: usize,
    pub unpacked_len: usize,
    /// From what is given; `None` where nothing is passed on, whoever's.
    pub second: Option<TransferPhase>,
    /// How all that is given is laid out behind the last hop; `None` where it stays as it is.
    pub casts: Option<Casts>,
    /// See [`Round::ends_whole`].
    pub ends_whole: bool,
}

impl Moves {
    /// Those of `rank`.
    #[must_use]
    pub fn new(round: &Round<'_>, rank: u32) -> Self {
        let ranks = round.loads.len();
        let passings = || round.drafts.iter().flat_map(TransferPlan::passings);
        let mut first = PhaseSchedule::new(round.drafts.iter().flat_map(TransferPlan::sendings), rank, ranks);
        let mut second = PhaseSchedule::new(passings(), rank, ranks);
        let mut moves = Self { ends_whole: round.ends_whole, ..Self::default() };
        let (mut summands_len, mut outgoing_len) = (0, first.hop.outgoing_len());
        for draft in &round.drafts {
            let staged = moves.stage(draft, rank);
            let mut arriving = moves.arriving(draft, rank, &mut summands_len, &mut second);
            bring(draft, rank, &staged, &mut arriving, &mut first);
            moves.folds.extend(folds(draft, rank, &staged, &arriving, &mut outgoing_len));
            moves.arriving.extend(arriving.into_values());
        }
        // Summands are behind all values.
        let behind = moves.given_len.next_multiple_of(usize::try_from(ALIGNMENT).expect("a few bytes"));
        for tile in &mut moves.arriving {
            if let Making::Reduced { summands, .. } = &mut tile.making {
                *summands = behind + summands.start..behind + summands.end;
            }
        }
        moves.unpacked_len = if summands_len == 0 { moves.given_len } else { behind + summands_len };
        moves.first = first.hop;
        moves.second = passings().next().is_some().then_some(second.hop);
        moves
    }

    /// Have what is given cast, if anything is, where this rank has `todo` to write.
    #[must_use]
    pub fn with_casts(self, catalog: &Catalog, reservation: &Reservation, todo: &Extents) -> Self {
        let mut len = 0;
        let laid = |tile: &Arriving| {
            let tensor = &reservation.tensors[tile.tensor];
            let (from, to) = (catalog.tensor(tensor.source).dtype, tensor.dtype());
            let cast = Cast::new(from, to).filter(|_| to.itemsize() <= from.itemsize());
            let numel = tile.elements.end - tile.elements.start;
            let itemsize = cast.map_or(from, |cast| cast.to()).itemsize();
            let place = next(&mut len, numel * itemsize);
            CastTile { place, cast: cast.map(|cast| (cast, Portion::all(numel, counted(tensor, tile, todo)))) }
        };
        let tiles: Vec<_> = self.arriving.iter().map(laid).collect();
        let casts = tiles.iter().any(|tile| tile.cast.is_some()).then_some(Casts { tiles, len });
        Self { casts, ..self }
    }

    /// The longer message of the hops, and what comes by the longer of them.
    #[must_use]
    pub fn wire_lens(&self) -> (usize, usize) {
        let hops = || std::iter::once(&self.first).chain(&self.second);
        let longest = |of: fn(&TransferPhase) -> usize| hops().map(of).max().unwrap_or(0);
        let folded = self.folds.last().map_or(0, |fold| fold.summand.end);
        (longest(TransferPhase::outgoing_len).max(folded), longest(TransferPhase::incoming_len))
    }

    /// Where the copies out of stage and first hop go, ascending.
    #[must_use]
    pub fn landings(&self) -> Vec<Landing<'_>> {
        let mut landings: Vec<_> = self.arriving.iter().filter_map(Arriving::landing).collect();
        landings.sort_unstable_by_key(|landing| landing.place.start);
        landings
    }

    /// Whether values are to be made here of summands.
    #[must_use]
    pub fn is_reduced(&self) -> bool {
        self.unpacked_len > self.given_len
    }

    /// What this rank gets of a draft, by target, without the copies; what it makes of that is packed for the others.
    fn arriving(
        &mut self,
        draft: &TransferPlan<'_>,
        rank: u32,
        summands_len: &mut usize,
        second: &mut PhaseSchedule,
    ) -> BTreeMap<usize, Arriving> {
        let mut arriving = BTreeMap::new();
        for (index, target) in draft.targets.iter().enumerate() {
            let is_needed = target.ranks.contains(&rank);
            let place = if is_needed { next(&mut self.given_len, target.part_bytes) } else { 0..0 };
            let value = place.start as u64;
            let passed = target
                .passing()
                .and_then(|sending| second.go(&sending, |at| StridedCopy::run(value, at, target.part_bytes)));
            if !is_needed {
                continue;
            }
            let passed: Vec<_> = passed.map(|at| StridedCopy::run(at, 0, target.part_bytes)).into_iter().collect();
            let making = match target.wanted.reducer.filter(|_| passed.is_empty()) {
                // Most take one.
                None => Making::Copied(Vec::with_capacity(usize::from(passed.is_empty()))),
                Some(_) if target.folding.is_some() => Making::Folded,
                Some(reducer) => {
                    let summands = next(summands_len, target.summands_bytes());
                    Making::Reduced { summands, copies: Vec::new(), reducer }
                }
            };
            let (wanted, elements) = (Arc::clone(&target.wanted), target.elements.clone());
            arriving.insert(index, Arriving { tensor: target.tensor, wanted, elements, place, making, passed });
        }
        arriving
    }

    /// Give the stretches that this rank reads their places in the stage. What is added to an offset in a chunk to have
    /// the one in the stage may be less than nothing: it wraps around.
    fn stage(&mut self, draft: &TransferPlan<'_>, rank: u32) -> StagedAt {
        let itemsize = draft.unit.demand.source.dtype.itemsize();
        let mut staged = BTreeMap::new();
        for (stretch, bytes) in draft.stretches.iter().filter(|(stretch, _)| stretch.reader.rank == rank) {
            let stage = next(&mut self.stage_len, bytes.end - bytes.start);
            staged.insert(*stretch, (stage.start as u64).wrapping_sub(bytes.start));
            let tensor = draft.unit.demand.tensor.source;
            let first = bytes.start / itemsize;
            self.reads.push(SourceRead { tensor, chunk: stretch.reader.chunk, first, stage });
        }
        staged
    }
}

/// What is added to the offset in a stretch's chunk to have the one in the stage.
type StagedAt = BTreeMap<SourceRange, u64>;

/// Pack and copy what the transfers of a draft say.
fn bring(
    draft: &TransferPlan<'_>,
    rank: u32,
    staged: &StagedAt,
    arriving: &mut BTreeMap<usize, Arriving>,
    first: &mut PhaseSchedule,
) {
    for transfer in draft.transfers.iter().filter(|transfer| draft.targets[transfer.to].folding.is_none()) {
        let Transfer { from, takers, to, part, piece, .. } = transfer;
        let source = || staged[from].wrapping_add(piece.source);
        let arrived = first.go(&transfer.sending(), |at| StridedCopy::packed(piece, source(), at));
        if !takers.contains(&rank) {
            continue;
        }
        let place = draft.targets[*to].part_bytes * *part as u64 + piece.target;
        let tile = arriving.get_mut(to).expect("a target of this rank");
        tile.copies().push(match arrived {
            Some(at) => (ByteOrigin::Incoming, StridedCopy::unpacked(piece, at, place)),
            None => (ByteOrigin::Stage, StridedCopy::of(piece, source(), place)),
        });
    }
}

/// What NCCL makes of a draft's summands: this rank's share of each.
fn folds(
    draft: &TransferPlan<'_>,
    rank: u32,
    staged: &StagedAt,
    arriving: &BTreeMap<usize, Arriving>,
    outgoing_len: &mut usize,
) -> impl Iterator<Item = NcclReduction> {
    let mut folds = BTreeMap::new();
    for (index, target) in draft.targets.iter().enumerate() {
        let Some((root, folding)) = target.folded() else { continue };
        let summand = next(outgoing_len, target.part_bytes);
        let value = (root == rank).then(|| arriving[&index].place.clone());
        folds.insert(index, NcclReduction { folding, root, summand, packs: Vec::new(), value });
    }
    for Transfer { from, to, piece, .. } in draft.transfers.iter().filter(|one| one.from.reader.rank == rank) {
        if let Some(fold) = folds.get_mut(to) {
            fold.packs.push(StridedCopy::of(piece, staged[from].wrapping_add(piece.source), piece.target));
        }
    }
    folds.into_values()
}

/// Elements whose first bytes are to be done in the first replica, ascending.
fn counted(tensor: &Reserved, tile: &Arriving, todo: &Extents) -> impl Iterator<Item = Range<u64>> {
    let itemsize = tensor.dtype().itemsize();
    let place = tile.wanted.chunks.first().and_then(|first| tensor.file_offset(*first));
    let stretches = place.into_iter().flat_map(move |(file, offset)| {
        let [start, end] = [tile.elements.start, tile.elements.end].map(|element| offset + element * itemsize);
        todo.within(file, start..end).map(move |bytes| bytes.start - start..bytes.end - start)
    });
    let elements = stretches.map(move |bytes| bytes.start.div_ceil(itemsize)..bytes.end.div_ceil(itemsize));
    elements.filter(|elements| !elements.is_empty())
}

/// The next place of a buffer that is so long up to now.
fn next(len: &mut usize, bytes: u64) -> Range<usize> {
    let place = range((*len as u64).next_multiple_of(ALIGNMENT), bytes);
    *len = place.end;
    place
}
