//! The twin on disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rayon::prelude::*;

use super::file_report::{ReportedFile, each_block};
use crate::error::{Error, FormatError, Result};
use crate::storage::AnchoredPath;
use crate::storage::filesystem::close;

/// Make the folder, empty.
///
/// # Errors
/// `Io`.
pub fn begin(twin: &AnchoredPath) -> Result<()> {
    match twin.remove_all() {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("clear", twin)(error)),
        _ => {}
    }
    twin.create_folder().map_err(Error::io("create", twin))
}

/// Make the folders of these files.
///
/// # Errors
/// `Io`.
pub fn folders<'a>(twin: &AnchoredPath, files: impl Iterator<Item = &'a PathBuf>) -> Result<()> {
    let folders: BTreeSet<&Path> = files.filter_map(|file| file.parent()).collect();
    folders
        .into_iter()
        .try_for_each(|folder| twin.create_folders(folder).map_err(Error::io("create", &twin.join(folder))))
}

/// Write the twins of files of this process; gives how many bytes those hold.
///
/// # Errors
/// `Io`.
pub fn files<'a>(
    own: &Path,
    twin: &AnchoredPath,
    files: impl Iterator<Item = (&'a PathBuf, &'a ReportedFile)>,
) -> Result<u64> {
    let files: Vec<_> = files.collect();
    let written: Vec<Result<u64>> = files
        .into_par_iter()
        .map(|(path, seen)| {
            let at = twin.join(path);
            let Some(len) = seen.len else {
                // It leads nowhere here either.
                let made = at.symlink("seen by no rank");
                return made.map(|()| 0).map_err(Error::io("create", &at));
            };
            write(&own.join(path), &at, len, seen)?;
            Ok(seen.held.len_bytes())
        })
        .collect();
    written.into_iter().sum()
}

fn write(from: &Path, to: &AnchoredPath, len: u64, seen: &ReportedFile) -> Result<()> {
    let source = File::open(from).map_err(Error::io("open", from))?;
    // Who cannot read SRC cannot read it here either.
    let target = to.create_new(0o600).map_err(Error::io("create", to))?;
    target.set_len(len).map_err(Error::io("write", to))?;
    for range in seen.held.iter() {
        each_block(&source, from, range, &mut |at, block| {
            target.write_all_at(block, at).map_err(Error::io("write", to))
        })?;
    }
    // For whoever looks at it without asking the twin.
    let (seconds, nanoseconds) = seen.modified;
    let since = u64::try_from(seconds).ok().zip(u32::try_from(nanoseconds).ok());
    let modified = since.and_then(|(seconds, rest)| SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, rest)));
    modified.map_or(Ok(()), |modified| target.set_modified(modified)).map_err(Error::io("write", to))?;
    // Closing tells nobody what could not be written, and what is missing looks like zeros.
    target.sync_data().map_err(Error::io("sync", to))?;
    close(target).map_err(Error::io("close", to))
}

/// How long file systems of several nodes may take to show a new file to all.
const SHOWN_WITHIN: Duration = Duration::from_mins(1);

/// Wait until this process sees all of the files, as long as they are.
///
/// # Errors
/// `Io`; `Missing` where one does not appear.
pub fn wait_for(twin: &AnchoredPath, files: &BTreeMap<PathBuf, ReportedFile>) -> Result<()> {
    let begun = Instant::now();
    let folders: BTreeSet<&Path> = files.keys().filter_map(|file| file.parent()).collect();
    loop {
        // Whoever reads the twin lists its folders first, and a list may be older than what it is of.
        let mut listed = BTreeSet::new();
        for below in &folders {
            let folder = twin.join(below);
            let names = folder.names().map_err(Error::io("list", &folder))?;
            listed.extend(names.into_iter().map(|name| below.join(name)));
        }
        let is_there = |path: &PathBuf, seen: &ReportedFile| {
            let len = || twin.join(path).metadata().ok().map(|metadata| metadata.len());
            listed.contains(path) && (seen.len.is_none() || len() == seen.len)
        };
        let missing = files.par_iter().find_any(|(path, seen)| !is_there(path, seen));
        let Some((missing, _)) = missing else { return Ok(()) };
        if begun.elapsed() > SHOWN_WITHIN {
            return Err(Error::Format(FormatError::Missing {
                path: twin.path().to_path_buf(),
                at: String::from("files of other processes"),
                expected: String::from("a folder that all processes see"),
                missing: missing.display().to_string(),
                hint: Some(String::from("the destination has to be on a file system that all nodes share")),
            }));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
