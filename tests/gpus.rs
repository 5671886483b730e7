//! `--backend nccl` over the stand-in for driver and NCCL: whatever goes wrong in one process, all end, with words that
//! name it, and nothing is published.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

#[allow(dead_code, reason = "each test binary uses its own share")]
#[path = "common/outcome.rs"]
mod outcome;
#[path = "common/tree.rs"]
mod tree;

#[path = "gpus/dying.rs"]
mod dying;
#[path = "gpus/failing.rs"]
mod failing;
#[path = "gpus/job.rs"]
mod job;
#[path = "gpus/lacking.rs"]
mod lacking;
#[allow(dead_code, reason = "each test binary uses its own share")]
#[path = "per_rank/nodes.rs"]
mod nodes;
