//! Bad input: a clear error, exit code 2 (`verify`: 1), no panic, and nothing left behind.

mod arguments;
mod damage;
mod dcp;
mod destination;
mod empty;
mod failed_syscalls;
mod interrupted;
mod limits;
mod local;
mod overwrite;
mod progress_bar;
mod ranks;
mod safetensors;
mod sets;
mod tensor_keys;
mod torch;
mod unreachable;

/// Prints that a test skips a case, and drops its transcript.
#[expect(clippy::print_stderr, reason = "nobody is to take it for passed")]
fn skip(why: &str) {
    crate::common::transcript::discard();
    eprintln!("skipped: {why}");
}
