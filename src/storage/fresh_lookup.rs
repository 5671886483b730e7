//! File lookups that a network file system must not answer from its cache.
//!
//! A node caches names and lengths of files for up to a minute: which names exist in a folder, and which do not. The
//! list of a folder is as new as the moment at which the folder was opened. NFS drops the cached names of a folder when
//! this node opens or changes the folder. FUSE caches each name for a time that its server chooses, and looks the name
//! up again only if a rename may replace the file with this name.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;

use rustix::fs::{AtFlags, Mode, OFlags};

use super::AnchoredPath;

/// Makes the file system look up these names of a folder again. `probe` is a name that no other process uses.
///
/// Creates and deletes the file `probe`, which makes NFS ask its server. Between the two steps, tries to rename the
/// file `probe` to each name with a slash at its end. The rename always fails with ENOTDIR, because only folders can
/// have such a name. But before it fails, FUSE looks up the name.
pub fn refresh_names(folder: &AnchoredPath, names: &[&OsStr], probe: &OsStr) -> io::Result<()> {
    let folder = folder.open_folder()?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    drop(rustix::fs::openat(&folder, probe, flags, Mode::RUSR)?);
    for name in names {
        let mut target = name.to_os_string();
        target.push("/");
        let _ = rustix::fs::renameat(&folder, probe, &folder, &target);
    }
    Ok(rustix::fs::unlinkat(&folder, probe, AtFlags::empty())?)
}

/// Opens a file that other processes write, so that its current content is read.
pub fn open(path: &AnchoredPath) -> io::Result<File> {
    let file = path.open()?;
    drop_cache(&file);
    Ok(file)
}

/// Returns the current metadata of a file that other processes write. A link is not followed.
pub fn metadata(path: &AnchoredPath) -> io::Result<Metadata> {
    let file = match path.open_handle() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // After the folder is opened, NFS looks the name up again.
            let _ = path.folder().open_folder();
            path.open_handle()?
        }
        file => file?,
    };
    refresh_length(&file);
    file.metadata()
}

/// Makes the kernel refresh the length of a file and drop the cached bytes of the file. If the file is on a block device,
/// its cached bytes are kept.
fn drop_cache(file: &File) {
    // Only this node changes the files on its block devices, so their cached bytes are current.
    #[cfg(target_os = "linux")]
    if !refresh_length(file) {
        let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    }
}

/// Makes the kernel refresh the length of a file. Returns true if the file is on a block device.
#[cfg(target_os = "linux")]
fn refresh_length(file: &File) -> bool {
    use rustix::fs::{StatxFlags, statx};

    statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS)
        .is_ok_and(|known| known.stx_dev_major != 0)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn refreshing_names_changes_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "content").unwrap();
        fs::create_dir(at("empty")).unwrap();
        fs::create_dir_all(at("folder/inner")).unwrap();
        std::os::unix::fs::symlink("empty", at("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
        let anchor = AnchoredPath::new(folder.path());
        let list = || anchor.names().unwrap().into_iter().collect::<std::collections::BTreeSet<_>>();
        let before = list();
        let names = ["file", "empty", "folder", "link", "dangling", "nothing"].map(OsStr::new);
        refresh_names(&anchor, &names, OsStr::new("probe")).unwrap();
        assert_eq!(list(), before);
        assert_eq!(fs::read(at("file")).unwrap(), b"content");
        assert!(at("empty").is_dir() && at("folder/inner").is_dir() && at("link").is_symlink());
    }

    #[test]
    fn grown_file_is_read_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = AnchoredPath::new(folder.path()).join("file");
        fs::write(path.path(), "ab").unwrap();
        assert_eq!(metadata(&path).unwrap().len(), 2);
        fs::write(path.path(), "abcd").unwrap();
        assert_eq!(metadata(&path).unwrap().len(), 4);
        assert_eq!(io::read_to_string(open(&path).unwrap()).unwrap(), "abcd");
    }
}
