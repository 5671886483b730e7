//! FSDP1's `LOCAL_STATE_DICT`: a file a rank, with that rank's shard of every flat parameter.
//!
//! Source: `torch/distributed/fsdp/_state_dict_utils.py`, `torch/distributed/fsdp/_flat_param.py`.

pub mod document;
mod write;

pub use write::{FlatTarget, merged, reserve};

/// What writes a flat layout from a live model, in few lines, for an error to show; `docs/fsdp1.md` has the whole.
pub const SNIPPET: &str = "TODO";
