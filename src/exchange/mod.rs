//! Exchange: conversions in which processes send source bytes to each other, because not every process can read the
//! bytes that it needs, or because each byte should be read only once.
//!
//! All processes derive the same rounds from the same catalogs. In each round, a process reads contiguous ranges of
//! source chunks. The [shuffle](Shuffle) sends the bytes to the processes that need them, and reduces partial values.
//! The results are ranges of target tiles, which are written as in other conversions ([`crate::exec::copy::write`]).
//! Reading, shuffling and writing overlap: each has its own thread, and a thread that has finished a round waits until
//! the next thread takes this round. A shuffle with several steps may start the next round before the current round is
//! finished ([`Shuffle::ROUNDS_IN_FLIGHT`]).
//!
//! All sizes and offsets are in bytes. Invariant: bytes are recorded as done only after the process that read these
//! bytes from SRC has checked them.

mod buffers;
mod casts;
mod demand;
mod load;
mod moves;
mod nccl_reduce;
mod partial_replicas;
mod phase;
mod prefetch;
mod readers;
pub mod records;
mod reduced;
mod replicas;
mod rounds;
mod shuffle;
pub mod source_copy;
mod staged;
mod strided;
#[cfg(test)]
pub(crate) mod tests;
mod transfer_plan;
mod transfers;

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

pub use crate::exec::reduce::ReductionMethod;
pub use buffers::{BufferPool, HostMemory, PooledBuffer};
pub use casts::{CastTile, Casting, Casts, Portion};
pub use demand::FileOwners;
pub use load::{Load, Loads, WireBytes};
pub use moves::{ArrivingTile, ByteOrigin, CopyDestination, Moves, SourceRead, ValueSource};
pub use nccl_reduce::{NcclReduction, ReductionKind};
pub use partial_replicas::partial_replicas;
pub use phase::TransferPhase;
pub use readers::{FileVisibility, ReplicaChoice, Topology};
pub use reduced::reduce;
pub use replicas::{differing_pair, differing_replicas};
pub use rounds::{PLAN_BYTES, Round, Rounds};
pub use shuffle::{HostShuffle, Shuffle, ShuffleOutput};
pub use strided::StridedCopy;

use staged::{Stage, Staged};

use crate::catalog::{OutputFile, Reservation};
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::exec::copy::{Stats, TileBatch, TileSource, WriteContext, write};
use crate::exec::gather::TileElements;
use crate::exec::row_groups::OutputRange;
use crate::exec::window::{CastCounter, PlannedTile};
use crate::exec::{Extents, Input, PreparedTile, Stop};
use crate::threads::start_scoped;

/// The interval at which a waiting process checks for a stop request.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The approximate maximum number of rounds of a dry run. If the bucket size of the conversion gives more rounds, a dry
/// run uses a larger bucket size.
const MOST_WEIGHED: u64 = 1 << 12;

/// The inputs of an exchange, which are equal in all processes.
#[derive(Clone, Copy)]
pub struct Exchange<'a> {
    pub input: Input<'a>,
    pub reservation: &'a Reservation,
    pub parties: &'a Topology,
    /// For each byte range of the output files, the process that writes it.
    pub owners: &'a FileOwners,
    /// The limit of a round, in bytes. In a round, a process may read, may send, may receive and may unpack at most
    /// this number of bytes each; see [`Rounds::new`].
    pub bucket_bytes: u64,
}

impl<'a> Exchange<'a> {
    fn rounds(&self) -> Rounds<'a> {
        let Self { input, reservation, parties, owners, bucket_bytes } = *self;
        Rounds::new(input.catalog, &reservation.tensors, owners, parties, bucket_bytes)
    }

    /// Returns true if some values may change: a tensor has partial values in the source or in the target, or is cast.
    /// Returns false if all values are copied unchanged.
    pub fn computes(&self) -> bool {
        self.reservation.tensors.iter().any(|tensor| {
            let source = self.input.catalog.tensor(tensor.source);
            source.dtype != tensor.dtype() || source.partial_values.is_some() || !tensor.shares.is_empty()
        })
    }

    /// Computes what an exchange would do, but moves no bytes. Returns the statistics, with the number of bytes that
    /// all processes together read from SRC. Also returns, for each process, the number of bytes that it would read,
    /// send, receive and unpack.
    ///
    /// # Errors
    /// The errors of [`Rounds`]; `Stopped`.
    pub fn dry_run(&self, stop: &Stop) -> Result<(Stats, Vec<Load>)> {
        let mut stats = Stats::for_reservation(self.input, self.reservation);
        let mut sums = vec![Load::default(); self.parties.nodes.len()];
        // Larger rounds limit the number of rounds, however large the checkpoint is.
        let bytes = self.reservation.len_bytes() / sums.len().max(1) as u64;
        let weighed = Self { bucket_bytes: self.bucket_bytes.max(bytes / MOST_WEIGHED), ..*self };
        for round in weighed.rounds() {
            stop.check()?;
            let round = round?;
            sums.iter_mut().zip(&round.loads).for_each(|(sum, load)| *sum = sum.plus(*load));
            stats.runs += round.plans.iter().map(|draft| draft.source_ranges.len() as u64).sum::<u64>();
        }
        stats.bytes_read = sums.iter().map(|load| load.read).sum();
        Ok((stats, sums))
    }

    /// Writes the output ranges that `owners` assigns to this process, except for ranges that are already done.
    ///
    /// # Errors
    /// The errors of [`crate::exec::copy::copy`], and `Comm` if another process fails.
    pub fn run<C: Communicator>(
        &self,
        communicator: &C,
        shuffle: impl Shuffle,
        writing: WriteContext<'_>,
    ) -> Result<Stats> {
        let (stop, todo) = (writing.stop, writing.log.todo());
        let casting = shuffle.casting();
        let (staged, to_shuffle) = sync_channel(0);
        let (shuffled, to_write) = sync_channel(0);
        let rooms = shuffle.buffer_pool();
        let before = communicator.traffic();
        std::thread::scope(|scope| {
            let read = || {
                let moves = |round: &Round<'_>| {
                    let moves = Moves::new(round, communicator.rank());
                    match casting {
                        Casting::InWriter => moves,
                        Casting::InShuffle => moves.with_casts(self.input.catalog, self.reservation, todo),
                    }
                };
                self.stage(moves, rooms, staged, writing);
            };
            let shuffle = || self.shuffle(communicator, shuffle, to_shuffle, shuffled);
            let started = start_scoped(scope, "reads", read).and_then(|_| start_scoped(scope, "exchange", shuffle));
            let supply = Batches { shuffled: to_write, stop };
            let done = started
                .and_then(|_| writing.create_files())
                .and_then(|outputs| write(self.input, outputs, supply, writing));
            if let Err(error) = &done {
                communicator.fail(error);
            }
            done.map(|stats| Stats { traffic: communicator.traffic().since(before), ..stats })
        })
    }

    /// Reads the source ranges of all rounds, one round after another.
    fn stage<M: HostMemory>(
        &self,
        moves: impl Fn(&Round<'_>) -> Moves,
        rooms: Arc<BufferPool<M>>,
        staged: SyncSender<Result<Staged<M>>>,
        writing: WriteContext<'_>,
    ) {
        let stage = Stage::new(self.input, rooms, writing.options.threads, writing.stop);
        for round in self.rounds() {
            let read = round.and_then(|round| stage.read(moves(&round)));
            let failed = read.is_err();
            if staged.send(read).is_err() || failed {
                return;
            }
        }
    }

    /// Sends the bytes of all rounds to the processes that need them, one round after another.
    fn shuffle<C: Communicator, S: Shuffle>(
        &self,
        communicator: &C,
        mut shuffle: S,
        staged: Receiver<Result<Staged<S::Memory>>>,
        shuffled: SyncSender<Result<Option<Arrived>>>,
    ) {
        let mut staged = staged.into_iter().fuse();
        let mut under_way = VecDeque::new();
        loop {
            let begun = staged.next().map(|staged| {
                let Staged { moves, bytes, is_checked } = staged?;
                let moves = Arc::new(moves);
                let begun = shuffle.begin(&moves, bytes)?;
                Ok((moves, begun, is_checked))
            });
            let batch = match begun.transpose() {
                Ok(begun) => {
                    // All ranks take these steps in the same order, because each step waits for the other ranks.
                    let is_next_wanted = begun.is_some() && under_way.len() + 1 < S::ROUNDS_IN_FLIGHT;
                    under_way.extend(begun);
                    if is_next_wanted {
                        continue;
                    }
                    under_way.pop_front().map_or(Ok(None), |(moves, begun, is_checked)| {
                        self.finish(communicator, &mut shuffle, &moves, begun, is_checked).map(Some)
                    })
                }
                Err(error) => Err(error),
            };
            let is_last = !matches!(batch, Ok(Some(_)));
            if shuffled.send(batch).is_err() || is_last {
                return;
            }
        }
    }

    fn finish<C: Communicator, S: Shuffle>(
        &self,
        communicator: &C,
        shuffle: &mut S,
        moves: &Moves,
        begun: S::PendingRound,
        is_checked: bool,
    ) -> Result<Arrived> {
        let given = shuffle.finish(moves, begun)?;
        let checked = communicator.gather(&[u8::from(is_checked)])?;
        let is_checked = checked.iter().all(|reply| *reply == [1]);
        self.batch(moves, given, is_checked)
    }

    /// Returns the values of a finished round as tiles for the writer.
    fn batch<M: HostMemory>(&self, moves: &Moves, given: ShuffleOutput<M>, is_checked: bool) -> Result<Arrived> {
        let ShuffleOutput { values, cast_losses: lost } = given;
        let memory: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(values);
        let mut lost = lost.into_iter();
        let taken = Stats {
            bytes_read: moves.reads.iter().map(|read| read.stage.len() as u64).sum(),
            runs: moves.reads.len() as u64,
            nccl_reduced_bytes: moves
                .nccl_reductions
                .iter()
                .flat_map(|fold| &fold.value_range)
                .map(|value| value.len() as u64)
                .sum(),
            ..Stats::default()
        };
        let (mut slots, mut payloads) = (Vec::new(), Vec::new());
        for (number, ArrivingTile { tensor, needed: wanted, elements, value_range: place, .. }) in
            moves.arriving_tiles.iter().enumerate()
        {
            let tensor = &self.reservation.tensors[*tensor];
            let source = self.input.catalog.tensor(tensor.source);
            let pair = (source.dtype, tensor.dtype());
            let numel = elements.end - elements.start;
            let laid = moves.casts.as_ref().map(|casts| &casts.tiles[number]);
            let place = laid.map_or(place, |laid| &laid.range);
            let (dtype, mut counted) = match laid.and_then(|laid| laid.cast.as_ref()) {
                None => (pair.0, CastCounter::WhileWriting(pair)),
                Some((cast, portions)) => {
                    let firsts = portions.iter().map(|portion| portion.counted.start);
                    (cast.to(), CastCounter::Counted(pair, firsts.zip(lost.by_ref()).collect()))
                }
            };
            for (nth, &chunk) in wanted.chunks.iter().enumerate() {
                let Some((file, offset)) = tensor.file_offset(chunk) else { continue };
                let values = TileElements { memory: Arc::clone(&memory), range: place.clone() };
                let tile = PreparedTile::from_memory(source, dtype, numel, values).cast_to(pair.1)?;
                let itemsize = pair.1.itemsize();
                let offset = offset + elements.start * itemsize;
                payloads.push(OutputRange {
                    file,
                    offset,
                    len: numel * itemsize,
                    tile_index: slots.len(),
                    itemsize,
                    transposed_row: None,
                    group: None,
                });
                // Cast losses are counted in the first replica only, whichever rank writes it.
                let is_counted = nth == 0 && pair.0 != pair.1;
                let counted = is_counted.then(|| mem::replace(&mut counted, CastCounter::WhileWriting(pair)));
                slots.push(PlannedTile { tile, cast_counter: counted, copy_group: None });
            }
        }
        Ok((slots, TileBatch { output_ranges: payloads, read_stats: taken, is_checked }))
    }
}

/// Tiles of a round that are ready to be written, and the ranges of the output files into which they are written.
type Arrived = (Vec<PlannedTile>, TileBatch);

/// The source from which the writer takes the finished rounds. It ends after the last round, and returns an error if a
/// round failed or if this process must stop.
struct Batches<'a> {
    shuffled: Receiver<Result<Option<Arrived>>>,
    stop: &'a Stop,
}

impl TileSource for Batches<'_> {
    fn next(&mut self, slots: &mut Vec<PlannedTile>) -> Result<Option<TileBatch>> {
        // Frees the buffers of the previous round, because the next round needs them.
        slots.clear();
        loop {
            match self.shuffled.recv_timeout(LOOK_EVERY) {
                Ok(arrived) => {
                    let Some((tiles, batch)) = arrived? else { return Ok(None) };
                    *slots = tiles;
                    return Ok(Some(batch));
                }
                Err(RecvTimeoutError::Disconnected) => unreachable!("the sender announces its end before it stops"),
                Err(RecvTimeoutError::Timeout) => self.stop.check()?,
            }
        }
    }
}

/// Sends to all processes the ranges of the output files that this process has not yet written. Returns the ranges of
/// each process, in the order of the processes.
///
/// # Errors
/// The errors of [`Communicator::gather`]; `Comm` if a message is invalid.
pub fn agree(communicator: &impl Communicator, files: &[OutputFile], todo: &Extents) -> Result<Vec<Extents>> {
    let words: Vec<u8> = todo
        .iter()
        .flat_map(|(file, range)| [u64::from(file), range.start, range.end])
        .flat_map(u64::to_le_bytes)
        .collect();
    let replies = communicator.gather(&words)?;
    let todo_of_ranks = (0..).zip(&replies).map(|(rank, words)| {
        let mut todo = Extents::new();
        for [file, start, end] in words.as_chunks::<8>().0.as_chunks::<3>().0 {
            let number = u32::try_from(u64::from_le_bytes(*file)).ok().filter(|file| (*file as usize) < files.len());
            let range = u64::from_le_bytes(*start)..u64::from_le_bytes(*end);
            let Some(number) = number.filter(|number| range.end <= files[*number as usize].len) else {
                return Err(Error::comm(rank, "agree", "its remaining work is not part of the plan"));
            };
            todo.insert(number, range);
        }
        Ok(todo)
    });
    todo_of_ranks.collect()
}
