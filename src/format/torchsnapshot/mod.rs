//! Snapshots of torchsnapshot: the folder that `Snapshot.take` writes.
//!
//! ```text
//! .snapshot_metadata     the manifest: every entry of every rank, with the location of its data
//! 0/model/fc.weight      a tensor of rank 0, as raw bytes
//! replicated/...         tensors and objects that all ranks have in common
//! sharded/...            shards of ShardedTensors and DTensors
//! batched/UUID           a slab: several tensors one after the other, each at a byte range
//! ```
//!
//! Shapes and boxes count elements; byte ranges are in bytes. Everything in the manifest is untrusted.
//!
//! Source: `torchsnapshot/manifest.py`, `manifest_ops.py`, `flatten.py`, `serialization.py`, `io_preparers/` (0.1.0 and
//! the nightly release of 2024-07-26).

mod data;
pub(super) mod entry;
mod inflate;
mod manifest;
mod primitive;
mod read;
mod tensor;
mod yaml;

pub use data::add_value;
pub use read::read;

/// The name of the manifest in the folder of a snapshot.
pub const MANIFEST: &str = ".snapshot_metadata";
