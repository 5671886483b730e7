//! Shuffle: sends the bytes of a round from the processes that read them to the processes that write them, and reduces
//! partial values. [`HostShuffle`] works in host memory; `DeviceShuffle` in the `gpu` module uses GPUs and NCCL. All
//! lengths are in bytes. Invariant: all processes begin and finish the same rounds in the same order.

use std::sync::Arc;

use rayon::prelude::*;

use super::buffers::{BufferPool, HostMemory, PooledBuffer, disjoint_slices};
use super::casts::Casting;
use super::moves::{ByteOrigin, CopyDestination, Moves};
use super::phase::TransferPhase;
use super::reduced::reduce;
use crate::comm::Communicator;
use crate::error::Result;
use crate::exec::cast::LossCounts;
use crate::exec::sized_buffer;

/// Sends the bytes that processes have read to the processes that need them, one round after another. Each process gets
/// the values that it writes.
pub trait Shuffle: Send {
    /// The kind of host memory for the stage buffer and the output buffer.
    type Memory: HostMemory;
    /// A round that has begun but is not finished.
    type PendingRound;

    /// The maximum number of rounds that may be in progress at the same time. If it is greater than 1, the next round
    /// is sent while the caller waits for the current round.
    const ROUNDS_IN_FLIGHT: usize;

    /// Returns the pool of host memory from which the stage buffer and the output buffer are taken.
    fn buffer_pool(&self) -> Arc<BufferPool<Self::Memory>>;

    /// Returns the step in which values are cast. The answer may differ between processes.
    fn casting(&self) -> Casting {
        Casting::InWriter
    }

    /// Begins a round. The buffer `stage` has the [`Moves::stage_len`] bytes that this process has read. Collective:
    /// all processes begin and finish the same rounds in the same order.
    ///
    /// # Errors
    /// Returns the errors of [`Communicator::exchange`].
    fn begin(&mut self, moves: &Arc<Moves>, stage: PooledBuffer<Self::Memory>) -> Result<Self::PendingRound>;

    /// Finishes the oldest pending round, and returns its values. If a destination [has
    /// gaps](CopyDestination::has_gaps), the bytes that no copy writes are 0.
    ///
    /// # Errors
    /// Returns the errors of [`Communicator::exchange`], and `Unsupported` if a dtype cannot hold a reduced value.
    fn finish(&mut self, moves: &Moves, round: Self::PendingRound) -> Result<ShuffleOutput<Self::Memory>>;
}

/// The result of a shuffle for one round.
pub struct ShuffleOutput<M: HostMemory> {
    /// The values. If values are cast, [`Moves::casts`] describes their layout; otherwise they are the first
    /// [`Moves::output_len`] bytes.
    pub values: PooledBuffer<M>,
    /// The number of values that casts lost, for each portion of each tile. Empty if the shuffle casts no values; the
    /// writer then casts the values and counts the lost ones.
    pub cast_losses: Vec<LossCounts>,
}

/// A shuffle that packs, exchanges and reduces in host memory.
pub struct HostShuffle<'a, C> {
    communicator: &'a C,
    pool: Arc<BufferPool<Vec<u8>>>,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
}

impl<'a, C> HostShuffle<'a, C> {
    /// Returns a shuffle that exchanges bytes through `communicator`.
    #[must_use]
    pub fn new(communicator: &'a C) -> Self {
        let pool = BufferPool::new(|len| Ok(vec![0; len]));
        Self { communicator, pool, outgoing: Vec::new(), incoming: Vec::new() }
    }
}

impl<C: Communicator<Memory = Vec<u8>>> Shuffle for HostShuffle<'_, C> {
    type Memory = Vec<u8>;
    /// The stage buffer of a pending round. The host does all work of the round in `finish`.
    type PendingRound = PooledBuffer<Vec<u8>>;

    const ROUNDS_IN_FLIGHT: usize = 1;

    fn buffer_pool(&self) -> Arc<BufferPool<Vec<u8>>> {
        Arc::clone(&self.pool)
    }

    fn begin(&mut self, _: &Arc<Moves>, stage: PooledBuffer<Vec<u8>>) -> Result<PooledBuffer<Vec<u8>>> {
        Ok(stage)
    }

    fn finish(&mut self, moves: &Moves, stage: PooledBuffer<Vec<u8>>) -> Result<ShuffleOutput<Vec<u8>>> {
        assert!(moves.nccl_reductions.is_empty(), "hosts reduce in rank order");
        self.run_phase(&moves.first_phase, &stage)?;
        let mut unpacked = self.pool.buffer(moves.unpacked_len)?;
        let destinations = moves.copy_destinations();
        let ranges = disjoint_slices(
            &mut unpacked,
            destinations.iter().map(|destination| (destination.range.start, destination.range.len())),
        );
        ranges
            .into_par_iter()
            .zip(&destinations)
            .for_each(|(range, destination)| self.copy_after_first_phase(destination, &stage, range));
        reduce(moves, &mut unpacked)?;
        if let Some(second) = &moves.second_phase {
            self.run_phase(second, &unpacked)?;
            self.copy_after_second_phase(moves, &mut unpacked);
        }
        Ok(ShuffleOutput { values: unpacked, cast_losses: Vec::new() })
    }
}

impl<C: Communicator<Memory = Vec<u8>>> HostShuffle<'_, C> {
    /// Packs the messages of a phase and exchanges them with the other processes.
    fn run_phase(&mut self, phase: &TransferPhase, source: &[u8]) -> Result<()> {
        let own_range = phase.all_gather_ranges.get(self.communicator.rank() as usize).cloned().unwrap_or_default();
        let outgoing = sized_buffer(&mut self.outgoing, phase.outgoing_len());
        let incoming = sized_buffer(&mut self.incoming, phase.incoming_len());
        let mut packed = disjoint_slices(outgoing, phase.send_ranges.iter().map(|range| (range.start, range.len())));
        packed.push(&mut incoming[own_range]);
        let copies: Vec<_> = phase.packs.iter().chain([&phase.all_gather_packs]).collect();
        packed.into_par_iter().zip(copies).for_each(|(message, copies)| {
            copies.iter().for_each(|copy| copy.copy(source, message));
        });
        self.communicator.exchange(&self.outgoing, &phase.send_ranges, &mut self.incoming, &phase.receive_ranges)?;
        if phase.has_all_gather() {
            self.communicator.all_gather(&mut self.incoming, &phase.all_gather_ranges)?;
        }
        Ok(())
    }

    /// Copies bytes to the unpacked buffer, from the stage buffer and from the incoming buffer of the first phase.
    fn copy_after_first_phase(&self, destination: &CopyDestination<'_>, stage: &[u8], range: &mut [u8]) {
        if destination.has_gaps {
            range.fill(0);
        }
        for (origin, copy) in destination.copies {
            let source = match origin {
                ByteOrigin::Stage => stage,
                ByteOrigin::Incoming => &self.incoming,
            };
            copy.copy(source, range);
        }
    }

    /// Copies values to the output, from the incoming buffer of the second phase.
    fn copy_after_second_phase(&self, moves: &Moves, output: &mut [u8]) {
        let ranges = disjoint_slices(
            output,
            moves.arriving_tiles.iter().map(|tile| (tile.value_range.start, tile.value_range.len())),
        );
        ranges.into_par_iter().zip(&moves.arriving_tiles).for_each(|(range, tile)| {
            tile.second_phase_copies.iter().for_each(|copy| copy.copy(&self.incoming, range));
        });
    }
}
