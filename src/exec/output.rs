//! The files being written: made at their full size first, so that a full disk is known before any byte moves.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::Stop;
use crate::catalog::OutputFile;
use crate::error::{Error, Result};
use crate::storage::filesystem::{open_file_budget, write_back};

/// Output files, opened on demand.
#[derive(Debug)]
pub struct Outputs {
    paths: Vec<PathBuf>,
    open: Mutex<Vec<(u32, Arc<File>)>>,
}

impl Outputs {
    /// Create every file under `folder` with its full size allocated.
    ///
    /// # Errors
    /// `Io` naming the file; `StorageFull` where the file system has no room for it.
    pub fn create(folder: &Path, files: &[OutputFile]) -> Result<Self> {
        let mut paths = Vec::with_capacity(files.len());
        for file in files {
            let path = folder.join(&file.path);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
            }
            let created = File::create_new(&path).map_err(Error::io("create", &path))?;
            allocate(&created, file.len).map_err(Error::io("allocate space for", &path))?;
            paths.push(path);
        }
        Ok(Self { paths, open: Mutex::default() })
    }

    fn open(&self, file: u32) -> Result<Arc<File>> {
        let mut open = self.open.lock().expect("no panic while the lock is held");
        if let Some((_, handle)) = open.iter().rev().find(|(index, _)| *index == file) {
            return Ok(Arc::clone(handle));
        }
        let path = &self.paths[file as usize];
        let handle = OpenOptions::new().write(true).open(path).map_err(Error::io("open", path))?;
        let handle = Arc::new(handle);
        if open.len() >= open_file_budget() / 4 {
            open.remove(0);
        }
        open.push((file, Arc::clone(&handle)));
        Ok(handle)
    }

    /// # Errors
    /// `Io` naming the file.
    pub fn write(&self, file: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        let path = &self.paths[file as usize];
        self.open(file)?.write_all_at(bytes, offset).map_err(Error::io("write", path))
    }

    /// fsync one file. The data goes first, block by block with a look at `stop` in between, since one fsync of many
    /// GB could not be interrupted.
    ///
    /// # Errors
    /// `Io` naming the file, `Stopped`.
    pub fn sync(&self, file: u32, stop: &Stop) -> Result<()> {
        const BLOCK: u64 = 32 << 20;
        let path = &self.paths[file as usize];
        let handle = self.open(file)?;
        let len = handle.metadata().map_err(Error::io("look at", path))?.len();
        for block in 0..len.div_ceil(BLOCK) {
            stop.check()?;
            write_back(&handle, block * BLOCK, BLOCK);
        }
        handle.sync_all().map_err(Error::io("sync", path))
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.paths.len()
    }
}

/// Reserve `len` bytes for the file. Where the file system cannot reserve, setting the length has to do, and a full
/// disk shows when writing.
fn allocate(file: &File, len: u64) -> std::io::Result<()> {
    use rustix::fs::FallocateFlags;
    use rustix::io::Errno;

    if len == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(len),
        Err(error) => Err(error.into()),
    }
}
