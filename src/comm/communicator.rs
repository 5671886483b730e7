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
    /// The type of the buffers whose bytes this communicator moves: host memory or device memory.
    type Memory;

    /// Returns the number of this process, counted from 0.
    fn rank(&self) -> u32;

    /// Returns the number of processes.
    fn size(&self) -> u32;

    /// Sends a range of `outgoing` to each other process, and receives a range of `incoming` from each other process:
    /// an all-to-all with different lengths. `to` and `from` have one entry for each process, in the order of the
    /// numbers. The entry for this process itself is empty, and an empty range is not sent. The range that is sent must
    /// be as long as the range in which the receiver expects it.
    ///
    /// # Errors
    /// `Comm` naming the process that has ended, or that has sent another length than expected.
    fn exchange(
        &self,
        outgoing: &Self::Memory,
        to: &[Range<usize>],
        incoming: &mut Self::Memory,
        from: &[Range<usize>],
    ) -> Result<()>;

    /// Copies the bytes of each process to all other processes: an all-gather with different lengths, in place. Process
    /// `n` owns range `n` of `memory`. All processes pass the same list, with one range for each process. The ranges
    /// may be in any order and do not overlap. An empty range is skipped.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`].
    fn all_gather(&self, memory: &mut Self::Memory, ranges: &[Range<usize>]) -> Result<()>;

    /// Returns the number of bytes that this process has sent and received by [`Communicator::exchange`] and
    /// [`Communicator::all_gather`]. An all-gather is counted as a ring, in which each process forwards bytes to the
    /// next process.
    fn traffic(&self) -> Traffic;

    /// Collects one message from every process, including this process, in the order of the process numbers. Meant for
    /// messages of kilobytes, not for tensors.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`].
    fn gather(&self, message: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Waits until every process has called this method.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`].
    fn barrier(&self) -> Result<()> {
        self.gather(&[]).map(drop)
    }

    /// Tells all processes whether every process has succeeded. `mine` is the success of this process, or the reason of
    /// its failure. All processes get the same result. Collective.
    ///
    /// # Errors
    /// `Comm` naming the failed process with the lowest number, with its reason; and the errors of
    /// [`Communicator::exchange`].
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

    /// Returns the value in `mine` if all processes succeeded. Otherwise a process that failed returns its own error,
    /// and each other process returns an error that names a failed process. Collective.
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

    /// Checks that all processes are still present, without waiting. Call it during long local work.
    ///
    /// # Errors
    /// `Comm` naming the process that has ended; `Stopped` if a signal stopped it.
    fn check(&self) -> Result<()>;

    /// Notifies all other processes that this process ends because of `error`. From then on, the operations of the
    /// other processes return an error that names this process, with the message of `error` or the signal that stopped
    /// this process.
    fn fail(&self, error: &Error);

    /// Leaves the run in an orderly way. Dropping a communicator without calling this counts as failure.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`], if the implementation waits for the other processes to leave.
    fn leave(self) -> Result<()>
    where
        Self: Sized;
}

/// The failures of all processes of a run: each process records here why it ends, and reads here whether another
/// process has ended.
pub trait FailureNotes: Send + Sync {
    /// Checks that all processes are still present, without waiting.
    ///
    /// # Errors
    /// `Comm` naming the process that has ended; `Stopped` if a signal stopped it.
    fn check(&self) -> Result<()>;

    /// Notifies all other processes that this process ends because of `error`.
    fn fail(&self, error: &Error);

    /// Leaves the run in an orderly way, after this process has completed its work.
    fn leave(&self);
}
