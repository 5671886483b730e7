//! Bad input: a clear error, exit code 2 (`verify`: 1), no panic, and nothing left behind.

mod arguments;
mod bar;
mod damage;
mod dcp;
mod destination;
mod empty;
mod interrupted;
mod limits;
mod local;
mod overwrite;
mod ranks;
mod safetensors;
mod sets;
mod tensor_keys;
mod torch;
mod traced;
mod unreachable;

/// Say that a test leaves something out.
#[expect(clippy::print_stderr, reason = "nobody is to take it for passed")]
fn skip(why: &str) {
    crate::common::transcript::discard();
    eprintln!("skipped: {why}");
}
