//! The command line as declared to clap: structs only, so that help, man pages and completions come from one place.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::format::Format;
use crate::quantity::Quantity;
use crate::storage::IoMode;

/// Convert sharded PyTorch checkpoints between layouts, without Python.
///
/// Reads DCP directories, per-rank DTensor files, torch.save files and safetensors, found out by itself. Memory stays
/// bounded whatever the size of the model, nothing stands at DST until it is complete, and every element is proven to
/// be there exactly once.
#[derive(Debug, Parser)]
#[command(name = "dtshard", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what a checkpoint holds and how it is laid out
    Inspect(Inspect),
    /// Write a checkpoint for another mesh, other placements or another format; everything is carried
    #[command(alias = "convert")]
    Reshard(Reshard),
    /// Write every tensor whole, nested state dict kept
    Unshard(Unshard),
    /// Write the model, merged, to ship
    #[command(alias = "merge")]
    Consolidate(Consolidate),
    /// Check that a checkpoint is sound, or that two hold the same values
    #[command(alias = "diff")]
    Verify(Verify),
}

/// Where to read from, and how.
#[derive(Args, Debug)]
pub struct SourceArgs {
    /// Format of SRC [default: detected]
    #[arg(long, value_name = "FORMAT")]
    pub from: Option<FormatArg>,
    /// Series of rank files to take: names with commas between them, or all
    #[arg(long, value_name = "A,B|all", value_delimiter = ',')]
    pub series: Vec<String>,
    /// How to read: mapped, by positional reads, or as suits the file system
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub io: IoArg,
    /// Worker threads [default: one a core]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Anonymous memory to stay within, page cache apart
    #[arg(long, value_name = "SIZE", default_value = "512MB")]
    pub max_memory: Quantity,
}

/// What to tell, and how.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct TalkArgs {
    /// One JSON document on stdout, also on failure
    #[arg(long)]
    pub json: bool,
    /// Say nothing but errors
    #[arg(short, long)]
    pub quiet: bool,
    /// Say more
    #[arg(short, long)]
    pub verbose: bool,
    /// Show progress
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub progress: ProgressChoice,
}

/// Where to write to, and how.
#[derive(Args, Debug)]
pub struct DestinationArgs {
    /// Format of DST [default: from its suffix, else the verb's]
    #[arg(long, value_name = "FORMAT")]
    pub to: Option<FormatArg>,
    /// Replace DST if it exists
    #[arg(long)]
    pub overwrite: bool,
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

/// What the verbs that write have in common.
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// The checkpoint: a folder or a file
    pub src: PathBuf,
    /// What to write: a folder; for torch, or a name ending in .safetensors, a file [optional with --dry-run]
    #[arg(required_unless_present = "dry_run")]
    pub dst: Option<PathBuf>,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub destination: DestinationArgs,
    #[command(flatten)]
    pub talk: TalkArgs,
}

#[derive(Args, Debug)]
pub struct Inspect {
    /// The checkpoint: a folder or a file
    pub src: PathBuf,
    /// Leave the chunks out of --json
    #[arg(long)]
    pub brief: bool,
    /// Hash the values of every tensor (BLAKE3, the same for every layout and format)
    #[arg(long)]
    pub digest: bool,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub talk: TalkArgs,
}

#[derive(Args, Debug)]
pub struct Reshard {
    /// Target mesh: named dims, row-major ranks (dp=4,tp=2)
    #[arg(long, value_name = "DIMS")]
    pub mesh: String,
    /// Ranks of the mesh in row-major order of its cells [default: 0,1,2,...]
    #[arg(long, value_name = "RANKS", value_delimiter = ',')]
    pub mesh_ranks: Vec<u32>,
    /// Placements, one a mesh dim: S(d), _S(d,sf) or R. A bare list is the fallback for every tensor, PATTERN=LIST a
    /// rule; the first rule that matches wins
    #[arg(long, value_name = "[PATTERN=]LIST")]
    pub placements: Vec<String>,
    #[command(flatten)]
    pub convert: ConvertArgs,
}

#[derive(Args, Debug)]
pub struct Unshard {
    #[command(flatten)]
    pub shards: ShardArgs,
    #[command(flatten)]
    pub convert: ConvertArgs,
}

/// Sizes of safetensors files.
#[derive(Args, Debug)]
pub struct ShardArgs {
    /// Largest safetensors file in a folder (5GB = 5e9, 5GiB = 5 * 2^30); a larger tensor gets its own
    #[arg(long, value_name = "SIZE", default_value = "5GB")]
    pub max_shard_size: Quantity,
}

#[derive(Args, Debug)]
pub struct Consolidate {
    /// Take this subtree of the state dict instead of the model
    #[arg(long, value_name = "PATH", conflicts_with = "everything")]
    pub root: Option<String>,
    /// Take every tensor, under its whole dotted name
    #[arg(long)]
    pub everything: bool,
    /// Folder whose config and tokenizer files are copied, or none [default: SRC, SRC/huggingface]
    #[arg(long, value_name = "DIR|none")]
    pub assets: Option<PathBuf>,
    #[command(flatten)]
    pub shards: ShardArgs,
    #[command(flatten)]
    pub convert: ConvertArgs,
}

#[derive(Args, Debug)]
pub struct Verify {
    /// The checkpoint to check
    pub src: PathBuf,
    /// One that should hold the same values, in whatever layout and format
    pub other: Option<PathBuf>,
    /// Compare only this subtree of SRC, under names relative to it
    #[arg(long, value_name = "PATH")]
    pub root: Option<String>,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub talk: TalkArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum FormatArg {
    Dcp,
    Safetensors,
    DcpHf,
    Torch,
    TorchRanks,
}

impl From<FormatArg> for Format {
    fn from(arg: FormatArg) -> Self {
        match arg {
            FormatArg::Dcp => Self::Dcp,
            FormatArg::Safetensors => Self::Safetensors,
            FormatArg::DcpHf => Self::DcpHf,
            FormatArg::Torch => Self::Torch,
            FormatArg::TorchRanks => Self::TorchRanks,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum IoArg {
    Auto,
    Mmap,
    Read,
}

impl IoArg {
    #[must_use]
    pub fn mode(self) -> Option<IoMode> {
        match self {
            Self::Auto => None,
            Self::Mmap => Some(IoMode::Mmap),
            Self::Read => Some(IoMode::Read),
        }
    }
}

/// When to show progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ProgressChoice {
    /// A bar on a terminal, plain lines for long runs elsewhere
    #[default]
    Auto,
    Always,
    Never,
}

impl Cli {
    /// How to talk, which is needed before anything is done.
    #[must_use]
    pub fn talk(&self) -> TalkArgs {
        match &self.command {
            Command::Inspect(args) => args.talk,
            Command::Reshard(args) => args.convert.talk,
            Command::Unshard(args) => args.convert.talk,
            Command::Consolidate(args) => args.convert.talk,
            Command::Verify(args) => args.talk,
        }
    }
}

/// Long options may be written with underscores: `--max_shard_size` is `--max-shard-size`.
pub fn normalise_long_options(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut only_positionals = false;
    let normalise = |argument: OsString| {
        only_positionals |= argument == "--";
        match argument.to_str().filter(|text| text.starts_with("--") && !only_positionals) {
            Some(text) => {
                let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
                OsString::from(name.replace('_', "-") + value)
            }
            None => argument,
        }
    };
    arguments.map(normalise).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_declaration_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn underscores_in_long_options_are_hyphens() {
        let arguments = ["x", "--max_shard_size=5_GB", "--a_b", "my_file", "--", "--c_d"].map(OsString::from);
        let expected = ["x", "--max-shard-size=5_GB", "--a-b", "my_file", "--", "--c_d"].map(OsString::from);
        assert_eq!(normalise_long_options(arguments.into_iter()), expected);
    }
}
