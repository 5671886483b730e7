//! Which of several processes this one is, and what they say to each other.
//!
//! Each process derives the same plan and does its [`Part`] of the bytes. All that it must be told is which part that is,
//! of how many. Whoever started it has said so in its environment, or on the command line; [`launch()`] finds it.
//!
//! Where processes exchange what they read, a [`Communicator`] moves tensors and words between them: [`Local`] between threads,
//! NCCL between GPUs, MPI between hosts.

mod communicator;
pub mod cpus;
mod environment;
pub(crate) mod error;
mod failure;
pub mod launch;
mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod node;
mod process;
mod ranges;
#[cfg(test)]
pub(crate) mod tests;
mod traffic;
mod wait_notices;

use std::fmt;

pub use communicator::{Communicator, FailureNotes};
pub(crate) use failure::{DROPPED, ENDED, FailureReason, FirstFailure, LEFT, PeerFailure};
pub use launch::{Launch, Launcher, launch};
pub use local::Local;
pub use process::Process;
pub(crate) use ranges::carved;
pub(crate) use traffic::Counter;
pub use traffic::Traffic;
pub use wait_notices::{Wait, WaitNotices, WaitReporter};

/// What one process does of the work of all: part `index` of `of`, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    pub index: u32,
    pub of: u32,
}

impl Part {
    /// All of it.
    #[must_use]
    pub fn alone() -> Self {
        Self { index: 0, of: 1 }
    }

    #[must_use]
    pub fn is_alone(self) -> bool {
        self.of == 1
    }
}

/// `2/4`
impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

/// The environment as a function, so that it can be a map in tests. A variable that is empty counts as not set.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// That of this process.
#[must_use]
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
