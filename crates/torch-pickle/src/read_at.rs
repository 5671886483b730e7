//! Sources of the bytes of an archive: files, and bytes in memory.

use std::io;

/// A source of bytes that can be read at any offset: a file, or bytes in memory.
///
/// Tensor data is read only to check checksums.
pub trait ReadAt {
    /// Returns the length of the source in bytes.
    fn len_bytes(&self) -> u64;

    /// Reads the bytes from `offset` on into `buffer`, and fills it completely.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Calls `read` with the bytes `[offset, offset + len)` if the source has these bytes in memory. Otherwise returns
    /// `None`, and the caller uses [`read_exact_at`](Self::read_exact_at). `read` must look at each byte only once,
    /// because another process may change a mapped file.
    fn mapped<T>(&self, _offset: u64, _len: u64, _read: impl FnOnce(&[u8]) -> T) -> io::Result<Option<T>> {
        Ok(None)
    }
}

/// Returns `len` bytes from `offset` on. It is an error if `bytes` ends before `offset + len`.
fn part(bytes: &[u8], offset: u64, len: u64) -> io::Result<&[u8]> {
    let range = usize::try_from(offset).ok().zip(offset.checked_add(len).and_then(|end| usize::try_from(end).ok()));
    range.and_then(|(start, end)| bytes.get(start..end)).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

impl ReadAt for [u8] {
    fn len_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        buffer.copy_from_slice(part(self, offset, buffer.len() as u64)?);
        Ok(())
    }

    fn mapped<T>(&self, offset: u64, len: u64, read: impl FnOnce(&[u8]) -> T) -> io::Result<Option<T>> {
        part(self, offset, len).map(read).map(Some)
    }
}

/// An open file. Its length is read once, when the source is created.
#[cfg(unix)]
#[derive(Debug)]
pub struct FileSource {
    file: std::fs::File,
    len: u64,
}

#[cfg(unix)]
impl FileSource {
    /// Creates a source from an open file. The file is read with `pread`.
    pub fn new(file: std::fs::File) -> io::Result<Self> {
        Ok(Self { len: file.metadata()?.len(), file })
    }
}

#[cfg(unix)]
impl ReadAt for FileSource {
    fn len_bytes(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, buffer, offset)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::zip::Archive;

    #[test]
    fn file_and_bytes_give_the_same_archive() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/foreign.pt");
        let bytes = std::fs::read(path).unwrap();
        let file = FileSource::new(std::fs::File::open(path).unwrap()).unwrap();
        let (of_file, of_bytes) = (Archive::read(&file).unwrap(), Archive::read(bytes.as_slice()).unwrap());
        assert_eq!(of_file.records(), of_bytes.records());
        assert_eq!(of_file.locate(&file, "data/0").unwrap(), of_bytes.locate(bytes.as_slice(), "data/0").unwrap());
    }

    #[test]
    fn range_beyond_the_end_of_bytes_is_an_error() {
        let bytes = [7; 10].as_slice();
        assert!(bytes.read_exact_at(&mut [0; 5], 5).is_ok());
        for offset in [6, 11, u64::MAX] {
            let error = bytes.read_exact_at(&mut [0; 5], offset).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{offset}");
        }
    }
}
