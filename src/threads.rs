//! Threads that do one thing beside the thread that starts them. Those that share work are rayon's.

use std::io;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::error::{Error, Result};

/// Starts a thread.
///
/// # Errors
/// `Usage` where the system lets this process have no further one.
pub fn start<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(work).map_err(refused)
}

/// As [`start`], for a thread that ends with the scope.
///
/// # Errors
/// As [`start`].
pub fn start_within<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().name(name.into()).spawn_scoped(scope, work).map_err(refused)
}

fn refused(error: io::Error) -> Error {
    Error::usage(
        format!("the system starts no further thread: {error}"),
        "raise the limit of processes (`ulimit -u`, or pids.max of the control group), or use fewer options::threads",
    )
}
