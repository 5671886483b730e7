//! Tests of `--backend nccl` in which the `gpu-stand-in` library replaces the CUDA driver and NCCL. If one process
//! fails, all processes end with a message that names it, and nothing is published.

mod failing;
mod job;
mod killed;
mod unavailable;
