//! Communicator: the processes of one run, and what they say to each other.
//!
//! Two things go between them. Bytes of tensors go by [`Communicator::exchange`] and [`Communicator::all_gather`], from
//! memory to memory of the kind that the implementation moves: the host's or a device's. Few words (what is to be done,
//! whether it went well) go by [`Communicator::gather`], always from host memory.
//!
//! All operations are collective: every process calls the same ones in the same order, and none returns before this
//! process has what it is to receive. Counts bytes. Invariant: where a process fails or goes away, the others get an error
//! that names it, from the operation they are in or from the next one; nobody waits for ever.

use std::ops::Range;

use super::traffic::Traffic;
use crate::error::{Error, Result};

pub trait Communicator: Sync {
    /// Memory whose bytes are moved.
    type Memory;

    /// Which of the processes this one is, from 0.
    fn rank(&self) -> u32;

    /// How many there are.
    fn size(&self) -> u32;

    /// Send a range of `outgoing` to each rank, and receive a range of `incoming` from each: an all-to-all of uneven
    /// lengths. Both lists have an entry a rank. What is sent to a rank is as long as what that expects from this one;
    /// an empty range is not a message. The entries for this rank itself are empty: what stays is not sent.
    ///
    /// # Errors
    /// `Comm` naming the rank that is gone, or has sent another length.
    fn exchange(
        &self,
        outgoing: &Self::Memory,
        to: &[Range<usize>],
        incoming: &mut Self::Memory,
        from: &[Range<usize>],
    ) -> Result<()>;

    /// Give every rank what each has in its range of `memory`: an all-gather of uneven lengths, in place. The ranges are
    /// the same on all ranks, one a rank, in any order, none within another; an empty one is nothing.
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn all_gather(&self, memory: &mut Self::Memory, ranges: &[Range<usize>]) -> Result<()>;

    /// What has gone by [`Communicator::exchange`] and [`Communicator::all_gather`], the latter as it is handed from rank to
    /// rank.
    fn traffic(&self) -> Traffic;

    /// What every rank says, in the order of ranks, its own included. For kilobytes, not for tensors.
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Wait until every rank is here.
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn barrier(&self) -> Result<()> {
        self.gather(&[]).map(drop)
    }

    /// Agree: every rank says that it is well, or why it is not. All get the same answer.
    ///
    /// # Errors
    /// `Comm` naming the first rank against, with what it said; and as [`Communicator::exchange`].
    fn vote(&self, mine: Result<(), &str>) -> Result<()> {
        const OP: &str = "vote";
        // A word against may be empty.
        let said = mine.map_or_else(|against| [b"-", against.as_bytes()].concat(), |()| Vec::new());
        for (rank, said) in (0..).zip(self.gather(&said)?) {
            if let Some((_, against)) = said.split_first() {
                return Err(Error::comm(rank, OP, String::from_utf8_lossy(against)));
            }
        }
        Ok(())
    }

    /// Go on where all are well. Who is not gets its own error, the others one that names it.
    ///
    /// # Errors
    /// `mine`, and as [`Communicator::vote`].
    fn settle<T>(&self, mine: Result<T>) -> Result<T>
    where
        Self: Sized,
    {
        if let Err(error @ Error::Stopped(_)) = &mine {
            // No opinion of this rank.
            self.fail(error);
            return mine;
        }
        let against = mine.as_ref().err().map(ToString::to_string);
        let agreed = self.vote(against.as_deref().map_or(Ok(()), Err));
        let mine = mine?;
        agreed.map(|()| mine)
    }

    /// Whether all ranks are still there, without waiting for anything: to be asked during long work of one's own.
    ///
    /// # Errors
    /// `Comm` naming the one that is gone.
    fn check(&self) -> Result<()>;

    /// Tells all others that this rank ends because of an error. Each operation of theirs, in progress or later, is an error
    /// that names this rank and has the message, or the signal that stopped this rank.
    fn fail(&self, error: &Error);

    /// Go, as one whose work is done: no death. Whoever is dropped without this has failed.
    ///
    /// # Errors
    /// As [`Communicator::exchange`], where this rank stays to look after the others until they leave.
    fn leave(self) -> Result<()>
    where
        Self: Sized;
}

/// Where a process of a run says why it ends, and learns why another process has ended.
pub trait FailureNotes: Send + Sync {
    /// Whether all processes are still there, without waiting for anything.
    ///
    /// # Errors
    /// `Comm` naming the process that is gone.
    fn check(&self) -> Result<()>;

    /// Tells all others that this process ends because of an error.
    fn fail(&self, error: &Error);

    /// Leaves as a process whose work is done.
    fn leave(&self);
}
