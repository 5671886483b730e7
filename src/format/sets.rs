//! Sets: files that are a checkpoint only together, and what one of them lacks.
//!
//! Three things say that a file is one of several: numbers in its name (`model-00001-of-00004.safetensors`), an index
//! beside it, and the names of frameworks that write a file a rank (`mp_rank_00_model_states.pt`). Tensors of a missing
//! file are nowhere else, so every verb that converts or verifies needs all of a set, and
//! [`Checkpoint::open`](super::Checkpoint::open) refuses what lacks something. Only `inspect` shows what is there.
//!
//! Source of the names: `save_pretrained` in `transformers/modeling_utils.py`, `_get_ckpt_name` in
//! `deepspeed/runtime/engine.py`, `get_checkpoint_name` in Megatron-LM's `training/checkpointing.py`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value as Json;

use super::detect::{Detected, is_no_model, list};
use super::json::read_document;
use super::rank_names::{Numbering, RankName};
use super::series::{Grouped, SeriesSet};
use super::{ReadOptions, dcp_hf, foreign, local, natural_order, relative_to_folder, series};
use crate::catalog::{Catalog, TensorEntry, model};
use crate::error::{Error, Result};
use crate::name_list::{FEW, short_list};
use crate::storage::{IoMode, lookup};

/// The missing parts of a set, or a contradiction in it.
#[derive(Debug)]
pub struct Shortfall {
    /// Files and tensors of the set that are not read.
    pub missing: Vec<String>,
    /// The error of every verb that needs the whole set.
    pub error: Error,
    /// The warning of `--allow-missing`; `None` where the set cannot be read without what is missing.
    pub allowed: Option<String>,
}

impl Shortfall {
    fn new(missing: Vec<String>, error: Error) -> Self {
        let error = if missing.is_empty() { error } else { error.naming(&missing) };
        Self { missing, error, allowed: None }
    }
}

/// Returns the files that a detected checkpoint lacks, by the names of its files.
///
/// # Errors
/// `Io`; `Malformed` and `Conflict` where names contradict each other.
pub fn shortfall(path: &Path, detected: &Detected, options: &ReadOptions, io: IoMode) -> Result<Option<Shortfall>> {
    let (paths, index) = match detected {
        Detected::Dcp | Detected::TorchRanks(_) | Detected::Local { .. } => return Ok(None),
        Detected::DcpHf { paths } if is_given(path, paths) => return lone_shard(path).map(Some),
        Detected::DcpHf { paths } => return dcp_hf::shortfall(path, paths, io),
        Detected::Safetensors { paths, index } | Detected::Torch { paths, index } => (paths, index),
    };
    if let Some(index) = index {
        return Index::read(index)?.files_left_out(paths);
    }
    if is_given(path, paths) {
        let found = lone_file(path)?;
        // The name of a link may say nothing of what it leads to.
        let target = if found.is_none() { lookup::resolve(path)? } else { None };
        return target
            .filter(|target| target.file_name() != path.file_name())
            .map_or(Ok(found), |file| lone_file(&file));
    }
    if let Some(found) = numbered(path, paths, options.told.is_some())? {
        return Ok(Some(found));
    }
    paths.iter().find_map(|path| foreign::rank_file(path).transpose()).transpose()
}

/// Returns whether the file that is read is SRC itself.
fn is_given(path: &Path, paths: &[PathBuf]) -> bool {
    matches!(paths, [only] if only == path)
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The names of `count` files that are not there. Totals come from file names and may be any number: of very many names
/// the last entry counts the rest.
#[must_use]
pub fn list_absent(count: u64, names: impl Iterator<Item = String>) -> Vec<String> {
    const LISTED: u64 = 10_000;
    let mut listed: Vec<String> = names.take(usize::try_from(count.min(LISTED)).expect("a small number")).collect();
    if count > LISTED {
        listed.push(format!("{} more", count - LISTED));
    }
    listed
}

// --------------------------------------------------------------------------------------------------- numbered files

/// Returns the files that are missing by the numbers in the names of a folder's files. Files of ranks are numbered, too:
/// if their layout is declared, the reader of rank files checks for missing ranks.
fn numbered(folder: &Path, paths: &[PathBuf], is_declared: bool) -> Result<Option<Shortfall>> {
    let Grouped { sets, ranks, .. } = series::group(folder, paths)?;
    let of_ranks = ranks.iter().filter(|_| !is_declared).map(SeriesSet::numbered).collect::<Result<Vec<_>>>()?;
    for set in sets.iter().chain(of_ranks.iter().flatten()) {
        let missing = set.missing_names();
        if missing.is_empty() {
            continue;
        }
        let error = Error::Missing {
            path: folder.to_path_buf(),
            at: format!("files `{}`", set.name),
            expected: format!("{} files, numbered in their names", set.size),
            missing: short_list(&missing, FEW),
            hint: None,
        };
        return Ok(Some(Shortfall::new(missing, error)));
    }
    Ok(None)
}

/// Returns a shortfall if the file that was given is one of several.
fn lone_file(path: &Path) -> Result<Option<Shortfall>> {
    if let Some(found) = foreign::rank_file(path)? {
        return Ok(Some(found));
    }
    let refuse = |what: String, missing| {
        let what = format!("{} is {what}", path.display());
        Shortfall::new(missing, Error::usage(what, "give the folder, which must have all of them"))
    };
    let name = name_of(path);
    let is_torch = !name.ends_with(".safetensors");
    let is_index = if is_torch { is_torch_index } else { is_safetensors_index };
    for index in list(folder_of(path))?.into_iter().filter(|name| is_index(name)).map(|name| path.with_file_name(name))
    {
        if !lookup::is_file(&index)? {
            continue;
        }
        let index = match Index::read(&index) {
            Ok(index) => index,
            // A file that is no index says nothing of this one.
            Err(Error::Malformed { .. }) => continue,
            Err(error) => return Err(error),
        };
        let mut others = index.names();
        if others.remove(&name) && !others.is_empty() {
            let what = format!("1 of {} files that {} names", others.len() + 1, index.path.display());
            return Ok(Some(refuse(what, others.into_iter().collect())));
        }
    }
    // `rank_8` in the name of a safetensors file may be that of a LoRA.
    let says_total = RankName::parse(path).is_some_and(|name| name.world_size.is_some());
    if !is_torch && !says_total && !local::is_part(path)? {
        return Ok(None);
    }
    Ok(series::fragment(path)?.map(|(what, missing)| refuse(what, missing)))
}

fn lone_shard(path: &Path) -> Result<Shortfall> {
    let shard = dcp_hf::ShardName::parse(path).map(|name| name.shard).unwrap_or_default();
    let error = Error::usage(
        format!("{} is shard {shard} of DCP's Hugging Face storage", path.display()),
        "give the folder, which has all of them",
    );
    let (folder, own) = (folder_of(path), name_of(path));
    let is_other = |name: &String| *name != own && dcp_hf::ShardName::parse(&folder.join(name)).is_some();
    Ok(Shortfall::new(list(folder)?.into_iter().filter(is_other).collect(), error))
}

// ------------------------------------------------------------------------------------------------------- index files

/// Returns whether a file is the index of a set, by its name.
pub fn is_index(name: &str) -> bool {
    is_safetensors_index(name) || is_torch_index(name)
}

pub fn is_safetensors_index(name: &str) -> bool {
    is_index_of(name, ".safetensors")
}

pub fn is_torch_index(name: &str) -> bool {
    is_index_of(name, ".bin")
}

/// `model.safetensors.index.json`, or that of a variant: `model.safetensors.index.fp16.json`.
fn is_index_of(name: &str, suffix: &str) -> bool {
    let stem = name.strip_suffix(".json").filter(|_| !name.starts_with('.'));
    stem.and_then(|stem| stem.rsplit_once(".index"))
        .is_some_and(|(set, variant)| set.ends_with(suffix) && (variant.is_empty() || variant.starts_with('.')))
}

/// The index that loaders read: the one of the usual name, or else one of no variant.
pub fn main_index<'a>(names: impl Iterator<Item = &'a String>, usual: &str) -> Option<&'a String> {
    names.min_by_key(|name| (*name != usual, !name.ends_with(".index.json"), *name))
}

/// The index of a million tensors has some 100 MB.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// The index of a set: which file each tensor is in.
#[derive(Debug)]
pub struct Index {
    pub path: PathBuf,
    weight_map: BTreeMap<String, String>,
    total_size: Option<u64>,
}

impl Index {
    /// # Errors
    /// `Malformed` where it is no index, `Io`.
    pub fn read(path: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Document {
            weight_map: BTreeMap<String, String>,
            metadata: Option<Json>,
        }
        let text = read_document(path, MAX_INDEX_BYTES)?;
        let document: Document = serde_json::from_slice(&text)
            .map_err(|error| Error::malformed(path, "index", "a JSON object with weight_map", error.to_string()))?;
        let total_size = document.metadata.as_ref().and_then(|metadata| metadata.get("total_size")?.as_u64());
        let mut weight_map = document.weight_map;
        for file in weight_map.values_mut() {
            if let Some(name) = file.strip_prefix("./") {
                *file = name.to_owned();
            }
        }
        Ok(Self { path: path.to_path_buf(), weight_map, total_size })
    }

    /// A file in the words of the index.
    fn name(&self, path: &Path) -> String {
        let below = path.strip_prefix(self.folder()).unwrap_or(path);
        below.display().to_string()
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    fn names(&self) -> BTreeSet<String> {
        self.weight_map.values().cloned().collect()
    }

    /// The files it names that are there.
    ///
    /// # Errors
    /// `Malformed` where it names a file outside its folder.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        let paths = self.names().into_iter().map(|name| relative_to_folder(self.folder(), &name, &self.path));
        let mut found = Vec::new();
        for path in paths.collect::<Result<Vec<PathBuf>>>()? {
            if lookup::exists(&path)? {
                found.push(path);
            }
        }
        Ok(found)
    }

    /// Files of the set that are missing, or that it does not name. `read` are those it names that are there.
    fn files_left_out(&self, read: &[PathBuf]) -> Result<Option<Shortfall>> {
        let mut missing = self.names();
        let count = missing.len();
        read.iter().for_each(|path| _ = missing.remove(&self.name(path)));
        if !missing.is_empty() {
            let missing: Vec<String> = missing.into_iter().collect();
            let error = Error::Missing {
                path: self.path.clone(),
                at: String::from("weight_map"),
                expected: format!("{count} files beside it"),
                missing: short_list(&missing, FEW),
                hint: None,
            };
            return Ok(Some(Shortfall::new(missing, error)));
        }
        let (others, expected) = if self.weight_map.is_empty() {
            (self.beside()?, "the files of the tensors beside it")
        } else {
            (self.unnamed_of_set()?, "every file of the set")
        };
        if others.is_empty() {
            return Ok(None);
        }
        let found = if self.weight_map.is_empty() {
            format!("no file, and beside it {}", short_list(&others, FEW))
        } else {
            format!("none of {}", short_list(&others, FEW))
        };
        let error = Error::Malformed {
            path: self.path.clone(),
            at: String::from("weight_map"),
            expected: expected.to_owned(),
            found,
            hint: Some("if these files are not part of the model, move them into another folder".into()),
        };
        Ok(Some(Shortfall::new(others, error)))
    }

    /// Files of tensors in its folder that it does not name.
    fn beside(&self) -> Result<Vec<String>> {
        let (folder, named) = (folder_of(&self.path), self.names());
        let suffix = if is_torch_index(&name_of(&self.path)) { ".bin" } else { ".safetensors" };
        let is_other = |name: &String| {
            let path = folder.join(name);
            let is_of_ranks = dcp_hf::ShardName::parse(&path).is_some() || local::rank_of(&path).is_some();
            !name.starts_with('.')
                && name.ends_with(suffix)
                && !named.contains(name)
                && !is_of_ranks
                && !is_no_model(&path)
        };
        let mut names: Vec<String> = list(folder)?.into_iter().filter(is_other).collect();
        names.sort_by(|left, right| natural_order(left, right));
        Ok(names)
    }

    /// Those of them that say by their names that they are of this set: `model-00003-of-00004` beside a named
    /// `model-00001-of-00002`.
    fn unnamed_of_set(&self) -> Result<Vec<String>> {
        let series = |name: &String| {
            let name = RankName::parse(Path::new(name))?;
            (name.numbering == Numbering::OfTotal).then_some(name.series)
        };
        let own: BTreeSet<String> = self.names().iter().filter_map(series).collect();
        let mut others = self.beside()?;
        others.retain(|name| series(name).is_some_and(|series| own.contains(&series)));
        Ok(others)
    }

    /// Returns the first difference between its tensors and those of its files: it must list every tensor, in the file that has it, and may list
    /// further names of tensors. `holder` gives the file of a name, `stored` the tensors of the files that were `read`;
    /// a tensor without data may be in any file.
    pub fn differing<'a>(
        &self,
        holder: &dyn Fn(&str) -> Option<Option<&'a Path>>,
        mut stored: impl Iterator<Item = (&'a str, Option<&'a Path>)>,
        read: &[PathBuf],
    ) -> Option<Shortfall> {
        let read: BTreeSet<String> = read.iter().map(|path| self.name(path)).collect();
        let listed = || self.weight_map.iter().filter(|(_, file)| read.contains(*file));
        let error = |name: &str, expected: &str, found: String| Error::malformed(&self.path, name, expected, found);
        let missing: Vec<String> =
            listed().filter(|(name, _)| holder(name).is_none()).map(|(name, _)| name.clone()).collect();
        if let Some(first) = missing.first() {
            let more = missing.len() - 1;
            let more = if more > 0 { format!(", and {more} more are missing") } else { String::new() };
            let expected = format!("the tensor in {}", self.weight_map[first]);
            let error = error(first, &expected, format!("no such tensor{more}"));
            return Some(Shortfall::new(missing, error));
        }
        let elsewhere = listed().find_map(|(name, file)| {
            let path = holder(name)??;
            let found = || format!("it in {}", path.display());
            (self.name(path) != *file).then(|| error(name, &format!("the tensor in {file}"), found()))
        });
        let unlisted = || {
            let (name, path) = stored.find(|(name, _)| !self.weight_map.contains_key(*name))?;
            let found = path.map_or_else(String::new, |path| format!(" in {} only", path.display()));
            Some(error(name, "every tensor of the files in weight_map", format!("it{found}")))
        };
        elsewhere.or_else(unlisted).map(|error| Shortfall::new(Vec::new(), error))
    }

    /// Returns warnings about other files of tensors, and about sizes that do not fit.
    ///
    /// # Errors
    /// `Io`.
    pub fn warnings(&self, catalog: &Catalog) -> Result<Vec<String>> {
        let mut warnings = Vec::new();
        let index = self.path.display();
        // Other files with this suffix belong to trainers.
        if !is_torch_index(&name_of(&self.path)) {
            let others = self.beside()?;
            if !others.is_empty() {
                warnings.push(format!("{index} does not name {}: not read", short_list(&others, FEW)));
            }
        }
        let named: Vec<PathBuf> = self.names().into_iter().map(PathBuf::from).collect();
        for set in series::group(self.folder(), &named).map(|grouped| grouped.sets).unwrap_or_default() {
            let missing = set.missing_names();
            if !missing.is_empty() {
                let missing = short_list(&missing, FEW);
                warnings
                    .push(format!("{index} does not name {missing}, one of {} by the names of the others", set.size));
            }
        }
        let size = |entry: &TensorEntry| u128::from(entry.len_bytes());
        let stored: u128 = catalog.tensors.iter().map(size).sum();
        let named: u128 = model::all_tensors(&catalog.state).iter().map(|(_, id)| size(catalog.tensor(*id))).sum();
        match self.total_size.map(u128::from) {
            None => warnings
                .push(format!("{index}: no total_size, so files that were cut short at a tensor cannot be told")),
            // Some writers count a tied tensor under each of its names.
            Some(total) if total != stored && total != named => {
                warnings.push(format!("{index}: total_size is {total}, and the tensors have {stored} bytes"));
            }
            Some(_) => {}
        }
        Ok(warnings)
    }
}
