//! Tests of runs that are killed at any step, and of the runs after them: the destination is never incomplete, the
//! source never changes, and `--resume` gives the bytes of an uninterrupted run.

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
