//! Writes one torch.save file per rank. Each file has the complete state dict, with the rank's local part of every
//! tensor.
//!
//! A tensor is written as a DTensor, as a ShardedTensor, as a plain tensor that is whole on every rank, or as a plain
//! tensor that is the rank's local part. Files share no data, so, as in PyTorch, the file of each rank stores the
//! rank's replica of a tensor. Offsets are in bytes; shapes count elements.
//!
//! Invariants: in every file the data of tensors comes in the order of [`Reservation::tensors`], even if ranks have
//! different values in the state dict. The pickle refers to storages in this order, and storage keys are counted in
//! this order. `torch.load` relies on the order if it does not read the data of tensors (in `FakeTensorMode`, or on the
//! meta device): it then computes the offsets of storages from the order.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::PathBuf;

use indexmap::IndexMap;

use super::DTensorStyle;
use super::context::ShardedDims;
use super::model_parallel::{GridTarget, write_part};
use super::write::{PREFIX, write_tensor};
use super::write_dtensor::{DTensorSpec, write_dtensor};
use super::write_mesh::MeshWriter;
use super::write_sharded::{RankGroup, ShardedTensorSpec, ShardedWriter, sharding_dim};
use crate::catalog::{
    Catalog, Chunk, ChunkTable, FileLocation, Fqn, OutputFile, Path, Reservation, Reserved, TensorEntry, TensorId,
    Value, path,
};
use crate::error::{Error, Result};
use crate::format::archive::{Leaves, SharedBytes};
use crate::layout::cut::SplitChoice;
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::{
    DeviceMesh, Dims, LayoutError, MeshDim, Placement, Rank, Region, TensorDim, Tile, comma_list, local_shard,
};
use crate::storage::FileId;
use torch_pickle::pickle::{WriteError, Writer};
use torch_pickle::zip::ArchiveWriter;

/// The layout of a tensor on the ranks of the target mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankLayout {
    /// A plain tensor that every rank has in full.
    Plain,
    /// A DTensor, of which every rank in the mesh has its local part.
    Distributed {
        /// The placement of the tensor on each dim of the mesh.
        placements: Vec<Placement>,
        /// If the tensor is on a slice of the mesh, the mesh dims of this slice; otherwise `None`. On mesh dims that
        /// are not in the slice, the tensor is replicated.
        slice: Option<Vec<MeshDim>>,
    },
    /// A plain tensor. On each rank it is the rank's local part, and the file does not record the placements.
    Local(SharedTensor),
    /// A ShardedTensor whose rows are sharded over the mesh dim `dim`. All ShardedTensors of a target are sharded over
    /// the same mesh dim.
    Sharded { dim: MeshDim },
}

impl RankLayout {
    /// Returns the layout [`RankLayout::Distributed`] for a tensor with these placements.
    ///
    /// # Errors
    /// `Unsupported` if the tensor is not split like `torch.chunk`.
    pub fn dtensor(
        fqn: &Fqn,
        entry: &TensorEntry,
        mesh: &DeviceMesh,
        shared: SharedTensor,
        cut: SplitChoice<'_>,
    ) -> Result<Self> {
        check_chunks(fqn, entry, mesh, &shared, cut)?;
        Ok(Self::Distributed { placements: shared.placements, slice: shared.slice })
    }

    /// Returns the placements of a DTensor, or of a tensor that is written as local parts; `None` for other layouts.
    fn shared(self) -> Option<SharedTensor> {
        match self {
            Self::Plain | Self::Sharded { .. } => None,
            Self::Distributed { placements, slice } => Some(SharedTensor { placements, splits: Vec::new(), slice }),
            Self::Local(shared) => Some(shared),
        }
    }

    /// Returns the layout that FSDP1 uses for a tensor with these placements: a ShardedTensor, or a plain tensor if no
    /// placement shards the tensor.
    ///
    /// # Errors
    /// `Unsupported` for placements other than `S(0)` on one mesh dim, and for splits that FSDP1 does not make.
    pub fn fsdp1(
        fqn: &Fqn,
        entry: &TensorEntry,
        mesh: &DeviceMesh,
        shared: &SharedTensor,
        cut: SplitChoice<'_>,
    ) -> Result<Self> {
        check_chunks(fqn, entry, mesh, shared, cut)?;
        let dim = sharding_dim(fqn, entry, mesh, &shared.placements)?;
        Ok(dim.map_or(Self::Plain, |dim| Self::Sharded { dim }))
    }
}

/// Checks that each rank has the elements that `torch.chunk` would give the rank. The check is needed because DTensors
/// and ShardedTensors record no split rule, and PyTorch assumes `torch.chunk` for them.
fn check_chunks(
    fqn: &Fqn,
    entry: &TensorEntry,
    mesh: &DeviceMesh,
    shared: &SharedTensor,
    cut: SplitChoice<'_>,
) -> Result<()> {
    for (rank, coordinate) in mesh.coordinates().filter(|_| !shared.splits.is_empty()) {
        let own = shared.part(&entry.shape, mesh, &coordinate).map_err(LayoutError::for_tensor(fqn))?;
        let chunk = local_shard(&entry.shape, mesh.shape(), &shared.placements, &coordinate)?;
        if own != chunk {
            let splits = comma_list(&shared.splits);
            return Err(Error::unsupported(
                format!(
                    "{fqn}: under the split rule {splits} ({cut}), rank {rank} has {own}, but in a DTensor it would have {chunk}"
                ),
                format!(
                    "DTensors and ShardedTensors are split by torch.chunk: {}, or write plain local tensors with \
                     options::tensor_class local, options::to local or options::to dcp",
                    cut.hint_for_chunk_split()
                ),
            ));
        }
    }
    Ok(())
}

/// The input of [`reserve_ranks`]: a mesh, a style, and a layout for each tensor.
pub struct RankTarget<'a> {
    pub mesh: &'a DeviceMesh,
    /// The number of ranks, each of which gets a file. The file of a rank outside the mesh has no data of sharded
    /// tensors.
    pub world_size: u32,
    pub style: &'a DTensorStyle,
    /// A function that returns the file name of a rank.
    pub name: &'a dyn Fn(Rank) -> PathBuf,
    /// A function that is called for each name of each tensor, and returns the layout of the tensor. For a tied tensor,
    /// the layout that the function returns for the first name is used. A tensor whose content differs between ranks is
    /// always plain.
    pub layout: &'a mut dyn FnMut(&Fqn, &Path, &TensorEntry) -> Result<RankLayout>,
}

/// Returns the mesh dim over which all ShardedTensors of a target are sharded; `None` if there are no ShardedTensors.
///
/// # Errors
/// `Unsupported` if ShardedTensors are sharded over different mesh dims, or if the rank numbers along that mesh dim are
/// not in ascending order.
fn common_sharding_dim<'l>(
    layouts: impl Iterator<Item = (&'l Fqn, &'l RankLayout)>,
    mesh: &DeviceMesh,
) -> Result<Option<MeshDim>> {
    let mut common: Option<(&Fqn, MeshDim)> = None;
    for (fqn, layout) in layouts {
        let RankLayout::Sharded { dim } = *layout else { continue };
        match common {
            None => common = Some((fqn, dim)),
            Some((_, known)) if known == dim => {}
            Some((first, _)) => {
                return Err(Error::unsupported(
                    format!("the ShardedTensors `{first}` and `{fqn}` are sharded over different mesh dims"),
                    "shard all of them over one mesh dim, because the ShardedTensors of a file share one process \
                     group, or use options::tensor_class dtensor",
                ));
            }
        }
    }
    let Some((fqn, dim)) = common else { return Ok(None) };
    for (_, coordinate) in mesh.coordinates().filter(|(_, coordinate)| coordinate[dim.0] == 0) {
        let group = RankGroup::new(mesh, dim, &coordinate);
        if !group.ranks.is_sorted() {
            let ranks: Vec<String> = group.ranks.iter().map(ToString::to_string).collect();
            return Err(Error::unsupported(
                format!("{fqn}: a ShardedTensor cannot be on ranks {} in this order", ranks.join(",")),
                "remove options::mesh_ranks, because FSDP1 assigns rows in the order of ranks, or use \
                 options::tensor_class dtensor",
            ));
        }
    }
    Ok(Some(dim))
}

/// Lays out a file for each rank. If ranks of the source store different values of an object, rank `r` of the target
/// gets the value that rank `r` of the source stores. If rank `r` of the source stores no value, the `n` source ranks
/// that store a value are numbered from 0, and rank `r` of the target gets the value of number `r mod n`.
///
/// Reads only dtypes and shapes of `source`.
///
/// # Errors
/// `Unsupported` if an object cannot be pickled; the errors of `layout`; `Layout` if placements do not fit.
pub fn reserve_ranks(source: &Catalog, state: &Value, target: RankTarget<'_>) -> Result<Reservation> {
    let RankTarget { mesh, world_size, style, name, layout } = target;
    let mut reservation = Reservation::default();
    let tensors = plan(source, state, layout, &mut reservation.notes)?;
    let parts = tensors.iter().filter_map(|(id, planned)| match &planned.layout {
        RankLayout::Local(shared) => Some((*id, shared)),
        RankLayout::Plain | RankLayout::Distributed { .. } | RankLayout::Sharded { .. } => None,
    });
    let makani = GridTarget { source, mesh, world_size }.plan(state, parts, &mut reservation.notes);
    let state = makani.as_ref().map_or(state, |makani| &makani.state);
    let shared_dim = common_sharding_dim(tensors.values().map(|planned| (&planned.fqn, &planned.layout)), mesh)?;
    let mut chunks: Vec<ChunkTable> =
        tensors.keys().map(|id| ChunkTable::new(source.tensor(*id).shape.len())).collect();
    let mut frames = SharedBytes::default();
    for rank in (0..world_size).map(Rank) {
        let coordinate = mesh.coordinate(rank);
        let tiles = tensors.iter().map(|(id, planned)| planned.tile(source.tensor(*id), mesh, coordinate.as_ref()));
        let file = TorchRankFile {
            source,
            tensors: &tensors,
            tiles: tiles.collect::<Result<_>>()?,
            sharded_dims: makani.as_ref().map(|makani| &makani.sharded_dims),
        };
        let coordinate = coordinate.as_ref();
        let meshes = MeshWriter { mesh, style, rank, world_size, coordinate, key: 0, written_meshes: BTreeSet::new() };
        let group = match (shared_dim, coordinate) {
            (Some(dim), Some(coordinate)) => Some(RankGroup::new(mesh, dim, coordinate)),
            (None, _) => None,
            (Some(_), None) => return Err(outside_mesh_error(rank, mesh)),
        };
        let pickle = file.pickle(state, meshes, group).map_err(|error| {
            Error::unsupported(
                format!("the state dict cannot be pickled: {error}"),
                "remove that object from the checkpoint",
            )
        })?;
        let id = FileId(u32::try_from(reservation.files.len()).expect("fewer than 2^32 files"));
        let mut output = OutputFile::of_rank(rank, name(rank));
        let offsets = file.lay_out(&pickle, mesh, &mut output, &mut frames);
        for (((tile, offset), chunks), stored) in
            file.tiles.into_iter().zip(offsets).zip(&mut chunks).zip(&pickle.stored)
        {
            if let (true, Some(tile)) = (*stored, tile) {
                let location = offset.map_or(FileLocation::Empty, |offset| FileLocation::Bytes { file: id, offset });
                chunks.push(Chunk { tile, location, strides: None, rank: Some(rank), view: None });
            }
        }
        reservation.files.push(output);
    }
    reservation.tensors = tensors
        .into_iter()
        .zip(chunks)
        .map(|((id, planned), chunks)| {
            let TensorEntry { dtype, shape, .. } = source.tensor(id);
            let entry = TensorEntry { chunks, ..TensorEntry::new(planned.fqn, *dtype, shape.clone()) };
            Reserved { shared: planned.layout.shared().map(Box::new), ..Reserved::new(id, entry) }
        })
        .collect();
    Ok(reservation)
}

/// Returns the error for a rank outside the mesh. Such a rank is an error for FSDP1, which expects a ShardedTensor on
/// every rank.
fn outside_mesh_error(rank: Rank, mesh: &DeviceMesh) -> Error {
    Error::unsupported(
        format!("ShardedTensors on the mesh {mesh} need every rank, but rank {rank} is not in the mesh"),
        "use options::tensor_class dtensor, which allows ranks outside the mesh, or list every rank from 0 on in \
         options::mesh_ranks, in any order",
    )
}

/// A tensor to write, and its layout.
struct PlannedTensor {
    /// The first name of the tensor in the state dict.
    fqn: Fqn,
    layout: RankLayout,
    /// The number of times that the tensor occurs in the state dict. All occurrences are references to one object in
    /// the pickle, so the tensor stays tied.
    count: usize,
}

/// Returns the tensors to write, in the order in which the pickle refers to them.
fn plan(
    source: &Catalog,
    state: &Value,
    layout: &mut dyn FnMut(&Fqn, &Path, &TensorEntry) -> Result<RankLayout>,
    notes: &mut Vec<String>,
) -> Result<IndexMap<TensorId, PlannedTensor>> {
    // A tensor whose content differs between ranks must not be sharded, because sharding would keep only one shard of
    // each rank's content.
    let own_values = path::objects(state).into_iter().filter(|(_, value)| matches!(value, Value::Other(_)));
    let own: HashSet<TensorId> = own_values.flat_map(|(_, value)| value.tensor_ids()).collect();
    let mut named: Vec<(Path, TensorId)> = Vec::new();
    path::tensors(state, &Path::default(), &mut |path, id| named.push((path.clone(), id)));
    let mut tensors: IndexMap<TensorId, PlannedTensor> = IndexMap::new();
    for (path, id) in named {
        let (entry, fqn) = (source.tensor(id), path.fqn());
        let mut chosen = layout(&fqn, &path, entry)?;
        if own.contains(&id) {
            chosen = RankLayout::Plain;
        }
        match tensors.get_mut(&id) {
            None => drop(tensors.insert(id, PlannedTensor { fqn, layout: chosen, count: 0 })),
            Some(known) if known.layout != chosen => {
                notes.push(format!("`{fqn}` is tied to `{}` and gets the same layout", known.fqn));
            }
            Some(_) => {}
        }
    }
    // Tensors in attributes of dicts have no name.
    let mut positions = HashMap::new();
    for (position, id) in state.tensor_ids().into_iter().enumerate() {
        let nameless = || PlannedTensor { fqn: source.tensor(id).fqn.clone(), layout: RankLayout::Plain, count: 0 };
        tensors.entry(id).or_insert_with(nameless).count += 1;
        positions.entry(id).or_insert(position);
    }
    tensors.sort_by_cached_key(|id, _| positions[id]);
    Ok(tensors)
}

impl PlannedTensor {
    /// Returns the tile of the tensor on the rank at a coordinate; `coordinate` is `None` for a rank outside the mesh.
    /// Such a rank has a tile (the whole tensor) only if the layout is [`RankLayout::Plain`]; otherwise returns `None`.
    fn tile(&self, entry: &TensorEntry, mesh: &DeviceMesh, coordinate: Option<&Dims>) -> Result<Option<Tile>> {
        let whole = || Tile::from_region(&Region::whole(&entry.shape));
        let Some(coordinate) = coordinate else {
            return Ok(Some(whole()).filter(|_| self.layout == RankLayout::Plain));
        };
        Ok(Some(match &self.layout {
            RankLayout::Plain => whole(),
            RankLayout::Distributed { placements, .. } => {
                local_shard(&entry.shape, mesh.shape(), placements, coordinate)?
            }
            RankLayout::Local(shared) => {
                shared.part(&entry.shape, mesh, coordinate).map_err(LayoutError::for_tensor(&self.fqn))?
            }
            RankLayout::Sharded { dim } => {
                let placements = [Placement::Shard(TensorDim(0))];
                local_shard(&entry.shape, &[mesh.shape()[dim.0]], &placements, &[coordinate[dim.0]])?
            }
        }))
    }
}

/// Lays out the torch.save file of one rank.
struct TorchRankFile<'a> {
    source: &'a Catalog,
    tensors: &'a IndexMap<TensorId, PlannedTensor>,
    /// The rank's tile of each tensor; `None` if the rank has no data of the tensor.
    tiles: Vec<Option<Tile>>,
    /// The attribute `sharded_dims_mp` of the tensors that have it, if the files are written for makani.
    sharded_dims: Option<&'a HashMap<TensorId, ShardedDims>>,
}

/// Returns the sizes of a rank's local tensor. As in PyTorch, a rank without data of the tensor (`tile` is `None`) has
/// a local tensor with one dim of size 0, whatever the shape of the tensor is.
fn local_sizes(tile: Option<&Tile>) -> Dims {
    tile.map_or_else(|| Dims::from_slice(&[0]), Tile::sizes)
}

/// The pickle in the file of one rank, and the storages that the pickle refers to. `stored` is true for each tensor
/// that has a storage in the file.
struct TorchRankPickle {
    bytes: Vec<u8>,
    /// The byte offsets at which the pickle is divided into parts. Most parts are equal on all ranks, and equal parts
    /// are in memory only once.
    cuts: Vec<usize>,
    stored: Vec<bool>,
    /// The storage key of each tensor.
    keys: Vec<usize>,
    /// The storage key of the mesh, if the pickle has a mesh.
    mesh_key: Option<usize>,
}

/// The maximum number of tensors in one part of a pickle. If several rank files have an equal part of the pickle, this
/// part is in memory only once.
const TENSORS_PER_PART: usize = 16;

impl TorchRankFile<'_> {
    fn pickle(
        &self,
        state: &Value,
        mut meshes: MeshWriter<'_>,
        group: Option<RankGroup>,
    ) -> Result<TorchRankPickle, WriteError> {
        let memo_of = {
            let first = meshes.first_free_memo();
            move |index: usize| first + u32::try_from(index).expect("fewer than 2^32 tensors")
        };
        let (world_size, memo) = (meshes.mesh.world_size(), memo_of(self.tensors.len()));
        let mut sharded = group.map(|group| ShardedWriter::new(group, world_size, memo));
        let mut used = vec![false; self.tensors.len()];
        let mut stored = used.clone();
        let mut cuts = Vec::new();
        let mut written = 0;
        let (mut keys, mut next_key) = (vec![0; self.tensors.len()], 0);
        let (rank, mut writer) = (Some(meshes.rank), Writer::new());
        let tensors = |writer: &mut Writer, id: TensorId| {
            let (index, _, planned) = self.tensors.get_full(&id).expect("all tensors of the tree are planned");
            if used[index] {
                writer.get(memo_of(index));
                return Ok(());
            }
            used[index] = true;
            stored[index] = true;
            let TensorEntry { dtype, shape, .. } = self.source.tensor(id);
            let is_first_dtensor =
                matches!(planned.layout, RankLayout::Distributed { .. }) && meshes.written_meshes.is_empty();
            keys[index] = next_key;
            next_key += 1;
            if is_first_dtensor {
                // The mesh follows the local tensor of the first DTensor.
                meshes.key = next_key;
                next_key += 1;
            }
            let (dtype, key, sizes) = (*dtype, keys[index], local_sizes(self.tiles[index].as_ref()));
            match &planned.layout {
                RankLayout::Plain | RankLayout::Local(_) => {
                    match self.sharded_dims.and_then(|sharded_dims| sharded_dims.get(&id)) {
                        Some(dims) => write_part(writer, (dtype, key, &sizes), dims),
                        None => write_tensor(writer, dtype, key, &sizes),
                    }
                }
                RankLayout::Distributed { placements, slice } => write_dtensor(
                    writer,
                    &mut meshes,
                    DTensorSpec { dtype, shape, placements, slice: slice.as_deref(), key, local_sizes: &sizes },
                ),
                RankLayout::Sharded { .. } => {
                    let sharded = sharded.as_mut().expect("ShardedTensors have a group");
                    // The list of the shards of all ranks is long and equal on all ranks, so it becomes a separate part
                    // of the pickle.
                    let own = sharded
                        .write(writer, ShardedTensorSpec { dtype, shape, key, stored: None, requires_grad: false });
                    cuts.extend([own.start, own.end]);
                    stored[index] = self.tiles[index].as_ref().is_some_and(|tile| !tile.is_empty());
                }
            }
            if planned.count > 1 {
                writer.put(memo_of(index));
            }
            if written % TENSORS_PER_PART == 0 {
                cuts.push(writer.written().len());
            }
            written += 1;
            Ok(())
        };
        writer.value(state, &mut Leaves { rank, tensors })?;
        let bytes = writer.finish();
        cuts.push(bytes.len());
        let in_file = keys.iter().zip(&stored).filter(|(_, stored)| **stored).map(|(key, _)| *key);
        if !in_file.is_sorted() {
            return Err(WriteError::Leaf(String::from("an object refers to its tensors in another order")));
        }
        let mesh_key = (!meshes.written_meshes.is_empty()).then_some(meshes.key);
        Ok(TorchRankPickle { bytes, cuts, stored, keys, mesh_key })
    }

    /// Appends the archive to `output`, and returns the offset in bytes of each tensor's data in the file; `None` for a
    /// tensor of which the rank has no elements.
    fn lay_out(
        &self,
        pickle: &TorchRankPickle,
        mesh: &DeviceMesh,
        output: &mut OutputFile,
        frames: &mut SharedBytes,
    ) -> Vec<Option<u64>> {
        let mut archive = ArchiveWriter::new(PREFIX);
        archive.start_in_parts(&pickle.bytes, &pickle.cuts);
        let write_mesh = |archive: &mut ArchiveWriter, key: usize| {
            let ranks: Vec<u8> = mesh.ranks().iter().flat_map(|rank| rank.0.to_le_bytes()).collect();
            archive.literal(&format!("data/{key}"), &ranks);
        };
        let mut pending_mesh = pickle.mesh_key;
        let mut offsets = Vec::with_capacity(self.tiles.len());
        for (index, (tile, id)) in self.tiles.iter().zip(self.tensors.keys()).enumerate() {
            let key = pickle.keys[index];
            if let Some(mesh_key) = pending_mesh.filter(|mesh_key| pickle.stored[index] && *mesh_key < key) {
                write_mesh(&mut archive, mesh_key);
                pending_mesh = None;
            }
            let numel = tile.as_ref().map_or(0, Tile::numel);
            let offset = pickle.stored[index].then(|| {
                let len = numel * self.source.tensor(*id).dtype.itemsize();
                archive.payload(&format!("data/{key}"), len)
            });
            offsets.push(offset.filter(|_| numel > 0));
        }
        if let Some(mesh_key) = pending_mesh {
            write_mesh(&mut archive, mesh_key);
        }
        let base = frames.append(archive.finish(), output);
        offsets.into_iter().map(|offset| offset.map(|offset| base + offset)).collect()
    }
}
