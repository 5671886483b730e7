//! The destination, and the hidden files and folders beside it that belong to dtshard.
//!
//! Everything that a run creates, renames or deletes outside its partial folder goes through [`Destination`]. Paths are
//! anchored: symbolic links are not followed, and files of other users are not deleted. A network file system may
//! return cached names for up to a minute, so a check that finds an impossible state is repeated for up to this time.
//! On a local file system, no check is repeated. Invariants: a partial folder appears and disappears by one rename, so
//! no process sees an incomplete folder. Any process may delete temporary names (`-new-`, `-gone-`) at any time. No two
//! processes generate the same [`unique`] name.

use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use super::Pace;
use crate::comm::{Process, Wait, WaitReporter};
use crate::error::{Error, Result};
use crate::exec::Stop;
use crate::storage::{AnchoredPath, filesystem, fresh_lookup};

/// The prefix in the names of partial folders that are being created.
pub(super) const TMP: &str = "new-";
/// The prefix in the names of files and folders that are going to be deleted.
pub(super) const TRASH: &str = "gone-";
/// The prefix in the name of a replaced checkpoint that may not be deleted yet.
pub(super) const BACKUP: &str = "aside-";

/// The largest length of a file name in bytes (`NAME_MAX` of Linux).
const MAX_NAME: usize = 255;

/// The number of bytes that the longest hidden name beside a destination adds to the destination's name.
const HIDDEN_NAME: usize = ".".len() + ".dtshard-".len() + BACKUP.len() + UNIQUE;

/// The number of file descriptors that are kept open as a reserve for a deletion. A deletion opens at most this many
/// folders at a time.
const RESERVED_DESCRIPTORS: usize = 8;

/// A destination, and the hidden files and folders beside it that belong to dtshard.
#[derive(Clone, Debug)]
pub(super) struct Destination {
    pub path: PathBuf,
    pub parent: PathBuf,
    /// The folder that contains the destination.
    pub folder: AnchoredPath,
    name: OsString,
    pace: Pace,
    reporter: WaitReporter,
    /// True if the file system caches names. The cell is empty until this process has found out.
    pub caches: OnceLock<bool>,
    /// File descriptors that are released before a cleanup. Without this reserve, a process at its limit of open files
    /// could not open its partial folder for the cleanup.
    reserve: Arc<Mutex<Vec<OwnedFd>>>,
}

impl Destination {
    /// Returns the destination at `path`. Fails with `Usage` if the path does not end in a name, or if the name is too long
    /// for the hidden names beside it.
    pub fn new(path: &Path, pace: Pace, reporter: WaitReporter) -> Result<Self> {
        let Some(name) = path.file_name() else {
            return Err(Error::usage(
                format!("{} cannot be a destination", path.display()),
                "choose a destination that ends in a file or folder name",
            ));
        };
        if name.len() > MAX_NAME - HIDDEN_NAME {
            return Err(Error::usage(
                format!(
                    "{}: expected a name of at most {} bytes, found {}; dtshard creates hidden files beside the destination, and \
                     their names contain the name of the destination",
                    path.display(),
                    MAX_NAME - HIDDEN_NAME,
                    name.len()
                ),
                "choose a shorter name for the destination",
            ));
        }
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        Ok(Self {
            // A trailing slash is removed, because it would prevent renaming a file to this path.
            path: path.with_file_name(name),
            parent,
            folder: AnchoredPath::new(path.parent().unwrap_or(Path::new(""))),
            name: name.to_owned(),
            pace,
            reporter,
            caches: OnceLock::new(),
            reserve: Arc::default(),
        })
    }

    /// Returns this destination for a check that creates nothing. The check accepts the files of every user: only a new
    /// file would show which user owns new files in this folder.
    pub fn for_a_look(self) -> Self {
        let folder = AnchoredPath::read_only(self.path.parent().unwrap_or(Path::new("")));
        Self { folder, ..self }
    }

    /// Returns the path of the destination as a name in its opened folder, for use in renames.
    pub fn target(&self) -> AnchoredPath {
        self.folder.join(&self.name)
    }

    /// Returns the path beside the destination with the name `.NAME.dtshard-SUFFIX`.
    fn beside(&self, suffix: &str) -> AnchoredPath {
        let mut hidden = OsString::from(".");
        hidden.push(&self.name);
        hidden.push(".dtshard-");
        hidden.push(suffix);
        self.folder.join(hidden)
    }

    pub fn partial(&self) -> AnchoredPath {
        self.beside("partial")
    }

    /// Returns the path to which an existing checkpoint is renamed while it is being replaced.
    pub fn old(&self) -> AnchoredPath {
        self.beside("old")
    }

    pub fn unique(&self, kind: &str) -> AnchoredPath {
        self.beside(&format!("{kind}{}", unique()))
    }

    /// Renames `path` to a unique name with the prefix `kind`. Returns `None` if `path` does not exist.
    pub fn rename_away(&self, path: &AnchoredPath, kind: &str) -> Result<Option<AnchoredPath>> {
        let to = self.unique(kind);
        match path.rename(&to) {
            Err(error) if is_gone(&error) => Ok(None),
            done => done.map(|()| Some(to)).map_err(Error::io("rename", path)),
        }
    }

    /// Renames `path` to a trash name, and then deletes as many of its files as possible. The next run deletes any
    /// remaining files.
    pub fn discard(&self, path: &AnchoredPath) -> Result<()> {
        if let Some(trash) = self.rename_away(path, TRASH)? {
            let _ = trash.remove_all();
        }
        Ok(())
    }

    /// Deletes files and folders with these name prefixes that killed processes of this user have left.
    pub fn sweep(&self, kinds: &[&str]) {
        let prefixes: Vec<OsString> = kinds.iter().map(|kind| self.beside(kind).file_name().to_owned()).collect();
        for name in self.folder.names().unwrap_or_default() {
            let is = |prefix: &OsString| name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
            let found = self.folder.join(&name);
            if prefixes.iter().any(is) && found.is_own() {
                // The folder is renamed first, so that no process renames a half-deleted folder to the partial folder.
                let _ = self.discard(&found);
            }
        }
    }

    /// Opens spare file descriptors, so that [`Destination::release`] can make them available by closing them.
    pub fn reserve(&self) -> Result<()> {
        let opened: io::Result<Vec<OwnedFd>> = (0..RESERVED_DESCRIPTORS).map(|_| self.folder.open_folder()).collect();
        *self.reserve.lock().unwrap_or_else(PoisonError::into_inner) =
            opened.map_err(Error::io("open", &self.folder))?;
        Ok(())
    }

    pub fn release(&self) {
        self.reserve.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Returns for how long the file system may return cached names.
    pub fn cached_for(&self) -> Duration {
        let caches = *self.caches.get_or_init(|| filesystem::caches_names(&self.parent));
        if caches { self.pace.cached_for } else { Duration::ZERO }
    }

    /// Waits until the cached names of this destination agree with the listing of its folder. Fails with `Stopped`.
    pub fn refresh(&self, stop: &Stop) -> Result<()> {
        // When a folder is opened, NFS asks the server for the names in it.
        let _ = self.folder.open_folder();
        if self.cached_for().is_zero() {
            return Ok(());
        }
        let are_as_listed = || {
            // If the folder cannot be listed, there is nothing to compare.
            let Ok(listed) = self.folder.names() else { return true };
            let is_listed = |path: &AnchoredPath| listed.iter().any(|name| name == path.file_name());
            self.names().iter().all(|path| path.exists() == is_listed(path))
        };
        let what = format!("waiting for the file system to show what is at {}", self.path.display());
        self.confirm(stop, &what, || {
            let is_fresh = are_as_listed() || {
                self.look_up();
                are_as_listed()
            };
            Ok(is_fresh)
        })
        .map(drop)
    }

    fn names(&self) -> [AnchoredPath; 3] {
        [self.target(), self.partial(), self.old()]
    }

    /// Makes the file system look up the names of this destination again.
    pub fn look_up(&self) {
        let paths = self.names();
        let names: Vec<&OsStr> = paths.iter().map(AnchoredPath::file_name).collect();
        let _ = fresh_lookup::refresh_names(&self.folder, &names, self.unique(TRASH).file_name());
    }

    /// Repeats `look` until it returns true, or until the file system can no longer return cached names. `what` is the
    /// text of the wait report, `waiting for ...`. Fails with `Stopped` and the errors of `look`.
    pub fn confirm(&self, stop: &Stop, what: &str, mut look: impl FnMut() -> Result<bool>) -> Result<bool> {
        let mut nap = self.pace.nap();
        let wait = Wait::begin(self.reporter.notices(self.cached_for()));
        loop {
            if look()? {
                return Ok(true);
            }
            if wait.is_over() {
                return Ok(false);
            }
            stop.check_signal()?;
            if wait.is_due() {
                wait.say(what, Some("network file systems cache names"));
            }
            nap.take();
        }
    }
}

/// The length of a [`unique`] name in bytes.
const UNIQUE: usize = 12;

/// Returns a name that no other process generates, on this node or on another node.
pub(super) fn unique() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let text = format!("{:?} {:?} {now:?}", Process::this(), std::thread::current().id());
    blake3::hash(text.as_bytes()).to_hex()[..UNIQUE].to_owned()
}

/// Returns true if an error means that a file name does not exist.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::StaleNetworkFileHandle)
}

/// Returns true if a folder lists a name, but a fresh lookup of this name finds no file.
pub(super) fn is_hidden(folder: &AnchoredPath, name: &str) -> io::Result<bool> {
    let is_hidden = || Ok(!folder.join(name).exists() && folder.names()?.iter().any(|listed| listed == name));
    if !is_hidden()? {
        return Ok(false);
    }
    let _ = fresh_lookup::refresh_names(folder, &[name.as_ref()], format!(".probe-{}", unique()).as_ref());
    is_hidden()
}

/// Reads at most `most` bytes from the start of a file. Other processes may write the file at the same time.
pub(super) fn read_at_most(path: &AnchoredPath, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fresh_lookup::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The identity of a file or folder, independent of its name. The fields are the device, the inode, and the birth time
/// if the file system records it. The inode alone is not enough, because file systems reuse inode numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileIdentity(u64, u64, Option<SystemTime>);

impl FileIdentity {
    pub fn of(path: &AnchoredPath) -> Option<Self> {
        path.metadata().ok().map(|metadata| Self::new(&metadata))
    }

    pub fn new(metadata: &Metadata) -> Self {
        Self(metadata.dev(), metadata.ino(), metadata.created().ok())
    }
}
