//! Places where a test lets the process die, as a node does that loses its power.
//!
//! `DTSHARD_FAULT=NAME` kills it there. Builds without debug assertions have none of this.

use std::time::Duration;

/// Every place, in the order in which an undisturbed run comes by.
pub const POINTS: [&str; 24] = [
    "begin-draft",
    "begin-planned",
    "begin-made",
    "begin-created-lease",
    "begin-leased",
    "doubted",
    "carried",
    "record-before",
    "record-created",
    "record-after",
    "seal-created-lease",
    "restart-created-lease",
    "restart-judged",
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

/// The places of a run whose processes see SRC apart, while they copy files of it.
pub const COPY_POINTS: [&str; 3] = ["source-copying", "source-copied", "source-recorded"];

/// Die here if a test asks for it.
#[cfg(debug_assertions)]
pub fn point(name: &str) {
    debug_assert!(POINTS.contains(&name) || COPY_POINTS.contains(&name), "{name} is not listed");
    if std::env::var_os("DTSHARD_FAULT").is_some_and(|wanted| wanted == name) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

#[cfg(not(debug_assertions))]
pub fn point(_name: &str) {}

/// Whether a test wants to see every step, as soon as it can be.
#[must_use]
pub fn is_hurried() -> bool {
    cfg!(debug_assertions) && std::env::var_os("DTSHARD_FAULT").is_some()
}

/// How long to wait for others; a test that wants to see every step does not wait as long.
#[must_use]
pub fn patience(usual: Duration, hurried: Duration) -> Duration {
    if is_hurried() { hurried } else { usual }
}
