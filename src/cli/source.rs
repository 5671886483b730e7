//! What is read, how, and what is taken of it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::values::{IoArg, SplitArg, any_format, rank};
use dtshard::Format;
use dtshard::options::Quantity;

/// Where to read from, and how.
#[derive(Args, Debug)]
#[command(next_help_heading = "Source")]
pub struct SourceArgs {
    /// Format of SRC [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = any_format())]
    pub from: Option<Format>,
    /// Series of rank files to take: names with commas between them, or all [default: model for unshard and
    /// consolidate, else all]
    #[arg(long, value_name = "A,B|all", value_delimiter = ',')]
    pub series: Vec<String>,
    /// How to read: mapped, by positional reads, past the page cache, or as suits the file system
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = "Running")]
    pub io: IoArg,
    /// Worker threads [default: one a core, in Slurm those of the task; to sync to disk at least 4]
    #[arg(long, value_name = "N", help_heading = "Running")]
    pub threads: Option<usize>,
    /// Anonymous memory to stay within, page cache apart
    #[arg(long, value_name = "SIZE", default_value = "512MB", help_heading = "Running")]
    pub max_memory: Quantity,
    /// Go on where rank files are missing and replicas of other ranks hold all that was in them
    #[arg(long)]
    pub allow_missing: bool,
    /// Go on without objects whose Python class is not known to be plain data
    #[arg(long)]
    pub drop_unknown: bool,
    /// Units, order and shapes of the parameters in FSDP1 flat parameters [default: flat_layout.json in SRC]
    #[arg(long, value_name = "FILE")]
    pub flat_layout: Option<PathBuf>,
    #[command(flatten)]
    pub layout: SourceLayoutArgs,
}

/// How plain tensors of rank files lie, which the files do not say.
#[derive(Args, Debug)]
#[command(next_help_heading = "Source")]
pub struct SourceLayoutArgs {
    /// Mesh of the ranks that saved SRC, where its plain tensors are parts of tensors: named dims, row-major ranks
    /// [default: that of its DTensors]
    #[arg(long, value_name = "DIMS")]
    pub src_mesh: Option<String>,
    /// Ranks of that mesh in row-major order of its cells [default: 0,1,2,...]
    #[arg(long, value_name = "RANKS", value_delimiter = ',', value_parser = rank)]
    pub src_mesh_ranks: Vec<u32>,
    /// How plain tensors of SRC lie on it, as --placements says it of DST [default: whole on every rank]
    #[arg(long, value_name = "[PATTERN=]LIST")]
    pub src_placements: Vec<String>,
    /// How dims of plain tensors of SRC are cut [default: chunk]
    #[arg(long, value_name = "RULE")]
    pub src_split: Option<SplitArg>,
    /// A parallelize plan that says it of the parameters of the model, as --plan does of DST: llama, mistral, qwen2, ..., or
    /// a file with styles
    #[arg(long, value_name = "NAME|FILE")]
    pub src_plan: Option<String>,
    /// A layout file that says all this. --src-mesh takes the place of its mesh, --src-placements rules come before its
    /// own, and a bare list takes the place of its fallback
    #[arg(long, value_name = "FILE")]
    pub src_layout: Option<PathBuf>,
    /// Mesh dims along which ranks hold summands of plain tensors (their own gradients), and how these are reduced: sum,
    /// avg, max, min or product; repeatable [default: sum]
    #[arg(long, value_name = "DIMS[=OP]")]
    pub reduce: Vec<String>,
}

/// What FSDP1 files lack.
#[derive(Args, Debug)]
#[command(next_help_heading = "Source")]
pub struct ShapeArgs {
    /// A checkpoint of the same model, whose values are ignored, for the shapes that an FSDP1 SRC lacks, and the order of
    /// parameters where it is a torch file
    #[arg(long, value_name = "CKPT")]
    pub like: Option<PathBuf>,
}

/// What of SRC is taken, under which names and in which dtypes.
#[derive(Args, Debug)]
#[command(next_help_heading = "Names and values")]
pub struct SelectArgs {
    /// Take only what a pattern covers (* within a component, ** across, {a,b}); a module covers what is below it;
    /// repeatable
    #[arg(long, value_name = "PATTERN")]
    pub include: Vec<String>,
    /// Leave out what a pattern covers; a parameter's optimizer state goes with it; repeatable
    #[arg(long, value_name = "PATTERN")]
    pub exclude: Vec<String>,
    /// Further --include patterns, one a line
    #[arg(long, value_name = "FILE")]
    pub include_from: Option<PathBuf>,
    /// Take this subtree of the state dict, under names relative to it
    #[arg(long, value_name = "PATH")]
    pub root: Option<String>,
    /// Cut this from the front of names that begin with it; repeatable, in the order given
    #[arg(long, value_name = "TEXT")]
    pub strip_prefix: Vec<String>,
    /// Replace every match of a regular expression in names; \1 and ${1} are its groups; repeatable, in the order given
    #[arg(long, value_name = "REGEX=REPL")]
    pub rename: Vec<String>,
    /// Further --rename rules, one a line
    #[arg(long, value_name = "FILE")]
    pub rename_file: Option<PathBuf>,
    /// Put this text before every name, after the renames
    #[arg(long, value_name = "TEXT")]
    pub add_prefix: Option<String>,
    /// Put everything into nested dicts of this dotted path
    #[arg(long, value_name = "PATH")]
    pub nest: Option<String>,
    /// Keep wrapper prefixes in names (_orig_mod., _fsdp_wrapped_module., _checkpoint_wrapped_module.); reshard keeps
    /// them, and only matches patterns without them
    #[arg(long)]
    pub keep_names: bool,
    /// Cast float tensors of 1 or more dims: to DTYPE all f32, f16 and bf16 ones outside optimizer state, with PATTERN=
    /// those that it covers; repeatable, the first pattern wins [default: no bit changes]
    #[arg(long, value_name = "[PATTERN=]DTYPE")]
    pub dtype: Vec<String>,
}

/// What is checked before anything is written, and what to do about it.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Checks")]
pub struct CheckArgs {
    /// Where ranks store different values of a plain tensor or object, take the lowest rank's, keep each rank's, or
    /// leave it out [default: an error]
    #[arg(long, value_name = "CHOICE")]
    pub on_conflict: Option<OnConflict>,
    /// Compare replicas of DTensors, too; plain tensors always are
    #[arg(long)]
    pub check_replicas: bool,
    /// Check every stored checksum first, not only those of records that pass through whole
    #[arg(long)]
    pub check_crc: bool,
}

/// Whose value is taken where ranks disagree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnConflict {
    // The lowest rank's.
    Rank0,
    // Every rank's: in rank files each its own, in other formats a dict of rank_0, rank_1, ...
    PerRank,
    // None: it is left out.
    Drop,
}

/// What becomes of several names of one tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Tied {
    // Every name is written.
    #[default]
    Keep,
    // The first name is written, the others are recorded in `__metadata__`.
    Drop,
    // Every name is written, and one that SRC leaves out as well.
    Write,
}
