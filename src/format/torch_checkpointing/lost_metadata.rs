//! Checkpoints whose `metadata.pkl` is missing or damaged. The names of the other files, such as `model_0.pt`, still
//! show that torch_checkpointing may have saved them.

use std::collections::BTreeMap;
use std::path::Path;

use super::item_files::item_and_rank;
use super::{METADATA, metadata_of};
use crate::catalog::Catalog;
use crate::error::{Error, FormatError, Result};
use crate::format::json::read_document;
use crate::format::{folder_of, list, name_of};
use crate::name_list::{FEW, natural_order, short_list};
use crate::storage::lookup;
use torch_pickle::pickle::{self, NoVisitor};

/// Returns the item and the rank in a file name: `model` and 3 for `model_3.pt` and `model_3.safetensors`.
fn item_file(name: &str) -> Option<(&str, u32)> {
    [".pt", ".safetensors"].iter().find_map(|suffix| name.strip_suffix(suffix)).and_then(item_and_rank)
}

/// Returns the file names, in the order of the ranks, of the first item that has files of rank 0 and of other ranks.
/// Returns an empty list if there is no such item.
fn files_of_item(names: &[String]) -> Vec<String> {
    let mut items: BTreeMap<&str, Vec<(u32, &String)>> = BTreeMap::new();
    for name in names {
        if let Some((item, rank)) = item_file(name) {
            items.entry(item).or_default().push((rank, name));
        }
    }
    let has_ranks = |files: &&Vec<(u32, &String)>| files.len() > 1 && files.iter().any(|(rank, _)| *rank == 0);
    let mut files: Vec<String> =
        items.values().find(has_ranks).into_iter().flatten().map(|(_, name)| (*name).clone()).collect();
    files.sort_by(|left, right| natural_order(left, right));
    files
}

/// Refuses a folder with files of several ranks if its `metadata.pkl` is empty, or is a damaged pickle. A
/// `metadata.pkl` with any other content is no error, because another program may have written it.
///
/// # Errors
/// `Malformed`, `Io`.
pub fn refuse_damaged(folder: &Path, names: &[String]) -> Result<()> {
    let path = folder.join(METADATA);
    let files = files_of_item(names);
    if files.is_empty() || !lookup::is_file(&path)? || metadata_of(folder)?.is_some() {
        return Ok(());
    }
    if std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() > pickle::MAX_BYTES) {
        return Ok(());
    }
    let bytes = read_document(&path, pickle::MAX_BYTES)?;
    let found = match bytes.first() {
        None => String::from("an empty file"),
        Some(0x80) => match pickle::parse(&bytes, &mut NoVisitor) {
            Ok(_) => return Ok(()),
            Err(error) => format!("a damaged pickle of {} bytes ({error})", bytes.len()),
        },
        Some(_) => return Ok(()),
    };
    let expected = format!("the metadata of torch_checkpointing, because {} are beside it", short_list(&files, FEW));
    Err(FormatError::Malformed { path, at: String::from("content"), expected, found, hint: Some(hint(&files).into()) }
        .into())
}

/// Returns the hint for a folder whose `metadata.pkl` is missing or not from torch_checkpointing, although the other
/// file names are those of this package; otherwise `None`.
pub fn hint_if_missing(folder: &Path, names: &[String]) -> Option<String> {
    let files = files_of_item(names);
    (!files.is_empty() && matches!(metadata_of(folder), Ok(None))).then(|| hint(&files))
}

/// Returns the hint for item files whose `metadata.pkl` is missing or damaged. torch.save files record the sharding of
/// their tensors, so the hint also says how to read such files as rank files.
fn hint(files: &[String]) -> String {
    let restore =
        format!("if torch_checkpointing saved {}, copy its {METADATA} into the folder", short_list(files, FEW));
    match files[0].strip_suffix(".pt").and_then(item_and_rank) {
        Some((item, _)) => {
            format!(
                "{restore}; without {METADATA}, rename the files to {item}_rank_0.pt and so on to read them as rank files"
            )
        }
        None => restore,
    }
}

/// Refuses a single torch.save file if it is named like the file of one rank, and has only shards of a tensor.
///
/// # Errors
/// `Missing` that names `metadata.pkl`, `Io`.
pub fn refuse_lone_rank(path: &Path, catalog: &Catalog) -> Result<()> {
    let own = name_of(path);
    let Some((item, _)) = item_file(&own) else { return Ok(()) };
    let Some(entry) = catalog.tensors.iter().find(|entry| entry.tilings().is_err()) else { return Ok(()) };
    let folder = folder_of(path);
    let mut names = list(folder)?;
    names.retain(|name| item_file(name).is_some_and(|(other, _)| other == item));
    let Some(hint) = hint_if_missing(folder, &names) else { return Ok(()) };
    Err(Error::missing(
        path,
        entry.fqn.to_string(),
        "all shards of the tensor, but the file is that of one rank",
        format!("the {METADATA} of torch_checkpointing, which names the files of the other ranks"),
    )
    .missing_hint(&hint))
}
