//! A slot has the device memory and the host memory of one round in progress. This module also lists the copies between
//! these buffers. Lengths and offsets are in bytes. Invariant: the lists contain addresses of the current buffers of
//! the slot. Therefore the lists are built only after the buffers have been enlarged to the lengths that the round
//! needs.

use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::computing::ComputeJobs;
use super::copies::LoopNest;
use super::device::Device;
use super::memory::{DeviceBytes, Pinned};
use super::packer::PreparedCopies;
use crate::error::Result;
use crate::exchange::{ByteOrigin, Moves, PooledBuffer, StridedCopy, TransferPhase};

/// The device memory of one round in progress, and the host memory that the round uses.
pub(super) struct RoundSlot {
    /// The stage buffer, with the source bytes that were read. If the round has casts, this buffer later contains the
    /// output.
    pub stage: DeviceBytes,
    /// The outgoing buffer, with packed messages and with the partial values of NCCL reductions.
    pub outgoing: DeviceBytes,
    /// The incoming buffer, with the received messages.
    pub incoming: DeviceBytes,
    /// The unpacked buffer, with the values before casts, and with the partial values to reduce. If the round has no
    /// casts, the values are the output.
    pub unpacked: DeviceBytes,
    /// The job table of the round, in device memory.
    pub table: DeviceBytes,
    /// The host memory that the round uses; `None` if the slot is free.
    pub lent: Option<LentBuffers>,
}

/// The host memory of one round, which streams use until the round is done, and the work that is left to queue.
pub(super) struct LentBuffers {
    /// The list of all reads and copies of the round.
    pub moves: Arc<Moves>,
    /// The stage buffer in host memory, with the source bytes that were read.
    pub stage: PooledBuffer<Pinned>,
    /// The job table of the round, in host memory.
    pub table: PooledBuffer<Pinned>,
    /// The output buffer in host memory. If the host reduces, it first contains the partial values.
    pub output: PooledBuffer<Pinned>,
    /// The jobs that reduce and cast on the device; `None` if the host reduces and casts.
    pub compute_jobs: Option<ComputeJobs>,
    /// The copies of the second part of the round (second phase and output); `None` if they are already queued.
    pub second_part: Option<SecondPhaseCopies>,
    /// The event that marks the end of all queued work of the round; `None` if the device has not recorded it, or could
    /// not record it.
    pub done: Option<CudaEvent>,
}

/// Copies that are made after the first phase of a round.
pub(super) struct SecondPhaseCopies {
    /// The copies that pack the messages of the second phase.
    pub packs: PreparedCopies,
    /// The copies from the incoming buffer of the second phase to the unpacked buffer.
    pub unpacks: PreparedCopies,
    /// The copies of values that need no cast, from the unpacked buffer to the output.
    pub uncast: PreparedCopies,
}

impl LentBuffers {
    /// Returns true if the host reduces the partial values of the round.
    pub fn host_reduces(&self) -> bool {
        self.compute_jobs.is_none() && self.moves.has_reductions()
    }
}

impl RoundSlot {
    /// Returns a free slot with empty buffers.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let bytes = || DeviceBytes::new(device, 0, "rounds");
        let (stage, outgoing, incoming, unpacked, table) = (bytes()?, bytes()?, bytes()?, bytes()?, bytes()?);
        Ok(Self { stage, outgoing, incoming, unpacked, table, lent: None })
    }

    /// Returns the copies of a phase that pack the messages of this process, and the copies that pack the range of this
    /// process in the all-gather. `rank` is the number of this process. The copies read from buffer `from`.
    pub fn pack_nests(&self, phase: &TransferPhase, rank: usize, from: &DeviceBytes) -> Vec<LoopNest> {
        let nests = |copies: &[StridedCopy], into: &DeviceBytes, start: usize| -> Vec<LoopNest> {
            copies.iter().filter_map(|copy| LoopNest::new(copy, from, into, start)).collect()
        };
        let messages = phase.packs.iter().zip(&phase.send_ranges);
        let messages = messages.flat_map(|(copies, message)| nests(copies, &self.outgoing, message.start));
        messages
            .chain(nests(
                &phase.all_gather_packs,
                &self.incoming,
                phase.all_gather_ranges.get(rank).map_or(0, |range| range.start),
            ))
            .collect()
    }

    /// Returns the copies that pack the partial values of this process for NCCL reductions, from the stage buffer to
    /// the outgoing buffer.
    pub fn nccl_reduce_pack_nests(&self, moves: &Moves) -> impl Iterator<Item = LoopNest> {
        let packs = moves
            .nccl_reductions
            .iter()
            .flat_map(|reduction| reduction.packs.iter().map(|copy| (copy, reduction.partial_range.start)));
        packs.filter_map(|(copy, start)| LoopNest::new(copy, &self.stage, &self.outgoing, start))
    }

    /// Returns the copies to the unpacked buffer, from the stage buffer and from the incoming buffer of the first
    /// phase.
    pub fn unpack_nests(&self, moves: &Moves) -> Vec<LoopNest> {
        let mut nests = Vec::new();
        for destination in moves.copy_destinations() {
            nests.extend(destination.copies.iter().filter_map(|(origin, copy)| {
                let from = match origin {
                    ByteOrigin::Stage => &self.stage,
                    ByteOrigin::Incoming => &self.incoming,
                };
                LoopNest::new(copy, from, &self.unpacked, destination.range.start)
            }));
        }
        nests
    }

    /// Returns the copies to the unpacked buffer, from the incoming buffer of the second phase.
    pub fn second_phase_unpack_nests(&self, moves: &Moves) -> Vec<LoopNest> {
        let copies = moves
            .arriving_tiles
            .iter()
            .flat_map(|tile| tile.second_phase_copies.iter().map(|copy| (copy, tile.value_range.start)));
        copies.filter_map(|(copy, start)| LoopNest::new(copy, &self.incoming, &self.unpacked, start)).collect()
    }

    /// Returns the copies of values that need no cast, from the unpacked buffer to the output.
    pub fn uncast_nests(&self, moves: &Moves) -> Vec<LoopNest> {
        let tiles = moves.casts.iter().flat_map(|casts| moves.arriving_tiles.iter().zip(&casts.tiles));
        let uncast = tiles.filter(|(_, cast_tile)| cast_tile.cast.is_none()).map(|(tile, cast_tile)| {
            (
                StridedCopy::contiguous(tile.value_range.start as u64, 0, tile.value_range.len() as u64),
                cast_tile.range.start,
            )
        });
        uncast.filter_map(|(copy, start)| LoopNest::new(&copy, &self.unpacked, &self.stage, start)).collect()
    }
}
