//! What processes that exchange have come to together: each says its own, and all add up the same.
//!
//! Counts bytes. Invariant: a process that says anything else is an error that names it, in all of them.

use crate::comm::Communicator;
use crate::error::{Error, Result};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GlobalTotals {
    /// Bytes that they have received.
    pub received: u64,
    /// Bytes of values that NCCL has reduced.
    pub folded: u64,
}

impl GlobalTotals {
    /// The sum of all, where this is one's own. Collective.
    ///
    /// # Errors
    /// As [`Communicator::gather`]; `Comm` for words that make no sense.
    pub fn add_up(self, communicator: &impl Communicator) -> Result<Self> {
        let said = communicator.gather(&self.to_bytes())?;
        (0..).zip(&said).try_fold(Self::default(), |sum, (rank, words)| {
            let Self { received, folded } =
                Self::of_bytes(words).ok_or_else(|| Error::comm(rank, "add up", "it says no two numbers of bytes"))?;
            Ok(Self { received: sum.received.saturating_add(received), folded: sum.folded.saturating_add(folded) })
        })
    }

    fn to_bytes(self) -> Vec<u8> {
        [self.received, self.folded].map(u64::to_le_bytes).concat()
    }

    fn of_bytes(words: &[u8]) -> Option<Self> {
        let (numbers, []) = words.as_chunks() else { return None };
        let [received, folded] = <[[u8; 8]; 2]>::try_from(numbers).ok()?.map(u64::from_le_bytes);
        Some(Self { received, folded })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::comm::Local;
    use crate::error::CommError;

    #[test]
    fn all_add_up_the_same() {
        let ranks = (1..).zip(Local::fleet(3)).map(|(number, local)| {
            let own = GlobalTotals { received: number, folded: u64::MAX / 2 };
            thread::spawn(move || own.add_up(&local).unwrap())
        });
        for rank in ranks.collect::<Vec<_>>() {
            assert_eq!(rank.join().unwrap(), GlobalTotals { received: 6, folded: u64::MAX });
        }
    }

    /// Left out, it would make less of what all have done.
    #[test]
    fn what_makes_no_sense_is_an_error() {
        for nonsense in [&b""[..], &[0; 8], &[0; 15], &[0; 17], &[0; 24]] {
            let mut fleet = Local::fleet(2).into_iter();
            let (first, second) = (fleet.next().unwrap(), fleet.next().unwrap());
            let other = thread::spawn(move || drop(second.gather(nonsense)));
            let error = GlobalTotals::default().add_up(&first).unwrap_err();
            assert!(matches!(&error, Error::Comm(CommError { op: "add up", .. })), "{error:?}");
            assert!(error.to_string().contains("process 1"), "{error}");
            other.join().unwrap();
        }
    }
}
