//! Communicators connect the processes of one run, move tensors between these processes, and exchange small messages.
//!
//! A [`Communicator`] connects the processes: [`Local`] connects threads, NCCL connects GPUs, and MPI connects hosts.
//! Each process gets its number from [`launch`](crate::launch).

mod communicator;
pub(crate) mod error;
mod failure;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod node;
mod process;
mod ranges;
#[cfg(test)]
pub(crate) mod tests;
mod threads;
mod traffic;
mod wait_notices;

pub use communicator::{Communicator, FailureNotes};
pub(crate) use failure::{DROPPED, ENDED, FirstFailure, LEFT, PeerFailure};
pub use process::Process;
pub(crate) use ranges::carved;
pub use threads::Local;
pub(crate) use traffic::Counter;
pub use traffic::Traffic;
pub use wait_notices::{Wait, WaitNotices, WaitReporter};
