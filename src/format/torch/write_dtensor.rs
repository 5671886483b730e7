//! DTensors as PyTorch pickles them, for `torch.load` to give back as DTensors.
//!
//! A DTensor's own part has been the same from 2.5 to 2.15. The mesh in it has not: its fields were renamed in 2.10,
//! and the class of its layout took another form in 2.13, so that no pickle is a mesh to all of them. Measured with
//! 2.5.1, 2.9.1, 2.10.0, 2.12.0 and 2.15.0:
//!
//! ```text
//! written for   loads and works in   elsewhere
//! 2.5           2.5 to 2.9           loads from 2.10 on, too: local tensors and placements are there, the mesh is not
//! 2.10          2.10                 2.11 and 2.12, but for strided shards, whose order they write otherwise
//! 2.11          2.11 and 2.12        2.13 and later: as above; 2.10 but for strided shards; earlier ones lack a module
//! 2.13          2.13 and later       earlier ones lack a class
//! ```
//!
//! Source: `torch/distributed/tensor/_dtensor_spec.py`, `torch/distributed/device_mesh.py`,
//! `torch/distributed/_mesh_layout.py`.

use std::collections::{BTreeMap, BTreeSet};

use super::write::{start_wrapper, write_sizes, write_tensor};
use super::{Found, reader};
use crate::catalog::{Dtype, contiguous_strides};
use crate::error::Result;
use crate::format::pickle::{Unknown, Writer};
use crate::layout::{DeviceMesh, Dims, MeshDim, Placement, Rank, TensorDim};
use crate::storage::{FileId, Files};

/// The PyTorch releases whose DeviceMesh is written, by the first that had it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Release {
    /// To 2.9: the array of ranks.
    V2_5,
    /// A layout of nested sizes and strides.
    V2_10,
    /// To 2.12: the same, with the rank, and with strided shards that say their order themselves.
    V2_11,
    /// And later: a layout of axes.
    #[default]
    V2_13,
}

impl Release {
    /// That of a version such as `2.9.1`, `v2.9` or `2.15.0+cu132`; `None` before 2.5, and for what is no version.
    #[must_use]
    pub fn of_version(version: &str) -> Option<Self> {
        let mut parts = version.trim_start_matches('v').split(['.', '+']).map(str::parse::<u32>);
        match (parts.next()?.ok()?, parts.next()?.ok()?) {
            (2, 5..=9) => Some(Self::V2_5),
            (2, 10) => Some(Self::V2_10),
            (2, 11..=12) => Some(Self::V2_11),
            (2, 13..) | (3.., _) => Some(Self::V2_13),
            _ => None,
        }
    }
}

/// What a checkpoint's DTensors do not share with those of every other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Style {
    pub release: Release,
    /// Of the meshes: `cpu`, `cuda`. Local tensors are always written as those of the CPU, where they can be loaded
    /// everywhere; trainers that save with CPU offload have the same.
    pub device_type: String,
}

impl Default for Style {
    fn default() -> Self {
        Self { release: Release::default(), device_type: String::from("cpu") }
    }
}

impl Style {
    /// That of the DTensors of a torch.save file; `None` where it has none.
    ///
    /// # Errors
    /// As reading the file.
    pub fn of_file(files: &Files, file: FileId) -> Result<Option<Self>> {
        let contents = reader::read(files, files.whole(file), "", Unknown::Drop)?;
        Ok(contents.tensors.iter().find_map(|found| match found {
            Found::Distributed { mesh, .. } => Some(mesh.style.clone()),
            Found::Plain(_) | Found::Sharded { .. } => None,
        }))
    }
}

const DEVICE_MESH: (&str, &str) = ("torch.distributed.device_mesh", "DeviceMesh");
const DTENSOR: (&str, &str) = ("torch.distributed.tensor", "DTensor");
const LAYOUT: &str = "torch.distributed._mesh_layout";
const PLACEMENTS: &str = "torch.distributed.tensor.placement_types";
const SPEC: &str = "torch.distributed.tensor._dtensor_spec";

/// The number in the pickle's memo under which the mesh is known: all DTensors of a file share one. Slices of it have
/// the numbers that their dims give as bits.
const MESH_MEMO: u32 = 0;

/// A mesh of more dims is not sliced.
const MAX_SLICED_DIMS: usize = 8;

/// The storage key of the mesh's tensor of ranks.
pub const MESH_KEY: usize = 0;

/// Writes the DTensors of one rank.
pub struct DTensorWriter<'a> {
    pub mesh: &'a DeviceMesh,
    pub style: &'a Style,
    pub rank: Rank,
    /// Of the job.
    pub world_size: u32,
    /// Of the rank in the mesh, where it is.
    pub coordinate: Option<&'a Dims>,
    /// The meshes that are in the pickle's memo.
    pub known: BTreeSet<u32>,
}

/// What is to be known of a DTensor.
#[derive(Clone, Copy)]
pub struct DTensor<'a> {
    pub dtype: Dtype,
    pub shape: &'a [u64],
    pub placements: &'a [Placement],
    /// The dims of its own mesh, where that is a slice.
    pub slice: Option<&'a [MeshDim]>,
    /// Storage key and sizes of the local tensor, which is contiguous.
    pub key: usize,
    pub local_sizes: &'a [u64],
}

impl DTensorWriter<'_> {
    /// `_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, (..), (None, {_local_tensor, _spec}))`
    pub fn write(&mut self, writer: &mut Writer, tensor: DTensor<'_>) {
        start_wrapper(writer, DTENSOR, tensor.dtype, tensor.shape, false);
        writer.none().empty_dict().mark();
        writer.string("_local_tensor");
        write_tensor(writer, tensor.dtype, tensor.key, tensor.local_sizes);
        writer.string("_spec");
        self.spec(writer, tensor);
        writer.setitems().tuple(2).tuple(4).reduce();
    }

    /// The first number of the memo that is free for others.
    pub fn first_free_memo(&self) -> u32 {
        1 << self.mesh.ndim().min(MAX_SLICED_DIMS)
    }

    /// The dims of a tensor's own mesh: all, unless it is a slice. Before 2.10 a slice cannot say what it is one of.
    fn dims(&self, slice: Option<&[MeshDim]>) -> Vec<usize> {
        match slice {
            Some(dims) if self.style.release >= Release::V2_10 && self.mesh.ndim() <= MAX_SLICED_DIMS => {
                dims.iter().map(|dim| dim.0).collect()
            }
            _ => (0..self.mesh.ndim()).collect(),
        }
    }

    /// The mesh of these dims: written the first time, the same object from then on.
    fn mesh_of(&mut self, writer: &mut Writer, dims: &[usize]) {
        let is_whole = dims.len() == self.mesh.ndim();
        let memo = if is_whole { MESH_MEMO } else { dims.iter().map(|dim| 1 << dim).sum() };
        if self.known.contains(&memo) {
            writer.get(memo);
            return;
        }
        self.mesh(writer, dims);
        writer.put(memo);
        self.known.insert(memo);
    }

    fn spec(&mut self, writer: &mut Writer, tensor: DTensor<'_>) {
        let dims = self.dims(tensor.slice);
        let placements: Vec<Placement> = dims.iter().map(|&dim| tensor.placements[dim]).collect();
        let shape: Dims = dims.iter().map(|&dim| self.mesh.shape()[dim]).collect();
        instance(writer, (SPEC, "DTensorSpec"));
        writer.empty_dict().mark();
        writer.string("mesh");
        self.mesh_of(writer, &dims);
        writer.string("placements");
        tuple(writer, &placements, |writer, placement| write_placement(writer, *placement));
        writer.string("tensor_meta").global(SPEC, "TensorMeta");
        writer.global("torch", "Size");
        write_sizes(writer, tensor.shape);
        writer.tuple(1).reduce();
        write_sizes(writer, &contiguous_strides(tensor.shape));
        writer.global("torch", tensor.dtype.torch_name()).tuple(3).newobj();
        if self.style.release >= Release::V2_10 {
            let is_strided = |placement: &Placement| matches!(placement, Placement::StridedShard { .. });
            let strided = placements.iter().any(is_strided);
            writer.string("shard_order");
            match shard_order(&placements, &shape) {
                Some(order) if !strided || self.style.release == Release::V2_10 => write_shard_order(writer, &order),
                // The split factors say it.
                _ => {
                    writer.none();
                }
            }
            if self.style.release >= Release::V2_11 {
                writer.string("use_strided_shard_as_shard_order").boolean(strided);
            }
        }
        // Computed when it is asked for.
        writer.string("_hash").none();
        writer.setitems().build();
    }

    fn mesh(&mut self, writer: &mut Writer, dims: &[usize]) {
        let (mesh, style, rank) = (self.mesh, self.style, self.rank);
        let names: Option<Vec<&str>> = mesh.names().map(|names| dims.iter().map(|&dim| names[dim].as_str()).collect());
        let coordinate: Option<Dims> = self.coordinate.map(|all| dims.iter().map(|&dim| all[dim]).collect());
        instance(writer, DEVICE_MESH);
        writer.empty_dict().mark();
        if style.release == Release::V2_5 {
            writer.string("device_type").string(&style.device_type);
            writer.string("mesh");
            write_tensor(writer, Dtype::I32, MESH_KEY, mesh.shape());
            writer.string("mesh_dim_names");
            write_names(writer, names.as_deref());
            writer.string("_flatten_mesh_list");
            write_ranks(writer, mesh.ranks());
            // To 2.7 groups have tags and ranks, in 2.8 and 2.9 names.
            writer.string("_dim_group_infos");
            list(writer, &self.groups(), |writer, group| {
                writer.string(&format!("ptd:{}", group.name));
                list(writer, &group.ranks, |writer, rank| {
                    writer.uint(rank.0.into());
                });
                writer.string(&group.name.to_string()).tuple(3);
            });
            writer.string("_coordinate_on_dim");
            write_coordinate(writer, coordinate.as_ref(), style.release);
        } else {
            writer.string("_device_type").string(&style.device_type);
            writer.string("_layout");
            self.layout(writer, dims);
            writer.string("_rank_map");
            write_tensor(writer, Dtype::I32, MESH_KEY, &[mesh.world_size() as u64]);
            writer.string("_mesh_dim_names");
            write_names(writer, names.as_deref());
            writer.string("_root_mesh");
            if dims.len() == mesh.ndim() {
                writer.none();
            } else {
                let all: Vec<usize> = (0..mesh.ndim()).collect();
                self.mesh_of(writer, &all);
            }
            writer.string("_preserve_rank_order").boolean(false);
            writer.string("_flatten_rank_map");
            write_ranks(writer, mesh.ranks());
            writer.string("_flatten_mapping").empty_dict();
            if style.release >= Release::V2_11 {
                writer.string("_rank").uint(rank.0.into());
            }
            writer.string("_coordinate_on_dim");
            write_coordinate(writer, coordinate.as_ref(), style.release);
        }
        writer.string("_dim_group_names");
        let groups = self.groups();
        // Who is not in the mesh is in none of them.
        let groups: Vec<&Group> = dims.iter().filter_map(|&dim| groups.get(dim)).collect();
        list(writer, &groups, |writer, group| {
            writer.string(&group.name.to_string());
        });
        writer.string("_thread_id").none();
        writer.string("_hash").none();
        writer.setitems().build();
    }

    fn layout(&self, writer: &mut Writer, dims: &[usize]) {
        // Strides count in the list of ranks of the root.
        let strides = contiguous_strides(self.mesh.shape());
        let axes: Vec<(u64, u64)> = dims.iter().map(|&dim| (self.mesh.shape()[dim], strides[dim])).collect();
        instance(writer, (LAYOUT, "_MeshLayout"));
        writer.empty_dict();
        if self.style.release < Release::V2_13 {
            let (sizes, strides): (Dims, Dims) = axes.into_iter().unzip();
            write_layout(writer, &sizes, &strides);
            writer.build();
            return;
        }
        writer.string("axes");
        tuple(writer, &axes, |writer, &(size, stride)| {
            instance(writer, (LAYOUT, "_FlatLayout"));
            writer.empty_dict();
            // An axis of one rank has no stride.
            if size == 1 {
                write_layout(writer, &[], &[]);
            } else {
                write_layout(writer, &[size], &[stride]);
            }
            writer.build();
        });
        writer.setitem().build();
    }

    /// The process group of each mesh dim that this rank is in, under the name it has in a job whose first groups are
    /// those of this mesh: there, and only there, the loaded tensors can communicate.
    fn groups(&self) -> Vec<Group> {
        let Some(own) = self.coordinate else { return Vec::new() };
        let (shape, world_size) = (self.mesh.shape(), self.mesh.world_size() as u64);
        let mut next = 1;
        let mut groups = Vec::new();
        for (dim, &size) in shape.iter().enumerate() {
            let members = (0..size).map(|at| {
                let mut coordinate = own.clone();
                coordinate[dim] = at;
                self.mesh.rank_at(&coordinate)
            });
            let whole_world =
                size == u64::from(self.world_size) && (shape.len() == 1 || self.style.release >= Release::V2_10);
            let name = if whole_world {
                0
            } else {
                let others = shape.iter().zip(own).enumerate().filter(|(other, _)| *other != dim);
                let own = others.fold(0, |index, (_, (&size, &at))| index * size + at);
                let name = next + own;
                next += world_size / size;
                name
            };
            groups.push(Group { name, ranks: members.collect() });
        }
        groups
    }
}

struct Group {
    /// A number; 0 is the group of all ranks.
    name: u64,
    ranks: Vec<Rank>,
}

/// `cls.__new__(cls)`
pub(super) fn instance(writer: &mut Writer, class: (&str, &str)) {
    writer.global(class.0, class.1).empty_tuple().newobj();
}

/// `{'shape': .., 'stride': ..}` on the dict on top.
fn write_layout(writer: &mut Writer, shape: &[u64], stride: &[u64]) {
    writer.mark().string("shape");
    write_sizes(writer, shape);
    writer.string("stride");
    write_sizes(writer, stride);
    writer.setitems();
}

fn tuple<T>(writer: &mut Writer, items: &[T], mut each: impl FnMut(&mut Writer, &T)) {
    if items.len() > 3 {
        writer.mark();
    }
    for item in items {
        each(writer, item);
    }
    writer.tuple(items.len());
}

pub(super) fn list<T>(writer: &mut Writer, items: &[T], mut each: impl FnMut(&mut Writer, &T)) {
    let Ok(()): Result<(), std::convert::Infallible> = writer.empty_list().extend_list(items.iter(), |writer, item| {
        each(writer, item);
        Ok(())
    });
}

/// A list to 2.10, a tuple from 2.11 on.
fn write_coordinate(writer: &mut Writer, coordinate: Option<&Dims>, release: Release) {
    match coordinate {
        None => {
            writer.none();
        }
        Some(coordinate) if release <= Release::V2_10 => list(writer, coordinate, |writer, at| {
            writer.uint(*at);
        }),
        Some(coordinate) => write_sizes(writer, coordinate),
    }
}

fn write_names(writer: &mut Writer, names: Option<&[&str]>) {
    match names {
        Some(names) => tuple(writer, names, |writer, name| {
            writer.string(name);
        }),
        None => {
            writer.none();
        }
    }
}

fn write_ranks(writer: &mut Writer, ranks: &[Rank]) {
    tuple(writer, ranks, |writer, rank| {
        writer.uint(rank.0.into());
    });
}

/// `cls.__new__(cls)` with a state, always: from 2.10 on these are classes of C++, which are only made at BUILD.
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

/// For each tensor dim the mesh dims that shard it, in the order in which they do; `None` where a split factor is not
/// that of an order.
fn shard_order(placements: &[Placement], mesh_shape: &[u64]) -> Option<Vec<(TensorDim, Vec<MeshDim>)>> {
    let mut order: BTreeMap<TensorDim, Vec<MeshDim>> = BTreeMap::new();
    for (at, placement) in placements.iter().enumerate().rev() {
        let Some(dim) = placement.sharded_dim() else { continue };
        let factor = if let Placement::StridedShard { split_factor, .. } = placement { *split_factor } else { 1 };
        let known = order.entry(dim).or_default();
        // It comes behind as many of the dims to its right as make that many parts.
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
    fn versions_have_releases() {
        let of = Release::of_version;
        assert_eq!((of("2.4.1"), of("1.13"), of("latest"), of("2")), (None, None, None, None));
        assert_eq!(
            (of("2.5.1"), of("v2.6.0+cu124"), of("2.10.0")),
            (Some(Release::V2_5), Some(Release::V2_5), Some(Release::V2_10))
        );
        assert_eq!(
            (of("2.12.0"), of("2.15.0+cu132"), of("3.0")),
            (Some(Release::V2_11), Some(Release::V2_13), Some(Release::V2_13))
        );
    }

    #[test]
    fn orders_follow_from_split_factors() {
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

    #[test]
    fn groups_are_numbered_as_in_a_fresh_job() {
        let names = |mesh: &str, rank: u32, release| {
            let mesh = DeviceMesh::parse(mesh).unwrap();
            let style = Style { release, ..Style::default() };
            let coordinate = mesh.coordinate(Rank(rank)).unwrap();
            let writer = DTensorWriter {
                mesh: &mesh,
                style: &style,
                rank: Rank(rank),
                world_size: u32::try_from(mesh.world_size()).unwrap(),
                coordinate: Some(&coordinate),
                known: BTreeSet::new(),
            };
            writer.groups().iter().map(|group| group.name).collect::<Vec<_>>()
        };
        // What the fixtures of 4 ranks have.
        assert_eq!(names("dp=4", 1, Release::V2_13), [0]);
        assert_eq!(names("dp=2,tp=2", 1, Release::V2_13), [2, 3]);
        assert_eq!(names("dp=2,tp=2", 2, Release::V2_5), [1, 4]);
    }
}
