//! The row of the table of formats for safetensors.

use std::path::{Path, PathBuf};

/// Reads one file, or the files of a folder.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        // Hubs keep other sets beside the one that transformers loads: `consolidated.safetensors.index.json`.
        if let Some(name) = main_index(listing.names.iter().filter(|name| is_safetensors_index(name)), INDEX_NAME) {
            let index = listing.folder.join(name);
            let paths = ShardIndex::read(&index)?.files()?;
            return Ok(Some(DetectedFiles {
                certainty: Match::Likely,
                ..DetectedFiles::indexed(Format::Safetensors, paths, index)
            }));
        }
        let is_local = local::is_in(listing);
        let mut paths = listing.files_of(Format::Safetensors)?;
        paths.retain(|path| ShardName::parse(path).is_none() && !(is_local && local::rank_of(path).is_some()));
        Ok((!paths.is_empty()).then(|| DetectedFiles::new(Format::Safetensors, Match::Likely, paths)))
    }

    fn find_file(&self, file: &FileStart<'_>) -> Result<Option<DetectedFiles>> {
        if is_safetensors_index(&file.name) {
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
}

/// Reads files that each hold what one rank has, by their names.
///
/// # Errors
/// `Usage` where names do not tell ranks; as reading the files.
pub fn read_parts(reading: &mut ReadFindings<'_>, path: &Path, paths: &[PathBuf]) -> Result<(Format, LoadedFolder)> {
    let is_folder = lookup::is_folder(path)?;
    let Some(set) = group(path, paths)?.ranks.filter(|_| is_folder) else {
        return Err(without_ranks(path));
    };
    let chosen = reading.choose(set)?;
    let mut loaded = chosen.read_by(reading.options, &mut |of_ranks| ranks::read(&mut reading.files, of_ranks))?;
    // Names of these are none for torch files.
    loaded.parts.iter_mut().for_each(|part| part.names = None);
    Ok((Format::Safetensors, loaded))
}

use super::sharding::ShardName;
use super::{INDEX_NAME, ranks, read};
use crate::error::Result;
use crate::format::index::{ShardIndex, is_safetensors_index, main_index};
use crate::format::listing::{DetectedFiles, FileStart, FolderListing, Match};
use crate::format::parts::LoadedFolder;
use crate::format::reading::{ReadFindings, without_ranks};
use crate::format::registry::{FormatEntry, Read, TensorStorage};
use crate::format::series::group;
use crate::format::shortfall::Shortfall;
use crate::format::{Format, ReadOptions, local, sets};
use crate::storage::{IoMode, lookup};

/// The row of the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    name: "safetensors",
    about: "one file, or a folder with its index",
    files: "`model.safetensors`, or `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`",
    suffixes: &["safetensors"],
    tensors: TensorStorage::Whole,
    holds_objects: false,
    has_rank_files: false,
    keeps_order: false,
    is_in_module_order: false,
    names_tensors_by_rank: false,
    read: &Reader,
    write_shards: None,
};
