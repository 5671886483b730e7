//! The error type of GPUs.

/// A GPU, or a library for it, refuses an operation.
#[derive(Debug, thiserror::Error)]
#[error("GPU: {op}: {detail}")]
#[non_exhaustive]
pub struct DeviceError {
    /// The operation.
    pub op: &'static str,
    /// The reason, in the words of the driver or library where it gives one.
    pub detail: String,
    /// The next step for the user.
    pub hint: Option<String>,
}
