//! The flat layout that rank files tell by themselves, with shapes from another checkpoint of the model.
//!
//! Files with [views](views) tell units, order, numels and padding. Files without tell only units and totals, and the
//! rest follows from [the order of registration](registered). Nothing is ever taken in the order of its name: where the
//! order is not known, this refuses. Counts elements.

mod registered;
mod views;

use super::like::{LikeModel, LikeParam};
use super::survey::FlatState;
use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit};
use crate::catalog::{Dtype, Fqn};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::order::ElementOrder;
use crate::format::fsdp_flat::refuse;
use crate::layout::Dims;

/// What tells shapes.
#[derive(Clone, Copy, Debug)]
pub enum ShapeSource<'a> {
    Like(&'a LikeModel),
    /// Nothing: parameters as flat as they lie.
    Raw,
}

/// The layout of a state dict with flat parameters.
///
/// # Errors
/// `Unsupported` where the order would be a guess, `Malformed` and `Conflict` where the files do not fit.
pub fn recover(state: &FlatState, shapes: ShapeSource<'_>) -> Result<FlatLayout> {
    let (shard_group_size, world_size) = sizes(state)?;
    let mut layout = FlatLayout {
        world_size,
        shard_group_size,
        use_orig_params: state.has_views(),
        units: Vec::new(),
        optimizer: None,
    };
    layout.units = if layout.use_orig_params {
        views::units(state, shard_group_size, shapes)?
    } else {
        match shapes {
            ShapeSource::Raw => state.modules().into_iter().map(|module| raw_unit(state, module)).collect(),
            ShapeSource::Like(like) => registered::units(state, shard_group_size, like)?,
        }
    };
    match layout.check() {
        Ok(()) => Ok(layout),
        Err(wrong) => Err(Error::malformed(&state.ranks[0].at, wrong.at, wrong.expected, wrong.found)),
    }
}

/// Ranks of a shard group and of the job, as every flat parameter has them.
fn sizes(state: &FlatState) -> Result<(u32, u32)> {
    let first = &state.ranks[0];
    let Some((_, part)) = first.flats.first() else { unreachable!("a state with flat parameters") };
    match part.sizes {
        Some((group, world)) if group > 0 && world.is_multiple_of(group) => Ok((group, world)),
        Some((group, world)) => {
            let found = format!("a group of {group} of {world}");
            Err(Error::malformed(&first.at, part.key.as_str(), "a shard group that divides the ranks", found))
        }
        None => Err(refuse(format!("{}: {} does not say how many ranks share it", first.at.display(), part.key))),
    }
}

fn dtype_and_total(state: &FlatState, module: &str) -> Option<(Dtype, u64)> {
    let part = state.ranks.iter().find_map(|rank| rank.flats.get(module))?;
    Some((part.dtype, part.total))
}

/// A unit whose flat parameter is a parameter.
fn raw_unit(state: &FlatState, module: &str) -> FlatUnit {
    let (dtype, total) = dtype_and_total(state, module).unwrap_or((Dtype::F32, 0));
    let mut unit = FlatUnit::new(module, Some(dtype));
    let shape = Dims::from_elem(total, 1);
    unit.params.push(FlatParam { fqn: unit.key(), shape, stride: None });
    unit
}

/// In elements, where a parameter does not lie by rows.
fn stride_of(like: &LikeModel, name: &Fqn, param: &LikeParam) -> Result<Option<Dims>> {
    match &param.order {
        ElementOrder::RowMajor => Ok(None),
        ElementOrder::Strides(strides) => Ok(Some(strides.clone())),
        ElementOrder::Unknown => Err(refuse(format!(
            "{name}: of shape {:?}, it may lie by rows or channels last, and {} ({}) does not tell",
            param.shape.as_slice(),
            like.path.display(),
            like.format
        ))),
    }
}
