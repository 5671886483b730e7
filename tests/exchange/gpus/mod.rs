//! `--backend nccl` over the stand-in for driver and NCCL: when one process fails, all end with a message that names
//! it, and nothing is published.

mod failing;
mod job;
mod killed;
mod unavailable;
