//! The error of a request that cannot be met.

/// Options ask for something that cannot be done.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
#[non_exhaustive]
pub struct UsageError {
    /// What cannot be done, and why.
    pub message: String,
    /// What to ask for instead.
    pub hint: Option<String>,
}

impl UsageError {
    /// Returns the error of a message, and a hint if there is one.
    pub fn new(message: impl Into<String>, hint: Option<String>) -> Self {
        Self { message: message.into(), hint }
    }
}
