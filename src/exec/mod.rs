//! Moving bytes: plans become strips, strips are filled and written in parallel.
//!
//! Knows no format, no command line and no terminal: progress goes to a [`Reporter`], interruption comes from a
//! [`Stop`], where a late-bound chunk lies is asked of an [`Input`]'s resolver.

pub mod compare;
pub mod copy;
pub mod gather;
mod output;
mod passing;
pub mod staging;
mod stop;
mod strips;
#[cfg(test)]
mod tests;

pub use gather::{Locations, Prepared};
pub use stop::Stop;

use crate::catalog::{Catalog, Located, TensorEntry};
use crate::error::Result;
use crate::storage::Files;

/// Where and how a chunk lies, from its table row; reads the file where the row does not tell.
pub type Resolve = dyn Fn(&Files, &TensorEntry, u32) -> Result<Located> + Sync;

/// A checkpoint to read tensor data from.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    pub files: &'a Files,
    pub catalog: &'a Catalog,
    pub resolve: &'a Resolve,
}

/// Told about bytes as they are done, from many threads.
pub trait Reporter: Sync {
    fn advance(&self, bytes: u64);
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

/// Memory a worker needs besides its strip: the scratch block for strided reads.
pub const SCRATCH_BYTES: u64 = 2 << 20;

impl Options {
    /// Anonymous memory that the workers' buffers take.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.threads as u64 * (self.strip_bytes + SCRATCH_BYTES)
    }
}
