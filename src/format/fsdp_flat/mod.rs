//! FSDP1's `LOCAL_STATE_DICT`: rank files that hold flat parameters.

pub mod document;
