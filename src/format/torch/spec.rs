//! Reads the `DTensorSpec` of a DTensor: mesh, placements and global shape. Shapes count elements.
//!
//! Source: `torch/distributed/tensor/_dtensor_spec.py`, `torch/distributed/tensor/placement_types.py`.

use std::sync::Arc;

use super::context::{MeshSpec, Reader};
use super::mesh::read_mesh;
use super::view::{argument, dims};
use crate::layout::{Dims, MeshDim, Placement, ReduceOp, TensorDim, from_shard_order};
use torch_pickle::pickle::{DecodeError, Ref};

/// The fields of a `DTensorSpec`.
pub struct SpecFields {
    pub mesh: Arc<MeshSpec>,
    pub placements: Vec<Placement>,
    /// The global shape of the tensor; `None` if the spec does not record it.
    pub shape: Option<Dims>,
}

/// Reads a `DTensorSpec`.
pub fn read_spec(reader: &mut Reader<'_>, spec: Ref<'_>) -> Result<SpecFields, DecodeError> {
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
    // `TensorMeta(shape, stride, dtype)`.
    let meta = spec.get("tensor_meta").and_then(Ref::object);
    let shape = meta.map(|meta| dims(argument(meta.args, 0)?, "global size")).transpose()?;
    Ok(SpecFields { mesh, placements, shape })
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
