//! Casts on a device: converts elements of one buffer to another dtype in another buffer.

use std::ops::Range;

use nccl::DeviceBuffer;

use super::{Arithmetic, BLOCK_UNITS, access_bytes, address, read_records};
use crate::error::Result;
use crate::exec::cast::{Cast, LossCounts};
use crate::gpu::memory::DeviceBytes;
use crate::gpu::stream::Stream;
use crate::gpu::table::{Job, Jobs, KernelLaunch};

/// A cast of consecutive elements of one buffer into another buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CastJob {
    /// The dtypes of the cast.
    pub cast: Cast,
    /// The number of elements.
    pub numel: u64,
    /// The elements whose lost values are counted.
    pub counted: Range<u64>,
    /// The offset of the first element in the source buffer, in bytes.
    pub source: usize,
    /// The offset of the first element in the target buffer, in bytes.
    pub target: usize,
}

/// The casts of a job table, ready to run.
#[derive(Debug)]
pub struct CastJobs {
    launch: KernelLaunch,
    lost: Range<usize>,
}

impl Arithmetic {
    /// Lists casts from one buffer to another, and appends their jobs to the table.
    ///
    /// # Panics
    /// Panics if a cast leaves its buffers.
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

/// The sizes of `struct Conversion` and of `struct Lost` in the kernel.
const RECORD: usize = 72;
const LOST: usize = 16;

impl CastJob {
    /// Returns the job as `struct Conversion` of the kernel.
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
    /// The conditions of [`KernelLaunch::run`] hold, and `table` is the table that the jobs were appended to.
    pub unsafe fn run(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.launch.run(stream, table) }
    }

    /// Returns the range of the table where the device writes the counts of lost values, in bytes.
    pub fn losses_range(&self) -> Range<usize> {
        self.lost.clone()
    }

    /// Reads the counts of lost values of each job.
    pub fn read_losses(bytes: &[u8]) -> impl Iterator<Item = LossCounts> + '_ {
        read_records(bytes).map(|[overflows, nans]| LossCounts { overflows, nans })
    }
}
