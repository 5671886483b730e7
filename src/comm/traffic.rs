//! Traffic: the number of tensor bytes moved between processes. The bytes are counted during the transfers, so that
//! tests can compare the counts with the plan.
//!
//! All counters are in bytes and do not include headers and small messages. Invariant: when all processes have
//! completed the same operation, the bytes sent by all processes together equal the bytes received by all processes
//! together.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of tensor bytes that a process has sent to other processes, and received from other processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub sent: u64,
    pub received: u64,
}

impl Traffic {
    /// Returns the traffic since the earlier count `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self { sent: self.sent - before.sent, received: self.received - before.received }
    }
}

/// Counts the tensor bytes that a process sends and receives.
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

    /// Counts the bytes that process `rank` moves in an all-gather of `ranges`, of which each process owns one. An
    /// all-gather counts as a ring: this process receives every range that it does not own, and sends to the next
    /// process every range that the next process does not own.
    pub fn round(&self, ranges: &[Range<usize>], rank: u32) {
        let len = |rank: usize| ranges[rank].len() as u64;
        let (rank, all) = (rank as usize, (0..ranges.len()).map(len).sum::<u64>());
        self.received(all - len(rank));
        self.sent(all - len((rank + 1) % ranges.len()));
    }

    /// Counts the bytes that process `rank` of `size` moves in a reduction of `len` bytes. The reduction counts as a
    /// chain of all processes, which ends at process `root`: each process adds its values to the sum and sends the sum
    /// to the next process.
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
