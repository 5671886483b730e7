//! Tests of `--source per-rank`: several processes, each of which sees some files of SRC, write the same bytes as one
//! process that sees all files. If one of them fails, all end together.

mod auto;
mod carried;
mod computed;
mod failing;
mod fast;
mod formats;
mod output;
mod refused;
mod resumed;
