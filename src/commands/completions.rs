//! `completions`: what a shell needs to complete our command line, from the declaration of it.

use serde_json::json;

use super::Status;
use super::printer::Printer;
use crate::cli::{self, Completions};
use dtshard::Result;

pub fn run(args: &Completions, printer: &Printer) -> Result<Status> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut cli::command(), "dtshard", &mut script);
    let script = String::from_utf8_lossy(&script);
    printer.document(&json!({ "shell": args.shell.to_string(), "script": script }))?;
    printer.data(&script)?;
    Ok(Status::Done)
}
