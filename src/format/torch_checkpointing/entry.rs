//! Checkpoints that `CheckpointManager` of the package torch_checkpointing (meta-pytorch) writes: `metadata.pkl`, and
//! one torch.save or safetensors file for each item and rank. All files of a folder that `metadata.pkl` names, and
//! files `NAME_RANK.pt` of further items, form one checkpoint. An item is read like a series of rank files.

use std::path::Path;

use super::item_files::ItemFiles;
use super::metadata::CheckpointMetadata;
use super::{METADATA, metadata_of, read};
use crate::error::{Error, Result};
use crate::format::entry::{FormatEntry, TensorStorage};
use crate::format::listing::{DetectedFiles, FileStart, FolderListing};
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::shortfall::Shortfall;
use crate::format::torch::DTensorStyle;
use crate::format::traits::Read;
use crate::format::{Format, ReadOptions};
use crate::storage::{Files, IoMode};

/// The row for checkpoints of torch_checkpointing in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    name: "torch-checkpointing",
    about: "folder that the package torch_checkpointing writes",
    files: "(none)",
    suffixes: &[],
    index_suffix: None,
    metadata_suffixes: &[],
    data_suffixes: &[],
    // No DST has this format, so `--overwrite` never replaces such a folder.
    known_files: &[],
    is_checkpoint_file: None,
    tensors: TensorStorage::Ranks,
    holds_objects: true,
    has_rank_files: false,
    keeps_order: false,
    is_in_module_order: false,
    names_tensors_by_rank: false,
    read: &Reader,
    write_shards: None,
    write_whole: None,
};

/// The reader of checkpoints of torch_checkpointing.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        if !listing.names.iter().any(|name| name == METADATA) {
            return Ok(None);
        }
        let Some(bytes) = metadata_of(listing.folder)? else { return Ok(None) };
        let path = listing.folder.join(METADATA);
        let metadata = CheckpointMetadata::parse(&path, &bytes)?;
        let paths = ItemFiles::of(listing.folder, &metadata)?.paths();
        Ok(Some(DetectedFiles::indexed(Format::TorchCheckpointing, paths, path)))
    }

    fn find_file(&self, file: &FileStart<'_>) -> Result<Option<DetectedFiles>> {
        let folder = file.path.parent().unwrap_or(Path::new("."));
        if file.name != METADATA || metadata_of(folder)?.is_none() {
            return Ok(None);
        }
        Err(Error::unsupported(
            format!("{} is one file of a folder of torch_checkpointing", file.path.display()),
            "give the folder as SRC",
        ))
    }

    fn shortfall(&self, path: &Path, _: &DetectedFiles, options: &ReadOptions, _: IoMode) -> Result<Option<Shortfall>> {
        read::shortfall(path, &options.series)
    }

    fn read(&self, reading: &mut ReadFindings<'_>, path: &Path, _: DetectedFiles) -> Result<(Format, LoadedFolder)> {
        Ok((Format::TorchCheckpointing, read::read(reading, path)?))
    }

    fn style(&self, files: &Files) -> Result<Option<DTensorStyle>> {
        let is_torch = |path: &Path| path.extension().is_some_and(|suffix| suffix == "pt");
        let first = files.ids().find(|id| is_torch(files.path(*id)));
        first.map_or(Ok(None), |first| DTensorStyle::from_file(files, first))
    }
}
