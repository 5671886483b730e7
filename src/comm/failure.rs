//! Who is gone first, and why: what every later operation answers.
//!
//! Invariant: the first failure stays. Others follow from it, as ranks end because one did, and would hide it.

use std::sync::OnceLock;

use crate::error::{Error, Result, STOPPING, Stopped};

#[derive(Debug, Default)]
pub(crate) struct FirstFailure(OnceLock<PeerFailure>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerFailure {
    pub rank: u32,
    pub why: FailureReason,
}

/// Whoever is told to stop does not fail: all stop, and may be started again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FailureReason {
    Failed(String),
    /// By one of [`STOPPING`].
    Stopped(usize),
}

impl FailureReason {
    /// The reason of a process that ends with these words, which may be those of [`Error::Stopped`].
    pub fn of_words(words: &str) -> Self {
        let named = words.strip_prefix("stopped by ").and_then(|rest| Self::of_signal(rest.split(';').next()?));
        named.unwrap_or_else(|| Self::Failed(format!("failed: {words}")))
    }

    /// The reason of a process that this signal stops.
    pub fn of_signal(name: &str) -> Option<Self> {
        STOPPING.iter().position(|(signal, _)| *signal == name).map(Self::Stopped)
    }

    /// The name of one of [`STOPPING`].
    pub fn signal(which: usize) -> &'static str {
        STOPPING[which].0
    }
}

impl From<&str> for FailureReason {
    fn from(words: &str) -> Self {
        Self::Failed(words.to_owned())
    }
}

impl From<String> for FailureReason {
    fn from(words: String) -> Self {
        Self::Failed(words)
    }
}

impl PeerFailure {
    pub fn error(&self, op: &'static str) -> Error {
        match &self.why {
            FailureReason::Failed(words) => Error::comm(self.rank, op, words),
            FailureReason::Stopped(which) => Stopped::by(*which, Some(self.rank.into())).into(),
        }
    }
}

impl FirstFailure {
    /// True for the first.
    pub fn seal(&self, gone: PeerFailure) -> bool {
        self.0.set(gone).is_ok()
    }

    pub fn gone(&self) -> Option<&PeerFailure> {
        self.0.get()
    }

    /// # Errors
    /// `Comm` naming who is gone, `Stopped` where a signal stopped it.
    pub fn check(&self, op: &'static str) -> Result<()> {
        self.0.get().map_or(Ok(()), |gone| Err(gone.error(op)))
    }
}

/// What the death of a process looks like from outside.
pub(crate) const ENDED: &str = "its process ended";
/// Dropped, by an error or a panic that nobody told the others of.
pub(crate) const DROPPED: &str = "ended by an error, which it says itself";
pub(crate) const LEFT: &str = "has left, while others are not done";

/// Two ranks that do not agree on how much one sends the other.
pub(super) fn other_length(rank: u32, op: &'static str, expected: u64, sent: u64) -> Error {
    Error::comm(rank, op, format!("expected {expected} bytes, it sent {sent}"))
}
