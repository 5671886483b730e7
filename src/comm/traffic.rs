//! Traffic: the number of tensor bytes moved between ranks, counted during transfers, so that tests can compare it with
//! the plan.
//!
//! Counts bytes, without headers and small messages. Invariant: when all ranks have completed the same operation, the
//! bytes sent by all ranks equal the bytes received by all ranks.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes that a rank has sent to other ranks and received from them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub sent: u64,
    pub received: u64,
}

impl Traffic {
    /// Returns the traffic since an earlier count.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self { sent: self.sent - before.sent, received: self.received - before.received }
    }
}

/// A counter of traffic.
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

    /// Counts an all-gather of these ranges at this rank. The ring brings each range of the other ranks here, and this
    /// rank forwards it unless the next rank owns it.
    pub fn round(&self, ranges: &[Range<usize>], rank: u32) {
        let len = |rank: usize| ranges[rank].len() as u64;
        let (rank, all) = (rank as usize, (0..ranges.len()).map(len).sum::<u64>());
        self.received(all - len(rank));
        self.sent(all - len((rank + 1) % ranges.len()));
    }

    /// Counts a reduction of `len` bytes to `root` at one of `size` ranks. Each rank adds its values and forwards the
    /// sum to the next rank, the last one to the root.
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
