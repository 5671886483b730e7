//! Runs that are killed at every step, and the runs after them: the destination is never incomplete, the source never
//! changes, and `--resume` gives the bytes of an undisturbed run.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

#[allow(dead_code, reason = "each test program uses its own part")]
#[path = "../common/mod.rs"]
mod common;

mod cached;
mod damaged;
mod full;
mod job;
mod killed;
mod planted;
mod preflight;
mod refused;
mod resumed;
mod waiting;

use common::{outcome, tree};
