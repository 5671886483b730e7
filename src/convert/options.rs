//! Options of a conversion as plain values, independent of the command line.
//!
//! A value with a textual form (a mesh, a pattern, placements, a rename) is stored as text. The step that uses it
//! parses it, so that the error names the option.

use std::path::PathBuf;

use crate::format::Format;
use crate::layout::Split;
use crate::storage::IoMode;

/// Default of [`SourceOptions::max_memory`], in bytes.
pub const DEFAULT_MEMORY: u64 = 512_000_000;

/// Default of [`ShardOptions::max_shard_size`], in bytes.
pub const DEFAULT_SHARD_SIZE: u64 = 5_000_000_000;

/// Options for reading a source, with limits on threads and memory.
#[derive(Clone, Debug)]
pub struct SourceOptions {
    /// Format; detected if `None`.
    pub from: Option<Format>,
    /// Series of rank files to read: names, or `all`; the default of the conversion if empty.
    pub series: Vec<String>,
    /// Method of reading file contents; chosen by file system if `None`.
    pub io: Option<IoMode>,
    /// Number of worker threads; one per core if `None`.
    pub threads: Option<usize>,
    /// Limit of anonymous memory in bytes, without the page cache.
    pub max_memory: u64,
    /// Accepts missing rank files if other ranks store replicas of all their data.
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
    /// Rule for splitting a dimension of uneven size.
    pub src_split: Option<Split>,
    /// Parallelize plan: a built-in name or a layout file.
    pub src_plan: Option<String>,
    /// Layout file.
    pub src_layout: Option<PathBuf>,
    /// Mesh dimensions along which ranks hold partial values: `dp,cp=avg`.
    pub reduce: Vec<String>,
}

/// Selection of names of the source, with their new names and dtypes.
#[derive(Clone, Debug, Default)]
pub struct SelectOptions {
    /// Patterns of names to select.
    pub include: Vec<String>,
    /// Patterns of names to leave out.
    pub exclude: Vec<String>,
    /// File of further patterns to select, one per line.
    pub include_from: Option<PathBuf>,
    /// Subtree of the state dict to select; names become relative to it.
    pub root: Option<String>,
    /// Prefixes to cut from names.
    pub strip_prefix: Vec<String>,
    /// Renames: `REGEX=REPLACEMENT`.
    pub rename: Vec<String>,
    /// File of further renames, one per line.
    pub rename_file: Option<PathBuf>,
    /// Text before every name, added after the renames.
    pub add_prefix: Option<String>,
    /// Dotted path of nested dicts that contain the whole result.
    pub nest: Option<String>,
    /// Keeps wrapper prefixes in names.
    pub keep_names: bool,
    /// Casts: `DTYPE` or `PATTERN=DTYPE`.
    pub dtype: Vec<String>,
}

/// Checks before anything is written, and the choice for values that differ.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// Choice if ranks store different values; an error if `None`.
    pub on_conflict: Option<OnConflict>,
    /// Compares replicas of DTensors, too.
    pub check_replicas: bool,
    /// Checks every stored checksum first.
    pub check_crc: bool,
}

/// Choice if ranks store different values of one plain tensor or object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnConflict {
    /// The value of the lowest rank.
    Rank0,
    /// The values of all ranks: each rank file stores the value of its rank, and other formats store a dict of
    /// `rank_0`, `rank_1`, ...
    PerRank,
    /// No value: the name is left out.
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
    /// The tensor is written under every name, also under the tied name that the source does not store.
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

/// Options for executing a plan. The default refuses an existing destination, and waits until all data is on disk.
#[derive(Clone, Debug)]
pub struct ExecuteOptions {
    /// Replaces an existing checkpoint.
    pub overwrite: bool,
    /// Continues the work of an interrupted run, and keeps finished work if this run is interrupted.
    pub resume: bool,
    /// Discards the work of an interrupted run.
    pub restart: bool,
    /// Waits until all data is on disk. Always true for a run of several processes.
    pub sync: bool,
    /// Reads everything back and compares it with the source before publishing.
    pub verify: bool,
}

impl Default for ExecuteOptions {
    fn default() -> Self {
        Self { overwrite: false, resume: false, restart: false, sync: true, verify: false }
    }
}

/// Options for the exchange of data between the processes of a run.
#[derive(Clone, Debug, Default)]
pub struct ExchangeOptions {
    /// Visibility of the source's files.
    pub source: SourceVisibility,
    /// Transport of tensor data between processes.
    pub backend: Backend,
    /// Lets NCCL reduce partial values, whose summation order changes the last bits.
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

/// Visibility of the source's files to the processes of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceVisibility {
    /// Every process sees all files.
    #[default]
    Shared,
    /// Each process sees only the files on its own node.
    PerRank,
}

/// Transport of tensor data between processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// Chosen by the GPUs and libraries that the processes have.
    #[default]
    Auto,
    /// No transport: files that only some processes see are first copied to a folder that all processes see.
    Cpu,
    /// NCCL, between GPUs.
    Nccl,
    /// MPI, between hosts. Needs the cargo feature `mpi`.
    Mpi,
}

/// Options that all conversions share.
#[derive(Clone, Debug, Default)]
pub struct ConvertOptions {
    /// The source: a file or a folder.
    pub src: PathBuf,
    /// The destination; may be `None` for a dry run.
    pub dst: Option<PathBuf>,
    /// Format of the destination.
    pub destination: DestinationOptions,
    /// Options for writing the destination.
    pub execute: ExecuteOptions,
    /// Computes only a preview and writes nothing.
    pub dry_run: bool,
    /// Selection of names and dtypes.
    pub select: SelectOptions,
    /// How several names of one tensor are written.
    pub tied: Tied,
    /// Checks before anything is written.
    pub checks: CheckOptions,
    /// Options for reading the source.
    pub source: SourceOptions,
    /// Options for the exchange between processes.
    pub exchange: ExchangeOptions,
}

/// Options for sharded output: a mesh, and the placements of tensors on it.
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
    /// Mesh dimension along which the plan shards modules (tensor parallelism).
    pub tp: Option<String>,
    /// Mesh dimension along which FSDP shards dimension 0.
    pub fsdp: Option<String>,
    /// Mesh dimension along which tensors are replicated.
    pub replicate: Option<String>,
    /// Rule for splitting a dimension of uneven size.
    pub split: Option<Split>,
    /// Checkpoint whose layout the result gets.
    pub like: Option<PathBuf>,
    /// Checkpoint that provides all values that the source does not have.
    pub fill_from: Option<PathBuf>,
    /// Python class of sharded tensors in rank files.
    pub tensor_class: Option<TensorClass>,
}

/// Python class of sharded tensors in rank files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorClass {
    /// Same class as in the source.
    Auto,
    /// DTensor.
    DTensor,
    /// ShardedTensor.
    ShardedTensor,
    /// Plain tensors, each the shard of its rank.
    Local,
}

/// Options for whole tensors in the nested state dict of the source.
#[derive(Clone, Debug, Default)]
pub struct UnshardOptions {
    /// Writes one file per rank, each with all tensors.
    pub all_ranks: bool,
    /// Modules whose parameters are written whole on every rank.
    pub unit: Vec<String>,
    /// Includes gradients.
    pub with_grads: bool,
    /// Division into safetensors files.
    pub shards: ShardOptions,
}

/// Division of tensors into safetensors files.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// Checkpoint whose division into files the result gets.
    pub like: Option<PathBuf>,
    /// Largest size of a file, in bytes. A larger tensor gets its own file.
    pub max_shard_size: u64,
}

impl Default for ShardOptions {
    fn default() -> Self {
        Self { like: None, max_shard_size: DEFAULT_SHARD_SIZE }
    }
}

/// Options for FSDP1 flat parameters.
#[derive(Clone, Debug, Default)]
pub struct FlattenOptions {
    /// Configuration of FSDP1 in the job that loads the result.
    pub flat: FlatOptions,
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
    /// Checkpoint of the same model that provides FSDP units or the order of parameters.
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

/// Options for the model as whole tensors.
#[derive(Clone, Debug, Default)]
pub struct ConsolidateOptions {
    /// Selects every tensor. Each keeps its whole dotted name.
    pub everything: bool,
    /// Origin of configuration and tokenizer files.
    pub assets: Assets,
    /// Division into safetensors files.
    pub shards: ShardOptions,
}

/// Origin of the files that loaders need beside the weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Assets {
    /// The source's folder, its `huggingface` subfolder, and its parent folders up to the path that the user named.
    #[default]
    Found,
    /// This folder.
    From(PathBuf),
    /// No files are copied.
    None,
}

/// Options for verifying one checkpoint, or for comparing two.
#[derive(Clone, Debug, Default)]
pub struct VerifyOptions {
    /// The checkpoint to check.
    pub src: PathBuf,
    /// The checkpoint, or saved listing with digests, to compare with.
    pub other: Option<PathBuf>,
    /// Compares only names that both checkpoints have.
    pub common: bool,
    /// Names and dtypes of the source.
    pub select: SelectOptions,
    /// Checkpoint that provides shapes for flat parameters.
    pub like: Option<PathBuf>,
    /// Options for reading both checkpoints.
    pub source: SourceOptions,
}

/// Options of `inspect`.
#[derive(Clone, Debug, Default)]
pub struct InspectOptions {
    /// Leaves out chunks.
    pub brief: bool,
    /// Names or patterns of the tensors to show; all if empty.
    pub tensor: Vec<String>,
    /// Hashes the values of every tensor.
    pub digest: bool,
}
