//! Totals over all processes that exchange data: each process sends its own counters, and all processes compute the
//! same sums.
//!
//! The two counters of a process are in bytes. Invariant: a message that does not consist of two counters is an error in
//! all processes, and the error names the sender.

use crate::comm::Communicator;
use crate::error::{Error, Result};

/// The counters of one process, or the sums over all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GlobalTotals {
    /// The number of bytes received from other processes.
    pub received: u64,
    /// The number of bytes of values that NCCL reduced.
    pub nccl_reduced: u64,
}

impl GlobalTotals {
    /// Returns the sums over all processes. `self` has the counters of this process. All processes must call this
    /// function together.
    ///
    /// # Errors
    /// Errors of [`Communicator::gather`]; `Comm` for a message that is not two counters.
    pub fn sum_over_processes(self, communicator: &impl Communicator) -> Result<Self> {
        let messages = communicator.gather(&self.to_bytes())?;
        (0..).zip(&messages).try_fold(Self::default(), |sum, (rank, message)| {
            let Self { received, nccl_reduced } = Self::from_bytes(message)
                .ok_or_else(|| Error::comm(rank, "sum counters", "expected two 64-bit numbers"))?;
            Ok(Self {
                received: sum.received.saturating_add(received),
                nccl_reduced: sum.nccl_reduced.saturating_add(nccl_reduced),
            })
        })
    }

    fn to_bytes(self) -> Vec<u8> {
        [self.received, self.nccl_reduced].map(u64::to_le_bytes).concat()
    }

    fn from_bytes(message: &[u8]) -> Option<Self> {
        let (numbers, []) = message.as_chunks() else { return None };
        let [received, nccl_reduced] = <[[u8; 8]; 2]>::try_from(numbers).ok()?.map(u64::from_le_bytes);
        Some(Self { received, nccl_reduced })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::comm::Local;
    use crate::error::CommError;

    #[test]
    fn all_processes_compute_the_same_totals() {
        let ranks = (1..).zip(Local::fleet(3)).map(|(number, local)| {
            let own = GlobalTotals { received: number, nccl_reduced: u64::MAX / 2 };
            thread::spawn(move || own.sum_over_processes(&local).unwrap())
        });
        for rank in ranks.collect::<Vec<_>>() {
            assert_eq!(rank.join().unwrap(), GlobalTotals { received: 6, nccl_reduced: u64::MAX });
        }
    }

    /// A message of another length must be an error, because the totals would be too small without it.
    #[test]
    fn message_of_wrong_length_is_an_error() {
        for nonsense in [&b""[..], &[0; 8], &[0; 15], &[0; 17], &[0; 24]] {
            let mut fleet = Local::fleet(2).into_iter();
            let (first, second) = (fleet.next().unwrap(), fleet.next().unwrap());
            let other = thread::spawn(move || drop(second.gather(nonsense)));
            let error = GlobalTotals::default().sum_over_processes(&first).unwrap_err();
            assert!(matches!(&error, Error::Comm(CommError { op: "sum counters", .. })), "{error:?}");
            assert!(error.to_string().contains("process 1"), "{error}");
            other.join().unwrap();
        }
    }
}
