//! Crash points: positions in the code at which a test kills the process, to simulate a process or node that dies.
//!
//! `DTSHARD_FAULT=NAME` kills the process at the crash point NAME. Builds without debug assertions have no crash
//! points.

use std::time::Duration;

/// The names of the crash points, except those in [`COPY_POINTS`], in the order of a run. No run reaches all of them:
/// for example, a run reaches those that begin with `restart-` only if it deletes a partial folder.
pub const POINTS: [&str; 24] = [
    "begin-draft",
    "begin-planned",
    "begin-made",
    "begin-created-lease",
    "begin-leased",
    "invalidated",
    "carried",
    "record-before",
    "record-created",
    "record-after",
    "seal-created-lease",
    "restart-created-lease",
    "restart-examined",
    "restart-moved",
    "seal-leased",
    "seal-summed",
    "commit-marked",
    "commit-synced",
    "commit-cleared",
    "commit-moved-old",
    "commit-renamed",
    "commit-synced-parent",
    "commit-removed-old",
    "commit-left",
];

/// The names of the crash points that only a run whose `options::source` is `per-rank` reaches, at the time when
/// processes copy files of SRC.
pub const COPY_POINTS: [&str; 3] = ["source-copying", "source-copied", "source-recorded"];

/// Kills the process if a test has selected the crash point `name`.
#[cfg(debug_assertions)]
pub fn point(name: &str) {
    debug_assert!(POINTS.contains(&name) || COPY_POINTS.contains(&name), "{name} is not listed");
    if std::env::var_os("DTSHARD_FAULT").is_some_and(|selected| selected == name) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Does nothing in builds without debug assertions.
#[cfg(not(debug_assertions))]
pub fn point(_name: &str) {}

/// Returns whether this process runs in a crash test, as shown by the environment. Crash tests use small units of work
/// and short waiting times.
pub fn is_testing_faults() -> bool {
    cfg!(debug_assertions) && std::env::var_os("DTSHARD_FAULT").is_some()
}

/// Returns the time to wait for other processes: `hurried` in a crash test, otherwise `usual`.
pub fn wait_time(usual: Duration, hurried: Duration) -> Duration {
    if is_testing_faults() { hurried } else { usual }
}
