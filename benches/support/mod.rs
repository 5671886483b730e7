//! Shared parts of the benchmarks: a synthetic model on any mesh, and the cost of a run.

#![allow(dead_code, reason = "each bench takes what it needs")]

pub mod cost;
pub mod model;
pub mod tables;
