//! Recovers units from another checkpoint of the model, for files without views. A unit has all parameters of its
//! module and of the modules below this module, except for the parameters of inner units. The parameters are in the
//! order of registration. Unit of lengths: elements.
//!
//! Source: `_get_orig_params`, `FlatParamHandle._init_flat_param_and_metadata` in `torch/distributed/fsdp`.

use std::collections::{HashMap, HashSet};

use super::super::like::LikeModel;
use super::super::survey::{FlatState, innermost_unit};
use super::super::totals::{self, LayoutMismatch};
use super::{dtype_and_total, stride_of};
use crate::catalog::Fqn;
use crate::catalog::flat::{FlatParam, FlatUnit, SharedName};
use crate::catalog::modules::module_of;
use crate::error::Result;
use crate::format::fsdp_flat::unknown_layout_error;

/// Returns the units of a state dict without views. `group` is the number of ranks in a shard group.
pub fn units(state: &FlatState, group: u32, like: &LikeModel) -> Result<Vec<FlatUnit>> {
    let modules = state.unit_modules();
    let known: HashSet<&str> = modules.iter().copied().collect();
    let buffers: HashSet<&Fqn> = state.ranks.iter().flat_map(|rank| rank.other_tensors.keys()).collect();
    let mut units: Vec<FlatUnit> = Vec::new();
    for module in &modules {
        let dtype = dtype_and_total(state, module).map(|(dtype, _)| dtype);
        units.push(FlatUnit::new(*module, dtype));
    }
    let positions: HashMap<&str, usize> = modules.iter().copied().zip(0..).collect();
    for (name, param) in &like.params {
        if buffers.contains(name) {
            continue;
        }
        let Some(unit) = innermost_unit(module_of(name.as_str()), &known) else {
            return Err(unknown_layout_error(format!(
                "{name}: {} has this parameter, but no unit of the files contains it",
                like.path.display()
            )));
        };
        let unit = &mut units[positions[unit]];
        match &param.shared_with {
            Some(with) => unit.shared.push(SharedName { fqn: name.clone(), with: with.clone() }),
            None => {
                unit.params.push(FlatParam { fqn: name.clone(), shape: param.shape.clone(), stride: None });
            }
        }
    }
    if let Some(unit) = units.iter().find(|unit| unit.params.len() > 1 && !like.is_in_registration_order()) {
        let several = format!("{} has {} parameters", unit.describe(), unit.params.len());
        return Err(unknown_layout_error(format!(
            "{}: {several}, and {} ({}{}) does not record their order",
            state.ranks[0].file_path.display(),
            like.path.display(),
            like.format,
            if like.format.keeps_order() { ", sorted by name" } else { "" }
        )));
    }
    for unit in &mut units {
        for param in &mut unit.params {
            param.stride = stride_of(like, &param.fqn, &like.params[&param.fqn])?;
        }
        let total = dtype_and_total(state, &unit.module).map_or(0, |(_, total)| total);
        tie_copies(unit, like, total)?;
        let source = like.path.display().to_string();
        let misfit = LayoutMismatch { file: &state.ranks[0].file_path, source: &source };
        totals::check(misfit, unit, None, u64::from(group), total)?;
    }
    Ok(units)
}

/// Marks two parameters of a unit as tied if all of these hold: the two parameters have equal bytes in the checkpoint
/// `like`; they have at least 2 dims; no other pair of parameters in the unit qualifies; the parameters of the unit
/// together have more elements than the flat parameter (`total`), and the excess is the number of elements of one of
/// the two.
fn tie_copies(unit: &mut FlatUnit, like: &LikeModel, total: u64) -> Result<()> {
    let sum = unit.params.iter().try_fold(0_u64, |sum, param| sum.checked_add(param.numel()));
    let Some(extra) = sum.and_then(|sum| sum.checked_sub(total)).filter(|extra| *extra > 0) else { return Ok(()) };
    const MAX_CANDIDATES: usize = 32;
    let mut copies: Vec<(usize, usize)> = Vec::new();
    // Vectors are not candidates, because unrelated vectors are often equal. For example, new norms are all ones.
    let candidates: Vec<usize> = (0..unit.params.len())
        .filter(|index| unit.params[*index].numel() == extra && unit.params[*index].shape.len() > 1)
        .take(MAX_CANDIDATES)
        .collect();
    for (at, &second) in candidates.iter().enumerate() {
        for &first in &candidates[..at] {
            if like.have_equal_bytes(&unit.params[first].fqn, &unit.params[second].fqn)? {
                copies.push((first, second));
            }
        }
    }
    if let [(first, second)] = copies.as_slice() {
        let with = unit.params[*first].fqn.clone();
        let FlatParam { fqn, .. } = unit.params.remove(*second);
        unit.shared.push(SharedName { fqn, with });
    }
    Ok(())
}
