//! The errors of the library. Each area has its own error type, and [`Error`] contains all of them.
//!
//! A message names the file or tensor, the expected value and the value found. [`Error::hint`] gives the next step for
//! the user. Messages and hints name an option as `options::max_memory`, by its field in [`options`](crate::options).

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

pub use crate::catalog::error::{CatalogError, CoverageKind};
pub use crate::comm::error::{CommError, Peer};
pub use crate::convert::error::UsageError;
pub(crate) use crate::exec::stopped::STOPPING;
pub use crate::exec::stopped::Stopped;
pub use crate::format::error::FormatError;
pub(crate) use crate::format::error::Wrong;
pub use crate::gpu::error::DeviceError;
pub use crate::layout::LayoutError;
pub use crate::storage::error::{StorageError, Untrusted};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any failure of the library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant shows what its fields are")]
pub enum Error {
    /// An operation on a file or folder failed.
    #[error(transparent)]
    Storage(#[from] StorageError),

    /// A file is damaged, missing, or of an unsupported kind.
    #[error(transparent)]
    Format(#[from] FormatError),

    /// The chunks of a tensor do not fit together, or ranks stored different values where one value is expected.
    #[error(transparent)]
    Catalog(#[from] CatalogError),

    /// A layout contradicts itself, or cannot be applied to a tensor.
    #[error(transparent)]
    Layout(#[from] LayoutError),

    /// Options contradict each other or the checkpoint, or request something that is not possible.
    #[error(transparent)]
    Usage(#[from] UsageError),

    /// Another process of the run failed.
    #[error(transparent)]
    Comm(#[from] CommError),

    /// A GPU, or a library for it, failed.
    #[error(transparent)]
    Device(#[from] DeviceError),

    /// A signal stopped the run.
    #[error(transparent)]
    Stopped(#[from] Stopped),

    /// The error `source`, whose message shows only some names of a list; `names` has the complete list.
    #[error("{source}")]
    Naming { names: Vec<String>, source: Box<Error> },

    /// The error `source`, which is about a tensor of the checkpoint at `path`.
    #[error("{}: {source}", path.display())]
    Within { path: PathBuf, source: Box<Error> },
}

impl Error {
    /// Returns a function for `map_err` that converts an error of the operating system to an [`Error`], with the action
    /// (such as `open`) and the path.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let of = StorageError::of(action, path);
        move |source| of(source).into()
    }

    /// Returns a [`FormatError::Malformed`].
    pub fn malformed(
        path: &Path,
        at: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Wrong::new(at, expected, found).within(path).into()
    }

    /// Returns a [`FormatError::Missing`] without a hint.
    pub fn missing(
        path: &Path,
        at: impl Into<String>,
        expected: impl Into<String>,
        missing: impl Into<String>,
    ) -> Self {
        let (at, expected, missing) = (at.into(), expected.into(), missing.into());
        FormatError::Missing { path: path.to_path_buf(), at, expected, missing, hint: None }.into()
    }

    /// Returns a [`FormatError::Unsupported`].
    pub fn unsupported(what: impl Into<String>, hint: impl Into<String>) -> Self {
        FormatError::Unsupported { what: what.into(), hint: hint.into() }.into()
    }

    /// Returns a [`UsageError`].
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        UsageError::new(message, Some(hint.into())).into()
    }

    /// Returns a [`CommError`] about process `rank` (a dtshard process) and the operation `op`.
    pub fn comm(rank: u32, op: &'static str, detail: impl Into<String>) -> Self {
        CommError { rank: rank.into(), op, detail: detail.into(), hint: None }.into()
    }

    /// Returns this error with the complete list of names. The message of the error may show only some of these names.
    #[must_use]
    pub fn naming(self, names: &[impl AsRef<str>]) -> Self {
        let names = names.iter().map(|name| name.as_ref().to_owned()).collect();
        Self::Naming { names, source: Box::new(self) }
    }

    /// Returns the complete list of names that [`Error::naming`] added; `None` if the error has no such list.
    #[must_use]
    pub fn names(&self) -> Option<&[String]> {
        match self {
            Self::Naming { names, .. } => Some(names),
            Self::Within { source, .. } => source.names(),
            _ => None,
        }
    }

    /// Adds a hint to an error about missing files, if the error has no hint.
    #[must_use]
    pub(crate) fn missing_hint(mut self, text: &str) -> Self {
        if let Self::Format(FormatError::Missing { hint, .. }) = self.innermost_mut() {
            hint.get_or_insert_with(|| text.to_owned());
        }
        self
    }

    /// Returns the innermost error, without the wrappers `Within` and `Naming`.
    fn innermost(&self) -> &Self {
        match self {
            Self::Within { source, .. } | Self::Naming { source, .. } => source.innermost(),
            error => error,
        }
    }

    fn innermost_mut(&mut self) -> &mut Self {
        match self {
            Self::Within { source, .. } | Self::Naming { source, .. } => source.innermost_mut(),
            error => error,
        }
    }

    /// If the error is about a tensor and was wrapped in [`Error::Within`], returns the path of the checkpoint that
    /// contains the tensor.
    fn folder(&self) -> Option<&Path> {
        match self {
            Self::Within { path, .. } => Some(path),
            Self::Naming { source, .. } => source.folder(),
            _ => None,
        }
    }

    /// If the error is about a damaged file, returns the path of the file and the hint, so that the caller can set a
    /// more specific hint.
    pub(crate) fn damaged_mut(&mut self) -> Option<(&Path, &mut Option<Box<str>>)> {
        match self.innermost_mut() {
            Self::Format(error) => error.damaged_mut(),
            _ => None,
        }
    }

    /// Returns the other process that the error names, for modification; `None` if the error names no other process.
    pub(crate) fn peer_mut(&mut self) -> Option<&mut Peer> {
        match self {
            Self::Comm(error) => Some(&mut error.rank),
            Self::Stopped(error) => error.rank.as_mut(),
            _ => None,
        }
    }

    /// Adds the path of the checkpoint to an error of the kind [`Error::Catalog`], which names a tensor but no file.
    /// Returns any other error unchanged.
    #[must_use]
    pub fn within(self, path: &Path) -> Self {
        match self {
            Self::Catalog(_) => Self::Within { path: path.to_path_buf(), source: Box::new(self) },
            Self::Naming { names, source } => Self::Naming { names, source: Box::new(source.within(path)) },
            error => error,
        }
    }

    /// Returns the hint: the next step for the user, as an imperative sentence.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Within { source, .. } | Self::Naming { source, .. } => source.hint(),
            Self::Storage(error) => error.hint(),
            Self::Format(error) => Some(error.hint()),
            Self::Catalog(error) => error.hint(),
            Self::Layout(error) => Some(error.hint()),
            Self::Usage(UsageError { hint, .. })
            | Self::Comm(CommError { hint, .. })
            | Self::Device(DeviceError { hint, .. }) => hint.as_deref(),
            Self::Stopped(_) => None,
        }
    }

    /// Returns the JSON document of the error: `kind`, `message`, `file`, `fqn`, `expected`, `found`, `hint`, and
    /// `names` if the error lists names.
    #[must_use]
    pub fn to_json(&self) -> Json {
        let mut document = json!({
            "kind": self.kind(),
            "message": self.to_string(),
            "file": self.folder().map(|path| path.display().to_string()),
            "fqn": self.fqn(),
            "expected": null,
            "found": null,
            "hint": self.hint(),
        });
        let fields = match self.innermost() {
            Self::Storage(StorageError::Io { path, .. }) => json!({ "file": path.display().to_string() }),
            Self::Format(error) => error.fields(),
            Self::Catalog(error) => error.fields(),
            Self::Layout(error) => error.fields(),
            _ => json!({}),
        };
        for (name, value) in fields.as_object().into_iter().flatten() {
            document[name] = value.clone();
        }
        if let Some(names) = self.names() {
            document["names"] = json!(names);
        }
        document
    }

    /// Returns the kind of the error, as the field `kind` of the JSON document has it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Within { source, .. } | Self::Naming { source, .. } => source.kind(),
            Self::Storage(StorageError::Io { .. }) => "io",
            Self::Format(error) => error.kind(),
            Self::Catalog(error) => error.kind(),
            Self::Comm(_) => "comm",
            Self::Device(_) => "device",
            Self::Layout(_) => "layout",
            Self::Stopped(_) => "stopped",
            Self::Usage(_) | Self::Storage(StorageError::Untrusted { .. }) => "usage",
        }
    }

    /// Returns true if the error is about the content of a checkpoint: damaged or missing files, or tensors that do not
    /// fit together. `verify` reports such an error as a finding (exit 1), every other verb as bad input (exit 2).
    #[must_use]
    pub fn is_about_content(&self) -> bool {
        matches!(
            self.innermost(),
            Self::Format(FormatError::Malformed { .. } | FormatError::Missing { .. }) | Self::Catalog(_)
        )
    }

    /// Returns the name of the tensor or object that the error is about.
    #[must_use]
    pub fn fqn(&self) -> Option<&str> {
        match self.innermost() {
            Self::Catalog(error) => Some(error.fqn()),
            Self::Layout(error) => error.fqn(),
            _ => None,
        }
    }

    /// Returns the message without the tensor name, for tables that print names in a separate column.
    #[must_use]
    pub fn detail(&self) -> String {
        let error = self.innermost();
        let whole = error.to_string();
        let prefix = error.fqn().map(|fqn| format!("{fqn}: ")).unwrap_or_default();
        whole.strip_prefix(&prefix).unwrap_or(&whole).to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn operating_system_error_is_the_source_of_an_io_error() {
        let error = Error::io("open", "out")(io::ErrorKind::NotFound.into());
        let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(source.map(io::Error::kind), Some(io::ErrorKind::NotFound));
        assert_eq!(error.kind(), "io");
    }

    #[test]
    fn untrusted_link_is_a_usage_error_that_names_the_path_once() {
        let link = Untrusted::Link { path: "out".into(), target: "other".into() };
        let error = Error::io("open", "folder")(link.into());
        assert!(matches!(&error, Error::Storage(StorageError::Untrusted { .. })), "{error:?}");
        assert_eq!(error.to_string(), "out is a link to other, which is not followed");
        assert_eq!((error.kind(), error.hint()), ("usage", Some("remove the link, or choose another destination")));
        assert!(error.to_json()["file"].is_null());
    }

    #[test]
    fn tensor_error_in_a_checkpoint_keeps_its_kind_name_and_source() {
        let (region, detail) = (String::from("[0, 2)"), String::from("no chunk"));
        let gap = CatalogError::Coverage { fqn: "w".into(), kind: CoverageKind::Gap, region, detail, hint: None };
        let error = Error::from(gap).naming(&["a", "b"]).within(Path::new("ckpt"));
        assert_eq!(error.to_string(), "ckpt: w: gap at [0, 2): no chunk");
        assert_eq!((error.kind(), error.fqn(), error.is_about_content()), ("coverage", Some("w"), true));
        let document = error.to_json();
        assert_eq!((&document["file"], &document["names"]), (&json!("ckpt"), &json!(["a", "b"])));
        let names: Vec<&str> = document.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(names, ["kind", "message", "file", "fqn", "expected", "found", "hint", "names"]);
        assert!(error.source().and_then(|source| source.source()).is_some());
    }
}
