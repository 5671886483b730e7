//! Casts on a device: converts elements of one buffer to another dtype and writes them to another buffer.

use std::ops::Range;

use nccl::DeviceBuffer;

use super::{Arithmetic, BLOCK_UNITS, access_bytes, address, read_records};
use crate::error::Result;
use crate::exec::cast::{Cast, LossCounts};
use crate::gpu::memory::DeviceBytes;
use crate::gpu::stream::Stream;
use crate::gpu::table::{Job, Jobs, KernelLaunch};

/// A cast of consecutive elements from one buffer into another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CastJob {
    /// The source dtype and the target dtype.
    pub cast: Cast,
    /// The number of elements to cast.
    pub numel: u64,
    /// The elements for which lost values are counted. Index 0 is the first element of this job.
    pub counted: Range<u64>,
    /// The offset in bytes of the first element in the source buffer.
    pub source: usize,
    /// The offset in bytes of the first element in the target buffer.
    pub target: usize,
}

/// Cast jobs that are stored in a job table and are ready to run.
#[derive(Debug)]
pub struct CastJobs {
    launch: KernelLaunch,
    lost: Range<usize>,
}

impl Arithmetic {
    /// Builds the jobs of casts from buffer `from` to buffer `into`, and appends them to the job table.
    ///
    /// # Panics
    /// Panics if a cast reads or writes outside its buffers.
    pub(in crate::gpu) fn cast_jobs(
        &self,
        jobs: &[CastJob],
        from: &impl DeviceBuffer,
        into: &impl DeviceBuffer,
        table: &mut Vec<u8>,
    ) -> CastJobs {
        table.resize(table.len().next_multiple_of(8), 0);
        let mut list = Jobs::at_end_of(table, BLOCK_UNITS);
        for (index, job) in jobs.iter().enumerate() {
            list.push(&job.job(from, into, (jobs.len() * RECORD + index * LOST) as u64), table);
        }
        let launch = KernelLaunch { kernel: self.cast.clone(), jobs: list };
        let begin = table.len();
        table.resize(begin + jobs.len() * LOST, 0);
        CastJobs { launch, lost: begin..table.len() }
    }
}

/// The size in bytes of the kernel's struct `Conversion`.
const RECORD: usize = 72;
/// The size in bytes of the kernel's struct `Lost`.
const LOST: usize = 16;

impl CastJob {
    /// Returns the entry of this job in the job table: the fields of the kernel's `struct Conversion`. `lost` is the
    /// offset at which the device writes the counts of lost values.
    fn job(&self, from: &impl DeviceBuffer, into: &impl DeviceBuffer, lost: u64) -> Job<6, 5> {
        let (cast, numel) = (self.cast, self.numel);
        let sizes = [cast.from(), cast.to()].map(crate::catalog::Dtype::itemsize);
        let source = address(from, self.source, numel, sizes[0]);
        let target = address(into, self.target, numel, sizes[1]);
        let each = if sizes.contains(&8) { 2 } else { 4 };
        let [source_lane, target_lane] =
            [(source, sizes[0]), (target, sizes[1])].map(|(at, size)| access_bytes(&[at], each * size));
        Job {
            longs: [source, target, numel, self.counted.start, self.counted.end, lost],
            words: [0, cast.from() as u32, cast.to() as u32, source_lane, target_lane],
            units: numel.div_ceil(each),
        }
    }
}

impl CastJobs {
    /// Queues the casts on a stream.
    ///
    /// # Safety
    /// The conditions of [`KernelLaunch::run`] hold, and `table` is the table to which the jobs were appended.
    pub unsafe fn run(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.launch.run(stream, table) }
    }

    /// Returns the byte range of the job table into which the device writes the counts of lost values.
    pub fn losses_range(&self) -> Range<usize> {
        self.lost.clone()
    }

    /// Parses the counts of lost values that the device wrote into the job table: one entry for each job.
    pub fn read_losses(bytes: &[u8]) -> impl Iterator<Item = LossCounts> + '_ {
        read_records(bytes).map(|[overflows, nans]| LossCounts { overflows, nans })
    }
}
