//! Checks that a folder of DCP's Hugging Face storage has all of its files. PyTorch can consolidate such a folder to N
//! files of whole tensors. The file `shard-R-model-F-of-N` has the data of shard R (one rank) for file F of these N
//! files. So the check expects a file for each R and each F.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::error::{CatalogError, Error, FormatError, Result};
use crate::format::safetensors;
use crate::format::safetensors::sharding::ShardName;
use crate::format::shortfall::{Shortfall, list_missing_names};
use crate::format::{folder_of, list, name_of};
use crate::name_list::{FEW, Numbers, short_list};
use crate::storage::{Files, IoMode};

/// The hint if files `shard-R-model-F-of-N` are missing, but the existing files together have all elements of every
/// tensor that is in one of the existing files.
const WITHOUT_THEM: &str = "use options::allow_missing if these files never existed: a rank that has nothing to save writes \
                            no file. dtshard found every element of each tensor that the existing files name";

/// The hint if, for some F, no rank R has a file `shard-R-model-F-of-N`.
const WITHOUT_FILES: &str = "copy the missing files into the folder, or use options::allow_missing to continue without \
                             the tensors in them";

/// Returns the missing files of a folder. A file `shard-R-model-F-of-N` must exist for every R from 1 to the highest R
/// in the file names, and for every F from 1 to N. Returns `None` if no file is missing.
///
/// # Errors
/// `Conflict` if files belong to different saves, `Malformed` if F exceeds N.
pub fn shortfall(folder: &Path, paths: &[PathBuf], io: IoMode) -> Result<Option<Shortfall>> {
    let mut ranks = BTreeMap::new();
    let mut totals = BTreeMap::new();
    let mut parts = BTreeMap::new();
    let mut present = BTreeSet::new();
    for path in paths {
        if let Some(name) = ShardName::parse(path) {
            ranks.insert(name.shard, path.clone());
            totals.insert(name.files, path);
            parts.insert(name.file, path.clone());
            present.insert((name.shard, name.file));
        }
    }
    if let (Some((first, _)), Some((last, _))) = (totals.first_key_value(), totals.last_key_value())
        && first != last
    {
        return Err(Error::Catalog(CatalogError::Conflict {
            fqn: String::from("shards"),
            what: "the number of files per rank",
            between: String::from("the file names of the shards"),
            detail: format!("some names say {first}, others say {last}"),
            hint: Some(String::from(
                "move the files of one save into another folder, because the folder has files of two saves",
            )),
        })
        .within(folder));
    }
    let total = totals.last_key_value().map_or(0, |(total, _)| *total);
    if let Some((highest, path)) = parts.last_key_value().filter(|(highest, _)| **highest > total) {
        let expected = format!("a file up to {total}");
        return Err(Error::malformed(path, "file name", expected, format!("file {highest}")));
    }
    let highest = ranks.last_key_value().map_or(0, |(rank, _)| *rank);
    let of_ranks = Numbers::missing(1..=highest, ranks.keys().copied());
    let of_files = Numbers::missing(1..=total, parts.keys().copied());
    let name = |(shard, file): (u32, u32)| ShardName { shard, file, files: total }.to_string();
    let absent = |at: &(u32, u32)| !present.contains(at);
    let of_ranks_there = ranks.keys().flat_map(|rank| parts.keys().map(|file| (*rank, *file))).filter(absent);
    let of_both: Vec<String> = of_ranks_there.map(name).collect();
    let lacks = [
        of_ranks.as_ref().map(|numbers| numbers.short("shard", "shards")),
        of_files.as_ref().map(|numbers| numbers.short("file", "files")),
        (!of_both.is_empty()).then(|| short_list(&of_both, FEW)),
    ];
    let lacks: Vec<String> = lacks.into_iter().flatten().collect();
    let Some(first) = lacks.first() else { return Ok(None) };
    let (at, expected) = if of_ranks.is_some() {
        ("shards", format!("the files of shards 1 to {highest}"))
    } else if of_files.is_some() {
        ("files", format!("files 1 to {total}, each from at least one rank"))
    } else {
        ("shards", format!("{} files from each rank", parts.len()))
    };
    let hint = if of_ranks.is_none() && of_files.is_some() {
        Some(WITHOUT_FILES.to_owned())
    } else {
        let rest = safetensors::read(&mut Files::new(io), paths, None);
        let covered = rest.is_ok_and(|(catalog, _)| catalog.tensors.iter().all(|entry| entry.tilings().is_ok()));
        covered.then(|| WITHOUT_THEM.to_owned())
    };
    let allowed = format!("{} is read without {}", folder.display(), lacks.join(", "));
    let all = (1..=highest).flat_map(|rank| (1..=total).map(move |file| (rank, file)));
    let count = u64::from(highest) * u64::from(total) - present.len() as u64;
    let missing = list_missing_names(count, all.filter(absent).map(name));
    let (path, at) = (folder.to_path_buf(), at.to_owned());
    let error = FormatError::Missing { path, at, expected, missing: first.clone(), hint };
    let error = Error::from(error).naming(&missing);
    Ok(Some(Shortfall { missing, error, allowed: Some(allowed), is_one_file: false }))
}

/// Returns the shortfall (the missing files) if the user gives a single shard file as SRC. All other shard files in the
/// folder count as missing.
///
/// # Errors
/// `Io` if the folder of the shard cannot be listed.
pub fn lone_shard(path: &Path) -> Result<Shortfall> {
    let shard = ShardName::parse(path).map(|name| name.shard).unwrap_or_default();
    let error = Error::usage(
        format!("{} is only shard {shard} of a checkpoint in DCP's Hugging Face storage", path.display()),
        "give the folder that contains all shards",
    );
    let (folder, own) = (folder_of(path), name_of(path));
    let is_other = |name: &String| *name != own && ShardName::parse(&folder.join(name)).is_some();
    Ok(Shortfall::new(list(folder)?.into_iter().filter(is_other).collect(), error).of_one_file())
}
