//! Writing one torch.save file a rank: each holds the same tree, with that rank's part of each tensor.
//!
//! A tensor is a DTensor or ShardedTensor of the rank's part, or a plain tensor, whole on every rank. Nothing is shared
//! between files, so a replica is stored once for each rank that has it, as PyTorch does.
//!
//! Invariant: in every file the data of tensors comes in the order of [`Reservation::tensors`], whatever differs
//! between the trees of ranks.

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
use crate::layout::shards::SharedTensor;
use crate::layout::{
    DeviceMesh, Dims, LayoutError, MeshDim, Placement, Rank, Region, TensorDim, Tile, comma_list, local_shard,
};
use crate::storage::FileId;
use torch_pickle::pickle::{WriteError, Writer};
use torch_pickle::zip::ArchiveWriter;

/// How a tensor lies on the ranks of the target mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankLayout {
    /// A plain tensor, whole on every rank.
    Plain,
    /// A DTensor.
    Distributed {
        /// One for each dim of the mesh.
        placements: Vec<Placement>,
        /// The dims of the tensor's own mesh, where that is to be a slice; it is replicated on the others.
        slice: Option<Vec<MeshDim>>,
    },
    /// A plain tensor, of which each rank has its part.
    Local(SharedTensor),
    /// A ShardedTensor: its rows over one mesh dim, the same of all such tensors.
    Sharded { dim: MeshDim },
}

impl RankLayout {
    /// A DTensor.
    ///
    /// # Errors
    /// `Unsupported` where it is cut as DTensors are not.
    pub fn of_dtensor(
        fqn: &Fqn,
        entry: &TensorEntry,
        mesh: &DeviceMesh,
        shared: SharedTensor,
        cut: SplitChoice<'_>,
    ) -> Result<Self> {
        check_chunks(fqn, entry, mesh, &shared, cut)?;
        Ok(Self::Distributed { placements: shared.placements, slice: shared.slice })
    }

    /// How ranks share it, as far as placements say it.
    fn shared(self) -> Option<SharedTensor> {
        match self {
            Self::Plain | Self::Sharded { .. } => None,
            Self::Distributed { placements, slice } => Some(SharedTensor { placements, splits: Vec::new(), slice }),
            Self::Local(shared) => Some(shared),
        }
    }

    /// That of FSDP1 where it has one for these placements: a ShardedTensor, or a plain tensor where nothing is cut.
    ///
    /// # Errors
    /// `Unsupported` for what is not `S(0)` on one mesh dim, and where it is cut as FSDP1 does not.
    pub fn of_fsdp1(
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

/// The classes of PyTorch do not record how a dim was cut: whoever loads them reckons with `torch.chunk`.
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
                format!("{fqn}: split by {splits} ({cut}), rank {rank} has {own}, of a DTensor {chunk}"),
                format!(
                    "DTensors and ShardedTensors are cut by torch.chunk: {}, or write plain local tensors with \
                     options::tensor_class local, options::to local or options::to dcp",
                    cut.hint_for_chunk_split()
                ),
            ));
        }
    }
    Ok(())
}

/// What to write.
pub struct RankTarget<'a> {
    pub mesh: &'a DeviceMesh,
    /// The number of files. Ranks that are not in the mesh hold nothing of what the others share.
    pub world_size: u32,
    pub style: &'a DTensorStyle,
    /// The file of a rank.
    pub name: &'a dyn Fn(Rank) -> PathBuf,
    /// Asked for each name of each tensor; where names are tied, the first decides. What a rank has of its own is plain
    /// all the same.
    pub layout: &'a mut dyn FnMut(&Fqn, &Path, &TensorEntry) -> Result<RankLayout>,
}

/// The mesh dim that all ShardedTensors of a target have in common, if there are any.
///
/// # Errors
/// `Unsupported` where there are several, or the ranks along it do not ascend.
fn common_dim<'l>(
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
                    format!("ShardedTensors over different mesh dims: {first} and {fqn}"),
                    "those of a file share one process group; shard all over one mesh dim, or write options::tensor_class \
                     dtensor",
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
                format!("{fqn}: a ShardedTensor on ranks {} in this order", ranks.join(",")),
                "FSDP1 takes rows in the order of ranks; leave options::mesh_ranks out, or write options::tensor_class dtensor",
            ));
        }
    }
    Ok(Some(dim))
}

/// Lay out a file for each rank. Where ranks of the source store different values of an object, a rank
/// gets that of the same number; ranks beyond theirs get them in turn.
///
/// Only dtypes and shapes of `source` are looked at.
///
/// # Errors
/// `Unsupported` where an object cannot be pickled, what `layout` gives, and where placements do not fit.
pub fn reserve_ranks(source: &Catalog, state: &Value, target: RankTarget<'_>) -> Result<Reservation> {
    let RankTarget { mesh, world_size, style, name, layout } = target;
    let mut reservation = Reservation::default();
    let tensors = plan(source, state, layout, &mut reservation.notes)?;
    let shared_dim = common_dim(tensors.values().map(|planned| (&planned.fqn, &planned.layout)), mesh)?;
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
        let meshes = MeshWriter { mesh, style, rank, world_size, coordinate, known: BTreeSet::new() };
        let group = match (shared_dim, coordinate) {
            (Some(dim), Some(coordinate)) => Some(RankGroup::new(mesh, dim, coordinate)),
            (None, _) => None,
            (Some(_), None) => return Err(outside_of_groups(rank, mesh)),
        };
        let pickle = file.pickle(state, meshes, group).map_err(|error| {
            Error::unsupported(
                format!("the state dict cannot be pickled: {error}"),
                "leave that object out of the checkpoint",
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

/// FSDP1 has no ShardedTensor without a shard for who is in no group.
fn outside_of_groups(rank: Rank, mesh: &DeviceMesh) -> Error {
    Error::unsupported(
        format!("ShardedTensors on {mesh}, which rank {rank} is not in"),
        "options::tensor_class dtensor writes DTensors, of which such a rank holds nothing; or give the mesh the ranks from 0 \
         on, in any order",
    )
}

/// A tensor to write.
struct PlannedTensor {
    /// Its first name.
    fqn: Fqn,
    layout: RankLayout,
    /// How often it occurs in the tree. What occurs again is the same object, as it was for whoever saved it.
    count: usize,
}

/// The tensors in the order in which their data will lie in each file.
fn plan(
    source: &Catalog,
    state: &Value,
    layout: &mut dyn FnMut(&Fqn, &Path, &TensorEntry) -> Result<RankLayout>,
    notes: &mut Vec<String>,
) -> Result<IndexMap<TensorId, PlannedTensor>> {
    // A rank's own tensor is nothing that ranks could share: a shard of it would be all that is left.
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
                notes.push(format!("{fqn} is tied to {} and lies as that does", known.fqn));
            }
            Some(_) => {}
        }
    }
    // Those within attributes of dicts have no name.
    for id in state.tensor_ids() {
        let nameless = || PlannedTensor { fqn: source.tensor(id).fqn.clone(), layout: RankLayout::Plain, count: 0 };
        tensors.entry(id).or_insert_with(nameless).count += 1;
    }
    Ok(tensors)
}

impl PlannedTensor {
    /// What the rank at a coordinate holds; `None` where it is not in the mesh and has no part.
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

/// One rank's file in the making.
struct TorchRankFile<'a> {
    source: &'a Catalog,
    tensors: &'a IndexMap<TensorId, PlannedTensor>,
    /// Of each tensor, what the rank holds; `None` where it has no part.
    tiles: Vec<Option<Tile>>,
    /// Whether any file has a DTensor, and so a mesh.
    distributed: bool,
}

/// The sizes of what a rank holds that has no part: as in PyTorch, one dim of nothing, whatever the tensor's shape.
fn sizes(tile: Option<&Tile>) -> Dims {
    tile.map_or_else(|| Dims::from_slice(&[0]), Tile::sizes)
}

/// One rank's pickle, and which tensors it has a part of.
struct TorchRankPickle {
    bytes: Vec<u8>,
    /// Where to cut it into parts: most of them are equal on all ranks, and kept once.
    cuts: Vec<usize>,
    stored: Vec<bool>,
    has_mesh: bool,
}

/// Tensors in one part of a pickle.
const TENSORS_A_PART: usize = 16;

impl TorchRankFile<'_> {
    /// Storage keys are the same on all ranks: that of the mesh, then the tensors in order.
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
            let (dtype, key, sizes) = (*dtype, self.key(index), sizes(self.tiles[index].as_ref()));
            match &planned.layout {
                RankLayout::Plain | RankLayout::Local(_) => write_tensor(writer, dtype, key, &sizes),
                RankLayout::Distributed { placements, slice } => write_dtensor(
                    writer,
                    &mut meshes,
                    DTensorSpec { dtype, shape, placements, slice: slice.as_deref(), key, local_sizes: &sizes },
                ),
                RankLayout::Sharded { .. } => {
                    let sharded = sharded.as_mut().expect("ShardedTensors have a group");
                    // What it says of other ranks is long.
                    let own = sharded
                        .write(writer, ShardedTensorSpec { dtype, shape, key, stored: None, requires_grad: false });
                    cuts.extend([own.start, own.end]);
                    stored[index] = self.tiles[index].as_ref().is_some_and(|tile| !tile.is_empty());
                }
            }
            if planned.count > 1 {
                writer.put(memo_of(index));
            }
            if written % TENSORS_A_PART == 0 {
                cuts.push(writer.written().len());
            }
            written += 1;
            Ok(())
        };
        writer.value(state, &mut Leaves { rank, tensors })?;
        let bytes = writer.finish();
        cuts.push(bytes.len());
        Ok(TorchRankPickle { bytes, cuts, stored, has_mesh: !meshes.known.is_empty() })
    }

    /// The archive; gives the offset of each tensor of which the rank holds something.
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
