//! The first failure of a run: which process failed, and why. Every later operation returns this failure.
//!
//! Invariant: the first failure is kept. Later failures are consequences of the first failure (processes end because
//! another process ended) and would hide it.

use std::fmt;
use std::sync::OnceLock;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{CommError, Error, Result, STOPPING, Stopped};

#[derive(Debug, Default)]
pub(crate) struct FirstFailure(OnceLock<PeerFailure>);

/// A process that has ended, and the reason why it ended. Such a value is stored in leases and sent in messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerFailure {
    pub rank: u32,
    pub why: FailureReason,
}

/// The reason why a process has ended. A process that a signal stopped has not failed: all processes stop and may be
/// restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FailureReason {
    /// The process failed. The text is the message of the error that ended it.
    Failed(String),
    /// A signal stopped the process. The number is the index of the signal in [`STOPPING`].
    #[serde(serialize_with = "write_signal", deserialize_with = "read_signal")]
    Stopped(usize),
    /// The process ended without giving a reason. The text is what another process observed, for example `its process
    /// ended`.
    Seen(String),
}

fn write_signal<S: Serializer>(which: &usize, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(STOPPING[*which].0)
}

fn read_signal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let name = String::deserialize(deserializer)?;
    let which = STOPPING.iter().position(|(signal, _)| *signal == name);
    which.ok_or_else(|| D::Error::custom(format!("unknown signal {name}")))
}

impl FailureReason {
    /// Returns this reason, with its text cut to at most `max` bytes.
    #[must_use]
    pub fn cut(mut self, max: usize) -> Self {
        if let Self::Failed(words) | Self::Seen(words) = &mut self {
            words.truncate(words.floor_char_boundary(max));
        }
        self
    }
}

impl fmt::Display for FailureReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(words) => write!(f, "failed: {words}"),
            Self::Stopped(which) => write!(f, "stopped by {}", STOPPING[*which].0),
            Self::Seen(words) => f.write_str(words),
        }
    }
}

impl From<&str> for FailureReason {
    fn from(words: &str) -> Self {
        Self::Seen(words.to_owned())
    }
}

impl From<String> for FailureReason {
    fn from(words: String) -> Self {
        Self::Seen(words)
    }
}

impl PeerFailure {
    /// Returns the failure of process `rank`, which ends with `error`. If `error` says that another process has failed, or that
    /// a signal stopped it, returns the failure of that other process.
    pub fn because_of(error: &Error, rank: u32) -> Self {
        if let Error::Stopped(Stopped { signal, rank: other, .. }) = error
            && let Some(which) = STOPPING.iter().position(|(name, _)| name == signal)
        {
            return Self { rank: other.as_ref().map_or(rank, |other| other.index), why: FailureReason::Stopped(which) };
        }
        if let Error::Comm(CommError { rank: other, detail, .. }) = error
            && other.index != rank
        {
            return Self { rank: other.index, why: FailureReason::Seen(detail.clone()) };
        }
        Self { rank, why: FailureReason::Failed(error.to_string()) }
    }

    pub fn error(&self, op: &'static str) -> Error {
        match &self.why {
            FailureReason::Failed(_) | FailureReason::Seen(_) => Error::comm(self.rank, op, self.why.to_string()),
            FailureReason::Stopped(which) => Stopped::by(*which, Some(self.rank.into())).into(),
        }
    }
}

impl FirstFailure {
    /// Records `gone` as the first failure, unless a failure is already recorded. Returns true if it was recorded now.
    pub fn seal(&self, gone: PeerFailure) -> bool {
        self.0.set(gone).is_ok()
    }

    pub fn gone(&self) -> Option<&PeerFailure> {
        self.0.get()
    }

    /// Returns an error if a failure is recorded. `op` is the operation that the error names.
    ///
    /// # Errors
    /// `Comm` naming the process that failed, or `Stopped` naming the process that a signal stopped.
    pub fn check(&self, op: &'static str) -> Result<()> {
        self.0.get().map_or(Ok(()), |gone| Err(gone.error(op)))
    }
}

/// Reason text for a process that no longer exists.
pub(crate) const ENDED: &str = "its process ended";
/// Reason text for a process that has dropped its communicator without leaving the run and without reporting an error.
pub(crate) const DROPPED: &str = "ended by an error; its own output has the details";
pub(crate) const LEFT: &str = "has left before the others finished";

/// Returns the error for a message from process `rank` with `sent` bytes, where this process expected `expected` bytes.
pub(super) fn other_length(rank: u32, op: &'static str, expected: u64, sent: u64) -> Error {
    Error::comm(rank, op, format!("expected {expected} bytes, received {sent}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stopped(signal: &'static str, rank: Option<u32>) -> Error {
        Error::Stopped(Stopped { signal, exit: 0, rank: rank.map(Into::into), kept: None })
    }

    #[test]
    fn reasons_survive_json() {
        for why in [FailureReason::Failed("no space: a\nb".into()), ENDED.into(), FailureReason::Stopped(1)] {
            let gone = PeerFailure { rank: 3, why };
            let text = serde_json::to_string(&gone).unwrap();
            assert_eq!(serde_json::from_str::<PeerFailure>(&text).unwrap(), gone, "{text}");
        }
        let text = serde_json::to_string(&PeerFailure { rank: 3, why: FailureReason::Stopped(1) }).unwrap();
        assert_eq!(text, r#"{"rank":3,"why":{"stopped":"TERM"}}"#);
        assert!(serde_json::from_str::<PeerFailure>(&text.replace("TERM", "HUP")).is_err());
    }

    #[test]
    fn signal_is_data_and_words_that_look_like_one_are_words() {
        assert_eq!(
            PeerFailure::because_of(&stopped("USR1", None), 2),
            PeerFailure { rank: 2, why: FailureReason::Stopped(2) }
        );
        assert_eq!(
            PeerFailure::because_of(&stopped("TERM", Some(5)), 2),
            PeerFailure { rank: 5, why: FailureReason::Stopped(1) }
        );
        let words = stopped("TERM", None).to_string();
        let gone = PeerFailure::because_of(&Error::usage(words.clone(), ""), 2);
        assert_eq!(gone, PeerFailure { rank: 2, why: FailureReason::Failed(words.clone()) });
        assert_eq!(gone.error("check").to_string(), format!("process 2: check: failed: {words}"));
    }

    /// A process that ends because another process has failed does not take the place of that process in messages.
    #[test]
    fn failure_of_another_process_keeps_its_number() {
        let gone = PeerFailure::because_of(&Error::comm(2, "vote", "no device"), 1);
        assert_eq!(gone, PeerFailure { rank: 2, why: FailureReason::Seen("no device".into()) });
        assert_eq!(gone.error("gather").to_string(), "process 2: gather: no device");
        let own = PeerFailure::because_of(&Error::comm(1, "vote", "no device"), 1);
        assert_eq!(own.rank, 1);
    }

    #[test]
    fn long_reasons_are_cut_between_characters() {
        assert_eq!(FailureReason::Failed("größer".into()).cut(3), FailureReason::Failed("gr".into()));
        assert_eq!(FailureReason::Stopped(0).cut(0), FailureReason::Stopped(0));
    }
}
