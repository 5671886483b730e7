//! The files of each checkpoint item. `metadata.pkl` names the files of the items that it lists; any other item has
//! files `NAME_RANK.pt`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use super::metadata::{CheckpointMetadata, Encoding, FileLayout, ItemMetadata};
use super::{METADATA, metadata_of};
use crate::error::{Error, Result};
use crate::format::{folder_of, list, relative_to_folder};
use crate::storage::lookup;

/// The maximum number of missing files that are listed for a checkpoint item that is not in `metadata.pkl`. The number
/// of ranks comes from a file, so it may be arbitrarily large.
const MAX_LISTED: usize = 10_000;

/// The files of all checkpoint items of a checkpoint.
#[derive(Debug)]
pub struct ItemFiles<'a> {
    pub items: Vec<CheckpointItem<'a>>,
}

/// A checkpoint item, and its files.
#[derive(Debug)]
pub struct CheckpointItem<'a> {
    pub name: String,
    /// The metadata of the item; `None` if `metadata.pkl` does not list the item.
    pub metadata: Option<&'a ItemMetadata>,
    pub encoding: Encoding,
    /// The existing files, by rank.
    pub files: BTreeMap<u32, PathBuf>,
    /// The names of missing files, relative to the folder, by rank.
    pub missing: BTreeMap<u32, String>,
}

impl<'a> ItemFiles<'a> {
    /// Finds the files of all checkpoint items in a folder.
    ///
    /// # Errors
    /// `Malformed` if a path leads out of the folder, or two ranks share a file; `Unsupported` for an item whose files
    /// have different encodings, or an encoding that cannot have tensors; `Io`.
    pub fn of(folder: &Path, metadata: &'a CheckpointMetadata) -> Result<Self> {
        let path = folder.join(METADATA);
        let mut items = Vec::new();
        let mut owners: HashMap<PathBuf, (&str, u32)> = HashMap::new();
        for item in &metadata.items {
            let mut found = listed(folder, &path, item)?;
            for (rank, file) in &found.files {
                if let Some((other, of)) = owners.insert(file.clone(), (&item.name, *rank)) {
                    let expected = "a separate file for each rank of each item";
                    let found = format!("{} for {other} of rank {of} and {} of rank {rank}", file.display(), item.name);
                    return Err(Error::malformed(&path, &item.name, expected, found));
                }
            }
            found.name.clone_from(&item.name);
            items.push(found);
        }
        items.extend(unlisted(folder, metadata)?);
        Ok(Self { items })
    }

    /// Returns the paths of all existing files.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.items.iter().flat_map(|item| item.files.values().cloned()).collect()
    }
}

/// Finds the files of a checkpoint item that the metadata lists. A file that does not exist counts as missing only if
/// the metadata lists tensors of its rank.
fn listed<'a>(folder: &Path, path: &Path, item: &'a ItemMetadata) -> Result<CheckpointItem<'a>> {
    let with_tensors: BTreeSet<u32> = (item.tensors.iter())
        .flat_map(|tensor| &tensor.groups)
        .flat_map(|group| group.ranks.iter().map(|rank| rank.0))
        .collect();
    let (mut files, mut missing, mut encoding) = (BTreeMap::new(), BTreeMap::new(), None);
    for (rank, layout) in &item.layouts {
        let default = || FileLayout { path: format!("{}_{rank}.pt", item.name), encoding: Encoding::Torch };
        let layout = layout.clone().unwrap_or_else(default);
        let file = relative_to_folder(folder, &layout.path, path)?;
        if lookup::exists(&file)? {
            files.insert(*rank, file);
        } else if with_tensors.contains(rank) {
            missing.insert(*rank, layout.path);
        } else {
            continue;
        }
        let known = encoding.get_or_insert_with(|| layout.encoding.clone());
        if *known != layout.encoding {
            return Err(Error::unsupported(
                format!(
                    "{}: the files of the checkpoint item `{}` have different encodings",
                    path.display(),
                    item.name
                ),
                "save the checkpoint item in one encoding on all ranks",
            ));
        }
    }
    let encoding = encoding.unwrap_or(Encoding::Torch);
    if let Encoding::Other(class) = &encoding {
        return Err(Error::unsupported(
            format!(
                "{}: the item {} has tensors, but its files have the encoding {class:.60}",
                path.display(),
                item.name
            ),
            "save the item with TorchSerialization or SafetensorsSerialization",
        ));
    }
    Ok(CheckpointItem { name: item.name.clone(), metadata: Some(item), encoding, files, missing })
}

/// Finds the checkpoint items that the metadata does not list: files `NAME_RANK.pt` form the item NAME. They form no
/// item if the file of rank 0 does not exist, or if a RANK is not below the world size.
fn unlisted<'a>(folder: &Path, metadata: &CheckpointMetadata) -> Result<Vec<CheckpointItem<'a>>> {
    let mut found: BTreeMap<String, BTreeMap<u32, PathBuf>> = BTreeMap::new();
    for file in list(folder)? {
        if let Some((name, rank)) = file.strip_suffix(".pt").and_then(item_and_rank) {
            found.entry(name.to_owned()).or_default().insert(rank, folder.join(&file));
        }
    }
    let is_listed = |name: &str| metadata.items.iter().any(|item| item.name == name);
    found.retain(|name, files| {
        let ranks = files.keys().copied();
        files.contains_key(&0) && ranks.max() < Some(metadata.world_size) && !is_listed(name)
    });
    let item = |(name, files): (String, BTreeMap<u32, PathBuf>)| {
        let mut missing = BTreeMap::new();
        // If rank 0 alone has a file, no file is missing: some items are saved by rank 0 only.
        if files.len() > 1 {
            let absent = (0..metadata.world_size).filter(|rank| !files.contains_key(rank));
            missing.extend(absent.take(MAX_LISTED).map(|rank| (rank, format!("{name}_{rank}.pt"))));
        }
        CheckpointItem { name, metadata: None, encoding: Encoding::Torch, files, missing }
    };
    Ok(found.into_iter().map(item).collect())
}

/// Returns the item and the rank in the name of a file, without its suffix: `model` and 3 for `model_3`.
pub(super) fn item_and_rank(stem: &str) -> Option<(&str, u32)> {
    let (name, number) = stem.rsplit_once('_')?;
    let rank: u32 = number.parse().ok()?;
    (rank.to_string() == number && !name.is_empty() && !name.starts_with('.')).then_some((name, rank))
}

/// If a file is one of several files of a checkpoint item, returns a description of the file as a predicate (`has only
/// ...`), and the names of the item's other files, including missing files. Otherwise returns `None`.
///
/// # Errors
/// `Io`; `Malformed` if the metadata is damaged, or if a safetensors file is named like the file of one rank and the
/// `metadata.pkl` beside it is not from this package.
pub fn part_of_checkpoint(path: &Path) -> Result<Option<(String, Vec<String>)>> {
    let folder = folder_of(path);
    let Some(bytes) = metadata_of(folder)? else {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let metadata = folder.join(METADATA);
        // Only the metadata states whether the file has whole tensors.
        if name.strip_suffix(".safetensors").and_then(item_and_rank).is_some() && lookup::exists(&metadata)? {
            let expected = format!("metadata of torch_checkpointing (`{name}` has the name of one rank's file)");
            return Err(Error::malformed(&metadata, "content", expected, "other content"));
        }
        if item_and_rank(name.strip_suffix(".pt").unwrap_or_default()).is_some() {
            super::refuse_damaged(folder, &list(folder)?)?;
        }
        return Ok(None);
    };
    let metadata = CheckpointMetadata::parse(&folder.join(METADATA), &bytes)?;
    let files = ItemFiles::of(folder, &metadata)?;
    let is_own = |file: &PathBuf| file.file_name() == path.file_name() && file.parent() == Some(folder);
    for item in &files.items {
        let Some((rank, _)) = item.files.iter().find(|(_, file)| is_own(file)) else { continue };
        let others = item.files.values().filter(|file| !is_own(file));
        let names = others.filter_map(|file| Some(file.strip_prefix(folder).ok()?.to_str()?.to_owned()));
        let names: Vec<String> = names.chain(item.missing.values().cloned()).collect();
        if names.is_empty() {
            return Ok(None);
        }
        let count = names.len() + 1;
        let what = format!("has only the part of rank {rank}: the checkpoint item `{}` has {count} files", item.name);
        return Ok(Some((what, names)));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_give_item_and_rank() {
        for (name, expected) in [
            ("model_0", Some(("model", 0))),
            ("my_model_12", Some(("my_model", 12))),
            ("model_01", None),
            ("model", None),
            ("_0", None),
            (".x_0", None),
            ("model_99999999999", None),
        ] {
            assert_eq!(item_and_rank(name), expected, "{name}");
        }
    }
}
