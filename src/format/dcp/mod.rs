//! PyTorch Distributed Checkpoint (DCP) directories: a `.metadata` pickle and data files of torch.save items.
//!
//! Source: `torch/distributed/checkpoint/metadata.py`, `filesystem.py`, `default_planner.py`.

pub(super) mod entry;
mod file_layout;
mod known;
mod metadata;
mod mirror_objects;
mod read;
mod write;
mod write_metadata;

pub use mirror_objects::{look_at, objects};
pub use read::{metadata_files, read, resolve};
pub use write::{Shards, reserve};

/// The Python module that defines most classes in `.metadata`.
const METADATA: &str = "torch.distributed.checkpoint.metadata";
