//! The destination and the hidden names beside it, on the same file system.
//!
//! Everything that a run creates, renames or deletes outside its partial folder goes through [`Destination`]. Paths are
//! anchored: links are not followed, and files of other users are not deleted. A network file system may answer from a
//! cache of names for up to a minute, so a look that finds an impossible state is repeated for that long; on a local
//! file system this takes no time. Invariants: a partial folder appears and disappears by one rename, so no process
//! sees half of one. Any process may delete temporary names (`-new-`, `-gone-`) at any time. No two processes make the
//! same [`unique`] name.

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
use crate::storage::{AnchoredPath, filesystem, uncached};

/// The prefix of partial folders that are being made.
pub(super) const TMP: &str = "new-";
/// The prefix of files and folders that are to be deleted.
pub(super) const TRASH: &str = "gone-";
/// The prefix of a replaced checkpoint, until it may be deleted.
pub(super) const BACKUP: &str = "aside-";

/// The number of descriptors held in reserve: a removal has at most this many folders open.
const RESERVED_DESCRIPTORS: usize = 8;

/// A destination and the names beside it.
#[derive(Clone, Debug)]
pub(super) struct Destination {
    pub path: PathBuf,
    pub parent: PathBuf,
    /// The folder that holds the destination.
    pub folder: AnchoredPath,
    name: OsString,
    pace: Pace,
    reporter: WaitReporter,
    /// True if the file system caches names; empty until that is known.
    pub caches: OnceLock<bool>,
    /// Descriptors to release before a cleanup: a process that has reached its limit of open files could not open its
    /// partial folder otherwise.
    reserve: Arc<Mutex<Vec<OwnedFd>>>,
}

impl Destination {
    /// Fails with `Usage` if the path does not end in a name.
    pub fn new(path: &Path, pace: Pace, reporter: WaitReporter) -> Result<Self> {
        let Some(name) = path.file_name() else {
            return Err(Error::usage(
                format!("{} cannot be a destination", path.display()),
                "choose a destination that ends in a file or folder name",
            ));
        };
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        Ok(Self {
            // Without a trailing slash, which would prevent renaming a file to it.
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

    /// Returns the same destination for a look that creates nothing, and so cannot find out which user owns new files.
    pub fn for_a_look(self) -> Self {
        let folder = AnchoredPath::read_only(self.path.parent().unwrap_or(Path::new("")));
        Self { folder, ..self }
    }

    /// Returns the destination, as the target of a rename.
    pub fn target(&self) -> AnchoredPath {
        self.folder.join(&self.name)
    }

    /// Returns the path `.NAME.dtshard-SUFFIX`.
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

    /// Returns the path of the checkpoint that is being replaced, until the new one is at the destination.
    pub fn old(&self) -> AnchoredPath {
        self.beside("old")
    }

    pub fn unique(&self, kind: &str) -> AnchoredPath {
        self.beside(&format!("{kind}{}", unique()))
    }

    /// Renames to a unique name of this kind. Returns `None` where `path` does not exist (any more).
    pub fn rename_away(&self, path: &AnchoredPath, kind: &str) -> Result<Option<AnchoredPath>> {
        let to = self.unique(kind);
        match path.rename(&to) {
            Err(error) if is_gone(&error) => Ok(None),
            done => done.map(|()| Some(to)).map_err(Error::io("rename", path)),
        }
    }

    /// Renames to a trash name, then deletes as much as possible; the next run deletes the rest.
    pub fn discard(&self, path: &AnchoredPath) -> Result<()> {
        if let Some(trash) = self.rename_away(path, TRASH)? {
            let _ = trash.remove_all();
        }
        Ok(())
    }

    /// Deletes the files that killed processes of this user have left under names with these prefixes.
    pub fn sweep(&self, kinds: &[&str]) {
        let prefixes: Vec<OsString> = kinds.iter().map(|kind| self.beside(kind).file_name().to_owned()).collect();
        for name in self.folder.names().unwrap_or_default() {
            let is = |prefix: &OsString| name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
            let found = self.folder.join(&name);
            if prefixes.iter().any(is) && found.is_own() {
                // Renamed first, so that no process renames a half-deleted folder to the partial folder.
                let _ = self.discard(&found);
            }
        }
    }

    /// Opens the descriptors that [`Destination::release`] closes.
    pub fn reserve(&self) -> Result<()> {
        let opened: io::Result<Vec<OwnedFd>> = (0..RESERVED_DESCRIPTORS).map(|_| self.folder.open_folder()).collect();
        *self.reserve.lock().unwrap_or_else(PoisonError::into_inner) =
            opened.map_err(Error::io("open", &self.folder))?;
        Ok(())
    }

    pub fn release(&self) {
        self.reserve.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Returns how long the file system may answer from a cache.
    pub fn cached_for(&self) -> Duration {
        let caches = *self.caches.get_or_init(|| filesystem::caches_names(&self.parent));
        if caches { self.pace.cached_for } else { Duration::ZERO }
    }

    /// Waits until the names beside the destination agree with the listing of the folder. Fails with `Stopped`.
    pub fn refresh(&self, stop: &Stop) -> Result<()> {
        // NFS asks the server for the names in a folder that is opened.
        let _ = self.folder.open_folder();
        if self.cached_for().is_zero() {
            return Ok(());
        }
        let are_as_listed = || {
            // A folder that cannot be listed contradicts nothing.
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

    /// Makes the file system look up the names beside the destination.
    pub fn look_up(&self) {
        let paths = self.names();
        let names: Vec<&OsStr> = paths.iter().map(AnchoredPath::file_name).collect();
        let _ = uncached::refresh_names(&self.folder, &names, self.unique(TRASH).file_name());
    }

    /// Repeats `look` until it returns true, for as long as the file system may answer from a cache. `what` is reported
    /// as `waiting for WHAT`. Fails with `Stopped` and the errors of `look`.
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

/// Returns a name that no other process makes, on this node or another.
pub(super) fn unique() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let text = format!("{:?} {:?} {now:?}", Process::this(), std::thread::current().id());
    blake3::hash(text.as_bytes()).to_hex()[..12].to_owned()
}

/// Returns whether an error means that a name does not exist (any more).
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::StaleNetworkFileHandle)
}

/// Returns whether a folder lists a name that a fresh lookup does not find.
pub(super) fn is_hidden(folder: &AnchoredPath, name: &str) -> io::Result<bool> {
    let is_hidden = || Ok(!folder.join(name).exists() && folder.names()?.iter().any(|listed| listed == name));
    if !is_hidden()? {
        return Ok(false);
    }
    let _ = uncached::refresh_names(folder, &[name.as_ref()], format!(".probe-{}", unique()).as_ref());
    is_hidden()
}

/// Reads the beginning of a file that other processes write.
pub(super) fn read_at_most(path: &AnchoredPath, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    uncached::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The identity of a file or folder, independent of its name. Inode numbers are reused, so the time of birth is
/// compared as well if the file system has it.
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
