//! Parse, dispatch, print the error and its hint, turn it into an exit code.

use std::process::ExitCode;

use clap::Parser;

use dtshard::cli::{Cli, normalise_long_options};
use dtshard::commands::{self, Printer};

fn main() -> ExitCode {
    let arguments = normalise_long_options(std::env::args_os());
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        // `--help` and `--version` come here, too.
        Err(error) => return ExitCode::from(commands::not_parsed(&error, &arguments)),
    };
    let printer = Printer::new(cli.talk);
    match commands::run(cli, &printer) {
        Ok(status) => ExitCode::from(status.code()),
        Err(error) => {
            printer.error(&error);
            ExitCode::from(commands::exit_code(&error))
        }
    }
}
