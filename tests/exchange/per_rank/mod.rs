//! `--source per-rank`: processes that each see some of SRC's files write the bytes of one process that sees all, and
//! end together if one of them fails.

mod auto;
mod carried;
mod computed;
mod failing;
mod fast;
mod formats;
mod output;
mod refused;
mod resumed;
