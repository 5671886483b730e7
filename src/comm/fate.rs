//! Who is gone first, and why: what every later operation answers.
//!
//! Invariant: the first failure stays. Others follow from it, as ranks end because one did, and would hide it.

use std::sync::OnceLock;

use crate::error::{Error, Result, STOPPING};

#[derive(Debug, Default)]
pub(super) struct Fate(OnceLock<Gone>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gone {
    pub rank: u32,
    pub why: Why,
}

/// Whoever is told to stop does not fail: all stop, and may be started again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Failed(String),
    /// By one of [`STOPPING`].
    Stopped(usize),
}

impl Why {
    /// What stops a process, or is wrong with it.
    pub fn of(error: &Error) -> Self {
        let which = |name: &str| STOPPING.iter().position(|(signal, _)| *signal == name);
        match error {
            Error::Stopped { signal, rank: None, .. } => which(signal).map(Self::Stopped),
            _ => None,
        }
        .unwrap_or_else(|| Self::Failed(format!("failed: {error}")))
    }

    pub fn of_stop(which: usize) -> Option<Self> {
        STOPPING.get(which).map(|_| Self::Stopped(which))
    }
}

impl From<&str> for Why {
    fn from(words: &str) -> Self {
        Self::Failed(words.to_owned())
    }
}

impl From<String> for Why {
    fn from(words: String) -> Self {
        Self::Failed(words)
    }
}

impl Gone {
    /// As process 0 has it from this error: who it names, or else process 0 itself.
    pub fn because(error: &Error) -> Self {
        match error {
            Error::Comm { rank, detail, .. } => Self { rank: rank.index, why: Why::Failed(detail.clone()) },
            error => Self { rank: 0, why: Why::of(error) },
        }
    }

    pub fn error(&self, op: &'static str) -> Error {
        match &self.why {
            Why::Failed(words) => Error::comm(self.rank, op, words),
            Why::Stopped(which) => {
                let (signal, exit) = STOPPING[*which];
                Error::Stopped { signal, exit, rank: Some(self.rank.into()), kept: None }
            }
        }
    }
}

impl Fate {
    /// True for the first.
    pub fn seal(&self, gone: Gone) -> bool {
        self.0.set(gone).is_ok()
    }

    pub fn gone(&self) -> Option<&Gone> {
        self.0.get()
    }

    /// # Errors
    /// `Comm` naming who is gone, `Stopped` where a signal stopped it.
    pub fn check(&self, op: &'static str) -> Result<()> {
        self.0.get().map_or(Ok(()), |gone| Err(gone.error(op)))
    }
}

/// What the death of a process looks like from outside.
pub(super) const ENDED: &str = "its process ended";
/// Dropped, by an error or a panic that nobody told the others of.
pub(super) const DROPPED: &str = "ended by an error, which it says itself";
pub(super) const LEFT: &str = "has left, while others are not done";

/// Two ranks that do not agree on how much one sends the other.
pub(super) fn other_length(rank: u32, op: &'static str, expected: u64, sent: u64) -> Error {
    Error::comm(rank, op, format!("expected {expected} bytes, it sent {sent}"))
}
