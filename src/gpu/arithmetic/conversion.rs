//! Conversions: elements of one buffer, cast into another.

use std::ops::Range;

use nccl::DeviceBuffer;

use super::{Arithmetic, BLOCK_UNITS, address, lane, told};
use crate::error::Result;
use crate::exec::cast::{Cast, LossCounts};
use crate::gpu::memory::DeviceBytes;
use crate::gpu::stream::Stream;
use crate::gpu::table::{Job, Jobs, KernelLaunch};

/// Elements in one buffer that are cast into another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CastJob {
    pub cast: Cast,
    pub numel: u64,
    /// Elements among which those are counted that the cast does not keep.
    pub counted: Range<u64>,
    /// Where they begin, in bytes.
    pub source: usize,
    pub target: usize,
}

/// Those of a table, ready to be done.
#[derive(Debug)]
pub struct CastJobs {
    launch: KernelLaunch,
    lost: Range<usize>,
}

impl Arithmetic {
    /// Conversions from one buffer into another, whose records go behind what the table has.
    ///
    /// # Panics
    /// Where they leave their buffers.
    pub(in crate::gpu) fn conversions(
        &self,
        jobs: &[CastJob],
        from: &impl DeviceBuffer,
        into: &impl DeviceBuffer,
        table: &mut Vec<u8>,
    ) -> CastJobs {
        table.resize(table.len().next_multiple_of(8), 0);
        let mut listed = Jobs::behind(table, BLOCK_UNITS);
        for (nth, job) in jobs.iter().enumerate() {
            listed.push(&job.job(from, into, (jobs.len() * RECORD + nth * LOST) as u64), table);
        }
        let launch = KernelLaunch { kernel: self.cast.clone(), jobs: listed };
        let begin = table.len();
        table.resize(begin + jobs.len() * LOST, 0);
        CastJobs { launch, lost: begin..table.len() }
    }
}

/// Bytes of `struct Conversion`, and of `struct Lost`.
const RECORD: usize = 72;
const LOST: usize = 16;

impl CastJob {
    /// As `struct Conversion` of the kernel.
    fn job(&self, from: &impl DeviceBuffer, into: &impl DeviceBuffer, lost: u64) -> Job<6, 5> {
        let (cast, numel) = (self.cast, self.numel);
        let sizes = [cast.from(), cast.to()].map(crate::catalog::Dtype::itemsize);
        let source = address(from, self.source, numel, sizes[0]);
        let target = address(into, self.target, numel, sizes[1]);
        let each = if sizes.contains(&8) { 2 } else { 4 };
        let [source_lane, target_lane] =
            [(source, sizes[0]), (target, sizes[1])].map(|(at, size)| lane(&[at], each * size));
        Job {
            longs: [source, target, numel, self.counted.start, self.counted.end, lost],
            words: [0, cast.from() as u32, cast.to() as u32, source_lane, target_lane],
            units: numel.div_ceil(each),
        }
    }
}

impl CastJobs {
    /// Do them on a stream.
    ///
    /// # Safety
    /// As [`Launch::run`]; the table is that of which the records are a part.
    pub unsafe fn run(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { self.launch.run(stream, table) }
    }

    /// Where in the table the device tells what was lost, in bytes.
    pub fn lost(&self) -> Range<usize> {
        self.lost.clone()
    }

    /// Of what it told: by job.
    pub fn counts(told_bytes: &[u8]) -> impl Iterator<Item = LossCounts> + '_ {
        told(told_bytes).map(|[overflows, nans]| LossCounts { overflows, nans })
    }
}
