//! NCCL, loaded at run time.
//!
//! A program that can use GPUs also runs on machines without GPUs. Therefore nothing is linked: [`Library::load`] opens
//! NCCL at run time. If there is no NCCL, `load` returns an [`Error`] with the file names that were tried. Nothing
//! panics, and there is no cost before the first call.
//!
//! If a peer never joins a collective, NCCL waits forever. Therefore every [`Communicator`] is non-blocking. A call
//! polls the communicator up to the limit of its [`Wait`], and the watch of the [`Wait`] may end the wait earlier. If a
//! call is not completed, the communicator is aborted.
//!
//! There are three layers. Each layer can be used without the layers below it in this table:
//!
//! | layer | contents | guarantees |
//! |---|---|---|
//! | [`raw`] | types of `nccl.h` and a table of function pointers | names and memory layouts only |
//! | [`result`] | one method for each function, with NCCL's error text | every return code is checked |
//! | [`safe`], re-exported here | [`Library`], [`UniqueId`], [`Communicator`], [`GroupCall`] | sizes and ranks are checked, nothing leaks |
//!
//! **Units.** Buffer lengths are in bytes. NCCL counts elements, so the safe layer divides by [`DataType::size`]. The
//! safe layer returns an error if the length of a buffer is not a multiple of the element size.
//!
//! **CUDA** is not included: the caller implements [`DeviceBuffer`] and [`DeviceStream`] with any CUDA binding.
//!
//! The declarations follow `nccl.h` 2.30. All functions exist since NCCL 2.14, the fp8 types since 2.24.
//!
//! ```no_run
//! use std::time::Duration;
//! use nccl::{Communicator, Config, DataType, DeviceBuffer, DeviceStream, DeviceView, DeviceViewMut, Library, RankPosition};
//! use nccl::{UniqueId, Wait};
//!
//! fn shift(
//!     id: UniqueId,
//!     place: RankPosition,
//!     mine: &impl DeviceBuffer,
//!     theirs: &mut impl DeviceBuffer,
//!     stream: &impl DeviceStream,
//! ) -> nccl::Result<()> {
//!     // SAFETY: the library with the name of NCCL on this machine is NCCL.
//!     let library = unsafe { Library::load(None) }?;
//!     let mut peers = Communicator::new(&library, place, &id, &Config::default(), Wait::up_to(Duration::from_mins(1)))?;
//!     let (next, previous) = ((place.rank + 1) % place.ranks, (place.rank + place.ranks - 1) % place.ranks);
//!     peers.group(stream, |group| {
//!         group.send(DeviceView::of(mine), DataType::Uint8, next)?;
//!         group.recv(DeviceViewMut::of(theirs), DataType::Uint8, previous)
//!     })?;
//!     // ... wait for the stream, and poll peers.status() meanwhile ...
//!     peers.finalize()
//! }
//! ```

#![allow(unsafe_code, reason = "this is a binding; each block states why it is sound")]
#![warn(missing_docs, clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc)]

mod element;
mod error;
pub mod raw;
pub mod result;
pub mod safe;
mod version;

pub use element::{DataType, RedOp};
pub use error::{Error, Result};
pub use safe::{
    Communicator, Config, DeviceBuffer, DeviceStream, DeviceView, DeviceViewMut, GroupCall, Library, RankPosition,
    UniqueId, Wait,
};
pub use version::Version;
