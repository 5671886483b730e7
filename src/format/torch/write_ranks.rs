//! Writes one torch.save file per rank. All files have the same tree, each with its rank's part of every tensor.
//!
//! A tensor is written as a DTensor, as a ShardedTensor, as a plain tensor that is whole on every rank, or as a plain
//! tensor that is the local part of each rank. Files share no data, so a replica is stored once for each rank that has
//! it, as in PyTorch. Offsets are in bytes; shapes count elements.
//!
//! Invariant: in every file the data of tensors comes in the order of [`Reservation::tensors`], even if the trees of
//! ranks differ.

use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;

use indexmap::IndexMap;

use super::DTensorStyle;
use super::write::{PREFIX, write_tensor};
use super::write_dtensor::{DTensorSpec, write_dtensor};
use super::write_mesh::{MESH_KEY, MeshWriter};
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
        /// One placement for each dim of the mesh.
        placements: Vec<Placement>,
        /// The dims of the tensor's own mesh, if it gets a mesh that is a slice of the whole mesh. The tensor is
        /// replicated on all other mesh dims.
        slice: Option<Vec<MeshDim>>,
    },
    /// A plain tensor. On each rank it is the rank's local part, and the file does not record the placements.
    Local(SharedTensor),
    /// A ShardedTensor whose rows are sharded over one mesh dim. All ShardedTensors of a target use the same dim.
    Sharded { dim: MeshDim },
}

impl RankLayout {
    /// Returns the layout that writes a tensor as a DTensor.
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

    /// Returns the layout that FSDP1 has for these placements: a ShardedTensor, or a plain tensor if nothing is
    /// sharded.
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

/// Checks that each rank's part is the part that `torch.chunk` would give. DTensors and ShardedTensors do not record
/// split rules, and assume `torch.chunk`.
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
    /// The number of ranks, each of which gets a file. A file of a rank outside the mesh has no part of sharded
    /// tensors.
    pub world_size: u32,
    pub style: &'a DTensorStyle,
    /// A function that returns the file name of a rank.
    pub name: &'a dyn Fn(Rank) -> PathBuf,
    /// A function that is called for each name of each tensor and returns its layout. If names are tied, the layout of
    /// the first name counts. A tensor whose content differs between ranks is always plain.
    pub layout: &'a mut dyn FnMut(&Fqn, &Path, &TensorEntry) -> Result<RankLayout>,
}

/// Returns the mesh dim over which all ShardedTensors of a target are sharded; `None` if there are no ShardedTensors.
///
/// # Errors
/// `Unsupported` if ShardedTensors are sharded over different mesh dims, or if the ranks along the dim are not
/// ascending.
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
                    format!("the ShardedTensors {first} and {fqn} are sharded over different mesh dims"),
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

/// Lays out a file for each rank. If ranks of the source store different values of an object, a rank gets the value
/// that the rank with the same number stores. If that rank stores no value, the `n` ranks that store one are counted
/// from 0, and rank `r` gets the value of the rank with count `r mod n`.
///
/// Reads only dtypes and shapes of `source`.
///
/// # Errors
/// `Unsupported` if an object cannot be pickled; the errors of `layout`; `Layout` if placements do not fit.
pub fn reserve_ranks(source: &Catalog, state: &Value, target: RankTarget<'_>) -> Result<Reservation> {
    let RankTarget { mesh, world_size, style, name, layout } = target;
    let mut reservation = Reservation::default();
    let tensors = plan(source, state, layout, &mut reservation.notes)?;
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
            distributed: tensors.values().any(|planned| matches!(planned.layout, RankLayout::Distributed { .. })),
        };
        let coordinate = coordinate.as_ref();
        let meshes = MeshWriter { mesh, style, rank, world_size, coordinate, written_meshes: BTreeSet::new() };
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
                chunks.push(Chunk { tile, location, strides: None, rank: Some(rank) });
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

/// Returns the error for a rank outside the mesh. FSDP1 has no ShardedTensor that such a rank could load.
fn outside_mesh_error(rank: Rank, mesh: &DeviceMesh) -> Error {
    Error::unsupported(
        format!("ShardedTensors on the mesh {mesh} need every rank, but rank {rank} is not in the mesh"),
        "use options::tensor_class dtensor, which allows ranks outside the mesh, or give the mesh all ranks from 0 \
         on, in any order",
    )
}

/// A tensor to write, and its layout.
struct PlannedTensor {
    /// The first name of the tensor in the state dict.
    fqn: Fqn,
    layout: RankLayout,
    /// The number of places in the state dict at which the tensor occurs. All of them refer to the same object, as in
    /// the job that saved it.
    count: usize,
}

/// Returns the tensors to write, in the order in which each file has their data.
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
    for id in state.tensor_ids() {
        let nameless = || PlannedTensor { fqn: source.tensor(id).fqn.clone(), layout: RankLayout::Plain, count: 0 };
        tensors.entry(id).or_insert_with(nameless).count += 1;
    }
    Ok(tensors)
}

impl PlannedTensor {
    /// Returns the tile of the rank at a coordinate; `None` if the rank is outside the mesh and has no part.
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
    /// The rank's tile of each tensor; `None` if the rank has no part of the tensor.
    tiles: Vec<Option<Tile>>,
    /// True if the files have DTensors. In that case the files also have the mesh.
    distributed: bool,
}

/// Returns the sizes of a rank's local tensor. As in PyTorch, the local tensor of a rank without a part has one dim of
/// size 0, regardless of the tensor's shape.
fn local_sizes(tile: Option<&Tile>) -> Dims {
    tile.map_or_else(|| Dims::from_slice(&[0]), Tile::sizes)
}

/// The pickle of one rank, and which tensors the rank has data of.
struct TorchRankPickle {
    bytes: Vec<u8>,
    /// The byte offsets at which the pickle is divided into parts. Most parts are equal on all ranks, and are in memory
    /// only once.
    cuts: Vec<usize>,
    stored: Vec<bool>,
    has_mesh: bool,
}

/// The number of tensors in one part of a pickle. Equal parts of several rank files are in memory only once.
const TENSORS_PER_PART: usize = 16;

impl TorchRankFile<'_> {
    /// Returns the storage key of the tensor at `index`. Keys are the same on all ranks: the mesh has the first key,
    /// and the tensors follow in order.
    fn key(&self, index: usize) -> usize {
        index + if self.distributed { MESH_KEY + 1 } else { 0 }
    }

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
            let (dtype, key, sizes) = (*dtype, self.key(index), local_sizes(self.tiles[index].as_ref()));
            match &planned.layout {
                RankLayout::Plain | RankLayout::Local(_) => write_tensor(writer, dtype, key, &sizes),
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
        Ok(TorchRankPickle { bytes, cuts, stored, has_mesh: !meshes.written_meshes.is_empty() })
    }

    /// Lays out the archive, and returns the offset of each tensor's data in the file; `None` if the rank has no data
    /// of it.
    fn lay_out(
        &self,
        pickle: &TorchRankPickle,
        mesh: &DeviceMesh,
        output: &mut OutputFile,
        frames: &mut SharedBytes,
    ) -> Vec<Option<u64>> {
        let mut archive = ArchiveWriter::new(PREFIX);
        archive.start_in_parts(&pickle.bytes, &pickle.cuts);
        if pickle.has_mesh {
            let ranks: Vec<u8> = mesh.ranks().iter().flat_map(|rank| rank.0.to_le_bytes()).collect();
            archive.literal(&format!("data/{MESH_KEY}"), &ranks);
        }
        let mut offsets = Vec::with_capacity(self.tiles.len());
        for (index, (tile, id)) in self.tiles.iter().zip(self.tensors.keys()).enumerate() {
            let numel = tile.as_ref().map_or(0, Tile::numel);
            let offset = pickle.stored[index].then(|| {
                let len = numel * self.source.tensor(*id).dtype.itemsize();
                archive.payload(&format!("data/{}", self.key(index)), len)
            });
            offsets.push(offset.filter(|_| numel > 0));
        }
        let base = frames.append(archive.finish(), output);
        offsets.into_iter().map(|offset| offset.map(|offset| base + offset)).collect()
    }
}
