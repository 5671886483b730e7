//! Writes the metadata mirror to disk. All sizes and offsets are in bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rayon::prelude::*;

use super::file_report::{ReportedFile, each_block};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;
use crate::storage::filesystem::close;

/// Creates the folder of the mirror, or empties it.
///
/// # Errors
/// `Io`.
pub fn create_folder(mirror: &AnchoredPath) -> Result<()> {
    match mirror.remove_all() {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("clear", mirror)(error)),
        _ => {}
    }
    mirror.create_folder().map_err(Error::io("create", mirror))
}

/// Creates the parent folders of `files`, which are paths relative to the folder of the mirror.
///
/// # Errors
/// `Io`.
pub fn create_parent_folders<'a>(mirror: &AnchoredPath, files: impl Iterator<Item = &'a PathBuf>) -> Result<()> {
    let folders: BTreeSet<&Path> = files.filter_map(|file| file.parent()).collect();
    folders
        .into_iter()
        .try_for_each(|folder| mirror.create_folders(folder).map_err(Error::io("create", &mirror.join(folder))))
}

/// Writes `files` into the mirror: from each file of SRC, the bytes that are not tensor data. `own` is the folder of
/// SRC on this process. Returns the number of bytes written.
///
/// # Errors
/// `Io`.
pub fn write_files<'a>(
    own: &Path,
    mirror: &AnchoredPath,
    files: impl Iterator<Item = (&'a PathBuf, &'a ReportedFile)>,
) -> Result<u64> {
    let files: Vec<_> = files.collect();
    let written: Vec<Result<u64>> = files
        .into_par_iter()
        .map(|(path, seen)| {
            let at = mirror.join(path);
            let Some(len) = seen.len else {
                // The link is dangling in the mirror as well.
                let made = at.symlink("seen by no rank");
                return made.map(|()| 0).map_err(Error::io("create", &at));
            };
            write(&own.join(path), &at, len, seen)?;
            Ok(seen.mirrored.len_bytes())
        })
        .collect();
    written.into_iter().sum()
}

fn write(from: &Path, to: &AnchoredPath, len: u64, seen: &ReportedFile) -> Result<()> {
    let source = File::open(from).map_err(Error::io("open", from))?;
    // A user who cannot read SRC must not be able to read the mirror either.
    let target = to.create_new(0o600).map_err(Error::io("create", to))?;
    target.set_len(len).map_err(Error::io("write", to))?;
    for range in seen.mirrored.iter() {
        each_block(&source, from, range, &mut |at, block| {
            target.write_all_at(block, at).map_err(Error::io("write", to))
        })?;
    }
    // The modification time is set for programs that read the mirror like an ordinary folder.
    let (seconds, nanoseconds) = seen.modified;
    let since = u64::try_from(seconds).ok().zip(u32::try_from(nanoseconds).ok());
    let modified = since.and_then(|(seconds, rest)| SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, rest)));
    modified.map_or(Ok(()), |modified| target.set_modified(modified)).map_err(Error::io("write", to))?;
    // Closing does not report failed writes, and missing bytes would be read as zeros.
    target.sync_data().map_err(Error::io("sync", to))?;
    close(target).map_err(Error::io("close", to))
}

/// The maximum time for which a process waits until it sees a file of the mirror that another node wrote.
const MAX_DELAY: Duration = Duration::from_mins(1);

/// Waits until this process sees all files of the mirror, each with its full length.
///
/// # Errors
/// `Io`; `Missing` if a file does not appear.
pub fn wait_until_visible(mirror: &AnchoredPath, files: &BTreeMap<PathBuf, ReportedFile>) -> Result<()> {
    let begun = Instant::now();
    let folders: BTreeSet<&Path> = files.keys().filter_map(|file| file.parent()).collect();
    loop {
        // Reading the mirror begins with listing its folders, and a cached list may be older than the files.
        let mut listed = BTreeSet::new();
        for below in &folders {
            let folder = mirror.join(below);
            let names = folder.names().map_err(Error::io("list", &folder))?;
            listed.extend(names.into_iter().map(|name| below.join(name)));
        }
        let is_there = |path: &PathBuf, seen: &ReportedFile| {
            let len = || mirror.join(path).metadata().ok().map(|metadata| metadata.len());
            listed.contains(path) && (seen.len.is_none() || len() == seen.len)
        };
        let missing = files.par_iter().find_any(|(path, seen)| !is_there(path, seen));
        let Some((missing, _)) = missing else { return Ok(()) };
        if begun.elapsed() > MAX_DELAY {
            return Err(Error::missing(
                mirror.path(),
                "files of other processes",
                "a folder that all processes see",
                missing.display().to_string(),
            )
            .missing_hint("choose a destination on a file system that all nodes share"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
