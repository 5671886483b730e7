//! Files of `torch.save`, in two formats. `torch`, which most training scripts write, is one file with a whole state
//! dict, or the set of files that an index names. `torch-ranks`, which verl and others write, has one file for each
//! rank of a job with DTensors or ShardedTensors; a series of rank files is read as a whole.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::{DTensorStyle, RankTarget, is_archive, is_no_model, look_at, read, reserve, reserve_ranks};
use crate::catalog::{Catalog, Reservation, TensorId, state_dict};
use crate::error::Result;
use crate::format::detect::not_that_format;
use crate::format::entry::{FormatEntry, TensorStorage, Writers};
use crate::format::index::{ShardIndex, is_index_of, main_index};
use crate::format::known_files::{FileRole, FileSignature, KnownFile};
use crate::format::listing::{DetectedFiles, FileStart, FolderListing, Match};
use crate::format::parts::LoadedFolder;
use crate::format::rank_names::{Numbering, RankName};
use crate::format::reading::ReadFindings;
use crate::format::series::{GroupedFiles, group};
use crate::format::shortfall::Shortfall;
use crate::format::traits::{Read, ShardedTarget, WholeTarget, WriteShards, WriteWhole};
use crate::format::{Format, ReadOptions, distinct_names, fsdp_flat, sets, torch_checkpointing};
use crate::storage::lookup::{self, FileKind};
use crate::storage::{FileId, Files, IoMode};

/// The row for torch.save files of whole tensors in the table of formats: one file, or the files that an index names.
pub static ONE_FILE: FormatEntry = FormatEntry {
    files: "one file with the name DST",
    suffixes: &["pt", "pth", "bin", "ckpt"],
    index_suffix: Some("bin"),
    known_files: &[
        KnownFile::new("*.{pt,pth,bin,ckpt,tar}", FileRole::Checkpoint, FileSignature::Like(is_archive)),
        KnownFile::beside("*.bin.index{,.*}.json"),
    ],
    is_checkpoint_file: Some(is_archive),
    holds_objects: true,
    keeps_order: true,
    is_in_module_order: true,
    writers: Writers { whole: Some(&Writer), ..Writers::NONE },
    ..FormatEntry::new("torch", "one `torch.save` file, or a set with an index", TensorStorage::Whole, &Reader)
};

/// The row for torch.save files of ranks in the table of formats.
pub static RANK_FILES: FormatEntry = FormatEntry {
    files: "`model_world_size_N_rank_R.pt`; one such series for each series of SRC",
    // The row of the format `torch` lists the known files of both formats.
    known_files: &[],
    holds_objects: true,
    has_rank_files: true,
    keeps_order: true,
    is_in_module_order: true,
    names_tensors_by_rank: true,
    writers: Writers { shards: Some(&RankWriter), ..Writers::NONE },
    ..FormatEntry::new(
        "torch-ranks",
        "one `torch.save` file per rank: DTensors, ShardedTensors, plain tensors",
        TensorStorage::Ranks,
        &RankReader,
    )
};

/// The name of the index that loaders of torch files read.
const INDEX_NAME: &str = "pytorch_model.bin.index.json";

/// Returns the torch files of a folder, grouped by their names. Returns `None` if the folder has an index, which names
/// the files to read.
fn grouped(listing: &FolderListing<'_>) -> Result<Option<GroupedFiles>> {
    if listing.names.iter().any(|name| is_index_of(name, Format::Torch)) {
        return Ok(None);
    }
    let mut files = listing.files_of(Format::Torch)?;
    files.extend(model_parallel_files(listing)?);
    let mut grouped = group(listing.folder, &files)?;
    grouped.plain.retain(|path| !is_no_model(path));
    Ok(Some(grouped))
}

/// Returns the files of model-parallel ranks, which makani names `ckpt_mp3_v0.tar`. These files are torch files; other
/// files with the suffix `.tar` are not.
fn model_parallel_files(listing: &FolderListing<'_>) -> Result<Vec<PathBuf>> {
    let is_named_so = |name: &str| {
        let parsed = RankName::parse(Path::new(name));
        !name.starts_with('.') && parsed.is_some_and(|parsed| parsed.numbering == Numbering::ModelParallel)
    };
    let mut found = Vec::new();
    for path in listing.names.iter().filter(|name| is_named_so(name)).map(|name| listing.folder.join(name)) {
        if lookup::kind_of(&path)? != Some(FileKind::Folder) {
            found.push(path);
        }
    }
    Ok(found)
}

/// The reader of the format `torch`.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        let Some(mut saved) = grouped(listing)? else {
            let indexes = listing.names.iter().filter(|name| is_index_of(name, Format::Torch));
            let index = listing.folder.join(main_index(indexes, INDEX_NAME).expect("an index was found"));
            let paths = ShardIndex::read(&index)?.files()?;
            return Ok(Some(DetectedFiles {
                certainty: Match::Likely,
                ..DetectedFiles::indexed(Format::Torch, paths, index)
            }));
        };
        let only_set = if saved.sets.len() == 1 { saved.sets.pop() } else { None };
        Ok(match (saved.rank_files, only_set, saved.plain.as_slice()) {
            (None, Some(set), _) => Some(DetectedFiles::new(Format::Torch, Match::Likely, set.into_paths())),
            (None, None, [only]) if saved.sets.is_empty() => {
                Some(DetectedFiles::new(Format::Torch, Match::Possible, vec![only.clone()]))
            }
            _ => None,
        })
    }

    fn find_file(&self, file: &FileStart<'_>) -> Result<Option<DetectedFiles>> {
        if is_index_of(&file.name, Format::Torch) {
            let paths = ShardIndex::read(file.path)?.files()?;
            return Ok(Some(DetectedFiles::indexed(Format::Torch, paths, file.path.to_path_buf())));
        }
        Ok(file.is_zip().then(|| file.found(Format::Torch, Match::Certain)))
    }

    fn lone_files(&self, listing: &FolderListing<'_>) -> Result<Vec<PathBuf>> {
        listing.files_of(Format::Torch)
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

    fn read(&self, reading: &mut ReadFindings<'_>, _: &Path, found: DetectedFiles) -> Result<(Format, LoadedFolder)> {
        let index = found.index.as_deref().map(ShardIndex::read).transpose()?;
        let (mut catalog, lacks) = read(&mut reading.files, &found.paths, reading.options.unknown())?;
        if let ([only], None) = (found.paths.as_slice(), &index)
            && !reading.options.show_incomplete
        {
            torch_checkpointing::refuse_lone_rank(only, &catalog)?;
        }
        let warning = reading.admit(lacks)?;
        catalog.warnings.extend(warning);
        let differing = index.as_ref().and_then(|index| differing(&reading.files, index, &catalog, &found.paths));
        reading.check_index(index, differing, &mut catalog)?;
        Ok((Format::Torch, LoadedFolder::whole(catalog)))
    }

    fn is_container(&self, _: &Path, head: &[u8]) -> bool {
        head.starts_with(b"PK\x03\x04")
    }

    fn read_header(&self, files: &Files, file: FileId) {
        look_at(files, file);
    }
}

/// Returns the first difference between an index and the torch files that it names.
fn differing(files: &Files, index: &ShardIndex, catalog: &Catalog, paths: &[PathBuf]) -> Option<Shortfall> {
    let named = state_dict::all_tensors(&catalog.state);
    let file_of = |id: TensorId| {
        let chunks = &catalog.tensor(id).chunks;
        chunks.iter().find_map(|chunk| chunk.location.file()).map(|file| files.path(file))
    };
    let holders: HashMap<&str, Option<&Path>> = named.iter().map(|(fqn, id)| (fqn.as_str(), file_of(*id))).collect();
    let stored = named.iter().map(|(fqn, id)| (fqn.as_str(), file_of(*id)));
    index.differing(&|name| holders.get(name).copied(), stored, paths)
}

/// The reader of the format `torch-ranks`. Rank files with flat parameters are detected as `torch-ranks`, too; the
/// reader finds the flat parameters when it reads the files, and then returns the format `fsdp-flat`.
pub struct RankReader;

impl Read for RankReader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        let series = grouped(listing)?.and_then(|grouped| grouped.rank_files);
        let found = |series| DetectedFiles {
            series: Some(series),
            ..DetectedFiles::new(Format::TorchRanks, Match::Likely, Vec::new())
        };
        Ok(series.map(found))
    }

    fn read(
        &self,
        reading: &mut ReadFindings<'_>,
        path: &Path,
        found: DetectedFiles,
    ) -> Result<(Format, LoadedFolder)> {
        let chosen = reading.choose(found.series.expect("rank files are in series"))?;
        let (loaded, flat) = chosen.read(&mut reading.files, reading.options)?;
        // A flat layout file is part of the checkpoint: its content is in the catalog, and is written again with the
        // catalog.
        reading.other_files.push(path.join(fsdp_flat::document::FILE_NAME));
        let is_asked_for = reading.options.from == Some(Format::FsdpFlat);
        if is_asked_for && !flat.has_flat_params && loaded.catalog.flat.is_none() {
            return Err(not_that_format(path, Format::FsdpFlat));
        }
        let format = if flat.has_flat_params || is_asked_for { Format::FsdpFlat } else { Format::TorchRanks };
        Ok((format, loaded))
    }

    fn style(&self, files: &Files) -> Result<Option<DTensorStyle>> {
        files.ids().next().map_or(Ok(None), |first| DTensorStyle::from_file(files, first))
    }
}

/// The writer of the format `torch-ranks`.
struct RankWriter;

impl WriteShards for RankWriter {
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation> {
        let ShardedTarget { source, state, mesh, world_size, style, names, layouts } = target;
        let names = names.expect("rank files have names");
        let target = RankTarget {
            mesh,
            world_size,
            style,
            name: &|rank| PathBuf::from(names.render(rank.0, world_size)),
            layout: &mut |_, path, entry| layouts.rank_layout(path, entry),
        };
        reserve_ranks(source, state, target)
    }

    fn depends_on_torch_version(&self) -> bool {
        true
    }
}

/// The writer of the format `torch`.
struct Writer;

impl WriteWhole for Writer {
    fn is_one_file(&self, _: Option<&Path>) -> bool {
        true
    }

    fn reserve(&self, target: WholeTarget<'_>) -> Result<Reservation> {
        let WholeTarget { source, tensors, destination, .. } = target;
        distinct_names(tensors.iter().map(|(fqn, _)| fqn.as_str()), &[])?;
        reserve(source, &state_dict::flat_state(tensors), file_name(destination, "pytorch_model.bin"))
    }

    fn reserve_state(&self, source: &Catalog, destination: Option<&Path>) -> Result<Option<Reservation>> {
        reserve(source, &source.state, file_name(destination, "checkpoint.pt")).map(Some)
    }
}

/// Returns the file name of a destination, or `default` if there is no destination.
fn file_name(destination: Option<&Path>, default: &str) -> PathBuf {
    destination.and_then(Path::file_name).map_or_else(|| PathBuf::from(default), PathBuf::from)
}
