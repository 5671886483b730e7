//! Communicator: connects the processes of one run, moves tensor bytes between them and passes small messages.
//!
//! [`Communicator::exchange`] and [`Communicator::all_gather`] move tensor bytes from memory to memory: host memory or
//! device memory, depending on the implementation. They correspond to `all_to_all_single` with split sizes and an
//! uneven `all_gather` in `torch.distributed`. [`Communicator::gather`] passes small messages (the work to do,
//! success or failure), always from host memory.
//!
//! All operations are collective: every process calls the same operations in the same order, and an operation returns
//! only when this process has received everything that it expects. Counts bytes. Invariant: if a process fails or
//! disappears, the current or the next operation of every other process returns an error that names it; no process
//! waits forever.

use std::ops::Range;

use super::traffic::Traffic;
use crate::error::{Error, Result};

pub trait Communicator: Sync {
    /// The memory whose bytes this communicator moves.
    type Memory;

    /// Returns the rank of this process, counted from 0.
    fn rank(&self) -> u32;

    /// Returns the number of ranks.
    fn size(&self) -> u32;

    /// Sends a range of `outgoing` to each rank and receives a range of `incoming` from each rank: an all-to-all of
    /// uneven lengths. Both lists have one entry for each rank. The range sent to a rank must be as long as the range
    /// that this rank receives; an empty range is not sent. The entries of this rank itself are empty: a rank sends
    /// nothing to itself.
    ///
    /// # Errors
    /// `Comm` naming the rank that is gone, or that has sent another length.
    fn exchange(
        &self,
        outgoing: &Self::Memory,
        to: &[Range<usize>],
        incoming: &mut Self::Memory,
        from: &[Range<usize>],
    ) -> Result<()>;

    /// Copies the range of `memory` that each rank owns to all other ranks: an all-gather of uneven lengths, in place.
    /// All ranks pass the same ranges, one for each rank, in any order, and ranges do not overlap; an empty range is
    /// skipped.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`].
    fn all_gather(&self, memory: &mut Self::Memory, ranges: &[Range<usize>]) -> Result<()>;

    /// Returns the bytes moved by [`Communicator::exchange`] and [`Communicator::all_gather`]. All-gathers are counted
    /// as a ring, in which each rank forwards to the next rank.
    fn traffic(&self) -> Traffic;

    /// Collects one message from every rank, this rank included, in rank order. Meant for kilobytes, not for tensors.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`].
    fn gather(&self, message: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Waits until every rank has called this method.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`].
    fn barrier(&self) -> Result<()> {
        self.gather(&[]).map(drop)
    }

    /// Votes: every rank reports success or the reason of its failure. All ranks get the same result.
    ///
    /// # Errors
    /// `Comm` naming the first rank that failed, with its reason; and as [`Communicator::exchange`].
    fn vote(&self, mine: Result<(), &str>) -> Result<()> {
        const OP: &str = "vote";
        // The reason may be empty, so a prefix marks a failure.
        let message = mine.map_or_else(|against| [b"-", against.as_bytes()].concat(), |()| Vec::new());
        for (rank, reply) in (0..).zip(self.gather(&message)?) {
            if let Some((_, against)) = reply.split_first() {
                return Err(Error::comm(rank, OP, String::from_utf8_lossy(against)));
            }
        }
        Ok(())
    }

    /// Continues if all ranks succeeded. A rank that failed returns its own error; the others return an error that
    /// names it.
    ///
    /// # Errors
    /// `mine`, and as [`Communicator::vote`].
    fn all_ok<T>(&self, mine: Result<T>) -> Result<T>
    where
        Self: Sized,
    {
        if let Err(error @ Error::Stopped(_)) = &mine {
            // This rank stops without voting.
            self.fail(error);
            return mine;
        }
        let against = mine.as_ref().err().map(ToString::to_string);
        let agreed = self.vote(against.as_deref().map_or(Ok(()), Err));
        let mine = mine?;
        agreed.map(|()| mine)
    }

    /// Checks that all ranks are still present, without waiting. Call it during long local work.
    ///
    /// # Errors
    /// `Comm` naming the rank that is gone.
    fn check(&self) -> Result<()>;

    /// Notifies all other ranks that this rank ends because of an error. Their current and later operations return an
    /// error that names this rank, with this message or the signal that stopped this rank.
    fn fail(&self, error: &Error);

    /// Leaves the run in an orderly way. Dropping a communicator without calling this counts as failure.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`], in implementations whose rank waits for the others to leave.
    fn leave(self) -> Result<()>
    where
        Self: Sized;
}

/// Records why a process ends, and reports why another process has ended.
pub trait FailureNotes: Send + Sync {
    /// Checks that all processes are still present, without waiting.
    ///
    /// # Errors
    /// `Comm` naming the process that is gone.
    fn check(&self) -> Result<()>;

    /// Notifies all other processes that this process ends because of an error.
    fn fail(&self, error: &Error);

    /// Leaves the run after the work of this process is complete.
    fn leave(&self);
}
