//! Rows of the table of formats.
//!
//! A format is a folder in [`crate::format`], and one line of the table [there](super::Format::ALL). Detection, `--from`,
//! `--to`, their help and the table in the README come from the rows.

use std::collections::BTreeMap;
use std::path::{Path as FilePath, PathBuf};

use super::known_files::KnownFile;
use super::listing::{DetectedFiles, FileStart, FolderListing};
use super::local::LocalLayout;
use super::parts::LoadedFolder;
use super::placing::Placing;
use super::rank_names::RankNamePattern;
use super::reading::ReadFindings;
use super::shortfall::Shortfall;
use super::torch::{DTensorStyle, RankLayout};
use super::{Format, ReadOptions};
use crate::catalog::{Catalog, Dtype, Fqn, Path, Reservation, TensorEntry, TensorId, Value};
use crate::error::Result;
use crate::layout::DeviceMesh;
use crate::layout::shards::HeldTile;
use crate::storage::{FileId, Files, IoMode};

/// One row of the table: the name of a format, and what it can hold.
pub struct FormatEntry {
    /// The name for `--from` and `--to`.
    pub name: &'static str,
    /// What the format is, as the README has it.
    pub about: &'static str,
    /// The names of the files that are written.
    pub files: &'static str,
    /// Suffixes of a destination that choose the format if `--to` does not.
    pub suffixes: &'static [&'static str],
    /// The suffix of the files that an index names: `safetensors` for `model.safetensors.index.json`.
    pub index_suffix: Option<&'static str>,
    /// The suffixes of files that have metadata and no tensor data.
    pub metadata_suffixes: &'static [&'static str],
    /// The suffixes of files of which metadata says where tensors and objects are.
    pub data_suffixes: &'static [&'static str],
    /// The files of a checkpoint folder that a new checkpoint may replace.
    pub known_files: &'static [KnownFile],
    /// Recognises a file that is a whole checkpoint, by its first bytes and its length.
    pub is_checkpoint_file: Option<fn(&[u8], u64) -> bool>,
    /// How tensors are stored that ranks share.
    pub tensors: TensorStorage,
    /// True if the format has a place for values that are not tensors.
    pub holds_objects: bool,
    /// True if every rank has a file, and a folder may have several series of such files.
    pub has_rank_files: bool,
    /// True if tensors keep the order and the strides that they have in the state dict of a module.
    pub keeps_order: bool,
    /// True if tensors are in the order in which modules registered them.
    pub is_in_module_order: bool,
    /// True if the file of each rank names each of its tensors, which takes memory before anything is written.
    pub names_tensors_by_rank: bool,
    /// The reader.
    pub read: &'static dyn Read,
    /// The writer of tensors that the ranks of a mesh share.
    pub write_shards: Option<&'static dyn WriteShards>,
    /// The writer of whole tensors.
    pub write_whole: Option<&'static dyn WriteWhole>,
}

/// How a format stores tensors that ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorStorage {
    /// Every tensor is whole: a mesh has no meaning.
    Whole,
    /// Boxes of tensors, each stored once: a mesh decides who writes which box, and is not recorded.
    Boxes,
    /// What each rank holds of a tensor, with the mesh and the placements.
    Ranks,
    /// What each rank holds of FSDP1's flat parameters.
    Flat,
}

/// A format that is read.
pub trait Read: Sync {
    /// Finds a checkpoint of this format in a folder, by the names of its files.
    ///
    /// # Errors
    /// `Io`; `Missing` and `Malformed` where the names say that something is wrong.
    fn find_in(&self, _: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        Ok(None)
    }

    /// Recognises a file that is a checkpoint by itself.
    ///
    /// # Errors
    /// `Unsupported` for a file that is one of several.
    fn find_file(&self, _: &FileStart<'_>) -> Result<Option<DetectedFiles>> {
        Ok(None)
    }

    /// Returns the files of a folder that may be whole checkpoints each, though their names do not say so. One such file is
    /// taken if a folder has nothing else.
    ///
    /// # Errors
    /// `Io`.
    fn lone_files(&self, _: &FolderListing<'_>) -> Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }

    /// Returns the files that a checkpoint lacks, by the names of those that are there.
    ///
    /// # Errors
    /// `Io`; `Malformed` and `Conflict` where names contradict each other.
    fn shortfall(&self, _: &FilePath, _: &DetectedFiles, _: &ReadOptions, _: IoMode) -> Result<Option<Shortfall>> {
        Ok(None)
    }

    /// Reads names, shapes and places of tensors, and objects. Returns the format, too, which may show only now.
    ///
    /// # Errors
    /// `Malformed`, `Missing`, `Conflict`, `Unsupported`, `Io`.
    fn read(
        &self,
        reading: &mut ReadFindings<'_>,
        path: &FilePath,
        found: DetectedFiles,
    ) -> Result<(Format, LoadedFolder)>;

    /// Returns the PyTorch and the device of the job that wrote a checkpoint, if its files tell.
    ///
    /// # Errors
    /// `Malformed`, `Io`.
    fn style(&self, _: &Files) -> Result<Option<DTensorStyle>> {
        Ok(None)
    }

    /// Returns whether a file says itself which of its bytes are tensor data, by its path and its first bytes.
    fn is_container(&self, _: &FilePath, _head: &[u8]) -> bool {
        false
    }

    /// Reads the bytes of a container that are not tensor data. Ignores damage.
    fn read_header(&self, _: &Files, _: FileId) {}

    /// Returns the objects in the data files of a folder, as its metadata files give them.
    ///
    /// # Errors
    /// As reading metadata.
    fn objects(&self, _folder: &FilePath) -> Result<Objects> {
        Ok(Objects::new())
    }

    /// Reads objects in a data file. Ignores damage.
    fn read_objects(&self, _: &Files, _: FileId, _: &[Object]) {}
}

/// A value that is not a tensor, in a data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    pub fqn: Fqn,
    pub offset: u64,
    pub len: u64,
}

/// Objects by data file, in the folder of the metadata.
pub type Objects = BTreeMap<PathBuf, Vec<Object>>;

/// A format that is written for the ranks of a mesh.
pub trait WriteShards: Sync {
    /// Lays out the files of a target: decides their names and lengths, and serialises everything but tensor data.
    ///
    /// # Errors
    /// `Unsupported` where the format cannot hold a dtype, an object or a name; the errors of `layouts`.
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation>;

    /// Returns whether files differ between releases of PyTorch.
    fn depends_on_torch_version(&self) -> bool {
        false
    }

    /// Returns whether files record how mesh dims cut DTensors, where that is not `torch.chunk`.
    fn records_splits(&self) -> bool {
        false
    }
}

/// A format that is written as whole tensors.
pub trait WriteWhole: Sync {
    /// Returns whether a destination of this name is one file. If not, it is a folder.
    fn is_one_file(&self, destination: Option<&FilePath>) -> bool;

    /// Returns whether files record the names of tied tensors that are not written.
    fn records_aliases(&self) -> bool {
        false
    }

    /// Lays out the files of named tensors.
    ///
    /// # Errors
    /// `Unsupported` where the format cannot hold a dtype or a name.
    fn reserve(&self, target: WholeTarget<'_>) -> Result<Reservation>;

    /// Lays out the state dict of a catalog, with its nesting and its objects. Returns `None` for a format that holds
    /// named tensors alone.
    ///
    /// # Errors
    /// `Unsupported` where the format cannot hold an object.
    fn reserve_state(&self, _: &Catalog, _destination: Option<&FilePath>) -> Result<Option<Reservation>> {
        Ok(None)
    }
}

/// Named tensors to write whole.
pub struct WholeTarget<'a> {
    /// Shapes of tensors. Strides and dtypes are those to write if the format keeps strides.
    pub source: &'a Catalog,
    /// The dtype to write of each tensor of `source`.
    pub dtypes: &'a [Dtype],
    /// The tensors, in the order to write.
    pub tensors: &'a [(Fqn, TensorId)],
    /// Names that are recorded only, each with the name of the tensor that is written.
    pub aliases: &'a [(Fqn, Fqn)],
    pub destination: Option<&'a FilePath>,
    /// The most bytes of tensor data in a file of a folder.
    pub max_shard_bytes: u64,
    /// The files that tensors of these names go to, if the destination is a folder.
    pub placing: Option<Placing>,
}

/// A state dict to write, and how its tensors are to lie on the ranks of a job.
pub struct ShardedTarget<'a> {
    /// The tensors that `state` names.
    pub source: &'a Catalog,
    pub state: &'a Value,
    pub mesh: &'a DeviceMesh,
    /// The number of ranks of the job. Ranks outside the mesh hold nothing of what the others share.
    pub world_size: u32,
    /// The PyTorch that is to load rank files.
    pub style: &'a DTensorStyle,
    /// The names of rank files, in formats that have series of them.
    pub names: Option<&'a RankNamePattern>,
    pub layouts: &'a mut dyn Layouts,
}

/// Says how tensors are to lie on ranks.
pub trait Layouts {
    /// Returns the distinct tiles of a tensor, each with the ranks that hold it.
    ///
    /// # Errors
    /// `Usage` and `Unsupported` where a tensor cannot lie as it was asked for.
    fn shards(&mut self, path: &Path, entry: &TensorEntry) -> Result<Vec<HeldTile>>;

    /// Returns the form that a tensor has in the torch.save files of ranks.
    ///
    /// # Errors
    /// As [`Self::shards`].
    fn rank_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<RankLayout>;

    /// Returns the class and the placements of a tensor, or `None` for a plain tensor on every rank.
    ///
    /// # Errors
    /// As [`Self::shards`].
    fn local_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<LocalLayout>;
}
