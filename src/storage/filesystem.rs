//! Properties of the file system of a checkpoint, and the choice of the fastest way to read and write. All sizes and
//! offsets are in bytes.
//!
//! Mapping a file on a network file system costs a round trip for each page; in measurements, reading through a mapping
//! was 10 to 50 times slower than reading the file with read calls. Therefore, unless the user chooses, the type of the
//! file system (statfs(2)) determines how files are read.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::StatFs;

use super::AnchoredPath;
use super::direct::ALIGNMENT;
use super::mapping;
use crate::error::{Error, Result};

/// The method for reading source bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoMode {
    /// Files are mapped, and bytes are copied from the mapping. This method is best on local file systems.
    Mmap,
    /// Files are read by positional reads into buffers. This method is best on network file systems.
    Read,
    /// Files are read by positional reads that bypass the page cache. This method is best for sources that are read
    /// only once.
    Direct,
}

/// The magic numbers (statfs(2)) of file systems on which mapping is slow or unsafe. FUSE includes sshfs, gcsfuse, s3fs
/// and similar file systems.
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

/// Returns [`IoMode::Mmap`] if the file system of `path` is local and the SIGBUS handler for unreadable pages is
/// installed. Otherwise returns [`IoMode::Read`].
///
/// # Errors
/// `Io` if the file system cannot be determined.
pub fn preferred_io(path: &Path) -> Result<IoMode> {
    let is_remote = REMOTE.contains(&magic_of(&statfs_of(path)?));
    Ok(if is_remote || !mapping::catches_lost_pages() { IoMode::Read } else { IoMode::Mmap })
}

/// Returns whether the file system of `path` is known to be a network file system. In that case this node may cache file
/// names.
pub fn caches_names(path: &Path) -> bool {
    statfs_of(path).is_ok_and(|info| REMOTE.contains(&magic_of(&info)))
}

fn statfs_of(path: &Path) -> Result<StatFs> {
    rustix::fs::statfs(path).map_err(|error| Error::io("look at the file system of", path)(error.into()))
}

fn magic_of(info: &StatFs) -> u64 {
    // The width and the sign of this type depend on the architecture. All magic numbers fit in 32 bits.
    #[expect(clippy::cast_sign_loss)]
    let magic = (info.f_type as u64) & 0xFFFF_FFFF;
    magic
}

/// The magic numbers of file systems that can write complete blocks in place, bypassing the page cache, from several
/// threads at the same time. File systems that copy on write or compute checksums of blocks are slow at such writes,
/// and each network file system behaves differently, so the list has neither.
const IN_PLACE: &[u64] = &[
    0xEF53,      // ext4
    0x5846_5342, // XFS
];

/// Returns whether large results that must be on disk should be written without the page cache on the file system of
/// `path`. Returns false if the blocks of the file system are larger than [`ALIGNMENT`]. Write blocks end at multiples
/// of [`ALIGNMENT`], so two write blocks would share a file block, and cached bytes of one write block could overwrite
/// newer direct writes of the other write block.
///
/// # Errors
/// `Io` if the file system cannot be determined.
pub fn suits_direct_writes(path: &Path) -> Result<bool> {
    Ok(is_written_in_place(&statfs_of(path)?))
}

/// Returns the result of [`suits_direct_writes`] for a folder that is opened without following links.
///
/// # Errors
/// `Io` if the file system cannot be determined.
pub fn suits_direct_writes_in(folder: &AnchoredPath) -> Result<bool> {
    let info = folder.open_folder().and_then(|folder| Ok(rustix::fs::fstatfs(folder)?));
    info.map(|info| is_written_in_place(&info)).map_err(Error::io("look at the file system of", folder))
}

fn is_written_in_place(info: &StatFs) -> bool {
    let block = u64::try_from(info.f_bsize).unwrap_or(u64::MAX);
    IN_PLACE.contains(&magic_of(info)) && block <= ALIGNMENT
}

/// Returns the nearest path above `path` that exists, or `.` if there is none.
pub fn nearest_folder(path: &Path) -> &Path {
    let above = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
    above.into_iter().find(|above| above.symlink_metadata().is_ok()).unwrap_or(Path::new("."))
}

/// Returns the number of bytes that an unprivileged user can still write to the file system of `path`. Returns
/// `u64::MAX` if the file system does not count blocks, such as ramfs.
///
/// # Errors
/// `Io` if the file system cannot be determined.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let info =
        rustix::fs::statvfs(path).map_err(|error| Error::io("look at the file system of", path)(error.into()))?;
    Ok(if info.f_blocks == 0 { u64::MAX } else { info.f_bavail.saturating_mul(info.f_frsize) })
}

/// Writes the dirty pages of a range of a file to disk, and waits. A later fsync is then short, but still necessary.
///
/// # Errors
/// The errors of failed writes. Later calls on this descriptor do not report these errors again (sync_file_range(2)).
pub fn write_back(file: &File, offset: u64, len: u64) -> io::Result<()> {
    sync_range(file, offset, len, WAIT)
}

/// Starts to write the dirty pages of a range of a file to disk, so that a later [`write_back`] is short. That later
/// call also reports failed writes.
pub fn start_write_back(file: &File, offset: u64, len: u64) {
    let _ = sync_range(file, offset, len, 0);
}

#[cfg(target_os = "linux")]
const WAIT: u32 = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
#[cfg(not(target_os = "linux"))]
const WAIT: u32 = 0;

/// Closes a written file. Some network file systems, and file systems with quotas, report failed writes only when the
/// file is closed; dropping a [`File`] would ignore the error. Closing is never retried, because Linux releases the
/// descriptor even if closing fails.
///
/// # Errors
/// The errors of writes that the file system reports late.
pub fn close(file: File) -> io::Result<()> {
    use std::os::fd::IntoRawFd;

    // SAFETY: `into_raw_fd` gave up ownership of the descriptor, so nothing else uses or closes the descriptor.
    #[expect(unsafe_code)]
    let closed = unsafe { rustix::io::try_close(file.into_raw_fd()) };
    Ok(closed?)
}

#[cfg(target_os = "linux")]
fn sync_range(file: &File, offset: u64, len: u64, wait: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;

    let flags = libc::SYNC_FILE_RANGE_WRITE | wait;
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return Ok(()) };
    // SAFETY: the descriptor is open during the whole call, and no memory is passed.
    #[expect(unsafe_code)]
    let done = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, flags) };
    if done == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // If a file system does not support this call, a later fsync writes all dirty pages.
    let is_unknown =
        [libc::ENOSYS, libc::EINVAL, libc::ESPIPE, libc::EOPNOTSUPP].map(Some).contains(&error.raw_os_error());
    if is_unknown { Ok(()) } else { Err(error) }
}

/// Does nothing, because systems other than Linux have no sync_file_range(2). A later fsync writes all dirty pages.
#[cfg(not(target_os = "linux"))]
fn sync_range(_file: &File, _offset: u64, _len: u64, _wait: u32) -> io::Result<()> {
    Ok(())
}

/// Returns the number of descriptors that the source files of one checkpoint may use at the same time: a quarter of the
/// soft limit, but at least 8 and at most 4096. Two checkpoints may be open for a comparison, and output files, threads
/// and the terminal need descriptors as well.
pub fn open_file_budget() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let budget = limit.map_or(4096, |limit| limit / 4).clamp(8, 4096);
    usize::try_from(budget).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_folder_is_read_by_mapping_and_has_space() {
        let folder = tempfile::tempdir().unwrap();
        mapping::catch_lost_pages().unwrap();
        assert_eq!(preferred_io(folder.path()).unwrap(), IoMode::Mmap);
        assert!(free_bytes(folder.path()).unwrap() > 0);
        assert!(open_file_budget() >= 8);
    }

    #[test]
    fn missing_path_is_an_error_that_names_it() {
        let error = preferred_io(Path::new("/nonexistent/checkpoint")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/checkpoint"), "{error}");
    }
}
