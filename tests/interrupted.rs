//! Runs that are killed at every step, and what the next ones make of what is left: the destination is never half, the
//! source never changes, and `--resume` ends with what an undisturbed run writes.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

#[path = "common/outcome.rs"]
mod outcome;
#[path = "common/tree.rs"]
mod tree;

#[path = "interrupted/awaited.rs"]
mod awaited;
#[path = "interrupted/cached.rs"]
mod cached;
#[path = "interrupted/damaged.rs"]
mod damaged;
#[path = "interrupted/foreseen.rs"]
mod foreseen;
#[path = "interrupted/full.rs"]
mod full;
#[path = "interrupted/job.rs"]
mod job;
#[path = "interrupted/killed.rs"]
mod killed;
#[path = "interrupted/planted.rs"]
mod planted;
#[path = "interrupted/refused.rs"]
mod refused;
#[path = "interrupted/resumed.rs"]
mod resumed;
