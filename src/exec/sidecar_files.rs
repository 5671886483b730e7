//! Sidecar files: files beside the tensor data in a checkpoint's folder, which are copied unchanged. All sizes and
//! offsets are in bytes.

use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::XattrFlags;

use super::digest::for_each_block;
use super::{Reporter, Stop};
use crate::catalog::OutputFile;
use crate::error::{Error, Result};
use crate::storage::filesystem::close;
use crate::storage::lookup::refused;
use crate::storage::{AnchoredPath, fresh_lookup, regular_file};

/// The number of bytes that are copied between two checks of `stop`.
const BLOCK_BYTES: u64 = 64 << 20;

/// A sidecar file, and its path in the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidecarFile {
    /// The path of the file in SRC.
    pub from: PathBuf,
    /// The path from which the file is read: its path in SRC, or its path in the metadata mirror of SRC.
    pub read_path: PathBuf,
    /// The path relative to the destination folder.
    pub to: PathBuf,
    /// The length in bytes.
    pub len: u64,
    /// The time of the last change, in seconds and nanoseconds since 1970.
    pub modified: (i64, i64),
    /// The numbers of the dtshard processes that can read the file; empty if all processes can read it.
    pub seen_by: Vec<u32>,
}

impl SidecarFile {
    /// Returns a sidecar file that all processes can read.
    ///
    /// # Errors
    /// `Io` if it cannot be read or is not a file.
    pub fn new(from: PathBuf, to: PathBuf) -> Result<Self> {
        let metadata = regular_file(&from)?;
        let (len, modified) = (metadata.len(), (metadata.mtime(), metadata.mtime_nsec()));
        Ok(Self { read_path: from.clone(), from, to, len, modified, seen_by: Vec::new() })
    }

    /// Returns the number of the process that copies the file with the number `number`. `parts` is the number of
    /// processes. The files are few and small, so the processes that can read a file take turns.
    pub fn assigned_process(&self, number: u32, parts: u32) -> u32 {
        let turn = number as usize % self.seen_by.len().max(1);
        self.seen_by.get(turn).copied().unwrap_or(number % parts)
    }
}

/// Copies a sidecar file into `folder`. An unfinished copy of an earlier run is replaced.
///
/// # Errors
/// `Io` naming the file; `Stopped`.
pub fn copy_file(
    file: &SidecarFile,
    folder: &AnchoredPath,
    sync: bool,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<()> {
    let path = folder.join(&file.to);
    let above = file.to.parent().unwrap_or(Path::new(""));
    folder.create_folders(above).map_err(Error::io("create", &folder.join(above)))?;
    let source = File::open(&file.read_path).map_err(refused("open", &file.from))?;
    let mut target = path.replace_with_new(0o666).map_err(Error::io("create", &path))?;
    loop {
        stop.check()?;
        let copied = io::copy(&mut (&source).take(BLOCK_BYTES), &mut target);
        let copied = copied.map_err(Error::io("copy", &file.from))?;
        reporter.advance(copied);
        if copied < BLOCK_BYTES {
            break;
        }
    }
    crate::fault::point("carried");
    if sync {
        target.sync_all().map_err(Error::io("sync", &path))?;
    }
    record_state(&target);
    close(target).map_err(Error::io("close", &path))
}

/// The name of the extended attribute in which a copy records its own length and the time of its last change.
const STATE_ATTRIBUTE: &str = "user.dtshard.carried";

/// Records the state of the copy in its extended attribute, so that `options::overwrite` can recognise a copy that
/// somebody has changed later. File systems without extended attributes keep no record, so a missing attribute proves
/// nothing.
fn record_state(copy: &File) {
    if let Ok(metadata) = copy.metadata() {
        let _ = rustix::fs::fsetxattr(copy, STATE_ATTRIBUTE, state(&metadata).as_bytes(), XattrFlags::empty());
    }
}

/// Returns true if the extended attribute of this file shows that an earlier run copied it, and that nobody has written
/// to it since then. False proves nothing: some file systems do not store the attribute.
pub fn is_unchanged_copy(path: &Path) -> bool {
    let mut value = [0_u8; 64];
    let (Ok(metadata), Ok(len)) =
        (path.symlink_metadata(), rustix::fs::lgetxattr(path, STATE_ATTRIBUTE, &mut value[..]))
    else {
        return false;
    };
    metadata.is_file() && value.get(..len) == Some(state(&metadata).as_bytes())
}

/// Returns a text with the length of a file and the time of the last change of its content. The text differs if
/// somebody has changed the file.
fn state(metadata: &Metadata) -> String {
    format!("{} {}.{:09}", metadata.len(), metadata.mtime(), metadata.mtime_nsec())
}

/// Returns whether `folder` has a copy with the length of the source file. If `compares` is true, the bytes of the copy
/// must also equal the bytes of the source file.
///
/// # Errors
/// `Io`
pub fn is_copied(file: &SidecarFile, folder: &AnchoredPath, compares: bool) -> Result<bool> {
    let path = folder.join(&file.to);
    if len_of(&path)? != Some(file.len) {
        return Ok(false);
    }
    if !compares {
        return Ok(true);
    }
    let source = File::open(&file.read_path).map_err(Error::io("open", &file.from))?;
    let copy = path.open().map_err(Error::io("open", &path))?;
    let mut is_same = true;
    let mut at = 0;
    let mut expected = Vec::new();
    for_each_block(&copy, path.path(), &(0..file.len), |block| {
        expected.resize(block.len(), 0);
        source.read_exact_at(&mut expected, at).map_err(Error::io("read", &file.from))?;
        at += block.len() as u64;
        is_same &= block == expected;
        Ok(())
    })?;
    Ok(is_same)
}

/// Returns the length of a file in bytes, or `None` if there is no file at `path`.
pub(crate) fn len_of(path: &AnchoredPath) -> Result<Option<u64>> {
    match fresh_lookup::metadata(path) {
        Ok(metadata) => Ok(metadata.is_file().then_some(metadata.len())),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(Error::io("stat", path)(error)),
    }
}

/// Checks that no two output files or sidecar files have the same path in the destination.
///
/// # Errors
/// `Usage` naming the path.
pub fn check_distinct(written: &[OutputFile], sidecar_files: &[SidecarFile]) -> Result<()> {
    let mut names = HashSet::new();
    let all = written.iter().map(|file| &file.path).chain(sidecar_files.iter().map(|file| &file.to));
    match all.into_iter().find(|name| !names.insert(*name)) {
        None => Ok(()),
        Some(name) => Err(Error::usage(
            format!("{}: two files would be written to this path", name.display()),
            "rename or remove the sidecar file in SRC",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Silent;

    #[test]
    fn unfinished_copy_is_replaced_and_equal_paths_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let from = folder.path().join("a");
        std::fs::write(&from, b"text").unwrap();
        let file = SidecarFile::new(from.clone(), PathBuf::from("sub/b")).unwrap();
        let into = folder.path().join("out");
        std::fs::create_dir_all(into.join("sub")).unwrap();
        std::fs::write(into.join("sub/b"), b"half of some other").unwrap();
        copy_file(&file, &AnchoredPath::new(&into), true, &Silent, &Stop::default()).unwrap();
        assert_eq!(std::fs::read(into.join("sub/b")).unwrap(), b"text");
        check_distinct(&[OutputFile::new("b")], std::slice::from_ref(&file)).unwrap();
        let error = check_distinct(&[OutputFile::new("sub/b")], &[file]).unwrap_err();
        assert!(error.to_string().contains("sub/b: two files would be written"), "{error}");
    }
}
