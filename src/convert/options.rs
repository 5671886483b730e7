//! Options of a conversion as plain values, independent of the command line.
//!
//! A value with a textual form (a mesh, a pattern, placements, a rename) is stored as text. The step that uses it
//! parses it, so that the error names the option.

use std::path::PathBuf;

use crate::catalog::{Dtype, Weights};
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
    /// Format of the source. `None` means that dtshard detects the format.
    pub from: Option<Format>,
    /// Series of rank files to read: names, or `all`. If empty, each kind of conversion has its own default.
    pub series: Vec<String>,
    /// Method of reading file contents. `None` means that the method is chosen for the file system.
    pub io: Option<IoMode>,
    /// Number of worker threads. `None` means that dtshard chooses the number, usually one per core.
    pub threads: Option<usize>,
    /// Limit in bytes of the anonymous memory, which excludes the page cache.
    pub max_memory: u64,
    /// True if rank files may be missing, as long as other ranks store replicas of all data of the missing files.
    pub allow_missing: bool,
    /// True if objects are left out whose Python class is not known to be plain data.
    pub drop_unknown: bool,
    /// Weights to read from a checkpoint that has master weights beside the parameters of the module. `None` means the
    /// master weights, if there are any.
    pub weights: Option<Weights>,
    /// Path of the flat layout file, which describes the FSDP1 flat parameters of the source.
    pub flat_layout: Option<PathBuf>,
    /// Declared layout of the plain tensors in rank files.
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
            weights: None,
            flat_layout: None,
            layout: SourceLayoutOptions::default(),
        }
    }
}

/// Sharding of plain tensors in rank files, declared by the caller because the files do not record it.
#[derive(Clone, Debug, Default)]
pub struct SourceLayoutOptions {
    /// Mesh of the ranks that saved the source, for example `dp=4,tp=2`.
    pub src_mesh: Option<String>,
    /// Ranks of the source mesh, in row-major order of the mesh cells. If empty, the ranks are 0, 1, 2, ...
    pub src_mesh_ranks: Vec<u32>,
    /// Placements of plain tensors in the source. `PATTERN=LIST` applies to the tensors that the pattern matches; a
    /// list without a pattern applies to all other tensors.
    pub src_placements: Vec<String>,
    /// Rule that gives the shard sizes in the source if a dimension does not divide evenly.
    pub src_split: Option<Split>,
    /// Parallelize plan of the source: a built-in name or a layout file.
    pub src_plan: Option<String>,
    /// Path of a layout file that describes the source.
    pub src_layout: Option<PathBuf>,
    /// Mesh dimensions along which ranks hold partial values, with an optional operation, for example `dp,cp=avg`. The
    /// default operation is the sum.
    pub reduce: Vec<String>,
}

/// Options that select names of the source, and set their new names and dtypes.
#[derive(Clone, Debug, Default)]
pub struct SelectOptions {
    /// Patterns of names to select. If there are none, all names are selected.
    pub include: Vec<String>,
    /// Patterns of names to leave out. The optimizer state of matching parameters is left out, too.
    pub exclude: Vec<String>,
    /// File with more patterns of names to select, one per line.
    pub include_from: Option<PathBuf>,
    /// Path of the subtree of the state dict to select. Names in the result are relative to this path.
    pub root: Option<String>,
    /// Prefixes that are removed from names.
    pub strip_prefix: Vec<String>,
    /// Renames of tensors and objects, each as `REGEX=REPLACEMENT`.
    pub rename: Vec<String>,
    /// File with more renames, one per line.
    pub rename_file: Option<PathBuf>,
    /// Text that is added before every name, after the renames.
    pub add_prefix: Option<String>,
    /// Dotted path of nested dicts under which the complete result is stored.
    pub nest: Option<String>,
    /// True if wrapper prefixes, such as `_orig_mod.`, stay in names. `reshard` always keeps them; there, true means
    /// that patterns must match names with these prefixes.
    pub keep_names: bool,
    /// Casts of floating-point tensors. `PATTERN=DTYPE` casts the tensors that the pattern matches. `DTYPE` casts all
    /// other f32, f16 and bf16 tensors of one or more dimensions outside the optimizer state.
    pub dtype: Vec<String>,
    /// Weight map that is applied before names are changed, and after names are selected.
    pub map: MapOptions,
}

/// Options that convert the tensors of the source to another convention of names and contents, by a weight map.
#[derive(Clone, Debug, Default)]
pub struct MapOptions {
    /// Map and sides: `FAMILY`, a path of a map file, or `auto`; then `:TO`, or `:FROM:TO`. `None` means that no map is
    /// applied.
    pub map: Option<String>,
    /// Path of the model's configuration (`config.json` or `params.json`), which gives the sizes of axes. `None` means that the
    /// file is looked for beside the source.
    pub config: Option<PathBuf>,
    /// Sizes of axes, each as `AXIS=NUMBER`.
    pub set: Vec<String>,
    /// True if optimizer state that the map cannot convert is left out. False means that such state is an error.
    pub drops_state: bool,
    /// Dtype to which quantised weights are decoded before the map: bf16 or f32. `None` means that weights and scales stay as
    /// they are stored.
    pub dequantize: Option<Dtype>,
}

/// Options for checks before anything is written, and for values that differ between ranks.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// Value that is written if ranks store different values. `None` means that different values are an error, except
    /// for random number state, of which every rank keeps its own.
    pub on_conflict: Option<OnConflict>,
    /// True if replicas of DTensors and ShardedTensors are compared, in addition to replicas of plain tensors.
    pub check_replicas: bool,
    /// True if every stored checksum is checked before anything is written.
    pub check_crc: bool,
}

/// Value that is written if ranks store different values of one plain tensor or object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnConflict {
    /// Writes the value of the lowest rank.
    Rank0,
    /// Writes the values of all ranks: each rank file stores the value of its rank, and other formats store a dict of
    /// `rank_0`, `rank_1`, ...
    PerRank,
    /// Writes no value; the name is left out.
    Drop,
}

/// The way in which tied tensors (one tensor under several names) are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tied {
    /// The tensor is written under every name.
    #[default]
    Keep,
    /// The tensor is written under its first name; its other names are recorded in the metadata of safetensors.
    Drop,
    /// The tensor is written under every name, including a tied name that the source does not store.
    Write,
}

/// Options that set the format of the destination.
#[derive(Clone, Debug, Default)]
pub struct DestinationOptions {
    /// Format of the destination. `None` means the default of the conversion.
    pub to: Option<Format>,
    /// PyTorch version of the job that will load the DTensors in rank files.
    pub torch_version: Option<String>,
}

/// Options for executing a plan. By default, an existing destination is an error, and the run waits until all data is
/// on disk.
#[derive(Clone, Debug)]
pub struct ExecuteOptions {
    /// True if an existing checkpoint at the destination may be replaced.
    pub overwrite: bool,
    /// True if the run continues the work of an interrupted run, and keeps its own finished work if it is interrupted.
    pub resume: bool,
    /// True if the work of an interrupted run is discarded.
    pub restart: bool,
    /// True if the run waits until all data is on disk. A run of several processes always waits.
    pub sync: bool,
    /// True if all written data is read back and compared with the source before the result is published.
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
    /// Which files of the source a process sees: all of them, or only the files on its own node.
    pub source: SourceVisibility,
    /// Method by which processes send tensor data to each other.
    pub backend: Backend,
    /// True if NCCL may reduce partial values. NCCL's summation order changes the last bits.
    pub fast_reduce: bool,
    /// Bucket size: the maximum number of bytes that each process reads, sends and receives in one exchange round.
    /// `None` means that the size is chosen automatically.
    pub bucket_size: Option<u64>,
}

impl OnConflict {
    /// Returns the value of `--on-conflict` that selects this variant.
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
    /// Returns the value of `--source` that selects this variant.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::PerRank => "per-rank",
        }
    }
}

impl Backend {
    /// Returns the value of `--backend` that selects this variant.
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

/// Which files of the source each process of a run sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceVisibility {
    /// Every process sees all files of the source.
    #[default]
    Shared,
    /// Each process sees only the source files on its own node.
    PerRank,
}

/// Method by which processes send tensor data to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// Means `Cpu` if every process sees all files of the source; otherwise the method depends on the GPUs and
    /// libraries that the processes have.
    #[default]
    Auto,
    /// Processes send no tensor data: each process reads the data that it writes. Files that only some processes see
    /// are first copied to a folder that all processes see.
    Cpu,
    /// Processes use NCCL to send tensor data between GPUs.
    Nccl,
    /// Processes use MPI to send tensor data between hosts. Needs the cargo feature `mpi`.
    Mpi,
}

/// Options that all conversions share.
#[derive(Clone, Debug, Default)]
pub struct ConvertOptions {
    /// Path of the source: a file or a folder.
    pub src: PathBuf,
    /// Path of the destination. `None` is possible for a dry run.
    pub dst: Option<PathBuf>,
    /// Format of the destination.
    pub destination: DestinationOptions,
    /// Options for writing the destination.
    pub execute: ExecuteOptions,
    /// True if only a preview is computed and nothing is written.
    pub dry_run: bool,
    /// Options that select names and set dtypes.
    pub select: SelectOptions,
    /// The way in which tied tensors (one tensor under several names) are written.
    pub tied: Tied,
    /// Options for checks before anything is written.
    pub checks: CheckOptions,
    /// Options for reading the source.
    pub source: SourceOptions,
    /// Options for the exchange between processes.
    pub exchange: ExchangeOptions,
}

/// Options of `reshard`, which writes sharded tensors: a mesh, and the placements of tensors on it.
#[derive(Clone, Debug, Default)]
pub struct ReshardOptions {
    /// Mesh of the result, for example `dp=4,tp=2`. More than one mesh is an error.
    pub mesh: Vec<String>,
    /// Ranks of the mesh of the result, in row-major order of the mesh cells. If empty, the ranks are 0, 1, 2, ...
    pub mesh_ranks: Vec<u32>,
    /// Placements of tensors in the result. `PATTERN=LIST` applies to the tensors that the pattern matches; a list
    /// without a pattern applies to all other tensors.
    pub placements: Vec<String>,
    /// Path of a layout file that describes the result.
    pub layout: Option<PathBuf>,
    /// Parallelize plan of the result: a built-in name or a layout file.
    pub plan: Option<String>,
    /// Name of the mesh dimension along which the plan shards modules (tensor parallelism).
    pub tp: Option<String>,
    /// Name of the mesh dimension along which FSDP shards dimension 0 of tensors.
    pub fsdp: Option<String>,
    /// Name of the mesh dimension along which tensors are replicated (HSDP).
    pub replicate: Option<String>,
    /// Name of the mesh dimension of data parallelism without DTensors (DDP): its ranks hold copies of every tensor.
    pub ddp: Option<String>,
    /// Rule that gives the shard sizes in the result if a dimension does not divide evenly.
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
    /// Each tensor has the class that it has in the checkpoint of `--like`. Without `--like`, it has its class in the
    /// source.
    Auto,
    /// Sharded tensors are DTensors.
    DTensor,
    /// Sharded tensors are ShardedTensors.
    ShardedTensor,
    /// Sharded tensors are plain tensors: the tensor in a rank file is the shard of this rank.
    Local,
}

/// Options of `unshard`, which writes whole tensors in the nested state dict of the source.
#[derive(Clone, Debug, Default)]
pub struct UnshardOptions {
    /// True if there is one file per rank, each with all tensors as whole tensors.
    pub all_ranks: bool,
    /// Patterns of modules (FSDP1 units) whose parameters are whole tensors in the file of every rank; `.` is the root
    /// unit.
    pub unit: Vec<String>,
    /// True if gradients are written, too.
    pub with_grads: bool,
    /// Options for dividing tensors into safetensors files.
    pub shards: ShardOptions,
}

/// Options for dividing tensors into safetensors files.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// Checkpoint whose assignment of tensors to files is copied.
    pub like: Option<PathBuf>,
    /// Largest size of a file, in bytes. A larger tensor gets its own file.
    pub max_shard_size: u64,
}

impl Default for ShardOptions {
    fn default() -> Self {
        Self { like: None, max_shard_size: DEFAULT_SHARD_SIZE }
    }
}

/// Options of `flatten`, which writes FSDP1 flat parameters.
#[derive(Clone, Debug, Default)]
pub struct FlattenOptions {
    /// Configuration of FSDP1 in the job that loads the result.
    pub flat: FlatOptions,
}

/// Configuration of FSDP1 in the job that loads the flat parameters.
#[derive(Clone, Debug, Default)]
pub struct FlatOptions {
    /// Number of ranks that load the files. `None` means the number in the flat layout.
    pub world_size: Option<u32>,
    /// Patterns of modules that FSDP1 wraps as units.
    pub wrap: Vec<String>,
    /// Value of `use_orig_params` in FSDP1.
    pub use_orig_params: Option<bool>,
    /// Sharding strategy of FSDP1. `None` means the strategy of the flat layout, or `FULL_SHARD` if there is none.
    pub strategy: Option<Strategy>,
    /// Number of ranks that share one copy of the model under hybrid sharding.
    pub shard_group_size: Option<u32>,
    /// Dtype that FSDP1 is given as `MixedPrecision(param_dtype=...)`.
    pub forward_dtype: Option<String>,
    /// Patterns of float tensors that are buffers, not parameters.
    pub buffers: Vec<String>,
    /// Path of a layout file that lists the flat parameters of each unit.
    pub layout: Option<PathBuf>,
    /// Another checkpoint of the same model. It provides the FSDP1 units or, if it has no flat parameters, the order of
    /// parameters.
    pub like: Option<PathBuf>,
}

/// Sharding strategy of FSDP1 (`ShardingStrategy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::enum_variant_names, reason = "the names are those of PyTorch")]
pub enum Strategy {
    /// Strategy `FULL_SHARD`: all ranks together shard one copy of the model. A job with `SHARD_GRAD_OP` loads the
    /// files of `FULL_SHARD`.
    FullShard,
    /// Strategy `HYBRID_SHARD`: each group of ranks shards one copy of the model.
    HybridShard,
    /// Strategy `NO_SHARD`: every rank has a copy of the whole model.
    NoShard,
}

/// Options of `consolidate`, which writes the model as whole tensors.
#[derive(Clone, Debug, Default)]
pub struct ConsolidateOptions {
    /// True if every tensor is written, not only the model. Each tensor keeps its full dotted name.
    pub everything: bool,
    /// The folder from which configuration and tokenizer files are copied.
    pub assets: Assets,
    /// Options for dividing tensors into safetensors files.
    pub shards: ShardOptions,
}

/// The folder from which dtshard copies the files that loaders need in addition to the weights, such as `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Assets {
    /// Search the source's folder and its parents up to the path that the user named, and the `huggingface` subfolder
    /// of each of these folders.
    #[default]
    Found,
    /// Copy the files of this folder.
    From(PathBuf),
    /// Copy no files.
    None,
}

/// Options for verifying one checkpoint, or for comparing two.
#[derive(Clone, Debug, Default)]
pub struct VerifyOptions {
    /// The checkpoint to check.
    pub src: PathBuf,
    /// The checkpoint, or the saved listing with digests, with which `src` is compared. `None` if only `src` is
    /// checked.
    pub other: Option<PathBuf>,
    /// True if only names that both checkpoints have are compared.
    pub common: bool,
    /// Options that select names of the source, and set the dtypes of the selected tensors.
    pub select: SelectOptions,
    /// Checkpoint that provides the shapes of parameters, if the source has flat parameters.
    pub like: Option<PathBuf>,
    /// Options for reading both checkpoints.
    pub source: SourceOptions,
}

/// Options of `inspect`.
#[derive(Clone, Debug, Default)]
pub struct InspectOptions {
    /// True if the list of chunks is left out.
    pub brief: bool,
    /// Names or patterns of the tensors to show. If empty, all tensors are shown.
    pub tensor: Vec<String>,
    /// True if the values of every tensor are hashed.
    pub digest: bool,
    /// True if each tensor has a line of its own. If false, the layers of a model are grouped.
    pub all: bool,
    /// Order of the lines of the table.
    pub sort: TensorOrder,
}

/// Order of the lines in a table of tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TensorOrder {
    /// Order of the state dict.
    #[default]
    StateDict,
    /// Descending number of bytes.
    Size,
    /// Alphabetical order, with numbers in names compared as numbers.
    Name,
}
