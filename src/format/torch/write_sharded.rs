//! Writes ShardedTensors as FSDP1 pickles them under `SHARDED_STATE_DICT`, so that `torch.load` restores ShardedTensors
//! in the process with the rank of the file.
//!
//! Each ShardedTensor in a rank file lists the shards of all ranks of its process group, and has the data of the rank's
//! shard. `_sharded_pre_load_state_dict_hook` ignores the offsets in this list: it treats the rows of the n-th rank of
//! the process group as the n-th part of `torch.chunk`. So the n-th rank must get exactly the n-th part of
//! `torch.chunk`, and the ranks of a [`RankGroup`] must be ascending. Unit of shapes: elements.
//!
//! The tensor properties are written as a tuple of five fields: early releases reject a sixth field (strides), and 2.15
//! accepts both forms. Under hybrid sharding, PyTorch records for a local shard the rank within the process group, and
//! in the list of all shards the global rank. dtshard writes the global rank in both fields.
//!
//! Source: `torch/distributed/fsdp/_shard_utils.py` (`_create_chunk_sharded_tensor`),
//! `torch/distributed/_shard/sharded_tensor/api.py` (`__getstate__`, `__setstate__`), `metadata.py`.

use std::ops::Range;

use super::write::{StoredView, instance, list, start_wrapper, write_cpu, write_sizes, write_strided, write_view};

use crate::catalog::{Dtype, Fqn, TensorEntry};
use crate::error::{Error, Result};
use crate::layout::{DeviceMesh, Dims, MeshDim, Placement, Rank, Region, TensorDim, chunk, comma_list};
use torch_pickle::pickle::Writer;

const SHARDED_TENSOR: (&str, &str) = ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor");
const GROUP_STATE: (&str, &str) = (SHARDED_TENSOR.0, "ShardedTensor.ProcessGroupState");
const SHARD: (&str, &str) = ("torch.distributed._shard.sharded_tensor.shard", "Shard");
const METADATA: &str = "torch.distributed._shard.sharded_tensor.metadata";
const SHARD_METADATA: (&str, &str) = ("torch.distributed._shard.metadata", "ShardMetadata");
const REMOTE_DEVICE: (&str, &str) = ("torch.distributed.remote_device", "_remote_device");
const CHUNKS: (&str, &str) = ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec");
const BOXES: (&str, &str) = ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec");

/// Returns the mesh dim over which FSDP1 shards a tensor with these placements. Returns `None` if the placements
/// replicate the tensor, or if the tensor has no elements; such a tensor is written as a plain tensor.
///
/// # Errors
/// `Unsupported` for placements other than `S(0)` on one mesh dim.
pub fn sharding_dim(
    fqn: &Fqn,
    entry: &TensorEntry,
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<Option<MeshDim>> {
    // A mesh dim with one rank does not shard anything.
    let cut = |(dim, placement): &(usize, &Placement)| mesh.shape()[*dim] > 1 && **placement != Placement::Replicate;
    let mut cuts = placements.iter().enumerate().filter(cut);
    match (cuts.next(), cuts.next()) {
        (None, _) => Ok(None),
        _ if entry.shape.contains(&0) => Ok(None),
        (Some((dim, Placement::Shard(TensorDim(0)))), None) => Ok(Some(MeshDim(dim))),
        _ => {
            let list = comma_list(placements);
            Err(Error::unsupported(
                format!("{fqn}: a ShardedTensor cannot have the placements {list} on the mesh {mesh}"),
                "use S(0) on one mesh dim and R on the others, as FSDP1 does, or options::tensor_class dtensor, which \
                 allows any placements",
            ))
        }
    }
}

/// The ranks of a process group. Each ShardedTensor is divided among these ranks: a rank has one shard, or no shard if
/// the tensor has fewer rows than the group has ranks.
pub struct RankGroup {
    pub(super) ranks: Vec<Rank>,
    /// The index in `ranks` of the rank whose file is written.
    own: usize,
}

impl RankGroup {
    /// Returns the group of ranks along the mesh dim `dim` that contains the rank at `coordinate`.
    pub fn new(mesh: &DeviceMesh, dim: MeshDim, coordinate: &Dims) -> Self {
        let rank_at = |at| {
            let mut other = coordinate.clone();
            other[dim.0] = at;
            mesh.rank_at(&other)
        };
        let own = usize::try_from(coordinate[dim.0]).expect("ranks are 32-bit numbers");
        Self { ranks: (0..mesh.shape()[dim.0]).map(rank_at).collect(), own }
    }

    /// Returns the group of the `len` ranks from `first` on. `own` is the index in the group of the rank whose file is
    /// written.
    pub fn consecutive(first: Rank, len: u32, own: u32) -> Self {
        Self { ranks: (first.0..first.0 + len).map(Rank).collect(), own: own as usize }
    }

    /// Returns the shards of a tensor in the order of `ranks`. If there are fewer shards than ranks, the last ranks
    /// have no shard.
    fn boxes(&self, shape: &[u64]) -> Vec<Region> {
        let (rows, parts) = (shape[0], self.ranks.len() as u64);
        let rows_of = (0..parts).map(|part| chunk(rows, parts, part)).take_while(|range| !range.is_empty());
        let region = |range: Range<u64>| {
            let mut region = Region::whole(shape);
            (region.offsets[0], region.sizes[0]) = (range.start, range.end - range.start);
            region
        };
        rows_of.map(region).collect()
    }
}

/// Writes the ShardedTensors of one rank.
pub struct ShardedWriter {
    group: RankGroup,
    /// The number of ranks in the job, which the pickled process group records.
    world_size: usize,
    /// The first memo index that this writer uses. An object with the index `i` in [`memo`] has the memo index `memo +
    /// i`.
    memo: u32,
    /// For each index in [`memo`], true if the object with this index is already in the pickle's memo.
    written: Vec<bool>,
}

/// The memo indices, relative to `ShardedWriter::memo`, of objects that many tensors and shards refer to. Each of these
/// objects is written only once, to keep the pickle small: every ShardedTensor lists the shards of all ranks.
mod memo {
    /// The memo index, relative to `ShardedWriter::memo`, of the state of the process group.
    pub const GROUP: usize = 0;
    /// The memo index, relative to `ShardedWriter::memo`, of the class ShardMetadata.
    pub const SHARD_METADATA: usize = 1;
    /// The memo index, relative to `ShardedWriter::memo`, of the string `shard_offsets`.
    pub const OFFSETS: usize = 2;
    /// The memo index, relative to `ShardedWriter::memo`, of the string `shard_sizes`.
    pub const SIZES: usize = 3;
    /// The memo index, relative to `ShardedWriter::memo`, of the string `placement`.
    pub const PLACEMENT: usize = 4;
    /// The memo index, relative to `ShardedWriter::memo`, of the device of the group's first rank. The devices of the
    /// other ranks have the next indices.
    pub const DEVICES: usize = 5;
}

/// A ShardedTensor to write.
#[derive(Clone, Copy)]
pub struct ShardedTensorSpec<'a> {
    pub dtype: Dtype,
    /// The shape of the tensor. It has at least one dim, and no size is 0.
    pub shape: &'a [u64],
    /// The key of the storage with this rank's shard. The shard is contiguous and begins at element 0 of the storage.
    pub key: usize,
    /// The number of elements in the storage, if the storage is longer than the shard; otherwise `None`.
    pub stored: Option<u64>,
    pub requires_grad: bool,
}

impl ShardedWriter {
    /// Returns a writer of the ShardedTensors in the file of one rank. `group` records which rank this is. The writer
    /// uses the memo indices from `memo` on.
    pub fn new(group: RankGroup, world_size: usize, memo: u32) -> Self {
        let known = vec![false; memo::DEVICES + group.ranks.len()];
        Self { group, world_size, memo, written: known }
    }

    /// Writes a ShardedTensor: `_rebuild_from_type_v2(_rebuild_wrapper_subclass, ShardedTensor, (..), (local shards,
    /// metadata, group, spec, init_rrefs))`. Returns the byte range of the pickle that differs between the ranks of the
    /// group.
    pub fn write(&mut self, writer: &mut Writer, tensor: ShardedTensorSpec<'_>) -> Range<usize> {
        let boxes = self.group.boxes(tensor.shape);
        let ShardedTensorSpec { dtype, key, requires_grad, .. } = tensor;
        start_wrapper(writer, SHARDED_TENSOR, dtype, tensor.shape, requires_grad);
        writer.mark();
        let own_from = writer.written().len();
        let own = self.group.own;
        list(writer, boxes.get(own).as_slice(), |writer, region| {
            instance(writer, SHARD);
            writer.none().empty_dict().mark().string("tensor");
            let stored = tensor.stored.unwrap_or_else(|| region.numel());
            write_view(writer, StoredView { stored, requires_grad, ..StoredView::whole(dtype, key, &region.sizes) });
            writer.string("metadata");
            self.shard_metadata(writer, own, region);
            writer.setitems().tuple(2).build();
        });
        let own_until = writer.written().len();
        instance(writer, (METADATA, "ShardedTensorMetadata"));
        writer.empty_dict().mark().string("shards_metadata");
        self.shards_metadata(writer, &boxes);
        writer.string("size").global("torch", "Size");
        write_sizes(writer, tensor.shape);
        writer.tuple(1).reduce().string("tensor_properties");
        write_properties(writer, dtype, requires_grad);
        writer.setitems().build();
        self.group_state(writer);
        self.spec(writer, &boxes);
        writer.boolean(false).tuple(5).tuple(4).reduce();
        own_from..own_until
    }

    /// Writes the object with the index `what` in [`memo`]. If the object is already in the pickle, writes a reference
    /// to the memo.
    fn write_once(&mut self, writer: &mut Writer, what: usize, write: impl FnOnce(&Self, &mut Writer)) {
        let number = self.memo + u32::try_from(what).expect("ranks are 32-bit numbers");
        if std::mem::replace(&mut self.written[what], true) {
            writer.get(number);
        } else {
            write(self, writer);
            writer.put(number);
        }
    }

    fn group_state(&mut self, writer: &mut Writer) {
        self.write_once(writer, memo::GROUP, |Self { group, world_size, .. }, writer| {
            instance(writer, GROUP_STATE);
            writer.empty_dict().mark();
            writer.string("local_rank").uint(group.own as u64);
            writer.string("global_rank").uint(group.ranks[group.own].0.into());
            writer.string("local_world_size").uint(group.ranks.len() as u64);
            writer.string("global_world_size").uint(*world_size as u64);
            writer.setitems().build();
        });
    }

    fn device(&mut self, writer: &mut Writer, part: usize) {
        self.write_once(writer, memo::DEVICES + part, |own, writer| {
            instance(writer, REMOTE_DEVICE);
            writer.empty_dict().mark().string("_worker_name").none();
            writer.string("_rank").uint(own.group.ranks[part].0.into()).string("_device");
            write_cpu(writer);
            writer.setitems().build();
        });
    }

    fn key(&mut self, writer: &mut Writer, what: usize, name: &str) {
        self.write_once(writer, what, |_, writer| {
            writer.string(name);
        });
    }

    fn shard_metadata(&mut self, writer: &mut Writer, part: usize, region: &Region) {
        let write_number = |writer: &mut Writer, number: &u64| {
            writer.uint(*number);
        };
        self.write_once(writer, memo::SHARD_METADATA, |_, writer| {
            writer.global(SHARD_METADATA.0, SHARD_METADATA.1);
        });
        writer.empty_tuple().newobj().none().empty_dict().mark();
        self.key(writer, memo::OFFSETS, "shard_offsets");
        list(writer, &region.offsets, write_number);
        self.key(writer, memo::SIZES, "shard_sizes");
        list(writer, &region.sizes, write_number);
        self.key(writer, memo::PLACEMENT, "placement");
        self.device(writer, part);
        writer.setitems().tuple(2).build();
    }

    fn shards_metadata(&mut self, writer: &mut Writer, boxes: &[Region]) {
        let numbered: Vec<(usize, &Region)> = boxes.iter().enumerate().collect();
        list(writer, &numbered, |writer, (part, region)| self.shard_metadata(writer, *part, region));
    }

    /// Writes the sharding spec that PyTorch's `_infer_sharding_spec_from_shards_metadata` derives from the shards. If
    /// there is a single shard, PyTorch cannot derive the sharded dim, so the spec has no sharded dim.
    fn spec(&mut self, writer: &mut Writer, boxes: &[Region]) {
        if boxes.len() == 1 {
            instance(writer, BOXES);
            writer.empty_dict().string("shards");
            self.shards_metadata(writer, boxes);
            writer.setitem().build();
            return;
        }
        instance(writer, CHUNKS);
        writer.empty_dict().mark().string("dim").int(0).string("placements");
        let parts: Vec<usize> = (0..boxes.len()).collect();
        list(writer, &parts, |writer, part| {
            self.device(writer, *part);
        });
        writer.setitems().build();
    }
}

/// Writes the tensor properties `(dtype, layout, requires_grad, memory format, pin_memory)`.
fn write_properties(writer: &mut Writer, dtype: Dtype, requires_grad: bool) {
    instance(writer, (METADATA, "TensorProperties"));
    writer.mark().global("torch", dtype.torch_name());
    write_strided(writer);
    writer.boolean(requires_grad);
    writer.global(METADATA, "MEM_FORMAT_ENCODING").int(0).tuple(1).reduce();
    writer.boolean(false).tuple(5).build();
}
