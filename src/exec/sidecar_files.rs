//! Files that a checkpoint's folder holds beside tensor data, carried over as they are.

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
use crate::storage::{AnchoredPath, afresh, regular_file};

/// Bytes between two looks at whether to stop.
const BLOCK_BYTES: u64 = 64 << 20;

/// A file, and where it goes in the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidecarFile {
    /// As SRC calls it.
    pub from: PathBuf,
    /// Where it is read: that, or its twin.
    pub place: PathBuf,
    /// Relative to the destination.
    pub to: PathBuf,
    pub len: u64,
    /// When it was last changed, in seconds and nanoseconds since 1970.
    pub modified: (i64, i64),
    /// The ranks that can read it, where not all can.
    pub seen_by: Vec<u32>,
}

impl SidecarFile {
    /// One that all can read.
    ///
    /// # Errors
    /// `Io` where it cannot be looked at, or is no file.
    pub fn new(from: PathBuf, to: PathBuf) -> Result<Self> {
        let metadata = regular_file(&from)?;
        let (len, modified) = (metadata.len(), (metadata.mtime(), metadata.mtime_nsec()));
        Ok(Self { place: from.clone(), from, to, len, modified, seen_by: Vec::new() })
    }

    /// Whose of so many parts it is to carry the file with this number: they are few and small, and dealt out in turn.
    #[must_use]
    pub fn carrier(&self, number: u32, parts: u32) -> u32 {
        let turn = number as usize % self.seen_by.len().max(1);
        self.seen_by.get(turn).copied().unwrap_or(number % parts)
    }
}

/// Copy a file into `folder`, in the place of what an earlier run began there.
///
/// # Errors
/// `Io` naming the file; `Stopped`.
pub fn carry(
    file: &SidecarFile,
    folder: &AnchoredPath,
    sync: bool,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<()> {
    let path = folder.join(&file.to);
    let above = file.to.parent().unwrap_or(Path::new(""));
    folder.create_folders(above).map_err(Error::io("create", &folder.join(above)))?;
    let source = File::open(&file.place).map_err(refused("open", &file.from))?;
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
    mark(&target);
    close(target).map_err(Error::io("close", &path))
}

/// The attribute of a carried file that says what it was when it was written.
const MARK: &str = "user.dtshard.carried";

/// Note in the copy what it is now, so that `--overwrite` can tell it from a file that somebody has changed since. File
/// systems without attributes keep no marks, so nothing may be concluded from a missing one.
fn mark(copy: &File) {
    if let Ok(metadata) = copy.metadata() {
        let _ = rustix::fs::fsetxattr(copy, MARK, state(&metadata).as_bytes(), XattrFlags::empty());
    }
}

/// Returns whether an earlier run carried a file and nobody has written to the file since.
#[must_use]
pub fn is_unchanged_copy(path: &Path) -> bool {
    let mut value = [0_u8; 64];
    let (Ok(metadata), Ok(len)) = (path.symlink_metadata(), rustix::fs::lgetxattr(path, MARK, &mut value[..])) else {
        return false;
    };
    metadata.is_file() && value.get(..len) == Some(state(&metadata).as_bytes())
}

/// Length and time of the last change of the content.
fn state(metadata: &Metadata) -> String {
    format!("{} {}.{:09}", metadata.len(), metadata.mtime(), metadata.mtime_nsec())
}

/// Whether the copy in `folder` is there in full; `compares` its bytes with those of the source, too.
///
/// # Errors
/// `Io`
pub fn is_carried(file: &SidecarFile, folder: &AnchoredPath, compares: bool) -> Result<bool> {
    let path = folder.join(&file.to);
    if len_of(&path)? != Some(file.len) {
        return Ok(false);
    }
    if !compares {
        return Ok(true);
    }
    let source = File::open(&file.place).map_err(Error::io("open", &file.from))?;
    let copy = path.open().map_err(Error::io("open", &path))?;
    let mut is_same = true;
    let mut at = 0;
    let mut wanted = Vec::new();
    for_each_block(&copy, path.path(), &(0..file.len), |block| {
        wanted.resize(block.len(), 0);
        source.read_exact_at(&mut wanted, at).map_err(Error::io("read", &file.from))?;
        at += block.len() as u64;
        is_same &= block == wanted;
        Ok(())
    })?;
    Ok(is_same)
}

/// The length of a file; `None` where there is none.
pub(crate) fn len_of(path: &AnchoredPath) -> Result<Option<u64>> {
    match afresh::metadata(path) {
        Ok(metadata) => Ok(metadata.is_file().then_some(metadata.len())),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(Error::io("look at", path)(error)),
    }
}

/// Check that no two files would become one.
///
/// # Errors
/// `Usage` naming it.
pub fn check_distinct(written: &[OutputFile], carried: &[SidecarFile]) -> Result<()> {
    let mut names = HashSet::new();
    let all = written.iter().map(|file| &file.path).chain(carried.iter().map(|file| &file.to));
    match all.into_iter().find(|name| !names.insert(*name)) {
        None => Ok(()),
        Some(name) => Err(Error::usage(
            format!("{} would be written twice, by files of the same name", name.display()),
            "rename one of the files of SRC that are carried along, or leave it out",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Silent;

    #[test]
    fn files_are_copied_whole_and_never_over_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let from = folder.path().join("a");
        std::fs::write(&from, b"text").unwrap();
        let file = SidecarFile::new(from.clone(), PathBuf::from("sub/b")).unwrap();
        let into = folder.path().join("out");
        std::fs::create_dir_all(into.join("sub")).unwrap();
        std::fs::write(into.join("sub/b"), b"half of some other").unwrap();
        carry(&file, &AnchoredPath::new(&into), true, &Silent, &Stop::default()).unwrap();
        assert_eq!(std::fs::read(into.join("sub/b")).unwrap(), b"text");
        check_distinct(&[OutputFile::new("b")], std::slice::from_ref(&file)).unwrap();
        let error = check_distinct(&[OutputFile::new("sub/b")], &[file]).unwrap_err();
        assert!(error.to_string().contains("sub/b would be written twice"), "{error}");
    }
}
