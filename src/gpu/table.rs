//! Tables: lists of jobs in the memory of a device, as kernels read them. A launch does some of a table: each job has a row
//! of blocks, and all have as many threads.
//!
//! Counts bytes, units of a kernel where a name says so. Invariant: jobs stand in the order of their blocks, by which a
//! block finds its own (`take` in `kernels/blocks.cuh`).

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
use nccl::DeviceBuffer;

use super::device::failed;
use super::memory::DeviceBytes;
use super::stream::Stream;
use crate::error::Result;

const THREADS: u32 = 256;

/// A job: numbers of 64 bits, then its first block and others of 32.
pub(super) struct Job<const LONGS: usize, const WORDS: usize> {
    pub longs: [u64; LONGS],
    pub words: [u32; WORDS],
    /// What there is to be done.
    pub units: u64,
}

/// Jobs of a table that stand behind each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Jobs {
    /// Where in the table the first of them is.
    pub offset: u64,
    pub count: u32,
    pub blocks: u32,
    /// What a block does.
    pub block_units: u32,
}

impl Jobs {
    /// None yet, behind what the table has.
    pub fn behind(table: &[u8], block_units: u32) -> Self {
        Self { offset: table.len() as u64, count: 0, blocks: 0, block_units }
    }

    /// One more, at the end of the table.
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

/// Jobs, and the kernel that does them.
#[derive(Debug)]
pub(super) struct KernelLaunch {
    pub kernel: CudaFunction,
    pub jobs: Jobs,
}

impl KernelLaunch {
    /// Do them on a stream.
    ///
    /// # Safety
    /// Until the stream has done it, the table and what its jobs use stay where they are, and nothing else writes what
    /// they read or uses what they write.
    pub unsafe fn run(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        let Jobs { offset, count, blocks, block_units } = self.jobs;
        if blocks == 0 {
            return Ok(());
        }
        let records = table.address() + offset;
        let shape = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        let mut launch = stream.cuda().launch_builder(&self.kernel);
        launch.arg(&records).arg(&count).arg(&block_units);
        // SAFETY: these are the arguments of all kernels; of memory they use what the table says.
        unsafe { launch.launch(shape) }.map(drop).map_err(failed("launch a kernel"))
    }
}
