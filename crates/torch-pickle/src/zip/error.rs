//! Why an archive cannot be read.

use std::io;

/// Why an archive cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// The archive is damaged, or the bytes are no archive.
    #[error("{at}: expected {expected}, found {found}")]
    Malformed {
        /// Which part of the archive, or which byte of the source.
        at: String,
        /// What should be there.
        expected: String,
        /// What is there.
        found: String,
    },

    /// An entry is compressed. torch.save stores entries as they are, so another tool packed the archive again.
    #[error("entry `{entry}` is compressed")]
    Compressed {
        /// Name of the entry.
        entry: String,
    },

    /// The archive is one of torch.jit.save.
    #[error("a TorchScript archive, not a checkpoint")]
    TorchScript,

    /// The source cannot be read: the error that its [`ReadAt`](crate::ReadAt) returned.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl ArchiveError {
    pub(super) fn malformed(at: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Malformed { at: at.into(), expected: expected.into(), found: found.into() }
    }
}
