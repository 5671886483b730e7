//! The shuffle on devices: rounds go up, across and down, one behind the other.
//!
//! Each round has three steps on a stream of its own kind: up, the stage is copied to the device and packed; across, NCCL
//! exchanges; down, what came is unpacked, computed with and copied to the host. So the next round goes up while this one
//! goes across, and another comes down. Summands are reduced on the way down; where values are then passed on, that goes across and down once more:
//!
//! ```text
//!     up      N      N+1                   N+2
//!     wire       N        second N  N+1         second N+1  N+2
//!     down          N..             N      N+1..            N+1
//! ```
//!
//! With [kernels](super::arithmetic) all of a round is queued at once, and what comes down is as it is written. Without them
//! the host reduces: a round is then queued as far as its summands, which come down, and the rest of it when the next one is
//! begun, or it is waited for. Where only some ranks have kernels, all take their second hops as those do that have none:
//! NCCL may keep who queues something until its peers do, too.
//!
//! Counts bytes. Invariants: memory that a stream may still use is in a slot, and a slot is emptied when its round is done;
//! on all ranks a round's second hop is queued before the first one of the next round, wherever its values are made.

use std::mem;
use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::Gpu;
use super::arithmetic::Arithmetic;
use super::communicator::Nccl;
use super::computing::Computing;
use super::memory::{DeviceBytes, Pinned};
use super::packer::{Copies, Packer};
use super::slot::{LentBuffers, RoundSlot, SecondPhaseCopies};
use super::stream::Stream;
use crate::comm::Communicator;
use crate::error::Result;
use crate::exchange::{BufferPool, Casting, Given, Moves, PooledBuffer, Shuffle, TransferPhase, reduce};

/// Rounds under way: one goes up and across while the one before comes down.
const SLOTS: usize = 2;
/// Lists of a round: of some 8,000 copies, a few of them on its way down, with a nest each.
const TABLE_BYTES: u64 = 4 << 20;
const OP: &str = "exchange";

/// What rounds take of a device, at most: in each slot what is read, sent, received and unpacked, and lists.
pub(super) fn device_bytes(bucket_bytes: u64) -> u64 {
    bucket_bytes.saturating_mul(4).saturating_add(TABLE_BYTES).saturating_mul(SLOTS as u64)
}

/// Packs and unpacks on a device, and exchanges by NCCL.
pub struct DeviceShuffle<'a> {
    peers: &'a Nccl,
    packer: Packer,
    arithmetic: Option<Arithmetic>,
    rooms: Arc<BufferPool<Pinned>>,
    /// Memory of tables, which are much shorter than rounds.
    tables: Arc<BufferPool<Pinned>>,
    up: Stream,
    wire: Stream,
    down: Stream,
    slots: Vec<RoundSlot>,
    second_hop: SecondHop,
    begun: usize,
}

/// When the second hop of a round is queued, on all ranks alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SecondHop {
    BehindTheFirst,
    BeforeTheNextRound,
}

impl<'a> DeviceShuffle<'a> {
    /// One that computes on the device, if it is given what does that. Collective.
    ///
    /// # Errors
    /// `Device` where there is no memory; as [`Communicator::gather`].
    pub fn new(gpu: &Gpu, peers: &'a Nccl, arithmetic: Option<&Arithmetic>) -> Result<Self> {
        let said = peers.gather(&[u8::from(arithmetic.is_some())])?;
        let all_compute = said.iter().all(|said| *said == [1]);
        let second_hop = if all_compute { SecondHop::BehindTheFirst } else { SecondHop::BeforeTheNextRound };
        let stream = || Stream::new(&gpu.device);
        Ok(Self {
            peers,
            packer: gpu.packer.clone(),
            arithmetic: arithmetic.cloned(),
            rooms: Pinned::rooms(&gpu.device),
            tables: Pinned::rooms(&gpu.device),
            up: stream()?,
            wire: stream()?,
            down: stream()?,
            slots: (0..SLOTS).map(|_| RoundSlot::new(&gpu.device)).collect::<Result<_>>()?,
            second_hop,
            begun: 0,
        })
    }

    /// Queue a round's way up, what is left to do of the one before, and the way across and down to where it has values, or
    /// the host has their summands.
    fn queue(&mut self, number: usize, [packs, unpacks]: &[Copies; 2]) -> Result<()> {
        let slot = &mut self.slots[number];
        let Some(lent) = &slot.lent else { return Ok(()) };
        // SAFETY: rooms and memory of the slot stay as they are until the round is done, and nobody else uses them.
        unsafe {
            self.up.copy_in(&lent.table, &mut slot.table)?;
            self.up.copy_in(&lent.stage, &mut slot.stage)?;
            packs.run(&self.up, &slot.table)?;
        }
        let packed = self.up.record()?;
        self.carry_on((number + SLOTS - 1) % SLOTS)?;
        let slot = &mut self.slots[number];
        let Some(lent) = &mut slot.lent else { return Ok(()) };
        self.wire.wait(&packed)?;
        across(self.peers, &self.wire, &lent.moves.first, &slot.outgoing, &mut slot.incoming)?;
        self.peers.queue_folds(&self.wire, &lent.moves.folds, &slot.outgoing, &mut slot.unpacked)?;
        self.down.wait(&self.wire.record()?)?;
        for landing in lent.moves.landings().iter().filter(|landing| landing.has_gaps) {
            self.down.zero(&mut slot.unpacked, landing.place.clone())?;
        }
        // SAFETY: as above.
        unsafe {
            unpacks.run(&self.down, &slot.table)?;
            match &lent.computing {
                Some(computing) => computing.reduce(&self.down, &slot.table)?,
                None if lent.moves.is_reduced() => self.down.copy_out(&slot.unpacked, &mut lent.given)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Queue what is left to do of a round that is queued as far as [`Self::queue`] does, if there is such.
    fn carry_on(&mut self, number: usize) -> Result<()> {
        let lent = self.slots[number].lent.as_mut();
        let Some(rest) = lent.and_then(|lent| lent.rest.take()) else { return Ok(()) };
        let queued = self.queue_rest(number, &rest);
        self.mark(number, queued)
    }

    /// Have values where there are none yet, let them take their second hop, and bring what is given to the host.
    fn queue_rest(&mut self, number: usize, rest: &SecondPhaseCopies) -> Result<()> {
        let slot = &mut self.slots[number];
        let Some(lent) = &mut slot.lent else { return Ok(()) };
        let by_host = lent.reduces();
        if by_host {
            // Out of its memory and into it.
            self.peers.wait(OP, &self.down.record()?)?;
            reduce(&lent.moves, &mut lent.given)?;
        }
        let Moves { second, casts, given_len, .. } = &*lent.moves;
        if let Some(second) = second {
            // SAFETY: as in `queue`.
            unsafe {
                if by_host {
                    self.down.copy_in(&lent.given[..*given_len], &mut slot.unpacked)?;
                }
                rest.packs.run(&self.down, &slot.table)?;
            }
            self.wire.wait(&self.down.record()?)?;
            across(self.peers, &self.wire, second, &slot.outgoing, &mut slot.incoming)?;
            self.down.wait(&self.wire.record()?)?;
            // SAFETY: as in `queue`.
            unsafe { rest.takes.run(&self.down, &slot.table)? };
        } else if by_host {
            return Ok(());
        }
        // SAFETY: as in `queue`; the stage has been unpacked.
        unsafe {
            if let Some(computing) = &lent.computing {
                computing.cast(&self.down, &slot.table)?;
                computing.fetch(&self.down, &slot.table, &mut lent.table)?;
            }
            if casts.is_none() {
                return self.down.copy_out(&slot.unpacked, &mut lent.given[..*given_len]);
            }
            rest.stays.run(&self.down, &slot.table)?;
            self.down.copy_out(&slot.stage, &mut lent.given)
        }
    }

    /// Remember when all that is queued of a round is done. Streams use its memory also where not all could be queued.
    fn mark(&mut self, number: usize, queued: Result<()>) -> Result<()> {
        let done = if queued.is_ok() { self.down.record() } else { self.all_done() };
        let (done, marked) = done.map_or_else(|error| (None, Err(error)), |done| (Some(done), Ok(())));
        if let Some(lent) = &mut self.slots[number].lent {
            lent.done = done;
        }
        queued.and(marked)
    }

    /// Have as much memory as a round takes.
    fn fit<const N: usize>(
        &mut self,
        number: usize,
        wanted: impl for<'s> Fn(&'s mut RoundSlot) -> [(&'s mut DeviceBytes, usize, &'static str); N],
    ) -> Result<()> {
        if wanted(&mut self.slots[number]).iter().all(|(memory, len, _)| memory.len() >= *len) {
            return Ok(());
        }
        // What is too short is freed, for which the driver waits until the device is done with the round before. That
        // one waits for peers, which only this here looks after.
        self.peers.wait(OP, &self.all_done()?)?;
        wanted(&mut self.slots[number]).into_iter().try_for_each(|(memory, len, what)| memory.at_least(len, what))
    }

    /// The point at which all that is queued is done, on whatever stream.
    fn all_done(&self) -> Result<CudaEvent> {
        self.down.wait(&self.up.record()?)?;
        self.down.wait(&self.wire.record()?)?;
        self.down.record()
    }
}

impl Shuffle for DeviceShuffle<'_> {
    type Memory = Pinned;
    /// Its slot.
    type Begun = usize;

    const UNDER_WAY: usize = SLOTS;

    fn rooms(&self) -> Arc<BufferPool<Pinned>> {
        Arc::clone(&self.rooms)
    }

    fn casting(&self) -> Casting {
        if self.arithmetic.is_some() { Casting::InShuffle } else { Casting::InStrips }
    }

    fn begin(&mut self, moves: &Arc<Moves>, stage: PooledBuffer<Pinned>) -> Result<usize> {
        let number = self.begun % SLOTS;
        assert!(self.slots[number].lent.is_none(), "no more than {SLOTS} rounds are under way");
        let (outgoing_len, incoming_len) = moves.wire_lens();
        let stage_len = moves.casts.as_ref().map_or(0, |casts| casts.len).max(moves.stage_len);
        self.fit(number, |slot| {
            [
                (&mut slot.stage, stage_len, "what is read"),
                (&mut slot.outgoing, outgoing_len, "what is sent"),
                (&mut slot.incoming, incoming_len, "what is received"),
                (&mut slot.unpacked, moves.unpacked_len, "what is unpacked"),
            ]
        })?;
        let (slot, rank) = (&self.slots[number], self.peers.rank() as usize);
        let second = moves.second.as_ref().map_or_else(Vec::new, |second| slot.packs(second, rank, &slot.unpacked));
        let mut first = slot.packs(&moves.first, rank, &slot.stage);
        first.extend(slot.summands(moves));
        let lists = [first, slot.unpacks(moves), second, slot.takes(moves), slot.stays(moves)];
        let ([first, unpacks, packs, takes, stays], mut bytes) = self.packer.prepare(lists);
        let computing = self.arithmetic.as_ref();
        let computing = computing.map(|with| Computing::new(with, moves, &slot.unpacked, &slot.stage, &mut bytes));
        self.fit(number, |slot| [(&mut slot.table, bytes.len(), "lists of copies")])?;
        let mut table = self.tables.buffer(bytes.len())?;
        table.copy_from_slice(&bytes);
        let by_host = computing.is_none() && moves.is_reduced();
        let given_len = moves.casts.as_ref().map_or(moves.given_len, |casts| casts.len);
        let given = self.rooms.buffer(if by_host { moves.unpacked_len } else { given_len })?;
        let rest = Some(SecondPhaseCopies { packs, takes, stays });
        let goes_on = !by_host && (moves.second.is_none() || self.second_hop == SecondHop::BehindTheFirst);
        let moves = Arc::clone(moves);
        self.slots[number].lent = Some(LentBuffers { moves, stage, table, given, computing, rest, done: None });
        self.begun += 1;

        let queued = self.queue(number, &[first, unpacks]);
        self.mark(number, queued)?;
        if goes_on {
            self.carry_on(number)?;
        }
        Ok(number)
    }

    fn finish(&mut self, moves: &Moves, number: usize) -> Result<Given<Pinned>> {
        self.carry_on(number)?;
        let slot = &mut self.slots[number];
        if let Some(done) = slot.lent.as_ref().and_then(|lent| lent.done.as_ref()) {
            self.peers.wait(OP, done)?;
        }
        let LentBuffers { given, computing, table, .. } = slot.lent.take().expect("a round that was begun");
        let lost = computing.map_or(Ok(Vec::new()), |computing| computing.told(moves, &table))?;
        Ok(Given { values: given, lost })
    }
}

impl Drop for DeviceShuffle<'_> {
    /// Nothing is freed that a stream may still use.
    fn drop(&mut self) {
        let is_done = |lent: &LentBuffers| lent.done.as_ref().is_some_and(|done| self.peers.has_ended(OP, done));
        if !self.slots.iter().filter_map(|slot| slot.lent.as_ref()).all(is_done) {
            mem::forget(mem::take(&mut self.slots));
        }
    }
}

/// Queue a hop.
fn across(
    peers: &Nccl,
    wire: &Stream,
    hop: &TransferPhase,
    outgoing: &DeviceBytes,
    incoming: &mut DeviceBytes,
) -> Result<()> {
    peers.queue_exchange(wire, outgoing, &hop.to, incoming, &hop.from)?;
    if hop.is_told() { peers.queue_all_gather(wire, incoming, &hop.told) } else { Ok(()) }
}
