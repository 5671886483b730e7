//! Options of the destination, of messages, and of the processes of a run.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::source::{CheckArgs, SelectArgs, SourceArgs, Tied};
use super::values::{any_format, number};
use crate::Format;
use crate::options::Quantity;

/// Options of messages. They may stand before or after the verb.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Running")]
pub struct TalkArgs {
    /// Print one JSON document on standard output, also on failure
    #[arg(long, global = true, display_order = 100)]
    pub json: bool,
    /// Print errors only
    #[arg(short, long, global = true, display_order = 101)]
    pub quiet: bool,
    /// Print details, such as the name of each tensor that is left out
    #[arg(short, long, global = true, display_order = 102)]
    pub verbose: bool,
    /// Choose when progress is shown
    #[arg(
        long,
        value_name = "WHEN",
        default_value = "auto",
        global = true,
        display_order = 103,
        hide_short_help = true
    )]
    pub progress: ProgressChoice,
}

/// The option that writes a report to look at.
#[derive(Args, Clone, Debug, Default)]
pub struct HtmlArgs {
    /// Also write a report to look at: an HTML page in one file
    ///
    /// An existing HTML page is replaced; another file is an error.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// The options of the destination.
#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub struct DestinationArgs {
    /// Choose the format of DST
    #[arg(long, value_name = "FORMAT", value_parser = any_format())]
    pub to: Option<Format>,
    /// Write DTensors in rank files as this version of PyTorch does, such as 2.9
    ///
    /// [default: as in SRC, else the newest known version]
    #[arg(long, value_name = "VERSION", hide_short_help = true)]
    pub torch_version: Option<String>,
    /// Replace DST if it is a checkpoint and contains no other files
    ///
    /// [default: an existing DST is an error, unless it is an empty folder]
    #[arg(long)]
    pub overwrite: bool,
    /// Continue an interrupted run of the same command, and keep finished work if this run is interrupted
    ///
    /// Without an interrupted run, start a new run.
    #[arg(long, conflicts_with = "restart")]
    pub resume: bool,
    /// Delete what an interrupted run left beside DST, and start again
    #[arg(long, hide_short_help = true)]
    pub restart: bool,
    /// Plan and check everything, print what a run would do, and write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// With --dry-run, also write a report to look at: an HTML page in one file
    ///
    /// An existing HTML page is replaced; another file is an error.
    #[arg(long, value_name = "FILE", requires = "dry_run", hide_short_help = true)]
    pub html: Option<PathBuf>,
    /// Return before all data is on disk
    #[arg(long, hide_short_help = true)]
    pub no_sync: bool,
    /// Read DST back and compare it with SRC before it is published
    #[arg(long)]
    pub verify: bool,
}

/// Options for the share of the work that this process does, if several processes convert one checkpoint.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Running")]
pub struct PartArgs {
    /// Do part K of the work, a number from 0 to N-1, where N is the value of --parts
    ///
    /// [default: set by srun, torchrun, mpirun or a Slurm array]
    #[arg(long, value_name = "K", value_parser = number::<u32>, hide_short_help = true)]
    pub part: Option<u32>,
    /// Divide the work among N processes, each started with the same command
    ///
    /// With 1, the process works alone, whatever started it. [default: set by srun, torchrun or mpirun]
    #[arg(long, value_name = "N", value_parser = number::<u32>, hide_short_help = true)]
    pub parts: Option<u32>,
    /// Exit when this part is done
    ///
    /// The part that is done last publishes DST. [default: on in Slurm arrays, else off]
    #[arg(long, hide_short_help = true)]
    pub no_wait: bool,
}

/// Options of processes that exchange bytes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Running")]
pub struct ExchangeArgs {
    /// State which files of SRC each process can see
    #[arg(long, value_name = "WHAT", default_value = "shared", hide_short_help = true)]
    pub source: SourceSight,
    /// Choose how processes exchange bytes of tensors
    #[arg(long, value_name = "HOW", default_value = "auto", hide_short_help = true)]
    pub backend: Backend,
    /// Let NCCL sum partial values
    ///
    /// NCCL sums in an order of its own, so the last bits of floats can differ from run to run.
    #[arg(long, hide_short_help = true)]
    pub fast_reduce: bool,
    // This option was removed. It still parses, so that an error can name its replacement.
    #[arg(long, value_name = "PLACE", hide = true)]
    pub rendezvous: Option<String>,
    /// Limit the bytes that each process reads, sends and receives at a time in an exchange
    ///
    /// An exchange needs six times as much memory. [default: 64MB, less if --max-memory is too low for that]
    #[arg(long, value_name = "BYTES", hide_short_help = true)]
    pub bucket_size: Option<Quantity>,
}

/// The files of SRC that each process of a run sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SourceSight {
    /// Every process sees all files
    #[default]
    Shared,
    /// Each process sees only the files on its own node
    PerRank,
}

/// The way in which processes exchange bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// cpu if every process sees SRC; else nccl if each process has a GPU, else mpi if MPI is built in and started
    /// the processes, else cpu
    #[default]
    Auto,
    /// Each process reads the data that it writes
    ///
    /// Files that not every process sees are first copied to a folder beside DST
    Cpu,
    /// Exchange bytes between GPUs with NCCL
    Nccl,
    /// Exchange bytes between hosts with MPI
    Mpi,
}

/// The heading of positional arguments in the help: none. Without a heading, these arguments precede the options of a
/// verb, whatever heading the options have.
const NO_HEADING: Option<&str> = None;

/// Arguments that all verbs which write share.
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// Checkpoint to read: a folder or a file
    #[arg(help_heading = NO_HEADING)]
    pub src: PathBuf,
    /// Checkpoint to write
    ///
    /// DST is a folder, or a file for torch and for names that end in .safetensors. Optional with --dry-run.
    #[arg(required_unless_present = "dry_run", help_heading = NO_HEADING)]
    pub dst: Option<PathBuf>,
    #[command(flatten)]
    pub destination: DestinationArgs,
    #[command(flatten)]
    pub select: SelectArgs,
    /// Choose what is written for a tensor that has several names
    #[arg(
        long,
        value_name = "CHOICE",
        default_value = "keep",
        help_heading = "Names and values",
        hide_short_help = true
    )]
    pub tied: Tied,
    #[command(flatten)]
    pub checks: CheckArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub share: PartArgs,
    #[command(flatten)]
    pub exchange: ExchangeArgs,
}

/// The condition under which progress is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ProgressChoice {
    /// Show a bar on a terminal; elsewhere, print a line now and then in a long run
    #[default]
    Auto,
    /// Print lines even if the run is short
    Always,
    /// Show no progress
    Never,
}
