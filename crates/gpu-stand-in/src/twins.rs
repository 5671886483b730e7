//! Kernels in Rust, by the names of those in CUDA that they stand for.
//!
//! A twin does what its kernel is written to do. It tests that the kernel is launched with the arguments it takes, on
//! memory that is there; of the kernel's own text it says nothing.

mod copy_runs;

use crate::memory::{Heap, Illegal};

/// A kernel of the program that is tested.
pub struct Twin {
    /// As in `extern "C" __global__ void NAME(...)`.
    pub name: &'static str,
    /// Bytes of each argument.
    pub arguments: &'static [usize],
    /// Does all blocks at once.
    pub run: fn(&Launch<'_>) -> Result<(), Illegal>,
}

/// One launch of it.
pub struct Launch<'a> {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// The bytes of each argument.
    pub arguments: &'a [Vec<u8>],
    pub(crate) heap: &'a Heap,
}

impl Launch<'_> {
    /// Where a range of device memory is.
    pub fn locate(&self, address: u64, bytes: usize) -> Result<*mut u8, Illegal> {
        self.heap.locate(address, bytes)
    }
}

/// All of them.
pub const TWINS: &[Twin] = &[copy_runs::TWIN];
