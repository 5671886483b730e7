//! Which of several processes this one is.

use std::fmt;

/// One process's share of the work: `index` counts from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    pub index: u32,
    pub of: u32,
}

impl Part {
    /// All of the work.
    #[must_use]
    pub const fn alone() -> Self {
        Self { index: 0, of: 1 }
    }

    #[must_use]
    pub const fn is_alone(self) -> bool {
        self.of == 1
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}
