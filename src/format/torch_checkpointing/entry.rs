//! Checkpoints that `CheckpointManager` of the package torch_checkpointing (meta-pytorch) writes: `metadata.pkl`, and
//! one torch.save or safetensors file for each checkpoint item and rank. The files that `metadata.pkl` names, and the
//! files `NAME_RANK.pt` of checkpoint items that it does not name, form one checkpoint. A checkpoint item is read like
//! a series of rank files.

use std::path::Path;

use super::item_files::ItemFiles;
use super::metadata::CheckpointMetadata;
use super::{METADATA, metadata_of, read, write};
use crate::catalog::Reservation;
use crate::error::{Error, Result};
use crate::format::entry::{FormatEntry, TensorStorage, Writers};
use crate::format::known_files::{FileRole, FileSignature, KnownFile};
use crate::format::listing::{DetectedFiles, FileStart, FolderListing};
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::shortfall::Shortfall;
use crate::format::torch::DTensorStyle;
use crate::format::traits::{Read, ShardedTarget, WriteShards};
use crate::format::{Format, ReadOptions};
use crate::storage::{Files, IoMode};
use memchr::memmem;

/// The row for checkpoints of torch_checkpointing in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    files: "`ITEM_RANK.pt` for each item such as `model`, `metadata.pkl`",
    // The row of the format `torch` lists the torch.save files.
    known_files: &[KnownFile::new(METADATA, FileRole::Checkpoint, FileSignature::Like(starts_like_metadata))],
    holds_objects: true,
    names_tensors_by_rank: true,
    writers: Writers { shards: Some(&Writer), ..Writers::NONE },
    ..FormatEntry::new(
        "torch-checkpointing",
        "folder that the package torch_checkpointing writes",
        TensorStorage::Ranks,
        &Reader,
    )
};

/// Returns whether a file starts like the metadata that the package or dtshard writes.
fn starts_like_metadata(head: &[u8], _len: u64) -> bool {
    let has = |mark: &[u8]| memmem::find(head, mark).is_some();
    head.first() == Some(&0x80) && has(b"metadata") && has(b"nested_path_to_metadata")
}

/// The reader of checkpoints of torch_checkpointing.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        if !listing.names.iter().any(|name| name == METADATA) {
            return Ok(None);
        }
        let Some(bytes) = metadata_of(listing.folder)? else {
            if listing.from.is_none_or(|from| from == Format::TorchCheckpointing) {
                super::refuse_damaged(listing.folder, &listing.names)?;
            }
            return Ok(None);
        };
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

/// The writer of checkpoints of torch_checkpointing.
struct Writer;

impl WriteShards for Writer {
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation> {
        write::reserve(target)
    }

    fn depends_on_torch_version(&self) -> bool {
        true
    }
}
