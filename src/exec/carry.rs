//! Files that a checkpoint's folder holds beside tensor data, carried over as they are.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::{Reporter, Stop};
use crate::error::{Error, Result};

/// Bytes between two looks at whether to stop.
const BLOCK_BYTES: u64 = 64 << 20;

/// A file, and where it goes in the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    pub from: PathBuf,
    /// Relative to the destination.
    pub to: PathBuf,
    pub len: u64,
}

/// Copy the files into `folder`.
///
/// # Errors
/// `Io` naming the file, also where two would be one; `Stopped`.
pub fn carry(files: &[Carried], folder: &Path, sync: bool, reporter: &dyn Reporter, stop: &Stop) -> Result<()> {
    for file in files {
        let path = folder.join(&file.to);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        }
        let source = File::open(&file.from).map_err(Error::io("open", &file.from))?;
        let mut target = File::create_new(&path).map_err(Error::io("create", &path))?;
        loop {
            stop.check()?;
            let copied = io::copy(&mut (&source).take(BLOCK_BYTES), &mut target);
            let copied = copied.map_err(Error::io("copy", &file.from))?;
            reporter.advance(copied);
            if copied < BLOCK_BYTES {
                break;
            }
        }
        if sync {
            target.sync_all().map_err(Error::io("sync", &path))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Silent;

    #[test]
    fn files_are_copied_into_new_folders_and_never_over_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let from = folder.path().join("a");
        std::fs::write(&from, b"text").unwrap();
        let file = Carried { from: from.clone(), to: PathBuf::from("sub/b"), len: 4 };
        let into = folder.path().join("out");
        carry(std::slice::from_ref(&file), &into, true, &Silent, &Stop::default()).unwrap();
        assert_eq!(std::fs::read(into.join("sub/b")).unwrap(), b"text");
        let error = carry(&[file], &into, false, &Silent, &Stop::default()).unwrap_err();
        assert!(error.to_string().contains("cannot create"), "{error}");
    }
}
