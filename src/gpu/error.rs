//! The error type for failures of GPUs and of their libraries.

/// An error of an operation on a GPU, or of a library for GPUs.
#[derive(Debug, thiserror::Error)]
#[error("GPU: {op}: {detail}")]
#[non_exhaustive]
pub struct DeviceError {
    /// The name of the operation that failed.
    pub op: &'static str,
    /// The reason of the failure, in the words of the driver or library if they give a text.
    pub detail: String,
    /// An instruction for the user, if there is one.
    pub hint: Option<String>,
}
