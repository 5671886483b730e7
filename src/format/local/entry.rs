//! dtshard's own format for programs without DTensors. It has one safetensors file per rank with the local tensors of
//! that rank, and `layout.json` with meshes, placements and objects. All rank files of a folder are read together.

use std::path::Path as FilePath;

use super::{FILE_NAME, LocalTarget, matches_listing, rank_of, read, refuse_declared_layout, reserve};
use crate::catalog::{Path, Reservation, TensorEntry};
use crate::error::Result;
use crate::format::Format;
use crate::format::entry::{FormatEntry, TensorStorage, Writers};
use crate::format::json::is_layout_document;
use crate::format::known_files::{FileRole, FileSignature, KnownFile};
use crate::format::listing::{DetectedFiles, FolderListing, Match};
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::safetensors::entry::read_parts;
use crate::format::traits::{Read, ShardedTarget, WriteShards};

/// The row for the format `local` in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    files: "`rank-00000.safetensors`, ..., `layout.json`",
    // The table row of safetensors lists the rank files as known files.
    known_files: &[KnownFile::new(FILE_NAME, FileRole::Beside, FileSignature::Like(is_layout_document))],
    holds_objects: true,
    is_in_module_order: true,
    names_tensors_by_rank: true,
    writers: Writers { shards: Some(&Writer), ..Writers::NONE },
    ..FormatEntry::new(
        "local",
        "one safetensors file per rank, with the rank's shards as plain tensors, and `layout.json`",
        TensorStorage::Ranks,
        &Reader,
    )
};

/// The reader of rank files with `layout.json`.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        if !matches_listing(listing) {
            return Ok(None);
        }
        let mut paths = listing.files_of(Format::Safetensors)?;
        paths.retain(|path| rank_of(path).is_some());
        Ok(Some(DetectedFiles::new(Format::Local, Match::Certain, paths)))
    }

    fn read(
        &self,
        reading: &mut ReadFindings<'_>,
        path: &FilePath,
        found: DetectedFiles,
    ) -> Result<(Format, LoadedFolder)> {
        if reading.options.declared_layout.is_some() {
            refuse_declared_layout(path)?;
            return read_parts(reading, path, &found.paths);
        }
        reading.other_files.push(path.join(FILE_NAME));
        let (mut catalog, ranks, lacks) = read(&mut reading.files, path, &found.paths)?;
        catalog.warnings.extend(reading.admit(lacks)?);
        let mut loaded = LoadedFolder::whole(catalog);
        loaded.parts.iter_mut().for_each(|part| part.world_size = ranks);
        Ok((Format::Local, loaded))
    }
}

/// The writer of rank files and their `layout.json`.
struct Writer;

impl WriteShards for Writer {
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation> {
        let ShardedTarget { source, state, mesh, world_size, layouts, .. } = target;
        let layout = &mut |path: &Path, entry: &TensorEntry| layouts.local_layout(path, entry);
        reserve(source, state, LocalTarget { mesh, world_size, layout })
    }

    fn records_splits(&self) -> bool {
        true
    }
}
