//! One file or folder a verb: arguments to options, then one call. Those that write share `convert.rs`.

mod alike;
mod bar;
mod bucket;
mod checks;
mod completions;
mod config;
mod conflicts;
mod consolidate;
mod conversion;
mod convert;
mod digests;
mod estimate;
mod fill;
mod flatten;
mod foresee;
mod idle;
mod inspect;
mod link;
mod man;
mod memory;
mod meter;
mod names;
mod nesting;
mod partial;
mod parts;
mod peers;
mod placements;
mod plans;
mod printer;
mod produce;
mod progress;
mod read_back;
mod records;
mod replaceable;
mod report;
mod reshard;
mod roster;
mod run;
mod source;
mod terminal;
mod tied;
mod told;
mod told_options;
mod unshard;
mod verify;
mod waiting;
mod whole;
mod work_folder;

use std::ffi::OsString;
use std::path::Path;

pub use printer::Printer;
pub use run::launch_of;

use crate::cli::{Cli, Command, SelectArgs, SourceArgs};
use dtshard::comm::{self, Launch};
use dtshard::error::{Error, Result};
use dtshard::exec::Input;
use dtshard::format::{Checkpoint, FlatKnowledge, Format, ReadOptions, SeriesChoice, Want, resolve};
use dtshard::quantity::count;

/// How a verb ended, where it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Done,
    /// `verify` found a difference or damage.
    Different,
}

impl Status {
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Different => 1,
        }
    }
}

/// The exit code of an error: 2, or that of the signal that stopped the run.
#[must_use]
pub fn exit_code(error: &Error) -> u8 {
    match error {
        Error::Stopped { exit, .. } => *exit,
        _ => 2,
    }
}

/// Say why arguments were not parsed, or the help that they ask for, and give the exit code.
#[must_use]
pub fn not_parsed(error: &clap::Error, arguments: &[OsString]) -> u8 {
    // What --part says is not known, and what the environment contradicts is not the matter.
    let launch = comm::launch(None, None, false, &comm::process_environment).unwrap_or_else(|_| Launch::alone());
    Printer::new(printer::talk_of_unparsed(arguments)).of_launch(&launch).not_parsed(error)
}

/// Run a verb, or this process's part of it.
///
/// # Errors
/// Whatever keeps it from being done.
pub fn run(cli: Cli, launch: Launch, printer: &Printer) -> Result<Status> {
    match cli.command {
        Command::Inspect(args) => inspect::run(&args, printer),
        Command::Reshard(args) => reshard::run(&args, launch, printer),
        Command::Unshard(args) => unshard::run(&args, launch, printer),
        Command::Flatten(args) => flatten::run(&args, launch, printer),
        Command::Consolidate(args) => consolidate::run(&args, launch, printer),
        Command::Verify(args) => verify::run(&args, printer),
        Command::Completions(args) => completions::run(&args, printer),
        Command::Man(args) => man::run(&args, printer),
    }
}

/// What `--series` asks for, or `default` where it is not given.
fn read_options(args: &SourceArgs, like: Option<&Path>, default: SeriesChoice, want: Want) -> ReadOptions {
    let series = match args.series.as_slice() {
        [] => default,
        [all] if all == "all" => SeriesChoice::All,
        names => SeriesChoice::Named(names.to_vec()),
    };
    ReadOptions {
        from: args.from.map(Into::into),
        want,
        series,
        io: args.io.mode(),
        show_incomplete: false,
        allow_missing: args.allow_missing,
        drop_unknown: args.drop_unknown,
        told: None,
        holdings: std::sync::Arc::default(),
        flat: FlatKnowledge { layout: args.flat_layout.clone(), like: like.map(Path::to_path_buf), raw: false },
    }
}

fn input(checkpoint: &Checkpoint) -> Input<'_> {
    Input { files: &checkpoint.files, catalog: &checkpoint.catalog, resolve: &resolve }
}

/// The error for a source of which nothing but objects would be read or written, unless options choose what is taken.
///
/// # Errors
/// `Usage`.
fn refuse_without_tensors(src: &Path, checkpoint: &Checkpoint, source: &SourceArgs, select: &SelectArgs) -> Result<()> {
    let chooses_series = !source.series.is_empty() && source.series != ["all"];
    let chooses_names = !select.include.is_empty() || select.include_from.is_some() || !select.exclude.is_empty();
    if chooses_series || chooses_names || select.root.is_some() {
        return Ok(());
    }
    let held = match checkpoint.catalog.tensors.len() {
        0 => String::from("it holds no tensors"),
        number => format!("none of its {} is taken", count(number, "tensor")),
    };
    Err(Error::usage(
        format!("{}: {held}", src.display()),
        "`dtshard inspect` shows what it holds; --include or --series chooses objects alone",
    ))
}

/// `--series` where there are no series would be an option without an effect.
fn check_series(args: &SourceArgs, checkpoints: &[&Checkpoint]) -> Result<()> {
    let named = !args.series.is_empty() && args.series != ["all"];
    if !named || checkpoints.iter().any(|checkpoint| !checkpoint.series.is_empty()) {
        return Ok(());
    }
    let checkpoint = checkpoints[0];
    Err(Error::usage(
        format!(
            "--series {}: {} is {}, which has no series of rank files",
            args.series.join(","),
            checkpoint.root.display(),
            checkpoint.format
        ),
        "leave --series out",
    ))
}

/// What tells of flat parameters would be without an effect where there are none.
fn check_flat(args: &SourceArgs, like: Option<&Path>, checkpoints: &[&Checkpoint]) -> Result<()> {
    let is_flat = |checkpoint: &&Checkpoint| checkpoint.format == Format::FsdpFlat || checkpoint.catalog.flat.is_some();
    let option = match (&args.flat_layout, like) {
        (Some(_), _) => "--flat-layout",
        (None, Some(_)) => "--like",
        (None, None) => return Ok(()),
    };
    if checkpoints.iter().any(is_flat) {
        return Ok(());
    }
    let checkpoint = checkpoints[0];
    Err(Error::usage(
        format!(
            "{option} tells what FSDP1 flat parameters hold: {} is {}, which has none",
            checkpoint.root.display(),
            checkpoint.format
        ),
        format!("leave {option} out"),
    ))
}
