//! Trial: copies, reductions and casts between two buffers of a device, by themselves. That is what checks and figures of a
//! device are made of; conversions of checkpoints have the [shuffle](super::shuffle).
//!
//! Counts bytes. Invariant: whatever is begun is done when a call returns, so a clock around it has all of it.

use std::sync::Arc;

use super::arithmetic::{Arithmetic, CastJob, CastJobs, ReductionJob};
use super::copies::Nest;
use super::device::{Device, failed};
use super::memory::DeviceBytes;
use super::packer::Packer;
use super::stream::Stream;
use crate::error::Result;
use crate::exchange::StridedCopy;
use crate::exec::cast::LossCounts;
use crate::exec::reduce::ReduceError;

/// Two buffers of a device, and what brings bytes from the one to the other.
pub struct TransferTrial {
    stream: Stream,
    packer: Packer,
    from: DeviceBytes,
    into: DeviceBytes,
    table: DeviceBytes,
}

impl TransferTrial {
    /// With zeros to copy into, and anything to copy from.
    ///
    /// # Errors
    /// `Device` where there is not so much memory.
    pub fn new(device: &Arc<Device>, packer: Packer, from: usize, into: usize) -> Result<Self> {
        let memory = |len| DeviceBytes::new(device, len, "a trial");
        let (stream, from, mut into, table) = (Stream::new(device)?, memory(from)?, memory(into)?, memory(0)?);
        let len = into.len();
        stream.zero(&mut into, 0..len)?;
        let trial = Self { stream, packer, from, into, table };
        trial.waited(Ok(()))?;
        Ok(trial)
    }

    /// Bring the beginning of what is copied from.
    ///
    /// # Errors
    /// `Device` from the driver.
    ///
    /// # Panics
    /// Where there is no room for so many.
    pub fn bring(&mut self, bytes: &[u8]) -> Result<()> {
        // SAFETY: it is waited for.
        let queued = unsafe { self.stream.copy_in(bytes, &mut self.from) };
        self.waited(queued)
    }

    /// Do all of some copies, each with a place that its target is counted from, so many times.
    ///
    /// # Errors
    /// `Device` from the driver.
    ///
    /// # Panics
    /// Where one of them leaves the buffers.
    pub fn copy(&mut self, copies: &[(StridedCopy, usize)], times: u32) -> Result<()> {
        let nests = copies.iter().filter_map(|(copy, base)| Nest::new(copy, &self.from, &self.into, *base)).collect();
        let ([copies], records) = self.packer.prepare([nests]);
        self.table.at_least(records.len(), "lists of copies")?;
        // SAFETY: it is waited for, and both buffers are this trial's alone.
        let queued = unsafe {
            let listed = self.stream.copy_in(&records, &mut self.table);
            listed.and_then(|()| (0..times).try_for_each(|_| copies.run(&self.stream, &self.table)))
        };
        self.waited(queued)
    }

    /// Do all of some reductions, so many times; the first that failed, by its number.
    ///
    /// # Errors
    /// `Device` from the driver.
    ///
    /// # Panics
    /// Where one of them leaves the buffers.
    pub fn reduce(
        &mut self,
        arithmetic: &Arithmetic,
        jobs: &[ReductionJob],
        times: u32,
    ) -> Result<Result<(), (usize, ReduceError)>> {
        let mut records = Vec::new();
        let reductions = arithmetic.reductions(jobs, &self.from, &self.into, &mut records);
        // SAFETY: it is waited for, and both buffers are this trial's alone.
        self.tabled(&mut records, times, |stream, table| unsafe { reductions.run(stream, table) })?;
        Ok(reductions.outcome(&records[reductions.outcomes()]))
    }

    /// Do all of some conversions, so many times; what each of them lost in all of these.
    ///
    /// # Errors
    /// `Device` from the driver.
    ///
    /// # Panics
    /// Where one of them leaves the buffers.
    pub fn convert(&mut self, arithmetic: &Arithmetic, jobs: &[CastJob], times: u32) -> Result<Vec<LossCounts>> {
        let mut records = Vec::new();
        let conversions = arithmetic.conversions(jobs, &self.from, &self.into, &mut records);
        // SAFETY: it is waited for, and both buffers are this trial's alone.
        self.tabled(&mut records, times, |stream, table| unsafe { conversions.run(stream, table) })?;
        Ok(CastJobs::counts(&records[conversions.lost()]).collect())
    }

    /// Run what has a table, so many times, and fetch the table.
    fn tabled(
        &mut self,
        records: &mut [u8],
        times: u32,
        run: impl Fn(&Stream, &DeviceBytes) -> Result<()>,
    ) -> Result<()> {
        self.table.at_least(records.len(), "lists of jobs")?;
        // SAFETY: it is waited for.
        let queued = unsafe {
            let listed = self.stream.copy_in(records, &mut self.table);
            let done = listed.and_then(|()| (0..times).try_for_each(|_| run(&self.stream, &self.table)));
            done.and_then(|()| self.stream.copy_out(&self.table, records))
        };
        self.waited(queued)
    }

    /// Fetch the beginning of what was copied into.
    ///
    /// # Errors
    /// `Device` from the driver.
    ///
    /// # Panics
    /// Where it is shorter.
    pub fn fetch(&self, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: it is waited for.
        let queued = unsafe { self.stream.copy_out(&self.into, bytes) };
        self.waited(queued)
    }

    fn waited(&self, queued: Result<()>) -> Result<()> {
        let done = self.stream.cuda().synchronize().map_err(failed("wait for the device"));
        queued.and(done)
    }
}
