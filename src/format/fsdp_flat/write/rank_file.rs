//! Lays out one rank's file: the pickle, and a zip record for each storage.
//!
//! Offsets in storages count elements; offsets in zip records are in bytes.

use std::ops::Range;

use super::cannot_pickle;
use super::plan::{FlatPlan, Padding, ParameterIndex, StorageContent, TensorRole, TreeTensor};
use crate::catalog::flat::FlatLayout;
use crate::catalog::{Chunk, ChunkTable, Dict, FileLocation, OutputFile, TensorId, Value};
use crate::error::Result;
use crate::format::archive::{Leaves, SharedBytes};
use crate::format::torch::{PREFIX, RankGroup, ShardedTensorSpec, ShardedWriter, StoredView, write_view};
use crate::layout::flat::FlatContent;
use crate::layout::{Rank, Region, Tile};
use crate::storage::FileId;
use torch_pickle::pickle::{WriteError, Writer};
use torch_pickle::zip::{ArchiveWriter, Span};

/// The maximum number of tensors in one part of a pickle. Pickles are divided into parts, because a part that is equal
/// in several rank files is in memory only once.
const TENSORS_PER_PART: usize = 16;

/// Lays out the file of one rank.
pub struct FlatRankFile<'a> {
    plan: &'a FlatPlan<'a>,
    rank: Rank,
    shard: u64,
}

/// The pickle of one rank, and the storages that its tensors refer to.
struct FlatRankPickle {
    bytes: Vec<u8>,
    /// The byte offsets at which the pickle is divided into parts. Most parts are equal on several ranks, and equal
    /// parts are in memory only once.
    cuts: Vec<usize>,
    used: Vec<bool>,
}

/// A contiguous range of a storage, with its content: elements of a source tensor, or known bytes.
enum StoragePart {
    /// Elements of the source tensor at `index` in [`PlannedStorage::tensors`](super::plan::PlannedStorage::tensors),
    /// in the order in which FSDP flattens the tensor. `param` is `None` if the part is a whole tensor in row-major
    /// order.
    Tensor {
        index: usize,
        param: Option<ParameterIndex>,
        elements: Range<u64>,
    },
    Known(Vec<u8>),
}

impl<'a> FlatRankFile<'a> {
    /// Returns the writer of a rank's file.
    pub fn new(plan: &'a FlatPlan<'a>, rank: Rank) -> Self {
        Self { plan, rank, shard: plan.layout.shard_of(rank.0) }
    }

    /// Appends the file's archive to `output`, and the rank's chunks to `chunks`.
    pub fn lay_out(
        &self,
        tree: &Value,
        file: FileId,
        output: &mut OutputFile,
        frames: &mut SharedBytes,
        chunks: &mut [Vec<ChunkTable>],
    ) -> Result<()> {
        let mut tree = tree.clone();
        self.prune(&mut tree);
        let pickle = self.pickle(&tree).map_err(|error| cannot_pickle(&error))?;
        let mut archive = ArchiveWriter::new(PREFIX);
        archive.start_in_parts(&pickle.bytes, &pickle.cuts);
        for (key, tables) in chunks.iter_mut().enumerate().filter(|(key, _)| pickle.used[*key]) {
            let itemsize = self.plan.storages[key].dtype.itemsize();
            let parts = self.storage_parts(key);
            let spans: Vec<Span<'_>> = parts
                .iter()
                .map(|part| match part {
                    StoragePart::Tensor { elements, .. } => Span::Payload((elements.end - elements.start) * itemsize),
                    StoragePart::Known(bytes) => Span::Known(bytes),
                })
                .collect();
            let base = output.len;
            let offsets = archive.mixed(&format!("data/{key}"), &spans);
            let tensors = self.plan.storages[key].tensors();
            for (part, offset) in parts.iter().zip(offsets.into_iter().map(|offset| base + offset)) {
                if let StoragePart::Tensor { index, param, elements } = part {
                    let place = |offset| FileLocation::Bytes { file, offset };
                    for chunk in self.chunks(tensors[*index], *param, elements, offset, itemsize, &place) {
                        tables[*index].push(chunk);
                    }
                }
            }
        }
        frames.append(archive.finish(), output);
        Ok(())
    }

    /// Removes the optimizer state and gradients of parameters that have no element in this rank's shard.
    fn prune(&self, value: &mut Value) {
        match value {
            Value::Dict(dict) => {
                dict.entries.retain(|(_, child)| match child {
                    Value::Dict(state) => !self.is_state_absent(state),
                    Value::Tensor(id) => self.plan.is_present(self.tensor(*id), self.shard),
                    _ => true,
                });
                dict.entries.iter_mut().for_each(|(_, child)| self.prune(child));
            }
            Value::List(items) => items.iter_mut().for_each(|tensor| self.prune(tensor)),
            _ => {}
        }
    }

    fn is_state_absent(&self, state: &Dict) -> bool {
        state.entries.iter().any(|(_, value)| match value {
            Value::Tensor(id) => {
                let tensor = self.tensor(*id);
                !matches!(tensor.role, TensorRole::Gradient(_)) && !self.plan.is_present(tensor, self.shard)
            }
            _ => false,
        })
    }

    fn tensor(&self, id: TensorId) -> TreeTensor {
        self.plan.tensors[id.0 as usize]
    }

    fn pickle(&self, tree: &Value) -> Result<FlatRankPickle, WriteError> {
        let mut used = vec![false; self.plan.storages.len()];
        let mut cuts = Vec::new();
        let mut since_cut = 0;
        let mut sharded = self.sharded_writer();
        let mut writer = Writer::new();
        let tensors = |writer: &mut Writer, id: TensorId| {
            let tensor = self.tensor(id);
            since_cut += 1;
            if let TensorRole::Flat = tensor.role {
                let own = self.write_flat(writer, tensor.storage, &mut sharded, &mut used);
                cuts.extend([own.start, own.end]);
                since_cut = TENSORS_PER_PART;
            } else {
                self.write_plain(writer, tensor, &mut used);
            }
            if since_cut >= TENSORS_PER_PART {
                cuts.push(writer.written().len());
                since_cut = 0;
            }
            Ok(())
        };
        writer.value(tree, &mut Leaves { rank: Some(self.rank), tensors })?;
        Ok(FlatRankPickle { bytes: writer.finish(), cuts, used })
    }

    fn write_plain(&self, writer: &mut Writer, tensor: TreeTensor, used: &mut [bool]) {
        let plan = self.plan;
        let stored = plan.numel(tensor.storage, self.shard);
        let dtype = plan.storages[tensor.storage].dtype;
        let sizes = [stored];
        let whole = StoredView::whole(dtype, tensor.storage, &sizes);
        let (offset, len);
        let view = match (tensor.role, &plan.storages[tensor.storage].content) {
            (TensorRole::View { at, empty }, StorageContent::Shard { unit, .. }) => {
                let range = plan.local_range(at, self.shard);
                len = [range.end - range.start];
                if range.is_empty() {
                    StoredView { key: empty, stored: 0, sizes: &len, ..whole }
                } else {
                    offset = range.start - plan.flat_params[*unit].shard(self.shard).start;
                    StoredView { offset, sizes: &len, ..whole }
                }
            }
            (_, StorageContent::Whole(id)) => StoredView { sizes: &plan.source.tensor(*id).shape, ..whole },
            _ => whole,
        };
        used[view.key] = true;
        write_view(writer, view);
    }

    /// Writes a flat parameter. Returns the byte range of the pickle that differs between ranks.
    fn write_flat(
        &self,
        writer: &mut Writer,
        storage: usize,
        sharded: &mut ShardedWriter,
        used: &mut [bool],
    ) -> Range<usize> {
        let plan = self.plan;
        let StorageContent::Shard { unit, .. } = &plan.storages[storage].content else {
            unreachable!("flat parameters are views of shards");
        };
        let flat = &plan.flat_params[*unit];
        let own = flat.shard(self.shard);
        used[storage] = !own.is_empty();
        let dtype = plan.storages[storage].dtype;
        let stored = Some(flat.shard_len());
        sharded.write(
            writer,
            ShardedTensorSpec { dtype, shape: &[flat.total()], key: storage, stored, requires_grad: true },
        )
    }

    /// Returns a writer of ShardedTensors for this rank's shard group (the ranks that together hold one copy of each
    /// unit). A shard group consists of consecutive ranks.
    fn sharded_writer(&self) -> ShardedWriter {
        let FlatLayout { world_size, shard_group_size, .. } = *self.plan.layout;
        let own = self.rank.0 % shard_group_size;
        let group = RankGroup::consecutive(Rank(self.rank.0 - own), shard_group_size, own);
        ShardedWriter::new(group, world_size as usize, 0)
    }

    /// Returns the contiguous ranges that form a storage in the file of this rank, in the order of their data.
    fn storage_parts(&self, storage: usize) -> Vec<StoragePart> {
        let plan = self.plan;
        let dtype = plan.storages[storage].dtype;
        match &plan.storages[storage].content {
            StorageContent::Nothing => Vec::new(),
            StorageContent::Whole(id) => {
                vec![StoragePart::Tensor { index: 0, param: None, elements: 0..plan.source.tensor(*id).numel() }]
            }
            StorageContent::Slice { at, .. } => {
                let range = plan.local_range(*at, self.shard);
                let start = plan.flat_params[at.unit].params()[at.param].start;
                vec![StoragePart::Tensor {
                    index: 0,
                    param: Some(*at),
                    elements: range.start - start..range.end - start,
                }]
            }
            StorageContent::Shard { unit, padding, .. } => {
                let flat = &plan.flat_params[*unit];
                let mut parts = Vec::new();
                let mut end = 0;
                for piece in flat.pieces(self.shard) {
                    end = piece.offset + piece.len;
                    parts.push(match piece.content {
                        FlatContent::Parameter { index, elements } => StoragePart::Tensor {
                            index,
                            param: Some(ParameterIndex { unit: *unit, param: index }),
                            elements,
                        },
                        FlatContent::Padding => StoragePart::Known(padding_bytes(*padding, dtype, piece.len)),
                    });
                }
                if end < flat.shard_len() {
                    parts.push(StoragePart::Known(padding_bytes(Padding::Zero, dtype, flat.shard_len() - end)));
                }
                parts
            }
        }
    }

    /// Splits a range of a tensor's elements into boxes, and returns a chunk for each box. The data of the boxes is
    /// consecutive, and starts at the byte `offset` of the file.
    fn chunks(
        &self,
        tensor: TensorId,
        param: Option<ParameterIndex>,
        elements: &Range<u64>,
        mut offset: u64,
        itemsize: u64,
        place: &dyn Fn(u64) -> FileLocation,
    ) -> Vec<Chunk> {
        let shape = &self.plan.source.tensor(tensor).shape;
        let boxes = match param {
            None => vec![Region::whole(shape)],
            Some(at) => {
                let order = self.plan.param(at).order().expect("a layout that was checked");
                order.cut_row_major(shape, elements.clone())
            }
        };
        let mut chunks = Vec::with_capacity(boxes.len());
        for region in boxes {
            let location = if region.is_empty() { FileLocation::Empty } else { place(offset) };
            offset += region.numel() * itemsize;
            let tile = Tile::from_region(&region);
            chunks.push(Chunk { tile, location, strides: None, rank: Some(self.rank), view: None });
        }
        chunks
    }
}

/// Returns the bytes of `len` padding elements. `len` is less than the alignment or less than the number of ranks, so
/// the result is short.
fn padding_bytes(padding: Padding, dtype: crate::catalog::Dtype, len: u64) -> Vec<u8> {
    let element = padding.element(dtype).expect("dtypes of parameters are checked");
    element.repeat(usize::try_from(len).expect("short"))
}
