//! FSDP1's `LOCAL_STATE_DICT`: one file per rank, which holds that rank's shard of every flat parameter.
//!
//! Source: `torch/distributed/fsdp/_state_dict_utils.py`, `_flat_param.py`, `_optim_utils.py`.

pub mod document;
pub(super) mod entry;
pub mod order;
mod read;
mod unknown_layout;
mod write;

pub use read::{SeriesFiles, Unflattened, may_have_flat_state, read};
pub use unknown_layout::unknown_layout_error;
pub use write::{FlatTarget, PartSurvey, reserve, survey};
