//! Runs copies, reductions and casts between two buffers of a device, for tests and measurements. Conversions of
//! checkpoints use the [shuffle](super::shuffle) instead. All sizes and offsets are in bytes. Invariant: a call returns
//! when all its work is done, so that its run time can be measured.

use std::sync::Arc;

use super::arithmetic::{Arithmetic, CastJob, CastJobs, ReductionJob};
use super::copies::LoopNest;
use super::device::{Device, failed};
use super::memory::DeviceBytes;
use super::packer::Packer;
use super::stream::Stream;
use crate::error::Result;
use crate::exchange::StridedCopy;
use crate::exec::cast::LossCounts;
use crate::exec::reduce::ReduceError;

/// A source buffer and a target buffer on a device, for copies, reductions and casts from the source to the target.
pub struct TransferTrial {
    stream: Stream,
    packer: Packer,
    from: DeviceBytes,
    into: DeviceBytes,
    table: DeviceBytes,
}

impl TransferTrial {
    /// Allocates both buffers. The target buffer contains zeros; the source buffer has arbitrary content.
    ///
    /// # Errors
    /// Returns `Device` if there is not enough memory.
    pub fn new(device: &Arc<Device>, packer: Packer, from: usize, into: usize) -> Result<Self> {
        let memory = |len| DeviceBytes::new(device, len, "a trial");
        let (stream, from, mut into, table) = (Stream::new(device)?, memory(from)?, memory(into)?, memory(0)?);
        let len = into.len();
        stream.zero(&mut into, 0..len)?;
        let trial = Self { stream, packer, from, into, table };
        trial.wait_for(Ok(()))?;
        Ok(trial)
    }

    /// Copies bytes from the host to the beginning of the source buffer.
    ///
    /// # Errors
    /// Returns `Device` for errors of the driver.
    ///
    /// # Panics
    /// Panics if the buffer is shorter than `bytes`.
    pub fn upload(&mut self, bytes: &[u8]) -> Result<()> {
        // SAFETY: the call waits for the stream.
        let queued = unsafe { self.stream.copy_in(bytes, &mut self.from) };
        self.wait_for(queued)
    }

    /// Makes all copies, and repeats this `times` times in total. The number beside a copy is added to its target
    /// offset.
    ///
    /// # Errors
    /// Returns `Device` for errors of the driver.
    ///
    /// # Panics
    /// Panics if a copy reads or writes outside the buffers.
    pub fn copy(&mut self, copies: &[(StridedCopy, usize)], times: u32) -> Result<()> {
        let nests =
            copies.iter().filter_map(|(copy, base)| LoopNest::new(copy, &self.from, &self.into, *base)).collect();
        let ([copies], records) = self.packer.prepare([nests]);
        self.table.grow_to(records.len(), "the table of copies")?;
        // SAFETY: the call waits for the stream, and only this trial uses both buffers.
        let queued = unsafe {
            let listed = self.stream.copy_in(&records, &mut self.table);
            listed.and_then(|()| (0..times).try_for_each(|_| copies.run(&self.stream, &self.table)))
        };
        self.wait_for(queued)
    }

    /// Runs all reductions, and repeats this `times` times in total. The inner error contains the index of the first
    /// job that failed.
    ///
    /// # Errors
    /// Returns `Device` for errors of the driver.
    ///
    /// # Panics
    /// Panics if a job reads or writes outside the buffers.
    pub fn reduce(
        &mut self,
        arithmetic: &Arithmetic,
        jobs: &[ReductionJob],
        times: u32,
    ) -> Result<Result<(), (usize, ReduceError)>> {
        let mut records = Vec::new();
        let reductions = arithmetic.reduction_jobs(jobs, &self.from, &self.into, &mut records);
        // SAFETY: the call waits for the stream, and only this trial uses both buffers.
        self.run_with_table(&mut records, times, |stream, table| unsafe { reductions.run(stream, table) })?;
        Ok(reductions.check_outcomes(&records[reductions.outcomes_range()]))
    }

    /// Runs all casts, and repeats this `times` times in total. Returns, for each job, the counts of lost values in all
    /// repetitions together.
    ///
    /// # Errors
    /// Returns `Device` for errors of the driver.
    ///
    /// # Panics
    /// Panics if a job reads or writes outside the buffers.
    pub fn cast(&mut self, arithmetic: &Arithmetic, jobs: &[CastJob], times: u32) -> Result<Vec<LossCounts>> {
        let mut records = Vec::new();
        let conversions = arithmetic.cast_jobs(jobs, &self.from, &self.into, &mut records);
        // SAFETY: the call waits for the stream, and only this trial uses both buffers.
        self.run_with_table(&mut records, times, |stream, table| unsafe { conversions.run(stream, table) })?;
        Ok(CastJobs::read_losses(&records[conversions.losses_range()]).collect())
    }

    /// Uploads a job table, calls `run` `times` times, and downloads the table again.
    fn run_with_table(
        &mut self,
        records: &mut [u8],
        times: u32,
        run: impl Fn(&Stream, &DeviceBytes) -> Result<()>,
    ) -> Result<()> {
        self.table.grow_to(records.len(), "the table of jobs")?;
        // SAFETY: the call waits for the stream.
        let queued = unsafe {
            let listed = self.stream.copy_in(records, &mut self.table);
            let done = listed.and_then(|()| (0..times).try_for_each(|_| run(&self.stream, &self.table)));
            done.and_then(|()| self.stream.copy_out(&self.table, records))
        };
        self.wait_for(queued)
    }

    /// Copies the beginning of the target buffer to the host.
    ///
    /// # Errors
    /// Returns `Device` for errors of the driver.
    ///
    /// # Panics
    /// Panics if the buffer is shorter than `bytes`.
    pub fn fetch(&self, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the call waits for the stream.
        let queued = unsafe { self.stream.copy_out(&self.into, bytes) };
        self.wait_for(queued)
    }

    fn wait_for(&self, queued: Result<()>) -> Result<()> {
        let done = self.stream.cuda().synchronize().map_err(failed("wait for the device"));
        queued.and(done)
    }
}
