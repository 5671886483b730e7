//! Errors of decoding a node to a value, with the path of the node in the decoded value.

use thiserror::Error;

use super::path;

/// An error of decoding a node to a value. The error has the path from the decoded node to the wrong node. The path is
/// empty if the decoded node itself is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The pickle has the name of a class or function that is not on a list of allowed names.
    #[error("{}`{symbol}` is not among the Python objects that are known to be plain data", place(path))]
    Forbidden {
        /// The name: `os.system`.
        symbol: String,
        /// The path of the node: `state['layer.0']`.
        path: String,
    },
    /// A limit was exceeded.
    #[error("{}{what}", place(path))]
    Limit {
        /// The limit that was exceeded.
        what: String,
        /// The path of the node: `state['layer.0']`.
        path: String,
    },
    /// The node is not data that Python would write.
    #[error("{}{what}", place(path))]
    Malformed {
        /// The description of the error.
        what: String,
        /// The path of the node: `state['layer.0']`.
        path: String,
    },
}

fn place(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!("{path}: ") }
}

impl DecodeError {
    /// Returns an error about the node that is being decoded, with an empty path. [`Self::under`] adds the path of the
    /// node.
    pub fn forbidden(symbol: impl Into<String>) -> Self {
        Self::Forbidden { symbol: symbol.into(), path: String::new() }
    }

    /// Returns an error about the node that is being decoded, with an empty path. [`Self::under`] adds the path of the
    /// node.
    pub fn malformed(what: impl Into<String>) -> Self {
        Self::Malformed { what: what.into(), path: String::new() }
    }

    pub(super) fn limit(what: impl Into<String>) -> Self {
        Self::Limit { what: what.into(), path: String::new() }
    }

    /// Returns the path of the node that caused the error.
    pub fn path(&self) -> &str {
        match self {
            Self::Forbidden { path, .. } | Self::Limit { path, .. } | Self::Malformed { path, .. } => path,
        }
    }

    /// Returns the path that begins with `prefix` and continues with `path`.
    #[must_use]
    pub fn join(prefix: &str, path: &str) -> String {
        path::join(prefix, path)
    }

    /// Returns the error with `prefix`, a path such as `state['layer.0']`, in front of its path.
    pub fn under(mut self, prefix: &str) -> Self {
        let (Self::Forbidden { path, .. } | Self::Limit { path, .. } | Self::Malformed { path, .. }) = &mut self;
        *path = path::join(prefix, path);
        self
    }
}
