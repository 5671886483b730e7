//! Sealing: turns the finished ranges of all runs into a checkpoint.
//!
//! Sealing writes the checksums that are still missing. A checksum is missing if several runs, or an interrupted run,
//! wrote the data that the checksum covers.
//!
//! All sizes and offsets are in bytes. Invariant: sealing twice has the same effect as sealing once, so a run may
//! finish the sealing that another run began.

use std::collections::{BTreeMap, HashSet};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rayon::prelude::*;

use super::completed_work::CompletedWork;
use crate::catalog::OutputFile;
use crate::error::{Error, Result, StorageError, Untrusted};
use crate::exec::sidecar_files::{SidecarFile, is_copied, len_of};
use crate::exec::{Extents, Outputs, Stop, checksums};
use crate::storage::AnchoredPath;

/// Returns true if all bytes of the output files, and all sidecar files, are recorded as finished. `carried` is the
/// number of sidecar files.
pub fn is_complete(known: &CompletedWork, files: &[OutputFile], carried: usize) -> bool {
    known.done == Extents::of_files(files) && known.carried.len() == carried
}

/// Writes the missing checksums into the files in `folder`, whose data is complete. `known` was read from `journals`.
///
/// # Errors
/// `Usage` if a file has the wrong length, `Malformed` if journals contradict each other, `Io`.
pub fn seal(
    folder: &AnchoredPath,
    files: &[OutputFile],
    carried: &[SidecarFile],
    known: &CompletedWork,
    journals: &AnchoredPath,
    sync: bool,
) -> Result<()> {
    let misfit = |path: &Path, len: u64, found: &str| {
        Err(Error::usage(
            format!("{}: expected {len} bytes, found {found}", folder.join(path).display()),
            "another program changed the output; use options::resume to write it again",
        ))
    };
    if let Some((index, found)) = misfits_of_all(folder, files)?.first_key_value() {
        let file = &files[*index as usize];
        return misfit(&file.path, file.len, found);
    }
    for file in carried {
        if !is_copied(file, folder, false)? {
            return misfit(&file.to, file.len, "another length");
        }
    }
    let outputs = Outputs::open_existing(folder, files, sync)?;
    checksums::write_combined(&outputs, files, &known.sums, journals.path())?;
    crate::fault::point("seal-summed");
    if sync {
        known.sums.keys().try_for_each(|file| outputs.sync(*file, &Stop::default()))?;
    }
    outputs.close()
}

/// Returns true if all files exist in `folder` with the expected length.
///
/// # Errors
/// `Io` if a file cannot be examined.
pub fn has_all(folder: &AnchoredPath, files: &[OutputFile], carried: &[SidecarFile]) -> Result<bool> {
    for file in carried {
        if !is_copied(file, folder, false)? {
            return Ok(false);
        }
    }
    Ok(misfits_of_all(folder, files)?.is_empty())
}

/// Checks that `folder` contains only the files of the result, and that each of them is a regular file of this user
/// with one link. If another user may write to the folder, that user can have put a file there.
///
/// # Errors
/// `Usage` naming an unexpected file, `Io`.
pub fn check_output(folder: &AnchoredPath, files: &[OutputFile], carried: &[SidecarFile]) -> Result<()> {
    let all = || files.iter().map(|file| file.path.as_path()).chain(carried.iter().map(|file| file.to.as_path()));
    let parents = all().flat_map(|path| path.ancestors().skip(1)).collect();
    let checked = ExpectedNames { files: all().collect(), parents }.check(folder, Path::new(""));
    match checked {
        // Another process that sealed the same output was faster.
        Err(Error::Storage(StorageError::Io { source, .. })) if source.kind() == ErrorKind::NotFound => Ok(()),
        checked => checked,
    }
}

/// The file names that the result is expected to contain, relative to its folder.
struct ExpectedNames<'a> {
    files: HashSet<&'a Path>,
    parents: HashSet<&'a Path>,
}

impl ExpectedNames<'_> {
    fn check(&self, folder: &AnchoredPath, below: &Path) -> Result<()> {
        let held = folder.as_anchor().map_err(Error::io("open", folder))?;
        let names = held.names().map_err(Error::io("list", folder))?;
        names.par_iter().try_for_each(|name| {
            let (path, relative) = (held.join(name), below.join(name));
            let foreign = || {
                Error::usage(
                    format!("{} is not part of the output; another program put it there", folder.join(name).display()),
                    "move this file to another place, then continue with options::resume",
                )
            };
            // A symbolic link, or a file of another user, is an error.
            let Some(metadata) = path.own_metadata().map_err(Error::io("stat", &path))? else { return Ok(()) };
            if metadata.is_dir() {
                let is_expected = self.parents.contains(relative.as_path());
                return if is_expected { self.check(&path, &relative) } else { Err(foreign()) };
            }
            if !metadata.is_file() || !self.files.contains(relative.as_path()) {
                // NFS gives a name with this prefix to a deleted file that is still open.
                let is_deleted = name.as_encoded_bytes().starts_with(b".nfs");
                return if is_deleted { Ok(()) } else { Err(foreign()) };
            }
            match metadata.nlink() {
                0 | 1 => Ok(()),
                names => Err(Error::io("publish", &path)(Untrusted::Names { path: path.path().into(), names }.into())),
            }
        })
    }
}

fn misfits_of_all(folder: &AnchoredPath, files: &[OutputFile]) -> Result<BTreeMap<u32, String>> {
    let all: Vec<u32> = (0..).zip(files).map(|(index, _)| index).collect();
    misfits(folder, files, &all)
}

/// Returns the files in the list `these` that have the wrong length. For each file, the text is its actual length, or
/// `no file`.
///
/// # Errors
/// `Io` if a file cannot be examined.
pub fn misfits(folder: &AnchoredPath, files: &[OutputFile], these: &[u32]) -> Result<BTreeMap<u32, String>> {
    // The folders are kept open, because otherwise each check would open them again.
    let held = folder.as_anchor().unwrap_or_else(|_| folder.clone());
    let look = |index: &u32| -> Result<Option<(u32, String)>> {
        let file = &files[*index as usize];
        let found = match len_of(&held.join(&file.path))? {
            Some(found) if found == file.len => return Ok(None),
            found => found.map_or_else(|| String::from("no file"), |found| format!("{found} bytes")),
        };
        Ok(Some((*index, found)))
    };
    // The files are checked in parallel, because a network file system needs some time for each file.
    let found: Vec<Result<Option<(u32, String)>>> = these.par_iter().map(look).collect();
    found.into_iter().filter_map(Result::transpose).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_not_as_long_as_they_should_be() {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<OutputFile> = (0..5_u8)
            .map(|number| {
                let mut file = OutputFile::new(format!("sub/{number}"));
                file.push_payload(10);
                file
            })
            .collect();
        std::fs::create_dir(folder.path().join("sub")).unwrap();
        for (number, len) in [(0, 10), (1, 9), (2, 11)] {
            std::fs::write(folder.path().join(format!("sub/{number}")), vec![0; len]).unwrap();
        }
        std::fs::create_dir(folder.path().join("sub/4")).unwrap();
        let found = misfits(&AnchoredPath::new(folder.path()), &files, &[0, 1, 2, 3, 4]).unwrap();
        let words = [(1, "9 bytes"), (2, "11 bytes"), (3, "no file"), (4, "no file")];
        assert_eq!(found, words.map(|(number, found)| (number, found.to_owned())).into());
        assert_eq!(misfits(&AnchoredPath::new(folder.path()), &files, &[0]).unwrap(), BTreeMap::new());
        let place = AnchoredPath::new(folder.path());
        let error = seal(&place, &files, &[], &CompletedWork::default(), &place, false).unwrap_err();
        assert!(error.to_string().contains("sub/1: expected 10 bytes, found 9 bytes"), "{error}");
    }
}
