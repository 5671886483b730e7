//! An open file: positional reads, or a mapping.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use memmap2::{Advice, Mmap};

use super::held::Watch;
use super::{direct, sigbus};
use crate::error::{Error, Result};

/// One open file; mapped on demand.
#[derive(Debug)]
pub struct OpenFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// The same file, to be read past the page cache, where that is asked for and possible.
    pub(super) direct: Option<File>,
    pub(super) len: u64,
    pub(super) map: OnceLock<Mmap>,
    /// See [`super::Files::bytes_read`].
    pub(super) bytes_read: Arc<AtomicU64>,
    pub(super) watch: Option<Watch>,
}

impl OpenFile {
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fill `buffer` from `offset`.
    ///
    /// # Errors
    /// `Malformed` where the file ends first, `Io` where the read fails.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.look(offset, buffer.len() as u64)?;
        self.bytes_read.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        // A file system may open a file for direct reads and still refuse them.
        let direct = self.direct.as_ref().map(|file| direct::read_exact_at(file, buffer, offset));
        let read = match direct {
            Some(Err(error)) if error.kind() == io::ErrorKind::InvalidInput => None,
            read => read,
        };
        read.unwrap_or_else(|| self.file.read_exact_at(buffer, offset)).map_err(|error| {
            if error.kind() == io::ErrorKind::UnexpectedEof {
                self.too_short(offset, buffer.len() as u64)
            } else {
                Error::Io { action: "read", path: self.path.clone(), source: error }
            }
        })
    }

    /// The bytes `[offset, offset + len)` of the mapped file. Reading them faults pages in; a file that shrinks
    /// meanwhile ends the process with a message (see `sigbus`).
    ///
    /// # Errors
    /// `Malformed` where the file is shorter, `Io` where it cannot be mapped.
    pub fn mapped(&self, offset: u64, len: u64) -> Result<&[u8]> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(self.too_short(offset, len));
        }
        if len == 0 {
            return Ok(&[]);
        }
        self.look(offset, len)?;
        let map = match self.map.get() {
            Some(map) => map,
            None => {
                let map = self.map_file()?;
                self.map.get_or_init(|| map)
            }
        };
        let start = usize::try_from(offset).expect("a mapped offset fits the address space");
        let len = usize::try_from(len).expect("a mapped length fits the address space");
        Ok(&map[start..start + len])
    }

    fn look(&self, offset: u64, len: u64) -> Result<()> {
        self.watch.as_ref().map_or(Ok(()), |watch| watch.look(&self.path, offset, len))
    }

    fn map_file(&self) -> Result<Mmap> {
        sigbus::install();
        // SAFETY: the mapping is read-only and private to this process. Another process may still change the file:
        // changed bytes are caught by the identity check before publishing, a shrunk file by the SIGBUS handler.
        #[expect(unsafe_code)]
        let map = unsafe { Mmap::map(&self.file) }.map_err(Error::io("map", &self.path))?;
        // A hint only: strips are read front to back.
        let _ = map.advise(Advice::Sequential);
        Ok(map)
    }

    pub(super) fn too_short(&self, offset: u64, len: u64) -> Error {
        Error::malformed(
            &self.path,
            format!("byte {offset}"),
            format!("{len} more bytes"),
            format!("a file of {} bytes", self.len),
        )
    }
}
