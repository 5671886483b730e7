//! Checkpoints of DeepSpeed: the folder that `engine.save_checkpoint` writes for ZeRO stages 0 to 3.
//!
//! ```text
//! latest                                           the name of the newest folder
//! global_step10/
//!   mp_rank_00_model_states.pt                     stages 1 and 2: the module, names and shapes
//!   zero_pp_rank_0_mp_rank_00_model_states.pt      stage 3: names, shapes, buffers, a part of frozen parameters
//!   zero_pp_rank_0_mp_rank_00_optim_states.pt      one partition: masters and optimizer state as vectors
//!   layer_00-model_states.pt                       pipeline: the module of one layer
//!   layer_0_expert_2_mp_rank_00_model_states.pt    the module of one expert
//!   expp_rank_0_mp_rank_00_optim_states.pt         stage 0 with experts: the optimizer of one expert-parallel rank
//! ```
//!
//! The files of each model-parallel rank (`mp_rank_MM`) form a ZeRO job of their own, whose parameters are joined: those of
//! all stages of a pipeline, and the shards of tensor-parallel ranks. The user declares how the ranks have cut the parameters if the
//! files do not describe it.
//!
//! The vectors of a partition have elements of many parameters. Each parameter becomes a tensor of boxes, and each box is
//! at an offset of a vector: nothing is put together in memory. Everything in the files is untrusted.
//!
//! Source: `engine.py`, `zero/stage_1_and_2.py`, `zero/stage3.py`, `bf16_optimizer.py` in `deepspeed/runtime`, and
//! `deepspeed/utils/zero_to_fp32.py` and `deepspeed/checkpoint` (0.19.8).

pub(super) mod assemble;
pub(super) mod bytes;
mod declared;
pub(super) mod entry;
mod expert_ranks;
mod experts;
pub(super) mod fields;
pub(super) mod folder;
pub(super) mod frozen;
pub(super) mod join;
mod mappings;
pub(super) mod model;
pub(super) mod names;
pub(super) mod optimizer;
mod partitions;
pub(super) mod read;
pub(super) mod tensor_parallel;
pub(super) mod ties;
mod whole_masters;

pub use model::OWN_KEYS;
pub use names::{has_module, is_states};
