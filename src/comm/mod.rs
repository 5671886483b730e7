//! Processes that work on one checkpoint without talking to each other.
//!
//! Counts processes. Invariant: a part's index is below the number of parts.

use std::fmt;

/// Which part of the work is this process's: part `index`, from 0, of `of`.
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
    pub fn is_alone(&self) -> bool {
        self.of == 1
    }
}

/// `2/4`
impl fmt::Display for Part {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.index, self.of)
    }
}
