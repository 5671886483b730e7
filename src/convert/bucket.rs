//! Buckets: how much of the tensors goes in a round.
//!
//! As much as `--bucket-size` says; where that is not given, as much as `--max-memory` has room for beside what is laid
//! out for DST, which is known when all processes have laid it out, and at most 64 MB. Rounds follow from it, so all
//! processes have the same: that of the one with the least room.
//!
//! Counts bytes. Invariant: a bucket that is asked for stays as it is.

use crate::comm::Communicator;
use crate::convert::options::{Backend, ExchangeOptions, SourceVisibility};
use crate::error::{Error, Result};
use crate::exchange::PLAN_BYTES;

/// Rounds that are long enough for every network and device.
const DEFAULT_BYTES: u64 = 64_000_000;

/// Shorter rounds cost more than their memory is worth.
pub const LEAST_BYTES: u64 = 1_000_000;

/// Buffers of a round: what is read and what is written, summands included, of two rounds each, and what goes over the
/// wire each way.
const BUFFERS: u64 = 6;

/// How long the rounds of a run are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bucket {
    Asked(u64),
    /// It may be less.
    AtMost(u64),
}

impl Bucket {
    #[must_use]
    pub fn of(args: &ExchangeOptions) -> Self {
        args.bucket_size.map_or(Self::AtMost(DEFAULT_BYTES), Self::Asked)
    }

    /// That of rounds which there may be, whatever SRC is.
    #[must_use]
    pub fn wanted(args: &ExchangeOptions) -> Option<Self> {
        let exchanges = match args.backend {
            Backend::Auto => args.source == SourceVisibility::PerRank,
            Backend::Cpu => false,
            Backend::Nccl | Backend::Mpi => true,
        };
        exchanges.then(|| Self::of(args))
    }

    #[must_use]
    pub fn bytes(self) -> u64 {
        let (Self::Asked(bytes) | Self::AtMost(bytes)) = self;
        bytes
    }

    /// Memory that rounds take.
    #[must_use]
    pub fn held_bytes(self) -> u64 {
        self.bytes().saturating_mul(BUFFERS).saturating_add(PLAN_BYTES)
    }

    /// That of rounds for which there is so much memory.
    #[must_use]
    pub fn within(self, room: u64) -> Self {
        match self {
            Self::Asked(_) => self,
            Self::AtMost(most) => {
                let fits = room.saturating_sub(PLAN_BYTES) / BUFFERS;
                Self::AtMost(fits.clamp(LEAST_BYTES.min(most), most))
            }
        }
    }

    /// The one of those that all have which fits everybody. Collective.
    ///
    /// # Errors
    /// As [`Communicator::gather`]; `Comm` for words that make no sense.
    pub fn agree(self, communicator: &impl Communicator) -> Result<Self> {
        let Self::AtMost(own) = self else { return Ok(self) };
        let said = communicator.gather(&own.to_le_bytes())?;
        let heard = (0..).zip(&said).map(|(rank, words)| {
            let words = words.as_slice().try_into();
            words.map(u64::from_le_bytes).map_err(|_| Error::comm(rank, "agree", "it says no number of bytes"))
        });
        heard.collect::<Result<Vec<u64>>>().map(|all| Self::AtMost(all.into_iter().fold(own, u64::min)))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::comm::Local;

    #[test]
    fn only_what_is_not_asked_for_shrinks() {
        let open = Bucket::AtMost(DEFAULT_BYTES);
        assert_eq!(open.within(open.held_bytes()), open);
        assert_eq!(open.within(u64::MAX), open);
        let less = open.within(200_000_000);
        assert!(less.bytes() < DEFAULT_BYTES && less.held_bytes() <= 200_000_000, "{less:?}");
        assert_eq!(open.within(0), Bucket::AtMost(LEAST_BYTES));
        assert_eq!(Bucket::Asked(DEFAULT_BYTES).within(0), Bucket::Asked(DEFAULT_BYTES));
    }

    #[test]
    fn it_fits_everybody() {
        let ranks = Local::fleet(3).into_iter().zip([5, 3, 4]);
        let ranks: Vec<_> =
            ranks.map(|(local, bytes)| thread::spawn(move || Bucket::AtMost(bytes).agree(&local).unwrap())).collect();
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), Bucket::AtMost(3));
        }
    }
}
