//! Index files of sets: `model.safetensors.index.json`, `pytorch_model.bin.index.json`. An index maps each tensor name
//! to a file, as `save_pretrained` of transformers writes it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value as Json;

use super::json::read_document;
use super::rank_names::{Numbering, RankName};
use super::safetensors::sharding::ShardName;
use super::shortfall::Shortfall;
use super::torch::is_no_model;
use super::{Format, folder_of, list, local, name_of, natural_order, relative_to_folder, series};
use crate::catalog::{Catalog, TensorEntry, state_dict};
use crate::error::{Error, FormatError, Result};
use crate::json_text;
use crate::name_list::{FEW, short_list};
use crate::quantity::count;
use crate::storage::lookup;

/// Returns whether a file with this name is an index.
pub fn is_index(name: &str) -> bool {
    format_of(name).is_some()
}

/// Returns the format of the files that an index lists. The name of the index shows this format.
fn format_of(name: &str) -> Option<Format> {
    Format::ALL.iter().copied().find(|format| is_index_of(name, *format))
}

/// Returns whether a file name is an index of files of a format: `model.safetensors.index.json`, or the index of a
/// variant: `model.safetensors.index.fp16.json`.
pub fn is_index_of(name: &str, format: Format) -> bool {
    let Some(suffix) = format.entry().index_suffix else { return false };
    let stem = name.strip_suffix(".json").filter(|_| !name.starts_with('.'));
    stem.and_then(|stem| stem.rsplit_once(".index")).is_some_and(|(set, variant)| {
        let is_of_suffix = set.strip_suffix(suffix).is_some_and(|set| set.ends_with('.'));
        is_of_suffix && (variant.is_empty() || variant.starts_with('.'))
    })
}

/// Returns the index that loaders read, out of the `names` of the indexes in a folder: the name `usual` if the folder
/// has it; otherwise the alphabetically first name without a variant such as `fp16`; otherwise the alphabetically first
/// name.
pub fn main_index<'a>(names: impl Iterator<Item = &'a String>, usual: &str) -> Option<&'a String> {
    names.min_by_key(|name| (*name != usual, !name.ends_with(".index.json"), *name))
}

/// The maximum length of an index in bytes. The index of a million tensors has about 100 MB.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// An index file, which gives the file of each tensor in a set.
#[derive(Debug)]
pub struct ShardIndex {
    /// The path of the index file.
    pub path: PathBuf,
    weight_map: BTreeMap<String, String>,
    total_size: Option<u64>,
}

impl ShardIndex {
    /// Reads an index file.
    ///
    /// # Errors
    /// `Malformed` if the file is not an index, `Io`.
    pub fn read(path: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct IndexDocument {
            weight_map: BTreeMap<String, String>,
            metadata: Option<Json>,
        }
        let text = read_document(path, MAX_INDEX_BYTES)?;
        let document: IndexDocument = serde_json::from_slice(&text)
            .map_err(|error| json_text::malformed_part(path, "index", &error, "a JSON object with weight_map"))?;
        let total_size = document.metadata.as_ref().and_then(|metadata| metadata.get("total_size")?.as_u64());
        let mut weight_map = document.weight_map;
        for file in weight_map.values_mut() {
            if let Some(name) = file.strip_prefix("./") {
                *file = name.to_owned();
            }
        }
        Ok(Self { path: path.to_path_buf(), weight_map, total_size })
    }

    /// Returns a path relative to the folder of the index. The index names files in this form.
    fn name(&self, path: &Path) -> String {
        let below = path.strip_prefix(self.folder()).unwrap_or(path);
        below.display().to_string()
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// Returns the file names of all files that the index lists.
    pub fn names(&self) -> BTreeSet<String> {
        self.weight_map.values().cloned().collect()
    }

    /// Returns the existing files that the index names.
    ///
    /// # Errors
    /// `Malformed` if the index names a file outside its folder.
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

    /// Returns a shortfall (the missing files of a set) if files that the index names are missing, or if the folder has
    /// files of the set that the index does not name. `read` lists the files that the index names and that exist.
    pub fn files_left_out(&self, read: &[PathBuf]) -> Result<Option<Shortfall>> {
        let mut missing = self.names();
        let expected = format!("{} beside it", count(missing.len(), "file"));
        read.iter().for_each(|path| _ = missing.remove(&self.name(path)));
        if !missing.is_empty() {
            let missing: Vec<String> = missing.into_iter().collect();
            let error = Error::missing(&self.path, "weight_map", expected, short_list(&missing, FEW));
            return Ok(Some(Shortfall::new(missing, error)));
        }
        let (others, expected) = if self.weight_map.is_empty() {
            (self.beside()?, "an entry for each tensor file in the folder")
        } else {
            (self.unnamed_of_set()?, "every file of the set")
        };
        if others.is_empty() {
            return Ok(None);
        }
        let listed = short_list(&others, FEW);
        let found = if self.weight_map.is_empty() {
            format!("an empty weight_map; the folder has {listed}")
        } else {
            format!("no entry for {listed}")
        };
        let error = Error::Format(FormatError::Malformed {
            path: self.path.clone(),
            at: String::from("weight_map"),
            expected: expected.to_owned(),
            found,
            hint: Some("if these files are not part of the model, move them into another folder".into()),
        });
        Ok(Some(Shortfall::new(others, error)))
    }

    /// Returns the names of tensor files in the folder of the index that the index does not name. Leaves out hidden
    /// files, rank files, and files that contain no model, such as `optimizer.bin`.
    fn beside(&self) -> Result<Vec<String>> {
        let (folder, named) = (folder_of(&self.path), self.names());
        let suffix = format_of(&name_of(&self.path)).and_then(|format| format.entry().index_suffix);
        let is_other = |name: &String| {
            let path = folder.join(name);
            let is_of_ranks = ShardName::parse(&path).is_some() || local::rank_of(&path).is_some();
            !name.starts_with('.')
                && path.extension().and_then(|own| own.to_str()) == suffix
                && !named.contains(name)
                && !is_of_ranks
                && !is_no_model(&path)
        };
        let mut names: Vec<String> = list(folder)?.into_iter().filter(is_other).collect();
        names.sort_by(|left, right| natural_order(left, right));
        Ok(names)
    }

    /// Returns the files that the index does not name, although their numbered names show the same set as the names in
    /// the index: for example `model-00003-of-00004`, if the index names `model-00001-of-00002`.
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

    /// Returns the first difference between the index and the tensors in the files that it names. The index must list
    /// every tensor with the file that stores the tensor, and may list further names of tied tensors. For a tensor
    /// without elements, the index may list any file. `read` lists the files to check, and `stored` lists the tensors
    /// in these files. `holder` returns, for the name of a tensor, the file that stores the tensor: `None` if no file
    /// has the tensor, and `Some(None)` if the tensor has no elements.
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
            let expected = format!("the tensor in `{}`", self.weight_map[first]);
            let error = error(first, &expected, format!("no such tensor there{more}"));
            return Some(Shortfall::new(missing, error));
        }
        let elsewhere = listed().find_map(|(name, file)| {
            let path = holder(name)??;
            let found = || format!("the tensor in {}", path.display());
            (self.name(path) != *file).then(|| error(name, &format!("the tensor in `{file}`"), found()))
        });
        let unlisted = || {
            let (name, path) = stored.find(|(name, _)| !self.weight_map.contains_key(*name))?;
            let found = path.map_or_else(String::new, |path| format!(", which is in {}", path.display()));
            Some(error(
                name,
                "an entry in weight_map for every tensor of the files",
                format!("no entry for this tensor{found}"),
            ))
        };
        elsewhere.or_else(unlisted).map(|error| Shortfall::new(Vec::new(), error))
    }

    /// Returns warnings about tensor files that the index does not name, about numbers that are missing in the numbered
    /// file names, and about a wrong or missing `total_size`.
    ///
    /// # Errors
    /// `Io`.
    pub fn warnings(&self, catalog: &Catalog) -> Result<Vec<String>> {
        let mut warnings = Vec::new();
        let index = self.path.display();
        // Torch files without an entry usually belong to trainers, so the warning does not list them.
        if !is_index_of(&name_of(&self.path), Format::Torch) {
            let others = self.beside()?;
            if !others.is_empty() {
                warnings.push(format!("files that {index} does not name are not read: {}", short_list(&others, FEW)));
            }
        }
        let named: Vec<PathBuf> = self.names().into_iter().map(PathBuf::from).collect();
        for set in series::group(self.folder(), &named).map(|grouped| grouped.sets).unwrap_or_default() {
            let missing = set.missing_names();
            if !missing.is_empty() {
                let missing = short_list(&missing, FEW);
                warnings.push(format!(
                    "{index} does not name {missing}, although the numbered names imply {} files",
                    set.size
                ));
            }
        }
        let size = |entry: &TensorEntry| u128::from(entry.len_bytes());
        let stored: u128 = catalog.tensors.iter().map(size).sum();
        let named: u128 = state_dict::all_tensors(&catalog.state).iter().map(|(_, id)| size(catalog.tensor(*id))).sum();
        match self.total_size.map(u128::from) {
            None => warnings.push(format!(
                "{index} has no total_size, so dtshard cannot detect a file that was truncated between two tensors"
            )),
            // Some writers count a tied tensor under each of its names.
            Some(total) if total != stored && total != named => {
                warnings.push(format!("{index}: total_size is {total}, but the tensors have {stored} bytes"));
            }
            Some(_) => {}
        }
        Ok(warnings)
    }
}
