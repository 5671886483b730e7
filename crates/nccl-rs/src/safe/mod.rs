//! Communicators that look after themselves, over buffers that others own.
//!
//! What cannot be checked is promised once, where a type implements [`DeviceBuffer`] or [`DeviceStream`], or where a
//! library is loaded; all other calls are safe.

mod communicator;
mod device;
mod group;
mod library;
mod wait;

pub use communicator::{Communicator, Config, Place};
pub use device::{DeviceBuffer, DeviceStream, DeviceView, DeviceViewMut};
pub use group::Group;
pub use library::{Library, UniqueId};
pub use wait::Wait;
