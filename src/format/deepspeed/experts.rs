//! The names of the parameters of experts (`deepspeed.moe.layer.MoE`).
//!
//! The files of experts have the numbers of the experts in the layer. In the optimizer files, each expert-parallel rank counts its
//! own experts from 0 on: with 4 experts on 2 ranks, expert 0 of rank 1 is expert 2 of the layer.
//!
//! Source: `_save_moe_checkpoint` in `deepspeed/runtime/engine.py`.

use std::collections::HashMap;

/// The part of the name of an expert's parameter before the number of the expert.
pub const EXPERTS: &str = ".deepspeed_experts.";

/// Divides the name of an expert's parameter into the part before the number of the expert, the number, and the part after
/// it.
pub fn split_expert(name: &str) -> Option<(&str, u64, &str)> {
    let start = name.find(EXPERTS)? + EXPERTS.len();
    let (number, rest) = name[start..].split_once('.')?;
    Some((&name[..start], number.parse().ok()?, rest))
}

/// Returns the name that a parameter of an expert has in the whole model. In the optimizer files, each expert-parallel rank
/// counts its own experts from 0 on. Returns `None` if the name is not that of an expert of the rank.
pub fn global_expert(experts: &HashMap<&str, u64>, name: &str, rank: u64, ranks: u64) -> Option<String> {
    let (prefix, number, rest) = split_expert(name)?;
    let own = experts.get(prefix).filter(|count| count.is_multiple_of(ranks))? / ranks;
    (number < own).then(|| format!("{prefix}{}.{rest}", rank * own + number))
}
