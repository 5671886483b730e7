//! Tests of conversions by several processes: with a source of which each process sees only some files, on GPUs, and
//! their use of memory.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

#[allow(dead_code, reason = "each test program uses its own part")]
#[path = "../common/mod.rs"]
mod common;

mod gpus;
mod meeting;
mod memory;
mod metadata_mirror;
mod nodes;
mod per_rank;

use common::{corrupt, outcome, tree};
