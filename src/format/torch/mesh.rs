//! Reads DeviceMesh objects as PyTorch 2.2 to 2.15 pickles them.
//!
//! Up to PyTorch 2.9, a pickled mesh has the array of ranks. From 2.10 on, a mesh is a layout over the ranks of its
//! root mesh (the mesh of which it is a slice): the sizes and strides of the (possibly flattened) axes of each dim. A
//! slice does not record its position in the root; the position follows from the saving rank and its coordinate. Sizes
//! and strides count ranks.
//!
//! Source: `torch/distributed/device_mesh.py`, `torch/distributed/_mesh_layout.py`.

use std::sync::Arc;

use super::context::{MeshSpec, Reader};
use super::release::{DTensorStyle, Release};
use super::view::plain_view;
use crate::layout::{DeviceMesh, Dims, Rank};
use torch_pickle::pickle::{DecodeError, Ref};

/// The maximum number of ranks of a mesh. No cluster has so many ranks, so a file with a larger array is damaged.
const MAX_RANKS: u64 = 1 << 24;

/// Returns the DeviceMesh at a node of the pickle. Reads the mesh only at the first call for a node.
pub fn read_mesh(reader: &mut Reader<'_>, node: Ref<'_>) -> Result<Arc<MeshSpec>, DecodeError> {
    let key = node.id();
    if let Some(known) = reader.meshes.get(&key) {
        return Ok(Arc::clone(known));
    }
    let state = node.state().ok_or_else(|| DecodeError::malformed("a DeviceMesh without state"))?;
    let spec = reader.read_nested(|reader| {
        if state.get("_layout").is_some() { from_layout(reader, state) } else { from_array(reader, state) }
    })?;
    let spec = Arc::new(spec);
    reader.meshes.insert(key, Arc::clone(&spec));
    Ok(spec)
}

fn dtensor_style(release: Release, state: Ref<'_>) -> DTensorStyle {
    let device_type = state.get("_device_type").or_else(|| state.get("device_type")).and_then(Ref::as_str);
    let default = DTensorStyle::default().device_type;
    DTensorStyle { release, device_type: device_type.map_or(default, str::to_owned) }
}

fn dim_names(state: Ref<'_>) -> Result<Option<Vec<String>>, DecodeError> {
    let Some(names) = state.get("_mesh_dim_names").or_else(|| state.get("mesh_dim_names")) else { return Ok(None) };
    if names.is_none() {
        return Ok(None);
    }
    let items = names.as_tuple().or_else(|| names.as_list());
    let names: Option<Vec<String>> =
        items.and_then(|items| items.map(|name| name.as_str().map(str::to_owned)).collect());
    names.map(Some).ok_or_else(|| DecodeError::malformed("mesh_dim_names that are not strings"))
}

/// Returns the coordinate of the saving rank; `None` if the rank is outside the mesh, or if the pickle does not record
/// the coordinate.
fn coordinate(state: Ref<'_>) -> Option<Dims> {
    state.get("_coordinate_on_dim").filter(|node| !node.is_none()).and_then(Ref::to_dims)
}

fn is_member(state: Ref<'_>) -> bool {
    state.get("_coordinate_on_dim").is_none_or(|node| !node.is_none())
}

/// Reads a mesh as torch 2.2 to 2.9 pickle it: `mesh` is the array of ranks.
fn from_array(reader: &mut Reader<'_>, state: Ref<'_>) -> Result<MeshSpec, DecodeError> {
    let node = state.get("mesh").ok_or_else(|| DecodeError::malformed("a DeviceMesh without ranks"))?;
    let (shape, ranks) = rank_tensor(reader, node)?;
    let mesh = build_mesh(shape, ranks, dim_names(state)?)?;
    let rank = coordinate(state)
        .filter(|at| at.len() == mesh.ndim() && at.iter().zip(mesh.shape()).all(|(at, size)| at < size))
        .map(|at| mesh.rank_at(&at));
    let parent = state.get("_parent_mesh").filter(|node| !node.is_none());
    let root = parent.map(|node| read_mesh(reader, node)).transpose()?.map(|spec| spec.mesh.clone());
    Ok(MeshSpec { mesh, root, rank, is_member: is_member(state), style: dtensor_style(Release::V2_5, state) })
}

/// Reads a mesh as torch 2.10 and later pickle it: a layout over the ranks of the root mesh.
fn from_layout(reader: &mut Reader<'_>, state: Ref<'_>) -> Result<MeshSpec, DecodeError> {
    let malformed = |what: &str| DecodeError::malformed(format!("a DeviceMesh {what}"));
    let layout = state.get("_layout").and_then(Ref::state).ok_or_else(|| malformed("without a layout"))?;
    let axes = axes(layout).ok_or_else(|| malformed("with a layout that cannot be read"))?;
    let map = state.get("_rank_map").ok_or_else(|| malformed("without ranks"))?;
    let (_, ranks) = rank_tensor(reader, map)?;
    let root_node = state.get("_root_mesh").filter(|node| !node.is_none());
    let root_spec = root_node.map(|node| read_mesh(reader, node)).transpose()?;
    let at = coordinate(state);

    let stored_rank = state.get("_rank").and_then(Ref::as_u64).and_then(|rank| u32::try_from(rank).ok()).map(Rank);
    let base = match (&root_spec, &at) {
        (None, _) => 0,
        (Some(root), Some(at)) => {
            let rank =
                stored_rank.or(root.rank).ok_or_else(|| malformed("that is a slice, without the saving rank"))?;
            let position = ranks.iter().position(|known| *known == rank);
            let position = position.ok_or_else(|| malformed("whose saving rank is not among its ranks"))? as u64;
            let own = axes.iter().zip(at).try_fold(0_u64, |sum, (axis, &at)| sum.checked_add(axis.offset(at)?));
            own.filter(|_| at.len() == axes.len())
                .and_then(|own| position.checked_sub(own))
                .ok_or_else(|| malformed("whose coordinate does not fit its layout"))?
        }
        // The saving rank is outside the mesh. It has no data, and its file does not identify the slice.
        (Some(_), None) => 0,
    };
    let shape: Dims =
        axes.iter().map(MeshAxis::len).collect::<Option<_>>().ok_or_else(|| malformed("of impossible size"))?;
    let count = crate::layout::numel(&shape)
        .filter(|count| *count <= ranks.len() as u64)
        .ok_or_else(|| malformed("of impossible size"))?;
    let mut own_ranks = Vec::new();
    for index in 0..count {
        let mut rest = index;
        let mut offset = Some(base);
        for axis in axes.iter().rev() {
            let len = axis.len().unwrap_or(1).max(1);
            offset = offset.zip(axis.offset(rest % len)).and_then(|(sum, own)| sum.checked_add(own));
            rest /= len;
        }
        let rank = offset.and_then(|offset| ranks.get(usize::try_from(offset).ok()?));
        own_ranks.push(*rank.ok_or_else(|| malformed("whose layout reaches beyond its ranks"))?);
    }
    let mesh = build_mesh(shape, own_ranks, dim_names(state)?)?;
    // Torch 2.10 does not record the saving rank. In a root mesh, the rank follows from its coordinate.
    let from_coordinate = || {
        let at = at.as_ref().filter(|at| at.len() == mesh.ndim())?;
        at.iter().zip(mesh.shape()).all(|(at, size)| at < size).then(|| mesh.rank_at(at))
    };
    let rank = stored_rank.or_else(from_coordinate);
    let release = match (layout.get("axes"), state.get("_rank")) {
        (Some(_), _) => Release::V2_13,
        (None, Some(_)) => Release::V2_11,
        (None, None) => Release::V2_10,
    };
    let style = dtensor_style(release, state);
    Ok(MeshSpec { mesh, root: root_spec.map(|spec| spec.mesh.clone()), rank, is_member: is_member(state), style })
}

/// One mesh dim, which may be flattened from several axes: the size and the stride of each axis, in row-major order.
struct MeshAxis(Vec<(u64, u64)>);

impl MeshAxis {
    fn len(&self) -> Option<u64> {
        self.0.iter().try_fold(1_u64, |len, (size, _)| len.checked_mul(*size))
    }

    /// Returns the number of places, in the list of ranks of the root mesh, from the rank at position 0 along this dim
    /// to the rank at `position`.
    fn offset(&self, position: u64) -> Option<u64> {
        let mut rest = position;
        let mut offset = 0_u64;
        for &(size, stride) in self.0.iter().rev() {
            offset = offset.checked_add((rest % size.max(1)).checked_mul(stride)?)?;
            rest /= size.max(1);
        }
        Some(offset)
    }
}

fn axes(layout: Ref<'_>) -> Option<Vec<MeshAxis>> {
    // Torch 2.13 and later pickle the layout as a list of axes.
    if let Some(axes) = layout.get("axes") {
        return axes
            .as_tuple()?
            .map(|axis| {
                let state = axis.state()?;
                axis_of(state.get("shape")?, state.get("stride")?)
            })
            .collect();
    }
    let (shape, stride) = (layout.get("shape")?, layout.get("stride")?);
    if let (Some(shape), Some(stride)) = (shape.as_u64(), stride.as_u64()) {
        return Some(vec![MeshAxis(vec![(shape, stride)])]);
    }
    if let (Some(shape), Some(stride)) = (shape.to_dims(), stride.to_dims()) {
        return (shape.len() == stride.len())
            .then(|| shape.into_iter().zip(stride).map(|pair| MeshAxis(vec![pair])).collect());
    }
    let (shape, stride) = (shape.as_tuple()?, stride.as_tuple()?);
    (shape.len() == stride.len()).then_some(())?;
    shape.zip(stride).map(|(shape, stride)| axis_of(shape, stride)).collect()
}

fn axis_of(shape: Ref<'_>, stride: Ref<'_>) -> Option<MeshAxis> {
    if let (Some(shape), Some(stride)) = (shape.as_u64(), stride.as_u64()) {
        return Some(MeshAxis(vec![(shape, stride)]));
    }
    let (shape, stride) = (shape.to_dims()?, stride.to_dims()?);
    (shape.len() == stride.len()).then(|| MeshAxis(shape.into_iter().zip(stride).collect()))
}

/// Returns the shape and the row-major content of a tensor of ranks.
fn rank_tensor(reader: &mut Reader<'_>, node: Ref<'_>) -> Result<(Dims, Vec<Rank>), DecodeError> {
    let Some(view) = plain_view(reader, node)? else {
        return Err(DecodeError::malformed(format!("expected a tensor of mesh ranks, found `{}`", node.describe())));
    };
    let count: u64 = view.sizes.iter().product();
    // The ranks of a mesh are distinct, so a tensor with more ranks than its storage has elements is invalid.
    if count > MAX_RANKS || count > view.storage_bytes / view.dtype.itemsize() {
        return Err(DecodeError::malformed(format!(
            "expected as many mesh ranks as are stored, found a mesh of {count} ranks"
        )));
    }
    let values = reader.integers(&view)?;
    let ranks = values.into_iter().map(|value| u32::try_from(value).map(Rank));
    let ranks = ranks
        .collect::<Result<_, _>>()
        .map_err(|_| DecodeError::malformed("expected mesh ranks from 0 to 2^32 - 1, found other numbers"))?;
    Ok((view.sizes, ranks))
}

fn build_mesh(shape: Dims, ranks: Vec<Rank>, names: Option<Vec<String>>) -> Result<DeviceMesh, DecodeError> {
    DeviceMesh::new(shape, ranks, names).map_err(|error| DecodeError::malformed(error.to_string()))
}
