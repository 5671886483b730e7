//! A flat parameter as the ShardedTensor that `init_from_local_shards` makes of it.
//!
//! Source: `torch/distributed/_shard/sharded_tensor/api.py` (`__getstate__`, `__setstate__`), `metadata.py`.

use std::collections::HashSet;
use std::ops::Range;

use crate::catalog::Dtype;
use crate::catalog::flat::FlatLayout;
use crate::format::pickle::Writer;
use crate::format::torch::{StoredView, write_sizes, write_view};
use crate::layout::{Rank, chunk};

const SHARDED_TENSOR: (&str, &str) = ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor");
const GROUP_STATE: (&str, &str) = (SHARDED_TENSOR.0, "ShardedTensor.ProcessGroupState");
const SHARD: (&str, &str) = ("torch.distributed._shard.sharded_tensor.shard", "Shard");
const METADATA: &str = "torch.distributed._shard.sharded_tensor.metadata";
const SHARD_METADATA: (&str, &str) = ("torch.distributed._shard.metadata", "ShardMetadata");
const REMOTE_DEVICE: (&str, &str) = ("torch.distributed.remote_device", "_remote_device");
const CHUNKS: (&str, &str) = ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec");
const BOXES: (&str, &str) = ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec");

/// Writes the ShardedTensors of one rank.
pub struct ShardedWriter {
    /// The first rank of the group, how many ranks that has, and which of them is written.
    first: u32,
    size: u32,
    own: u32,
    world_size: u32,
    /// What is in the pickle's memo: the state of the process group under 0, devices from 1 on.
    known: HashSet<u32>,
}

/// What is to be known of a ShardedTensor of one dim.
#[derive(Clone, Copy)]
pub struct Sharded<'a> {
    pub dtype: Dtype,
    pub total: u64,
    /// The rank's own part; it may be empty.
    pub local: StoredView<'a>,
}

impl ShardedWriter {
    pub fn new(layout: &FlatLayout, rank: Rank) -> Self {
        let own = rank.0 % layout.shard_group_size;
        let (size, world_size) = (layout.shard_group_size, layout.world_size);
        Self { first: rank.0 - own, size, own, world_size, known: HashSet::new() }
    }

    /// `_rebuild_from_type_v2(_rebuild_wrapper_subclass, ShardedTensor, (..), (local shards, metadata, group, spec,
    /// init_rrefs))`. Gives where in the pickle ends what other ranks of the group do not have alike.
    pub fn write(&mut self, writer: &mut Writer, tensor: Sharded<'_>) -> usize {
        let Sharded { dtype, total, local } = tensor;
        let parts = (0..self.size).map(|part| (part, chunk(total, self.size.into(), part.into())));
        let parts: Vec<(u32, Range<u64>)> = parts.take_while(|(_, range)| !range.is_empty()).collect();
        writer.global("torch._tensor", "_rebuild_from_type_v2").mark();
        writer.global("torch._utils", "_rebuild_wrapper_subclass").global(SHARDED_TENSOR.0, SHARDED_TENSOR.1);
        writer.mark().global(SHARDED_TENSOR.0, SHARDED_TENSOR.1).global("torch", dtype.torch_name());
        write_sizes(writer, &[total]);
        write_sizes(writer, &[1]);
        writer.int(0);
        strided(writer);
        writer.global("torch", "device").string("cpu").tuple(1).reduce();
        writer.boolean(true).tuple(8);

        writer.mark();
        writer.empty_list();
        if let Some((part, range)) = parts.get(self.own as usize) {
            instance(writer, SHARD);
            writer.none().empty_dict().mark().string("tensor");
            write_view(writer, local);
            writer.string("metadata");
            self.shard_metadata(writer, *part, range);
            writer.setitems().tuple(2).build().append();
        }
        let own_until = writer.written().len();
        instance(writer, (METADATA, "ShardedTensorMetadata"));
        writer.empty_dict().mark().string("shards_metadata");
        self.shards_metadata(writer, &parts);
        writer.string("size").global("torch", "Size");
        write_sizes(writer, &[total]);
        writer.tuple(1).reduce().string("tensor_properties");
        properties(writer, dtype);
        writer.setitems().build();
        self.group(writer);
        self.spec(writer, &parts);
        writer.boolean(false).tuple(5).tuple(4).reduce();
        own_until
    }

    /// The same object as before, once it is in the memo.
    fn remembered(&mut self, writer: &mut Writer, memo: u32, write: impl FnOnce(&mut Writer)) {
        if self.known.insert(memo) {
            write(writer);
            writer.put(memo);
        } else {
            writer.get(memo);
        }
    }

    fn group(&mut self, writer: &mut Writer) {
        let Self { first, size, own, world_size, .. } = *self;
        self.remembered(writer, 0, |writer| {
            instance(writer, GROUP_STATE);
            writer.empty_dict().mark();
            writer.string("local_rank").uint(own.into());
            writer.string("global_rank").uint((first + own).into());
            writer.string("local_world_size").uint(size.into());
            writer.string("global_world_size").uint(world_size.into());
            writer.setitems().build();
        });
    }

    fn device(&mut self, writer: &mut Writer, part: u32) {
        let rank = self.first + part;
        self.remembered(writer, 1 + part, |writer| {
            instance(writer, REMOTE_DEVICE);
            writer.empty_dict().mark().string("_worker_name").none();
            writer.string("_rank").uint(rank.into()).string("_device");
            writer.global("torch", "device").string("cpu").tuple(1).reduce();
            writer.setitems().build();
        });
    }

    fn shard_metadata(&mut self, writer: &mut Writer, part: u32, range: &Range<u64>) {
        instance(writer, SHARD_METADATA);
        writer.none().empty_dict().mark();
        writer.string("shard_offsets").empty_list().uint(range.start).append();
        writer.string("shard_sizes").empty_list().uint(range.end - range.start).append();
        writer.string("placement");
        self.device(writer, part);
        writer.setitems().tuple(2).build();
    }

    fn shards_metadata(&mut self, writer: &mut Writer, parts: &[(u32, Range<u64>)]) {
        writer.empty_list().mark();
        for (part, range) in parts {
            self.shard_metadata(writer, *part, range);
        }
        writer.appends();
    }

    /// What `_infer_sharding_spec_from_shards_metadata` makes of the shards: of one alone it cannot tell the dim.
    fn spec(&mut self, writer: &mut Writer, parts: &[(u32, Range<u64>)]) {
        if parts.len() == 1 {
            instance(writer, BOXES);
            writer.empty_dict().string("shards");
            self.shards_metadata(writer, parts);
            writer.setitem().build();
            return;
        }
        instance(writer, CHUNKS);
        writer.empty_dict().mark().string("dim").int(0).string("placements").empty_list().mark();
        for (part, _) in parts {
            self.device(writer, *part);
        }
        writer.appends().setitems().build();
    }
}

/// `cls.__new__(cls)`
fn instance(writer: &mut Writer, class: (&str, &str)) {
    writer.global(class.0, class.1).empty_tuple().newobj();
}

fn strided(writer: &mut Writer) {
    writer.global("torch.serialization", "_get_layout").string("torch.strided").tuple(1).reduce();
}

/// `(dtype, layout, requires_grad, memory format, pin_memory)`, which every release from 2.0 on takes.
fn properties(writer: &mut Writer, dtype: Dtype) {
    instance(writer, (METADATA, "TensorProperties"));
    writer.mark().global("torch", dtype.torch_name());
    strided(writer);
    writer.boolean(true);
    writer.global(METADATA, "MEM_FORMAT_ENCODING").int(0).tuple(1).reduce();
    writer.boolean(false).tuple(5).build();
}
