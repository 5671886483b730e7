//! Finds the tensors in a torch.save pickle by the Python calls that rebuild them.
//!
//! A plain tensor is a view: a storage key, an offset, sizes and strides. A DTensor is a view with the local part, a
//! mesh and placements. A ShardedTensor is a list of views with their offsets in the tensor. Shapes, strides and
//! offsets count elements.
//!
//! Source: `torch/_utils.py` (`_rebuild_*`), `torch/_tensor.py` (`_rebuild_from_type_v2`),
//! `torch/distributed/tensor/_api.py`, `torch/distributed/_shard/sharded_tensor/api.py`.

use std::sync::Arc;

use super::context::{MeshSpec, Reader, View};
use super::mesh::read_mesh;
use super::view::{argument, dims, dtype, is_distributed, is_wrapping_function, plain_view};
use crate::catalog::Dtype;
use crate::catalog::unreadable::UnreadableKind;
use crate::layout::{Dims, MeshDim, Placement, ReduceOp, Region, TensorDim, from_shard_order};
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
    /// The number of ranks in the process group, and the number of ranks in the job.
    pub sizes: Option<(u32, u32)>,
}

/// Returns the tensor at a node; `None` if the node is not a tensor.
pub fn read_tensor(reader: &mut Reader<'_>, node: Ref<'_>) -> Result<Option<TensorNode>, DecodeError> {
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

/// Returns an attribute of a DTensor or ShardedTensor. The pickled state of the tensor is a dict, or a tuple `(dict or
/// None, slots)`.
fn attribute<'a>(state: Ref<'a>, name: &str) -> Result<Ref<'a>, DecodeError> {
    let parts: Vec<Ref<'a>> = state.as_tuple().map_or_else(|| vec![state], Iterator::collect);
    (parts.iter().find_map(|part| part.get(name)))
        .ok_or_else(|| DecodeError::malformed(format!("a distributed tensor without `{name}`")))
}

/// Reads a DTensor. `args` is `(cls, dtype, size, stride, offset, layout, device, requires grad)`, and `state` is
/// `{_local_tensor, _spec}`.
fn read_dtensor(reader: &mut Reader<'_>, args: Items<'_>, state: Ref<'_>) -> Result<TensorNode, DecodeError> {
    let shape = dims(argument(args, 2)?, "global size")?;
    let Some(local) = plain_view(reader, attribute(state, "_local_tensor")?)? else {
        return Err(reader.unsupported("a DTensor whose local tensor is not a plain tensor"));
    };
    let spec = attribute(state, "_spec")?;
    let spec = spec.state().ok_or_else(|| DecodeError::malformed("a DTensor spec without state"))?;
    let field =
        |name: &str| spec.get(name).ok_or_else(|| DecodeError::malformed(format!("a DTensor spec without `{name}`")));
    let mesh = read_mesh(reader, field("mesh")?)?;
    let placements: Vec<Placement> = field("placements")?
        .as_tuple()
        .ok_or_else(|| DecodeError::malformed("placements that are not a tuple"))?
        .map(|node| read_placement(reader, node))
        .collect::<Result<_, _>>()?;
    let placements = match spec.get("shard_order").filter(|order| !order.is_none()) {
        Some(order) => from_shard_order(mesh.mesh.shape(), &placements, &read_shard_order(order)?)
            .map_err(|error| DecodeError::malformed(error.to_string()))?,
        None => placements,
    };
    Ok(TensorNode::Distributed { local, shape, mesh, placements })
}

/// Reads the `shard_order` of a DTensor: a tuple of `ShardOrderEntry(tensor_dim, mesh_dims)`.
fn read_shard_order(node: Ref<'_>) -> Result<Vec<(TensorDim, Vec<MeshDim>)>, DecodeError> {
    let malformed = || DecodeError::malformed("a shard_order that is not a tuple of (tensor dim, mesh dims)");
    let index = |node: Ref<'_>| node.as_u64().and_then(|value| usize::try_from(value).ok()).ok_or_else(malformed);
    node.as_tuple()
        .ok_or_else(malformed)?
        .map(|entry| {
            let args = entry.object().ok_or_else(malformed)?.args;
            let mesh_dims = argument(args, 1)?.as_tuple().ok_or_else(malformed)?;
            let mesh_dims = mesh_dims.map(|dim| index(dim).map(MeshDim)).collect::<Result<_, _>>()?;
            Ok((TensorDim(index(argument(args, 0)?)?), mesh_dims))
        })
        .collect()
}

fn read_placement(reader: &Reader<'_>, node: Ref<'_>) -> Result<Placement, DecodeError> {
    let Some(object) = node.object() else {
        return Err(DecodeError::malformed(format!("expected a placement, found `{}`", node.describe())));
    };
    let number = |name: &str| {
        (object.state.and_then(|state| state.get(name)).and_then(Ref::as_u64))
            .ok_or_else(|| DecodeError::malformed(format!("a placement {} without `{name}`", object.name)))
    };
    let dim = || number("dim").map(|dim| TensorDim(usize::try_from(dim).unwrap_or(usize::MAX)));
    match object.name {
        "Shard" => Ok(Placement::Shard(dim()?)),
        "_StridedShard" => Ok(Placement::StridedShard { dim: dim()?, split_factor: number("split_factor")? }),
        "Replicate" => Ok(Placement::Replicate),
        "Partial" | "_Partial" => {
            let op = object.state.and_then(|state| state.get("reduce_op")).and_then(Ref::as_str);
            let op = op.and_then(ReduceOp::from_name);
            op.map(Placement::Partial)
                .ok_or_else(|| reader.unsupported("a Partial placement with an unknown reduce_op"))
        }
        name => {
            let why = match name {
                "_MaskPartial" | "MaskPartial" => ", whose mask is not saved",
                "_NormPartial" => ", an intermediate value of a norm",
                _ => "",
            };
            Err(reader.unsupported(format!("a DTensor with placement `{}.{name}`{why}", object.module)))
        }
    }
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
        let Some(TensorNode::Plain(view)) = read_tensor(reader, attribute(state, "tensor")?)? else {
            return Err(reader.unsupported("a ShardedTensor whose shard is not a plain tensor"));
        };
        local.push((shard_region(attribute(state, "metadata")?)?, view));
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
    let offsets = dims(attribute(state, "shard_offsets")?, "shard_offsets")?;
    let sizes = dims(attribute(state, "shard_sizes")?, "shard_sizes")?;
    if offsets.len() != sizes.len() {
        return Err(DecodeError::malformed("a ShardMetadata with unequal offsets and sizes"));
    }
    Ok(Region::new(offsets, sizes))
}
