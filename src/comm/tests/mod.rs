//! Communicators, each by the same cases.

pub(crate) mod conformance;
pub(crate) mod local;
#[cfg(feature = "mpi")]
mod mpi;
