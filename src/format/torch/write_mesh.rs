//! Writes DeviceMeshes as PyTorch pickles them, in the form of a [`Release`]. The module `mesh` reads such meshes. Unit
//! of sizes and strides: ranks.
//!
//! Invariant: a pickle has the mesh once, and each slice of the mesh once. Later uses fetch the object from the memo.
//!
//! Source: `torch/distributed/device_mesh.py`, `torch/distributed/_mesh_layout.py`.

use std::collections::BTreeSet;

use super::release::{DTensorStyle, Release};
use super::write::{instance, list, tuple, write_sizes, write_tensor};
use crate::catalog::{Dtype, contiguous_strides};
use crate::layout::{DeviceMesh, Dims, MeshDim, Rank};
use torch_pickle::pickle::Writer;

const DEVICE_MESH: (&str, &str) = ("torch.distributed.device_mesh", "DeviceMesh");
const LAYOUT: &str = "torch.distributed._mesh_layout";

/// The memo index of the complete mesh, which all DTensors of a file share. The memo index of a slice is a bit mask:
/// bit `i` is set if mesh dim `i` belongs to the slice.
const MESH_MEMO: u32 = 0;

/// The maximum number of dims of a mesh of which slices are written, because every possible slice needs a memo index.
/// If a mesh has more dims, a tensor on a slice is written with the complete mesh.
const MAX_SLICED_DIMS: usize = 8;

/// Writes the meshes of one rank's DTensors.
pub struct MeshWriter<'a> {
    pub mesh: &'a DeviceMesh,
    pub style: &'a DTensorStyle,
    pub rank: Rank,
    /// The number of ranks in the job.
    pub world_size: u32,
    /// The coordinate of the rank in the mesh; `None` if the rank is outside the mesh.
    pub coordinate: Option<&'a Dims>,
    /// The storage key of the tensor that lists the ranks of the mesh.
    pub key: usize,
    /// The memo indices of the meshes and slices that are already written.
    pub written_meshes: BTreeSet<u32>,
}

impl MeshWriter<'_> {
    /// Returns the lowest memo index that is above the memo indices of all meshes and slices.
    pub fn first_free_memo(&self) -> u32 {
        1 << self.mesh.ndim().min(MAX_SLICED_DIMS)
    }

    /// Returns the dims of the mesh to write for a tensor on `slice`: the dims of the slice, or all dims if `slice` is
    /// `None`. Also returns all dims if the mesh has more than [`MAX_SLICED_DIMS`] dims, or if the target is a PyTorch
    /// release before 2.10, in which a slice cannot refer to its root mesh.
    pub fn dims(&self, slice: Option<&[MeshDim]>) -> Vec<usize> {
        match slice {
            Some(dims) if self.style.release >= Release::V2_10 && self.mesh.ndim() <= MAX_SLICED_DIMS => {
                dims.iter().map(|dim| dim.0).collect()
            }
            _ => (0..self.mesh.ndim()).collect(),
        }
    }

    /// Writes the mesh with these dims. If this mesh is already in the pickle, writes a reference to the memo.
    pub fn write(&mut self, writer: &mut Writer, dims: &[usize]) {
        let is_whole = dims.len() == self.mesh.ndim();
        let memo = if is_whole { MESH_MEMO } else { dims.iter().map(|dim| 1 << dim).sum() };
        if self.written_meshes.contains(&memo) {
            writer.get(memo);
            return;
        }
        self.write_mesh(writer, dims);
        writer.put(memo);
        self.written_meshes.insert(memo);
    }

    fn write_mesh(&mut self, writer: &mut Writer, dims: &[usize]) {
        let (mesh, style, rank) = (self.mesh, self.style, self.rank);
        let names: Option<Vec<&str>> = mesh.names().map(|names| dims.iter().map(|&dim| names[dim].as_str()).collect());
        let coordinate: Option<Dims> = self.coordinate.map(|all| dims.iter().map(|&dim| all[dim]).collect());
        instance(writer, DEVICE_MESH);
        writer.empty_dict().mark();
        if style.release == Release::V2_5 {
            writer.string("device_type").string(&style.device_type);
            writer.string("mesh");
            write_tensor(writer, Dtype::I32, self.key, mesh.shape());
            writer.string("mesh_dim_names");
            write_names(writer, names.as_deref());
            writer.string("_flatten_mesh_list");
            write_ranks(writer, mesh.ranks());
            // Up to PyTorch 2.7, a group is identified by a tag and its ranks; in 2.8 and 2.9, by its name. Both forms
            // are written.
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
            self.write_mesh_layout(writer, dims);
            writer.string("_rank_map");
            write_tensor(writer, Dtype::I32, self.key, &[mesh.world_size() as u64]);
            writer.string("_mesh_dim_names");
            write_names(writer, names.as_deref());
            writer.string("_root_mesh");
            if dims.len() == mesh.ndim() {
                writer.none();
            } else {
                let all: Vec<usize> = (0..mesh.ndim()).collect();
                self.write(writer, &all);
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
        // A rank outside the mesh is in none of the groups.
        let groups: Vec<&MeshGroup> = dims.iter().filter_map(|&dim| groups.get(dim)).collect();
        list(writer, &groups, |writer, group| {
            writer.string(&group.name.to_string());
        });
        writer.string("_thread_id").none();
        writer.string("_hash").none();
        writer.setitems().build();
    }

    fn write_mesh_layout(&self, writer: &mut Writer, dims: &[usize]) {
        // The strides of the layout refer to the list of ranks of the root mesh.
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
            // For an axis with one rank, PyTorch writes neither the size nor the stride.
            if size == 1 {
                write_layout(writer, &[], &[]);
            } else {
                write_layout(writer, &[size], &[stride]);
            }
            writer.build();
        });
        writer.setitem().build();
    }

    /// Returns, for each mesh dim, the process group along that dim that contains this rank. The name of a process
    /// group is a number, because PyTorch counts the groups in the order in which a job creates them. The names in the
    /// result are right only if the job creates the groups of this mesh before all other groups; only in such a job can
    /// loaded DTensors communicate.
    fn groups(&self) -> Vec<MeshGroup> {
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
            groups.push(MeshGroup { name, ranks: members.collect() });
        }
        groups
    }
}

struct MeshGroup {
    /// The name of the process group, which is a number. 0 is the name of the group of all ranks of the job.
    name: u64,
    ranks: Vec<Rank>,
}

/// Writes the entries `shape` and `stride` into the dict on top of the stack.
fn write_layout(writer: &mut Writer, shape: &[u64], stride: &[u64]) {
    writer.mark().string("shape");
    write_sizes(writer, shape);
    writer.string("stride");
    write_sizes(writer, stride);
    writer.setitems();
}

/// Writes the coordinate of a rank: a list up to PyTorch 2.10, a tuple from 2.11 on.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_the_names_of_a_fresh_job() {
        let names = |mesh: &str, rank: u32, release| {
            let mesh = DeviceMesh::parse(mesh).unwrap();
            let style = DTensorStyle { release, ..DTensorStyle::default() };
            let coordinate = mesh.coordinate(Rank(rank)).unwrap();
            let writer = MeshWriter {
                mesh: &mesh,
                style: &style,
                rank: Rank(rank),
                world_size: u32::try_from(mesh.world_size()).unwrap(),
                coordinate: Some(&coordinate),
                key: 0,
                written_meshes: BTreeSet::new(),
            };
            writer.groups().iter().map(|group| group.name).collect::<Vec<_>>()
        };
        // The expected names are the names in the fixtures of 4 ranks.
        assert_eq!(names("dp=4", 1, Release::V2_13), [0]);
        assert_eq!(names("dp=2,tp=2", 1, Release::V2_13), [2, 3]);
        assert_eq!(names("dp=2,tp=2", 2, Release::V2_5), [1, 4]);
    }
}
