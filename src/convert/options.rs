//! Options of a conversion as plain values: the library's own form of what a caller asks for.
//!
//! A value that has a textual form (a mesh, a pattern, placements, a rename) stands here as text, and is parsed by the
//! step that uses it, so that its error names the option.

use std::path::PathBuf;

use crate::format::Format;
use crate::layout::Split;
use crate::storage::IoMode;

/// Default of [`SourceOptions::max_memory`], in bytes.
pub const DEFAULT_MEMORY: u64 = 512_000_000;

/// Default of [`ShardOptions::max_shard_size`], in bytes.
pub const DEFAULT_SHARD_SIZE: u64 = 5_000_000_000;

/// How a source is read, and with what resources.
#[derive(Clone, Debug)]
pub struct SourceOptions {
    /// Format; detected if `None`.
    pub from: Option<Format>,
    /// Series of rank files to read: names, or `all`; the default of the conversion if empty.
    pub series: Vec<String>,
    /// How file contents are read; chosen by file system if `None`.
    pub io: Option<IoMode>,
    /// Worker threads; one a core if `None`.
    pub threads: Option<usize>,
    /// Limit of anonymous memory in bytes, page cache apart.
    pub max_memory: u64,
    /// Accepts missing rank files if replicas of other ranks hold all that was in them.
    pub allow_missing: bool,
    /// Leaves out objects whose Python class is not known to be plain data.
    pub drop_unknown: bool,
    /// Flat layout file of FSDP1 flat parameters.
    pub flat_layout: Option<PathBuf>,
    /// Declared layout of plain tensors in rank files.
    pub layout: SourceLayoutOptions,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self {
            from: None,
            series: Vec::new(),
            io: None,
            threads: None,
            max_memory: DEFAULT_MEMORY,
            allow_missing: false,
            drop_unknown: false,
            flat_layout: None,
            layout: SourceLayoutOptions::default(),
        }
    }
}

/// Sharding of plain tensors in rank files, declared by the caller because the files do not record it.
#[derive(Clone, Debug, Default)]
pub struct SourceLayoutOptions {
    /// Mesh of the ranks that saved the source: `dp=4,tp=2`.
    pub src_mesh: Option<String>,
    /// Ranks of that mesh in row-major order of its cells.
    pub src_mesh_ranks: Vec<u32>,
    /// Placements: a list for every tensor, or `PATTERN=LIST`.
    pub src_placements: Vec<String>,
    /// How an uneven dimension is cut.
    pub src_split: Option<Split>,
    /// Parallelize plan: a built-in name or a layout file.
    pub src_plan: Option<String>,
    /// Layout file.
    pub src_layout: Option<PathBuf>,
    /// Mesh dimensions along which ranks hold partial values: `dp,cp=avg`.
    pub reduce: Vec<String>,
}

/// Which names of the source are taken, under which names and in which dtypes.
#[derive(Clone, Debug, Default)]
pub struct SelectOptions {
    /// Patterns of names to take.
    pub include: Vec<String>,
    /// Patterns of names to leave out.
    pub exclude: Vec<String>,
    /// File of further patterns to take, one a line.
    pub include_from: Option<PathBuf>,
    /// Subtree of the state dict to take, under names relative to it.
    pub root: Option<String>,
    /// Prefixes to cut from names.
    pub strip_prefix: Vec<String>,
    /// Renames: `REGEX=REPLACEMENT`.
    pub rename: Vec<String>,
    /// File of further renames, one a line.
    pub rename_file: Option<PathBuf>,
    /// Text before every name, added after the renames.
    pub add_prefix: Option<String>,
    /// Dotted path of the nested dicts that everything goes into.
    pub nest: Option<String>,
    /// Keeps wrapper prefixes in names.
    pub keep_names: bool,
    /// Casts: `DTYPE` or `PATTERN=DTYPE`.
    pub dtype: Vec<String>,
}

/// Checks before anything is written, and what follows from them.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// What is written if ranks store different values; an error if `None`.
    pub on_conflict: Option<OnConflict>,
    /// Compares replicas of DTensors, too.
    pub check_replicas: bool,
    /// Checks every stored checksum first.
    pub check_crc: bool,
}

/// What is written if ranks store different values of one plain tensor or object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnConflict {
    /// The value of the lowest rank.
    Rank0,
    /// Every rank's value: in rank files each its own, in other formats a dict of `rank_0`, `rank_1`, ...
    PerRank,
    /// Nothing.
    Drop,
}

/// How several names of one tensor are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tied {
    /// The tensor is written under every name.
    #[default]
    Keep,
    /// The tensor is written under its first name; the others are recorded in the metadata of safetensors.
    Drop,
    /// The tensor is written under every name, and under one that the source leaves out as well.
    Write,
}

/// Format of the destination.
#[derive(Clone, Debug, Default)]
pub struct DestinationOptions {
    /// Format to write; the default of the conversion if `None`.
    pub to: Option<Format>,
    /// PyTorch version that loads DTensors in rank files.
    pub torch_version: Option<String>,
}

/// How a plan is executed. The default refuses an existing destination, and waits until all data is on disk.
#[derive(Clone, Debug)]
pub struct ExecuteOptions {
    /// Replaces an existing checkpoint.
    pub overwrite: bool,
    /// Continues what an interrupted run has done, and keeps what is done if this one is interrupted.
    pub resume: bool,
    /// Discards what an interrupted run has left.
    pub restart: bool,
    /// Waits until all data is on disk. Always true for a run of several processes.
    pub sync: bool,
    /// Reads everything back and compares it before it is published.
    pub verify: bool,
}

impl Default for ExecuteOptions {
    fn default() -> Self {
        Self { overwrite: false, resume: false, restart: false, sync: true, verify: false }
    }
}

/// How the processes of one run exchange what they read.
#[derive(Clone, Debug, Default)]
pub struct ExchangeOptions {
    /// What each process sees of the source.
    pub source: SourceVisibility,
    /// How bytes go between processes.
    pub backend: Backend,
    /// Lets NCCL reduce partial values, in an order of its own.
    pub fast_reduce: bool,
    /// Bytes that each process reads, sends and receives at a time.
    pub bucket_size: Option<u64>,
}

impl OnConflict {
    /// Returns the word of the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Rank0 => "rank0",
            Self::PerRank => "per-rank",
            Self::Drop => "drop",
        }
    }
}

impl SourceVisibility {
    /// Returns the word of the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::PerRank => "per-rank",
        }
    }
}

impl Backend {
    /// Returns the word of the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Nccl => "nccl",
            Self::Mpi => "mpi",
        }
    }
}

/// What each process of a run sees of the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceVisibility {
    /// Every process sees all files.
    #[default]
    Shared,
    /// Each process sees only the files on its own node.
    PerRank,
}

/// How bytes go between processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// Chosen by what the processes have.
    #[default]
    Auto,
    /// Not at all: files that only some processes see are first copied to where all see them.
    Cpu,
    /// From GPU to GPU, by NCCL.
    Nccl,
    /// From host to host, by MPI. Needs the cargo feature `mpi`.
    Mpi,
}

/// Options that all conversions share.
#[derive(Clone, Debug, Default)]
pub struct ConvertOptions {
    /// The source: a file or a folder.
    pub src: PathBuf,
    /// The destination, as far as it is known.
    pub dst: Option<PathBuf>,
    /// Format of the destination.
    pub destination: DestinationOptions,
    /// How the destination is written.
    pub execute: ExecuteOptions,
    /// Nothing is written.
    pub dry_run: bool,
    /// What is taken.
    pub select: SelectOptions,
    /// How several names of one tensor are written.
    pub tied: Tied,
    /// Checks before anything is written.
    pub checks: CheckOptions,
    /// How the source is read.
    pub source: SourceOptions,
    /// How the processes of a run exchange bytes.
    pub exchange: ExchangeOptions,
}

/// Sharded output: a mesh, and how tensors lie on it.
#[derive(Clone, Debug, Default)]
pub struct ReshardOptions {
    /// Mesh: `dp=4,tp=2`.
    pub mesh: Vec<String>,
    /// Ranks of the mesh in row-major order of its cells.
    pub mesh_ranks: Vec<u32>,
    /// Placements: a list for every tensor, or `PATTERN=LIST`.
    pub placements: Vec<String>,
    /// Layout file.
    pub layout: Option<PathBuf>,
    /// Parallelize plan: a built-in name or a layout file.
    pub plan: Option<String>,
    /// Mesh dimension over which the plan cuts modules.
    pub tp: Option<String>,
    /// Mesh dimension over which FSDP cuts dimension 0.
    pub fsdp: Option<String>,
    /// Mesh dimension of copies.
    pub replicate: Option<String>,
    /// How an uneven dimension is cut.
    pub split: Option<Split>,
    /// Checkpoint whose layout is taken.
    pub like: Option<PathBuf>,
    /// Checkpoint that gives everything the source lacks.
    pub fill_from: Option<PathBuf>,
    /// Python class of sharded tensors in rank files.
    pub tensor_class: Option<TensorClass>,
    /// Options of all conversions, set by [`Conversion::plan`](crate::Conversion::plan).
    #[doc(hidden)]
    pub convert: ConvertOptions,
}

/// Python class of sharded tensors in rank files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorClass {
    /// As in the source.
    Auto,
    /// DTensor.
    DTensor,
    /// ShardedTensor.
    ShardedTensor,
    /// Plain tensors, each the shard of its rank.
    Local,
}

/// Whole tensors, the nested state dict kept.
#[derive(Clone, Debug, Default)]
pub struct UnshardOptions {
    /// Writes a file for every rank, each of them whole.
    pub all_ranks: bool,
    /// Modules whose parameters are written whole on every rank.
    pub unit: Vec<String>,
    /// Takes gradients along.
    pub with_grads: bool,
    /// Division into safetensors files.
    pub shards: ShardOptions,
    /// Options of all conversions, set by [`Conversion::plan`](crate::Conversion::plan).
    #[doc(hidden)]
    pub convert: ConvertOptions,
}

/// Which tensors are in which safetensors file.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// Checkpoint whose division into files is taken.
    pub like: Option<PathBuf>,
    /// Largest file in bytes; a larger tensor gets its own.
    pub max_shard_size: u64,
}

impl Default for ShardOptions {
    fn default() -> Self {
        Self { like: None, max_shard_size: DEFAULT_SHARD_SIZE }
    }
}

/// FSDP1 flat parameters.
#[derive(Clone, Debug, Default)]
pub struct FlattenOptions {
    /// What FSDP1 is configured with when it loads.
    pub flat: FlatOptions,
    /// Options of all conversions, set by [`Conversion::plan`](crate::Conversion::plan).
    #[doc(hidden)]
    pub convert: ConvertOptions,
}

/// Configuration of FSDP1.
#[derive(Clone, Debug, Default)]
pub struct FlatOptions {
    /// Ranks that load the files.
    pub world_size: Option<u32>,
    /// Patterns of modules that are units.
    pub wrap: Vec<String>,
    /// `use_orig_params` of FSDP1.
    pub use_orig_params: Option<bool>,
    /// Sharding strategy.
    pub strategy: Option<Strategy>,
    /// Ranks that share one copy under hybrid sharding.
    pub shard_group_size: Option<u32>,
    /// `MixedPrecision(param_dtype=...)`.
    pub forward_dtype: Option<String>,
    /// Patterns of float tensors that are buffers.
    pub buffers: Vec<String>,
    /// Layout file with flat units.
    pub layout: Option<PathBuf>,
    /// Checkpoint of the same model that gives units or the order of parameters.
    pub like: Option<PathBuf>,
}

/// `ShardingStrategy` of FSDP1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::enum_variant_names, reason = "the names are those of PyTorch")]
pub enum Strategy {
    /// `FULL_SHARD`; `SHARD_GRAD_OP` has the same files.
    FullShard,
    /// `HYBRID_SHARD`.
    HybridShard,
    /// `NO_SHARD`.
    NoShard,
}

/// The model, merged.
#[derive(Clone, Debug, Default)]
pub struct ConsolidateOptions {
    /// Takes every tensor under its whole dotted name.
    pub everything: bool,
    /// Where configuration and tokenizer files are copied from.
    pub assets: Assets,
    /// Division into safetensors files.
    pub shards: ShardOptions,
    /// Options of all conversions, set by [`Conversion::plan`](crate::Conversion::plan).
    #[doc(hidden)]
    pub convert: ConvertOptions,
}

/// Where the files that loaders need beside weights are copied from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Assets {
    /// The source, its `huggingface` folder, and the folders above up to the one that was given.
    #[default]
    Found,
    /// This folder.
    From(PathBuf),
    /// Nowhere.
    None,
}

/// Verification of one checkpoint, or comparison of two.
#[derive(Clone, Debug, Default)]
pub struct VerifyOptions {
    /// The checkpoint to check.
    pub src: PathBuf,
    /// The checkpoint, or saved listing with digests, to compare with.
    pub other: Option<PathBuf>,
    /// Compares only names that both have.
    pub common: bool,
    /// Names and dtypes of the source.
    pub select: SelectOptions,
    /// Checkpoint that gives shapes of flat parameters.
    pub like: Option<PathBuf>,
    /// How both are read.
    pub source: SourceOptions,
}

/// What `inspect` shows.
#[derive(Clone, Debug, Default)]
pub struct InspectOptions {
    /// Leaves out chunks.
    pub brief: bool,
    /// Names or patterns of the tensors to show; all if empty.
    pub tensor: Vec<String>,
    /// Hashes the values of every tensor.
    pub digest: bool,
}
