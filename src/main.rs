//! Parses the arguments, runs the verb, prints an error together with its hint, and returns the exit code.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails"))]

mod commands;

use std::process::ExitCode;

use commands::Printer;
use dtshard::Error;
use dtshard::cli::{self, normalise_long_options};

fn main() -> ExitCode {
    #[cfg(feature = "mpi")]
    let _finalize = dtshard::MpiFinalize::default();
    let arguments = normalise_long_options(std::env::args_os());
    let cli = match cli::parse(&arguments) {
        Ok(cli) => cli,
        // clap also returns an "error" for `--help` and `--version`.
        Err(error) => return ExitCode::from(commands::not_parsed(&error, &arguments)),
    };
    let printer = Printer::new(cli.talk);
    let launch = match commands::launch_of(&cli.command) {
        Ok(launch) => launch,
        Err(error) => return failed(&error, &printer),
    };
    let printer = printer.of_launch(&launch);
    match commands::run(cli, launch, &printer) {
        Ok(status) => ExitCode::from(status.code()),
        Err(error) => failed(&error, &printer),
    }
}

fn failed(error: &Error, printer: &Printer) -> ExitCode {
    printer.error(error);
    ExitCode::from(commands::exit_code(error))
}
