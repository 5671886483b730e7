//! The arithmetic of a round: the device reduces partial values and casts the output. Reduction jobs and cast jobs are
//! in the job table of the round. The results of the jobs (errors, and counts of lost values) are copied back to the
//! host. Sizes and offsets are in bytes.

use std::ops::Range;

use super::arithmetic::{Arithmetic, CastJob, CastJobs, ReductionJob, ReductionJobs};
use super::memory::DeviceBytes;
use super::stream::Stream;
use crate::error::Result;
use crate::exchange::{ArrivingTile, Moves, ValueSource};
use crate::exec::cast::LossCounts;

/// The reduction jobs and the cast jobs of a round.
#[derive(Debug)]
pub struct ComputeJobs {
    reductions: ReductionJobs,
    casts: CastJobs,
}

impl ComputeJobs {
    /// Builds two lists of jobs, and appends them to `table`, the job table of the round: jobs that reduce partial
    /// values inside the unpacked buffer, and jobs that cast values from the unpacked buffer to the output.
    pub fn new(
        arithmetic: &Arithmetic,
        moves: &Moves,
        unpacked: &DeviceBytes,
        output: &DeviceBytes,
        table: &mut Vec<u8>,
    ) -> Self {
        let sums: Vec<_> = moves.arriving_tiles.iter().filter_map(reduction_job).collect();
        let casts: Vec<_> = cast_jobs(moves).collect();
        let reductions = arithmetic.reduction_jobs(&sums, unpacked, unpacked, table);
        let conversions = arithmetic.cast_jobs(&casts, unpacked, output, table);
        Self { reductions, casts: conversions }
    }

    /// Queues the reductions of the round on a stream.
    ///
    /// # Safety
    /// The conditions of [`ReductionJobs::run`] hold.
    pub unsafe fn reduce(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.reductions.run(stream, table) }
    }

    /// Queues the casts of the round on a stream.
    ///
    /// # Safety
    /// The conditions of [`CastJobs::run`] hold.
    pub unsafe fn cast(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.casts.run(stream, table) }
    }

    /// Queues a copy that brings the results of the jobs from the device to the host's copy of the job table.
    ///
    /// # Safety
    /// The conditions of [`Stream::copy_out`] hold.
    pub unsafe fn fetch(&self, stream: &Stream, table: &DeviceBytes, host: &mut [u8]) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        let mut fetch = |range: Range<usize>| unsafe { stream.copy_out_from(table, range.start, &mut host[range]) };
        fetch(self.reductions.outcomes_range())?;
        fetch(self.casts.losses_range())
    }

    /// Returns the counts of values that casts lost, with one entry for each cast job. The results of the jobs must
    /// already be in `host`, the host's copy of the job table.
    ///
    /// # Errors
    /// Returns `Unsupported` if the dtype of a tensor cannot represent a reduced value.
    pub fn cast_losses(&self, moves: &Moves, host: &[u8]) -> Result<Vec<LossCounts>> {
        self.reductions.check_outcomes(&host[self.reductions.outcomes_range()]).map_err(|(job, error)| {
            let tile = moves.arriving_tiles.iter().filter(|tile| reduction_job(tile).is_some()).nth(job);
            error.for_tensor(&tile.expect("one tile for each job").needed.fqn)
        })?;
        Ok(CastJobs::read_losses(&host[self.casts.losses_range()]).collect())
    }
}

fn reduction_job(tile: &ArrivingTile) -> Option<ReductionJob> {
    let ValueSource::Reduced { partial_range, reducer, .. } = &tile.value_source else { return None };
    Some(ReductionJob {
        reducer: *reducer,
        partial_count: u32::try_from(tile.needed.sources.len()).expect("fewer than 2^32 partial values"),
        numel: tile.elements.end - tile.elements.start,
        partial_values: partial_range.start,
        target: tile.value_range.start,
    })
}

/// Returns the cast jobs of a round. A tile that is cast has one job for each of its portions; lost values are counted
/// in at most one range of a portion.
fn cast_jobs(moves: &Moves) -> impl Iterator<Item = CastJob> {
    let cast_tile = moves.casts.iter().flat_map(|casts| moves.arriving_tiles.iter().zip(&casts.tiles));
    cast_tile.flat_map(|(tile, cast_tile)| {
        let portions =
            cast_tile.cast.iter().flat_map(|(cast, portions)| portions.iter().map(|portion| (*cast, portion)));
        portions.map(|(cast, portion)| {
            let (first, end) = (portion.elements.start, portion.elements.end);
            let at = |itemsize: u64| usize::try_from(first * itemsize).expect("a round fits memory");
            CastJob {
                cast,
                numel: end - first,
                counted: portion.counted.start.saturating_sub(first)..portion.counted.end.saturating_sub(first),
                source: tile.value_range.start + at(cast.from().itemsize()),
                target: cast_tile.range.start + at(cast.to().itemsize()),
            }
        })
    })
}
