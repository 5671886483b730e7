//! Errors about files and what is in them.

use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

/// A file or value that cannot be read as its format says.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Bytes break the rules of their format.
    #[error("{}: {at}: expected {expected}, found {found}", path.display())]
    Malformed { path: PathBuf, at: String, expected: String, found: String, hint: Option<Box<str>> },

    /// Files are missing that other files name.
    #[error("{}: {at}: expected {expected}, missing: {missing}", path.display())]
    Missing { path: PathBuf, at: String, expected: String, missing: String, hint: Option<String> },

    /// This version does not convert such a file or value, or does not write it in the wanted format.
    #[error("{what}")]
    Unsupported { what: String, hint: String },
}

/// A fault at a place in a document whose path is added later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    pub at: String,
    pub expected: String,
    pub found: String,
}

impl Wrong {
    pub fn new(at: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self { at: at.into(), expected: expected.into(), found: found.into() }
    }

    #[must_use]
    pub fn within(self, path: &Path) -> FormatError {
        let Self { at, expected, found } = self;
        FormatError::Malformed { path: path.to_path_buf(), at, expected, found, hint: None }
    }
}

impl FormatError {
    /// Returns what the reader can do next.
    #[must_use]
    pub fn hint(&self) -> &str {
        match self {
            Self::Malformed { hint: Some(hint), .. } => hint,
            Self::Malformed { path, .. } if is_written_by_hand(path) => {
                "mend it, or write it anew; docs/how-to/fsdp1.md tells what a flat layout says"
            }
            Self::Malformed { .. } => {
                "the file is damaged or was not completely written; `dtshard verify` lists every fault"
            }
            Self::Missing { hint, .. } => {
                hint.as_deref().unwrap_or("copy the missing files into the folder, or save the checkpoint again")
            }
            Self::Unsupported { hint, .. } => hint,
        }
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Malformed { .. } => "malformed",
            Self::Missing { .. } => "missing",
            Self::Unsupported { .. } => "unsupported",
        }
    }

    /// Returns the fields of the JSON document that this error knows.
    pub(crate) fn fields(&self) -> Json {
        match self {
            Self::Malformed { path, at, expected, found, .. } => {
                json!({ "file": path.display().to_string(), "fqn": at, "expected": expected, "found": found })
            }
            Self::Missing { path, at, expected, missing, .. } => {
                let found = format!("missing: {missing}");
                json!({ "file": path.display().to_string(), "fqn": at, "expected": expected, "found": found })
            }
            Self::Unsupported { .. } => json!({}),
        }
    }

    /// Returns a damaged file and the place of a hint that says more than the usual one.
    pub(crate) fn damaged_mut(&mut self) -> Option<(&Path, &mut Option<Box<str>>)> {
        match self {
            Self::Malformed { path, hint, .. } if !is_written_by_hand(path) => Some((path, hint)),
            _ => None,
        }
    }
}

/// Whether a person may have written the file: a flat layout, but no index of safetensors or torch files.
fn is_written_by_hand(path: &Path) -> bool {
    let is_index = path.file_name().is_some_and(|name| name.to_string_lossy().contains(".index."));
    let is_ours = path.file_name().is_some_and(|name| name == "layout.json");
    path.extension().is_some_and(|extension| extension == "json") && !is_index && !is_ours
}
