//! The error type of GPUs.

/// An operation that failed on a GPU, or in a library for GPUs.
#[derive(Debug, thiserror::Error)]
#[error("GPU: {op}: {detail}")]
#[non_exhaustive]
pub struct DeviceError {
    /// The operation that failed.
    pub op: &'static str,
    /// The reason, as text of the driver or library if it provides one.
    pub detail: String,
    /// The next step for the user.
    pub hint: Option<String>,
}
