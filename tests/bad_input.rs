//! Bad input: a clear error, exit code 2 (`verify`: 1), no panic, and nothing left behind.

#[path = "common/corrupt.rs"]
mod corrupt;
#[path = "common/outcome.rs"]
mod outcome;

#[path = "bad_input/arguments.rs"]
mod arguments;
#[path = "bad_input/damage.rs"]
mod damage;
#[path = "bad_input/dcp.rs"]
mod dcp;
#[path = "bad_input/destination.rs"]
mod destination;
#[path = "bad_input/interrupted.rs"]
mod interrupted;
#[path = "bad_input/local.rs"]
mod local;
#[path = "bad_input/ranks.rs"]
mod ranks;
#[path = "bad_input/safetensors.rs"]
mod safetensors;
#[path = "bad_input/torch.rs"]
mod torch;
