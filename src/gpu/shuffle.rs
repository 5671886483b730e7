//! The GPU implementation of the shuffle, which sends the bytes of each round to the processes that write them. It is a
//! pipeline of rounds. All sizes and offsets are in bytes. Invariants: memory that a stream may still use belongs to a
//! slot (the buffers of one round in progress), and a slot is emptied only when its round is done. On all processes,
//! the second phase of a round is queued before the first phase of the next round.
//!
//! Each round has three steps, and each step has its own CUDA stream. `upload` copies the stage to the device and packs
//! messages. `wire` exchanges the messages by NCCL. `download` unpacks, reduces, casts, and copies the output to the
//! host. Therefore one round is uploaded or exchanged while the previous round is downloaded. If reduced values are
//! sent to other processes, `wire` and `download` run a second time for the round:
//!
//! ```text
//!     upload    N      N+1                   N+2
//!     wire         N        second N  N+1         second N+1  N+2
//!     download        N..             N      N+1..            N+1
//! ```
//!
//! With [kernels](super::arithmetic), all steps of a round are queued together. Without kernels, the host reduces, so a
//! round is queued in two parts. The first part ends with the download of the partial values. The second part is queued
//! when the next round begins, or when the caller waits for this round. If only some processes have kernels, all
//! processes queue the second phase at that later time, because NCCL may block a process that queues an operation until
//! its peers also queue the operation.

use std::mem;
use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::Gpu;
use super::arithmetic::Arithmetic;
use super::computing::ComputeJobs;
use super::memory::{DeviceBytes, Pinned};
use super::nccl_communicator::Nccl;
use super::packer::{Packer, PreparedCopies};
use super::slot::{LentBuffers, RoundSlot, SecondPhaseCopies};
use super::stream::Stream;
use crate::comm::Communicator;
use crate::error::Result;
use crate::exchange::{BufferPool, Casting, Moves, PooledBuffer, Shuffle, ShuffleOutput, TransferPhase, reduce};

/// The number of rounds that are in progress at the same time: one round is uploaded and exchanged while the previous
/// round is downloaded.
const SLOTS: usize = 2;
/// The budget in bytes of device memory for the job table of a round. A round normally packs at most 8,192 copies and
/// unpacks at most as many, and most copies are one job of 136 bytes.
const TABLE_BYTES: u64 = 4 << 20;
const OP: &str = "exchange";

/// Returns the budget in bytes of device memory for all rounds in progress. For each of them, it counts four buffers of
/// the bucket size (bytes that are read, sent, received and unpacked) and a job table.
pub(super) fn device_bytes(bucket_bytes: u64) -> u64 {
    bucket_bytes.saturating_mul(4).saturating_add(TABLE_BYTES).saturating_mul(SLOTS as u64)
}

/// A shuffle that packs and unpacks messages on a GPU, and exchanges them by NCCL.
pub struct DeviceShuffle<'a> {
    peers: &'a Nccl,
    packer: Packer,
    arithmetic: Option<Arithmetic>,
    pinned_pool: Arc<BufferPool<Pinned>>,
    /// The pool of pinned memory for job tables. Job tables have their own pool, because they are much shorter than the
    /// buffers of a round.
    table_pool: Arc<BufferPool<Pinned>>,
    upload: Stream,
    wire: Stream,
    download: Stream,
    slots: Vec<RoundSlot>,
    second_phase_timing: SecondPhaseTiming,
    rounds_begun: usize,
}

/// The time at which the second phase of a round (sending reduced values) is queued. All processes use the same value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SecondPhaseTiming {
    AfterFirstPhase,
    BeforeNextRound,
}

impl<'a> DeviceShuffle<'a> {
    /// Returns a shuffle that reduces and casts with the kernels `arithmetic`. If `arithmetic` is `None`, the host
    /// reduces and casts. Collective.
    ///
    /// # Errors
    /// Returns `Device` if a stream or memory cannot be created, and the errors of [`Communicator::gather`].
    pub fn new(gpu: &Gpu, peers: &'a Nccl, arithmetic: Option<&Arithmetic>) -> Result<Self> {
        let answers = peers.gather(&[u8::from(arithmetic.is_some())])?;
        let all_compute = answers.iter().all(|answers| *answers == [1]);
        let second_hop =
            if all_compute { SecondPhaseTiming::AfterFirstPhase } else { SecondPhaseTiming::BeforeNextRound };
        let stream = || Stream::new(&gpu.device);
        Ok(Self {
            peers,
            packer: gpu.packer.clone(),
            arithmetic: arithmetic.cloned(),
            pinned_pool: Pinned::pool(&gpu.device),
            table_pool: Pinned::pool(&gpu.device),
            upload: stream()?,
            wire: stream()?,
            download: stream()?,
            slots: (0..SLOTS).map(|_| RoundSlot::new(&gpu.device)).collect::<Result<_>>()?,
            second_phase_timing: second_hop,
            rounds_begun: 0,
        })
    }

    /// Queues the upload of the round in slot `number`, then the second part of the previous round, and then the first
    /// phase of this round. The first phase ends when the values are in the unpacked buffer. If the host reduces, it
    /// ends with the download of the partial values.
    fn queue_first_part(&mut self, number: usize, [packs, unpacks]: &[PreparedCopies; 2]) -> Result<()> {
        let slot = &mut self.slots[number];
        let Some(lent) = &slot.lent else { return Ok(()) };
        // SAFETY: the buffers of the slot stay in place until the round is done, and nothing else uses them.
        unsafe {
            self.upload.copy_in(&lent.table, &mut slot.table)?;
            self.upload.copy_in(&lent.stage, &mut slot.stage)?;
            packs.run(&self.upload, &slot.table)?;
        }
        let packed = self.upload.record()?;
        self.queue_second_part_if_due((number + SLOTS - 1) % SLOTS)?;
        let slot = &mut self.slots[number];
        let Some(lent) = &mut slot.lent else { return Ok(()) };
        self.wire.wait(&packed)?;
        queue_phase(self.peers, &self.wire, &lent.moves.first_phase, &slot.outgoing, &mut slot.incoming)?;
        self.peers.queue_reductions(&self.wire, &lent.moves.nccl_reductions, &slot.outgoing, &mut slot.unpacked)?;
        self.download.wait(&self.wire.record()?)?;
        for destination in lent.moves.copy_destinations().iter().filter(|destination| destination.has_gaps) {
            self.download.zero(&mut slot.unpacked, destination.range.clone())?;
        }
        // SAFETY: the buffers of the slot stay in place until the round is done, and nothing else uses them.
        unsafe {
            unpacks.run(&self.download, &slot.table)?;
            match &lent.compute_jobs {
                Some(computing) => computing.reduce(&self.download, &slot.table)?,
                None if lent.moves.has_reductions() => self.download.copy_out(&slot.unpacked, &mut lent.output)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Queues the second part of the round in slot `number` (the second phase and the download of the output), if it is
    /// not queued yet.
    fn queue_second_part_if_due(&mut self, number: usize) -> Result<()> {
        let lent = self.slots[number].lent.as_mut();
        let Some(second_part) = lent.and_then(|lent| lent.second_part.take()) else { return Ok(()) };
        let queued = self.queue_second_part(number, &second_part);
        self.record_done(number, queued)
    }

    /// Queues the second phase of the round in slot `number`, and the download of its output. If the host reduces,
    /// first waits for the partial values and reduces them.
    fn queue_second_part(&mut self, number: usize, second_part: &SecondPhaseCopies) -> Result<()> {
        let slot = &mut self.slots[number];
        let Some(lent) = &mut slot.lent else { return Ok(()) };
        let by_host = lent.host_reduces();
        if by_host {
            // The host reads and writes the pinned output buffer, so the device must have finished its copies.
            self.peers.wait(OP, &self.download.record()?)?;
            reduce(&lent.moves, &mut lent.output)?;
        }
        let Moves { second_phase: second, casts, output_len, .. } = &*lent.moves;
        if let Some(second) = second {
            // SAFETY: the buffers of the slot stay in place until the round is done, and nothing else uses them.
            unsafe {
                if by_host {
                    self.download.copy_in(&lent.output[..*output_len], &mut slot.unpacked)?;
                }
                second_part.packs.run(&self.download, &slot.table)?;
            }
            self.wire.wait(&self.download.record()?)?;
            queue_phase(self.peers, &self.wire, second, &slot.outgoing, &mut slot.incoming)?;
            self.download.wait(&self.wire.record()?)?;
            // SAFETY: the buffers of the slot stay in place until the round is done, and nothing else uses them.
            unsafe { second_part.unpacks.run(&self.download, &slot.table)? };
        } else if by_host {
            return Ok(());
        }
        // SAFETY: the buffers of the slot stay in place until the round is done. The stage has been unpacked, so
        // nothing else uses it.
        unsafe {
            if let Some(computing) = &lent.compute_jobs {
                computing.cast(&self.download, &slot.table)?;
                computing.fetch(&self.download, &slot.table, &mut lent.table)?;
            }
            if casts.is_none() {
                return self.download.copy_out(&slot.unpacked, &mut lent.output[..*output_len]);
            }
            second_part.uncast.run(&self.download, &slot.table)?;
            self.download.copy_out(&slot.stage, &mut lent.output)
        }
    }

    /// Records a CUDA event after all queued work of the round in slot `number`. Does so even if `queued` is an error,
    /// because streams may already use the memory of the round. Returns `queued`, or the error of recording.
    fn record_done(&mut self, number: usize, queued: Result<()>) -> Result<()> {
        let done = if queued.is_ok() { self.download.record() } else { self.record_all_streams() };
        let (done, recorded) = done.map_or_else(|error| (None, Err(error)), |done| (Some(done), Ok(())));
        if let Some(lent) = &mut self.slots[number].lent {
            lent.done = done;
        }
        queued.and(recorded)
    }

    /// Enlarges the buffers of slot `number`. `buffers` returns each buffer with the length in bytes that the round
    /// needs, and with its purpose for error messages. If a buffer is too short, first waits until no stream uses it.
    fn grow_buffers<const N: usize>(
        &mut self,
        number: usize,
        buffers: impl for<'s> Fn(&'s mut RoundSlot) -> [(&'s mut DeviceBytes, usize, &'static str); N],
    ) -> Result<()> {
        if buffers(&mut self.slots[number]).iter().all(|(memory, len, _)| memory.len() >= *len) {
            return Ok(());
        }
        // Enlarging a buffer frees the old memory, and the driver then blocks until the previous round is done. That
        // round may wait for another rank. This wait notices if that rank has died; the driver would not notice.
        self.peers.wait(OP, &self.record_all_streams()?)?;
        buffers(&mut self.slots[number]).into_iter().try_for_each(|(memory, len, what)| memory.grow_to(len, what))
    }

    /// Records a CUDA event that is reached when all queued work of all three streams is done.
    fn record_all_streams(&self) -> Result<CudaEvent> {
        self.download.wait(&self.upload.record()?)?;
        self.download.wait(&self.wire.record()?)?;
        self.download.record()
    }
}

impl Shuffle for DeviceShuffle<'_> {
    type Memory = Pinned;
    /// The index of the slot (the buffers of one round) that the pending round uses.
    type PendingRound = usize;

    const ROUNDS_IN_FLIGHT: usize = SLOTS;

    fn buffer_pool(&self) -> Arc<BufferPool<Pinned>> {
        Arc::clone(&self.pinned_pool)
    }

    fn casting(&self) -> Casting {
        if self.arithmetic.is_some() { Casting::InShuffle } else { Casting::InWriter }
    }

    fn begin(&mut self, moves: &Arc<Moves>, stage: PooledBuffer<Pinned>) -> Result<usize> {
        let number = self.rounds_begun % SLOTS;
        assert!(self.slots[number].lent.is_none(), "at most {SLOTS} rounds are in flight");
        let (outgoing_len, incoming_len) = moves.wire_buffer_lens();
        let stage_len = moves.casts.as_ref().map_or(0, |casts| casts.len).max(moves.stage_len);
        self.grow_buffers(number, |slot| {
            [
                (&mut slot.stage, stage_len, "the read buffer"),
                (&mut slot.outgoing, outgoing_len, "the send buffer"),
                (&mut slot.incoming, incoming_len, "the receive buffer"),
                (&mut slot.unpacked, moves.unpacked_len, "the unpack buffer"),
            ]
        })?;
        let (slot, rank) = (&self.slots[number], self.peers.rank() as usize);
        let second =
            moves.second_phase.as_ref().map_or_else(Vec::new, |second| slot.pack_nests(second, rank, &slot.unpacked));
        let mut first = slot.pack_nests(&moves.first_phase, rank, &slot.stage);
        first.extend(slot.nccl_reduce_pack_nests(moves));
        let lists =
            [first, slot.unpack_nests(moves), second, slot.second_phase_unpack_nests(moves), slot.uncast_nests(moves)];
        let ([first, unpacks, packs, unpacks_second, uncast], mut bytes) = self.packer.prepare(lists);
        let computing = self.arithmetic.as_ref();
        let computing = computing.map(|with| ComputeJobs::new(with, moves, &slot.unpacked, &slot.stage, &mut bytes));
        self.grow_buffers(number, |slot| [(&mut slot.table, bytes.len(), "the table of copies")])?;
        let mut table = self.table_pool.buffer(bytes.len())?;
        table.copy_from_slice(&bytes);
        let by_host = computing.is_none() && moves.has_reductions();
        let output_len = moves.casts.as_ref().map_or(moves.output_len, |casts| casts.len);
        let output = self.pinned_pool.buffer(if by_host { moves.unpacked_len } else { output_len })?;
        let second_part = Some(SecondPhaseCopies { packs, unpacks: unpacks_second, uncast });
        let queue_all = !by_host
            && (moves.second_phase.is_none() || self.second_phase_timing == SecondPhaseTiming::AfterFirstPhase);
        let moves = Arc::clone(moves);
        self.slots[number].lent =
            Some(LentBuffers { moves, stage, table, output, compute_jobs: computing, second_part, done: None });
        self.rounds_begun += 1;

        let queued = self.queue_first_part(number, &[first, unpacks]);
        self.record_done(number, queued)?;
        if queue_all {
            self.queue_second_part_if_due(number)?;
        }
        Ok(number)
    }

    fn finish(&mut self, moves: &Moves, number: usize) -> Result<ShuffleOutput<Pinned>> {
        self.queue_second_part_if_due(number)?;
        let slot = &mut self.slots[number];
        if let Some(done) = slot.lent.as_ref().and_then(|lent| lent.done.as_ref()) {
            self.peers.wait(OP, done)?;
        }
        let LentBuffers { output, compute_jobs: computing, table, .. } = slot.lent.take().expect("the round was begun");
        let lost = computing.map_or(Ok(Vec::new()), |computing| computing.cast_losses(moves, &table))?;
        Ok(ShuffleOutput { values: output, cast_losses: lost })
    }
}

impl Drop for DeviceShuffle<'_> {
    /// Frees the device memory. If a stream may still use a part of it, leaks all of it instead.
    fn drop(&mut self) {
        let is_done = |lent: &LentBuffers| lent.done.as_ref().is_some_and(|done| self.peers.has_ended(OP, done));
        if !self.slots.iter().filter_map(|slot| slot.lent.as_ref()).all(is_done) {
            mem::forget(mem::take(&mut self.slots));
        }
    }
}

/// Queues the messages of a phase and its all-gather, if it has one, on the stream `wire`.
fn queue_phase(
    peers: &Nccl,
    wire: &Stream,
    phase: &TransferPhase,
    outgoing: &DeviceBytes,
    incoming: &mut DeviceBytes,
) -> Result<()> {
    peers.queue_exchange(wire, outgoing, &phase.send_ranges, incoming, &phase.receive_ranges)?;
    if phase.has_all_gather() { peers.queue_all_gather(wire, incoming, &phase.all_gather_ranges) } else { Ok(()) }
}
