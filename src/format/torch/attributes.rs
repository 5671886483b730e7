//! Layouts that plain tensors carry as Python attributes.
//!
//! A job may save the local part of a tensor as a plain tensor, and keep the layout of the tensor in an attribute.
//! `torch.save` writes the attributes of a tensor as its state.
//!
//! | attribute | writer | value |
//! |---|---|---|
//! | `_st_info` | `torch/distributed/tensor/parallel/ddp.py`, for tensor parallelism under DDP | a `DTensorSpec` |
//! | `sharded_dims_mp` | makani, see [`super::model_parallel`] | [`ShardedDims`], a list |
//!
//! Source: `torch/_tensor.py` (`_rebuild_from_type_v2`), `torch/_utils.py` (`_rebuild_parameter_with_state`).

use std::sync::Arc;

use super::context::{Reader, ShardedDims, View};
use super::spec::{SpecFields, read_spec};
use crate::layout::Dims;
use crate::quantity::count;
use torch_pickle::pickle::{DecodeError, Items, Ref};

/// The name of the attribute in which makani records, for each dim of a plain tensor, the group of ranks that shards
/// the dim.
pub const SHARDED_DIMS: &str = "sharded_dims_mp";
const SPEC: &str = "_st_info";

/// Returns the attributes of a tensor that `function` rebuilds; `None` if the function has no argument for attributes.
pub fn attributes<'a>(function: (&str, &str), args: Items<'a>) -> Option<Ref<'a>> {
    const STATE: usize = 3;
    match function {
        ("torch._tensor", "_rebuild_from_type_v2") | ("torch._utils", "_rebuild_parameter_with_state") => {
            args.get(STATE).filter(|state| !state.is_none())
        }
        _ => None,
    }
}

/// Returns an attribute in the pickled state of an object. The state is a dict, or a tuple `(dict or None, slots)`.
pub fn attribute<'a>(state: Ref<'a>, name: &str) -> Option<Ref<'a>> {
    let found = match state.as_tuple() {
        Some(mut parts) => parts.find_map(|part| part.get(name)),
        None => state.get(name),
    };
    found.filter(|value| !value.is_none())
}

/// Reads the layout in the attributes of a plain tensor. If the tensor has a `DTensorSpec`, returns the spec and the
/// global shape, with which the caller can treat the tensor as the local tensor of a DTensor. Stores the value of
/// `sharded_dims_mp` in `reader`.
pub fn read_attributes(
    reader: &mut Reader<'_>,
    view: &View,
    state: Ref<'_>,
) -> Result<Option<(SpecFields, Dims)>, DecodeError> {
    if let Some(spec) = attribute(state, SPEC) {
        let mut spec = reader.read_nested(|reader| read_spec(reader, spec))?;
        let shape = spec.shape.take();
        let shape =
            shape.ok_or_else(|| DecodeError::malformed(format!("a `{SPEC}` without the shape of the tensor")))?;
        reader.has_local_dtensors = true;
        return Ok(Some((spec, shape)));
    }
    if let Some(dims) = attribute(state, SHARDED_DIMS) {
        let dims = sharded_dims(dims, view.sizes.len())?;
        if reader.sharded_dims.insert(view.clone(), dims.clone()).is_some_and(|known| known != dims) {
            return Err(DecodeError::malformed(format!("a tensor with two different lists `{SHARDED_DIMS}`")));
        }
    }
    Ok(None)
}

fn sharded_dims(node: Ref<'_>, ndim: usize) -> Result<ShardedDims, DecodeError> {
    let items = node.as_list().or_else(|| node.as_tuple());
    let group = |item: Ref<'_>| {
        if item.is_none() { Some(None) } else { item.as_str().map(|name| Some(Arc::from(name))) }
    };
    let fits = items.filter(|items| items.len() == ndim);
    fits.and_then(|items| items.map(group).collect()).ok_or_else(|| {
        let found = match items {
            Some(items) if items.len() == ndim => String::from("other items"),
            Some(items) => count(items.len(), "item"),
            None => node.describe(),
        };
        DecodeError::malformed(format!(
            "expected `{SHARDED_DIMS}` with a group name or None for each of {ndim} dims, found {found}"
        ))
    })
}

/// Returns the value of `sharded_dims_mp` as text: `[None, h]`.
pub fn show_dims(dims: &ShardedDims) -> String {
    let names: Vec<&str> = dims.iter().map(|name| name.as_deref().unwrap_or("None")).collect();
    format!("[{}]", names.join(", "))
}
