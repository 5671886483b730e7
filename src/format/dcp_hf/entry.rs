//! Shards of DCP's Hugging Face storage, which `HuggingFaceStorageWriter` of PyTorch writes: safetensors files that
//! contain boxes of tensors. All shard files of a folder are read together.

use std::path::Path;

use super::{lone_shard, reserve, shortfall};
use crate::catalog::Reservation;
use crate::error::Result;
use crate::format::entry::{FormatEntry, TensorStorage, Writers};
use crate::format::listing::{DetectedFiles, FileStart, FolderListing, Match};
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::safetensors::sharding::ShardName;
use crate::format::shortfall::Shortfall;
use crate::format::traits::{Read, ShardedTarget, WriteShards};
use crate::format::{Format, ReadOptions, safetensors, sets};
use crate::storage::IoMode;

/// The row for DCP's Hugging Face shards in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    files: "`shard-RRRRR-model-00001-of-00001.safetensors`",
    // The table row of safetensors lists the known files of both formats.
    known_files: &[],
    names_tensors_by_rank: true,
    writers: Writers { shards: Some(&Writer), ..Writers::NONE },
    ..FormatEntry::new("dcp-hf", "shards of DCP's Hugging Face storage", TensorStorage::Boxes, &Reader)
};

/// The reader of DCP's Hugging Face shards.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        let mut paths = listing.files_of(Format::Safetensors)?;
        paths.retain(|path| ShardName::parse(path).is_some());
        Ok((!paths.is_empty()).then(|| DetectedFiles::new(Format::DcpHf, Match::Certain, paths)))
    }

    fn find_file(&self, file: &FileStart<'_>) -> Result<Option<DetectedFiles>> {
        Ok(ShardName::parse(file.path).map(|_| file.found(Format::DcpHf, Match::Likely)))
    }

    fn shortfall(&self, path: &Path, found: &DetectedFiles, _: &ReadOptions, io: IoMode) -> Result<Option<Shortfall>> {
        if sets::is_given(path, &found.paths) {
            return lone_shard(path).map(Some);
        }
        shortfall(path, &found.paths, io)
    }

    fn read(&self, reading: &mut ReadFindings<'_>, _: &Path, found: DetectedFiles) -> Result<(Format, LoadedFolder)> {
        let (catalog, _) = safetensors::read(&mut reading.files, &found.paths, None)?;
        Ok((Format::DcpHf, LoadedFolder::whole(catalog)))
    }
}

/// The writer of DCP's Hugging Face shards.
struct Writer;

impl WriteShards for Writer {
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation> {
        let ShardedTarget { source, state, layouts, .. } = target;
        reserve(source, state, layouts)
    }
}
