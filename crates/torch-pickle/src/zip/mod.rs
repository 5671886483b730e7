//! torch.save archives: ZIP files with only uncompressed entries, read and laid out without reading or writing tensor
//! data, except to check checksums.
//!
//! Source of the layout: `caffe2/serialize/inline_container.cc` (`PyTorchStreamReader`, `PyTorchStreamWriter`).

mod error;
mod frame;
mod read;
mod write;

pub use error::ArchiveError;
pub use frame::Frame;
pub use read::{Archive, Record, data_offset};
pub use write::{ArchiveLayout, ArchiveWriter, Checksum, Span};
