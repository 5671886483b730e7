//! Communicator: connects the processes of one run, moves tensor bytes between them, and passes small messages.
//!
//! [`Communicator::exchange`] and [`Communicator::all_gather`] move tensor bytes from memory to memory. The
//! implementation decides whether tensor bytes are in host memory or in device memory. The two methods correspond to
//! `all_to_all_single` with split sizes and to `all_gather` with different sizes in `torch.distributed`.
//! [`Communicator::gather`] passes small messages (the work to do, success or failure), always from host memory.
//!
//! All operations are collective: every process calls the same operations in the same order, and an operation returns
//! when this process has received everything that it expects. All sizes and offsets are in bytes. Invariant: if a
//! process fails or disappears, the current or the next operation of every other process returns an error that names
//! this process; no process waits forever.

use std::ops::Range;

use super::traffic::Traffic;
use crate::error::{Error, Result};

pub trait Communicator: Sync {
    /// The kind of memory whose bytes this communicator moves, for example host memory.
    type Memory;

    /// Returns the rank of this process, counted from 0.
    fn rank(&self) -> u32;

    /// Returns the number of ranks.
    fn size(&self) -> u32;

    /// Sends a range of `outgoing` to each rank, and receives a range of `incoming` from each rank: an all-to-all with
    /// different lengths. Both lists have one entry for each rank. The range sent to a rank must be as long as the
    /// range that the other rank receives. An empty range is not sent. A rank sends nothing to itself, so its own
    /// entries are empty.
    ///
    /// # Errors
    /// `Comm` naming the rank that has ended, or that has sent a different length.
    fn exchange(
        &self,
        outgoing: &Self::Memory,
        to: &[Range<usize>],
        incoming: &mut Self::Memory,
        from: &[Range<usize>],
    ) -> Result<()>;

    /// Copies, for each rank, the range of `memory` that the rank owns to all other ranks. The operation is an
    /// all-gather with different lengths, in place. All ranks pass the same list, which has one range for each rank.
    /// The ranges may be in any order and do not overlap. An empty range is skipped.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`].
    fn all_gather(&self, memory: &mut Self::Memory, ranges: &[Range<usize>]) -> Result<()>;

    /// Returns the number of bytes that [`Communicator::exchange`] and [`Communicator::all_gather`] have moved. An
    /// all-gather counts as a ring, in which each rank forwards the bytes to the next rank.
    fn traffic(&self) -> Traffic;

    /// Collects one message from every rank, including this rank, in rank order. Meant for messages of kilobytes, not
    /// for tensors.
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

    /// Informs all ranks whether every rank has succeeded. Each rank reports success, or the reason of its failure, and
    /// all ranks get the same result. Collective.
    ///
    /// # Errors
    /// `Comm` naming the first rank that failed, with its reason; and the errors of [`Communicator::exchange`].
    fn vote(&self, mine: Result<(), &str>) -> Result<()> {
        const OP: &str = "vote";
        // The reason may be empty, so a prefix marks the failure.
        let message = mine.map_or_else(|against| [b"-", against.as_bytes()].concat(), |()| Vec::new());
        for (rank, reply) in (0..).zip(self.gather(&message)?) {
            if let Some((_, against)) = reply.split_first() {
                return Err(Error::comm(rank, OP, String::from_utf8_lossy(against)));
            }
        }
        Ok(())
    }

    /// Returns the value in `mine` if all ranks succeeded. Otherwise a failed rank returns its own error, and the other
    /// ranks return an error that names the failed rank.
    ///
    /// # Errors
    /// The error in `mine`, and the errors of [`Communicator::vote`].
    fn all_ok<T>(&self, mine: Result<T>) -> Result<T>
    where
        Self: Sized,
    {
        if let Err(error @ Error::Stopped(_)) = &mine {
            // A rank that a signal stopped does not vote, so it notifies the other ranks here.
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
    /// `Comm` naming the rank that has ended.
    fn check(&self) -> Result<()>;

    /// Notifies all other ranks that this rank ends because of an error. From then on, their operations return an error
    /// that names this rank, with the message of `error` or the signal that stopped this rank.
    fn fail(&self, error: &Error);

    /// Leaves the run in an orderly way. Dropping a communicator without calling this counts as failure.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`], if the implementation waits for the other ranks to leave.
    fn leave(self) -> Result<()>
    where
        Self: Sized;
}

/// Access to the failures of all processes of a run: a process records why it ends, and other processes find out about
/// it.
pub trait FailureNotes: Send + Sync {
    /// Checks that all processes are still present, without waiting.
    ///
    /// # Errors
    /// `Comm` naming the process that has ended.
    fn check(&self) -> Result<()>;

    /// Notifies all other processes that this process ends because of an error.
    fn fail(&self, error: &Error);

    /// Leaves the run in an orderly way, after this process has completed its work.
    fn leave(&self);
}
