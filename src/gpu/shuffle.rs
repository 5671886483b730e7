//! The shuffle on devices: rounds go up, across and down, one behind the other.
//!
//! Each round has three steps on a stream of its own kind: up, the stage is copied to the device and packed; across, NCCL
//! exchanges; down, what came is unpacked and copied to the host. So the next round goes up while this one goes across,
//! and another comes down.
//!
//! Counts bytes. Invariant: memory that a stream may still use is in a slot, and a slot is emptied when its round is done.

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
use crate::exec::exchange::{Moves, Origin, Room, Rooms, Shuffle, StridedCopy};

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
    stage: Room<Pinned>,
    table: Room<Pinned>,
    unpacked: Room<Pinned>,
    /// `None` where the device could not even mark the point.
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

    /// Queue the steps of a round.
    fn queue(&mut self, moves: &Moves, number: usize, [packs, unpacks]: &[Copies; 2]) -> Result<()> {
        let slot = &mut self.slots[number];
        let Some(lent) = &mut slot.lent else { return Ok(()) };
        // SAFETY: rooms and memory of the slot stay as they are until the round is done, and nobody else uses them.
        unsafe {
            self.up.copy_in(&lent.table, &mut slot.table)?;
            self.up.copy_in(&lent.stage, &mut slot.stage)?;
            packs.run(&self.up, &slot.table)?;
        }
        self.wire.wait(&self.up.record()?)?;
        self.peers.queue_exchange(&self.wire, &slot.outgoing, &moves.to, &mut slot.incoming, &moves.from)?;
        self.down.wait(&self.wire.record()?)?;
        for tile in moves.arriving.iter().filter(|tile| tile.has_gaps()) {
            self.down.zero(&mut slot.unpacked, tile.place.clone())?;
        }
        // SAFETY: as above.
        unsafe {
            unpacks.run(&self.down, &slot.table)?;
            self.down.copy_out(&slot.unpacked, &mut lent.unpacked)
        }
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

    fn begin(&mut self, moves: &Moves, stage: Room<Pinned>) -> Result<usize> {
        let number = self.begun % SLOTS;
        assert!(self.slots[number].lent.is_none(), "no more than {SLOTS} rounds are under way");
        self.fit(number, |slot| {
            [
                (&mut slot.stage, moves.stage_len, "what is read"),
                (&mut slot.outgoing, moves.outgoing_len(), "what is sent"),
                (&mut slot.incoming, moves.incoming_len(), "what is received"),
                (&mut slot.unpacked, moves.unpacked_len, "what is unpacked"),
            ]
        })?;
        let slot = &self.slots[number];
        let (copies, bytes) = self.packer.prepare([slot.packs(moves), slot.unpacks(moves)]);
        self.fit(number, |slot| [(&mut slot.table, bytes.len(), "lists of copies")])?;
        let mut table = self.tables.room(bytes.len())?;
        table.copy_from_slice(&bytes);
        let unpacked = self.rooms.room(moves.unpacked_len)?;
        self.slots[number].lent = Some(Lent { stage, table, unpacked, done: None });
        self.begun += 1;

        let queued = self.queue(moves, number, &copies);
        // Streams use the rooms now, also where not all could be queued.
        let done = if queued.is_ok() { self.down.record() } else { self.all_done() };
        let (done, marked) = done.map_or_else(|error| (None, Err(error)), |done| (Some(done), Ok(())));
        if let Some(lent) = &mut self.slots[number].lent {
            lent.done = done;
        }
        queued.and(marked).map(|()| number)
    }

    fn finish(&mut self, _: &Moves, number: usize) -> Result<Room<Pinned>> {
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

    fn packs(&self, moves: &Moves) -> Vec<Nest> {
        let messages = moves.packs.iter().zip(&moves.to);
        let copies = messages.flat_map(|(copies, message)| copies.iter().map(|copy| (copy, message.start)));
        copies.filter_map(|(copy, start)| Nest::new(copy, &self.stage, &self.outgoing, start)).collect()
    }

    fn unpacks(&self, moves: &Moves) -> Vec<Nest> {
        let copies = moves.arriving.iter().flat_map(|tile| tile.copies.iter().map(|copy| (copy, tile.place.start)));
        let nest = |((origin, copy), start): (&(Origin, StridedCopy), usize)| {
            let from = match origin {
                Origin::Stage => &self.stage,
                Origin::Incoming => &self.incoming,
            };
            Nest::new(copy, from, &self.unpacked, start)
        };
        copies.filter_map(nest).collect()
    }
}
