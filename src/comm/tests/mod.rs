//! Runs the same conformance tests on every communicator.

pub(crate) mod conformance;
pub(crate) mod local;
#[cfg(feature = "mpi")]
mod mpi;
