//! The error type. A message names the NCCL function, and contains NCCL's text for the error.

use std::fmt::Write as _;
use std::time::Duration;

use crate::raw::ncclResult_t;

/// The result type of the functions in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of NCCL, or an error of loading NCCL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// None of the library files could be loaded.
    #[error("NCCL cannot be loaded: {}", tried.join("; "))]
    Load {
        /// The files that were tried, in this order: the name of each file, and why it could not be loaded.
        tried: Vec<String>,
    },

    /// The loaded library does not have a function, because it is too old or is not NCCL.
    #[error("{library} has no {symbol}")]
    Missing {
        /// The file name with which the library was loaded.
        library: String,
        /// The name of the missing function.
        symbol: &'static str,
    },

    /// A function of NCCL returned an error. With a non-blocking communicator, the error may be reported after the
    /// call, during a wait.
    #[error("{function}: {text} ({code:?}){}", detail(last.as_deref()))]
    Call {
        /// The name of the function in `nccl.h`.
        function: &'static str,
        /// The error code that the function returned.
        code: ncclResult_t,
        /// The text that describes the code, from `ncclGetErrorString`.
        text: String,
        /// The last warning that NCCL logged in this process (`ncclGetLastError`), if there is one. This warning
        /// usually states the cause of the error.
        last: Option<String>,
    },

    /// A function was not completed within the time limit. The communicator was aborted.
    #[error("{function} is not done after {:.1} s; check that all ranks run", limit.as_secs_f64())]
    Late {
        /// The name of the function in `nccl.h`.
        function: &'static str,
        /// The time limit of the [`Wait`](crate::Wait).
        limit: Duration,
    },

    /// The watch of the [`Wait`](crate::Wait) ended the wait. The communicator was aborted.
    #[error("{function} was stopped: {why}")]
    GivenUp {
        /// The name of the function in `nccl.h`.
        function: &'static str,
        /// The reason that the watch returned in [`ControlFlow::Break`](std::ops::ControlFlow::Break).
        why: String,
    },

    /// An argument is invalid. NCCL was not called, because it would misinterpret the argument or wait forever.
    #[error("{function}: {why}")]
    Argument {
        /// The name of the function in `nccl.h`.
        function: &'static str,
        /// The reason why the argument is invalid.
        why: String,
    },

    /// The communicator was aborted after an earlier error.
    #[error("the communicator was aborted after an earlier error")]
    Aborted,
}

fn detail(last: Option<&str>) -> String {
    let mut text = String::new();
    if let Some(last) = last {
        let _ = write!(text, "; its last warning: {last}");
    }
    text
}
