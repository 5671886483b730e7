//! Tests of the command line on one machine: the contract of each verb, bad input, messages, and the bytes of every
//! conversion.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

#[allow(dead_code, reason = "each test program uses its own part")]
#[path = "../common/mod.rs"]
mod common;

mod architecture;
mod bad_input;
mod contract;
mod conversions;
mod deepspeed;
mod deepspeed_damage;
mod deepspeed_parallel;
mod deepspeed_universal;
mod dequantize;
mod docs;
mod flat_optimizer;
mod folders;
mod fsdp_flat;
mod hints;
mod inspect;
mod maps;
mod messages;
mod outputs;
mod plans;
mod redistribute;
mod reports;
mod sharded_tensors;
mod torch_checkpointing;
mod torchsnapshot;
mod trainers;

use common::{corrupt, outcome, rank_file, snapshot};
