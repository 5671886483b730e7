//! `--backend nccl` over the stand-in for driver and NCCL: whatever goes wrong in one process, all end, with words that
//! name it, and nothing is published.

mod dying;
mod failing;
mod job;
mod lacking;
