//! Check of the free space on the file system of the destination, in bytes.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::catalog::OutputFile;
use crate::error::{Error, Result};
use crate::exec::Extents;
use crate::exec::sidecar_files::SidecarFile;
use crate::quantity::human_bytes;
use crate::storage::{AnchoredPath, filesystem};

/// Checks that there is space for the files in which this process writes, and for the sidecar files that it copies.
/// Space that existing files occupy counts as available.
///
/// # Errors
/// `Usage` if there is not enough space, `Io` if the free space is unknown.
pub fn check_space<'a>(
    folder: &AnchoredPath,
    files: &[OutputFile],
    todo: &Extents,
    to_carry: impl Iterator<Item = &'a SidecarFile>,
) -> Result<()> {
    // The free space is read before the existing files are measured, because other processes write at the same time.
    let free = filesystem::free_bytes(folder.path())?;
    let to_make = |path: &Path, len: u64| {
        len.saturating_sub(folder.join(path).metadata().map_or(0, |found| found.blocks() * 512))
    };
    let written: u64 = todo.files().map(|index| &files[index as usize]).map(|file| to_make(&file.path, file.len)).sum();
    let needed = written + to_carry.map(|file| to_make(&file.to, file.len)).sum::<u64>();
    if free >= needed { Ok(()) } else { Err(no_space(folder.path(), needed, free)) }
}

/// Returns the error for a file system with too few free bytes.
pub fn no_space(folder: &Path, needed: u64, free: u64) -> Error {
    let (needed, free) = (human_bytes(needed), human_bytes(free));
    Error::usage(
        format!("{needed} are needed on the file system of {}, but only {free} are free", folder.display()),
        "free space on that file system, or choose a destination on another one",
    )
}
