//! The rule for `--overwrite`: a destination is replaced only if it is a checkpoint and contains nothing else.
//!
//! Three kinds of files are replaceable: files in the [table](crate::format::known_files) of known files, unchanged
//! sidecar files from an earlier run, and files that are equal to the sidecar file that this run copies to the same
//! path. Links to folders are never followed.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::exec::sidecar_files::{SidecarFile, is_copied, is_unchanged_copy};
use crate::format::format_of;
use crate::format::known_files::{FileRole, is_checkpoint_file, is_known_folder, refuse_foreign_folder, role_of};
use crate::name_list::short_list;
use crate::publish::DestinationKind;
use crate::storage::{AnchoredPath, lookup};

/// Largest number of foreign files (files that `--overwrite` must not delete) that an error message names.
const SHOWN: usize = 8;

/// Size limit in bytes for comparing an existing file with a sidecar file of this run. A larger file counts as foreign.
const MAX_COMPARED_BYTES: u64 = 64 << 20;

/// Checks that `--overwrite` may replace the file or folder at the destination. Succeeds if there is nothing to
/// replace.
///
/// # Errors
/// `Usage` if the destination is not a checkpoint or contains foreign files; `Io` if the destination cannot be
/// examined.
pub fn check_replaceable(destination: &Path, shape: DestinationKind, carried: &[SidecarFile]) -> Result<()> {
    let metadata = match fs::metadata(destination) {
        Ok(metadata) => metadata,
        // The path does not exist, or it is a dangling link. A dangling link itself is replaced.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(()),
        Err(error) => return Err(Error::io("stat", destination)(error)),
    };
    if !metadata.is_dir() {
        let is_checkpoint = metadata.is_file() && is_checkpoint_file(destination)?;
        return if is_checkpoint { Ok(()) } else { Err(no_checkpoint(destination)) };
    }
    // A file can replace only an empty folder or a link. Publishing checks this.
    if shape == DestinationKind::File {
        return Ok(());
    }
    let names = list(destination)?;
    if names.is_empty() {
        return Ok(());
    }
    let texts: Vec<String> = names.iter().filter_map(|name| name.to_str().map(str::to_owned)).collect();
    let is_of_another_framework = refuse_foreign_folder(destination, &texts).is_err();
    let mut found = FoundFile { destination, carried, foreign: Vec::new(), has_checkpoint: false };
    found.walk(Path::new(""))?;
    if !found.has_checkpoint || is_of_another_framework {
        return Err(match format_of(destination) {
            Some(format) if format.entry().known_files.is_empty() => Error::usage(
                format!("{} has format {format}, which options::overwrite does not replace", destination.display()),
                format!("choose another destination, or first move {} away", destination.display()),
            ),
            _ => no_checkpoint(destination),
        });
    }
    if found.foreign.is_empty() {
        return Ok(());
    }
    Err(Error::usage(
        format!(
            "{} contains files that options::overwrite does not replace: {}",
            destination.display(),
            short_list(&found.foreign, SHOWN)
        ),
        "move these files away, or choose another destination",
    ))
}

/// Returns the error for a destination that is not a checkpoint and therefore is not replaced.
fn no_checkpoint(destination: &Path) -> Error {
    Error::usage(
        format!("{} is not a checkpoint, so options::overwrite does not replace it", destination.display()),
        format!("choose another destination, or first move {} away", destination.display()),
    )
}

/// Returns the sorted names in a folder.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    Ok(lookup::list(folder)?.into_iter().map(|entry| PathBuf::from(entry.name)).collect())
}

struct FoundFile<'a> {
    destination: &'a Path,
    carried: &'a [SidecarFile],
    /// Names of files and folders that `--overwrite` must not delete.
    foreign: Vec<String>,
    has_checkpoint: bool,
}

impl FoundFile<'_> {
    /// Examines all files and folders in `folder`, and records which of them are foreign. `folder` is relative to the
    /// destination.
    fn walk(&mut self, folder: &Path) -> Result<()> {
        for name in list(&self.destination.join(folder))? {
            let name = folder.join(name);
            let path = self.destination.join(&name);
            let kind = path.symlink_metadata().map_err(Error::io("stat", &path))?.file_type();
            let is_foreign = if kind.is_dir() {
                self.enter(&name)?
            } else {
                // Sockets and pipes are never part of a checkpoint, regardless of their names.
                !(kind.is_file() || kind.is_symlink()) || !self.is_replaceable(&name, &path)?
            };
            if is_foreign {
                self.foreign.push(format!("{}{}", name.display(), if kind.is_dir() { "/" } else { "" }));
            }
        }
        Ok(())
    }

    /// Examines a folder at a path relative to the destination. Returns true if the folder is foreign. A folder with a
    /// name that formats use is not foreign; its foreign files are recorded one by one. Any other folder is foreign if
    /// it is empty or if any of its files is not a sidecar file from an earlier run.
    fn enter(&mut self, folder: &Path) -> Result<bool> {
        if is_known_folder(folder) {
            self.walk(folder)?;
            return Ok(false);
        }
        let names = list(&self.destination.join(folder))?;
        for name in &names {
            let name = folder.join(name);
            let path = self.destination.join(&name);
            let is_folder = path.symlink_metadata().map_err(Error::io("stat", &path))?.is_dir();
            if if is_folder { self.enter(&name)? } else { !self.is_of_earlier_run(&name, &path)? } {
                return Ok(true);
            }
        }
        Ok(names.is_empty())
    }

    fn is_replaceable(&mut self, name: &Path, path: &Path) -> Result<bool> {
        let role = role_of(name, path);
        self.has_checkpoint |= role == Some(FileRole::Checkpoint);
        Ok(role.is_some() || self.is_of_earlier_run(name, path)?)
    }

    fn is_of_earlier_run(&self, name: &Path, path: &Path) -> Result<bool> {
        if is_unchanged_copy(path) {
            return Ok(true);
        }
        let Some(file) = self.carried.iter().find(|file| file.to == name) else { return Ok(false) };
        // A process that does not see the sidecar file leaves the check to the processes that see it.
        let is_elsewhere = !file.seen_by.is_empty() && file.read_path.symlink_metadata().is_err();
        Ok(is_elsewhere
            || file.len <= MAX_COMPARED_BYTES && is_copied(file, &AnchoredPath::read_only(self.destination), true)?)
    }
}
