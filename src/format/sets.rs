//! Sets: several files that form one checkpoint together, and the detection of missing files.
//!
//! Three things show that a file is part of a set: numbers in its name (`model-00001-of-00004.safetensors`), an index
//! beside it, and the names that frameworks use for one file per rank (`mp_rank_00_model_states.pt`). No other file has
//! the tensors of a missing file. So every verb that converts or verifies needs the complete set, and
//! [`Checkpoint::open`](super::Checkpoint::open) refuses an incomplete set. Only `inspect` reads an incomplete set, and
//! shows the files that exist.
//!
//! Source of the names: `save_pretrained` in `transformers/modeling_utils.py`, `_get_ckpt_name` in
//! `deepspeed/runtime/engine.py`, `get_checkpoint_name` in Megatron-LM's `training/checkpointing.py`.

use std::path::{Path, PathBuf};

use super::index::{ShardIndex, is_index};
use super::listing::DetectedFiles;
use super::rank_names::RankName;
use super::series::{GroupedFiles, SeriesSet};
use super::shortfall::Shortfall;
use super::{ReadOptions, folder_of, foreign, list, local, name_of, series, torch_checkpointing};
use crate::error::{Error, FormatError, Result};
use crate::name_list::{FEW, short_list};
use crate::quantity::count;
use crate::storage::lookup;

/// For a checkpoint of whole tensors, returns a shortfall (the missing files) if the file names show that files are
/// missing.
///
/// # Errors
/// `Io`; `Malformed` and `Conflict` if names contradict each other.
pub fn shortfall(path: &Path, found: &DetectedFiles, options: &ReadOptions) -> Result<Option<Shortfall>> {
    let paths = &found.paths;
    if let Some(index) = &found.index {
        return ShardIndex::read(index)?.files_left_out(paths);
    }
    if is_given(path, paths) {
        let found = lone_file(path)?.map_or_else(|| linked_file(path), |found| Ok(Some(found)))?;
        return Ok(found.map(Shortfall::of_one_file));
    }
    if let Some(found) = numbered(path, paths, options.declared_layout.is_some())? {
        return Ok(Some(found));
    }
    for path in paths.iter().filter(|path| RankName::parse(path).is_none()) {
        if let Some(found) = linked_file(path)? {
            return Ok(Some(found));
        }
    }
    paths.iter().find_map(|path| foreign::rank_file(path).transpose()).transpose()
}

/// Returns whether the user gave a single file as SRC, and no other file is read.
pub fn is_given(path: &Path, paths: &[PathBuf]) -> bool {
    matches!(paths, [only] if only == path)
}

// --------------------------------------------------------------------------------------------------- numbered files

/// Returns a shortfall (the missing files) if the numbers in the file names of a folder show that files are missing. If
/// the user declares a layout (`is_declared`), rank files are not checked here, because the reader of rank files checks
/// for missing ranks.
fn numbered(folder: &Path, paths: &[PathBuf], is_declared: bool) -> Result<Option<Shortfall>> {
    let GroupedFiles { sets, rank_files: ranks, .. } = series::group(folder, paths)?;
    let of_ranks = ranks.iter().filter(|_| !is_declared).map(SeriesSet::numbered_sets).collect::<Result<Vec<_>>>()?;
    for set in sets.iter().chain(of_ranks.iter().flatten()) {
        let missing = set.missing_names();
        if missing.is_empty() {
            continue;
        }
        let error = Error::missing(
            folder,
            format!("set `{}`", set.name),
            format!("{} (the total in the file names)", count(set.size as usize, "file")),
            short_list(&missing, FEW),
        );
        return Ok(Some(Shortfall::new(missing, error)));
    }
    Ok(None)
}

/// Returns a shortfall if the user gives a single file as SRC, although the file belongs to a set or series of several
/// files.
fn lone_file(path: &Path) -> Result<Option<Shortfall>> {
    if let Some(found) = foreign::rank_file(path)? {
        return Ok(Some(found));
    }
    let refuse = |what: String, missing| {
        let what = format!("{} {what}", path.display());
        Shortfall::new(missing, Error::usage(what, "give the folder that contains all of these files"))
    };
    if let Some((what, missing)) = torch_checkpointing::part_of_checkpoint(path)? {
        return Ok(Some(refuse(what, missing)));
    }
    let name = name_of(path);
    let indexes = list(folder_of(path))?.into_iter().filter(|name| is_index(name));
    for index in indexes.map(|name| path.with_file_name(name)) {
        if !lookup::is_file(&index)? {
            continue;
        }
        let index = match ShardIndex::read(&index) {
            Ok(index) => index,
            // A damaged index does not show whether the file at `path` is part of a set.
            Err(Error::Format(FormatError::Malformed { .. })) => continue,
            Err(error) => return Err(error),
        };
        let mut others = index.names();
        if others.remove(&name) && !others.is_empty() {
            let what = format!("is 1 of {} files that {} names", others.len() + 1, index.path.display());
            return Ok(Some(refuse(what, others.into_iter().collect())));
        }
    }
    // In the name of a safetensors file, `rank_8` may be the rank of a LoRA adapter instead of the rank of a process.
    let says_total = RankName::parse(path).is_some_and(|name| name.world_size.is_some());
    if name.ends_with(".safetensors") && !says_total && !local::is_rank_file(path)? {
        return Ok(None);
    }
    Ok(series::describe_single_file(path)?.map(|(what, missing)| refuse(what, missing)))
}

/// Checks the target of a link like [`lone_file`], because the name of a link may hide that its target belongs to a
/// set. Returns `None` if `path` is not a link, or if the link and its target have the same name.
fn linked_file(path: &Path) -> Result<Option<Shortfall>> {
    let target = lookup::resolve(path)?.filter(|target| target.file_name() != path.file_name());
    target.map_or(Ok(None), |target| lone_file(&target))
}
