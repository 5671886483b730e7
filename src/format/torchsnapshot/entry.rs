//! Snapshots that torchsnapshot's `Snapshot.take` and `Snapshot.async_take` write: a folder with a manifest,
//! `.snapshot_metadata`, which lists every value of every rank, and with files of tensor data. All files of the folder
//! form one checkpoint. dtshard reads snapshots, and does not write them.

use std::path::Path;

use super::{MANIFEST, read};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::format::entry::{FormatEntry, TensorStorage};
use crate::format::listing::{DetectedFiles, FileStart, FolderListing, Match};
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::traits::Read;

/// The row for snapshots in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    metadata_suffixes: &["snapshot_metadata"],
    // No DST has this format, so `--overwrite` never replaces such a folder.
    known_files: &[],
    holds_objects: true,
    is_in_module_order: true,
    ..FormatEntry::new(
        "torchsnapshot",
        "folder that torchsnapshot's `Snapshot.take` writes",
        TensorStorage::Boxes,
        &Reader,
    )
};

/// The reader of snapshots.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        let has_manifest = listing.names.iter().any(|name| name == MANIFEST);
        Ok(has_manifest.then(|| DetectedFiles::new(Format::Torchsnapshot, Match::Certain, Vec::new())))
    }

    fn find_file(&self, file: &FileStart<'_>) -> Result<Option<DetectedFiles>> {
        if file.name != MANIFEST {
            return Ok(None);
        }
        Err(Error::unsupported(
            format!("{} is one file of a torchsnapshot folder", file.path.display()),
            "give the folder as SRC",
        ))
    }

    fn read(&self, reading: &mut ReadFindings<'_>, path: &Path, _: DetectedFiles) -> Result<(Format, LoadedFolder)> {
        let catalog = read(&mut reading.files, path, reading.options.unknown())?;
        Ok((Format::Torchsnapshot, LoadedFolder::whole(catalog)))
    }
}
