//! What is written, where to, and what is told of it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::source::{CheckArgs, SelectArgs, SourceArgs, Tied};
use super::values::any_format;
use dtshard::Format;
use dtshard::options::Quantity;

/// What to tell, and how. Before or behind the verb.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Running")]
pub struct TalkArgs {
    /// One JSON document on stdout, also on failure
    #[arg(long, global = true, display_order = 100)]
    pub json: bool,
    /// Say nothing but errors
    #[arg(short, long, global = true, display_order = 101)]
    pub quiet: bool,
    /// Say more, such as each name that is left out
    #[arg(short, long, global = true, display_order = 102)]
    pub verbose: bool,
    /// Show progress
    #[arg(long, value_name = "WHEN", default_value = "auto", global = true, display_order = 103)]
    pub progress: ProgressChoice,
}

/// Where to write to, and how.
#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub struct DestinationArgs {
    /// Format of DST
    #[arg(long, value_name = "FORMAT", value_parser = any_format())]
    pub to: Option<Format>,
    /// The PyTorch that is to load DTensors in rank files, such as 2.9 [default: as SRC, else the newest known]
    #[arg(long, value_name = "VERSION")]
    pub torch_version: Option<String>,
    /// Replace DST if it is a checkpoint and holds nothing else [default: refused, unless it is an empty folder]
    #[arg(long)]
    pub overwrite: bool,
    /// Go on where an interrupted run of the same command stopped, and keep what is done if this one is interrupted;
    /// start where there is none
    #[arg(long, conflicts_with = "restart")]
    pub resume: bool,
    /// Throw away what an interrupted run left beside DST
    #[arg(long)]
    pub restart: bool,
    /// Plan everything and say what would be done; write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Do not wait until everything is on disk
    #[arg(long)]
    pub no_sync: bool,
    /// Read back and compare everything before it is published
    #[arg(long)]
    pub verify: bool,
}

/// Which share of the work is this process's, where several convert one checkpoint.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Running")]
pub struct PartArgs {
    /// Do part K of --parts, from 0 [default: as srun, torchrun, mpirun or a Slurm array say]
    #[arg(long, value_name = "K")]
    pub part: Option<u32>,
    /// Share the work among N processes, each started with the same command; 1 is a run of its own, whatever started it
    /// [default: as srun, torchrun or mpirun say]
    #[arg(long, value_name = "N")]
    pub parts: Option<u32>,
    /// Leave when this part is done; whichever part is done last completes DST [default: in Slurm arrays, else wait]
    #[arg(long)]
    pub no_wait: bool,
}

/// How the processes of a run give each other what they read.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Running")]
pub struct ExchangeArgs {
    /// What the processes of a run see of SRC: all of it, or each only the files on its own node
    #[arg(long, value_name = "WHAT", default_value = "shared")]
    pub source: SourceSight,
    /// How bytes get from process to process: cpu reads what all see, and first copies the files of SRC that only some see to
    /// a folder beside DST; nccl exchanges between GPUs, mpi between hosts; auto is cpu where all see SRC, else nccl if each
    /// process has a GPU, else mpi if it was built in and started the processes, else cpu
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub backend: Backend,
    /// Let NCCL reduce what is Partial, where each process has a summand: in NCCL's order, so floats are not the same in
    /// every bit, nor in every run
    #[arg(long)]
    pub fast_reduce: bool,
    // Gone: an error says what replaced it.
    #[arg(long, value_name = "PLACE", hide = true)]
    pub rendezvous: Option<String>,
    /// How much each process reads, sends and receives at a time in an exchange; it takes six times as much memory [default: 64MB, or as
    /// much less as --max-memory has room for]
    #[arg(long, value_name = "BYTES")]
    pub bucket_size: Option<Quantity>,
}

/// What each process of a run sees of SRC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SourceSight {
    #[default]
    Shared,
    PerRank,
}

/// How processes give each other bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    #[default]
    Auto,
    Cpu,
    Nccl,
    Mpi,
}

/// Arguments stand before the options of a verb, whatever heading those have.
const NO_HEADING: Option<&str> = None;

/// What the verbs that write have in common.
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// The checkpoint: a folder or a file
    #[arg(help_heading = NO_HEADING)]
    pub src: PathBuf,
    /// What to write: a folder; for torch, or a name ending in .safetensors, a file [optional with --dry-run]
    #[arg(required_unless_present = "dry_run", help_heading = NO_HEADING)]
    pub dst: Option<PathBuf>,
    #[command(flatten)]
    pub destination: DestinationArgs,
    #[command(flatten)]
    pub select: SelectArgs,
    /// Several names of one tensor: write it under each, or under the first and record the others (safetensors), or under
    /// each and under the name that SRC leaves out, where its config.json has tie_word_embeddings
    #[arg(long, value_name = "CHOICE", default_value = "keep", help_heading = "Names and values")]
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

/// When to show progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ProgressChoice {
    // A bar on a terminal, plain lines for long runs elsewhere. A document comment here would spread `--help` out.
    #[default]
    Auto,
    Always,
    Never,
}
