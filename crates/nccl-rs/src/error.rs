//! The one error. A message says which call it was and what NCCL says of it.

use std::fmt::Write as _;
use std::time::Duration;

use crate::raw::ncclResult_t;

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No library could be opened.
    #[error("NCCL cannot be loaded: {}", tried.join("; "))]
    Load {
        /// For each file that was tried, in that order: its name and why not.
        tried: Vec<String>,
    },

    /// The library lacks a function: it is older than that function, or is no NCCL.
    #[error("{library} has no {symbol}")]
    Missing {
        /// The file, as it was asked for.
        library: String,
        /// The name of the function.
        symbol: &'static str,
    },

    /// NCCL says no. With a non-blocking communicator that may be after the call, while it is waited for.
    #[error("{function}: {text} ({code:?}){}", detail(last.as_deref()))]
    Call {
        /// The function of `nccl.h`.
        function: &'static str,
        /// What it returned.
        code: ncclResult_t,
        /// `ncclGetErrorString` of it.
        text: String,
        /// `ncclGetLastError`, if there is one: the last warning that NCCL logged in this process, mostly the cause.
        last: Option<String>,
    },

    /// What was started is not done within the limit; the communicator is aborted.
    #[error("{function} is not done after {:.1} s; do all ranks take part?", limit.as_secs_f64())]
    Late {
        /// The function of `nccl.h`.
        function: &'static str,
        /// The limit of the [`Wait`](crate::Wait).
        limit: Duration,
    },

    /// The watch of the [`Wait`](crate::Wait) says that waiting is in vain; the communicator is aborted.
    #[error("{function} was given up: {why}")]
    GivenUp {
        /// The function of `nccl.h`.
        function: &'static str,
        /// What the watch says.
        why: String,
    },

    /// An argument that NCCL would take for something else, or wait for in vain. NCCL was not called.
    #[error("{function}: {why}")]
    Argument {
        /// The function of `nccl.h`.
        function: &'static str,
        /// What is wrong with it.
        why: String,
    },

    /// The communicator was aborted by an error before.
    #[error("the communicator was aborted after an error")]
    Aborted,
}

fn detail(last: Option<&str>) -> String {
    let mut text = String::new();
    if let Some(last) = last {
        let _ = write!(text, "; its last warning: {last}");
    }
    text
}
