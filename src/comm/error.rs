//! Errors whose cause is another process of the same run.

use std::fmt;

/// An error whose cause is another process of the run. For example, that process has ended, or it has called an
/// operation that does not match the operation of this process.
#[derive(Debug, thiserror::Error)]
#[error("{rank}: {op}: {detail}")]
#[non_exhaustive]
pub struct CommError {
    /// The process that caused the error.
    pub rank: Peer,
    /// The operation during which this process noticed the error.
    pub op: &'static str,
    /// A description of what went wrong.
    pub detail: String,
    /// An instruction for the user, if there is one.
    pub hint: Option<String>,
}

/// A process of the run, for error messages. `Display` prints, for example, `process 2 of 4 (n1, pid 4711)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The number of the process, counted from 0.
    pub index: u32,
    /// The number of processes in the run; `None` if it is unknown.
    pub of: Option<u32>,
    /// The node and the process id, for example `n1, pid 4711`; `None` if they are unknown.
    pub place: Option<String>,
}

impl From<u32> for Peer {
    fn from(index: u32) -> Self {
        Self { index, of: None, place: None }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.index)?;
        self.of.map_or(Ok(()), |of| write!(f, " of {of}"))?;
        self.place.as_ref().map_or(Ok(()), |place| write!(f, " ({place})"))
    }
}
