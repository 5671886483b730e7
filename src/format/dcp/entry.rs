//! DCP directories, which `torch.distributed.checkpoint.save` writes and torchtitan, accelerate, Lightning and others
//! use: a `.metadata` pickle with the name, the shape and the chunks of each tensor, and the data files that the ranks
//! wrote. dtshard reads all files of a folder together, as one checkpoint.

use std::path::Path;

use super::{look_at, metadata_files, objects, read, reserve};
use crate::catalog::Reservation;
use crate::error::{Error, Result};
use crate::format::entry::{FormatEntry, TensorStorage, Writers};
use crate::format::known_files::{FileRole, FileSignature, KnownFile};
use crate::format::listing::{DetectedFiles, FileStart, FolderListing, Match};
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::traits::{Object, Objects, Read, ShardedTarget, WriteShards};
use crate::format::{Format, ReadOptions};
use crate::storage::{FileId, Files};

/// The row for DCP directories in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    files: "`__R_0.distcp`, `.metadata`",
    metadata_suffixes: &["metadata"],
    data_suffixes: &["distcp"],
    known_files: &[
        KnownFile::new(".metadata", FileRole::Checkpoint, FileSignature::Like(is_pickle)),
        KnownFile::new("__[0-9]*.metadata", FileRole::Checkpoint, FileSignature::Like(is_pickle)),
        KnownFile::new("__[0-9]*_[0-9]*.distcp", FileRole::Checkpoint, FileSignature::Any),
    ],
    holds_objects: true,
    writers: Writers { shards: Some(&Writer), ..Writers::NONE },
    ..FormatEntry::new("dcp", "PyTorch Distributed Checkpoint directory", TensorStorage::Boxes, &Reader)
};

/// Returns whether a file starts like a pickle of protocol 2 or later.
fn is_pickle(head: &[u8], _len: u64) -> bool {
    head.first() == Some(&0x80)
}

/// The reader of DCP directories.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        if !metadata_files(listing.folder)?.is_empty() {
            return Ok(Some(DetectedFiles::new(Format::Dcp, Match::Certain, Vec::new())));
        }
        if listing.names.iter().any(|name| name.ends_with(".distcp")) && listing.from.is_none() {
            return Err(Error::missing(
                listing.folder,
                "DCP directory",
                "the metadata of its .distcp files",
                ".metadata",
            ));
        }
        Ok(None)
    }

    fn find_file(&self, file: &FileStart<'_>) -> Result<Option<DetectedFiles>> {
        if file.name != ".metadata" && !file.name.ends_with(".distcp") {
            return Ok(None);
        }
        Err(Error::unsupported(
            format!("{} is one file of a DCP directory", file.path.display()),
            "give the directory as SRC",
        ))
    }

    fn read(&self, reading: &mut ReadFindings<'_>, path: &Path, _: DetectedFiles) -> Result<(Format, LoadedFolder)> {
        let ReadOptions { show_incomplete, .. } = *reading.options;
        let (mut catalog, lacks) = read(&mut reading.files, path, reading.options.unknown(), show_incomplete)?;
        catalog.warnings.extend(reading.admit(lacks)?);
        Ok((Format::Dcp, LoadedFolder::whole(catalog)))
    }

    fn objects(&self, folder: &Path) -> Result<Objects> {
        objects(folder)
    }

    fn read_objects(&self, files: &Files, file: FileId, objects: &[Object]) {
        look_at(files, file, objects);
    }
}

/// The writer of DCP directories.
struct Writer;

impl WriteShards for Writer {
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation> {
        let ShardedTarget { source, state, layouts, .. } = target;
        reserve(source, state, &mut |_, path, entry| layouts.shards(path, entry))
    }
}
