//! FSDP1's `LOCAL_STATE_DICT`: a file a rank, with that rank's shard of every flat parameter.
//!
//! Source: `torch/distributed/fsdp/_state_dict_utils.py`, `torch/distributed/fsdp/_flat_param.py`.

pub mod document;
pub mod write;
