//! Paths below an open folder, the anchor. No symbolic link below the anchor is followed.
//!
//! Other users may be able to write to the folder of a destination. Such a user can create a link there, or in a work
//! folder that the umask leaves writable for a group. This link must not determine which files this process overwrites
//! or deletes. Therefore every name below the anchor is opened separately, with `O_NOFOLLOW`. Folders and files must
//! also belong to this user. The user id is read from a file that this process has just created in the anchor, because
//! the owner of new files is not the user id of the process on NFS with root_squash, on CIFS, and on mounts that map
//! ids.
//!
//! The anchor itself may be reached through links, which are resolved once. Each operation looks up the names below the
//! anchor again. Therefore a folder that was renamed, or published, is not found under its old name, and nothing is
//! written to it.
//!
//! Invariant: no operation follows a link below the anchor, waits for the other end of a pipe, or writes to a file that
//! has more than one hard link.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind::NotFound, ErrorKind::StaleNetworkFileHandle};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Display, Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::Untrusted;

/// The path of a file or folder below an anchor.
#[derive(Clone, Debug)]
pub struct AnchoredPath {
    anchor: Arc<Anchor>,
    /// The path relative to the anchor; empty for the anchor itself.
    below: PathBuf,
    /// The complete path, for messages.
    path: PathBuf,
}

#[derive(Debug)]
struct Anchor {
    path: PathBuf,
    /// The open folder. It is opened on first use.
    folder: OnceLock<OwnedFd>,
    /// The user to whom files and folders below the anchor must belong, determined on first use. `None` accepts every
    /// owner.
    owner: Arc<OnceLock<Option<u32>>>,
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

impl AnchoredPath {
    /// Returns the folder at `path` as an anchor. The folder may be reached through links, and need not exist yet. An
    /// empty path means the current folder.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self::at(Anchor { path: path.to_path_buf(), folder: OnceLock::new(), owner: Arc::default() })
    }

    /// Returns an anchor like [`new`](Self::new), for reading only. This anchor accepts every owner of files: only a
    /// new file shows which user owns new files, and reading creates no file.
    #[must_use]
    pub fn read_only(path: &Path) -> Self {
        Self::at(Anchor { path: path.to_path_buf(), folder: OnceLock::new(), owner: Arc::new(None.into()) })
    }

    fn at(anchor: Anchor) -> Self {
        Self { path: anchor.display_path().to_path_buf(), anchor: Arc::new(anchor), below: PathBuf::new() }
    }

    /// Returns a path whose anchor is this folder. The anchor's descriptor keeps referring to the folder that is at
    /// this path now.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if the folder does not exist, and an error that contains an [`Untrusted`]
    /// if a name in the path is a link or belongs to another user. Every operation has these errors.
    pub fn as_anchor(&self) -> io::Result<Self> {
        let folder = self.open_folder()?;
        Ok(Self::at(Anchor { path: self.path.clone(), folder: folder.into(), owner: Arc::clone(&self.anchor.owner) }))
    }

    /// Returns this path with an anchor that is opened again on next use, because another process may have replaced the
    /// folder.
    #[must_use]
    pub fn reopened(&self) -> Self {
        let Anchor { path, owner, .. } = &*self.anchor;
        let anchor = Anchor { path: path.clone(), folder: OnceLock::new(), owner: Arc::clone(owner) };
        Self { anchor: Arc::new(anchor), ..self.clone() }
    }

    /// Returns the path `names` below this path. `names` must be relative and contain no `..`.
    #[must_use]
    pub fn join(&self, names: impl AsRef<Path>) -> Self {
        self.with_relative_path(self.below.join(names))
    }

    fn with_relative_path(&self, below: PathBuf) -> Self {
        let anchor = Arc::clone(&self.anchor);
        // Joining an empty path would add a slash.
        let path = if below.as_os_str().is_empty() { anchor.display_path().into() } else { anchor.path.join(&below) };
        Self { anchor, below, path }
    }

    /// Returns the path of `name` in the parent folder of this path.
    #[must_use]
    pub fn with_file_name(&self, name: impl AsRef<OsStr>) -> Self {
        self.with_relative_path(self.below.with_file_name(name))
    }

    /// Returns the parent folder. For the anchor, returns the anchor.
    #[must_use]
    pub fn folder(&self) -> Self {
        self.with_relative_path(self.below.parent().unwrap_or(Path::new("")).to_path_buf())
    }

    /// Returns the complete path, for messages and for reading.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path for messages.
    pub fn display(&self) -> Display<'_> {
        self.path.display()
    }

    /// Returns the last name of the path; empty for the anchor.
    pub fn file_name(&self) -> &OsStr {
        self.below.file_name().unwrap_or_default()
    }

    /// Returns the metadata of the file. If the file is a link, returns the metadata of the link itself. Any user may
    /// own the file.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.open_handle()?.metadata()
    }

    /// Opens a handle for reading metadata. A link is not followed.
    pub(super) fn open_handle(&self) -> io::Result<File> {
        self.in_folder(|folder, name| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Ok(rustix::fs::openat(folder, name, flags, Mode::empty())?.into())
        })
    }

    /// Returns the metadata of a file, folder or link that this user owns. Returns `None` if the path does not exist. It
    /// is an error if the owner is another user; only the anchor may have any owner.
    pub fn own_entry(&self) -> io::Result<Option<Metadata>> {
        let metadata = match self.metadata() {
            Err(error) if matches!(error.kind(), NotFound | StaleNetworkFileHandle) => return Ok(None),
            found => found?,
        };
        if self.below.as_os_str().is_empty() {
            return Ok(Some(metadata));
        }
        match self.check_owner(&self.path, &metadata) {
            Err(_) if metadata.is_symlink() => Err(self.link_error()),
            checked => checked.map(|()| Some(metadata)),
        }
    }

    /// Returns whether this path is a file, folder or link that this user owns.
    pub fn is_own(&self) -> bool {
        matches!(self.own_entry(), Ok(Some(_)))
    }

    /// Returns the metadata of a file or folder that this user owns. Returns `None` if the path does not exist. A link
    /// is an error.
    pub fn own_metadata(&self) -> io::Result<Option<Metadata>> {
        match self.own_entry()? {
            Some(metadata) if metadata.is_symlink() => Err(self.link_error()),
            found => Ok(found),
        }
    }

    fn link_error(&self) -> io::Error {
        let refused: io::Result<()> = self.in_folder(|folder, name| Err(self.refused(Errno::LOOP, folder, name)));
        refused.expect_err("refused() returns an error")
    }

    /// Returns whether a file, folder or link is found at this path. Any error counts as absence.
    pub fn exists(&self) -> bool {
        self.metadata().is_ok()
    }

    /// Returns the names in this folder, unsorted.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        Ok(names(self.open_folder()?)?)
    }

    /// Creates this folder. The parent folder must exist.
    pub fn create_folder(&self) -> io::Result<()> {
        self.in_folder(|folder, name| Ok(rustix::fs::mkdirat(folder, name, Mode::from_raw_mode(0o777))?))
    }

    /// Creates the missing folders from this folder down to the path `below`, including the last name of `below`.
    pub fn create_folders(&self, below: &Path) -> io::Result<()> {
        let mut folder = self.clone();
        for name in below {
            folder = folder.join(name);
            match folder.create_folder() {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Creates this folder and its parent folders if they do not exist. Follows links only above the anchor.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if another process deletes one of the folders at the same time; an error
    /// that contains an [`Untrusted`] if a name below the anchor is a link or belongs to another user.
    pub fn create_with_parents(&self) -> io::Result<()> {
        std::fs::create_dir_all(self.anchor.display_path())?;
        self.with_relative_path(PathBuf::new()).create_folders(&self.below)?;
        self.open_folder().map(drop)
    }

    /// Opens a regular file of this user for reading.
    pub fn open(&self) -> io::Result<File> {
        self.open_file(OFlags::RDONLY, Mode::empty())
    }

    /// Opens a regular file for writing; `more` are additional flags. Without further flags, the file must exist and is
    /// not truncated. It is an error if the file has several hard links.
    pub fn open_to_write(&self, more: OFlags) -> io::Result<File> {
        let file = self.open_file(OFlags::WRONLY | more, Mode::from_raw_mode(0o666))?;
        match file.metadata()?.nlink() {
            0 | 1 => Ok(file),
            names => Err(Untrusted::Names { path: self.path.clone(), names }.into()),
        }
    }

    /// Creates a file. Fails if the path exists.
    pub fn create_new(&self, mode: u32) -> io::Result<File> {
        self.open_file(OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, Mode::from_raw_mode(mode))
    }

    /// Creates a file. If a file or link of this user exists at this path, deletes it first.
    pub fn replace_with_new(&self, mode: u32) -> io::Result<File> {
        if self.own_entry()?.is_some() {
            self.remove_file()?;
        }
        self.create_new(mode)
    }

    fn open_file(&self, flags: OFlags, mode: Mode) -> io::Result<File> {
        let not_regular = || io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
        self.in_folder(|folder, name| {
            // Without `O_NONBLOCK`, opening a pipe waits for its other end. For regular files the flag has no effect.
            let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = match rustix::fs::openat(folder, name, flags, mode) {
                Err(Errno::NXIO) => return Err(not_regular()),
                Err(error) => return Err(self.refused(error, folder, name)),
                Ok(file) => File::from(file),
            };
            let metadata = file.metadata()?;
            self.check_owner(&self.path, &metadata)?;
            if metadata.is_file() { Ok(file) } else { Err(not_regular()) }
        })
    }

    /// Creates a symbolic link to `target` at this path.
    pub fn symlink(&self, target: &str) -> io::Result<()> {
        self.in_folder(|folder, name| Ok(rustix::fs::symlinkat(target, folder, name)?))
    }

    /// Creates the path `to` as a hard link to this file.
    pub fn hard_link(&self, to: &Self) -> io::Result<()> {
        self.with_both(to, |folder, name, other, new| rustix::fs::linkat(folder, name, other, new, AtFlags::empty()))
    }

    /// Renames this path to the path `to`. Replaces a file at `to`.
    pub fn rename(&self, to: &Self) -> io::Result<()> {
        self.with_both(to, |folder, name, other, new| rustix::fs::renameat(folder, name, other, new))
    }

    /// Renames this path to the path `to`. Fails if `to` exists, unless both paths are folders and `to` is empty.
    pub fn rename_new(&self, to: &Self) -> io::Result<()> {
        let flags = RenameFlags::NOREPLACE;
        let renamed =
            self.with_both(to, |folder, name, other, new| rustix::fs::renameat_with(folder, name, other, new, flags));
        let is_folder = |path: &Self| path.metadata().is_ok_and(|metadata| metadata.is_dir());
        match renamed.as_ref().err().and_then(Errno::from_io_error) {
            // The target is an empty folder. An ordinary rename replaces it, and fails if the folder is no longer
            // empty.
            Some(Errno::EXIST) if is_folder(to) && is_folder(self) => self.rename(to),
            // Some file systems do not support the flag.
            Some(Errno::INVAL | Errno::NOSYS) if !to.exists() => self.rename(to),
            Some(Errno::INVAL | Errno::NOSYS) => Err(io::ErrorKind::AlreadyExists.into()),
            _ => renamed,
        }
    }

    /// Deletes a file or link.
    pub fn remove_file(&self) -> io::Result<()> {
        self.in_folder(|folder, name| Ok(rustix::fs::unlinkat(folder, name, AtFlags::empty())?))
    }

    /// Deletes an empty folder.
    pub fn remove_folder(&self) -> io::Result<()> {
        self.in_folder(|folder, name| Ok(rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)?))
    }

    /// Deletes a file, a link, or a folder with its content. Links inside the folder are deleted, not followed. At the
    /// first file that cannot be deleted, the function stops with an error, and the remaining files stay.
    pub fn remove_all(&self) -> io::Result<()> {
        self.in_folder(|folder, name| Ok(remove_all(folder, name)?))
    }

    /// Syncs this folder to disk (fsync), so that the names of its files are durable.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(self.open_folder()?)?)
    }

    /// Syncs this folder and the folders below it to disk (fsync), so that the names of their files are durable.
    pub fn sync_all(&self) -> io::Result<()> {
        for name in self.names()? {
            let below = self.join(name);
            if below.metadata()?.is_dir() {
                below.sync_all()?;
            }
        }
        self.sync()
    }

    /// Opens this folder.
    pub fn open_folder(&self) -> io::Result<OwnedFd> {
        self.in_folder(|folder, name| self.descend(folder, name, &self.path))
    }

    /// Calls `act` with the last names of two paths and with their open parent folders.
    fn with_both(
        &self,
        other: &Self,
        act: impl FnOnce(BorrowedFd<'_>, &OsStr, BorrowedFd<'_>, &OsStr) -> rustix::io::Result<()>,
    ) -> io::Result<()> {
        self.in_folder(|folder, name| other.in_folder(|other, new| Ok(act(folder, name, other, new)?)))
    }

    /// Calls `act` with the last name of this path and with its open parent folder.
    fn in_folder<T>(&self, act: impl FnOnce(BorrowedFd<'_>, &OsStr) -> io::Result<T>) -> io::Result<T> {
        let anchor = self.anchor.folder()?;
        if self.below.components().any(|name| !matches!(name, Component::Normal(_))) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a path that leads out of its folder"));
        }
        let Some(name) = self.below.file_name() else { return act(anchor.as_fd(), OsStr::new(".")) };
        let mut path = self.anchor.path.clone();
        let mut folder: Option<OwnedFd> = None;
        for above in self.below.parent().into_iter().flatten() {
            path.push(above);
            folder = Some(self.descend(folder.as_ref().unwrap_or(anchor).as_fd(), above, &path)?);
        }
        act(folder.as_ref().unwrap_or(anchor).as_fd(), name)
    }

    /// Opens a folder below the anchor. The folder must belong to this user; the anchor may have any owner.
    fn descend(&self, folder: BorrowedFd<'_>, name: &OsStr, path: &Path) -> io::Result<OwnedFd> {
        let opened = rustix::fs::openat(folder, name, FOLDER | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        let opened = File::from(opened.map_err(|error| refused(error, folder, name, path))?);
        if name != "." {
            self.check_owner(path, &opened.metadata()?)?;
        }
        Ok(opened.into())
    }

    fn refused(&self, error: Errno, folder: BorrowedFd<'_>, name: &OsStr) -> io::Error {
        refused(error, folder, name, &self.path)
    }

    fn check_owner(&self, path: &Path, metadata: &Metadata) -> io::Result<()> {
        if self.owner()?.is_none_or(|owner| owner == metadata.uid()) {
            return Ok(());
        }
        Err(Untrusted::Owner { path: path.to_path_buf(), owner: user_name(metadata.uid()) }.into())
    }

    fn owner(&self) -> io::Result<Option<u32>> {
        if let Some(owner) = self.anchor.owner.get() {
            return Ok(*owner);
        }
        let owner = owner_of_new_files(self.anchor.folder()?.as_fd())?;
        Ok(*self.anchor.owner.get_or_init(|| Some(owner)))
    }
}

impl Anchor {
    fn display_path(&self) -> &Path {
        if self.path.as_os_str().is_empty() { Path::new(".") } else { &self.path }
    }

    fn folder(&self) -> io::Result<&OwnedFd> {
        if let Some(folder) = self.folder.get() {
            return Ok(folder);
        }
        let folder = rustix::fs::openat(CWD, self.display_path(), FOLDER | OFlags::CLOEXEC, Mode::empty())?;
        Ok(self.folder.get_or_init(|| folder))
    }
}

impl From<&AnchoredPath> for PathBuf {
    fn from(path: &AnchoredPath) -> Self {
        path.path.clone()
    }
}

/// Returns the error for a name that could not be opened. If the name is a link, the error is [`Untrusted::Link`].
fn refused(error: Errno, folder: BorrowedFd<'_>, name: &OsStr, path: &Path) -> io::Error {
    if !matches!(error, Errno::LOOP | Errno::NOTDIR | Errno::MLINK) {
        return error.into();
    }
    match rustix::fs::readlinkat(folder, name, Vec::new()) {
        Ok(target) => {
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            Untrusted::Link { path: path.to_path_buf(), target }.into()
        }
        Err(_) => error.into(),
    }
}

fn owner_of_new_files(folder: BorrowedFd<'_>) -> io::Result<u32> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    // An unnamed file leaves no file behind, but some file systems do not support unnamed files.
    if let Ok(probe) = rustix::fs::openat(folder, ".", flags | OFlags::TMPFILE, Mode::RUSR) {
        return Ok(File::from(probe).metadata()?.uid());
    }
    let name = format!(".dtshard-owner-{:016x}", getrandom::u64()?);
    let probe = rustix::fs::openat(folder, &*name, flags | OFlags::CREATE | OFlags::EXCL, Mode::RUSR)?;
    let metadata = File::from(probe).metadata();
    let _ = rustix::fs::unlinkat(folder, &*name, AtFlags::empty());
    Ok(metadata?.uid())
}

/// Returns the name of the user with this id, or `the user with id 1000` if the name is not known.
fn user_name(id: u32) -> String {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(id));
    user.ok().flatten().map_or_else(|| format!("the user with id {id}"), |user| user.name)
}

fn names(folder: impl AsFd) -> rustix::io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let name = OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    Ok(names)
}

fn remove_all(folder: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
    let removed = rustix::fs::unlinkat(folder, name, AtFlags::empty());
    // If the path is a folder, `unlink` fails with EPERM on POSIX and with EISDIR on Linux.
    let Err(error @ (Errno::ISDIR | Errno::PERM)) = removed else { return removed };
    let flags = FOLDER | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let inner = match rustix::fs::openat(folder, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Err(Errno::NOENT),
        opened => opened.map_err(|_| error)?,
    };
    for name in names(&inner)? {
        match remove_all(inner.as_fd(), &name) {
            // Another process is deleting the same folder.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
    rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn untrusted_of(error: &io::Error) -> Option<&Untrusted> {
        error.get_ref()?.downcast_ref()
    }

    #[test]
    fn links_on_the_way_are_errors_and_never_followed() {
        let root = tempfile::tempdir().unwrap();
        let victim = root.path().join("victim");
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("file"), "mine").unwrap();
        let here = root.path().join("here");
        fs::create_dir(&here).unwrap();
        symlink(&victim, here.join("folder")).unwrap();
        symlink(victim.join("file"), here.join("file")).unwrap();
        // The anchor may be reached through a link.
        symlink(&here, root.path().join("there")).unwrap();
        let anchor = AnchoredPath::new(&root.path().join("there"));
        let (folder, file) = (anchor.join("folder"), anchor.join("file"));
        let inner = folder.join("file");
        let tried: [io::Result<()>; 10] = [
            inner.open().map(drop),
            inner.open_to_write(OFlags::empty()).map(drop),
            inner.replace_with_new(0o600).map(drop),
            inner.remove_all(),
            inner.rename(&anchor.join("taken")),
            anchor.join("file").rename(&inner),
            folder.join("new").create_folder(),
            folder.names().map(drop),
            file.open().map(drop),
            file.open_to_write(OFlags::TRUNC).map(drop),
        ];
        for (number, tried) in tried.into_iter().enumerate() {
            let error = tried.unwrap_err();
            assert!(matches!(untrusted_of(&error), Some(Untrusted::Link { .. })), "{number}: {error}");
        }
        assert!(file.metadata().unwrap().is_symlink());
        assert!(folder.own_metadata().is_err() && anchor.join("nothing").own_metadata().unwrap().is_none());
        // Only the link itself is deleted or replaced.
        folder.remove_all().unwrap();
        file.replace_with_new(0o600).unwrap();
        assert!(!folder.exists() && file.metadata().unwrap().is_file());
        assert_eq!(fs::read(victim.join("file")).unwrap(), b"mine");
    }

    #[test]
    fn folders_are_created_above_the_anchor_and_below_it_without_links() {
        let root = tempfile::tempdir().unwrap();
        let anchor = AnchoredPath::new(&root.path().join("above/it"));
        let folder = anchor.join("a/b");
        folder.create_with_parents().unwrap();
        folder.create_with_parents().unwrap();
        assert!(root.path().join("above/it/a/b").is_dir());
        fs::create_dir(root.path().join("victim")).unwrap();
        for (link, path) in [("link", "link"), ("middle", "middle/b"), ("above/it/a/last", "a/last")] {
            let anchor = if link.contains('/') { anchor.clone() } else { AnchoredPath::new(root.path()) };
            symlink(root.path().join("victim"), root.path().join(link)).unwrap();
            let error = anchor.join(path).create_with_parents().unwrap_err();
            assert!(matches!(untrusted_of(&error), Some(Untrusted::Link { .. })), "{path}: {error}");
        }
        fs::write(root.path().join("file"), "").unwrap();
        AnchoredPath::new(root.path()).join("file").create_with_parents().unwrap_err();
        assert_eq!(fs::read_dir(root.path().join("victim")).unwrap().count(), 0);
    }

    #[test]
    fn file_with_two_hard_links_is_not_written_to() {
        let root = tempfile::tempdir().unwrap();
        let anchor = AnchoredPath::new(root.path());
        fs::write(root.path().join("mine"), "mine").unwrap();
        anchor.join("mine").hard_link(&anchor.join("planted")).unwrap();
        let error = anchor.join("planted").open_to_write(OFlags::empty()).unwrap_err();
        assert!(matches!(untrusted_of(&error), Some(Untrusted::Names { names: 2, .. })), "{error}");
        // The file can still be read and replaced.
        anchor.join("planted").open().unwrap();
        anchor.join("planted").replace_with_new(0o600).unwrap();
        assert_eq!(fs::read(root.path().join("mine")).unwrap(), b"mine");
    }

    #[test]
    fn opening_a_pipe_is_an_error_at_once() {
        let root = tempfile::tempdir().unwrap();
        let made = std::process::Command::new("mkfifo").arg(root.path().join("pipe")).status();
        assert!(made.unwrap().success());
        let pipe = AnchoredPath::new(root.path()).join("pipe");
        for tried in [pipe.open(), pipe.open_to_write(OFlags::empty())] {
            assert_eq!(tried.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn deleting_a_tree_keeps_the_targets_of_its_links() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("tree/a/b")).unwrap();
        fs::write(root.path().join("tree/a/file"), "").unwrap();
        fs::create_dir(root.path().join("kept")).unwrap();
        fs::write(root.path().join("kept/file"), "mine").unwrap();
        symlink(root.path().join("kept"), root.path().join("tree/a/b/link")).unwrap();
        AnchoredPath::new(root.path()).join("tree").remove_all().unwrap();
        assert!(!root.path().join("tree").exists());
        assert_eq!(fs::read(root.path().join("kept/file")).unwrap(), b"mine");
    }

    #[test]
    fn anchored_folder_is_found_after_a_rename() {
        let root = tempfile::tempdir().unwrap();
        let anchor = AnchoredPath::new(root.path());
        let folder = anchor.join("folder");
        folder.create_folder().unwrap();
        let anchored = folder.as_anchor().unwrap();
        folder.rename(&anchor.join("moved")).unwrap();
        anchored.join("file").create_new(0o600).unwrap();
        assert!(anchor.join("moved/file").exists() && !folder.join("file").exists());
    }
}
