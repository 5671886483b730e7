//! `--source per-rank`: processes that each see only some of SRC's files write what one process writes that sees all,
//! and end together where one of them cannot go on.

mod auto;
mod carried;
mod computed;
mod failing;
mod fast;
mod formats;
mod refused;
mod resumed;
mod said;
