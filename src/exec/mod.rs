//! Moving bytes: plans become strips, strips are filled and written in parallel.
//!
//! Knows no format, no command line and no terminal: progress goes to a [`Reporter`], interruption comes from a
//! [`Stop`], where a late-bound chunk lies is asked of an [`Input`]'s resolver.

pub(crate) mod block;
pub(crate) mod block_joiner;
pub mod cast;
pub mod checksums;
pub mod compare;
pub mod copy;
mod difference;
pub mod digest;
pub mod division;
mod extents;
pub mod fingerprint;
mod finished;
mod floats;
pub mod gather;
pub mod global_totals;
pub mod header_bytes;
pub(crate) mod output;
pub mod plan_description;
pub mod reduce;
pub(crate) mod row_groups;
pub(crate) mod runs;
pub mod sidecar_files;
pub(crate) mod source_crc;
mod stop;
pub(crate) mod stopped;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod window;
pub(crate) mod write_blocks;

pub use block_joiner::HELD_BYTES;
pub use extents::Extents;
pub use finished::{CastLosses, FinishedRange, SumPart, WorkLog, add_lost};
pub use gather::{Locations, PreparedTile, Scratch};
pub use output::Outputs;
pub use stop::Stop;
pub use window::sources;

use crate::catalog::{Catalog, StridedLocation, TensorEntry};
use crate::error::Result;
use crate::storage::Files;

/// Where and how a chunk lies, from its table row; reads the file where the row does not tell.
pub type Resolve = dyn Fn(&Files, &TensorEntry, u32) -> Result<StridedLocation> + Sync;

/// A checkpoint to read tensor data from.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    pub files: &'a Files,
    pub catalog: &'a Catalog,
    pub resolve: &'a Resolve,
}

/// A phase of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Bytes move.
    #[default]
    Moving,
    /// Space for files is reserved.
    Allocating,
    /// Written bytes go to the disk.
    Syncing,
}

/// Told about bytes as they are done, from many threads.
pub trait Reporter: Sync {
    fn advance(&self, bytes: u64);

    /// Another phase begins.
    fn phase(&self, _phase: Phase) {}
}

/// Reports to nobody.
#[derive(Debug)]
pub struct Silent;

impl Reporter for Silent {
    fn advance(&self, _bytes: u64) {}
}

/// How to work; the result does not depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub threads: usize,
    /// Size of a strip: the unit of work, of writing and of the memory bound.
    pub strip_bytes: u64,
    /// fsync everything before it is published.
    pub sync: bool,
}

/// A strip that is long enough to hide the cost of a system call and short enough to stay in cache with its source.
pub const DEFAULT_STRIP_BYTES: u64 = 4 << 20;

/// The scratch block for strided reads.
const BLOCK_BYTES: u64 = 2 << 20;

/// The scratch block for elements that are cast: long enough for a good read, short enough to stay in cache.
const CAST_BYTES: u64 = 1 << 20;

/// The scratch block for summands that are reduced: sums are wider than what they are of.
const SUM_BYTES: u64 = 512 << 10;

/// Memory a worker needs besides its strip.
pub const SCRATCH_BYTES: u64 = BLOCK_BYTES + CAST_BYTES + SUM_BYTES;

/// Memory a worker needs to read for rounds of an exchange, besides what it needs to write.
pub const STAGING_BYTES: u64 = BLOCK_BYTES;

/// Memory a thread needs to reduce in rounds, be it a worker or not.
pub const REDUCING_BYTES: u64 = SUM_BYTES;

/// The first bytes of a buffer that is used again and again, for somebody who overwrites them all. It grows to the
/// longest that was asked for and no further, which `Vec::resize` alone does not promise: the memory bound counts on it.
pub(crate) fn room(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.reserve_exact(len - buffer.len());
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}
