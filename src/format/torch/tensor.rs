//! Finds the tensors in a torch.save pickle by the Python calls that rebuild them.
//!
//! A plain tensor is a view: a storage key, an offset, sizes and strides. A DTensor is a view with the local part, a
//! mesh and placements. A ShardedTensor is a list of views with their offsets in the tensor. Shapes, strides and
//! offsets count elements.
//!
//! Source: `torch/_utils.py` (`_rebuild_*`), `torch/_tensor.py` (`_rebuild_from_type_v2`),
//! `torch/distributed/tensor/_api.py`, `torch/distributed/_shard/sharded_tensor/api.py`.

use std::sync::Arc;

use super::attributes::{attribute, attributes, read_attributes};
use super::context::{MeshSpec, Reader, View};
use super::spec::{SpecFields, read_spec};
use super::view::{argument, dims, dtype, is_distributed, is_wrapping_function, plain_view};
use crate::catalog::Dtype;
use crate::catalog::unreadable::UnreadableKind;
use crate::layout::{Dims, Placement, Region};
use torch_pickle::pickle::{DecodeError, Items, Ref};

/// A tensor in a pickle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorNode {
    Plain(View),
    Distributed {
        local: View,
        shape: Dims,
        mesh: Arc<MeshSpec>,
        placements: Vec<Placement>,
    },
    /// A ShardedTensor. `local` has the shards of the rank that saved the file. `all` has the region of each shard of
    /// all ranks in the process group.
    Sharded {
        dtype: Dtype,
        shape: Dims,
        /// The strides of the whole tensor in memory, like [`crate::catalog::TensorEntry::stride`]. A pickled
        /// ShardedTensor does not record strides, so this field is `None` for a ShardedTensor that was read.
        stride: Option<Dims>,
        group: ProcessGroup,
        local: Vec<(Region, View)>,
        all: Arc<[Region]>,
    },
    /// A tensor of a kind that dtshard does not support, or an object of an unknown class.
    Unreadable(UnreadableKind),
}

/// The process group of a ShardedTensor, as one of its ranks records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessGroup {
    /// The rank of the saving process in the job.
    pub rank: u32,
    /// The number of ranks in the process group, and the number of ranks in the job; `None` if the pickle does not
    /// record both.
    pub sizes: Option<(u32, u32)>,
}

/// Returns the tensor at a node; `None` if the node is not a tensor.
pub fn read_tensor(reader: &mut Reader<'_>, node: Ref<'_>) -> Result<Option<TensorNode>, DecodeError> {
    let Some(call) = node.call() else { return Ok(None) };
    let state = attributes((call.module, call.name), call.args);
    Ok(match (read_without_attributes(reader, node)?, state) {
        (Some(TensorNode::Plain(view)), Some(state)) => Some(match read_attributes(reader, &view, state)? {
            Some((SpecFields { mesh, placements, .. }, shape)) => {
                TensorNode::Distributed { local: view, shape, mesh, placements }
            }
            None => TensorNode::Plain(view),
        }),
        (found, _) => found,
    })
}

fn read_without_attributes(reader: &mut Reader<'_>, node: Ref<'_>) -> Result<Option<TensorNode>, DecodeError> {
    let Some(call) = node.call() else { return Ok(None) };
    if is_wrapping_function(call.module, call.name) {
        let wrapped = argument(call.args, 0)?;
        return reader.read_nested(|reader| read_tensor(reader, wrapped));
    }
    if (call.module, call.name) == ("torch._tensor", "_rebuild_from_type_v2") {
        let class = argument(call.args, 1)?.global().unwrap_or_default();
        if is_distributed(class) {
            let (inner, state) = (argument(call.args, 2)?, argument(call.args, 3)?);
            let inner =
                inner.as_tuple().ok_or_else(|| DecodeError::malformed("a tensor subclass without arguments"))?;
            let read = if class.1 == "DTensor" { read_dtensor } else { read_sharded_tensor };
            return reader.read_nested(|reader| read(reader, inner, state)).map(Some);
        }
    }
    Ok(plain_view(reader, node)?.map(TensorNode::Plain))
}

/// Returns an attribute of a DTensor or ShardedTensor.
fn required<'a>(state: Ref<'a>, name: &str) -> Result<Ref<'a>, DecodeError> {
    attribute(state, name).ok_or_else(|| DecodeError::malformed(format!("a distributed tensor without `{name}`")))
}

/// Reads a DTensor. `args` is `(cls, dtype, size, stride, offset, layout, device, requires grad)`, and `state` is
/// `{_local_tensor, _spec}`.
fn read_dtensor(reader: &mut Reader<'_>, args: Items<'_>, state: Ref<'_>) -> Result<TensorNode, DecodeError> {
    let shape = dims(argument(args, 2)?, "global size")?;
    let Some(local) = plain_view(reader, required(state, "_local_tensor")?)? else {
        return Err(reader.unsupported("a DTensor whose local tensor is not a plain tensor"));
    };
    let SpecFields { mesh, placements, .. } = read_spec(reader, required(state, "_spec")?)?;
    Ok(TensorNode::Distributed { local, shape, mesh, placements })
}

/// Reads a ShardedTensor. `args` is `(cls, dtype, size, ...)`, and `state` is `(local shards, metadata, process group
/// state, spec, init_rrefs)`.
fn read_sharded_tensor(reader: &mut Reader<'_>, args: Items<'_>, state: Ref<'_>) -> Result<TensorNode, DecodeError> {
    let malformed = |what: &str| DecodeError::malformed(format!("a ShardedTensor {what}"));
    let dtype = dtype(reader, argument(args, 1)?)?;
    let shape = dims(argument(args, 2)?, "global size")?;
    let fields: Vec<Ref<'_>> = state.as_tuple().map(Iterator::collect).unwrap_or_default();
    let [shards, metadata, group, ..] = fields.as_slice() else {
        return Err(malformed("whose state is not a tuple of five"));
    };
    let number = |name: &str| {
        let value = group.state().and_then(|group| group.get(name)).and_then(Ref::as_u64);
        value.and_then(|value| u32::try_from(value).ok())
    };
    let rank = number("global_rank").ok_or_else(|| malformed("without a rank"))?;
    let group = ProcessGroup { rank, sizes: number("local_world_size").zip(number("global_world_size")) };
    let mut local = Vec::new();
    for shard in shards.as_list().ok_or_else(|| malformed("without local shards"))? {
        reader.count_shard()?;
        let state = shard.state().ok_or_else(|| malformed("with a shard that has no state"))?;
        let Some(TensorNode::Plain(view)) = read_tensor(reader, required(state, "tensor")?)? else {
            return Err(reader.unsupported("a ShardedTensor whose shard is not a plain tensor"));
        };
        local.push((shard_region(required(state, "metadata")?)?, view));
    }
    let listed = metadata
        .state()
        .and_then(|metadata| metadata.get("shards_metadata"))
        .and_then(Ref::as_list)
        .ok_or_else(|| malformed("without shards_metadata"))?;
    let all = listed.map(|shard| reader.count_shard().and_then(|()| shard_region(shard))).collect::<Result<_, _>>()?;
    Ok(TensorNode::Sharded { dtype, shape, stride: None, group, local, all })
}

/// Reads the region of a shard from `ShardMetadata(shard_offsets, shard_sizes, placement)`.
fn shard_region(node: Ref<'_>) -> Result<Region, DecodeError> {
    let state = node.state().ok_or_else(|| DecodeError::malformed("a ShardMetadata without state"))?;
    let offsets = dims(required(state, "shard_offsets")?, "shard_offsets")?;
    let sizes = dims(required(state, "shard_sizes")?, "shard_sizes")?;
    if offsets.len() != sizes.len() {
        return Err(DecodeError::malformed("a ShardMetadata with unequal offsets and sizes"));
    }
    Ok(Region::new(offsets, sizes))
}
