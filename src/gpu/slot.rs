//! Slots: what a round has on the device and of the host while it is under way, and the copies between that memory.
//!
//! Counts bytes. Invariant: what is listed lies in the memory that the slot has now, so lists are made when that is as long
//! as the round needs it.

use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::computing::Computing;
use super::copies::Nest;
use super::device::Device;
use super::memory::{DeviceBytes, Pinned};
use super::packer::Copies;
use crate::error::Result;
use crate::exchange::{ByteOrigin, Moves, PooledBuffer, StridedCopy, TransferPhase};

/// A round's memory on the device, and what it has of the host's.
pub(super) struct RoundSlot {
    /// What goes up; then what is cast, and what comes down with that.
    pub stage: DeviceBytes,
    pub outgoing: DeviceBytes,
    pub incoming: DeviceBytes,
    pub unpacked: DeviceBytes,
    pub table: DeviceBytes,
    pub lent: Option<LentBuffers>,
}

/// What streams use until a round is done.
pub(super) struct LentBuffers {
    pub moves: Arc<Moves>,
    pub stage: PooledBuffer<Pinned>,
    pub table: PooledBuffer<Pinned>,
    /// What comes down.
    pub given: PooledBuffer<Pinned>,
    /// `None` where the host computes.
    pub computing: Option<Computing>,
    /// What is left to do when it has been unpacked, until that is queued.
    pub rest: Option<SecondPhaseCopies>,
    /// The point at which all that is queued of it is done; `None` where the device could not even mark the point.
    pub done: Option<CudaEvent>,
}

/// Copies behind the first hop.
pub(super) struct SecondPhaseCopies {
    /// Of the second hop.
    pub packs: Copies,
    pub takes: Copies,
    /// Of what comes down with what is cast.
    pub stays: Copies,
}

impl LentBuffers {
    /// Whether the host makes values of summands.
    pub fn reduces(&self) -> bool {
        self.computing.is_none() && self.moves.is_reduced()
    }
}

impl RoundSlot {
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let bytes = || DeviceBytes::new(device, 0, "rounds");
        let (stage, outgoing, incoming, unpacked, table) = (bytes()?, bytes()?, bytes()?, bytes()?, bytes()?);
        Ok(Self { stage, outgoing, incoming, unpacked, table, lent: None })
    }

    /// Of a hop out of this memory: messages, and what this rank tells.
    pub fn packs(&self, hop: &TransferPhase, rank: usize, from: &DeviceBytes) -> Vec<Nest> {
        let nests = |copies: &[StridedCopy], into: &DeviceBytes, start: usize| -> Vec<Nest> {
            copies.iter().filter_map(|copy| Nest::new(copy, from, into, start)).collect()
        };
        let messages = hop.packs.iter().zip(&hop.to);
        let messages = messages.flat_map(|(copies, message)| nests(copies, &self.outgoing, message.start));
        messages.chain(nests(&hop.tells, &self.incoming, hop.told.get(rank).map_or(0, |told| told.start))).collect()
    }

    /// Out of the stage, what NCCL reduces.
    pub fn summands(&self, moves: &Moves) -> impl Iterator<Item = Nest> {
        let packs = moves.folds.iter().flat_map(|fold| fold.packs.iter().map(|copy| (copy, fold.summand.start)));
        packs.filter_map(|(copy, start)| Nest::new(copy, &self.stage, &self.outgoing, start))
    }

    /// Out of the stage, and of what the first hop brings.
    pub fn unpacks(&self, moves: &Moves) -> Vec<Nest> {
        let mut nests = Vec::new();
        for landing in moves.landings() {
            nests.extend(landing.copies.iter().filter_map(|(origin, copy)| {
                let from = match origin {
                    ByteOrigin::Stage => &self.stage,
                    ByteOrigin::Incoming => &self.incoming,
                };
                Nest::new(copy, from, &self.unpacked, landing.place.start)
            }));
        }
        nests
    }

    /// Out of what the second hop brings.
    pub fn takes(&self, moves: &Moves) -> Vec<Nest> {
        let passed = moves.arriving.iter().flat_map(|tile| tile.passed.iter().map(|copy| (copy, tile.place.start)));
        passed.filter_map(|(copy, start)| Nest::new(copy, &self.incoming, &self.unpacked, start)).collect()
    }

    /// To where values are cast to, those that are not.
    pub fn stays(&self, moves: &Moves) -> Vec<Nest> {
        let tiles = moves.casts.iter().flat_map(|casts| moves.arriving.iter().zip(&casts.tiles));
        let stays = tiles.filter(|(_, laid)| laid.cast.is_none()).map(|(tile, laid)| {
            (StridedCopy::run(tile.place.start as u64, 0, tile.place.len() as u64), laid.place.start)
        });
        stays.filter_map(|(copy, start)| Nest::new(&copy, &self.unpacked, &self.stage, start)).collect()
    }
}
