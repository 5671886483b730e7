//! Path lookups: what exists at a path, and the entries of a folder.
//!
//! Only ENOENT and ENOTDIR mean that a path does not exist. After any other failure (EIO, ESTALE, EACCES, ETIMEDOUT)
//! the file may exist. Treating it as absent would silently lose its tensors, so these failures are errors. Some
//! functions of the standard library treat every failure as absence; other modules must not use them (clippy.toml).
//!
//! A dangling link is an error as well, because its name shows that a file should exist. For example, a hub cache
//! contains links to blobs, and a blob may be lost.

use std::ffi::OsString;
use std::fs::{self, FileType, Metadata};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, Mode, OFlags};

use crate::error::{Error, Result, StorageError};

/// The type of the file at a path. Links are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    File,
    Folder,
    /// A device, a pipe or a socket.
    Special,
    /// A symbolic link whose target does not exist.
    Dangling,
}

impl From<FileType> for FileKind {
    fn from(found: FileType) -> Self {
        if found.is_file() {
            Self::File
        } else if found.is_dir() {
            Self::Folder
        } else {
            Self::Special
        }
    }
}

/// Returns the type of the file at a path, following links. Returns `None` if the path does not exist.
///
/// # Errors
/// `Io` if the file system reports another failure.
pub fn kind_of(path: &Path) -> Result<Option<FileKind>> {
    if let Some(metadata) = metadata_of(path)? {
        return Ok(Some(metadata.file_type().into()));
    }
    let own = unless_absent(path, fs::symlink_metadata(path))?.map(|own| own.file_type());
    Ok(own.map(|own| if own.is_symlink() { FileKind::Dangling } else { own.into() }))
}

/// Returns the metadata of the file at a path, following links. Returns `None` if the path does not exist or is a
/// dangling link.
///
/// # Errors
/// `Io` if the file system reports another failure.
pub fn metadata_of(path: &Path) -> Result<Option<Metadata>> {
    unless_absent(path, fs::metadata(path))
}

/// Returns whether the path is a file or a link to a file.
///
/// # Errors
/// `Io` if the file system reports another failure, `Missing` for a dangling link.
pub fn is_file(path: &Path) -> Result<bool> {
    Ok(kind_of_target(path)? == Some(FileKind::File))
}

/// Returns whether the path is a folder or a link to a folder.
///
/// # Errors
/// The errors of [`is_file`].
pub fn is_folder(path: &Path) -> Result<bool> {
    Ok(kind_of_target(path)? == Some(FileKind::Folder))
}

/// Returns whether the path exists.
///
/// # Errors
/// The errors of [`is_file`].
pub fn exists(path: &Path) -> Result<bool> {
    Ok(kind_of_target(path)?.is_some())
}

fn kind_of_target(path: &Path) -> Result<Option<FileKind>> {
    match kind_of(path)? {
        Some(FileKind::Dangling) => Err(dangling(path)),
        kind => Ok(kind),
    }
}

/// Returns the path without links and without `..`. Returns `None` if the path does not exist.
///
/// # Errors
/// `Io` if the file system reports another failure.
pub fn resolve(path: &Path) -> Result<Option<PathBuf>> {
    unless_absent(path, path.canonicalize())
}

/// A name in a folder: a file, a folder, a link or a special file.
#[derive(Clone, Debug)]
pub struct FolderEntry {
    /// The name of the entry.
    pub name: OsString,
    /// The path of the entry.
    pub path: PathBuf,
    file_type: rustix::fs::FileType,
}

impl FolderEntry {
    /// Returns the type of the entry, following links.
    ///
    /// # Errors
    /// `Io` if the file system reports a failure, or if the entry was deleted after its folder was listed.
    pub fn kind(&self) -> Result<FileKind> {
        match self.file_type {
            rustix::fs::FileType::RegularFile => Ok(FileKind::File),
            rustix::fs::FileType::Directory => Ok(FileKind::Folder),
            rustix::fs::FileType::Symlink | rustix::fs::FileType::Unknown => {
                kind_of(&self.path)?.ok_or_else(|| refused("stat", &self.path)(io::ErrorKind::NotFound.into()))
            }
            _ => Ok(FileKind::Special),
        }
    }

    /// Returns whether the entry itself is a link.
    ///
    /// # Errors
    /// The errors of [`Self::kind`].
    pub fn is_link(&self) -> Result<bool> {
        if self.file_type != rustix::fs::FileType::Unknown {
            return Ok(self.file_type == rustix::fs::FileType::Symlink);
        }
        let own = fs::symlink_metadata(&self.path).map_err(Error::io("stat", &self.path))?;
        Ok(own.file_type().is_symlink())
    }

    /// Returns whether the entry is a file or a link to a file.
    ///
    /// # Errors
    /// The errors of [`Self::kind`], and `Missing` for a dangling link.
    pub fn is_file(&self) -> Result<bool> {
        Ok(self.kind_of_target()? == FileKind::File)
    }

    /// Returns whether the entry is a folder or a link to a folder.
    ///
    /// # Errors
    /// The errors of [`Self::is_file`].
    pub fn is_folder(&self) -> Result<bool> {
        Ok(self.kind_of_target()? == FileKind::Folder)
    }

    fn kind_of_target(&self) -> Result<FileKind> {
        match self.kind()? {
            FileKind::Dangling => Err(dangling(&self.path)),
            kind => Ok(kind),
        }
    }
}

/// Lists a folder, sorted by name.
///
/// # Errors
/// `Io` naming the folder, even if some of its names could be read.
pub fn list(folder: &Path) -> Result<Vec<FolderEntry>> {
    // The standard library's iterator panics if closing the folder fails.
    let read = || -> rustix::io::Result<Vec<FolderEntry>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let at = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let entries = Dir::new(rustix::fs::open(at, flags, Mode::empty())?)?;
        let mut listed = Vec::new();
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                let name = OsString::from_vec(name.to_vec());
                listed.push(FolderEntry { path: folder.join(&name), name, file_type: entry.file_type() });
            }
        }
        Ok(listed)
    };
    let mut listed = read().map_err(|error| refused("list", folder)(error.into()))?;
    listed.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(listed)
}

/// Returns the metadata of a file that is about to be read. A pipe or a device is an error, because opening a pipe
/// would wait for its writer.
///
/// # Errors
/// `Io` if the file does not exist or is not a regular file, `Missing` if the path is a dangling link.
pub fn regular_file(path: &Path) -> Result<Metadata> {
    let metadata = fs::metadata(path).map_err(refused("open", path))?;
    if metadata.is_file() {
        return Ok(metadata);
    }
    let source = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
    Err(StorageError::Io { action: "open", path: path.to_path_buf(), source }.into())
}

/// Returns the error for a path that could not be opened or inspected. If the path is a link, the error names the
/// target of the link.
pub fn refused(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| match fs::read_link(path) {
        Ok(_) if is_absence(&source) => dangling(path),
        Ok(target) => {
            let words = format!("{source}, behind a link to {}", target.display());
            Error::io(action, path)(io::Error::new(source.kind(), words))
        }
        // The path is not a link.
        Err(_) => Error::io(action, path)(source),
    }
}

/// Returns the target of a link for a message; if the link cannot be read, returns the text of the error.
pub fn target_of(link: &Path) -> String {
    fs::read_link(link).map_or_else(|error| error.to_string(), |target| target.display().to_string())
}

fn dangling(path: &Path) -> Error {
    Error::missing(path, "link", "a file or folder that the link points to", target_of(path))
        .missing_hint("restore the target of the link (download it again if it is from a hub), or remove the link")
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn unless_absent<T>(path: &Path, found: io::Result<T>) -> Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if is_absence(&error) => Ok(None),
        Err(error) => Err(refused("stat", path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_missing_names_are_absent() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::write(root.join("file"), "x").unwrap();
        symlink("file", root.join("link")).unwrap();
        symlink(".", root.join("here")).unwrap();
        symlink("../blobs/5f2c", root.join("lost")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        for (name, kind) in [
            ("file", Some(FileKind::File)),
            ("link", Some(FileKind::File)),
            ("here", Some(FileKind::Folder)),
            ("lost", Some(FileKind::Dangling)),
            ("nothing", None),
            ("file/below", None),
            ("link/below", None),
        ] {
            assert_eq!(kind_of(&root.join(name)).unwrap(), kind, "{name}");
        }
        assert!(
            matches!(kind_of(&root.join("loop")), Err(Error::Storage(StorageError::Io { path, .. })) if path.ends_with("loop"))
        );
        assert!(matches!(kind_of(&root.join("x".repeat(300))), Err(Error::Storage(StorageError::Io { .. }))));
        assert!(is_file(&root.join("link")).unwrap() && !is_file(&root.join("nothing")).unwrap());
        assert!(is_folder(&root.join("here")).unwrap() && !is_folder(root.join("file").as_path()).unwrap());
        assert!(exists(&root.join("here")).unwrap() && !exists(&root.join("file/below")).unwrap());
        assert_eq!(resolve(&root.join("nothing")).unwrap(), None);
        assert_eq!(resolve(&root.join("link")).unwrap(), Some(root.canonicalize().unwrap().join("file")));
    }

    #[test]
    fn dangling_link_is_an_error_that_names_its_target() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("model.safetensors");
        symlink("../../blobs/5f2c", &link).unwrap();
        let entry = list(folder.path()).unwrap().pop().unwrap();
        assert_eq!((entry.kind().unwrap(), entry.is_link().unwrap()), (FileKind::Dangling, true));
        for error in [
            is_file(&link).unwrap_err(),
            is_folder(&link).unwrap_err(),
            exists(&link).unwrap_err(),
            entry.is_file().unwrap_err(),
            regular_file(&link).unwrap_err(),
            refused("open", &link)(io::ErrorKind::NotFound.into()),
        ] {
            assert!(
                matches!(&error, Error::Format(crate::error::FormatError::Missing { path, missing, .. }) if *path == link && missing == "../../blobs/5f2c"),
                "{error}"
            );
        }
        let error = refused("open", &link)(io::ErrorKind::PermissionDenied.into());
        assert!(
            matches!(&error, Error::Storage(StorageError::Io { source, .. }) if source.to_string().contains("../../blobs/5f2c")),
            "{error}"
        );
    }

    #[test]
    fn folder_is_listed_sorted_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b", "a", "c"] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        fs::create_dir(folder.path().join("aa")).unwrap();
        let listed = list(folder.path()).unwrap();
        assert_eq!(listed.iter().map(|entry| entry.name.to_str().unwrap()).collect::<Vec<_>>(), ["a", "aa", "b", "c"]);
        assert_eq!(listed.iter().filter(|entry| entry.is_folder().unwrap()).count(), 1);
        for path in ["a", "nothing"] {
            let path = folder.path().join(path);
            assert!(matches!(list(&path), Err(Error::Storage(StorageError::Io { path: named, .. })) if named == path));
        }
    }
}
