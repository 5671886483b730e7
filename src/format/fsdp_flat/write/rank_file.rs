//! One rank's file: its pickle, and the records of its storages.
//!
//! Offsets and lengths of storages count elements, those of records bytes.

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

/// Tensors in one part of a pickle.
const TENSORS_A_PART: usize = 16;

pub struct FlatRankFile<'a> {
    plan: &'a FlatPlan<'a>,
    rank: Rank,
    shard: u64,
}

/// One rank's pickle, and which storages are in it.
struct FlatRankPickle {
    bytes: Vec<u8>,
    /// Where to cut it into parts: most of them are equal on several ranks, and kept once.
    cuts: Vec<usize>,
    used: Vec<bool>,
}

/// A stretch of a storage.
enum Stretch {
    /// Elements of one of its tensors, in the order in which FSDP flattens that.
    Tensor {
        index: usize,
        param: Option<ParameterIndex>,
        elements: Range<u64>,
    },
    Known(Vec<u8>),
}

impl<'a> FlatRankFile<'a> {
    pub fn new(plan: &'a FlatPlan<'a>, rank: Rank) -> Self {
        Self { plan, rank, shard: plan.layout.shard_of(rank.0) }
    }

    /// Append the file's archive to `output`, and what the rank holds to `chunks`.
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
            let stretches = self.stretches(key);
            let spans: Vec<Span<'_>> = stretches
                .iter()
                .map(|stretch| match stretch {
                    Stretch::Tensor { elements, .. } => Span::Payload((elements.end - elements.start) * itemsize),
                    Stretch::Known(bytes) => Span::Known(bytes),
                })
                .collect();
            let base = output.len;
            let offsets = archive.mixed(&format!("data/{key}"), &spans);
            let tensors = self.plan.storages[key].tensors();
            for (stretch, offset) in stretches.iter().zip(offsets.into_iter().map(|offset| base + offset)) {
                if let Stretch::Tensor { index, param, elements } = stretch {
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

    /// Take the state and gradients of parameters out of which this rank holds nothing.
    fn prune(&self, value: &mut Value) {
        match value {
            Value::Dict(dict) => {
                dict.entries.retain(|(_, child)| match child {
                    Value::Dict(state) => !self.is_absent(state),
                    Value::Tensor(id) => self.plan.is_there(self.item(*id), self.shard),
                    _ => true,
                });
                dict.entries.iter_mut().for_each(|(_, child)| self.prune(child));
            }
            Value::List(items) => items.iter_mut().for_each(|item| self.prune(item)),
            _ => {}
        }
    }

    fn is_absent(&self, state: &Dict) -> bool {
        state.entries.iter().any(|(_, value)| match value {
            Value::Tensor(id) => {
                let item = self.item(*id);
                !matches!(item.role, TensorRole::Gradient(_)) && !self.plan.is_there(item, self.shard)
            }
            _ => false,
        })
    }

    fn item(&self, id: TensorId) -> TreeTensor {
        self.plan.items[id.0 as usize]
    }

    fn pickle(&self, tree: &Value) -> Result<FlatRankPickle, WriteError> {
        let mut used = vec![false; self.plan.storages.len()];
        let mut cuts = Vec::new();
        let mut since_cut = 0;
        let mut sharded = self.sharded_writer();
        let mut writer = Writer::new();
        let tensors = |writer: &mut Writer, id: TensorId| {
            let item = self.item(id);
            since_cut += 1;
            if let TensorRole::Flat = item.role {
                let own = self.write_flat(writer, item.storage, &mut sharded, &mut used);
                cuts.extend([own.start, own.end]);
                since_cut = TENSORS_A_PART;
            } else {
                self.write_plain(writer, item, &mut used);
            }
            if since_cut >= TENSORS_A_PART {
                cuts.push(writer.written().len());
                since_cut = 0;
            }
            Ok(())
        };
        writer.value(tree, &mut Leaves { rank: Some(self.rank), tensors })?;
        Ok(FlatRankPickle { bytes: writer.finish(), cuts, used })
    }

    fn write_plain(&self, writer: &mut Writer, item: TreeTensor, used: &mut [bool]) {
        let plan = self.plan;
        let stored = plan.numel(item.storage, self.shard);
        let dtype = plan.storages[item.storage].dtype;
        let sizes = [stored];
        let whole = StoredView::whole(dtype, item.storage, &sizes);
        let (offset, len);
        let view = match (item.role, &plan.storages[item.storage].content) {
            (TensorRole::View { at, empty }, StorageContent::Shard { unit, .. }) => {
                let held = plan.held(at, self.shard);
                len = [held.end - held.start];
                if held.is_empty() {
                    StoredView { key: empty, stored: 0, sizes: &len, ..whole }
                } else {
                    offset = held.start - plan.flats[*unit].shard(self.shard).start;
                    StoredView { offset, sizes: &len, ..whole }
                }
            }
            (_, StorageContent::Whole(id)) => StoredView { sizes: &plan.source.tensor(*id).shape, ..whole },
            _ => whole,
        };
        used[view.key] = true;
        write_view(writer, view);
    }

    /// Gives where in the pickle is what other ranks do not have alike.
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
        let flat = &plan.flats[*unit];
        let own = flat.shard(self.shard);
        used[storage] = !own.is_empty();
        let dtype = plan.storages[storage].dtype;
        let stored = Some(flat.shard_len());
        sharded.write(
            writer,
            ShardedTensorSpec { dtype, shape: &[flat.total()], key: storage, stored, requires_grad: true },
        )
    }

    /// Ranks in a row share the shards.
    fn sharded_writer(&self) -> ShardedWriter {
        let FlatLayout { world_size, shard_group_size, .. } = *self.plan.layout;
        let own = self.rank.0 % shard_group_size;
        let group = RankGroup::in_a_row(Rank(self.rank.0 - own), shard_group_size, own);
        ShardedWriter::new(group, world_size as usize, 0)
    }

    /// What this rank has in a storage.
    fn stretches(&self, storage: usize) -> Vec<Stretch> {
        let plan = self.plan;
        let dtype = plan.storages[storage].dtype;
        match &plan.storages[storage].content {
            StorageContent::Nothing => Vec::new(),
            StorageContent::Whole(id) => {
                vec![Stretch::Tensor { index: 0, param: None, elements: 0..plan.source.tensor(*id).numel() }]
            }
            StorageContent::Slice { at, .. } => {
                let held = plan.held(*at, self.shard);
                let start = plan.flats[at.unit].params()[at.param].start;
                vec![Stretch::Tensor { index: 0, param: Some(*at), elements: held.start - start..held.end - start }]
            }
            StorageContent::Shard { unit, padding, .. } => {
                let flat = &plan.flats[*unit];
                let mut stretches = Vec::new();
                let mut end = 0;
                for piece in flat.pieces(self.shard) {
                    end = piece.offset + piece.len;
                    stretches.push(match piece.content {
                        FlatContent::Parameter { index, elements } => Stretch::Tensor {
                            index,
                            param: Some(ParameterIndex { unit: *unit, param: index }),
                            elements,
                        },
                        FlatContent::Padding => Stretch::Known(run(*padding, dtype, piece.len)),
                    });
                }
                if end < flat.shard_len() {
                    stretches.push(Stretch::Known(run(Padding::Zero, dtype, flat.shard_len() - end)));
                }
                stretches
            }
        }
    }

    /// The boxes that elements of a tensor are, behind each other from an offset on.
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
            chunks.push(Chunk { tile, location, strides: None, rank: Some(self.rank) });
        }
        chunks
    }
}

/// Padding of so many elements: fewer than the alignment, or than there are ranks.
fn run(padding: Padding, dtype: crate::catalog::Dtype, len: u64) -> Vec<u8> {
    let element = padding.element(dtype).expect("dtypes of parameters are checked");
    element.repeat(usize::try_from(len).expect("short"))
}
