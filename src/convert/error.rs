//! The error for options that ask for something impossible.

/// An error about options that ask for something impossible.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
#[non_exhaustive]
pub struct UsageError {
    /// A sentence that names the impossible request and the reason.
    pub message: String,
    /// An instruction that names the option to use instead.
    pub hint: Option<String>,
}

impl UsageError {
    /// Returns an error with a message, and with a hint if `hint` is given.
    pub fn new(message: impl Into<String>, hint: Option<String>) -> Self {
        Self { message: message.into(), hint }
    }
}
