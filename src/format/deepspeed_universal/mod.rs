//! Universal checkpoints of DeepSpeed: a folder for each trained parameter, with whole tensors.
//!
//! ```text
//! latest_universal                            the name of the newest folder
//! global_step10_universal/
//!   mp_rank_00_model_states.pt                stages 1 and 2: buffers, frozen parameters, names and shapes, counters
//!   zero_pp_rank_0_mp_rank_00_model_states.pt stage 3
//!   zero/optimizer_state.pt                   the options of the parameter groups
//!   zero/layers.0.weight/fp32.pt              the master weights of one parameter
//!   zero/layers.0.weight/exp_avg.pt           a moment, and so on for each value of the optimizer state
//!   zero/layers.0.weight/step.pt              the number of steps
//! ```
//!
//! DeepSpeed loads such a folder on any number of ranks. Everything in the files is untrusted.
//!
//! Source: `deepspeed/checkpoint/ds_to_universal.py` and `universal_checkpoint.py`,
//! `load_hp_checkpoint_state_from_checkpoint_dir` in `runtime/base_optimizer.py`,
//! `load_hp_checkpoint_state_from_checkpoint_dir_stage3` in `runtime/zero/stage3.py`, and `_load_checkpoint` in
//! `runtime/engine.py` (0.19.8, 0.14.4).

mod archives;
pub(super) mod entry;
mod job_state;
mod read;
mod write;

/// The text file beside a checkpoint that has the name of its folder.
pub const LATEST: &str = "latest_universal";
/// The folder of the parameters.
const FOLDER: &str = "zero";
/// The file in [`FOLDER`] with the options of the parameter groups.
const OPTIMIZER_FILE: &str = "optimizer_state.pt";
