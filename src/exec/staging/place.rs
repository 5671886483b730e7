//! Names beside a destination, and how things come and go there.
//!
//! Invariant: a partial folder appears complete, by one rename, and disappears by one: nobody ever sees half of one.
//! What is renamed to `-gone-` belongs to nobody and may be deleted by everybody, at any time. So may drafts
//! (`-new-`): who finds its own gone makes another.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use super::plan::Planned;
use crate::comm::Process;
use crate::error::{Error, Result};
use crate::exec::about::About;
use crate::fault;
use crate::storage::filesystem::sync_folder;

/// A destination and what is beside it, on the same file system.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub destination: PathBuf,
    pub parent: PathBuf,
    name: OsString,
}

/// The folder in the work folder that has the output.
pub(super) const DATA: &str = "data";
pub(super) const PLAN: &str = "plan.json";
pub(super) const ABOUT: &str = "about.json";

/// Partial folders that are being made.
pub(super) const DRAFT: &str = "new-";
/// What was let go.
pub(super) const GONE: &str = "gone-";
/// What is being looked at before it is let go or put back.
pub(super) const ASIDE: &str = "aside-";

impl Place {
    /// # Errors
    /// `Usage` where the path has no name of its own.
    pub fn of(destination: &Path) -> Result<Self> {
        let Some(name) = destination.file_name() else {
            return Err(Error::usage(
                format!("{} cannot be a destination", destination.display()),
                "give the destination a name of its own",
            ));
        };
        let parent = match destination.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        // Without a slash at the end, which would keep a file from being renamed to it.
        Ok(Self { destination: destination.with_file_name(name), parent, name: name.to_owned() })
    }

    /// `.NAME.dtshard-WHAT`
    fn beside(&self, what: &str) -> PathBuf {
        let mut hidden = OsString::from(".");
        hidden.push(&self.name);
        hidden.push(".dtshard-");
        hidden.push(what);
        self.parent.join(hidden)
    }

    pub fn partial(&self) -> PathBuf {
        self.beside("partial")
    }

    /// What is replaced stays here until its successor is in its place.
    pub fn old(&self) -> PathBuf {
        self.beside("old")
    }

    fn unique(&self, what: &str) -> PathBuf {
        self.beside(&format!("{what}{}", unique()))
    }

    /// Opening a folder makes network file systems ask the server what is in it.
    pub fn refresh(&self) {
        let _ = File::open(&self.parent);
    }

    /// Make the partial folder, with its plan and an empty data folder. False where somebody was faster, or took the
    /// draft for litter.
    ///
    /// # Errors
    /// `Io`
    pub fn make(&self, plan: &Planned, about: &About, sync: bool) -> Result<bool> {
        let draft = self.unique(DRAFT);
        fs::create_dir(&draft).map_err(Error::io("create", self.partial()))?;
        fault::point("begin-draft");
        let made = Self::fill(&draft, plan, about, sync).and_then(|()| {
            fault::point("begin-planned");
            // The folder that is there has a plan, so it is not empty, and no rename replaces it.
            fs::rename(&draft, self.partial())
        });
        match made {
            Ok(()) => {
                fault::point("begin-made");
                if sync {
                    sync_folder(&self.parent)?;
                }
                self.sweep(&[GONE, DRAFT]);
                Ok(true)
            }
            Err(error) => {
                let _ = fs::remove_dir_all(&draft);
                let is_taken = matches!(
                    error.kind(),
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory
                );
                if is_taken || is_gone(&error) {
                    return Ok(false);
                }
                Err(Error::io("create", self.partial())(error))
            }
        }
    }

    fn fill(draft: &Path, plan: &Planned, about: &About, sync: bool) -> io::Result<()> {
        fs::create_dir_all(draft.join(plan.work()).join(DATA))?;
        // Not synced: nothing depends on it.
        fs::write(draft.join(ABOUT), serde_json::to_vec_pretty(about).expect("strings and numbers are JSON"))?;
        let mut file = File::create_new(draft.join(PLAN))?;
        file.write_all(&plan.to_bytes())?;
        if sync {
            file.sync_all()?;
            File::open(draft.join(plan.work()))?.sync_all()?;
            File::open(draft)?.sync_all()?;
        }
        Ok(())
    }

    /// Move something out of everybody's way. `None` where it is gone already.
    ///
    /// # Errors
    /// `Io`
    pub fn move_aside(&self, path: &Path) -> Result<Option<PathBuf>> {
        self.rename_to(path, ASIDE)
    }

    /// Delete, as far as that can be done now; what is left is deleted by whoever comes by next.
    ///
    /// # Errors
    /// `Io` where it stays where it is.
    pub fn discard(&self, path: &Path) -> Result<()> {
        if let Some(gone) = self.rename_to(path, GONE)? {
            let _ = remove(&gone);
        }
        Ok(())
    }

    /// Like [`Place::discard`], but nothing is deleted yet.
    ///
    /// # Errors
    /// `Io` where it stays where it is.
    pub fn let_go(&self, path: &Path) -> Result<()> {
        self.rename_to(path, GONE).map(drop)
    }

    fn rename_to(&self, path: &Path, what: &str) -> Result<Option<PathBuf>> {
        let to = self.unique(what);
        match fs::rename(path, &to) {
            Ok(()) => Ok(Some(to)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(Error::io("rename", path)(error)),
        }
    }

    /// Delete what processes left that were killed.
    pub fn sweep(&self, kinds: &[&str]) {
        let prefixes: Vec<OsString> =
            kinds.iter().map(|kind| self.beside(kind).file_name().unwrap_or_default().to_owned()).collect();
        let Ok(entries) = fs::read_dir(&self.parent) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let is = |prefix: &OsString| name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
            if prefixes.iter().any(is) {
                // Renamed first, so that no draft is published while it is being taken apart.
                let _ = self.discard(&entry.path());
            }
        }
    }
}

/// A name that no other process, here or elsewhere, comes upon.
pub(super) fn unique() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let text = format!("{:?} {:?} {now:?}", Process::this(), std::thread::current().id());
    blake3::hash(text.as_bytes()).to_hex()[..12].to_owned()
}

/// Whether a text can be one of [`unique`].
pub(super) fn is_unique(text: &str) -> bool {
    text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// True where something is not there (any more).
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::StaleNetworkFileHandle)
}

/// Which file or folder this is, wherever it is renamed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
    /// Numbers of files are given again; `None` where the file system does not tell.
    born: Option<SystemTime>,
}

impl Identity {
    pub fn of(path: &Path) -> Option<Self> {
        let metadata = path.symlink_metadata().ok()?;
        Some(Self { device: metadata.dev(), inode: metadata.ino(), born: metadata.created().ok() })
    }
}

pub(super) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Rename to a name that must not be taken, except by an empty folder.
pub(super) fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // An empty folder was there from the start: plain rename replaces it, and fails if it has filled since.
        Err(Errno::EXIST) if to.is_dir() && from.is_dir() => fs::rename(from, to),
        // Not every file system knows the flag.
        Err(Errno::INVAL | Errno::NOSYS) if !exists(to) => fs::rename(from, to),
        Err(Errno::INVAL | Errno::NOSYS) => Err(io::ErrorKind::AlreadyExists.into()),
        done => Ok(done?),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    let is_dir = path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
    if is_dir { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}
