//! The shared parts of the benchmarks: a synthetic model on any mesh, and the measurement of cost.

#![allow(dead_code, reason = "each bench takes what it needs")]

pub mod cost;
pub mod model;
pub mod tables;
