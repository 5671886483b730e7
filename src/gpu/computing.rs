//! Computing of a round: its summands become values, and what it gives is cast.
//!
//! Both have their jobs in the round's table, and what they have to tell comes back with that. Counts bytes, and elements
//! where a name says so.

use std::ops::Range;

use super::arithmetic::{Arithmetic, CastJob, CastJobs, ReductionJob, ReductionJobs};
use super::memory::DeviceBytes;
use super::stream::Stream;
use crate::error::Result;
use crate::exchange::{Arriving, Making, Moves};
use crate::exec::cast::LossCounts;

/// What is computed of a round.
#[derive(Debug)]
pub struct Computing {
    reductions: ReductionJobs,
    conversions: CastJobs,
}

impl Computing {
    /// Of values and summands in what is unpacked, and of values that are cast from there to where they are given from.
    /// Its records go behind what the table has.
    pub fn new(
        arithmetic: &Arithmetic,
        moves: &Moves,
        unpacked: &DeviceBytes,
        given: &DeviceBytes,
        table: &mut Vec<u8>,
    ) -> Self {
        let sums: Vec<_> = moves.arriving.iter().filter_map(reduction).collect();
        let casts: Vec<_> = conversions(moves).collect();
        let reductions = arithmetic.reductions(&sums, unpacked, unpacked, table);
        let conversions = arithmetic.conversions(&casts, unpacked, given, table);
        Self { reductions, conversions }
    }

    /// Make values of summands.
    ///
    /// # Safety
    /// As [`Reductions::run`].
    pub unsafe fn reduce(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { self.reductions.run(stream, table) }
    }

    /// Cast values.
    ///
    /// # Safety
    /// As [`Conversions::run`].
    pub unsafe fn cast(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { self.conversions.run(stream, table) }
    }

    /// Bring what the device has to tell to the host's copy of the table.
    ///
    /// # Safety
    /// As [`Stream::copy_out`].
    pub unsafe fn fetch(&self, stream: &Stream, table: &DeviceBytes, host: &mut [u8]) -> Result<()> {
        // SAFETY: promised by the caller.
        let mut fetch = |told: Range<usize>| unsafe { stream.copy_out_of(table, told.start, &mut host[told]) };
        fetch(self.reductions.outcomes())?;
        fetch(self.conversions.lost())
    }

    /// What casts met, by portion, as the host's copy of the table tells.
    ///
    /// # Errors
    /// `Unsupported` where summands have no value.
    pub fn told(&self, moves: &Moves, host: &[u8]) -> Result<Vec<LossCounts>> {
        self.reductions.outcome(&host[self.reductions.outcomes()]).map_err(|(job, fault)| {
            let tile = moves.arriving.iter().filter(|tile| reduction(tile).is_some()).nth(job);
            fault.for_tensor(&tile.expect("one for each job").wanted.fqn)
        })?;
        Ok(CastJobs::counts(&host[self.conversions.lost()]).collect())
    }
}

fn reduction(tile: &Arriving) -> Option<ReductionJob> {
    let Making::Reduced { summands, reducer, .. } = &tile.making else { return None };
    Some(ReductionJob {
        reducer: *reducer,
        parts: u32::try_from(tile.wanted.parts.len()).expect("fewer than 2^32 summands"),
        numel: tile.elements.end - tile.elements.start,
        summands: summands.start,
        target: tile.place.start,
    })
}

/// One a portion, one tile behind the other.
fn conversions(moves: &Moves) -> impl Iterator<Item = CastJob> {
    let laid = moves.casts.iter().flat_map(|casts| moves.arriving.iter().zip(&casts.tiles));
    laid.flat_map(|(tile, laid)| {
        let portions = laid.cast.iter().flat_map(|(cast, portions)| portions.iter().map(|portion| (*cast, portion)));
        portions.map(|(cast, portion)| {
            let (first, end) = (portion.elements.start, portion.elements.end);
            let at = |itemsize: u64| usize::try_from(first * itemsize).expect("a round fits memory");
            CastJob {
                cast,
                numel: end - first,
                counted: portion.counted.start.saturating_sub(first)..portion.counted.end.saturating_sub(first),
                source: tile.place.start + at(cast.from().itemsize()),
                target: laid.place.start + at(cast.to().itemsize()),
            }
        })
    })
}
