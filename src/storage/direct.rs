//! Past the page cache (`O_DIRECT`): what is read or written once need not push out what others keep there, and what is
//! written so is on the device when it has to be.
//!
//! Such transfers must begin, end and land on block boundaries. Reads go through an aligned buffer of each thread; what
//! is written is put together in a [`Buffer`] that lies as its file does. Where a file system refuses them, ordinary reads
//! and writes take their place.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// A multiple of every block size in use.
pub const ALIGNMENT: u64 = 4096;

/// Size of a thread's buffer.
pub const BOUNCE_BYTES: u64 = 1 << 20;

thread_local! {
    static BOUNCE: RefCell<Buffer> = const { RefCell::new(Buffer::new()) };
}

/// Memory whose addresses are congruent to the offsets of a file, so that whole blocks of the file are whole blocks of
/// memory.
#[derive(Debug)]
pub struct Buffer(Vec<u8>);

impl Buffer {
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Room for `len` bytes of the file from `offset`, for somebody who overwrites them all. It grows to the longest that
    /// was asked for and a little more for the alignment, and no further, which `Vec::resize` alone does not promise: the
    /// memory bound counts on it.
    pub fn room(&mut self, offset: u64, len: usize) -> &mut [u8] {
        let alignment = small(ALIGNMENT);
        let capacity = len + 2 * alignment;
        if self.0.len() < capacity {
            // What was there is not wanted, so it is not moved either.
            self.0 = Vec::new();
            self.0.reserve_exact(capacity);
            self.0.resize(capacity, 0);
        }
        let start = self.start(offset);
        &mut self.0[start..start + len]
    }

    /// What lies there for a file from offset `from`, to be written from offset `to` of another. There was room for it.
    pub fn moved(&mut self, from: u64, to: u64, len: usize) -> &mut [u8] {
        let (old, new) = (self.start(from), self.start(to));
        if old != new {
            self.0.copy_within(old..old + len, new);
        }
        &mut self.0[new..new + len]
    }

    fn start(&self, offset: u64) -> usize {
        self.0.as_ptr().align_offset(small(ALIGNMENT)) + small(offset % ALIGNMENT)
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self::new()
    }
}

/// The whole blocks of a stretch of a file, relative to its start: empty where there is none.
#[must_use]
pub fn whole_blocks(offset: u64, len: usize) -> Range<usize> {
    let start = small(offset.next_multiple_of(ALIGNMENT) - offset).min(len);
    let ragged = small((offset + len as u64) % ALIGNMENT);
    start..len.saturating_sub(ragged).max(start)
}

/// Less than a buffer's size.
fn small(number: u64) -> usize {
    usize::try_from(number).expect("a small number")
}

/// The file opened for direct transfers; `None` where its file system has none.
pub fn open(path: &Path, options: &mut OpenOptions) -> Option<File> {
    let flag = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).ok()?;
    options.custom_flags(flag).open(path).ok()
}

/// Fill `target` from `offset`.
///
/// # Errors
/// As reading; `UnexpectedEof` where the file ends first.
pub fn read_exact_at(file: &File, target: &mut [u8], offset: u64) -> io::Result<()> {
    BOUNCE.with_borrow_mut(|bounce| {
        let bounce = bounce.room(0, small(BOUNCE_BYTES));
        let mut done = 0;
        while done < target.len() {
            let at = offset + done as u64;
            let before = small(at % ALIGNMENT);
            let wanted = (before + target.len() - done).next_multiple_of(small(ALIGNMENT));
            let len = wanted.min(bounce.len());
            let read = file.read_at(&mut bounce[..len], at - before as u64)?;
            let usable = read.saturating_sub(before).min(target.len() - done);
            if usable == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            target[done..done + usable].copy_from_slice(&bounce[before..before + usable]);
            done += usable;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_stretch_of_a_file_is_read() {
        // The working folder is on a disk, which /tmp need not be.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("f");
        let content: Vec<u8> = (0..3_000_001_u32).flat_map(|n| u8::try_from(n % 251)).collect();
        std::fs::write(&path, &content).unwrap();
        // A file system without direct reads has nothing to test.
        let Some(file) = open(&path, OpenOptions::new().read(true)) else { return };
        for (offset, len) in [(0, 1), (0, 3_000_001), (4095, 2), (4096, 4096), (1_234_567, 1_048_577), (3_000_000, 1)] {
            let mut target = vec![0; len];
            read_exact_at(&file, &mut target, offset).unwrap();
            let start = usize::try_from(offset).unwrap();
            assert_eq!(target, content[start..start + len], "{offset} {len}");
        }
        let error = read_exact_at(&file, &mut [0; 2], 3_000_000).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_buffer_lies_as_its_file() {
        let mut buffer = Buffer::new();
        for (offset, len) in [(0, 10), (4096 * 7 + 5, 100_000), (123, 0), (4095, 8192)] {
            let room = buffer.room(offset, len);
            assert_eq!(room.len(), len);
            assert_eq!(room.as_ptr().addr() as u64 % ALIGNMENT, offset % ALIGNMENT);
        }
        assert!(buffer.0.capacity() <= 100_000 + 2 * small(ALIGNMENT));
    }

    #[test]
    fn whole_blocks_are_what_is_left_between_ragged_ends() {
        for (offset, len, blocks) in [
            (0, 4096, 0..4096),
            (0, 4095, 0..0),
            (1, 4095, 4095..4095),
            (1, 8191, 4095..8191),
            (4000, 5000, 96..4192),
            (10, 20, 20..20),
            (8192, 0, 0..0),
        ] {
            assert_eq!(whole_blocks(offset, len), blocks, "{offset} {len}");
        }
    }
}
