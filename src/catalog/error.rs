//! Errors about tensors whose chunks do not fit together.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::TensorEntry;
use crate::layout::Region;

/// The chunks of a tensor do not hold every element exactly once, or ranks store different values of a tensor or object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant shows what its fields are")]
pub enum CatalogError {
    /// The chunks of a tensor do not hold every element of the tensor exactly once.
    #[error("{fqn}: {} at {region}: {detail}", kind.as_str())]
    Coverage { fqn: String, kind: CoverageKind, region: String, detail: String, hint: Option<String> },

    /// Ranks or replicas store different values where one value is expected.
    #[error("{}: {what} differs between {between}: {detail}", shown_name(fqn))]
    Conflict { fqn: String, what: &'static str, between: String, detail: String, hint: Option<String> },
}

/// Returns the name of a tensor or value for messages. The state dict itself has an empty name; for an empty name,
/// returns a description.
pub(crate) fn shown_name(fqn: &str) -> &str {
    if fqn.is_empty() { "the top of the state dict" } else { fqn }
}

/// The kind of coverage error: the way in which the chunks of a tensor fail to hold every element exactly once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CoverageKind {
    /// No chunk holds the elements of the region.
    Gap,
    /// Two chunks that are not replicas both hold the elements of the region.
    Overlap,
    /// A chunk reaches beyond the end of the tensor.
    OutOfBounds,
}

impl CoverageKind {
    /// Returns the word for this kind in messages and JSON documents.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Overlap => "overlap",
            Self::OutOfBounds => "out of bounds",
        }
    }
}

impl CatalogError {
    /// Returns the error about a chunk outside its tensor. `what` is the word for the saved data in the hint, such as
    /// `snapshot`, and `metadata` is the file that lists the chunk.
    #[must_use]
    pub fn chunk_out_of_bounds(entry: &TensorEntry, region: &Region, what: &str, metadata: &Path) -> Self {
        let metadata = metadata.display();
        Self::Coverage {
            fqn: entry.fqn.to_string(),
            kind: CoverageKind::OutOfBounds,
            region: region.to_string(),
            detail: format!("a chunk reaches beyond shape {:?}", entry.shape.as_slice()),
            hint: Some(format!("save the {what} again: {metadata} lists a chunk that is not inside its tensor")),
        }
    }

    /// Returns the hint for the user.
    pub fn hint(&self) -> Option<&str> {
        let (Self::Coverage { hint, .. } | Self::Conflict { hint, .. }) = self;
        hint.as_deref()
    }

    /// Returns the name of the tensor or value.
    pub fn fqn(&self) -> &str {
        let (Self::Coverage { fqn, .. } | Self::Conflict { fqn, .. }) = self;
        fqn
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Coverage { .. } => "coverage",
            Self::Conflict { .. } => "conflict",
        }
    }

    /// Returns the fields that this error adds to the JSON document of the error.
    pub(crate) fn fields(&self) -> Json {
        let (expected, found) = match self {
            Self::Coverage { kind, region, detail, .. } => {
                (String::from("every element exactly once"), format!("{} at {region}: {detail}", kind.as_str()))
            }
            Self::Conflict { what, between, detail, .. } => {
                (format!("the same from {between}"), format!("{what} differs: {detail}"))
            }
        };
        json!({ "fqn": self.fqn(), "expected": expected, "found": found })
    }
}
