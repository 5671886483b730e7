//! Who is gone first, and why: what every later operation answers.
//!
//! Invariant: the first failure stays. Others follow from it, as ranks end because one did, and would hide it.

use std::sync::OnceLock;

use crate::error::{Error, Result};

#[derive(Debug, Default)]
pub(super) struct Fate(OnceLock<Gone>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gone {
    pub rank: u32,
    pub why: String,
}

impl Fate {
    /// True for the first.
    pub fn seal(&self, gone: Gone) -> bool {
        self.0.set(gone).is_ok()
    }

    /// # Errors
    /// `Comm` naming who is gone.
    pub fn check(&self, op: &'static str) -> Result<()> {
        self.0.get().map_or(Ok(()), |Gone { rank, why }| Err(Error::comm(*rank, op, why)))
    }
}

/// What the death of a process looks like from outside.
pub(super) const ENDED: &str = "its process ended";
/// Dropped, by an error or a panic that nobody told the others of.
pub(super) const DROPPED: &str = "ended before its work was done";
pub(super) const LEFT: &str = "has left, while others are not done";

/// Two ranks that do not agree on how much one sends the other.
pub(super) fn other_length(rank: u32, op: &'static str, expected: u64, sent: u64) -> Error {
    Error::comm(rank, op, format!("expected {expected} bytes, it sent {sent}"))
}
