//! The command line as declared to clap: structs only, so that help, man pages and completions come from one place.

#![allow(rustdoc::broken_intra_doc_links, reason = "help texts have brackets that are no links")]

mod elsewhere;
mod output;
mod source;
mod values;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

pub use elsewhere::parse;
pub use output::{Backend, ConvertArgs, ExchangeArgs, ProgressChoice, SourceSight, TalkArgs};
pub use source::{OnConflict, SelectArgs, ShapeArgs, SourceArgs, Tied};
pub use values::SplitArg;
use values::rank;

use dtshard::Format;
use dtshard::options::Quantity;

/// Convert sharded PyTorch checkpoints between layouts, without Python.
#[derive(Debug, Parser)]
// An option that is given twice counts as given last, so that aliases with options can be corrected.
#[command(name = "dtshard", version, max_term_width = 120, after_help = EXAMPLES, args_override_self = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub talk: TalkArgs,
}

/// What the man page says beyond the first line. In `--help` it would stand between the reader and the verbs.
pub const DESCRIPTION: &str = "\
Convert sharded PyTorch checkpoints between layouts, without Python.

Reads DCP directories, per-rank DTensor files, torch.save files and safetensors, found out by itself. Memory stays \
bounded whatever the size of the model, nothing stands at DST until it is complete, and every element is proven to be \
there exactly once.";

const EXAMPLES: &str = "\
Examples:
  dtshard inspect checkpoints/step-1000
  dtshard consolidate checkpoints/step-1000 out
  dtshard reshard actor actor16 --mesh fsdp=16
  dtshard verify checkpoints/step-1000 out --root model

`dtshard VERB --help` tells the options of a verb.";

const INSPECT_EXAMPLES: &str = "\
Examples:
  dtshard inspect checkpoints/step-1000
  dtshard inspect checkpoints/step-1000 --brief
  dtshard inspect checkpoints/step-1000 --tensor model.layers.0.attention.wq.weight --draw
  dtshard inspect checkpoints/step-1000 --tensor '**.wq' --digest
  dtshard inspect checkpoints/step-1000 --json | jq '.tensors | keys'
  dtshard inspect actor --layout > actor.toml";

const RESHARD_EXAMPLES: &str = "\
Examples:
  dtshard reshard actor actor16 --mesh fsdp=16
  dtshard reshard step-1000 step-1000-tp --mesh dp=4,tp=2 --placements 'S(0),S(1)'
  dtshard reshard step-1000 step-1000-tp --mesh dp=4,tp=2 --placements '**.wo=S(0),S(1)' --placements 'S(0),S(0)'
  dtshard reshard step-1000 step-1000-tp --mesh dp_shard=4,tp=2 --plan llama
  dtshard reshard model.pt sharded --to dcp --mesh dp=8 --dry-run
  dtshard reshard actor actor-edited --layout actor.toml
  dtshard reshard edited.safetensors actor-edited --like actor --fill-from actor";

const UNSHARD_EXAMPLES: &str = "\
Examples:
  dtshard unshard checkpoints/step-1000 step-1000.pt
  dtshard unshard actor whole.safetensors
  dtshard unshard actor whole --to safetensors --max-shard-size 2GB";

const FLATTEN_EXAMPLES: &str = "\
Examples:
  dtshard flatten flat8 flat6 --world-size 6
  dtshard flatten model.pt flat --world-size 8 --wrap 'layers.*' --use-orig-params
  dtshard flatten step-1000 flat --world-size 16 --flat-layout flat_layout.json
  dtshard flatten step-1000 flat --world-size 16 --strategy hybrid-shard --shard-group-size 8 --like old-flat";

const CONSOLIDATE_EXAMPLES: &str = "\
Examples:
  dtshard consolidate checkpoints/step-1000 out
  dtshard consolidate actor out --assets path/to/base-model
  dtshard consolidate step-1000 ema.safetensors --root ema
  dtshard consolidate step-1000 pytorch_model.bin --verify";

const VERIFY_EXAMPLES: &str = "\
Examples:
  dtshard verify checkpoints/step-1000
  dtshard verify actor actor16
  dtshard verify checkpoints/step-1000 out --root model
  dtshard verify a b --json | jq .different

Exit status: 0 sound, and the same; 1 a difference or damage; 2 could not run.";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  dtshard completions bash > ~/.local/share/bash-completion/completions/dtshard
  dtshard completions fish > ~/.config/fish/completions/dtshard.fish
  dtshard completions zsh > \"${fpath[1]}/_dtshard\"";

const MAN_EXAMPLES: &str = "\
Examples:
  dtshard man ~/.local/share/man/man1";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what a checkpoint holds and how it is laid out
    #[command(after_help = INSPECT_EXAMPLES)]
    Inspect(Inspect),
    /// Write everything for another mesh, other placements or another format
    #[command(alias = "convert", after_help = RESHARD_EXAMPLES)]
    Reshard(Reshard),
    /// Write every tensor whole, nested state dict kept
    #[command(after_help = UNSHARD_EXAMPLES)]
    Unshard(Unshard),
    /// Write FSDP1 flat-parameter shards
    #[command(after_help = FLATTEN_EXAMPLES)]
    Flatten(Flatten),
    /// Write the model, merged, to ship
    #[command(alias = "merge", after_help = CONSOLIDATE_EXAMPLES)]
    Consolidate(Consolidate),
    /// Check that a checkpoint is sound, or that two hold the same values
    #[command(alias = "diff", after_help = VERIFY_EXAMPLES)]
    Verify(Verify),
    /// Print the completions of a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions(Completions),
    /// Write the man pages
    #[command(after_help = MAN_EXAMPLES)]
    Man(Man),
}

impl Command {
    /// What the verbs that write share; `None` for the others.
    #[must_use]
    pub fn convert(&self) -> Option<&ConvertArgs> {
        match self {
            Self::Reshard(args) => Some(&args.convert),
            Self::Unshard(args) => Some(&args.convert),
            Self::Flatten(args) => Some(&args.convert),
            Self::Consolidate(args) => Some(&args.convert),
            Self::Inspect(_) | Self::Verify(_) | Self::Completions(_) | Self::Man(_) => None,
        }
    }
}

#[derive(Args, Debug)]
pub struct Inspect {
    /// The checkpoint: a folder or a file
    pub src: PathBuf,
    /// Only the summary; with --tensor or --json, everything but the chunks
    #[arg(long)]
    pub brief: bool,
    /// Only tensors of this name or pattern, with their chunks; repeatable
    #[arg(long, value_name = "FQN")]
    pub tensor: Vec<String>,
    /// Draw which rank holds which part of each --tensor
    #[arg(long, requires = "tensor")]
    pub draw: bool,
    /// Print the layout as a layout file: TOML, or JSON with --json
    #[arg(long, conflicts_with_all = ["brief", "tensor", "draw", "digest"])]
    pub layout: bool,
    /// Hash the values of every tensor, and all of them together: BLAKE3, the same in any layout and format
    #[arg(long)]
    pub digest: bool,
    #[command(flatten)]
    pub shapes: ShapeArgs,
    #[command(flatten)]
    pub source: SourceArgs,
}

#[derive(Args, Debug)]
pub struct Reshard {
    /// Target mesh: named dims, row-major ranks (dp=4,tp=2). Alone: the placements of SRC where its mesh dims have the
    /// same names, else S(0) on a mesh of one dim [default: the mesh of SRC, where it has one]
    #[arg(long, value_name = "DIMS")]
    pub mesh: Vec<String>,
    /// Ranks of the mesh in row-major order of its cells [default: 0,1,2,...]
    #[arg(long, value_name = "RANKS", value_delimiter = ',', value_parser = rank)]
    pub mesh_ranks: Vec<u32>,
    /// Placements, one a mesh dim: S(d), _S(d,sf) or R; negative d count from the end. A bare list is the fallback for
    /// every tensor, and R where it does not fit; PATTERN=LIST is a rule, and the first one that matches wins;
    /// PATTERN=plain leaves tensors whole, and no DTensors
    #[arg(long, value_name = "[PATTERN=]LIST")]
    pub placements: Vec<String>,
    /// A layout file (TOML or JSON): mesh, rules, styles, flat units. --mesh with the same dim names takes the place of
    /// its mesh, --placements rules come before its own, and a bare list takes the place of its fallback
    #[arg(long, value_name = "FILE")]
    pub layout: Option<PathBuf>,
    /// Cut modules as a parallelize plan says: llama, mistral, qwen2, qwen3, mixtral, qwen2-moe, qwen3-moe, gpt-neox, gpt2,
    /// or the styles of a layout file. FSDP comes on top, over what else the mesh has: `--mesh dp_shard=8,tp=8 --plan
    /// llama` is complete
    #[arg(long, value_name = "NAME|FILE")]
    pub plan: Option<String>,
    /// Mesh dim over which --plan cuts modules [default: tp]
    #[arg(long, value_name = "DIM")]
    pub tp: Option<String>,
    /// Mesh dim over which FSDP cuts dim 0 of what that leaves [default: with --plan fsdp, dp_shard or dp]
    #[arg(long, value_name = "DIM")]
    pub fsdp: Option<String>,
    /// Mesh dim of copies, as in HSDP [default: with --plan or --fsdp dp_replicate or replicate]
    #[arg(long, value_name = "DIM")]
    pub replicate: Option<String>,
    /// How a dim is cut that does not divide evenly: as torch.chunk, the first n mod k ranks one more, or as the region
    /// mappings of makani [default: as in SRC, else chunk]
    #[arg(long, value_name = "RULE")]
    pub split: Option<SplitArg>,
    /// Lay tensors out as those of the same names in this checkpoint: its mesh, placements, format and names of files;
    /// its values are ignored. --mesh with the same dim names takes the place of its mesh, --placements rules that of its
    /// placements
    #[arg(long, value_name = "CKPT")]
    pub like: Option<PathBuf>,
    /// Take everything that SRC lacks from this checkpoint. DST is that one, with the tensors and objects of SRC in
    /// place of its own
    #[arg(long, value_name = "CKPT")]
    pub fill_from: Option<PathBuf>,
    /// Python class of sharded tensors in rank files [default: auto, as in SRC; DTensor where SRC has none]
    #[arg(long, value_name = "CLASS")]
    pub tensor_class: Option<TensorClass>,
    #[command(flatten)]
    pub convert: ConvertArgs,
}

#[derive(Args, Debug)]
pub struct Unshard {
    /// One file [default]
    #[arg(long)]
    pub rank0_only: bool,
    /// A file for every rank of SRC, each of them whole
    #[arg(long, conflicts_with = "rank0_only")]
    pub all_ranks: bool,
    /// Only these modules (FSDP1 units; `.` is the root unit): rank files with their parameters whole on every rank, the
    /// rest as it is; repeatable
    #[arg(long, value_name = "PATTERN", conflicts_with_all = ["rank0_only", "all_ranks"])]
    pub unit: Vec<String>,
    /// Gradients, too: a subtree or series `grads`
    #[arg(long)]
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

/// What FSDP1 will be told when it loads.
#[derive(Args, Debug)]
#[command(next_help_heading = "Target layout")]
pub struct FlatArgs {
    /// Ranks that will load the files [default: as in the flat layout]
    #[arg(long, value_name = "N")]
    pub world_size: Option<u32>,
    /// A module that is a unit of its own (the module itself, not what is below it); the rest is the root unit;
    /// repeatable
    #[arg(long, value_name = "PATTERN")]
    pub wrap: Vec<String>,
    /// Whether FSDP is told use_orig_params [default: as in the flat layout, else false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub use_orig_params: Option<bool>,
    /// How ranks share [default: as in the flat layout, else full-shard]
    #[arg(long, value_name = "STRATEGY")]
    pub strategy: Option<Strategy>,
    /// Ranks that share one copy, under hybrid-shard
    #[arg(long, value_name = "N")]
    pub shard_group_size: Option<u32>,
    /// MixedPrecision(param_dtype=...), which parameters are aligned for with use_orig_params [default: their own]
    #[arg(long, value_name = "DTYPE")]
    pub forward_dtype: Option<String>,
    /// Tensors of floats that are buffers, not parameters; repeatable
    #[arg(long, value_name = "PATTERN")]
    pub buffers: Vec<String>,
    /// A layout file with [flat], or a flat_layout.json: the units to write, also where SRC has others
    #[arg(long, value_name = "FILE")]
    pub layout: Option<PathBuf>,
    /// A checkpoint of the same model, whose values are ignored: its units where it is flat, else the order of its state
    /// dict, which torch files keep
    #[arg(long, value_name = "CKPT")]
    pub like: Option<PathBuf>,
}

/// What FSDP1 calls its `ShardingStrategy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(clippy::enum_variant_names, reason = "the names are those of PyTorch")]
pub enum Strategy {
    // SHARD_GRAD_OP has the same files.
    FullShard,
    HybridShard,
    NoShard,
}

/// Which tensors are in which safetensors file.
#[derive(Args, Debug)]
pub struct ShardArgs {
    /// A checkpoint of the same model, whose values are ignored: where it is a folder of safetensors files, every tensor
    /// goes into the file that it is in there; where SRC is FSDP1, the shapes and the order that SRC lacks
    #[arg(long, value_name = "CKPT")]
    pub like: Option<PathBuf>,
    /// Largest safetensors file in a folder (5GB = 5e9, 5GiB = 5 * 2^30); a larger tensor gets its own
    #[arg(long, value_name = "SIZE", default_value = "5GB")]
    pub max_shard_size: Quantity,
}

#[derive(Args, Debug)]
pub struct Consolidate {
    /// Take every tensor, under its whole dotted name [default: the model, its prefix cut]
    #[arg(long, conflicts_with = "root")]
    pub everything: bool,
    /// Folder whose config and tokenizer files are copied, or none [default: SRC/huggingface, then SRC]
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
    /// One that should hold the same values, in whatever layout and format, or the saved output of `inspect --digest
    /// --json`. Name options and --dtype apply to SRC
    pub other: Option<PathBuf>,
    /// Compare only names that both have
    #[arg(long, requires = "other")]
    pub common: bool,
    #[command(flatten)]
    pub select: SelectArgs,
    #[command(flatten)]
    pub shapes: ShapeArgs,
    #[command(flatten)]
    pub source: SourceArgs,
}

#[derive(Args, Debug)]
pub struct Completions {
    /// The shell that will read them
    pub shell: clap_complete::Shell,
}

#[derive(Args, Debug)]
pub struct Man {
    /// The folder to write to, made where it is missing
    pub dir: PathBuf,
}

/// How rank files hold tensors that ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TensorClass {
    Auto,
    #[value(name = "dtensor")]
    DTensor,
    ShardedTensor,
    // Plain tensors: of each the part that the rank holds.
    Local,
}

/// The command line, with the formats that each verb writes as the values of its `--to`.
#[must_use]
pub fn command() -> clap::Command {
    let by_suffix = |rest: &str| {
        let by_suffix =
            Format::ALL.iter().map(|format| format.entry().suffixes).filter(|suffixes| !suffixes.is_empty());
        let groups: Vec<String> = by_suffix.map(|suffixes| format!(".{}", suffixes.join(" ."))).collect();
        format!("Format of DST [default: by its suffix ({}), else {rest}]", groups.join("; "))
    };
    let verbs = [
        ("reshard", String::from("Format of DST [default: that of SRC; dcp where SRC is no folder of shards]")),
        ("unshard", by_suffix("torch; with --all-ranks or --unit rank files, as in SRC")),
        ("flatten", String::from("Format of DST [default: fsdp-flat]")),
        ("consolidate", by_suffix("safetensors")),
    ];
    verbs.into_iter().fold(Cli::command(), |command, (verb, help)| {
        let written: Vec<&Format> = Format::ALL.iter().filter(|format| format.writers().contains(&verb)).collect();
        let to = |arg: clap::Arg| arg.help(help).value_parser(values::formats(&written));
        command.mut_subcommand(verb, |verb| verb.mut_arg("to", to))
    })
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
