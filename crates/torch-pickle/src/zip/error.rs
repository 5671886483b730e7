//! Errors of reading an archive.

use std::io;

/// An error of reading an archive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// The archive is damaged, or the bytes are not an archive.
    #[error("{at}: expected {expected}, found {found}")]
    Malformed {
        /// The part of the archive with the error, or the position in the source in bytes.
        at: String,
        /// The expected content.
        expected: String,
        /// The content that was found.
        found: String,
    },

    /// An entry of the archive is compressed. torch.save stores entries uncompressed, so another tool has repacked the
    /// archive.
    #[error("entry `{entry}` is compressed")]
    Compressed {
        /// The name of the entry.
        entry: String,
    },

    /// The archive was written by torch.jit.save.
    #[error("a TorchScript archive, not a checkpoint")]
    TorchScript,

    /// The source could not be read. The field is the error that its [`ReadAt`](crate::ReadAt) returned.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl ArchiveError {
    pub(super) fn malformed(at: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Malformed { at: at.into(), expected: expected.into(), found: found.into() }
    }
}
