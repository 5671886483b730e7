//! Reads and writes that bypass the page cache (`O_DIRECT`). Data that is used only once then does not evict cached
//! data of other programs, and written data is on the device when the call returns. All sizes and offsets are in bytes.
//!
//! A direct read or write must begin and end at block boundaries, in the file and in memory. Reads go through an
//! aligned buffer, which each thread has. Writes come from a [`Buffer`], whose addresses have the same alignment as the
//! file offsets. If a file system does not support direct transfers, callers use ordinary reads and writes.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// The alignment, in bytes, that direct transfers use. This number is a multiple of every block size in use.
pub const ALIGNMENT: u64 = 4096;

/// The length in bytes of the aligned buffer that each thread has for direct reads.
pub const BOUNCE_BYTES: u64 = 1 << 20;

thread_local! {
    static BOUNCE: RefCell<Buffer> = const { RefCell::new(Buffer::new()) };
}

/// A buffer whose memory addresses are equal to file offsets modulo [`ALIGNMENT`]. Therefore complete blocks of the
/// file are complete blocks of the memory.
#[derive(Debug)]
pub struct Buffer(Vec<u8>);

impl Buffer {
    /// Returns an empty buffer.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Returns memory for `len` bytes of a file at `offset`. The caller overwrites all of these bytes. The buffer grows
    /// only to the largest `len` that was requested, plus alignment, because the memory limit relies on this.
    /// `Vec::resize` alone may allocate more.
    pub fn prepare(&mut self, offset: u64, len: usize) -> &mut [u8] {
        let alignment = to_usize(ALIGNMENT);
        let capacity = len + 2 * alignment;
        if self.0.len() < capacity {
            // The buffer is freed first, so that the new allocation does not copy the old content.
            self.0 = Vec::new();
            self.0.reserve_exact(capacity);
            self.0.resize(capacity, 0);
        }
        let start = self.start(offset);
        &mut self.0[start..start + len]
    }

    /// Moves `len` bytes inside the buffer, so that they can be written at another file offset: from the place that
    /// [`prepare`](Self::prepare) returns for file offset `from`, to its place for file offset `to`. The buffer must have
    /// been prepared for at least `len` bytes.
    pub fn move_to(&mut self, from: u64, to: u64, len: usize) -> &mut [u8] {
        let (old, new) = (self.start(from), self.start(to));
        if old != new {
            self.0.copy_within(old..old + len, new);
        }
        &mut self.0[new..new + len]
    }

    fn start(&self, offset: u64) -> usize {
        self.0.as_ptr().align_offset(to_usize(ALIGNMENT)) + to_usize(offset % ALIGNMENT)
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the complete blocks inside a range of a file, relative to the start of the range. The result is empty if the
/// range contains no complete block.
pub fn whole_blocks(offset: u64, len: usize) -> Range<usize> {
    let start = to_usize(offset.next_multiple_of(ALIGNMENT) - offset).min(len);
    let ragged = to_usize((offset + len as u64) % ALIGNMENT);
    start..len.saturating_sub(ragged).max(start)
}

/// Converts a number that is known to fit `usize`.
fn to_usize(number: u64) -> usize {
    usize::try_from(number).expect("a small number")
}

/// Opens a file for direct transfers. Returns `None` if the file cannot be opened in this way, usually because the file
/// system does not support direct transfers.
pub fn open(path: &Path, options: &mut OpenOptions) -> Option<File> {
    let flag = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).ok()?;
    options.custom_flags(flag).open(path).ok()
}

/// Fills `target` with bytes of the file, starting at `offset`.
///
/// # Errors
/// The errors of reading; `UnexpectedEof` if the file ends before `target` is full.
pub fn read_exact_at(file: &File, target: &mut [u8], offset: u64) -> io::Result<()> {
    BOUNCE.with_borrow_mut(|bounce| {
        let bounce = bounce.prepare(0, to_usize(BOUNCE_BYTES));
        let mut done = 0;
        while done < target.len() {
            let at = offset + done as u64;
            let before = to_usize(at % ALIGNMENT);
            let wanted = (before + target.len() - done).next_multiple_of(to_usize(ALIGNMENT));
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
    fn unaligned_ranges_are_read() {
        // The working folder is on a disk, but /tmp may be in memory.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("f");
        let content: Vec<u8> = (0..3_000_001_u32).flat_map(|n| u8::try_from(n % 251)).collect();
        std::fs::write(&path, &content).unwrap();
        // A file system without direct reads cannot be tested.
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
    fn buffer_is_aligned_as_its_file_offset() {
        let mut buffer = Buffer::new();
        for (offset, len) in [(0, 10), (4096 * 7 + 5, 100_000), (123, 0), (4095, 8192)] {
            let bytes = buffer.prepare(offset, len);
            assert_eq!(bytes.len(), len);
            assert_eq!(bytes.as_ptr().addr() as u64 % ALIGNMENT, offset % ALIGNMENT);
        }
        assert!(buffer.0.capacity() <= 100_000 + 2 * to_usize(ALIGNMENT));
    }

    #[test]
    fn whole_blocks_exclude_partial_ends() {
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
