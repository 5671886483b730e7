//! Rows of the table of formats.
//!
//! A format is a folder in [`crate::format`], and one line of the table [there](super::Format::ALL). Detection, `--from`,
//! `--to`, their help and the table in the README come from the rows.

use std::path::Path as FilePath;

use super::listing::{DetectedFiles, FileStart, FolderListing};
use super::local::LocalLayout;
use super::parts::LoadedFolder;
use super::rank_names::RankNames;
use super::reading::ReadFindings;
use super::shortfall::Shortfall;
use super::torch::{DTensorStyle, RankLayout};
use super::{Format, ReadOptions};
use crate::catalog::{Catalog, Path, Reservation, TensorEntry, Value};
use crate::error::Result;
use crate::layout::DeviceMesh;
use crate::layout::shards::Held;
use crate::storage::IoMode;

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
    pub read: &'static dyn Read,
    /// The writer of tensors that the ranks of a mesh share.
    pub write_shards: Option<&'static dyn WriteShards>,
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
}

/// A format that is written for the ranks of a mesh.
pub trait WriteShards: Sync {
    /// Lays out the files of a target: decides their names and lengths, and serialises everything but tensor data.
    ///
    /// # Errors
    /// `Unsupported` where the format cannot hold a dtype, an object or a name; the errors of `layouts`.
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation>;
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
    pub names: Option<&'a RankNames>,
    pub layouts: &'a mut dyn Layouts,
}

/// Says how tensors are to lie on ranks.
pub trait Layouts {
    /// Returns the distinct tiles of a tensor, each with the ranks that hold it.
    ///
    /// # Errors
    /// `Usage` and `Unsupported` where a tensor cannot lie as it was asked for.
    fn shards(&mut self, path: &Path, entry: &TensorEntry) -> Result<Vec<Held>>;

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
