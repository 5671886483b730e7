//! Shuffle: a round's bytes from where they were read to where they are needed.

use std::sync::Arc;

use rayon::prelude::*;

use super::moves::{Arriving, Moves, Origin};
use super::rooms::{HostMemory, Room, Rooms};
use crate::comm::Communicator;
use crate::error::Result;
use crate::exec::room;

/// Moves what a process has staged, and gives what it gets, round by round.
pub trait Shuffle: Send {
    /// Memory that it takes bytes out of, and puts them into.
    type Memory: HostMemory;
    /// A round that was begun.
    type Begun;

    /// How many rounds are begun before the first of them is finished: with more than one, the next is on its way while
    /// this one is waited for.
    const UNDER_WAY: usize;

    /// Where such memory is had.
    fn rooms(&self) -> Arc<Rooms<Self::Memory>>;

    /// Take the stage of a round, of [`Moves::stage_len`] bytes. Collective: all ranks begin and finish the same rounds in
    /// the same order.
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn begin(&mut self, moves: &Moves, stage: Room<Self::Memory>) -> Result<Self::Begun>;

    /// Give what is unpacked, of [`Moves::unpacked_len`] bytes, of the first round that was begun and is not finished.
    /// What no copy goes to is 0 in tiles that want it to be ([`Arriving::has_gaps`]).
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn finish(&mut self, moves: &Moves, begun: Self::Begun) -> Result<Room<Self::Memory>>;
}

/// The shuffle in host memory.
pub struct HostShuffle<'a, C> {
    communicator: &'a C,
    rooms: Arc<Rooms<Vec<u8>>>,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
}

impl<'a, C> HostShuffle<'a, C> {
    #[must_use]
    pub fn new(communicator: &'a C) -> Self {
        let rooms = Rooms::new(|len| Ok(vec![0; len]));
        Self { communicator, rooms, outgoing: Vec::new(), incoming: Vec::new() }
    }
}

impl<C: Communicator<Memory = Vec<u8>>> Shuffle for HostShuffle<'_, C> {
    type Memory = Vec<u8>;
    /// Its stage: the host does one thing after the other.
    type Begun = Room<Vec<u8>>;

    const UNDER_WAY: usize = 1;

    fn rooms(&self) -> Arc<Rooms<Vec<u8>>> {
        Arc::clone(&self.rooms)
    }

    fn begin(&mut self, _: &Moves, stage: Room<Vec<u8>>) -> Result<Room<Vec<u8>>> {
        Ok(stage)
    }

    fn finish(&mut self, moves: &Moves, stage: Room<Vec<u8>>) -> Result<Room<Vec<u8>>> {
        room(&mut self.outgoing, moves.outgoing_len());
        room(&mut self.incoming, moves.incoming_len());
        let messages = pieces(&mut self.outgoing, moves.to.iter().map(|range| (range.start, range.len())));
        messages.into_par_iter().zip(&moves.packs).for_each(|(message, copies)| {
            copies.iter().for_each(|copy| copy.copy(&stage, message));
        });
        self.communicator.exchange(&self.outgoing, &moves.to, &mut self.incoming, &moves.from)?;
        let mut unpacked = self.rooms.room(moves.unpacked_len)?;
        let places = moves.arriving.iter().map(|tile| (tile.place.start, tile.place.len()));
        pieces(&mut unpacked, places).into_par_iter().zip(&moves.arriving).for_each(|(place, tile)| {
            self.unpack(tile, &stage, place);
        });
        Ok(unpacked)
    }
}

impl<C> HostShuffle<'_, C> {
    fn unpack(&self, tile: &Arriving, stage: &[u8], place: &mut [u8]) {
        if tile.has_gaps() {
            place.fill(0);
        }
        for (origin, copy) in &tile.copies {
            let source = match origin {
                Origin::Stage => stage,
                Origin::Incoming => &self.incoming,
            };
            copy.copy(source, place);
        }
    }
}

/// These ascending places of a buffer, by where they start and how long they are.
pub fn pieces(mut buffer: &mut [u8], places: impl Iterator<Item = (usize, usize)>) -> Vec<&mut [u8]> {
    let mut at = 0;
    let take = |(start, len): (usize, usize)| {
        let (_, rest) = std::mem::take(&mut buffer).split_at_mut(start - at);
        let (piece, rest) = rest.split_at_mut(len);
        buffer = rest;
        at = start + len;
        piece
    };
    places.map(take).collect()
}
