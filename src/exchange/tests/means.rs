//! The ways in which processes communicate in tests of the exchange: a trait and its implementation in host memory,
//! which also counts the exchanged bytes.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::comm::{Communicator, Local, Traffic};
use crate::error::{Error, Result};
use crate::exchange::{HostShuffle, Shuffle};

/// A communication method with which processes exchange bytes in a test.
pub(crate) trait Means: Sync {
    /// The state that each process needs for the communication.
    type Seat: Send;
    type Rank: Communicator;

    /// Creates the state of a process. Called in the thread of the process, on all processes at the same time.
    fn seat(&self, rank: Local) -> Self::Seat;

    fn rank(seat: &Self::Seat) -> &Self::Rank;

    fn shuffle(seat: &Self::Seat) -> impl Shuffle;

    /// Returns the number of bytes that the process has sent, and the number that it has received; `None` if they are
    /// not counted.
    fn counted(_: &Self::Seat) -> Option<(u64, u64)> {
        None
    }

    /// Leaves the run after all processes have finished.
    fn leave(seat: Self::Seat);
}

/// Communication in host memory.
pub(super) struct Host;

impl Means for Host {
    type Seat = Counted;
    type Rank = Counted;

    fn seat(&self, rank: Local) -> Counted {
        Counted { rank, sent: AtomicU64::new(0), received: AtomicU64::new(0) }
    }

    fn rank(seat: &Counted) -> &Counted {
        seat
    }

    fn shuffle(seat: &Counted) -> impl Shuffle {
        HostShuffle::new(seat)
    }

    fn counted(seat: &Counted) -> Option<(u64, u64)> {
        Some((seat.sent.load(Ordering::Relaxed), seat.received.load(Ordering::Relaxed)))
    }

    fn leave(seat: Counted) {
        seat.rank.leave().unwrap();
    }
}

/// A process that counts the bytes that it sends and receives. Bytes that are sent to all other processes count once.
pub(crate) struct Counted {
    rank: Local,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counted {
    fn count(&self, sent: &[Range<usize>], received: &[Range<usize>]) {
        let bytes = |ranges: &[Range<usize>]| ranges.iter().map(|range| range.len() as u64).sum();
        self.sent.fetch_add(bytes(sent), Ordering::Relaxed);
        self.received.fetch_add(bytes(received), Ordering::Relaxed);
    }
}

impl Communicator for Counted {
    type Memory = Vec<u8>;

    fn rank(&self) -> u32 {
        self.rank.rank()
    }

    fn size(&self) -> u32 {
        self.rank.size()
    }

    fn exchange(
        &self,
        outgoing: &Vec<u8>,
        to: &[Range<usize>],
        incoming: &mut Vec<u8>,
        from: &[Range<usize>],
    ) -> Result<()> {
        self.count(to, from);
        self.rank.exchange(outgoing, to, incoming, from)
    }

    fn all_gather(&self, memory: &mut Vec<u8>, ranges: &[Range<usize>]) -> Result<()> {
        let (before, own) = ranges.split_at(self.rank.rank() as usize);
        let (own, behind) = own.split_at(1);
        self.count(own, &[before, behind].concat());
        self.rank.all_gather(memory, ranges)
    }

    fn traffic(&self) -> Traffic {
        self.rank.traffic()
    }

    fn gather(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.rank.gather(message)
    }

    fn check(&self) -> Result<()> {
        self.rank.check()
    }

    fn fail(&self, error: &Error) {
        self.rank.fail(error);
    }

    fn leave(self) -> Result<()> {
        self.rank.leave()
    }
}
