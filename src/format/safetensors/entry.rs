//! The safetensors format, which Hugging Face libraries write and most loaders read: named whole tensors, without
//! nesting and without objects, in one file or in a folder of files with an index. The reader reads a single file, or
//! the files that an index names, or all safetensors files of a folder without an index.

use std::path::{Path, PathBuf};

use super::sharding::ShardName;
use super::{FileDivision, INDEX_NAME, SelectedTensors, look_at, ranks, read, reserve, starts_with_header};
use crate::catalog::Reservation;
use crate::error::Result;
use crate::format::entry::{FormatEntry, TensorStorage, Writers};
use crate::format::index::{ShardIndex, is_index_of, main_index};
use crate::format::known_files::{FileRole, FileSignature, KnownFile};
use crate::format::listing::{DetectedFiles, FileStart, FolderListing, Match};
use crate::format::parts::LoadedFolder;
use crate::format::reading::{ReadFindings, without_ranks};
use crate::format::series::group;
use crate::format::shortfall::Shortfall;
use crate::format::traits::{Read, WholeTarget, WriteWhole};
use crate::format::{Format, ReadOptions, local, sets};
use crate::storage::{FileId, Files, IoMode, lookup};

/// The suffix of safetensors files.
const SUFFIX: &str = "safetensors";

/// The row for safetensors in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    files: "`model.safetensors`, or `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`",
    suffixes: &[SUFFIX],
    index_suffix: Some(SUFFIX),
    known_files: &[
        KnownFile::new("*.safetensors", FileRole::Checkpoint, FileSignature::Like(starts_with_header)),
        KnownFile::beside("*.safetensors.index{,.*}.json"),
    ],
    is_checkpoint_file: Some(starts_with_header),
    writers: Writers { whole: Some(&Writer), ..Writers::NONE },
    ..FormatEntry::new("safetensors", "one file, or a folder with its index", TensorStorage::Whole, &Reader)
};

/// The reader of one safetensors file, or of the safetensors files of a folder.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        // A folder may have two sets of files with the same tensors. The set that transformers loads is read, and not a
        // set such as that of `consolidated.safetensors.index.json`.
        if let Some(name) =
            main_index(listing.names.iter().filter(|name| is_index_of(name, Format::Safetensors)), INDEX_NAME)
        {
            let index = listing.folder.join(name);
            let paths = ShardIndex::read(&index)?.files()?;
            return Ok(Some(DetectedFiles {
                certainty: Match::Likely,
                ..DetectedFiles::indexed(Format::Safetensors, paths, index)
            }));
        }
        let is_local = local::matches_listing(listing);
        let mut paths = listing.files_of(Format::Safetensors)?;
        paths.retain(|path| ShardName::parse(path).is_none() && !(is_local && local::rank_of(path).is_some()));
        Ok((!paths.is_empty()).then(|| DetectedFiles::new(Format::Safetensors, Match::Likely, paths)))
    }

    fn find_file(&self, file: &FileStart<'_>) -> Result<Option<DetectedFiles>> {
        if is_index_of(&file.name, Format::Safetensors) {
            let paths = ShardIndex::read(file.path)?.files()?;
            return Ok(Some(DetectedFiles::indexed(Format::Safetensors, paths, file.path.to_path_buf())));
        }
        let is_one = file.head.get(8) == Some(&b'{') || file.name.ends_with(".safetensors");
        Ok(is_one.then(|| file.found(Format::Safetensors, Match::Possible)))
    }

    fn shortfall(
        &self,
        path: &Path,
        found: &DetectedFiles,
        options: &ReadOptions,
        _: IoMode,
    ) -> Result<Option<Shortfall>> {
        sets::shortfall(path, found, options)
    }

    fn read(
        &self,
        reading: &mut ReadFindings<'_>,
        path: &Path,
        found: DetectedFiles,
    ) -> Result<(Format, LoadedFolder)> {
        let DetectedFiles { paths, index, .. } = found;
        if index.is_none() && reading.options.declared_layout.is_some() {
            return read_parts(reading, path, &paths);
        }
        let index = index.as_deref().map(ShardIndex::read).transpose()?;
        let (mut catalog, differing) = read(&mut reading.files, &paths, index.as_ref())?;
        reading.check_index(index, differing, &mut catalog)?;
        Ok((Format::Safetensors, LoadedFolder::whole(catalog)))
    }

    fn is_container(&self, path: &Path, head: &[u8]) -> bool {
        head.get(8) == Some(&b'{') || path.extension().is_some_and(|suffix| suffix == SUFFIX)
    }

    fn read_header(&self, files: &Files, file: FileId) {
        look_at(files, file);
    }
}

/// Reads safetensors files that each contain the shards of one rank. The file names give the ranks.
///
/// # Errors
/// `Usage` if names do not contain ranks; the errors of reading the files.
pub fn read_parts(reading: &mut ReadFindings<'_>, path: &Path, paths: &[PathBuf]) -> Result<(Format, LoadedFolder)> {
    let is_folder = lookup::is_folder(path)?;
    let Some(set) = group(path, paths)?.rank_files.filter(|_| is_folder) else {
        return Err(without_ranks(path));
    };
    let chosen = reading.choose(set)?;
    let mut loaded = chosen.read_with(reading.options, &mut |of_ranks| ranks::read(&mut reading.files, of_ranks))?;
    // A target with torch files cannot use the names of safetensors files.
    loaded.parts.iter_mut().for_each(|part| part.name_pattern = None);
    Ok((Format::Safetensors, loaded))
}

/// The writer of one safetensors file, or of a folder of safetensors files with an index.
struct Writer;

impl WriteWhole for Writer {
    fn is_one_file(&self, destination: Option<&Path>) -> bool {
        destination.and_then(Path::extension).is_some_and(|suffix| suffix == SUFFIX)
    }

    fn records_aliases(&self) -> bool {
        true
    }

    fn reserve(&self, target: WholeTarget<'_>) -> Result<Reservation> {
        let WholeTarget { source, dtypes, tensors, aliases, destination, max_shard_bytes, placing } = target;
        let shape = match (placing, destination.and_then(Path::file_name)) {
            (_, Some(name)) if self.is_one_file(destination) => FileDivision::File(PathBuf::from(name)),
            (Some(placing), _) => FileDivision::Like(placing),
            (None, _) => FileDivision::Folder { max_shard_bytes },
        };
        reserve(SelectedTensors { source, dtypes }, tensors, aliases, &shape)
    }
}
