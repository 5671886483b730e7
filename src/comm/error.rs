//! Errors caused by another process of the same run.

use std::fmt;

/// Another process of the run has ended, or runs a different operation.
#[derive(Debug, thiserror::Error)]
#[error("{rank}: {op}: {detail}")]
#[non_exhaustive]
pub struct CommError {
    /// The other process.
    pub rank: Peer,
    /// The operation during which this process noticed the error.
    pub op: &'static str,
    /// A description of the error.
    pub detail: String,
    /// The next step for the user.
    pub hint: Option<String>,
}

/// A process of the run, with everything that is known about it: `process 2 of 4 (n1, pid 4711)`, counted from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The number of the process, from 0.
    pub index: u32,
    /// The number of processes.
    pub of: Option<u32>,
    /// The node and the process id: `n1, pid 4711`.
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
