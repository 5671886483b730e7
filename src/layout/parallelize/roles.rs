//! The role of each mesh dim (tensor parallelism, FSDP, ...), and the placements of a parameter on all mesh dims.
//!
//! Tensor parallelism shards first, and FSDP shards dim 0 of the local tensor. Placements are evaluated from the left,
//! so if the FSDP dim is to the left of the TP dim, FSDP's placement is `_S(0, n)`: each rank along the FSDP dim gets a
//! part of each of the n shards that tensor parallelism makes. HSDP replicates along one more mesh dim. DDP makes no
//! DTensors: a tensor is a DTensor on the other mesh dims only, and the ranks along the mesh dim of DDP hold copies of
//! the tensor.
//!
//! Source: `FSDPParam._init_sharded_param` and `_init_sharding_spec` in
//! `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`.

use super::super::distinct_tiles::SharedTensor;
use super::super::{DeviceMesh, MeshDim, Placement, TensorDim};
use super::{
    Family, ParallelStyle, ParallelizePlan, Parameter, ParameterPlacement, ParameterRole, PlacementSource, PlanError,
    ShapeOrigin, StyleRule, UncutReason,
};

/// A plan that is not applied to a mesh yet, so mesh dims are given by name.
#[derive(Clone, Debug, Default)]
pub struct UnboundPlan {
    pub styles: Vec<StyleRule>,
    pub family: Option<&'static Family>,
    pub names: RoleNames,
}

impl UnboundPlan {
    /// Applies the plan to a mesh.
    ///
    /// # Errors
    /// The errors of [`MeshRoles::resolve`].
    pub fn on_mesh(&self, mesh: &DeviceMesh) -> Result<ParallelizePlan, PlanError> {
        let roles = MeshRoles::resolve(mesh, &self.names)?;
        Ok(ParallelizePlan { styles: self.styles.clone(), family: self.family, roles })
    }
}

/// The mesh dim that has each role; `None` if no mesh dim has the role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeshRoles {
    /// The mesh dim of tensor parallelism.
    pub tp: Option<MeshDim>,
    /// The mesh dim of FSDP.
    pub fsdp: Option<MeshDim>,
    /// The mesh dim of replicas (HSDP).
    pub replicate: Option<MeshDim>,
    /// The mesh dim of data parallelism without DTensors (DDP).
    pub ddp: Option<MeshDim>,
}

/// The names of mesh dims that the user gave for each role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoleNames {
    pub tp: Option<String>,
    pub fsdp: Option<String>,
    pub replicate: Option<String>,
    pub ddp: Option<String>,
    /// The names of the mesh dims that may have no role. Any other mesh dim without a role is an error.
    pub unused: Vec<String>,
}

const TP: [&str; 1] = ["tp"];
const FSDP: [&str; 3] = ["fsdp", "dp_shard", "dp"];
const REPLICATE: [&str; 2] = ["dp_replicate", "replicate"];
const DDP: [&str; 1] = ["ddp"];

const DIM0: TensorDim = TensorDim(0);

impl MeshRoles {
    /// Finds the mesh dim of each role: by the given name, otherwise by a usual name such as `tp`, `fsdp` or
    /// `dp_replicate`.
    ///
    /// # Errors
    /// `PlanError` for a name that the mesh does not have, and for a mesh dim that has two roles or no role.
    pub fn resolve(mesh: &DeviceMesh, given: &RoleNames) -> Result<Self, PlanError> {
        let text = || mesh.to_string();
        let names = mesh.names().ok_or_else(|| PlanError::UnnamedMesh { mesh: text() })?;
        let named = |role, name: &Option<String>| {
            let dim = |name: &String| {
                let missing = || PlanError::NoSuchDim { role, name: name.clone(), dims: names.to_vec() };
                mesh.dim_by_name(name).ok_or_else(missing)
            };
            name.as_ref().map(dim).transpose()
        };
        let mut uses = [
            ("options::tp", named("options::tp", &given.tp)?, &TP[..]),
            ("options::fsdp", named("options::fsdp", &given.fsdp)?, &FSDP),
            ("options::replicate", named("options::replicate", &given.replicate)?, &REPLICATE),
            ("options::ddp", named("options::ddp", &given.ddp)?, &DDP),
        ];
        let is_unused = |dim: MeshDim| given.unused.contains(&names[dim.0]);
        for index in 0..uses.len() {
            let (role, dim, usual) = uses[index];
            let user = |dim| uses.iter().find(|(other, used, _)| *other != role && *used == Some(dim));
            if let Some((second, _, _)) = dim.and_then(user) {
                let name = dim.map(|dim| names[dim.0].clone()).unwrap_or_default();
                return Err(PlanError::DimTwice { name, first: role, second });
            }
            let free = || {
                usual
                    .iter()
                    .filter_map(|name| mesh.dim_by_name(name))
                    .find(|dim| user(*dim).is_none() && !is_unused(*dim))
            };
            uses[index].1 = dim.or_else(free);
        }
        let [tp, fsdp, replicate, ddp] = uses.map(|(_, dim, _)| dim);
        let is_known = |dim| is_unused(MeshDim(dim)) || [tp, fsdp, replicate, ddp].contains(&Some(MeshDim(dim)));
        match (0..mesh.ndim()).find(|dim| !is_known(*dim)) {
            None => Ok(Self { tp, fsdp, replicate, ddp }),
            Some(dim) => Err(PlanError::UnusedDim { name: names[dim].clone(), mesh: text() }),
        }
    }

    /// Returns the placements of a parameter with a style.
    pub(super) fn place_styled(
        self,
        mesh: &DeviceMesh,
        style: ParallelStyle,
        part: ParameterRole,
        parameter: &Parameter<'_>,
    ) -> ParameterPlacement {
        let shape = parameter.shape;
        let mut placements = vec![Placement::Replicate; mesh.ndim()];
        let (cut, mut uncut) = tensor_parallel_placement(style, part, parameter, self.fsdp);
        if let Some(tp) = self.tp {
            placements[tp.0] = cut;
        }
        let tp_parts = self.tp.map_or(1, |tp| mesh.shape()[tp.0]);
        let is_outer = self.tp > self.fsdp && tp_parts > 1;
        let of_fsdp = match cut {
            Placement::Shard(DIM0) if is_outer => Placement::StridedShard { dim: DIM0, split_factor: tp_parts },
            Placement::StridedShard { dim: DIM0, .. } if is_outer => Placement::Replicate,
            _ => Placement::Shard(DIM0),
        };
        if let Some(fsdp) = self.fsdp.filter(|_| !shape.is_empty()) {
            placements[fsdp.0] = of_fsdp;
            uncut = uncut.or((of_fsdp == Placement::Replicate).then_some(UncutReason::BlocksWithinFsdp));
        }
        let dims = (0..mesh.ndim()).map(MeshDim).filter(|dim| Some(*dim) != self.ddp).collect();
        let shared = Some(on_slice(placements, dims));
        ParameterPlacement { shared, by: PlacementSource::Style(style), uncut, note: None }
    }

    /// Returns the placements of a parameter without a style. Only FSDP shards such a parameter, so these are the
    /// placements that `fully_shard` gives, on the mesh dims of FSDP. Without FSDP, the parameter is a plain tensor.
    pub(super) fn place_unstyled(self, mesh: &DeviceMesh, shape: &[u64]) -> ParameterPlacement {
        let mut dims: Vec<MeshDim> = [self.replicate, self.fsdp].into_iter().flatten().collect();
        dims.sort_unstable();
        let mut placements = vec![Placement::Replicate; mesh.ndim()];
        if let Some(fsdp) = self.fsdp.filter(|_| !shape.is_empty()) {
            placements[fsdp.0] = Placement::Shard(DIM0);
        }
        let shared = (!dims.is_empty()).then(|| on_slice(placements, dims));
        ParameterPlacement { shared, by: PlacementSource::NoStyle, uncut: None, note: None }
    }
}

/// Returns placements for a tensor on the mesh dims `dims`. Unless these are all dims of the mesh, the tensor is on a
/// slice.
fn on_slice(placements: Vec<Placement>, dims: Vec<MeshDim>) -> SharedTensor {
    let slice = (dims.len() < placements.len()).then_some(dims);
    SharedTensor { slice, ..SharedTensor::from(placements) }
}

/// Returns the placement of a parameter on the mesh dim of tensor parallelism. If the parameter is replicated although
/// its style would shard the parameter, the second value is the reason.
fn tensor_parallel_placement(
    style: ParallelStyle,
    part: ParameterRole,
    parameter: &Parameter<'_>,
    fsdp: Option<MeshDim>,
) -> (Placement, Option<UncutReason>) {
    let Parameter { shape, shape_origin: sizes, .. } = parameter;
    let Some(dim) = style.dim(part, shape.len()) else { return (Placement::Replicate, None) };
    let (blocks, size) = (style.blocks(), shape[dim.0]);
    // A local shard has an equal part of each block, unless FSDP has split it once more.
    let is_cut_across = *sizes == ShapeOrigin::LocalShard && dim == DIM0 && fsdp.is_some();
    match blocks {
        1 => (Placement::Shard(dim), None),
        _ if size.is_multiple_of(blocks) || is_cut_across => {
            (Placement::StridedShard { dim, split_factor: blocks }, None)
        }
        _ => (Placement::Replicate, Some(UncutReason::OddBlocks { blocks, size })),
    }
}
