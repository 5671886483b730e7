//! Starts threads that each run a single function. For work that is shared by several threads, the program uses rayon.

use std::io;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::error::{Error, Result};

/// Starts a thread of this name, which runs `work`.
///
/// # Errors
/// `Usage` if the operating system refuses another thread.
pub fn start<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(work).map_err(refused)
}

/// Starts a thread of this name, which runs `work` and ends before the scope ends.
///
/// # Errors
/// `Usage` if the operating system refuses another thread.
pub fn start_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().name(name.into()).spawn_scoped(scope, work).map_err(refused)
}

fn refused(error: io::Error) -> Error {
    Error::usage(
        format!("cannot start another thread: {error}"),
        "raise the process limit (`ulimit -u`, or pids.max of the control group), or lower options::threads",
    )
}
