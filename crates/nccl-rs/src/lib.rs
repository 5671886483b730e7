//! NCCL, loaded at run time.
//!
//! A program that can use GPUs is also started where there are none. So nothing here is linked: NCCL is a file that is
//! opened when it is wanted ([`Library::load`]), and what is not there is an [`Error`] that says what was looked for.
//! Nothing panics, and before the first call nothing is paid.
//!
//! Peers of a collective may never come, and then NCCL waits for ever. So every [`Communicator`] is non-blocking: it is
//! polled, up to the limit of its [`Wait`], whose watch may end it before, and is aborted when that fails.
//!
//! There are three storeys, each usable by itself:
//!
//! | storey | what it is | what it promises |
//! |---|---|---|
//! | [`raw`] | types of `nccl.h` and a table of function pointers | names and layouts, nothing else |
//! | [`result`] | a method for each function, with NCCL's own words for what went wrong | every code is looked at |
//! | [`safe`], also here | [`Library`], [`UniqueId`], [`Communicator`], [`Group`] | sizes and ranks are checked, nothing leaks |
//!
//! **Units.** Buffers are told in bytes. NCCL counts elements; the safe storey divides by [`DataType::size`], and a
//! buffer that is no whole number of elements is refused.
//!
//! **CUDA** is not in here: [`DeviceBuffer`] and [`DeviceStream`] are implemented by whoever allocates, with any binding.
//!
//! Rules are those of `nccl.h` 2.30; what is called is in NCCL since 2.14, fp8 types since 2.24.
//!
//! ```no_run
//! use std::time::Duration;
//! use nccl::{Communicator, Config, DataType, DeviceBuffer, DeviceStream, DeviceView, DeviceViewMut, Library, Place};
//! use nccl::{UniqueId, Wait};
//!
//! fn shift(
//!     id: UniqueId,
//!     place: Place,
//!     mine: &impl DeviceBuffer,
//!     theirs: &mut impl DeviceBuffer,
//!     stream: &impl DeviceStream,
//! ) -> nccl::Result<()> {
//!     // SAFETY: what has the name of NCCL on this machine is NCCL.
//!     let library = unsafe { Library::load(None) }?;
//!     let mut peers = Communicator::new(&library, place, &id, &Config::default(), Wait::up_to(Duration::from_mins(1)))?;
//!     let (next, previous) = ((place.rank + 1) % place.ranks, (place.rank + place.ranks - 1) % place.ranks);
//!     peers.group(stream, |group| {
//!         group.send(DeviceView::of(mine), DataType::Uint8, next)?;
//!         group.recv(DeviceViewMut::of(theirs), DataType::Uint8, previous)
//!     })?;
//!     // ... wait for the stream, looking at peers.status() meanwhile ...
//!     peers.finalize()
//! }
//! ```

#![allow(unsafe_code, reason = "this is a binding: each block says why it may")]
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
    Communicator, Config, DeviceBuffer, DeviceStream, DeviceView, DeviceViewMut, Group, Library, Place, UniqueId, Wait,
};
pub use version::Version;
