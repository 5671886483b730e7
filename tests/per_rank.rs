//! `--source per-rank`: processes that each see only some of SRC's files write what one process writes that sees all,
//! and end together where one of them cannot go on.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

#[allow(dead_code, reason = "each test binary uses its own share")]
#[path = "common/outcome.rs"]
mod outcome;
#[path = "common/tree.rs"]
mod tree;

#[path = "per_rank/auto.rs"]
mod auto;
#[path = "per_rank/carried.rs"]
mod carried;
#[path = "per_rank/computed.rs"]
mod computed;
#[path = "per_rank/failing.rs"]
mod failing;
#[path = "per_rank/fast.rs"]
mod fast;
#[path = "per_rank/formats.rs"]
mod formats;
#[path = "per_rank/nodes.rs"]
mod nodes;
#[path = "per_rank/refused.rs"]
mod refused;
#[path = "per_rank/resumed.rs"]
mod resumed;
#[path = "per_rank/said.rs"]
mod said;
