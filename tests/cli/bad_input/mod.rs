//! Tests of bad input: it gives a clear error and exit code 2 (`verify`: 1), no panic, and leaves nothing behind.

mod arguments;
mod damage;
mod dcp;
mod destination;
mod empty;
mod failed_syscalls;
mod interrupted;
mod limits;
mod local;
mod model_parallel;
mod overwrite;
mod progress_bar;
mod ranks;
mod safetensors;
mod sets;
mod tensor_keys;
mod torch;
mod unreachable;

/// Prints that a test skips a case, and discards the messages that the test has recorded.
#[expect(clippy::print_stderr, reason = "nobody is to take it for passed")]
fn skip(why: &str) {
    crate::common::transcript::discard();
    eprintln!("skipped: {why}");
}
