//! What the benches share: a synthetic model on any mesh, and what a run cost.

#![allow(dead_code, reason = "each bench takes what it needs")]

pub mod cost;
pub mod model;
pub mod tables;
