//! Names beside a destination, and how things come and go there.
//!
//! Invariant: a partial folder disappears by one rename, as it [appears](Place::make): nobody ever sees half of one.
//! What is renamed to `-gone-` belongs to nobody and may be deleted by everybody, at any time. So may drafts
//! (`-new-`): who finds its own gone makes another.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::names::{is_gone, unique};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

/// A destination and what is beside it, on the same file system.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub destination: PathBuf,
    pub parent: PathBuf,
    /// The folder of the destination, for all that is done in it.
    pub folder: AnchoredPath,
    name: OsString,
    /// True where the file system caches names; empty until that is known.
    pub caches: OnceLock<bool>,
    pub spare: Spare,
}

/// Descriptors that a run holds to give back when it has to clean up: a run that has opened as many files as it may
/// could not look into its partial folder otherwise.
#[derive(Clone, Debug, Default)]
pub(super) struct Spare(Arc<Mutex<Vec<OwnedFd>>>);

impl Spare {
    /// As many as the folders that a removal has open in each other, and one to look into each.
    const COUNT: usize = 8;

    /// # Errors
    /// `Io` where so many cannot be opened: better now than when something is to be cleaned up.
    pub fn hold(&self, folder: &AnchoredPath) -> Result<()> {
        let opened: io::Result<Vec<OwnedFd>> = (0..Self::COUNT).map(|_| folder.open_folder()).collect();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = opened.map_err(Error::io("open", folder))?;
        Ok(())
    }

    pub fn give_back(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

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
        let folder = AnchoredPath::new(destination.parent().unwrap_or(Path::new("")));
        let destination = destination.with_file_name(name);
        Ok(Self {
            destination,
            parent,
            folder,
            name: name.to_owned(),
            caches: OnceLock::new(),
            spare: Spare::default(),
        })
    }

    /// For a look that creates nothing, and cannot tell whose files are its own.
    #[must_use]
    pub fn for_a_look(self) -> Self {
        let folder = self.destination.parent().unwrap_or(Path::new(""));
        Self { folder: AnchoredPath::for_a_look(folder), ..self }
    }

    /// The destination, as what is renamed.
    pub fn target(&self) -> AnchoredPath {
        self.folder.join(&self.name)
    }

    /// `.NAME.dtshard-WHAT`
    fn beside(&self, what: &str) -> AnchoredPath {
        let mut hidden = OsString::from(".");
        hidden.push(&self.name);
        hidden.push(".dtshard-");
        hidden.push(what);
        self.folder.join(hidden)
    }

    pub fn partial(&self) -> AnchoredPath {
        self.beside("partial")
    }

    /// What is replaced stays here until its successor is in its place.
    pub fn old(&self) -> AnchoredPath {
        self.beside("old")
    }

    pub fn unique(&self, what: &str) -> AnchoredPath {
        self.beside(&format!("{what}{}", unique()))
    }

    /// Move something out of everybody's way. `None` where it is gone already.
    ///
    /// # Errors
    /// `Io`
    pub fn move_aside(&self, path: &AnchoredPath) -> Result<Option<AnchoredPath>> {
        self.rename_to(path, ASIDE)
    }

    /// Delete, as far as that can be done now; what is left is deleted by whoever comes by next.
    ///
    /// # Errors
    /// `Io` where it stays where it is.
    pub fn discard(&self, path: &AnchoredPath) -> Result<()> {
        if let Some(gone) = self.rename_to(path, GONE)? {
            let _ = gone.remove_all();
        }
        Ok(())
    }

    /// Like [`Place::discard`], but nothing is deleted yet.
    ///
    /// # Errors
    /// `Io` where it stays where it is.
    pub fn let_go(&self, path: &AnchoredPath) -> Result<()> {
        self.rename_to(path, GONE).map(drop)
    }

    fn rename_to(&self, path: &AnchoredPath, what: &str) -> Result<Option<AnchoredPath>> {
        let to = self.unique(what);
        match path.rename(&to) {
            Ok(()) => Ok(Some(to)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(Error::io("rename", path)(error)),
        }
    }

    /// Delete what processes of this user left that were killed.
    pub fn sweep(&self, kinds: &[&str]) {
        let prefixes: Vec<OsString> = kinds.iter().map(|kind| self.beside(kind).file_name().to_owned()).collect();
        for name in self.folder.names().unwrap_or_default() {
            let is = |prefix: &OsString| name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
            let found = self.folder.join(&name);
            if prefixes.iter().any(is) && found.is_own() {
                // Renamed first, so that no draft is published while it is being taken apart.
                let _ = self.discard(&found);
            }
        }
    }
}
