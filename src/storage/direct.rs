//! Reading past the page cache (`O_DIRECT`): what is read once need not push out what others keep there.
//!
//! Such reads must begin, end and land on block boundaries, so they go through an aligned buffer of each thread. Where
//! a file system refuses them, ordinary reads take their place.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// A multiple of every block size in use.
const ALIGNMENT: u64 = 4096;

/// Size of a thread's buffer.
pub const BOUNCE_BYTES: u64 = 1 << 20;

thread_local! {
    static BOUNCE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The file opened for direct reads; `None` where its file system has none.
pub fn open(path: &Path) -> Option<File> {
    let flag = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).ok()?;
    OpenOptions::new().read(true).custom_flags(flag).open(path).ok()
}

/// Fill `target` from `offset`.
///
/// # Errors
/// As reading; `UnexpectedEof` where the file ends first.
pub fn read_exact_at(file: &File, target: &mut [u8], offset: u64) -> io::Result<()> {
    BOUNCE.with_borrow_mut(|bounce| {
        let capacity = usize::try_from(BOUNCE_BYTES + ALIGNMENT).expect("a small buffer");
        bounce.resize(capacity, 0);
        let aligned = bounce.as_ptr().align_offset(usize::try_from(ALIGNMENT).expect("a small number"));
        let bounce = &mut bounce[aligned..][..usize::try_from(BOUNCE_BYTES).expect("a small buffer")];
        let mut done = 0;
        while done < target.len() {
            let at = offset + done as u64;
            let before = usize::try_from(at % ALIGNMENT).expect("a small number");
            let wanted = (before + target.len() - done).next_multiple_of(usize::try_from(ALIGNMENT).expect("small"));
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
        let Some(file) = open(&path) else { return };
        for (offset, len) in [(0, 1), (0, 3_000_001), (4095, 2), (4096, 4096), (1_234_567, 1_048_577), (3_000_000, 1)] {
            let mut target = vec![0; len];
            read_exact_at(&file, &mut target, offset).unwrap();
            let start = usize::try_from(offset).unwrap();
            assert_eq!(target, content[start..start + len], "{offset} {len}");
        }
        let error = read_exact_at(&file, &mut [0; 2], 3_000_000).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
