//! Runs that are killed at every step, and what the next ones make of what is left: the destination is never half, the
//! source never changes, and `--resume` ends with what an undisturbed run writes.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

#[allow(dead_code, reason = "each test program uses its own part")]
#[path = "../common/mod.rs"]
mod common;

mod awaited;
mod cached;
mod damaged;
mod foreseen;
mod full;
mod job;
mod killed;
mod planted;
mod refused;
mod resumed;

use common::{outcome, tree};
