//! Options of the source, and of the names and values that are taken from it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::values::{IoArg, SplitArg, any_format, number, rank};
use crate::Format;
use crate::options::Quantity;

/// The options of the source.
#[derive(Args, Debug)]
#[command(next_help_heading = "Source")]
pub struct SourceArgs {
    /// Set the format of SRC
    ///
    /// [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = any_format(), hide_short_help = true)]
    pub from: Option<Format>,
    /// Read these series of rank files: names separated by commas, or all
    ///
    /// [default: model for unshard and consolidate, else all]
    #[arg(long, value_name = "A,B|all", value_delimiter = ',', hide_short_help = true)]
    pub series: Vec<String>,
    /// Choose how files of SRC are read
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = "Running", hide_short_help = true)]
    pub io: IoArg,
    /// Set the number of worker threads
    ///
    /// [default: one per core; in Slurm, one per core of the task; at least 4 if data is synced to disk]
    #[arg(long, value_name = "N", value_parser = number::<usize>, help_heading = "Running", hide_short_help = true)]
    pub threads: Option<usize>,
    /// Limit anonymous memory
    ///
    /// Page cache does not count.
    #[arg(long, value_name = "SIZE", default_value = "512MB", help_heading = "Running")]
    pub max_memory: Quantity,
    /// Accept missing rank files if replicas of other ranks hold all their tensors
    #[arg(long, hide_short_help = true)]
    pub allow_missing: bool,
    /// Leave out objects whose Python class is not known to be plain data
    ///
    /// [default: they are an error]
    #[arg(long, hide_short_help = true)]
    pub drop_unknown: bool,
    /// Choose the weights of a SRC that has each parameter twice, as DeepSpeed's checkpoints do: the master weights that
    /// the optimizer updates, or those of the module, which are rounded to the dtype of the model
    ///
    /// [default: master, if SRC has master weights]
    #[arg(long, value_name = "WHICH", hide_short_help = true)]
    pub weights: Option<WeightsArg>,
    /// Read units, order and shapes of FSDP1 flat parameters from this file
    ///
    /// [default: flat_layout.json in SRC]
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub flat_layout: Option<PathBuf>,
    #[command(flatten)]
    pub layout: SourceLayoutArgs,
}

/// Declared layout of plain tensors in rank files, which the files do not record.
#[derive(Args, Debug)]
#[command(next_help_heading = "Source")]
pub struct SourceLayoutArgs {
    /// Declare the mesh of the ranks that saved SRC, if its plain tensors are shards: named dimensions in row-major
    /// order of ranks
    ///
    /// [default: the mesh of the DTensors of SRC]
    #[arg(long, value_name = "DIMS", hide_short_help = true)]
    pub src_mesh: Option<String>,
    /// List the ranks of --src-mesh, in row-major order of its cells
    ///
    /// [default: 0,1,2,...]
    #[arg(long, value_name = "RANKS", value_delimiter = ',', value_parser = rank, hide_short_help = true)]
    pub src_mesh_ranks: Vec<u32>,
    /// Declare the placements of plain tensors of SRC, in the notation of --placements
    ///
    /// Repeatable. [default: every rank has the whole tensor]
    #[arg(long, value_name = "[PATTERN=]LIST", hide_short_help = true)]
    pub src_placements: Vec<String>,
    /// Declare how uneven dimensions of plain tensors of SRC are cut
    ///
    /// [default: chunk]
    #[arg(long, value_name = "RULE", hide_short_help = true)]
    pub src_split: Option<SplitArg>,
    /// Declare the placements of model parameters of SRC by a parallelize plan, as --plan does for DST: llama, mistral,
    /// qwen2, ..., or a file with styles
    #[arg(long, value_name = "NAME|FILE", hide_short_help = true)]
    pub src_plan: Option<String>,
    /// Declare the layout of plain tensors of SRC by a layout file
    ///
    /// --src-mesh replaces the mesh of the file, --src-placements rules come before the rules of the file, and a bare
    /// list replaces the `placements` of the file.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub src_layout: Option<PathBuf>,
    /// Declare the mesh dimensions along which ranks store partial values of plain tensors, such as gradients of each
    /// rank, and how they are reduced: sum, avg, max, min or product
    ///
    /// Repeatable. [default: sum]
    #[arg(long, value_name = "DIMS[=OP]", hide_short_help = true)]
    pub reduce: Vec<String>,
}

/// Source of the shapes that FSDP1 files lack.
#[derive(Args, Debug)]
#[command(next_help_heading = "Source")]
pub struct ShapeArgs {
    /// Take the shapes that an FSDP1 SRC lacks from this checkpoint of the same model
    ///
    /// If this checkpoint is a torch file, it gives the order of parameters, too. The values of this checkpoint are
    /// ignored.
    #[arg(long, value_name = "CKPT", hide_short_help = true)]
    pub like: Option<PathBuf>,
}

/// Selection, names and dtypes of what is taken from SRC.
#[derive(Args, Debug)]
#[command(next_help_heading = "Names and values")]
pub struct SelectArgs {
    /// Take only names that a pattern matches, and the optimizer state of matching parameters
    ///
    /// In a pattern * stays within a component, ** crosses dots, {a,b} lists alternatives. A pattern that matches a
    /// module takes everything below it. Repeatable.
    #[arg(long, value_name = "PATTERN")]
    pub include: Vec<String>,
    /// Leave out names that a pattern matches, and the optimizer state of matching parameters
    ///
    /// Repeatable.
    #[arg(long, value_name = "PATTERN")]
    pub exclude: Vec<String>,
    /// Read further --include patterns from a file, one per line
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub include_from: Option<PathBuf>,
    /// Take this subtree of the state dict, under names relative to it
    #[arg(long, value_name = "PATH")]
    pub root: Option<String>,
    /// Remove this text from the front of names that begin with it
    ///
    /// Repeatable; applied in the order given.
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub strip_prefix: Vec<String>,
    /// Replace every match of a regular expression in names
    ///
    /// \1 and ${1} are groups of the expression. Repeatable; applied in the order given.
    #[arg(long, value_name = "REGEX=REPL")]
    pub rename: Vec<String>,
    /// Read further --rename rules from a file, one per line
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub rename_file: Option<PathBuf>,
    /// Put this text in front of every name, after the renames
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub add_prefix: Option<String>,
    /// Put everything into nested dicts of this dotted path
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    pub nest: Option<String>,
    /// Keep wrapper prefixes in names (_orig_mod., _fsdp_wrapped_module., _checkpoint_wrapped_module.)
    ///
    /// reshard always writes these prefixes; in reshard, this option makes patterns match names with these prefixes.
    #[arg(long, hide_short_help = true)]
    pub keep_names: bool,
    /// Cast floating-point tensors, such as to bf16
    ///
    /// DTYPE casts all f32, f16 and bf16 tensors of one or more dimensions outside the optimizer state; PATTERN=DTYPE
    /// casts the tensors that PATTERN matches, and the first match wins. Repeatable. [default: no cast]
    #[arg(long, value_name = "[PATTERN=]DTYPE")]
    pub dtype: Vec<String>,
    #[command(flatten)]
    pub map: MapArgs,
}

/// Conversion to another convention of names and contents.
#[derive(Args, Debug)]
#[command(next_help_heading = "Names and values")]
pub struct MapArgs {
    /// Change names and contents to another convention, such as llama:hf
    ///
    /// MAP is a model family (`dtshard maps` lists them), a map file, or auto; TO is the side of the map that DST gets. The
    /// side of SRC is found by its names; MAP:FROM:TO chooses it. Optimizer state follows its parameters. --include and
    /// --exclude match names of SRC, all other options match the new names.
    #[arg(long, value_name = "MAP[:FROM][:TO]")]
    pub map: Option<String>,
    /// Decode quantised weights (FP8 with the scales of blocks, MXFP4) to this dtype
    ///
    /// The weights are decoded before --map. The config.json of DST has no quantization_config.
    #[arg(long, value_name = "DTYPE", hide_short_help = true)]
    pub dequantize: Option<DequantizedDtype>,
    /// Read the sizes that --map and --dequantize need from this config.json or params.json
    ///
    /// [default: the file beside SRC]
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub config: Option<PathBuf>,
    /// Give the size of an axis of the map, such as h=32
    ///
    /// Repeatable.
    #[arg(long, value_name = "AXIS=N", requires = "map", hide_short_help = true)]
    pub set: Vec<String>,
    /// Choose what happens to optimizer state that does not fit the map
    ///
    /// [default: an error]
    #[arg(long, value_name = "CHOICE", requires = "map", hide_short_help = true)]
    pub map_state: Option<MapState>,
}

/// The dtype of weights that are dequantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DequantizedDtype {
    Bf16,
    F32,
}

/// The weights that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WeightsArg {
    Master,
    Module,
}

/// The treatment of optimizer state that a map cannot convert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MapState {
    /// Leave the state out
    Drop,
}

/// The options for checks that are made before anything is written.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Checks")]
pub struct CheckArgs {
    /// Choose what is written if ranks store different values of a plain tensor or object
    ///
    /// [default: an error]
    #[arg(long, value_name = "CHOICE", hide_short_help = true)]
    pub on_conflict: Option<OnConflict>,
    /// Compare replicas of DTensors too
    ///
    /// Replicas of plain tensors are always compared.
    #[arg(long, hide_short_help = true)]
    pub check_replicas: bool,
    /// Check every stored checksum before anything is written
    ///
    /// [default: check the checksums of records that are copied whole]
    #[arg(long, hide_short_help = true)]
    pub check_crc: bool,
}

/// The value that is written if ranks store different values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnConflict {
    /// Write the value of the lowest rank
    Rank0,
    /// Write the values of all ranks: a rank file has the value of its rank, other formats have a dict with the keys
    /// rank_0, rank_1 and so on
    PerRank,
    /// Write no value
    Drop,
}

/// The names under which a tensor with several names is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Tied {
    /// Write the tensor under every name
    #[default]
    Keep,
    /// Write the tensor under its first name, and record the other names (safetensors)
    Drop,
    /// Write the tensor under every name; if the config.json of SRC has tie_word_embeddings, write it also under the
    /// name that SRC leaves out
    Write,
}
