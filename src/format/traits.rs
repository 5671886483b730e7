//! The traits that the reader and the writers of a format implement, and the input and output types of their methods.

use std::collections::BTreeMap;
use std::path::{Path as FilePath, PathBuf};

use super::listing::{DetectedFiles, FileStart, FolderListing};
use super::local::LocalLayout;
use super::output_placing::Placing;
use super::parts::LoadedFolder;
use super::rank_names::RankNamePattern;
use super::reading::ReadFindings;
use super::shortfall::Shortfall;
use super::torch::{DTensorStyle, RankLayout};
use super::{Format, ReadOptions};
use crate::catalog::{Catalog, Dtype, Fqn, Path, Reservation, TensorEntry, TensorId, Value};
use crate::error::Result;
use crate::layout::DeviceMesh;
use crate::layout::distinct_tiles::HeldTile;
use crate::storage::{FileId, Files, IoMode};

/// The reader of a format.
pub trait Read: Sync {
    /// Finds the files of a checkpoint of this format in a folder, by the names of the files; `None` if there are none.
    ///
    /// # Errors
    /// `Io`; `Missing` if the names show that a file is missing, `Malformed` if the names contradict each other.
    fn find_in(&self, _: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        Ok(None)
    }

    /// Returns the file as a detected checkpoint, if it looks like a file of this format; otherwise `None`. If the file
    /// is an index, returns the files that it names.
    ///
    /// # Errors
    /// `Unsupported` for a file that is not a complete checkpoint, such as the file of one rank.
    fn find_file(&self, _: &FileStart<'_>) -> Result<Option<DetectedFiles>> {
        Ok(None)
    }

    /// Returns the files of a folder that may each be a complete checkpoint, although the names of the files do not
    /// show a checkpoint. Such a file is read only if the folder has no other such file, and if no format recognises
    /// the folder.
    ///
    /// # Errors
    /// `Io`.
    fn lone_files(&self, _: &FolderListing<'_>) -> Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }

    /// Returns the missing files of a checkpoint, as shown by the names of the existing files or by an index; `None` if
    /// no file is missing.
    ///
    /// # Errors
    /// `Io`; `Malformed` and `Conflict` if names contradict each other.
    fn shortfall(&self, _: &FilePath, _: &DetectedFiles, _: &ReadOptions, _: IoMode) -> Result<Option<Shortfall>> {
        Ok(None)
    }

    /// Reads the names, shapes and locations of tensors, and the objects. Also returns the format, because some
    /// formats can be distinguished only after reading.
    ///
    /// # Errors
    /// `Malformed`, `Missing`, `Conflict`, `Unsupported`, `Io`.
    fn read(
        &self,
        reading: &mut ReadFindings<'_>,
        path: &FilePath,
        found: DetectedFiles,
    ) -> Result<(Format, LoadedFolder)>;

    /// Returns the form in which a checkpoint stores DTensors (it depends on the PyTorch release and on the device type
    /// of the job); `None` if the files contain no DTensor.
    ///
    /// # Errors
    /// `Malformed`, `Io`.
    fn style(&self, _: &Files) -> Result<Option<DTensorStyle>> {
        Ok(None)
    }

    /// Returns whether a file, given by its path and its first bytes, is a container: a file that itself records which
    /// of its bytes are tensor data.
    fn is_container(&self, _: &FilePath, _head: &[u8]) -> bool {
        false
    }

    /// Reads all bytes of a container that are not tensor data. [`Files`] records the byte ranges that are read (see
    /// [`Files::recording_reads`]), and the metadata mirror (a sparse copy of the metadata of all files) copies these
    /// ranges. Damage is ignored.
    fn read_header(&self, _: &Files, _: FileId) {}

    /// Returns the objects in the data files of a folder, according to its metadata files.
    ///
    /// # Errors
    /// The errors of reading metadata.
    fn objects(&self, _folder: &FilePath) -> Result<Objects> {
        Ok(Objects::new())
    }

    /// Reads the given objects from a data file. [`Files`] records the byte ranges that are read (see
    /// [`Files::recording_reads`]), and the metadata mirror (a sparse copy of the metadata of all files) copies these
    /// ranges. Damage is ignored.
    fn read_objects(&self, _: &Files, _: FileId, _: &[Object]) {}
}

/// The position of an object (a value that is not a tensor) in a data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The name of the object.
    pub fqn: Fqn,
    /// The offset in the data file, in bytes.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// The objects in each data file. The paths are relative to the folder of the metadata.
pub type Objects = BTreeMap<PathBuf, Vec<Object>>;

/// The writer of a format that stores shards for the ranks of a mesh.
pub trait WriteShards: Sync {
    /// Lays out the files of a target: decides their names and lengths, and serialises everything but tensor data.
    ///
    /// # Errors
    /// `Unsupported` if the format cannot store a dtype, an object or a name; the errors of `layouts`.
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation>;

    /// Returns whether the written files depend on the PyTorch version that will load them.
    fn depends_on_torch_version(&self) -> bool {
        false
    }

    /// Returns whether the written files record the split rules of DTensors that are not split like `torch.chunk`.
    fn records_splits(&self) -> bool {
        false
    }
}

/// The writer of a format that stores whole tensors.
pub trait WriteWhole: Sync {
    /// Returns whether a destination of this name is a single file rather than a folder.
    fn is_one_file(&self, destination: Option<&FilePath>) -> bool;

    /// Returns whether the written files record further names of tied tensors. The data of a tied tensor is written
    /// under its first name only.
    fn records_aliases(&self) -> bool {
        false
    }

    /// Lays out the files of named tensors.
    ///
    /// # Errors
    /// `Unsupported` if the format cannot store a dtype or a name.
    fn reserve(&self, target: WholeTarget<'_>) -> Result<Reservation>;

    /// Lays out the state dict of a catalog with its nesting and its objects. Returns `None` for a format that stores
    /// only named tensors.
    ///
    /// # Errors
    /// `Unsupported` if the format cannot store an object.
    fn reserve_state(&self, _: &Catalog, _destination: Option<&FilePath>) -> Result<Option<Reservation>> {
        Ok(None)
    }
}

/// The writer of a format that stores the complete state of a training job, in files that do not depend on a mesh.
pub trait WriteState: Sync {
    /// Lays out the files of a target.
    ///
    /// # Errors
    /// `Unsupported` if the format cannot store a name, an object or an optimizer.
    fn reserve(&self, target: StateTarget<'_>) -> Result<Reservation>;
}

/// The input of [`WriteState::reserve`]: the state dict of a training job.
pub struct StateTarget<'a> {
    /// The catalog with the tensors that occur in `state`.
    pub source: &'a Catalog,
    /// The state dict to write.
    pub state: &'a Value,
    /// Reads the number in a tensor without dims; `None` if only another process has the file of the tensor.
    pub number: &'a dyn Fn(TensorId) -> Result<Option<f64>>,
}

/// The input of [`WriteWhole::reserve`]: named tensors, each of which is written in full.
pub struct WholeTarget<'a> {
    /// The catalog with the shapes of tensors. If the format keeps strides, the strides and dtypes in this catalog are
    /// written, and `dtypes` is not used.
    pub source: &'a Catalog,
    /// The output dtype of each tensor of `source`.
    pub dtypes: &'a [Dtype],
    /// The tensors, in the order to write.
    pub tensors: &'a [(Fqn, TensorId)],
    /// The names of tied tensors that are recorded but not written. Each pair has such a name, and the name under which
    /// the tensor is written.
    pub aliases: &'a [(Fqn, Fqn)],
    /// The path of DST; `None` if there is no DST.
    pub destination: Option<&'a FilePath>,
    /// The maximum number of bytes of tensor data in one file, if the output is a folder. A larger tensor gets a file
    /// of its own.
    pub max_shard_bytes: u64,
    /// The output file of each tensor name, if the output is a folder with the file names of the source; otherwise
    /// `None`.
    pub placing: Option<Placing>,
}

/// The input of [`WriteShards::reserve`]: a state dict, and the layout of its tensors on the ranks of a job.
pub struct ShardedTarget<'a> {
    /// The catalog with the tensors that occur in `state`.
    pub source: &'a Catalog,
    /// The state dict to write.
    pub state: &'a Value,
    /// The target mesh.
    pub mesh: &'a DeviceMesh,
    /// The number of ranks of the job. A rank outside the mesh has no part of the tensors that are sharded over the
    /// mesh.
    pub world_size: u32,
    /// The form in which DTensors are written. The form depends on the PyTorch version that will load the rank files.
    pub style: &'a DTensorStyle,
    /// The names of rank files, for formats that have series of rank files.
    pub names: Option<&'a RankNamePattern>,
    /// The target layout of each tensor.
    pub layouts: &'a mut dyn Layouts,
}

/// Provides the target layout of tensors on ranks.
pub trait Layouts {
    /// Returns the distinct tiles of a tensor in the target layout, each with the ranks that have the tile.
    ///
    /// # Errors
    /// `Usage` and `Unsupported` if a tensor cannot have the requested layout.
    fn shards(&mut self, path: &Path, entry: &TensorEntry) -> Result<Vec<HeldTile>>;

    /// Returns the layout of a tensor in torch.save rank files: as a plain tensor, a DTensor or a ShardedTensor.
    ///
    /// # Errors
    /// The errors of [`Self::shards`].
    fn rank_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<RankLayout>;

    /// Returns the class and the placements of a tensor; `None` for a plain tensor that every rank has in full.
    ///
    /// # Errors
    /// The errors of [`Self::shards`].
    fn local_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<LocalLayout>;
}
