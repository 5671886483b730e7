//! torch.save archives: ZIP files whose entries are all stored, read and written without touching tensor data.
//!
//! Source of the layout: `caffe2/serialize/inline_container.cc` (`PyTorchStreamReader`, `PyTorchStreamWriter`).

mod frame;
mod read;
mod write;

pub use frame::Frame;
pub use read::{Archive, data_offset, torch_script};
pub use write::{ArchiveWriter, Frames, Span};
