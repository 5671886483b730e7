//! Writes DTensors as PyTorch pickles them, so that `torch.load` restores DTensors.
//!
//! A DTensor has the same fields in all PyTorch releases from 2.5 to 2.15, but the fields of its
//! [mesh](super::write_mesh) differ between these releases. Unit of shapes: elements.
//!
//! Source: `torch/distributed/tensor/_dtensor_spec.py`.

use std::collections::BTreeMap;

use super::release::Release;
use super::write::{instance, start_wrapper, tuple, write_sizes, write_tensor};
use super::write_mesh::MeshWriter;
use crate::catalog::{Dtype, contiguous_strides};
use crate::layout::{Dims, MeshDim, Placement, TensorDim};
use torch_pickle::pickle::Writer;

const DTENSOR: (&str, &str) = ("torch.distributed.tensor", "DTensor");
const PLACEMENTS: &str = "torch.distributed.tensor.placement_types";
const SPEC: &str = "torch.distributed.tensor._dtensor_spec";

/// A DTensor to write, with its placements and its local tensor.
#[derive(Clone, Copy)]
pub struct DTensorSpec<'a> {
    pub dtype: Dtype,
    pub shape: &'a [u64],
    pub placements: &'a [Placement],
    /// If the tensor is on a slice of the mesh, the mesh dims of this slice; otherwise `None`.
    pub slice: Option<&'a [MeshDim]>,
    /// The storage key of the local tensor. The local tensor is contiguous and has the sizes `local_sizes`.
    pub key: usize,
    pub local_sizes: &'a [u64],
}

/// Writes a DTensor: `_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, (..), (None, {_local_tensor, _spec}))`.
pub fn write_dtensor(writer: &mut Writer, meshes: &mut MeshWriter<'_>, tensor: DTensorSpec<'_>) {
    start_wrapper(writer, DTENSOR, tensor.dtype, tensor.shape, false);
    writer.none().empty_dict().mark();
    writer.string("_local_tensor");
    write_tensor(writer, tensor.dtype, tensor.key, tensor.local_sizes);
    writer.string("_spec");
    write_spec(writer, meshes, tensor);
    writer.setitems().tuple(2).tuple(4).reduce();
}

fn write_spec(writer: &mut Writer, meshes: &mut MeshWriter<'_>, tensor: DTensorSpec<'_>) {
    let dims = meshes.dims(tensor.slice);
    let placements: Vec<Placement> = dims.iter().map(|&dim| tensor.placements[dim]).collect();
    let shape: Dims = dims.iter().map(|&dim| meshes.mesh.shape()[dim]).collect();
    instance(writer, (SPEC, "DTensorSpec"));
    writer.empty_dict().mark();
    writer.string("mesh");
    meshes.write(writer, &dims);
    writer.string("placements");
    tuple(writer, &placements, |writer, placement| write_placement(writer, *placement));
    writer.string("tensor_meta").global(SPEC, "TensorMeta");
    writer.global("torch", "Size");
    write_sizes(writer, tensor.shape);
    writer.tuple(1).reduce();
    write_sizes(writer, &contiguous_strides(tensor.shape));
    writer.global("torch", tensor.dtype.torch_name()).tuple(3).newobj();
    if meshes.style.release >= Release::V2_10 {
        let is_strided = |placement: &Placement| matches!(placement, Placement::StridedShard { .. });
        let strided = placements.iter().any(is_strided);
        writer.string("shard_order");
        match shard_order(&placements, &shape) {
            Some(order) if !strided || meshes.style.release == Release::V2_10 => write_shard_order(writer, &order),
            // Without a `shard_order`, PyTorch derives the order from the split factors of the placements.
            _ => {
                writer.none();
            }
        }
        if meshes.style.release >= Release::V2_11 {
            writer.string("use_strided_shard_as_shard_order").boolean(strided);
        }
    }
    // PyTorch computes the hash when it is first needed.
    writer.string("_hash").none();
    writer.setitems().build();
}

/// Writes a placement: `cls.__new__(cls)` followed by BUILD with a state. BUILD is needed for every placement: from
/// PyTorch 2.10 on, placements are C++ classes, and BUILD creates the C++ object.
fn write_placement(writer: &mut Writer, placement: Placement) {
    let class = match placement {
        Placement::Shard(_) => "Shard",
        Placement::StridedShard { .. } => "_StridedShard",
        Placement::Replicate => "Replicate",
        Placement::Partial(_) => "Partial",
    };
    instance(writer, (PLACEMENTS, class));
    writer.empty_dict();
    match placement {
        Placement::Shard(TensorDim(dim)) => {
            writer.string("dim").uint(dim as u64).setitem();
        }
        Placement::StridedShard { dim, split_factor } => {
            writer.mark().string("dim").uint(dim.0 as u64);
            writer.string("split_factor").uint(split_factor).setitems();
        }
        Placement::Replicate => {}
        Placement::Partial(op) => {
            writer.string("reduce_op").string(op.as_str()).setitem();
        }
    }
    writer.build();
}

/// Returns, for each tensor dim, the mesh dims that shard it, in the order of sharding. Returns `None` if no order of
/// mesh dims gives the split factors of the placements.
fn shard_order(placements: &[Placement], mesh_shape: &[u64]) -> Option<Vec<(TensorDim, Vec<MeshDim>)>> {
    let mut order: BTreeMap<TensorDim, Vec<MeshDim>> = BTreeMap::new();
    for (at, placement) in placements.iter().enumerate().rev() {
        let Some(dim) = placement.sharded_dim() else { continue };
        let factor = if let Placement::StridedShard { split_factor, .. } = placement { *split_factor } else { 1 };
        let known = order.entry(dim).or_default();
        // A mesh dim with the split factor `factor` shards after the mesh dims to its right whose sizes have the
        // product `factor`.
        let before =
            |count: &usize| known[..*count].iter().try_fold(1, |parts: u64, dim| parts.checked_mul(mesh_shape[dim.0]));
        let position = (0..=known.len()).find(|count| before(count) == Some(factor))?;
        known.insert(position, MeshDim(at));
    }
    Some(order.into_iter().collect())
}

fn write_shard_order(writer: &mut Writer, order: &[(TensorDim, Vec<MeshDim>)]) {
    tuple(writer, order, |writer, (dim, mesh_dims)| {
        writer.global(SPEC, "ShardOrderEntry").uint(dim.0 as u64);
        tuple(writer, mesh_dims, |writer, mesh_dim| {
            writer.uint(mesh_dim.0 as u64);
        });
        writer.tuple(2).newobj();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_factors_give_the_shard_order() {
        let (plain, dim) = (Placement::Shard(TensorDim(0)), TensorDim(0));
        let strided = |split_factor| Placement::StridedShard { dim, split_factor };
        let order = |placements: &[Placement], mesh: &[u64]| {
            let order = shard_order(placements, mesh)?;
            Some(
                order
                    .into_iter()
                    .map(|(dim, mesh_dims)| (dim.0, mesh_dims.iter().map(|dim| dim.0).collect()))
                    .collect(),
            )
        };
        let expected = |order: &[(usize, &[usize])]| -> Option<Vec<(usize, Vec<usize>)>> {
            Some(order.iter().map(|(dim, mesh_dims)| (*dim, mesh_dims.to_vec())).collect())
        };
        assert_eq!(order(&[plain, plain], &[2, 2]), expected(&[(0, &[0, 1])]));
        assert_eq!(order(&[strided(2), plain], &[2, 2]), expected(&[(0, &[1, 0])]));
        assert_eq!(order(&[strided(2), strided(2), plain], &[4, 3, 2]), expected(&[(0, &[2, 0, 1])]));
        assert_eq!(order(&[strided(3), plain], &[2, 2]), None);
        let one = Placement::Shard(TensorDim(1));
        assert_eq!(order(&[one, Placement::Replicate, plain], &[2, 2, 2]), expected(&[(0, &[2]), (1, &[0])]));
    }
}
