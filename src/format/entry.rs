//! The row type of the table of formats.
//!
//! Each format has a folder in [`crate::format`], and the file `entry.rs` in this folder has the row of the format.
//! [The table](super::Format::ALL) has one line for each format. Detection, `--from`, `--to`, their help texts and the
//! table in the README are derived from the rows.

use super::known_files::KnownFile;
use super::traits::{Read, WriteShards, WriteState, WriteWhole};

/// A row of the table of formats: the name and the properties of one format, its reader and its writers.
pub struct FormatEntry {
    /// The name for `--from` and `--to`.
    pub name: &'static str,
    /// The description of the format in the README.
    pub about: &'static str,
    /// The names of the files in a written checkpoint, as shown in the README.
    pub files: &'static str,
    /// Suffixes of the format's files, without the dot. In a folder, dtshard finds the files of the format by these
    /// suffixes. If `--to` is not given, the suffix of DST selects the format.
    pub suffixes: &'static [&'static str],
    /// The suffix of tensor files that have an index: `safetensors` if the index of the files is
    /// `model.safetensors.index.json`. `None` if the format has no index.
    pub index_suffix: Option<&'static str>,
    /// Suffixes of files that contain metadata but no tensor data.
    pub metadata_suffixes: &'static [&'static str],
    /// Suffixes of files that contain data only. Other files (such as `.metadata`) record which tensors and objects are
    /// in a data file, and at which offset.
    pub data_suffixes: &'static [&'static str],
    /// The kinds of files that a folder of this format may contain. `--overwrite` may replace such files.
    pub known_files: &'static [KnownFile],
    /// A function that recognises a file that is a complete checkpoint, by its first bytes and its length. `None` if no
    /// single file is a checkpoint.
    pub is_checkpoint_file: Option<fn(&[u8], u64) -> bool>,
    /// The form in which the format stores a tensor that is distributed over ranks.
    pub tensors: TensorStorage,
    /// True if the format can store values that are not tensors, such as a step.
    pub holds_objects: bool,
    /// True if there is one file per rank, and a folder may have several series of such files (`model_...`,
    /// `optim_...`).
    pub has_rank_files: bool,
    /// True if tensors keep the order and the strides that they have in the state dict of a module.
    pub keeps_order: bool,
    /// True if the files list tensors in the order in which the modules of the model registered them.
    pub is_in_module_order: bool,
    /// True if each rank file contains the names of all tensors of the rank, so the writer needs memory for the names
    /// of all ranks before it writes the first file.
    pub names_tensors_by_rank: bool,
    /// The reader.
    pub read: &'static dyn Read,
    pub writers: Writers,
}

impl FormatEntry {
    /// Makes the row of a format that has none of the properties below, and that is only read.
    pub const fn new(name: &'static str, about: &'static str, tensors: TensorStorage, read: &'static dyn Read) -> Self {
        Self {
            name,
            about,
            files: "(none)",
            suffixes: &[],
            index_suffix: None,
            metadata_suffixes: &[],
            data_suffixes: &[],
            known_files: &[],
            is_checkpoint_file: None,
            tensors,
            holds_objects: false,
            has_rank_files: false,
            keeps_order: false,
            is_in_module_order: false,
            names_tensors_by_rank: false,
            read,
            writers: Writers::NONE,
        }
    }
}

/// The writers of a format, which make files of different forms.
#[derive(Clone, Copy)]
pub struct Writers {
    /// The writer of tensors that are sharded over the ranks of a mesh; `None` if the format cannot store them.
    pub shards: Option<&'static dyn WriteShards>,
    /// The writer of whole tensors; `None` if the format cannot store them.
    pub whole: Option<&'static dyn WriteWhole>,
    /// The writer of the complete state of a training job; `None` if the format has another form.
    pub state: Option<&'static dyn WriteState>,
}

impl Writers {
    /// No writer, for a format that is only read.
    pub const NONE: Self = Self { shards: None, whole: None, state: None };
}

/// The form in which a format stores a tensor that is distributed over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorStorage {
    /// Every tensor is stored in full, and the format has no mesh.
    Whole,
    /// The format stores boxes of tensors, each box once. The mesh determines which rank writes which box. The format
    /// does not record the mesh.
    Boxes,
    /// The format stores the shard of each rank, with the mesh and the placements.
    Ranks,
    /// For each rank, the format stores the rank's shard of each FSDP1 flat parameter.
    Flat,
}
