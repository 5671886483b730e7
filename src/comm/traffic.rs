//! Traffic: how much of tensors has gone between ranks, counted where it goes, so that a plan can be held against it.
//!
//! Counts bytes, without headers and words. Invariant: when all ranks are behind the same operation, together they have
//! sent as much as they have received.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// What has gone out of a rank's memory to others, and come into it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub sent: u64,
    pub received: u64,
}

impl Traffic {
    /// What has gone since it was so much.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self { sent: self.sent - before.sent, received: self.received - before.received }
    }
}

/// Traffic while it grows.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counter {
    pub fn sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn received(&self, bytes: u64) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// An all-gather of these ranges at this rank: each of the others' comes, and goes on to the next rank unless it is that
    /// one's own.
    pub fn round(&self, ranges: &[Range<usize>], rank: u32) {
        let len = |rank: usize| ranges[rank].len() as u64;
        let (rank, all) = (rank as usize, (0..ranges.len()).map(len).sum::<u64>());
        self.received(all - len(rank));
        self.sent(all - len((rank + 1) % ranges.len()));
    }

    /// A reduction of so many bytes to `root` at one of `size` ranks, each of which hands its sum on to the next one, the last
    /// to the root.
    pub fn fold(&self, root: u32, len: u64, (rank, size): (u32, u32)) {
        if rank != root {
            self.sent(len);
        }
        if rank != (root + 1) % size {
            self.received(len);
        }
    }

    pub fn traffic(&self) -> Traffic {
        Traffic { sent: self.sent.load(Ordering::Relaxed), received: self.received.load(Ordering::Relaxed) }
    }
}
