//! Why a node is not a value, and where in the decoded value it lies.

use thiserror::Error;

use super::path;

/// Why a node is not a value. Paths start at the decoded node and are empty for itself.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// A name that is on none of the lists.
    #[error("{}`{symbol}` is not among the Python objects that are known to be plain data", place(path))]
    Forbidden {
        /// The name: `os.system`.
        symbol: String,
        /// Where it is: `state['layer.0']`.
        path: String,
    },
    /// Too much of something.
    #[error("{}{what}", place(path))]
    Limit {
        /// Which bound it exceeds.
        what: String,
        /// Where it is: `state['layer.0']`.
        path: String,
    },
    /// Data that is not what Python writes.
    #[error("{}{what}", place(path))]
    Malformed {
        /// The fault.
        what: String,
        /// Where it is: `state['layer.0']`.
        path: String,
    },
}

fn place(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!("{path}: ") }
}

impl DecodeError {
    /// An error of the node at hand, whose path is still empty.
    pub fn forbidden(symbol: impl Into<String>) -> Self {
        Self::Forbidden { symbol: symbol.into(), path: String::new() }
    }

    /// An error of the node at hand, whose path is still empty.
    pub fn malformed(what: impl Into<String>) -> Self {
        Self::Malformed { what: what.into(), path: String::new() }
    }

    pub(super) fn limit(what: impl Into<String>) -> Self {
        Self::Limit { what: what.into(), path: String::new() }
    }

    /// Where it is.
    pub fn path(&self) -> &str {
        match self {
            Self::Forbidden { path, .. } | Self::Limit { path, .. } | Self::Malformed { path, .. } => path,
        }
    }

    /// `path` as seen from outside of `prefix`.
    #[must_use]
    pub fn join(prefix: &str, path: &str) -> String {
        path::join(prefix, path)
    }

    /// The same error seen from outside of `prefix`, a path like `state['layer.0']`.
    pub fn under(mut self, prefix: &str) -> Self {
        let (Self::Forbidden { path, .. } | Self::Limit { path, .. } | Self::Malformed { path, .. }) = &mut self;
        *path = path::join(prefix, path);
        self
    }
}
