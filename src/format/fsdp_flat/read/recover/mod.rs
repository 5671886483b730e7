//! Recovers the flat layout from rank files. The shapes of parameters come from another checkpoint of the model.
//!
//! Files with [views] (parameters that are slices of a flat parameter) record the units and the order, length and
//! padding of parameters. Files without views record only the units, and the length of each flat parameter; the other
//! checkpoint then also gives [the order of registration](registered). Parameters are never sorted by name: if the
//! order is unknown, recovery is an error. Unit of lengths: elements.

mod registered;
mod views;

use super::like::{LikeModel, LikeParam};
use super::survey::FlatState;
use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit};
use crate::catalog::{Dtype, Fqn};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::order::ElementOrder;
use crate::format::fsdp_flat::unknown_layout_error;
use crate::layout::Dims;

/// The source of the shapes of parameters.
#[derive(Clone, Copy, Debug)]
pub enum ShapeSource<'a> {
    Like(&'a LikeModel),
    /// There is no source of shapes. Each parameter is read as a 1-d tensor, which is how a flat parameter stores it.
    Raw,
}

/// Returns the layout of a state dict with flat parameters.
///
/// # Errors
/// `Unsupported` if the order of parameters is unknown; `Malformed` or `Conflict` if the files contradict each other or
/// the other checkpoint.
pub fn recover(state: &FlatState, shapes: ShapeSource<'_>) -> Result<FlatLayout> {
    let (shard_group_size, world_size) = sizes(state)?;
    let mut layout = FlatLayout {
        world_size,
        shard_group_size,
        use_orig_params: state.has_views(),
        has_assumed_alignment: false,
        units: Vec::new(),
        optimizer: None,
    };
    layout.units = if layout.use_orig_params {
        views::units(state, shard_group_size, shapes)?
    } else {
        match shapes {
            ShapeSource::Raw => state.unit_modules().into_iter().map(|module| raw_unit(state, module)).collect(),
            ShapeSource::Like(like) => registered::units(state, shard_group_size, like)?,
        }
    };
    match layout.check() {
        Ok(()) => Ok(layout),
        Err(wrong) => Err(Error::malformed(&state.ranks[0].file_path, wrong.at, wrong.expected, wrong.found)),
    }
}

/// Returns the number of ranks in a shard group, and the number of ranks in the job.
fn sizes(state: &FlatState) -> Result<(u32, u32)> {
    let first = &state.ranks[0];
    let Some((_, part)) = first.flat_parts.first() else { unreachable!("a state with flat parameters") };
    match part.group_sizes {
        Some((group, world)) if group > 0 && world.is_multiple_of(group) => Ok((group, world)),
        Some((group, world)) => {
            let found = format!("a group of {group} of {world}");
            Err(Error::malformed(&first.file_path, part.key.as_str(), "a shard group that divides the ranks", found))
        }
        None => Err(unknown_layout_error(format!(
            "{}: {} does not record how many ranks share it",
            first.file_path.display(),
            part.key
        ))),
    }
}

fn dtype_and_total(state: &FlatState, module: &str) -> Option<(Dtype, u64)> {
    let part = state.ranks.iter().find_map(|rank| rank.flat_parts.get(module))?;
    Some((part.dtype, part.total))
}

/// Returns a unit with a single parameter, which consists of the complete flat parameter.
fn raw_unit(state: &FlatState, module: &str) -> FlatUnit {
    let (dtype, total) = dtype_and_total(state, module).unwrap_or((Dtype::F32, 0));
    let mut unit = FlatUnit::new(module, Some(dtype));
    let shape = Dims::from_elem(total, 1);
    unit.params.push(FlatParam { fqn: unit.key(), shape, stride: None });
    unit
}

/// Returns the strides of a parameter, in elements; `None` if the parameter is row-major. An unknown memory order is an
/// error.
fn stride_of(like: &LikeModel, name: &Fqn, param: &LikeParam) -> Result<Option<Dims>> {
    match &param.order {
        ElementOrder::RowMajor => Ok(None),
        ElementOrder::Strides(strides) => Ok(Some(strides.clone())),
        ElementOrder::Unknown => Err(unknown_layout_error(format!(
            "{name}: shape {:?} may be row-major or channels_last, and {} ({}) does not record which",
            param.shape.as_slice(),
            like.path.display(),
            like.format
        ))),
    }
}
