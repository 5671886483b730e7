//! `completions`: prints completions of the command line for a shell.

use serde_json::json;

use super::Status;
use super::printer::Printer;
use dtshard::Result;
use dtshard::cli::{self, Completions};

/// Prints the completions.
///
/// # Errors
/// `Io` if standard output cannot be written.
pub fn run(args: &Completions, printer: &Printer) -> Result<Status> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut cli::command(), "dtshard", &mut script);
    let script = String::from_utf8_lossy(&script);
    printer.document(&json!({ "shell": args.shell.to_string(), "script": script }))?;
    printer.data(&script)?;
    Ok(Status::Done)
}
