//! Nothing stands at the destination until it is complete.
//!
//! Work goes to `.NAME.dtshard-partial` beside the destination, on the same file system. Publishing is one rename.
//! Replacing an existing destination takes three steps (old aside to `.NAME.dtshard-old`, new in, old deleted); a
//! crash between them is finished or rolled back by the next run. Whatever happens earlier, the partial folder is
//! removed and the destination stays as it was.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags};

use crate::error::{Error, Result};

/// What is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// The partial folder becomes the destination.
    Folder,
    /// The one file in the partial folder becomes the destination.
    File,
}

/// What to do about things in the way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Existing {
    /// Replace an existing destination.
    pub overwrite: bool,
    /// Throw away what an earlier run left behind.
    pub restart: bool,
}

/// A destination being written. Dropped without [`Staging::publish`], it leaves nothing behind.
#[derive(Debug)]
pub struct Staging {
    destination: PathBuf,
    partial: PathBuf,
    shape: Shape,
    overwrite: bool,
    /// Held while the run is alive, so that another one can tell a live partial from a dead one.
    _lock: File,
}

const LOCK: &str = ".lock";

impl Staging {
    /// Claim `destination`.
    ///
    /// # Errors
    /// `Usage` where it exists and may not be replaced, or where another run is or was at work on it; `Io`.
    pub fn begin(destination: &Path, shape: Shape, existing: Existing) -> Result<Self> {
        refuse_folder(destination, shape)?;
        let old = beside(destination, "dtshard-old")?;
        let parent = parent_of(destination);
        // Without a slash at the end, which would keep a file from being renamed to it.
        let destination = &destination.with_file_name(destination.file_name().unwrap_or_default());
        fs::create_dir_all(&parent).map_err(Error::io("create", &parent))?;
        let partial = beside(destination, "dtshard-partial")?;
        if partial.symlink_metadata().is_ok() {
            if is_alive(&partial) {
                return Err(Error::usage(
                    format!("another run is writing {}", destination.display()),
                    format!("wait for it, or stop it first; it works in {}", partial.display()),
                ));
            }
            if !existing.restart {
                // It may have died within a swap, and what it was to replace is not to stay away until --restart.
                recover(destination, &old)?;
                return Err(Error::usage(
                    format!("an earlier run did not finish: {} is in the way", partial.display()),
                    "--restart throws it away and starts again",
                ));
            }
            remove(&partial)?;
        }
        fs::create_dir(&partial).map_err(Error::io("create", &partial))?;
        let lock_path = partial.join(LOCK);
        let lock = File::create_new(&lock_path).map_err(Error::io("create", &lock_path))?;
        // A file system without locks only loses the distinction between a live and a dead partial.
        let _ = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive);
        let staging =
            Self { destination: destination.clone(), partial, shape, overwrite: existing.overwrite, _lock: lock };
        // Only now, when no live run can be in the middle of a swap.
        recover(destination, &old)?;
        check_destination(destination, shape, existing.overwrite)?;
        Ok(staging)
    }

    /// The folder to write into.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.partial
    }

    /// Put the finished work at the destination.
    ///
    /// # Errors
    /// `Io` where a rename fails; the destination is then as it was.
    pub fn publish(self, sync: bool) -> Result<()> {
        let lock = self.partial.join(LOCK);
        fs::remove_file(&lock).map_err(Error::io("remove", &lock))?;
        let source = match self.shape {
            Shape::Folder => self.partial.clone(),
            Shape::File => only_entry(&self.partial)?,
        };
        if sync {
            sync_folders(&self.partial)?;
        }
        let occupied = self.destination.symlink_metadata().is_ok();
        if occupied && self.overwrite {
            self.swap(&source)?;
        } else {
            rename_new(&source, &self.destination)?;
        }
        if sync {
            sync_folder(&parent_of(&self.destination))?;
        }
        Ok(())
    }

    fn swap(&self, source: &Path) -> Result<()> {
        let old = beside(&self.destination, "dtshard-old")?;
        rename(&self.destination, &old)?;
        if let Err(error) = rename(source, &self.destination) {
            // Best effort: the next run would roll back as well.
            let _ = fs::rename(&old, &self.destination);
            return Err(error);
        }
        remove(&old)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // After publishing a folder this path is gone; after publishing a file it is empty.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// `.NAME.suffix` in the folder of `path`.
fn beside(path: &Path, suffix: &str) -> Result<PathBuf> {
    let Some(name) = path.file_name() else {
        return Err(Error::usage(
            format!("{} cannot be a destination", path.display()),
            "give the destination a name of its own",
        ));
    };
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".");
    hidden.push(suffix);
    Ok(parent_of(path).join(hidden))
}

/// Finish or roll back a swap that an earlier run did not finish.
fn recover(destination: &Path, old: &Path) -> Result<()> {
    if old.symlink_metadata().is_err() {
        return Ok(());
    }
    if destination.symlink_metadata().is_ok() { remove(old) } else { rename(old, destination) }
}

/// One file does not take the place of a folder, nor that of a name that is said to be one by a slash at its end.
fn refuse_folder(destination: &Path, shape: Shape) -> Result<()> {
    let is = match shape {
        Shape::File if destination.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) => "is",
        Shape::File if destination.as_os_str().as_encoded_bytes().ends_with(b"/") => "is to be",
        Shape::File | Shape::Folder => return Ok(()),
    };
    Err(Error::usage(
        format!("{} {is} a folder, and one file is to be written", destination.display()),
        format!("give it a name there, such as {}", destination.join("model.pt").display()),
    ))
}

fn check_destination(destination: &Path, shape: Shape, overwrite: bool) -> Result<()> {
    let Ok(metadata) = destination.symlink_metadata() else { return Ok(()) };
    // Rolling back may have brought a folder.
    refuse_folder(destination, shape)?;
    let empty_folder =
        metadata.is_dir() && fs::read_dir(destination).map_err(Error::io("list", destination))?.next().is_none();
    if empty_folder || overwrite {
        return Ok(());
    }
    Err(Error::usage(
        format!("{} exists", destination.display()),
        "choose another destination, or replace it with --overwrite",
    ))
}

fn is_alive(partial: &Path) -> bool {
    let Ok(lock) = File::open(partial.join(LOCK)) else { return false };
    matches!(rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive), Err(rustix::io::Errno::WOULDBLOCK))
}

/// Rename to a name that must not be taken, except by an empty folder.
fn rename_new(from: &Path, to: &Path) -> Result<()> {
    use rustix::io::Errno;

    let failed = |error: Errno| Error::Io { action: "publish", path: to.to_path_buf(), source: error.into() };
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) if to.is_dir() => {
            // An empty folder was there from the start: plain rename replaces it, and fails if it has filled since.
            fs::rename(from, to).map_err(Error::io("publish", to))
        }
        Err(Errno::EXIST) => Err(Error::usage(
            format!("{} appeared while it was being written", to.display()),
            "something else writes there; choose another destination",
        )),
        // Not every file system knows the flag.
        Err(Errno::INVAL | Errno::NOSYS) if to.symlink_metadata().is_err() => {
            fs::rename(from, to).map_err(Error::io("publish", to))
        }
        Err(error) => Err(failed(error)),
    }
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(Error::io("rename", from))
}

fn remove(path: &Path) -> Result<()> {
    let is_dir = path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
    if is_dir { fs::remove_dir_all(path) } else { fs::remove_file(path) }.map_err(Error::io("remove", path))
}

fn only_entry(folder: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(folder).map_err(Error::io("list", folder))?;
    match entries.next() {
        Some(entry) => Ok(entry.map_err(Error::io("list", folder))?.path()),
        None => Err(Error::Io { action: "list", path: folder.to_path_buf(), source: io::ErrorKind::NotFound.into() }),
    }
}

/// fsync a folder and those below it, so that the names in them last.
fn sync_folders(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let entry = entry.map_err(Error::io("list", folder))?;
        if entry.file_type().map_err(Error::io("list", folder))?.is_dir() {
            sync_folders(&entry.path())?;
        }
    }
    sync_folder(folder)
}

fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|handle| handle.sync_all()).map_err(Error::io("sync", folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_is_published_whole_or_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("deep/out");
        let staging = Staging::begin(&out, Shape::Folder, Existing::default()).unwrap();
        write(&staging.folder().join("a"), "1");
        assert!(!out.exists());
        drop(staging);
        assert_eq!(names(&root.path().join("deep")), Vec::<String>::new());

        let staging = Staging::begin(&out, Shape::Folder, Existing::default()).unwrap();
        write(&staging.folder().join("a"), "1");
        staging.publish(true).unwrap();
        assert_eq!(names(&out), ["a"]);
        assert_eq!(names(&root.path().join("deep")), ["out"]);
    }

    #[test]
    fn an_existing_destination_is_kept_unless_overwrite_is_given() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("out.pt");
        write(&out, "old");
        let error = Staging::begin(&out, Shape::File, Existing::default()).unwrap_err();
        assert!(error.hint().unwrap().contains("--overwrite"), "{error}");

        let replace = Existing { overwrite: true, restart: false };
        let staging = Staging::begin(&out, Shape::File, replace).unwrap();
        write(&staging.folder().join("out.pt"), "new");
        assert_eq!(fs::read_to_string(&out).unwrap(), "old");
        staging.publish(false).unwrap();
        assert_eq!(fs::read_to_string(&out).unwrap(), "new");
        assert_eq!(names(root.path()), ["out.pt"]);
    }

    #[test]
    fn an_empty_folder_may_become_a_folder_but_not_a_file() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("folder");
        fs::create_dir(&out).unwrap();
        let replace = Existing { overwrite: true, restart: false };
        let error = Staging::begin(&out, Shape::File, replace).unwrap_err();
        assert!(error.hint().unwrap().contains("folder/model.pt"), "{error}");
        let staging = Staging::begin(&out, Shape::Folder, Existing::default()).unwrap();
        write(&staging.folder().join("x"), "1");
        staging.publish(false).unwrap();
        assert_eq!(names(&out), ["x"]);
    }

    #[test]
    fn an_interrupted_swap_is_finished_or_rolled_back() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("out");
        let old = root.path().join(".out.dtshard-old");
        // Killed between the renames: the old one comes back, and is then refused as any existing destination.
        fs::create_dir(&old).unwrap();
        write(&old.join("a"), "old");
        assert!(Staging::begin(&out, Shape::Folder, Existing::default()).is_err());
        assert_eq!(names(&out), ["a"]);
        // Killed before the old one was deleted: it is deleted now.
        fs::create_dir(&old).unwrap();
        assert!(Staging::begin(&out, Shape::Folder, Existing::default()).is_err());
        assert_eq!(names(root.path()), ["out"]);
    }

    #[test]
    fn dead_and_live_partials_are_told_apart() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("out");
        let live = Staging::begin(&out, Shape::Folder, Existing::default()).unwrap();
        let error = Staging::begin(&out, Shape::Folder, Existing { overwrite: false, restart: true }).unwrap_err();
        assert!(error.to_string().contains("another run"), "{error}");
        drop(live);

        let dead = root.path().join(".out.dtshard-partial");
        fs::create_dir(&dead).unwrap();
        let error = Staging::begin(&out, Shape::Folder, Existing::default()).unwrap_err();
        assert!(error.hint().unwrap().contains("--restart"), "{error}");
        Staging::begin(&out, Shape::Folder, Existing { overwrite: false, restart: true }).unwrap();
    }
}
