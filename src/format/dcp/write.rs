//! Laying out a DCP directory for a target mesh: `__R_0.distcp` a rank, `.metadata` over all.
//!
//! A tile that several ranks hold is written once, by the one of them with the least bytes so far, then the lowest
//! rank. A tile that is more than one box is written as its boxes, since the format knows boxes only.

use std::collections::BTreeMap;
use std::convert::Infallible;

use super::METADATA;
use crate::catalog::{
    Catalog, Chunk, ChunkTable, Dtype, Fqn, Key, Leaf, OutputFile, Path, Place, Reservation, Reserved, TensorEntry,
    TensorId, Value, path,
};
use crate::error::{Error, Result};
use crate::format::distinct_names;
use crate::format::pickle::{WriteError, Writer};
use crate::format::torch::{save, save_tensor, write_sizes};
use crate::format::zip::Frames;
use crate::layout::shards::Held;
use crate::layout::{Rank, Region, Tile};
use crate::storage::FileId;

/// The distinct tiles of a tensor in the target layout.
pub type Shards = Vec<Held>;

/// Something to write into a rank's file.
enum Item<'a> {
    Object {
        fqn: Fqn,
        value: &'a Value,
    },
    /// A box of a tensor; `tensor` and `chunk` say where its place is to be noted.
    Box {
        tensor: usize,
        region: Region,
    },
}

/// A stretch of a data file, as `_StorageInfo` has it.
struct StorageInfo {
    file: String,
    offset: u64,
    len: u64,
}

/// Lay out `state` on the ranks that `shards` gives for each tensor.
///
/// # Errors
/// `Unsupported` where two paths have the same dotted name or an object cannot be pickled.
pub fn reserve(
    source: &Catalog,
    state: &Value,
    shards: &mut dyn FnMut(&Fqn, &Path, &TensorEntry) -> Result<Shards>,
) -> Result<Reservation> {
    if !matches!(state, Value::Dict(_)) {
        return Err(Error::unsupported(
            format!("the top of the checkpoint is a {}; that of a DCP checkpoint must be a dict", state.type_name()),
            "save it again as a dict, or write a torch file with `dtshard unshard`",
        ));
    }
    let leaves = path::leaves(state);
    // DCP could not tell two paths of the same dotted name apart.
    let names: Vec<Fqn> = leaves.iter().map(|(path, _)| path.fqn()).collect();
    distinct_names(names.iter().map(Fqn::as_str), &[])?;
    let mut assignment = Assignment::default();
    let mut tensors: Vec<(Fqn, TensorId)> = Vec::new();
    for (path, leaf) in &leaves {
        match leaf {
            // Objects are the same on all ranks: any rank will do.
            Leaf::Object(value) => {
                let rank = Rank(0);
                assignment.push(rank, 0, Item::Object { fqn: path.fqn(), value });
            }
            Leaf::Tensor(id) => {
                let entry = source.tensor(*id);
                let index = tensors.len();
                tensors.push((path.fqn(), *id));
                for (tile, ranks) in shards(&path.fqn(), path, entry)? {
                    let rank = assignment.least_loaded(&ranks);
                    for (region, _) in tile.regions() {
                        let bytes = region.numel() * entry.dtype.itemsize();
                        assignment.push(rank, bytes, Item::Box { tensor: index, region });
                    }
                }
                if entry.numel() == 0 {
                    // PyTorch stores a chunk of an empty tensor, too.
                    let region = Region::whole(&entry.shape);
                    assignment.push(Rank(0), 0, Item::Box { tensor: index, region });
                }
            }
        }
    }
    let mut layout = Layout::new(source, &tensors);
    for (rank, items) in assignment.items {
        layout.file(rank, items)?;
    }
    Ok(layout.finish(&leaves))
}

/// Which rank writes what.
#[derive(Default)]
struct Assignment<'a> {
    items: BTreeMap<Rank, Vec<Item<'a>>>,
    bytes: BTreeMap<Rank, u64>,
}

impl<'a> Assignment<'a> {
    fn least_loaded(&self, ranks: &[Rank]) -> Rank {
        let load = |rank: &Rank| self.bytes.get(rank).copied().unwrap_or(0);
        *ranks.iter().min_by_key(|rank| (load(rank), **rank)).expect("every tile is held by a rank")
    }

    fn push(&mut self, rank: Rank, bytes: u64, item: Item<'a>) {
        self.items.entry(rank).or_default().push(item);
        *self.bytes.entry(rank).or_default() += bytes;
    }
}

/// The files as they grow, and what `.metadata` has to say of them.
struct Layout<'a> {
    source: &'a Catalog,
    tensors: &'a [(Fqn, TensorId)],
    reservation: Reservation,
    frames: Frames,
    chunks: Vec<ChunkTable>,
    /// For each tensor, where its chunks lie.
    infos: Vec<Vec<StorageInfo>>,
    objects: BTreeMap<Fqn, StorageInfo>,
}

impl<'a> Layout<'a> {
    fn new(source: &'a Catalog, tensors: &'a [(Fqn, TensorId)]) -> Self {
        Self {
            source,
            tensors,
            reservation: Reservation::default(),
            frames: Frames::default(),
            chunks: tensors.iter().map(|(_, id)| ChunkTable::new(source.tensor(*id).shape.len())).collect(),
            infos: tensors.iter().map(|_| Vec::new()).collect(),
            objects: BTreeMap::new(),
        }
    }

    /// One rank's file: objects first, as PyTorch has it.
    fn file(&mut self, rank: Rank, items: Vec<Item<'_>>) -> Result<()> {
        let name = format!("__{rank}_0.distcp");
        let id = FileId(u32::try_from(self.reservation.files.len()).expect("fewer than 2^32 files"));
        let mut file = OutputFile::new(&name);
        let (objects, boxes): (Vec<_>, Vec<_>) =
            items.into_iter().partition(|item| matches!(item, Item::Object { .. }));
        for item in objects.into_iter().chain(boxes) {
            let offset = file.len;
            match item {
                Item::Object { fqn, value } => {
                    let saved = save(self.source, value, &mut file, &mut self.frames)
                        .map_err(|error| unpicklable(&fqn, &error))?;
                    let tensors = saved.tensors.iter().map(|tensor| tensor.reserved(self.source, id));
                    self.reservation.tensors.extend(tensors);
                    self.objects.insert(fqn, StorageInfo { file: name.clone(), offset, len: saved.len });
                }
                Item::Box { tensor, region } => {
                    let dtype = self.source.tensor(self.tensors[tensor].1).dtype;
                    let (at, len) = save_tensor(dtype, &region.sizes, &mut file, &mut self.frames);
                    let place = if region.is_empty() { Place::Nowhere } else { Place::Bytes { file: id, offset: at } };
                    let tile = Tile::from_region(&region);
                    self.chunks[tensor].push(Chunk { tile, place, strides: None, rank: Some(rank) });
                    self.infos[tensor].push(StorageInfo { file: name.clone(), offset, len });
                }
            }
        }
        self.reservation.files.push(file);
        Ok(())
    }

    fn finish(mut self, leaves: &[(Path, Leaf<'_>)]) -> Reservation {
        for ((fqn, id), chunks) in self.tensors.iter().zip(&self.chunks) {
            let entry = self.source.tensor(*id);
            let target = TensorEntry::new(fqn.clone(), entry.dtype, entry.shape.clone());
            self.reservation.tensors.push(Reserved::new(*id, TensorEntry { chunks: chunks.clone(), ..target }));
        }
        let mut file = OutputFile::new(".metadata");
        file.push_literal(self.metadata(leaves));
        self.reservation.files.push(file);
        self.reservation
    }

    /// The `.metadata` pickle: protocol 2 without a memo, which every reader takes.
    fn metadata(&self, leaves: &[(Path, Leaf<'_>)]) -> Vec<u8> {
        let mut writer = Writer::new();
        instance(&mut writer, METADATA, "Metadata");
        writer.empty_dict().mark();
        writer.string("state_dict_metadata").empty_dict();
        let mut tensor = 0..self.tensors.len();
        entries(&mut writer, leaves.iter(), |writer, (path, leaf)| {
            writer.string(path.fqn().as_str());
            match leaf {
                Leaf::Tensor(_) => self.write_tensor(writer, tensor.next().expect("one a tensor leaf")),
                Leaf::Object(_) => instance(writer, METADATA, "BytesStorageMetadata"),
            }
        });
        writer.string("planner_data").empty_dict();
        entries(&mut writer, leaves.iter(), |writer, (path, _)| {
            writer.string(path.fqn().as_str());
            write_path(writer, path);
        });
        writer.string("storage_data").empty_dict();
        entries(&mut writer, self.storage_entries(), |writer, (index, info)| {
            write_index(writer, &index);
            write_info(writer, info);
        });
        // The id that ties data files to their save is random in PyTorch; here equal checkpoints are equal files.
        let hash = blake3::hash(writer.written()).to_hex();
        let save_id = [&hash[..8], &hash[8..12], &hash[12..16], &hash[16..20], &hash[20..32]].join("-");
        writer.string("storage_meta");
        instance(&mut writer, METADATA, "StorageMeta");
        writer.empty_dict().mark();
        writer.string("checkpoint_id").none().string("save_id").string(&save_id);
        writer.string("load_id").none().string("modules").empty_list().setitems().build();
        writer.string("version").string("1.0.0");
        writer.setitems().build();
        writer.finish()
    }

    fn write_tensor(&self, writer: &mut Writer, tensor: usize) {
        let entry = self.source.tensor(self.tensors[tensor].1);
        instance(writer, METADATA, "TensorStorageMetadata");
        writer.empty_dict().mark();
        writer.string("properties");
        write_properties(writer, entry.dtype);
        writer.string("size");
        write_torch_size(writer, &entry.shape);
        writer.string("chunks").empty_list();
        let Ok(()): Result<(), Infallible> = writer.extend_list(self.chunks[tensor].iter(), |writer, chunk| {
            let region = chunk.tile.bounds();
            instance(writer, METADATA, "ChunkStorageMetadata");
            writer.empty_dict().mark();
            writer.string("offsets");
            write_torch_size(writer, &region.offsets);
            writer.string("sizes");
            write_torch_size(writer, &region.sizes);
            writer.setitems().build();
            Ok(())
        });
        writer.setitems().build();
    }

    fn storage_entries(&self) -> Vec<(Index<'_>, &StorageInfo)> {
        let objects = self.objects.iter().map(|(fqn, info)| (Index { fqn, chunk: None }, info));
        let chunks = self.tensors.iter().zip(&self.chunks).zip(&self.infos).flat_map(|(((fqn, _), chunks), infos)| {
            infos.iter().enumerate().map(move |(position, info)| {
                let offsets = chunks.tile(position).bounds().offsets;
                (Index { fqn, chunk: Some((position, offsets)) }, info)
            })
        });
        objects.chain(chunks).collect()
    }
}

fn unpicklable(fqn: &Fqn, error: &WriteError) -> Error {
    Error::unsupported(format!("{fqn}: cannot be pickled: {error}"), "leave that object out of the checkpoint")
}

/// A key of `storage_data`.
struct Index<'a> {
    fqn: &'a Fqn,
    /// Position and offsets of a tensor's chunk; an object has none.
    chunk: Option<(usize, crate::layout::Dims)>,
}

fn entries<T>(
    writer: &mut Writer,
    items: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
    mut each: impl FnMut(&mut Writer, T),
) {
    let Ok(()): Result<(), Infallible> = writer.extend_dict(items.into_iter(), |writer, item| {
        each(writer, item);
        Ok(())
    });
}

/// `cls.__new__(cls)`
fn instance(writer: &mut Writer, module: &str, class: &str) {
    writer.global(module, class).empty_tuple().newobj();
}

fn write_torch_size(writer: &mut Writer, sizes: &[u64]) {
    writer.global("torch", "Size");
    write_sizes(writer, sizes);
    writer.tuple(1).reduce();
}

/// The tuple of five that readers of every version take; 2.15's sixth item breaks the older ones.
fn write_properties(writer: &mut Writer, dtype: Dtype) {
    instance(writer, METADATA, "TensorProperties");
    writer.mark().global("torch", dtype.torch_name());
    writer.global("torch.serialization", "_get_layout").string("torch.strided").tuple(1).reduce();
    writer.boolean(false);
    writer.global(METADATA, "_MEM_FORMAT_ENCODING").int(0).tuple(1).reduce();
    writer.boolean(false).tuple(5).build();
}

fn write_path(writer: &mut Writer, path: &Path) {
    if path.0.len() > 3 {
        writer.mark();
    }
    for key in &path.0 {
        match key {
            Key::Name(name) => writer.string(name),
            Key::Index(index) => writer.uint(*index),
        };
    }
    writer.tuple(path.0.len());
}

fn write_index(writer: &mut Writer, index: &Index<'_>) {
    instance(writer, METADATA, "MetadataIndex");
    writer.empty_dict().mark().string("fqn").string(index.fqn.as_str()).string("index");
    match &index.chunk {
        None => {
            writer.none();
        }
        Some((position, offsets)) => {
            writer.uint(*position as u64).string("offset");
            write_torch_size(writer, offsets);
        }
    }
    writer.setitems().build();
}

fn write_info(writer: &mut Writer, info: &StorageInfo) {
    instance(writer, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    writer.empty_dict().mark();
    writer.string("relative_path").string(&info.file);
    writer.string("offset").uint(info.offset).string("length").uint(info.len);
    writer.setitems().build();
}
