//! Communicator: the processes of one run, and what they say to each other.
//!
//! Two things go between them. Bytes of tensors go by [`Communicator::exchange`] and [`Communicator::broadcast`], from
//! memory to memory of the kind that the implementation moves: the host's or a device's. Few words (what is to be done,
//! whether it went well) go by [`Communicator::gather`], always from host memory.
//!
//! All operations are collective: every process calls the same ones in the same order, and none returns before this
//! process has what it is to receive. Counts bytes. Invariant: where a process fails or goes away, the others get an error
//! that names it, from the operation they are in or from the next one; nobody waits for ever.

use std::ops::Range;

use crate::error::Result;

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

    /// Give every rank what `root` has in this range.
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn broadcast(&self, root: u32, memory: &mut Self::Memory, range: Range<usize>) -> Result<()>;

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
}
