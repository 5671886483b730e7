//! Bad input: a clear error, exit code 2 (`verify`: 1), no panic, and nothing left behind.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

#[path = "common/corrupt.rs"]
mod corrupt;
#[path = "common/outcome.rs"]
mod outcome;

#[path = "bad_input/arguments.rs"]
mod arguments;
#[path = "bad_input/bar.rs"]
mod bar;
#[path = "bad_input/damage.rs"]
mod damage;
#[path = "bad_input/dcp.rs"]
mod dcp;
#[path = "bad_input/destination.rs"]
mod destination;
#[path = "bad_input/empty.rs"]
mod empty;
#[path = "bad_input/interrupted.rs"]
mod interrupted;
#[path = "bad_input/limits.rs"]
mod limits;
#[path = "bad_input/local.rs"]
mod local;
#[path = "bad_input/overwrite.rs"]
mod overwrite;
#[path = "bad_input/ranks.rs"]
mod ranks;
#[path = "bad_input/safetensors.rs"]
mod safetensors;
#[path = "bad_input/sets.rs"]
mod sets;
#[path = "bad_input/tensor_keys.rs"]
mod tensor_keys;
#[path = "bad_input/torch.rs"]
mod torch;
#[path = "bad_input/traced.rs"]
mod traced;
#[path = "bad_input/unreachable.rs"]
mod unreachable;

/// Say that a test leaves something out.
#[expect(clippy::print_stderr, reason = "nobody is to take it for passed")]
fn skip(why: &str) {
    eprintln!("skipped: {why}");
}
