//! Bucket size: the limit of an exchange round. In one round, a process reads at most this many bytes of tensor data,
//! sends at most as many, and receives at most as many.
//!
//! `--bucket-size` sets the bucket size. Without that option, it is 64 MB, or less if buffers of this size do not fit
//! into the memory that `--max-memory` leaves after the headers of DST. The length of these headers is known after all
//! processes have laid out DST. Rounds must be equally long on all processes, so all processes use the bucket size of
//! the process with the least memory.
//!
//! All sizes and offsets are in bytes. Invariant: a bucket size that the user chose never changes.

use crate::comm::Communicator;
use crate::convert::options::{Backend, ExchangeOptions, SourceVisibility};
use crate::error::{Error, Result};
use crate::exchange::PLAN_BYTES;

/// Default bucket size in bytes. Larger buckets are not faster on any network or device.
const DEFAULT_BYTES: u64 = 64_000_000;

/// Smallest automatic bucket size in bytes. A smaller bucket would make the exchange slow and save little memory.
pub const LEAST_BYTES: u64 = 1_000_000;

/// Number of buffers that have the bucket size: one send buffer, one receive buffer, and two read buffers and two write
/// buffers, because two rounds are in memory at a time. A write buffer also has space for partial values.
const BUFFERS: u64 = 6;

/// Bucket size of a run: the maximum number of bytes that a process reads, sends and receives in one exchange round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bucket {
    /// The user chose this bucket size, in bytes. It never changes.
    Asked(u64),
    /// An automatic bucket size, in bytes. It may be reduced later, so that the buffers fit into memory.
    AtMost(u64),
}

impl Bucket {
    /// Returns the bucket size that the options ask for, before it is reduced to fit into memory.
    #[must_use]
    pub fn of(args: &ExchangeOptions) -> Self {
        args.bucket_size.map_or(Self::AtMost(DEFAULT_BYTES), Self::Asked)
    }

    /// Returns the bucket size, before SRC is opened. Returns `None` if processes with these options never exchange
    /// tensor data, so that they need no memory for exchange rounds.
    pub fn of_exchange(args: &ExchangeOptions) -> Option<Self> {
        let exchanges = match args.backend {
            Backend::Auto => args.source == SourceVisibility::PerRank,
            Backend::Cpu => false,
            Backend::Nccl | Backend::Mpi => true,
        };
        exchanges.then(|| Self::of(args))
    }

    /// Returns the bucket size in bytes. An automatic size may still be reduced later.
    pub fn bytes(self) -> u64 {
        let (Self::Asked(bytes) | Self::AtMost(bytes)) = self;
        bytes
    }

    /// Returns the memory in bytes that the buffers and plans of the exchange rounds of one process need at most.
    pub fn held_bytes(self) -> u64 {
        self.bytes().saturating_mul(BUFFERS).saturating_add(PLAN_BYTES)
    }

    /// Returns the bucket size, reduced if necessary so that the buffers and plans of the rounds fit into `room` bytes.
    /// The result is never below [`LEAST_BYTES`], even if `room` is too small. A size that the user chose is returned
    /// unchanged.
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

    /// Returns the smallest of the automatic bucket sizes of all processes, so that the exchange rounds of all
    /// processes are equally long. A size that the user chose is returned unchanged. Collective.
    ///
    /// # Errors
    /// The errors of [`Communicator::gather`], and `Comm` for an invalid message.
    pub fn agree(self, communicator: &impl Communicator) -> Result<Self> {
        let Self::AtMost(own) = self else { return Ok(self) };
        let messages = communicator.gather(&own.to_le_bytes())?;
        let sizes = (0..).zip(&messages).map(|(rank, words)| {
            let words = words.as_slice().try_into();
            words.map(u64::from_le_bytes).map_err(|_| Error::comm(rank, "agree", "it did not send a number of bytes"))
        });
        sizes.collect::<Result<Vec<u64>>>().map(|all| Self::AtMost(all.into_iter().fold(own, u64::min)))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::comm::Local;

    #[test]
    fn only_an_automatic_bucket_size_shrinks_with_memory() {
        let open = Bucket::AtMost(DEFAULT_BYTES);
        assert_eq!(open.within(open.held_bytes()), open);
        assert_eq!(open.within(u64::MAX), open);
        let less = open.within(200_000_000);
        assert!(less.bytes() < DEFAULT_BYTES && less.held_bytes() <= 200_000_000, "{less:?}");
        assert_eq!(open.within(0), Bucket::AtMost(LEAST_BYTES));
        assert_eq!(Bucket::Asked(DEFAULT_BYTES).within(0), Bucket::Asked(DEFAULT_BYTES));
    }

    #[test]
    fn processes_agree_on_the_smallest_bucket_size() {
        let ranks = Local::fleet(3).into_iter().zip([5, 3, 4]);
        let ranks: Vec<_> =
            ranks.map(|(local, bytes)| thread::spawn(move || Bucket::AtMost(bytes).agree(&local).unwrap())).collect();
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), Bucket::AtMost(3));
        }
    }
}
