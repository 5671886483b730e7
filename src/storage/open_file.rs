//! An open file, which is read by positional reads or through a mapping. All sizes and offsets are in bytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::local_content::ReadCheck;
use super::mapping::Mapping;
use super::{changed, direct};
use crate::error::{Error, Result, StorageError};

/// One open file. Its mapping is made when the file is first read through the mapping.
#[derive(Debug)]
pub struct OpenFile {
    /// The path, for messages.
    pub(super) path: PathBuf,
    /// The descriptor for ordinary reads.
    pub(super) file: File,
    /// A second descriptor, for reads that bypass the page cache. `None` if direct reads are not requested or not
    /// possible.
    pub(super) direct: Option<File>,
    /// The length of the file in bytes that was recorded when the file was added.
    pub(super) len: u64,
    /// The mapping, or `None` if the file cannot be mapped. The cell is empty before the first read through the
    /// mapping.
    pub(super) map: OnceLock<Option<Mapping>>,
    /// The counter that [`super::Files::bytes_read`] returns.
    pub(super) bytes_read: Arc<AtomicU64>,
    /// The action before each read: the range is recorded, or the read fails if the mirror does not contain the range.
    /// `None` if reads need neither.
    pub(super) read_check: Option<ReadCheck>,
}

impl OpenFile {
    /// Returns the length of the file in bytes that was recorded when the file was added.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `buffer` with bytes of the file, starting at `offset`.
    ///
    /// # Errors
    /// `Malformed` if the file ends before `buffer` is full, `Io` if the read fails or the file has become shorter.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_read(offset, buffer.len() as u64)?;
        self.bytes_read.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        // A file system may open a file for direct reads, and still reject the reads.
        let direct = self.direct.as_ref().map(|file| direct::read_exact_at(file, buffer, offset));
        let read = match direct {
            Some(Err(error)) if error.kind() == io::ErrorKind::InvalidInput => None,
            read => read,
        };
        read.unwrap_or_else(|| self.file.read_exact_at(buffer, offset)).map_err(|error| {
            if error.kind() == io::ErrorKind::UnexpectedEof {
                let end = offset.checked_add(buffer.len() as u64);
                let was_there = end.is_some_and(|end| end <= self.len);
                if was_there { changed(&self.path) } else { self.too_short(offset, buffer.len() as u64) }
            } else {
                StorageError::Io { action: "read", path: self.path.clone(), source: error }.into()
            }
        })
    }

    /// Returns another handle of the open file.
    ///
    /// # Errors
    /// `Io`.
    pub fn duplicate(&self) -> Result<File> {
        self.file.try_clone().map_err(Error::io("open", &self.path))
    }

    /// Calls `read` with the bytes `[offset, offset + len)` of the mapped file. Returns `None` if the file cannot be
    /// mapped, for example because address space is limited. The caller must then use [`Self::read_exact_at`].
    ///
    /// # Errors
    /// `Malformed` if the file is too short; `Io` if the file has become shorter, or if its pages cannot be read.
    pub fn mapped<T>(&self, offset: u64, len: u64, read: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(self.too_short(offset, len));
        }
        if len == 0 {
            return Ok(Some(read(&[])));
        }
        self.check_read(offset, len)?;
        let map = self.map.get_or_init(|| Mapping::new(&self.file, usize::try_from(self.len).ok()?).ok());
        let Some(map) = map else { return Ok(None) };
        let start = usize::try_from(offset).expect("a mapped offset fits the address space");
        let len = usize::try_from(len).expect("a mapped length fits the address space");
        map.read(start..start + len, read).map(Some).ok_or_else(|| self.unreadable_page())
    }

    /// Returns the error for a page of the mapping for which the system raised SIGBUS.
    fn unreadable_page(&self) -> Error {
        match self.file.metadata() {
            Ok(metadata) if metadata.len() < self.len => changed(&self.path),
            Ok(_) => Error::io("read", &self.path)(rustix::io::Errno::IO.into()),
            Err(error) => Error::io("stat", &self.path)(error),
        }
    }

    fn check_read(&self, offset: u64, len: u64) -> Result<()> {
        self.read_check.as_ref().map_or(Ok(()), |check| check.before_read(&self.path, offset, len))
    }

    /// Returns the error for a read beyond the end of the file.
    pub(super) fn too_short(&self, offset: u64, len: u64) -> Error {
        Error::malformed(
            &self.path,
            format!("byte {offset}"),
            format!("{len} more bytes"),
            format!("a file of {} bytes", self.len),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::FormatError;
    use crate::storage::{Files, IoMode};

    #[test]
    fn file_truncated_before_it_is_mapped_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        for io in [IoMode::Mmap, IoMode::Read, IoMode::Direct] {
            std::fs::write(&path, vec![7; 100_000]).unwrap();
            let mut files = Files::new(io);
            let id = files.add(&path).unwrap();
            let file = files.open(id).unwrap();
            File::options().write(true).open(&path).unwrap().set_len(10).unwrap();
            let read = match io {
                IoMode::Mmap => file.mapped(50_000, 50_000, <[u8]>::to_vec).map(Option::unwrap),
                IoMode::Read | IoMode::Direct => files.read(id, 50_000, 50_000),
            };
            assert!(matches!(read, Err(Error::Storage(StorageError::Io { path: at, .. })) if at == path), "{io:?}");
        }
    }

    #[test]
    fn range_beyond_the_end_of_a_file_is_malformed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, vec![7; 100]).unwrap();
        let mut files = Files::new(IoMode::Mmap);
        let id = files.add(&path).unwrap();
        let file = files.open(id).unwrap();
        assert!(matches!(file.mapped(50, 51, <[u8]>::to_vec), Err(Error::Format(FormatError::Malformed { .. }))));
        assert!(matches!(file.read_exact_at(&mut [0; 51], 50), Err(Error::Format(FormatError::Malformed { .. }))));
    }
}
