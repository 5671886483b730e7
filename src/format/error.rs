//! Errors about checkpoint files and their content.

use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::layout::Rank;

/// The hint of errors about the content of a flat layout.
pub(crate) const FLAT_LAYOUT_HINT: &str =
    "fix or regenerate the file; docs/how-to/fsdp1.md describes the flat layout format";

/// A file or value that does not match its format.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant shows what its fields are")]
pub enum FormatError {
    /// A file whose content does not follow the rules of its format.
    #[error("{}: {at}: expected {expected}, found {found}", path.display())]
    Malformed { path: PathBuf, at: String, expected: String, found: String, hint: Option<Box<str>> },

    /// Files that do not exist, although other files of the checkpoint name them.
    #[error("{}: {at}: expected {expected}, missing: {missing}", path.display())]
    Missing { path: PathBuf, at: String, expected: String, missing: String, hint: Option<String> },

    /// A file or value that this version of dtshard cannot convert, or cannot write in the requested format.
    #[error("{what}")]
    Unsupported { what: String, hint: String },
}

/// A fault at a position in a document, such as a JSON file or a pickle. The caller adds the path of the document
/// later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// The position in the document.
    pub at: String,
    /// The expected content.
    pub expected: String,
    /// The content that was found.
    pub found: String,
}

impl Wrong {
    /// Returns a fault at a position.
    pub fn new(at: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self { at: at.into(), expected: expected.into(), found: found.into() }
    }

    /// Returns a fault from the message of another error. If `message` has the form `expected ..., found ...`, both
    /// texts of the fault come from `message`, so that the final message has the word `expected` only once.
    pub fn from_message(at: impl Into<String>, expected: &str, message: &str) -> Self {
        if let Some((expected, found)) = message.strip_prefix("expected ").and_then(|rest| rest.rsplit_once(", found "))
        {
            return Self::new(at, expected, found);
        }
        let Some((subject, rest)) = message.split_once(": expected ") else {
            return Self::new(at, expected, message);
        };
        match rest.rsplit_once(", found ") {
            Some((expected, found)) => Self::new(at, format!("{expected} ({subject})"), found),
            None => Self::new(at, rest, subject),
        }
    }

    /// Returns this fault as an error of the file at `path`.
    pub fn within(self, path: &Path) -> FormatError {
        let Self { at, expected, found } = self;
        FormatError::Malformed { path: path.to_path_buf(), at, expected, found, hint: None }
    }
}

impl FormatError {
    /// Returns the hint for the user.
    pub fn hint(&self) -> &str {
        match self {
            Self::Malformed { hint: Some(hint), .. } => hint,
            Self::Malformed { path, .. } if is_written_by_hand(path) => FLAT_LAYOUT_HINT,
            Self::Malformed { .. } => {
                "the file is damaged or was not completely written; `dtshard verify` lists every fault"
            }
            Self::Missing { hint, .. } => {
                hint.as_deref().unwrap_or("copy the missing files into the folder, or save the checkpoint again")
            }
            Self::Unsupported { hint, .. } => hint,
        }
    }

    /// Returns the error for a file whose name states the rank `named`, but whose content was saved by the rank
    /// `saved_by`. `class` is the class of the tensor at the position `at`, which shows the saving rank.
    pub(crate) fn wrong_rank(path: &Path, at: &str, named: Rank, class: &str, saved_by: Rank) -> Self {
        Self::Malformed {
            path: path.to_path_buf(),
            at: at.to_owned(),
            expected: format!("the file of rank {named}"),
            found: format!("a {class} saved by rank {saved_by}, so the file name has the wrong rank"),
            hint: Some("rename the file to the rank that saved it, if files were swapped or renamed".into()),
        }
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Malformed { .. } => "malformed",
            Self::Missing { .. } => "missing",
            Self::Unsupported { .. } => "unsupported",
        }
    }

    /// Returns the fields that describe this error in a JSON document.
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

    /// Returns the path of the damaged file and the hint of this error, so that the caller can set a more specific
    /// hint. Returns `None` for any other error, and for a file that users may write by hand.
    pub(crate) fn damaged_mut(&mut self) -> Option<(&Path, &mut Option<Box<str>>)> {
        match self {
            Self::Malformed { path, hint, .. } if !is_written_by_hand(path) => Some((path, hint)),
            _ => None,
        }
    }
}

/// Returns true for a kind of file that users may write by hand, such as a flat layout. Returns false for the index of
/// safetensors or torch files.
fn is_written_by_hand(path: &Path) -> bool {
    let is_index = path.file_name().is_some_and(|name| name.to_string_lossy().contains(".index."));
    let is_ours = path.file_name().is_some_and(|name| name == "layout.json");
    path.extension().is_some_and(|extension| extension == "json") && !is_index && !is_ours
}
