//! The safe layer. Its communicators detect errors and abort themselves, and their buffers belong to the caller.
//!
//! Only implementing [`DeviceBuffer`] or [`DeviceStream`] and loading a library is `unsafe`; all other calls are safe.

mod communicator;
mod device;
mod group;
mod library;
mod wait;

pub use communicator::{Communicator, Config, RankPosition};
pub use device::{DeviceBuffer, DeviceStream, DeviceView, DeviceViewMut};
pub use group::GroupCall;
pub use library::{Library, UniqueId};
pub use wait::Wait;
