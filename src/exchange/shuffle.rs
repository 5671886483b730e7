//! Shuffle: a round's bytes from where they were read to where they are needed, and values of summands on the way.

use std::sync::Arc;

use rayon::prelude::*;

use super::buffers::{BufferPool, HostMemory, PooledBuffer, pieces};
use super::casts::Casting;
use super::moves::{ByteOrigin, Landing, Moves};
use super::phase::TransferPhase;
use super::reduced::reduce;
use crate::comm::Communicator;
use crate::error::Result;
use crate::exec::cast::LossCounts;
use crate::exec::sized_buffer;

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
    fn rooms(&self) -> Arc<BufferPool<Self::Memory>>;

    /// Where values are cast. Ranks may differ in that.
    fn casting(&self) -> Casting {
        Casting::InStrips
    }

    /// Take the stage of a round, of [`Moves::stage_len`] bytes. Collective: all ranks begin and finish the same rounds in
    /// the same order.
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn begin(&mut self, moves: &Arc<Moves>, stage: PooledBuffer<Self::Memory>) -> Result<Self::Begun>;

    /// Give the values of the first round that was begun and is not finished. What no copy goes to is 0 where something may
    /// be left out ([`Landing::has_gaps`]).
    ///
    /// # Errors
    /// As [`Communicator::exchange`]; `Unsupported` where summands have no value.
    fn finish(&mut self, moves: &Moves, begun: Self::Begun) -> Result<Given<Self::Memory>>;
}

/// What is given of a round.
pub struct Given<M: HostMemory> {
    /// As [`Moves::casts`] lays them out, or else in the first [`Moves::given_len`] bytes.
    pub values: PooledBuffer<M>,
    /// What casts met, by portion, one tile behind the other.
    pub lost: Vec<LossCounts>,
}

/// The shuffle in host memory.
pub struct HostShuffle<'a, C> {
    communicator: &'a C,
    rooms: Arc<BufferPool<Vec<u8>>>,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
}

impl<'a, C> HostShuffle<'a, C> {
    #[must_use]
    pub fn new(communicator: &'a C) -> Self {
        let rooms = BufferPool::new(|len| Ok(vec![0; len]));
        Self { communicator, rooms, outgoing: Vec::new(), incoming: Vec::new() }
    }
}

impl<C: Communicator<Memory = Vec<u8>>> Shuffle for HostShuffle<'_, C> {
    type Memory = Vec<u8>;
    /// Its stage: the host does one thing after the other.
    type Begun = PooledBuffer<Vec<u8>>;

    const UNDER_WAY: usize = 1;

    fn rooms(&self) -> Arc<BufferPool<Vec<u8>>> {
        Arc::clone(&self.rooms)
    }

    fn begin(&mut self, _: &Arc<Moves>, stage: PooledBuffer<Vec<u8>>) -> Result<PooledBuffer<Vec<u8>>> {
        Ok(stage)
    }

    fn finish(&mut self, moves: &Moves, stage: PooledBuffer<Vec<u8>>) -> Result<Given<Vec<u8>>> {
        assert!(moves.folds.is_empty(), "hosts reduce in the order of ranks");
        self.go(&moves.first, &stage)?;
        let mut unpacked = self.rooms.buffer(moves.unpacked_len)?;
        let landings = moves.landings();
        let places = pieces(&mut unpacked, landings.iter().map(|landing| (landing.place.start, landing.place.len())));
        places.into_par_iter().zip(&landings).for_each(|(place, landing)| self.land(landing, &stage, place));
        reduce(moves, &mut unpacked)?;
        if let Some(second) = &moves.second {
            self.go(second, &unpacked)?;
            self.take(moves, &mut unpacked);
        }
        Ok(Given { values: unpacked, lost: Vec::new() })
    }
}

impl<C: Communicator<Memory = Vec<u8>>> HostShuffle<'_, C> {
    /// Pack, and go over the wire.
    fn go(&mut self, hop: &TransferPhase, source: &[u8]) -> Result<()> {
        let told = hop.told.get(self.communicator.rank() as usize).cloned().unwrap_or_default();
        let outgoing = sized_buffer(&mut self.outgoing, hop.outgoing_len());
        let incoming = sized_buffer(&mut self.incoming, hop.incoming_len());
        let mut packed = pieces(outgoing, hop.to.iter().map(|range| (range.start, range.len())));
        packed.push(&mut incoming[told]);
        let copies: Vec<_> = hop.packs.iter().chain([&hop.tells]).collect();
        packed.into_par_iter().zip(copies).for_each(|(message, copies)| {
            copies.iter().for_each(|copy| copy.copy(source, message));
        });
        self.communicator.exchange(&self.outgoing, &hop.to, &mut self.incoming, &hop.from)?;
        if hop.is_told() {
            self.communicator.all_gather(&mut self.incoming, &hop.told)?;
        }
        Ok(())
    }

    /// What the first hop has brought, and what stays.
    fn land(&self, landing: &Landing<'_>, stage: &[u8], place: &mut [u8]) {
        if landing.has_gaps {
            place.fill(0);
        }
        for (origin, copy) in landing.copies {
            let source = match origin {
                ByteOrigin::Stage => stage,
                ByteOrigin::Incoming => &self.incoming,
            };
            copy.copy(source, place);
        }
    }

    /// What the second hop has brought.
    fn take(&self, moves: &Moves, given: &mut [u8]) {
        let places = pieces(given, moves.arriving.iter().map(|tile| (tile.place.start, tile.place.len())));
        places.into_par_iter().zip(&moves.arriving).for_each(|(place, tile)| {
            tile.passed.iter().for_each(|copy| copy.copy(&self.incoming, place));
        });
    }
}
