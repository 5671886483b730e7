//! The shuffle on devices: rounds go up, across and down, one behind the other.
//!
//! Each round has three steps on a stream of its own kind: up, the stage is copied to the device and packed; across, NCCL
//! exchanges; down, what came is unpacked and copied to the host. So the next round goes up while this one goes across,
//! and another comes down. Summands are reduced on the way down; where values are then passed on, they go across and down
//! once more:
//!
//! ```text
//!     up      N      N+1                   N+2
//!     wire       N        second N  N+1         second N+1  N+2
//!     down          N..             N      N+1..            N+1
//! ```
//!
//! Counts bytes. Invariants: memory that a stream may still use is in a slot, and a slot is emptied when its round is done;
//! on all ranks a round's second hop is queued before the first one of the next round, wherever its values are made.

use std::mem;
use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::Gpu;
use super::communicator::Nccl;
use super::copies::Nest;
use super::device::Device;
use super::memory::{DeviceBytes, Pinned};
use super::packer::{Copies, Packer};
use super::stream::Stream;
use crate::comm::Communicator;
use crate::error::Result;
use crate::exec::exchange::{Hop, Making, Moves, Origin, Room, Rooms, Shuffle, StridedCopy, reduce};

/// Rounds under way: one goes up and across while the one before comes down.
const SLOTS: usize = 2;
const OP: &str = "exchange";

/// Packs and unpacks on a device, and exchanges by NCCL.
pub struct DeviceShuffle<'a, C: Communicator + Send> {
    peers: &'a Nccl<C>,
    packer: Packer,
    rooms: Arc<Rooms<Pinned>>,
    /// Memory of tables, which are much shorter than rounds.
    tables: Arc<Rooms<Pinned>>,
    up: Stream,
    wire: Stream,
    down: Stream,
    slots: Vec<Slot>,
    begun: usize,
}

/// A round's memory on the device, and what it has of the host's.
struct Slot {
    stage: DeviceBytes,
    outgoing: DeviceBytes,
    incoming: DeviceBytes,
    unpacked: DeviceBytes,
    table: DeviceBytes,
    lent: Option<Lent>,
}

/// What streams use until a round is done.
struct Lent {
    moves: Arc<Moves>,
    stage: Room<Pinned>,
    table: Room<Pinned>,
    unpacked: Room<Pinned>,
    /// Packs and what is taken of the second hop, until its way down from the first one is queued to the end.
    rest: Option<[Copies; 2]>,
    /// The point at which all that is queued of it is done; `None` where the device could not even mark the point.
    done: Option<CudaEvent>,
}

impl<'a, C: Communicator + Send> DeviceShuffle<'a, C> {
    /// # Errors
    /// `Device` where there is no memory.
    pub fn new(gpu: &Gpu, peers: &'a Nccl<C>) -> Result<Self> {
        let stream = || Stream::new(&gpu.device);
        Ok(Self {
            peers,
            packer: gpu.packer.clone(),
            rooms: Pinned::rooms(&gpu.device),
            tables: Pinned::rooms(&gpu.device),
            up: stream()?,
            wire: stream()?,
            down: stream()?,
            slots: (0..SLOTS).map(|_| Slot::new(&gpu.device)).collect::<Result<_>>()?,
            begun: 0,
        })
    }

    /// Queue a round's way up, what is left to do of the one before, and the way across and down to where it is unpacked.
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
        self.down.wait(&self.wire.record()?)?;
        for landing in lent.moves.landings().iter().filter(|landing| landing.has_gaps) {
            self.down.zero(&mut slot.unpacked, landing.place.clone())?;
        }
        // SAFETY: as above.
        unsafe {
            unpacks.run(&self.down, &slot.table)?;
            if lent.moves.is_reduced() || lent.moves.second.is_none() {
                self.down.copy_out(&slot.unpacked, &mut lent.unpacked)?;
            }
        }
        Ok(())
    }

    /// Queue what is left to do of a round that has been unpacked, if there is such.
    fn carry_on(&mut self, number: usize) -> Result<()> {
        let lent = self.slots[number].lent.as_mut();
        let Some(rest) = lent.and_then(|lent| lent.rest.take()) else { return Ok(()) };
        let queued = self.queue_rest(number, &rest);
        self.mark(number, queued)
    }

    /// Make values of summands, and let them take their second hop.
    fn queue_rest(&mut self, number: usize, [packs, takes]: &[Copies; 2]) -> Result<()> {
        let slot = &mut self.slots[number];
        let Some(lent) = &mut slot.lent else { return Ok(()) };
        let Moves { second, given_len, .. } = &*lent.moves;
        if lent.moves.is_reduced() {
            // By the host, out of its memory and into it.
            self.peers.wait(OP, &self.down.record()?)?;
            reduce(&lent.moves, &mut lent.unpacked)?;
        }
        let Some(second) = second else { return Ok(()) };
        let given = &mut lent.unpacked[..*given_len];
        // SAFETY: as in `queue`.
        unsafe {
            if lent.moves.is_reduced() {
                self.down.copy_in(given, &mut slot.unpacked)?;
            }
            packs.run(&self.down, &slot.table)?;
        }
        self.wire.wait(&self.down.record()?)?;
        across(self.peers, &self.wire, second, &slot.outgoing, &mut slot.incoming)?;
        self.down.wait(&self.wire.record()?)?;
        // SAFETY: as in `queue`.
        unsafe {
            takes.run(&self.down, &slot.table)?;
            self.down.copy_out(&slot.unpacked, given)
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
        wanted: impl for<'s> Fn(&'s mut Slot) -> [(&'s mut DeviceBytes, usize, &'static str); N],
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

impl<C: Communicator + Send> Shuffle for DeviceShuffle<'_, C> {
    type Memory = Pinned;
    /// Its slot.
    type Begun = usize;

    const UNDER_WAY: usize = SLOTS;

    fn rooms(&self) -> Arc<Rooms<Pinned>> {
        Arc::clone(&self.rooms)
    }

    fn begin(&mut self, moves: &Arc<Moves>, stage: Room<Pinned>) -> Result<usize> {
        let number = self.begun % SLOTS;
        assert!(self.slots[number].lent.is_none(), "no more than {SLOTS} rounds are under way");
        let (outgoing_len, incoming_len) = moves.wire_lens();
        self.fit(number, |slot| {
            [
                (&mut slot.stage, moves.stage_len, "what is read"),
                (&mut slot.outgoing, outgoing_len, "what is sent"),
                (&mut slot.incoming, incoming_len, "what is received"),
                (&mut slot.unpacked, moves.unpacked_len, "what is unpacked"),
            ]
        })?;
        let (slot, rank) = (&self.slots[number], self.peers.rank() as usize);
        let second = moves.second.as_ref().map_or_else(Vec::new, |second| slot.packs(second, rank, &slot.unpacked));
        let lists = [slot.packs(&moves.first, rank, &slot.stage), slot.unpacks(moves), second, slot.takes(moves)];
        let ([packs, unpacks, second, takes], bytes) = self.packer.prepare(lists);
        self.fit(number, |slot| [(&mut slot.table, bytes.len(), "lists of copies")])?;
        let mut table = self.tables.room(bytes.len())?;
        table.copy_from_slice(&bytes);
        let unpacked = self.rooms.room(moves.unpacked_len)?;
        let rest = (moves.is_reduced() || moves.second.is_some()).then_some([second, takes]);
        self.slots[number].lent = Some(Lent { moves: Arc::clone(moves), stage, table, unpacked, rest, done: None });
        self.begun += 1;

        let queued = self.queue(number, &[packs, unpacks]);
        self.mark(number, queued).map(|()| number)
    }

    fn finish(&mut self, _: &Moves, number: usize) -> Result<Room<Pinned>> {
        self.carry_on(number)?;
        let slot = &mut self.slots[number];
        if let Some(done) = slot.lent.as_ref().and_then(|lent| lent.done.as_ref()) {
            self.peers.wait(OP, done)?;
        }
        Ok(slot.lent.take().expect("a round that was begun").unpacked)
    }
}

impl<C: Communicator + Send> Drop for DeviceShuffle<'_, C> {
    /// Nothing is freed that a stream may still use.
    fn drop(&mut self) {
        let is_done = |lent: &Lent| lent.done.as_ref().is_some_and(|done| self.peers.has_ended(OP, done));
        if !self.slots.iter().filter_map(|slot| slot.lent.as_ref()).all(is_done) {
            mem::forget(mem::take(&mut self.slots));
        }
    }
}

impl Slot {
    fn new(device: &Arc<Device>) -> Result<Self> {
        let bytes = || DeviceBytes::new(device, 0, "rounds");
        let (stage, outgoing, incoming, unpacked, table) = (bytes()?, bytes()?, bytes()?, bytes()?, bytes()?);
        Ok(Self { stage, outgoing, incoming, unpacked, table, lent: None })
    }

    /// Of a hop out of this memory: messages, and what this rank tells.
    fn packs(&self, hop: &Hop, rank: usize, from: &DeviceBytes) -> Vec<Nest> {
        let nests = |copies: &[StridedCopy], into: &DeviceBytes, start: usize| -> Vec<Nest> {
            copies.iter().filter_map(|copy| Nest::new(copy, from, into, start)).collect()
        };
        let messages = hop.packs.iter().zip(&hop.to);
        let messages = messages.flat_map(|(copies, message)| nests(copies, &self.outgoing, message.start));
        messages.chain(nests(&hop.tells, &self.incoming, hop.told.get(rank).map_or(0, |told| told.start))).collect()
    }

    /// Out of the stage, and of what the first hop brings.
    fn unpacks(&self, moves: &Moves) -> Vec<Nest> {
        let mut nests = Vec::new();
        for landing in moves.landings() {
            nests.extend(landing.copies.iter().filter_map(|(origin, copy)| {
                let from = match origin {
                    Origin::Stage => &self.stage,
                    Origin::Incoming => &self.incoming,
                };
                Nest::new(copy, from, &self.unpacked, landing.place.start)
            }));
        }
        nests
    }

    /// Out of what the second hop brings.
    fn takes(&self, moves: &Moves) -> Vec<Nest> {
        let passed = moves.arriving.iter().filter_map(|tile| match &tile.making {
            Making::Passed(at) => Some((StridedCopy::run(at.start as u64, 0, at.len() as u64), tile.place.start)),
            Making::Copied(_) | Making::Reduced { .. } => None,
        });
        passed.filter_map(|(copy, start)| Nest::new(&copy, &self.incoming, &self.unpacked, start)).collect()
    }
}

/// Queue a hop.
fn across<C: Communicator + Send>(
    peers: &Nccl<C>,
    wire: &Stream,
    hop: &Hop,
    outgoing: &DeviceBytes,
    incoming: &mut DeviceBytes,
) -> Result<()> {
    peers.queue_exchange(wire, outgoing, &hop.to, incoming, &hop.from)?;
    if hop.is_told() { peers.queue_all_gather(wire, incoming, &hop.told) } else { Ok(()) }
}
