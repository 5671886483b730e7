//! What the file system under a checkpoint is good at.
//!
//! Mapping a file on a network file system costs a round trip a page and has been seen 10 to 50 times slower than
//! reading it, so the way to read is chosen by file system (statfs(2)) unless the user says otherwise.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::StatFs;

use super::AnchoredPath;
use super::direct::ALIGNMENT;
use super::mapping;
use crate::error::{Error, Result};

/// How source bytes get into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoMode {
    /// Map files and copy from the mapping: best where pages are local.
    Mmap,
    /// Positional reads into buffers: best over a network.
    Read,
    /// Positional reads past the page cache: for sources that nobody reads again.
    Direct,
}

/// File systems, by the magic numbers of statfs(2), where mapping is slow or unsafe. FUSE stands for sshfs, gcsfuse,
/// s3fs and the like.
const REMOTE: &[u64] = &[
    0x6969,      // NFS
    0x0BD0_0BD0, // Lustre
    0x1983_0326, // BeeGFS
    0x6573_5546, // FUSE
    0x4750_4653, // GPFS / Spectrum Scale
    0x00C3_6400, // CephFS
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x0102_1997, // 9p
    0x7461_636F, // OCFS2
    0x5346_414F, // OpenAFS
    0x6B41_4653, // kAFS
    0x0116_1970, // GFS2
    0x2030_528D, // PanFS
];

/// The way to read that suits the file system `path` is on.
///
/// # Errors
/// `Io` where the path cannot be looked at.
pub fn preferred_io(path: &Path) -> Result<IoMode> {
    let is_remote = REMOTE.contains(&magic_of(&look_at(path)?));
    Ok(if is_remote || !mapping::catches_lost_pages() { IoMode::Read } else { IoMode::Mmap })
}

/// Returns whether the file system of `path` is a network file system, whose names this node may cache.
#[must_use]
pub fn caches_names(path: &Path) -> bool {
    look_at(path).is_ok_and(|info| REMOTE.contains(&magic_of(&info)))
}

fn look_at(path: &Path) -> Result<StatFs> {
    rustix::fs::statfs(path).map_err(|error| Error::io("look at the file system of", path)(error.into()))
}

fn magic_of(info: &StatFs) -> u64 {
    // The type's width and sign differ by architecture; the magic numbers all fit 32 bits.
    #[expect(clippy::cast_sign_loss)]
    let magic = (info.f_type as u64) & 0xFFFF_FFFF;
    magic
}

/// File systems that write whole blocks in place, past the page cache, from several threads at a time. Those that copy on
/// write or sum their blocks do it badly, and those on a network each in their own way.
const IN_PLACE: &[u64] = &[
    0xEF53,      // ext4
    0x5846_5342, // XFS
];

/// Whether large results that have to be on disk are best written past the page cache of the file system `path` is on.
/// Not where its blocks are larger than those that strips end at: the ends of two strips would meet in one block, and what
/// the page cache writes of it for one of them may be older than what went past it for the other.
///
/// # Errors
/// `Io` where the path cannot be looked at.
pub fn suits_direct_writes(path: &Path) -> Result<bool> {
    Ok(is_written_in_place(&look_at(path)?))
}

/// As [`suits_direct_writes`], for a folder that is reached without following links.
///
/// # Errors
/// `Io` where it cannot be looked at.
pub fn suits_direct_writes_in(folder: &AnchoredPath) -> Result<bool> {
    let info = folder.open_folder().and_then(|folder| Ok(rustix::fs::fstatfs(folder)?));
    info.map(|info| is_written_in_place(&info)).map_err(Error::io("look at the file system of", folder))
}

fn is_written_in_place(info: &StatFs) -> bool {
    let block = u64::try_from(info.f_bsize).unwrap_or(u64::MAX);
    IN_PLACE.contains(&magic_of(info)) && block <= ALIGNMENT
}

/// The folder in which making `path` would begin: the nearest one above it that is there.
#[must_use]
pub fn nearest_folder(path: &Path) -> &Path {
    let above = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
    above.into_iter().find(|above| above.symlink_metadata().is_ok()).unwrap_or(Path::new("."))
}

/// Bytes that an unprivileged writer can still put on the file system of `path`; any number where the file system counts
/// no blocks, as ramfs.
///
/// # Errors
/// `Io` where the path cannot be looked at.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let info =
        rustix::fs::statvfs(path).map_err(|error| Error::io("look at the file system of", path)(error.into()))?;
    Ok(if info.f_blocks == 0 { u64::MAX } else { info.f_bavail.saturating_mul(info.f_frsize) })
}

/// Put a stretch of a file's dirty pages on disk and wait for them. A way to make a later fsync short, not a
/// replacement for it.
///
/// # Errors
/// What did not get there, which no later call on this descriptor tells again (sync_file_range(2)).
pub fn write_back(file: &File, offset: u64, len: u64) -> io::Result<()> {
    sync_range(file, offset, len, WAIT)
}

/// Send a stretch of a file's dirty pages on their way to the disk, as a way to make a later [`write_back`] short. What
/// does not get there is told to who waits for it.
pub fn start_write_back(file: &File, offset: u64, len: u64) {
    let _ = sync_range(file, offset, len, 0);
}

#[cfg(target_os = "linux")]
const WAIT: u32 = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
#[cfg(not(target_os = "linux"))]
const WAIT: u32 = 0;

/// Close a file that was written. Network file systems and quotas say here what could not be written, which dropping a
/// [`File`] ignores. Never tried again: Linux has given up the descriptor even where this fails.
///
/// # Errors
/// Errors of writes that the file system reports late.
pub fn close(file: File) -> io::Result<()> {
    use std::os::fd::IntoRawFd;

    // SAFETY: the descriptor is given up by its owner, so that nobody else uses or closes it.
    #[expect(unsafe_code)]
    let closed = unsafe { rustix::io::try_close(file.into_raw_fd()) };
    Ok(closed?)
}

#[cfg(target_os = "linux")]
fn sync_range(file: &File, offset: u64, len: u64, wait: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;

    let flags = libc::SYNC_FILE_RANGE_WRITE | wait;
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return Ok(()) };
    // SAFETY: the descriptor is open for the whole call and no memory is passed.
    #[expect(unsafe_code)]
    let done = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, flags) };
    if done == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // Where a file system has no such call, the fsync does it all.
    let is_unknown =
        [libc::ENOSYS, libc::EINVAL, libc::ESPIPE, libc::EOPNOTSUPP].map(Some).contains(&error.raw_os_error());
    if is_unknown { Ok(()) } else { Err(error) }
}

/// Other systems have no such call; the fsync does it all.
#[cfg(not(target_os = "linux"))]
fn sync_range(_file: &File, _offset: u64, _len: u64, _wait: u32) -> io::Result<()> {
    Ok(())
}

/// How many descriptors the source files of one checkpoint may have at once: a quarter of the soft limit. Two checkpoints
/// are compared with each other, and the rest is for output files, threads and the terminal.
#[must_use]
pub fn open_file_budget() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let budget = limit.map_or(4096, |limit| limit / 4).clamp(8, 4096);
    usize::try_from(budget).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_folder_is_mapped_and_has_space() {
        let folder = tempfile::tempdir().unwrap();
        mapping::catch_lost_pages().unwrap();
        assert_eq!(preferred_io(folder.path()).unwrap(), IoMode::Mmap);
        assert!(free_bytes(folder.path()).unwrap() > 0);
        assert!(open_file_budget() >= 8);
    }

    #[test]
    fn a_missing_path_is_named() {
        let error = preferred_io(Path::new("/nonexistent/checkpoint")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/checkpoint"), "{error}");
    }
}
