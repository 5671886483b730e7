//! DCP's Hugging Face storage: safetensors files that contain boxes of tensors, one file for each rank that has boxes.
//!
//! ```text
//! shard-00001-model-00001-of-00001.safetensors  shard-00002-model-00001-of-00001.safetensors  ...
//! ```
//!
//! `DCP_SHARDING_INFO` in the `__metadata__` of a file gives the offsets of its boxes. The shapes of whole tensors are
//! not stored. `safetensors/sharding.rs` reads the boxes.
//!
//! Source: `torch/distributed/checkpoint/hf_storage.py`, `_hf_utils.py` and `_dedup_save_plans.py` (2.15).

mod complete;
pub(super) mod entry;
mod write;

pub use complete::{lone_shard, shortfall};
pub use write::reserve;
