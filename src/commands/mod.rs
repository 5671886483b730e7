//! Verbs. Each verb has a file, which turns the arguments of the verb into options of the library, makes one call, and
//! prints the report. This file chooses the verb.

mod bar;
mod completions;
mod convert;
mod html;
mod inspect;
mod man;
mod maps;
mod printer;
mod progress;
mod signals_and_limits;
mod terminal;
mod verify;

use std::ffi::OsString;

pub use printer::Printer;

use dtshard::cli::{Cli, Command};
use dtshard::options::{Launch, launch, process_environment};
use dtshard::{Error, Result};

/// The result of a verb that ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Done,
    /// The verb was `verify`, and it found a difference or damage.
    Different,
}

impl Status {
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Different => 1,
        }
    }
}

/// Returns the exit code for an error: if a signal stopped the run, the exit code for this signal, otherwise 2.
pub fn exit_code(error: &Error) -> u8 {
    match error {
        Error::Stopped(stopped) => stopped.exit,
        _ => 2,
    }
}

/// Prints the reason why clap did not parse the arguments, or the help or version that the arguments request. Returns
/// the exit code.
pub fn not_parsed(error: &clap::Error, arguments: &[OsString]) -> u8 {
    // The value of `--part` is unknown here. If the variables of the environment contradict each other, they are
    // ignored.
    let launch = launch(None, None, false, &process_environment).unwrap_or_else(|_| Launch::alone());
    Printer::new(printer::talk_of_unparsed(arguments)).of_launch(&launch).not_parsed(error)
}

/// Returns the number of this process, the number of all processes of the run, and the launcher that started them. A
/// verb that does not write always runs in one process.
///
/// # Errors
/// `Usage` if the command line and the environment contradict each other.
pub fn launch_of(command: &Command) -> Result<Launch> {
    let alone = || Ok(Launch::alone());
    command.conversion().map_or_else(alone, |(_, args)| {
        let share = &args.share;
        launch(share.part, share.parts, share.no_wait, &process_environment)
    })
}

/// Runs a verb. If several processes divide the work of the verb, runs only the share of this process.
///
/// # Errors
/// The errors of the verb.
pub fn run(cli: Cli, launch: Launch, printer: &Printer) -> Result<Status> {
    if let Some((target, args)) = cli.command.conversion() {
        return convert::run(target, args, launch, printer);
    }
    match cli.command {
        Command::Inspect(args) => inspect::run(&args, printer),
        Command::Verify(args) => verify::run(&args, printer),
        Command::Maps(args) => maps::run(&args, printer),
        Command::Completions(args) => completions::run(&args, printer),
        Command::Man(args) => man::run(&args, printer),
        Command::Reshard(_) | Command::Unshard(_) | Command::Flatten(_) | Command::Consolidate(_) => {
            unreachable!("the verbs that convert have a conversion")
        }
    }
}
