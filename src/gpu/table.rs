//! Job tables: lists of jobs in device memory, which kernels read. A launch of a kernel runs consecutive jobs of a
//! table. Each job has consecutive thread blocks, all with the same number of threads. Sizes are in bytes; where the
//! name contains `units`, they count the units of work of the kernel (one step of one thread). Invariant: jobs are in
//! the order of their blocks, so a block finds its job by binary search (`take` in `kernels/blocks.cuh`).

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
use nccl::DeviceBuffer;

use super::device::failed;
use super::memory::DeviceBytes;
use super::stream::Stream;
use crate::error::Result;

/// The number of threads in each thread block.
const THREADS: u32 = 256;

/// A job of a kernel. An entry of the job table has the 64-bit numbers `longs`, then the index of the first thread
/// block of the job, then the 32-bit numbers `words`.
pub(super) struct Job<const LONGS: usize, const WORDS: usize> {
    /// The 64-bit numbers of the job.
    pub longs: [u64; LONGS],
    /// The 32-bit numbers of the job that come after the index of its first thread block.
    pub words: [u32; WORDS],
    /// The amount of work of the job, in units: one unit is the work of one thread in one step.
    pub units: u64,
}

/// A list of consecutive jobs in a job table, for one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Jobs {
    /// The offset in bytes of the first job in the table.
    pub offset: u64,
    /// The number of jobs.
    pub count: u32,
    /// The number of thread blocks of all jobs.
    pub blocks: u32,
    /// The number of units that one thread block processes.
    pub block_units: u32,
}

impl Jobs {
    /// Returns an empty list of jobs that begins at the end of a table.
    pub fn at_end_of(table: &[u8], block_units: u32) -> Self {
        Self { offset: table.len() as u64, count: 0, blocks: 0, block_units }
    }

    /// Appends a job to `table` and to this list.
    pub fn push<const LONGS: usize, const WORDS: usize>(&mut self, job: &Job<LONGS, WORDS>, table: &mut Vec<u8>) {
        table.extend(job.longs.map(u64::to_le_bytes).as_flattened());
        table.extend(self.blocks.to_le_bytes());
        table.extend(job.words.map(u32::to_le_bytes).as_flattened());
        self.count += 1;
        let blocks = u32::try_from(job.units.div_ceil(self.block_units.into())).ok();
        let blocks = blocks.and_then(|blocks| self.blocks.checked_add(blocks));
        self.blocks = blocks.expect("a round of fewer than 2^32 blocks");
    }
}

/// A list of jobs, with the kernel that runs them.
#[derive(Debug)]
pub(super) struct KernelLaunch {
    /// The kernel that runs the jobs.
    pub kernel: CudaFunction,
    /// The list of jobs in the table.
    pub jobs: Jobs,
}

impl KernelLaunch {
    /// Queues the launch of the kernel on a stream.
    ///
    /// # Safety
    /// Until the stream has run the jobs, the table and the jobs' buffers stay allocated. Until then, nothing else
    /// writes the bytes that the jobs read, and nothing else accesses the bytes that the jobs write.
    pub unsafe fn run(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        let Jobs { offset, count, blocks, block_units } = self.jobs;
        if blocks == 0 {
            return Ok(());
        }
        let records = table.address() + offset;
        let shape = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        let mut launch = stream.cuda().launch_builder(&self.kernel);
        launch.arg(&records).arg(&count).arg(&block_units);
        // SAFETY: all kernels take these arguments, and access only the table and the memory to which the table refers.
        unsafe { launch.launch(shape) }.map(drop).map_err(failed("launch a kernel"))
    }
}
