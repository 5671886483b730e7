//! Errors of the file system, and errors for files that are not trusted.

use std::io;
use std::path::PathBuf;

/// An error of the file system, or a file that is not trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant shows what its fields are")]
pub enum StorageError {
    /// The operating system reported an error for the operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    /// The file or folder may belong to another user.
    #[error("{found}")]
    Untrusted { found: Untrusted, hint: String },
}

/// A file or folder that dtshard neither writes to nor deletes, because another user may have put it there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant shows what its fields are")]
pub enum Untrusted {
    /// The path is a symbolic link.
    #[error("{} is a link to {}, which is not followed", path.display(), target.display())]
    Link { path: PathBuf, target: PathBuf },
    /// The file or folder belongs to another user.
    #[error("{} belongs to {owner}", path.display())]
    Owner { path: PathBuf, owner: String },
    /// The file has several hard links.
    #[error("{} has {names} hard links, so writing to it would change another file as well", path.display())]
    Names { path: PathBuf, names: u64 },
}

impl StorageError {
    /// Returns a function that adds the action and the path to an error of the operating system. If that error contains
    /// an [`Untrusted`], the path in the [`Untrusted`] is used.
    pub(crate) fn of(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| match source.downcast::<Untrusted>() {
            Ok(found) => Self::Untrusted { hint: found.hint(), found },
            Err(source) => Self::Io { action, path, source },
        }
    }

    /// Returns the hint: the next step for the user.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    Some("free space on that file system, or choose a destination on another one")
                }
                io::ErrorKind::NotFound => Some("check the path; a relative path starts at the current folder"),
                _ => None,
            },
            Self::Untrusted { hint, .. } => Some(hint),
        }
    }
}

impl Untrusted {
    fn hint(&self) -> String {
        match self {
            Self::Link { .. } => String::from("remove the link, or choose another destination"),
            Self::Owner { owner, .. } => {
                format!("ask {owner} to finish or remove it, or choose another destination")
            }
            Self::Names { .. } => String::from("remove the other hard links, or start again with options::restart"),
        }
    }
}

impl From<Untrusted> for io::Error {
    fn from(found: Untrusted) -> Self {
        Self::new(io::ErrorKind::PermissionDenied, found)
    }
}
