//! The command line as it is declared for clap, and the options of the library that its arguments stand for. Help, man
//! pages, completions and the keyword arguments of the Python module have this one source.

#![allow(rustdoc::broken_intra_doc_links, reason = "help texts have brackets that are no links")]

mod arguments;
pub mod labels;
mod output;
mod parse;
mod source;
mod values;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

pub use output::{Backend, ConvertArgs, ExchangeArgs, HtmlArgs, ProgressChoice, SourceSight, TalkArgs};
pub use parse::parse;
pub use source::{DequantizedDtype, MapArgs, OnConflict, SelectArgs, ShapeArgs, SourceArgs, Tied};
pub use values::SplitArg;
use values::{number, rank};

use crate::Format;
use crate::options::Quantity;

/// Convert sharded PyTorch checkpoints between layouts, without Python.
#[derive(Debug, Parser)]
// If an option is given twice, the last one counts, so that users can add options to an alias and override its options.
#[command(name = "dtshard", version, max_term_width = 120, after_help = EXAMPLES, args_override_self = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub talk: TalkArgs,
}

/// The description of the program in the man page. In `--help` it would push the list of verbs down.
pub const DESCRIPTION: &str = "\
Convert sharded PyTorch checkpoints between layouts, without Python.

The format of SRC is detected: DCP directories, DTensor rank files, torch.save files, FSDP1 rank files and safetensors. \
Memory stays bounded whatever the size of the model. DST appears when it is complete, and every element is proven to be \
written exactly once.";

const EXAMPLES: &str = "\
Examples:
  dtshard inspect step-1000
  dtshard consolidate step-1000 out
  dtshard reshard step-1000 step-1000-fsdp16 --mesh fsdp=16
  dtshard verify step-1000 out --root model

`dtshard VERB -h` lists the commonest options of a verb, `dtshard VERB --help` all of them.";

const INSPECT_EXAMPLES: &str = "\
Examples:
  dtshard inspect step-1000
  dtshard inspect step-1000 --tensor '**.q_proj.weight' --draw";

const RESHARD_EXAMPLES: &str = "\
Examples:
  dtshard reshard step-1000 step-1000-fsdp16 --mesh fsdp=16
  dtshard reshard step-1000 step-1000-tp2 --mesh dp_shard=4,tp=2 --plan llama";

const UNSHARD_EXAMPLES: &str = "\
Examples:
  dtshard unshard step-1000 step-1000.pt
  dtshard unshard step-1000 whole --to safetensors --max-shard-size 2GB";

const FLATTEN_EXAMPLES: &str = "\
Examples:
  dtshard flatten step-1000.pt flat8 --world-size 8 --wrap 'model.layers.*' --use-orig-params
  dtshard flatten flat8 flat6 --world-size 6";

const CONSOLIDATE_EXAMPLES: &str = "\
Examples:
  dtshard consolidate step-1000 out
  dtshard consolidate step-1000 model.safetensors --dtype bf16 --verify";

const VERIFY_EXAMPLES: &str = "\
Examples:
  dtshard verify step-1000
  dtshard verify step-1000 out --root model

Exit status: 0 if SRC is sound and OTHER, if given, holds the same values; 1 if there is damage or a difference; 2 \
if verify could not run.";

const MAPS_EXAMPLES: &str = "\
Examples:
  dtshard maps
  dtshard maps step-1000
  dtshard maps llama > my-map.toml";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  dtshard completions bash > ~/.local/share/bash-completion/completions/dtshard
  dtshard completions zsh > \"${fpath[1]}/_dtshard\"";

const MAN_EXAMPLES: &str = "\
Examples:
  dtshard man ~/.local/share/man/man1";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the contents and the layout of a checkpoint
    #[command(after_long_help = INSPECT_EXAMPLES)]
    Inspect(Inspect),
    /// Write a checkpoint for another mesh, other placements or another format
    #[command(alias = "convert", after_long_help = RESHARD_EXAMPLES)]
    Reshard(Reshard),
    /// Write whole tensors, and keep the nested state dict
    #[command(after_long_help = UNSHARD_EXAMPLES)]
    Unshard(Unshard),
    /// Write FSDP1 flat parameters, a file for each rank
    #[command(after_long_help = FLATTEN_EXAMPLES)]
    Flatten(Flatten),
    /// Write the model alone, merged into Hugging Face files
    #[command(alias = "merge", after_long_help = CONSOLIDATE_EXAMPLES)]
    Consolidate(Consolidate),
    /// Check that a checkpoint is sound, or that two checkpoints hold the same values
    #[command(alias = "diff", after_long_help = VERIFY_EXAMPLES)]
    Verify(Verify),
    /// List the weight maps, or show which of them fit a checkpoint
    #[command(after_long_help = MAPS_EXAMPLES)]
    Maps(Maps),
    /// Print completions for a shell
    #[command(after_long_help = COMPLETIONS_EXAMPLES)]
    Completions(Completions),
    /// Write the man pages
    #[command(after_long_help = MAN_EXAMPLES)]
    Man(Man),
}

#[derive(Args, Debug)]
pub struct Inspect {
    /// Checkpoint to show: a folder or a file
    pub src: PathBuf,
    /// Print only the summary
    ///
    /// With --tensor or --json, leave out the chunks.
    #[arg(long)]
    pub brief: bool,
    /// Show the tensors that a name or pattern matches, with their chunks
    ///
    /// Repeatable.
    #[arg(long, value_name = "FQN")]
    pub tensor: Vec<String>,
    /// Print a line for each tensor; do not group equal tensors of different layers
    #[arg(long)]
    pub all: bool,
    /// Sort the tensors by size, the largest first, or by name
    ///
    /// [default: the order of the state dict]
    #[arg(long, value_name = "KEY")]
    pub sort: Option<SortKey>,
    /// Draw which rank holds which part of each tensor named by --tensor
    #[arg(long, requires = "tensor")]
    pub draw: bool,
    /// Print the layout as a layout file: TOML, or JSON with --json
    #[arg(long, conflicts_with_all = ["brief", "tensor", "draw", "digest", "all", "sort", "html"])]
    pub layout: bool,
    /// Print a BLAKE3 hash of the values of every tensor, and one of the whole checkpoint
    ///
    /// Equal values have equal hashes in every layout and format.
    #[arg(long)]
    pub digest: bool,
    #[command(flatten)]
    pub report: HtmlArgs,
    #[command(flatten)]
    pub map: MapArgs,
    #[command(flatten)]
    pub shapes: ShapeArgs,
    #[command(flatten)]
    pub source: SourceArgs,
}

/// The order of the tensors that `inspect` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SortKey {
    /// By the number of bytes, the largest first
    Size,
    /// By name, with numbers in names compared as numbers
    Name,
}

#[derive(Args, Debug)]
pub struct Reshard {
    /// Distribute the tensors over this mesh, such as dp=4,tp=2
    ///
    /// Dimensions have names, and ranks are in row-major order. Without placements, a tensor keeps its placements in SRC
    /// if the mesh has all dimension names of SRC; otherwise, it gets S(0) on a mesh of one dimension, and a mesh of
    /// several dimensions needs placements or a plan. [default: the mesh of SRC, if it has one]
    #[arg(long, value_name = "DIMS")]
    pub mesh: Vec<String>,
    /// List the ranks of the mesh, in row-major order of its cells
    ///
    /// [default: 0,1,2,...]
    #[arg(long, value_name = "RANKS", value_delimiter = ',', value_parser = rank, hide_short_help = true)]
    pub mesh_ranks: Vec<u32>,
    /// Place tensors by a list with one placement per mesh dimension: S(d), _S(d,sf) or R
    ///
    /// A negative d counts from the last dimension. PATTERN=LIST applies to the tensors that PATTERN matches, and the
    /// first match wins. A bare list applies to all other tensors, with R where it does not fit a tensor. PATTERN=plain
    /// writes plain tensors instead of DTensors. Repeatable.
    #[arg(long, value_name = "[PATTERN=]LIST")]
    pub placements: Vec<String>,
    /// Read mesh, placement rules, styles and flat units from a layout file (TOML or JSON)
    ///
    /// --mesh with the same dimension names replaces the mesh of the file, --placements rules come before the rules of
    /// the file, and a bare list replaces the `placements` of the file.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub layout: Option<PathBuf>,
    /// Shard modules by a parallelize plan, such as llama
    ///
    /// Plans are llama, mistral, qwen2, qwen3, mixtral, qwen2-moe, qwen3-moe, gpt-neox, gpt2, and the styles of a
    /// layout file. FSDP then shards over the other mesh dimensions, so `--mesh dp_shard=8,tp=8 --plan llama` needs no
    /// further options.
    #[arg(long, value_name = "NAME|FILE")]
    pub plan: Option<String>,
    /// Name the mesh dimension over which --plan shards modules
    ///
    /// [default: tp]
    #[arg(long, value_name = "DIM", hide_short_help = true)]
    pub tp: Option<String>,
    /// Name the mesh dimension over which FSDP shards dimension 0 of every parameter
    ///
    /// [default: fsdp, dp_shard or dp, if --plan is given]
    #[arg(long, value_name = "DIM", hide_short_help = true)]
    pub fsdp: Option<String>,
    /// Name the mesh dimension of replicas, as in HSDP
    ///
    /// [default: dp_replicate or replicate, if --plan or --fsdp is given]
    #[arg(long, value_name = "DIM", hide_short_help = true)]
    pub replicate: Option<String>,
    /// Name the mesh dimension of DistributedDataParallel (DDP), whose ranks hold copies
    ///
    /// DTensors are on the other mesh dimensions only. [default: ddp, if --plan is given]
    #[arg(long, value_name = "DIM", hide_short_help = true)]
    pub ddp: Option<String>,
    /// Choose how an uneven dimension is cut
    ///
    /// [default: as in SRC, else chunk]
    #[arg(long, value_name = "RULE", hide_short_help = true)]
    pub split: Option<SplitArg>,
    /// Copy the layout of another checkpoint
    ///
    /// Tensors of the same name get the mesh, the placements, the format and the file names of that checkpoint. The
    /// values of that checkpoint are ignored. --mesh with the same dimension names replaces the copied mesh, --placements
    /// rules replace the copied placements.
    #[arg(long, value_name = "CKPT")]
    pub like: Option<PathBuf>,
    /// Take everything that SRC lacks from this checkpoint
    ///
    /// DST is a copy of that checkpoint, in which the tensors and objects of SRC replace those of the same names.
    #[arg(long, value_name = "CKPT", hide_short_help = true)]
    pub fill_from: Option<PathBuf>,
    /// Choose the Python class of sharded tensors in rank files
    ///
    /// [default: auto]
    #[arg(long, value_name = "CLASS", hide_short_help = true)]
    pub tensor_class: Option<TensorClass>,
    #[command(flatten)]
    pub convert: ConvertArgs,
}

#[derive(Args, Debug)]
pub struct Unshard {
    /// Write one file
    ///
    /// This is the default.
    #[arg(long, hide_short_help = true)]
    pub rank0_only: bool,
    /// Write a file with all whole tensors for every rank of SRC
    #[arg(long, conflicts_with = "rank0_only")]
    pub all_ranks: bool,
    /// Write rank files in which only the parameters of these modules are whole on every rank (FSDP1 units; `.` is the
    /// root unit)
    ///
    /// All other tensors keep their layout. Repeatable.
    #[arg(long, value_name = "PATTERN", conflicts_with_all = ["rank0_only", "all_ranks"], hide_short_help = true)]
    pub unit: Vec<String>,
    /// Write gradients too: the subtree or series `grads`
    #[arg(long, hide_short_help = true)]
    pub with_grads: bool,
    #[command(flatten)]
    pub shards: ShardArgs,
    #[command(flatten)]
    pub convert: ConvertArgs,
}

#[derive(Args, Debug)]
pub struct Flatten {
    #[command(flatten)]
    pub flat: FlatArgs,
    #[command(flatten)]
    pub convert: ConvertArgs,
}

/// The configuration of FSDP1 in the job that will load the files.
#[derive(Args, Debug)]
#[command(next_help_heading = "Target layout")]
pub struct FlatArgs {
    /// Write files for this number of ranks
    ///
    /// [default: as in the flat layout]
    #[arg(long, value_name = "N", value_parser = number::<u32>)]
    pub world_size: Option<u32>,
    /// Make each module that a pattern matches an FSDP unit
    ///
    /// A pattern matches the module itself, not what is below it; all other modules form the root unit. Repeatable.
    #[arg(long, value_name = "PATTERN")]
    pub wrap: Vec<String>,
    /// Set use_orig_params of FSDP1
    ///
    /// [default: as in the flat layout, else false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub use_orig_params: Option<bool>,
    /// Set the sharding strategy of FSDP1
    ///
    /// [default: as in the flat layout, else full-shard]
    #[arg(long, value_name = "STRATEGY")]
    pub strategy: Option<Strategy>,
    /// Set the number of ranks that share one copy of the model under hybrid-shard
    #[arg(long, value_name = "N", value_parser = number::<u32>, hide_short_help = true)]
    pub shard_group_size: Option<u32>,
    /// Set MixedPrecision(param_dtype=...)
    ///
    /// With use_orig_params, this dtype decides how parameters are aligned. [default: the dtype of the parameters]
    #[arg(long, value_name = "DTYPE", hide_short_help = true)]
    pub forward_dtype: Option<String>,
    /// Treat float tensors that a pattern matches as buffers, not as parameters
    ///
    /// Repeatable.
    #[arg(long, value_name = "PATTERN", hide_short_help = true)]
    pub buffers: Vec<String>,
    /// Read the units to write from a layout file with [flat] or a flat_layout.json, even if SRC has other units
    #[arg(long, value_name = "FILE")]
    pub layout: Option<PathBuf>,
    /// Take the units from this checkpoint of the same model; if this checkpoint is not flat, take the order of parameters
    /// from its state dict, which only torch files keep
    ///
    /// The values of this checkpoint are ignored.
    #[arg(long, value_name = "CKPT", hide_short_help = true)]
    pub like: Option<PathBuf>,
}

/// `ShardingStrategy` of FSDP1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(clippy::enum_variant_names, reason = "the names are those of PyTorch")]
pub enum Strategy {
    /// Shard over all ranks
    ///
    /// SHARD_GRAD_OP writes the same files
    FullShard,
    /// Shard within groups of ranks, and replicate across them
    HybridShard,
    /// Keep whole parameters on every rank
    NoShard,
}

/// The options that divide tensors among safetensors files.
#[derive(Args, Debug)]
pub struct ShardArgs {
    /// Divide tensors among files as in this checkpoint of the same model
    ///
    /// This applies to safetensors files in a folder. If SRC is FSDP1, this checkpoint also gives the shapes and the order
    /// of parameters that SRC lacks. The values of this checkpoint are ignored.
    #[arg(long, value_name = "CKPT", hide_short_help = true)]
    pub like: Option<PathBuf>,
    /// Limit the size of a safetensors file in a folder: 5GB is 5e9 bytes, 5GiB is 5 * 2^30
    ///
    /// A tensor that is larger gets a file of its own.
    #[arg(long, value_name = "SIZE", default_value = "5GB", hide_short_help = true)]
    pub max_shard_size: Quantity,
}

#[derive(Args, Debug)]
pub struct Consolidate {
    /// Write every tensor under its whole dotted name
    ///
    /// [default: the model, without its prefix]
    #[arg(long, conflicts_with = "root")]
    pub everything: bool,
    /// Copy config and tokenizer files from this folder; `none` copies no files
    ///
    /// [default: SRC/huggingface, then SRC]
    #[arg(long, value_name = "DIR|none")]
    pub assets: Option<PathBuf>,
    #[command(flatten)]
    pub shards: ShardArgs,
    #[command(flatten)]
    pub convert: ConvertArgs,
}

#[derive(Args, Debug)]
pub struct Verify {
    /// Checkpoint to check
    pub src: PathBuf,
    /// Checkpoint to compare with, in any layout and format, or the saved output of `inspect --digest --json`
    ///
    /// Options that select or change names, and --dtype, apply to SRC before it is compared.
    pub other: Option<PathBuf>,
    /// Compare only names that both checkpoints have
    #[arg(long, requires = "other")]
    pub common: bool,
    #[command(flatten)]
    pub report: HtmlArgs,
    #[command(flatten)]
    pub select: SelectArgs,
    #[command(flatten)]
    pub shapes: ShapeArgs,
    #[command(flatten)]
    pub source: SourceArgs,
}

#[derive(Args, Debug)]
pub struct Maps {
    /// Checkpoint that the maps are compared with, a model family whose map file is printed, or a map file that is checked
    ///
    /// A map file has the suffix .toml or .json. Without this argument, all families are listed with their conventions. Give a folder
    /// with the name of a family as ./NAME.
    #[arg(value_name = "SRC|FAMILY|FILE")]
    pub subject: Option<PathBuf>,
    /// Checkpoint that this family or map file is compared with
    pub src: Option<PathBuf>,
    #[command(flatten)]
    pub source: SourceArgs,
}

#[derive(Args, Debug)]
pub struct Completions {
    /// Shell that reads the completions
    pub shell: clap_complete::Shell,
}

#[derive(Args, Debug)]
pub struct Man {
    /// Folder to write to
    ///
    /// The folder is created if it does not exist.
    pub dir: PathBuf,
}

/// The Python class of sharded tensors in rank files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TensorClass {
    /// Use the class in SRC; DTensor if SRC has no sharded tensors
    Auto,
    /// Use DTensor, the class of FSDP2 and tensor parallelism
    #[value(name = "dtensor")]
    DTensor,
    /// Use ShardedTensor, the class of FSDP1
    ShardedTensor,
    /// Use plain tensors, each of which is the shard of its rank
    Local,
}

/// Returns the command line for clap. The help of `--to` lists only the formats that the verb writes, and `-h` of a
/// verb ends with a pointer to `--help`.
pub fn command() -> clap::Command {
    let by_suffix = |rest: &str| {
        let by_suffix =
            Format::ALL.iter().map(|format| format.entry().suffixes).filter(|suffixes| !suffixes.is_empty());
        let groups: Vec<String> = by_suffix.map(|suffixes| format!(".{}", suffixes.join(" ."))).collect();
        format!("by the suffix of DST ({}), else {rest}", groups.join("; "))
    };
    let defaults = [
        ("reshard", String::from("the format of SRC; dcp if SRC is not a folder of shards")),
        ("unshard", by_suffix("torch; with --all-ranks or --unit: rank files")),
        ("flatten", String::from("fsdp-flat")),
        ("consolidate", by_suffix("safetensors")),
    ];
    let command = defaults.into_iter().fold(Cli::command(), |command, (verb, default)| {
        let written: Vec<&Format> =
            Format::ALL.iter().filter(|format| format.writing_verbs().contains(&verb)).collect();
        let help = "Choose the format of DST";
        let long_help = format!("{help}\n\n[default: {default}]");
        let to = |arg: clap::Arg| arg.help(help).long_help(long_help).value_parser(values::formats(&written));
        command.mut_subcommand(verb, |verb| verb.mut_arg("to", to))
    });
    command.mut_subcommands(|verb| {
        let Some(examples) = verb.get_after_long_help() else { return verb };
        let pointer = format!("{examples}\n\n`dtshard {} --help` describes every option.", verb.get_name());
        verb.after_help(pointer)
    })
}

/// Replaces underscores in long options by hyphens: `--max_shard_size` becomes `--max-shard-size`.
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
    use super::*;

    #[test]
    fn the_declaration_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn underscores_in_long_options_are_hyphens() {
        let arguments = ["x", "--max_shard_size=5_GB", "--a_b", "my_file", "--", "--c_d"].map(OsString::from);
        let expected = ["x", "--max-shard-size=5_GB", "--a-b", "my_file", "--", "--c_d"].map(OsString::from);
        assert_eq!(normalise_long_options(arguments.into_iter()), expected);
    }
}
