//! How long others are waited for, and what is said meanwhile.
//!
//! Who looks at a terminal on which nothing happens does not know what is missing until the deadline, so whom a process
//! waits for is said while it waits: soon for the first time, then seldom.

use std::cell::Cell;
use std::time::{Duration, Instant};

#[derive(Clone, Copy)]
pub struct Patience<'a> {
    pub limit: Duration,
    /// After so long it is said for the first time whom this is about, and again after each `again`.
    pub first: Duration,
    pub again: Duration,
    pub tell: &'a (dyn Fn(Note<'_>) + Sync),
}

/// What is said of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note<'a> {
    Own(&'a str),
    /// Of process 0's, which says it as well, by one that waits there.
    OfFirst(&'a str),
}

impl Patience<'_> {
    /// One that says nothing.
    #[must_use]
    pub fn silent(limit: Duration) -> Self {
        Self { limit, first: limit, again: limit, tell: &|_| {} }
    }
}

/// One wait.
pub struct Wait<'a> {
    patience: Patience<'a>,
    begun: Instant,
    next: Cell<Duration>,
}

impl<'a> Wait<'a> {
    #[must_use]
    pub fn begin(patience: Patience<'a>) -> Self {
        Self { patience, begun: Instant::now(), next: Cell::new(patience.first) }
    }

    pub fn until(&self) -> Instant {
        self.begun + self.patience.limit
    }

    #[must_use]
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.until()
    }

    /// `120 s`
    pub fn limit(&self) -> String {
        format!("{} s", self.patience.limit.as_secs())
    }

    /// Whether it is time to say something.
    pub fn is_due(&self) -> bool {
        let elapsed = self.begun.elapsed();
        let is_due = elapsed >= self.next.get() && elapsed < self.patience.limit;
        if is_due {
            self.next.set(elapsed + self.patience.again);
        }
        is_due
    }

    /// `what` is `waiting for WHOM`; `why` what keeps them, as far as that is known. What was said.
    pub fn say(&self, what: &str, why: Option<&str>) -> String {
        let why = why.map(|why| format!(": {why}")).unwrap_or_default();
        let words = format!("{what} ({} of at most {}){why}", self.begun.elapsed().as_secs(), self.limit());
        (self.patience.tell)(Note::Own(&words));
        words
    }
}
