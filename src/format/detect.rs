//! Detects the format of a path from file names and first bytes. Every format in the table of formats checks the path.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::foreign::{self, first_bytes};
use super::listing::{DetectedFiles, FileStart, FolderListing, Match};
use super::series::SeriesSet;
use super::torch::is_no_model;
use super::{Format, list, name_of, natural_order, torch_checkpointing};
use crate::error::{Error, Result};
use crate::name_list::{FEW, short_list};
use crate::storage::lookup;

/// Detects the format of a path. `from` is the format that the user requires; `None` if the user accepts any format.
///
/// # Errors
/// `Unsupported` if the path has no format that dtshard reads, with a hint for known formats of other frameworks;
/// `Usage` if the path contains two formats, or a format other than `from`.
pub fn detect(path: &Path, from: Option<Format>) -> Result<DetectedFiles> {
    match look(path, from)? {
        Some(found) => Ok(found),
        None => lone_file(path, from),
    }
}

/// Detects the format of a path like [`detect`], with one difference: returns `None` for a folder whose subfolders may
/// contain checkpoints. The function first looks for files whose names show the format, then for subfolders, and last
/// for a single torch file whose name does not show the format. Subfolders come before such a torch file, because verl,
/// for example, saves a `data.pt` in the folder above the checkpoints.
///
/// # Errors
/// The errors of [`detect`].
pub fn look(path: &Path, from: Option<Format>) -> Result<Option<DetectedFiles>> {
    let metadata = std::fs::metadata(path).map_err(lookup::refused("open", path))?;
    if !metadata.is_dir() && !metadata.is_file() {
        // Reading a pipe would block.
        return Err(Error::unsupported(
            format!("{} is neither a file nor a folder", path.display()),
            "write the data to a file first, because checkpoints need random access",
        ));
    }
    let found = if metadata.is_dir() { look_in(path, from)? } else { vec![detect_file(path)?] };
    one_of(path, from, found)
}

fn one_of(path: &Path, from: Option<Format>, mut found: Vec<DetectedFiles>) -> Result<Option<DetectedFiles>> {
    let any = !found.is_empty();
    if let Some(from) = from {
        found.retain(|found| can_be(found.format, from));
        if any && found.is_empty() {
            return Err(not_that_format(path, from));
        }
    }
    if found.len() > 1 {
        let names: Vec<&str> = found.iter().map(|found| found.format.name()).collect();
        let number = if names.len() == 2 { "two" } else { "several" };
        let (last, others) = names.split_last().expect("two formats at least");
        return Err(Error::usage(
            format!("{} contains {number} formats: {} and {last}", path.display(), others.join(", ")),
            format!("choose one of them, such as options::from {}", names[0]),
        ));
    }
    Ok(found.pop())
}

/// Returns whether files that were detected as the format `found` may turn out to have the format `from` when they are
/// read. For example, a reader finds flat parameters in rank files only when the reader opens the files.
fn can_be(found: Format, from: Format) -> bool {
    found == from || found.has_rank_files() && from.has_rank_files()
}

/// Returns the error for a path that contains no checkpoint of the required format `from`. The hint names the
/// subfolders that contain a checkpoint of this format.
pub fn not_that_format(path: &Path, from: Format) -> Error {
    let names = list(path).unwrap_or_default();
    if from == Format::TorchCheckpointing
        && let Some(hint) = torch_checkpointing::hint_if_missing(path, &names)
    {
        let what = format!(
            "{} contains no checkpoint of format {from}: it has no metadata.pkl of torch_checkpointing",
            path.display()
        );
        return Error::usage(what, hint);
    }
    let below = subfolders_with(path, Some(from));
    let hint = match below.as_slice() {
        [] => String::from("remove options::from to detect the format"),
        [only] => format!("give the folder {only}, or remove options::from to detect the format"),
        several => {
            format!(
                "give one of the folders {}, or remove options::from to detect the format",
                short_list(several, FEW)
            )
        }
    };
    Error::usage(format!("{} contains no checkpoint of format {from}", path.display()), hint)
}

/// Returns the subfolders of a folder that contain a checkpoint of `format` (of any format if `format` is `None`), in
/// natural order. Subfolders that cannot be read are left out, because the list is only for a hint.
fn subfolders_with(folder: &Path, format: Option<Format>) -> Vec<String> {
    let mut found: Vec<String> = (lookup::list(folder).into_iter().flatten())
        .filter(|entry| entry.is_folder().unwrap_or(false))
        .map(|entry| folder.join(&entry.name))
        .filter(|below| {
            let found = look_in(below, format).unwrap_or_default();
            found.iter().any(|found| format.is_none_or(|format| can_be(found.format, format)))
        })
        .map(|below| below.display().to_string())
        .collect();
    found.sort_by(|left, right| natural_order(left, right));
    found
}

/// Returns the only file of a folder that may be a complete checkpoint, for a folder in which no file name shows a
/// format. If several files may be a complete checkpoint, ignores the files whose names show that they contain no
/// model, such as `scheduler.pt`.
///
/// # Errors
/// `Unsupported` if not exactly one file remains; `Usage` instead if the user requires a format with `from`.
pub fn lone_file(folder: &Path, from: Option<Format>) -> Result<DetectedFiles> {
    let listing = FolderListing::of(folder, from)?;
    let saved = lone_files(&listing)?;
    let models: Vec<&(Format, PathBuf)> = saved.iter().filter(|(_, path)| !is_no_model(path)).collect();
    if let ([(_, only)], _) | ([], [(_, only)]) = (models.as_slice(), saved.as_slice()) {
        let found = one_of(folder, from, vec![detect_file(only)?])?;
        return found.ok_or_else(|| unknown_folder(&listing, &saved));
    }
    Err(from.map_or_else(|| unknown_folder(&listing, &saved), |from| not_that_format(folder, from)))
}

/// Returns the files of a folder that may each be a complete checkpoint, with their formats.
fn lone_files(listing: &FolderListing<'_>) -> Result<Vec<(Format, PathBuf)>> {
    let mut found = Vec::new();
    for format in Format::ALL {
        found.extend(format.entry().read.lone_files(listing)?.into_iter().map(|path| (*format, path)));
    }
    Ok(found)
}

fn unknown_folder(FolderListing { folder, names, .. }: &FolderListing<'_>, saved: &[(Format, PathBuf)]) -> Error {
    let what = format!("{} contains no checkpoint of a known format", folder.display());
    if let Some(error) = names.iter().find_map(|name| foreign::refuse_by_name(&folder.join(name))) {
        return error;
    }
    if let [(format, _), _, ..] = saved {
        let saved: Vec<String> = saved.iter().map(|(_, path)| name_of(path)).collect();
        let own = format!("{} are separate {format} checkpoints", short_list(&saved, FEW));
        let mut hint = String::from("give one of these files as SRC");
        if let Some(lost) = torch_checkpointing::hint_if_missing(folder, names) {
            hint = format!("{hint}; {lost}");
        }
        return Error::unsupported(format!("{what}: {own}"), hint).naming(&saved);
    }
    if ["blobs", "refs", "snapshots"].iter().all(|part| names.iter().any(|name| name == part)) {
        let snapshots = folder.join("snapshots");
        return Error::unsupported(what, format!("this is a hub cache; give a folder in {}", snapshots.display()));
    }
    let hint = match subfolders_with(folder, None).as_slice() {
        [] => None,
        [only] => Some(format!("give the folder {only}")),
        several => Some(format!("give one of the folders {}", short_list(several, FEW))),
    };
    if let Some(hint) = hint {
        return Error::unsupported(what, hint);
    }
    Error::unsupported(
        if names.is_empty() { format!("{what}: it is empty") } else { what },
        "known formats are DCP directories (.metadata), rank files (*_rank_N.pt), torch.save files and safetensors; \
         give the folder that contains the files",
    )
}

/// Returns whether a folder has at least one file that may be a complete checkpoint, as the name of the file shows.
///
/// # Errors
/// `Io`.
pub fn has_lone_files(folder: &Path) -> Result<bool> {
    Ok(!lone_files(&FolderListing::of(folder, None)?)?.is_empty())
}

fn look_in(folder: &Path, from: Option<Format>) -> Result<Vec<DetectedFiles>> {
    let listing = FolderListing::of(folder, from)?;
    foreign::refuse_folder(folder, &listing.names, from)?;
    let mut all = Vec::new();
    for format in Format::ALL {
        all.extend(format.entry().read.find_in(&listing)?);
    }
    all.sort_by_key(|found| found.certainty);
    leave_out_indexed(&mut all);
    let (possible, mut found): (Vec<_>, Vec<_>) = all.into_iter().partition(|found| found.certainty == Match::Possible);
    // A file that is only a possible match counts only beside a match that is certain or likely. On its own, it may be
    // a file that a trainer left above its checkpoints: see `lone_file`.
    for path in possible.iter().flat_map(|found| &found.paths).filter(|_| !found.is_empty()).collect::<Vec<_>>() {
        if first_bytes(path)?.starts_with(b"PK\x03\x04") {
            found.push(detect_file(path)?);
        }
    }
    Ok(found)
}

/// Removes each detected format whose files are all named by the index of another format, because these files belong to
/// the other format. Only an index that was detected with certainty counts.
fn leave_out_indexed(all: &mut Vec<DetectedFiles>) {
    let is_owner = |found: &&DetectedFiles| found.certainty == Match::Certain && found.index.is_some();
    let Some(owner) = all.iter().find(is_owner) else { return };
    let (format, owned) = (owner.format, owner.paths.iter().cloned().collect::<HashSet<PathBuf>>());
    all.retain(|found| {
        let mut files = found.paths.iter().chain(found.series.iter().flat_map(SeriesSet::files)).peekable();
        found.format == format || files.peek().is_none() || !files.all(|file| owned.contains(file))
    });
}

fn detect_file(path: &Path) -> Result<DetectedFiles> {
    let file = FileStart { path, name: name_of(path), head: first_bytes(path)? };
    let mut found = Vec::new();
    for format in Format::ALL {
        found.extend(format.entry().read.find_file(&file)?);
    }
    found.sort_by_key(|found| found.certainty);
    let is_certain = found.first().is_some_and(|found| found.certainty == Match::Certain && found.index.is_some());
    if !is_certain {
        foreign::refuse_file(path, &file.head)?;
    }
    found.into_iter().next().ok_or_else(|| {
        Error::unsupported(
            format!("{} is not a checkpoint of a known format", path.display()),
            "give a torch.save file, a safetensors file, a DCP directory or a folder of rank files",
        )
    })
}
