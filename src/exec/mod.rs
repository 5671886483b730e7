//! Copies tensor data: turns plans into write blocks, which worker threads fill and write in parallel.
//!
//! [`copy`](copy::copy) is the main loop. It plans one [`window`] of tensors after another and cuts their output into
//! write blocks ([`cut_blocks`]). A worker reads the bytes of a block ([`gather`], then [`runs`]) and writes the block
//! ([`output`]).
//!
//! This module knows no format, no command line and no terminal. It reports progress to a [`Reporter`], a [`Stop`]
//! interrupts it, and [`Input::resolve`] finds chunks whose location is not in the tables yet. All sizes and offsets
//! are in bytes.

pub(crate) mod block_joiner;
pub mod cast;
pub mod checksums;
pub mod compare;
pub mod compare_headers;
pub(crate) mod computed;
pub mod copy;
pub(crate) mod cut_blocks;
mod difference;
pub mod digest;
pub mod division;
mod extents;
pub mod fingerprint;
mod finished_ranges;
mod floats;
pub mod gather;
pub mod global_totals;
pub(crate) mod output;
pub mod plan_description;
pub mod reduce;
pub(crate) mod row_groups;
pub(crate) mod runs;
pub mod sidecar_files;
pub(crate) mod source_block;
pub(crate) mod source_crc;
mod squares;
mod stop;
pub(crate) mod stopped;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod window;

pub use block_joiner::BLOCK_JOINER_BYTES;
pub use extents::Extents;
pub use finished_ranges::{CastLosses, ChecksumPart, FinishedRange, WorkLog, add_cast_losses};
pub use gather::{Locations, PreparedTile, Scratch};
pub use output::Outputs;
pub use stop::Stop;
pub use window::source_tensors;

use crate::catalog::{Catalog, StridedLocation, TensorEntry};
use crate::error::Result;
use crate::storage::Files;

/// A function that locates a chunk: it returns the file, offset and strides for a row of the chunk table. If the row
/// does not contain these values, the function reads them from the file.
pub type Resolve = dyn Fn(&Files, &TensorEntry, u32) -> Result<StridedLocation> + Sync;

/// A checkpoint from which tensor data is read.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// The source files.
    pub files: &'a Files,
    /// The tensors of the checkpoint and their chunks.
    pub catalog: &'a Catalog,
    /// The function that locates a chunk.
    pub resolve: &'a Resolve,
}

/// A phase of a run, which the progress display shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// The run copies tensor data.
    #[default]
    Copying,
    /// The run reserves disk space for the output files.
    Allocating,
    /// The run syncs written bytes to disk.
    Syncing,
}

/// A receiver of progress from many threads.
pub trait Reporter: Sync {
    /// Reports that `bytes` more bytes are done.
    fn advance(&self, bytes: u64);

    /// Reports that another phase begins.
    fn phase(&self, _phase: Phase) {}
}

/// A reporter that ignores all progress.
#[derive(Debug)]
pub struct Silent;

impl Reporter for Silent {
    fn advance(&self, _bytes: u64) {}
}

/// The settings of a copy. The output does not depend on these settings.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The number of worker threads.
    pub threads: usize,
    /// The maximum size of a write block in bytes. A worker fills and writes one write block at a time.
    pub write_block_bytes: u64,
    /// The maximum size in bytes of a write block of a transposed view. It is not below `write_block_bytes`.
    pub transposed_block_bytes: u64,
    /// True if all files are synced to disk (fsync) before they are published.
    pub sync: bool,
}

/// The default for the maximum size of a write block in bytes: long enough to hide the cost of a system call, short
/// enough to stay in cache with its source.
pub const DEFAULT_WRITE_BLOCK_BYTES: u64 = 4 << 20;

/// The maximum size in bytes of a write block of a transposed view. A block has complete rows, and needs a part of each row of the
/// source: the longer the block, the longer these parts, and the fewer read calls.
pub const TRANSPOSED_BLOCK_BYTES: u64 = 16 << 20;

/// The maximum size in bytes of a worker's buffer for strided reads.
const BLOCK_BYTES: u64 = 2 << 20;

/// The maximum size in bytes of the scratch buffer for elements that are cast: long enough for a good read, short
/// enough to stay in cache.
const CAST_BYTES: u64 = 1 << 20;

/// The maximum size in bytes of the scratch buffer for sums of partial values. The elements of the sums are wider than
/// the elements of the partial values.
const SUM_BYTES: u64 = 512 << 10;

/// The memory in bytes that a worker needs in addition to its write block.
pub const SCRATCH_BYTES: u64 = BLOCK_BYTES + CAST_BYTES + SUM_BYTES;

/// The memory in bytes that a worker needs, in addition to its memory for writing, to read source data one exchange
/// round ahead.
pub const STAGING_BYTES: u64 = BLOCK_BYTES;

/// The memory in bytes that any thread needs to reduce partial values in rounds of an exchange.
pub const REDUCING_BYTES: u64 = SUM_BYTES;

/// Returns the first `len` bytes of a reused buffer, all of which the caller overwrites. The buffer grows to the
/// largest `len` that was requested and no further, because the memory limit is computed from this size. `Vec::resize`
/// alone may allocate more.
pub(crate) fn sized_buffer(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.reserve_exact(len - buffer.len());
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}
