//! Which of several processes this one is.
//!
//! Processes that convert one checkpoint do not talk: each derives the same plan and does its [`Part`] of the bytes. All
//! that a process must be told is which part that is, of how many. Whoever started it has said so in its environment,
//! or on the command line; [`launch()`] finds it.

mod communicator;
pub mod cpus;
mod environment;
pub mod launch;
#[cfg(test)]
mod tests;

use std::fmt;

pub use communicator::Communicator;
pub use launch::{Launch, Launcher, launch};

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
