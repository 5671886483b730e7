//! The catalog: the content of a checkpoint, independent of its format.
//!
//! Shapes and boxes count elements; offsets in files are in bytes. A catalog has logical tensors, each covered by
//! chunks that are stored in files, and the Python values around them. A reader of any format returns a [`Catalog`] of
//! the source. A writer lays out the files of the result as a [`Reservation`], and a conversion copies the elements of
//! the result from the source. Invariant: nothing here depends on a format. PyTorch's counterpart is `Metadata` in
//! `torch/distributed/checkpoint/metadata.py`.

mod chunk;
mod computed;
mod dtype;
pub(crate) mod error;
pub mod flat;
pub mod modules;
pub mod optimizer;
pub mod owner;
pub mod parameter_names;
pub mod path;
mod reserved;
pub mod state_dict;
mod tiling;
pub mod unreadable;
pub mod value;
pub mod wrappers;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

pub use chunk::{
    ChecksummedRange, Chunk, ChunkTable, FileLocation, Record, StoredView, StridedLocation, contiguous_strides,
    permuted_stride, span,
};
pub use computed::{Calculation, ComputedTensor, MXFP4_GROUP};
pub use dtype::Dtype;
pub use path::{Key, Path, StateLeaf};
pub use reserved::{CRC_BYTES, ChecksumSpan, HeaderBytes, OutputFile, Reservation, Reserved};
pub use tiling::{Holders, Tiling, list_ranks};
pub use unreadable::Unreadable;
pub use value::{Dict, DictKind, RankValue, TensorId, Value, shift_tensors};

use crate::error::{CatalogError, Error};
use crate::layout::distinct_tiles::{MeshPlacement, SharedTensor};
use crate::layout::partial::{PartialReduction, partial_index};
use crate::layout::whole::{AssembledTensor, RankPart};
use crate::layout::{DeviceMesh, Dims, LayoutError, Rank, Region, Tile, comma_list};
use crate::name_list::FEW;
use crate::storage::{FileId, FileRange};

/// A fully qualified name: the path of a tensor or object in its state dict, joined with dots. Clones of an FQN share
/// one text in memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fqn(Arc<str>);

impl Fqn {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<T: Into<Arc<str>>> From<T> for Fqn {
    fn from(text: T) -> Self {
        Self(text.into())
    }
}

impl From<&Fqn> for Arc<str> {
    fn from(name: &Fqn) -> Self {
        name.0.clone()
    }
}

impl fmt::Display for Fqn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(&self.0)
    }
}

/// The index of a mesh in [`Catalog::meshes`]. The mesh id is stored for each sharded tensor, because the tensors of one
/// checkpoint may be on several meshes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MeshId(pub u32);

/// The placements of a tensor on a mesh of the catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// The mesh of the placements. If the tensor is on a slice of a mesh, this is the root mesh of the slice.
    pub mesh: MeshId,
    pub shared: SharedTensor,
}

impl Sharding {
    /// Returns the placements as text: `S(0),R`.
    pub fn display_placements(&self) -> String {
        comma_list(&self.shared.placements)
    }
}

/// The Python class in which ranks store a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// A plain tensor. Without a [`Sharding`], every rank has the complete tensor. With a [`Sharding`], each rank has a
    /// local shard. Tensors of formats that do not record placements (DCP) also have this class.
    #[default]
    Tensor,
    /// A `DTensor`, which has a [`Sharding`].
    DTensor,
    /// A `ShardedTensor` of FSDP1. Files record the boxes of the tensor and the rank of each box, but no mesh.
    ShardedTensor,
}

/// One logical tensor of a checkpoint. A catalog may have a million tensors, so rarely used fields are boxed.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// The first name of the tensor in the state dict. Tied tensors have several names.
    pub fqn: Fqn,
    pub dtype: Dtype,
    /// The global shape, in elements.
    pub shape: Dims,
    pub class: Class,
    /// The mesh and placements, if the format records these (DCP does not), otherwise `None`.
    pub sharding: Option<Box<Sharding>>,
    /// The strides of the global tensor in elements, if the tensor was dense in memory but not row-major
    /// (`channels_last`) and the format records the strides. Each chunk also has its own strides.
    pub stride: Option<Box<Dims>>,
    /// The assignment of chunks to partial values, if the tensor has a `Placement::Partial`; otherwise `None`.
    pub partial_values: Option<Box<PartialValues>>,
    /// If dtshard cannot read the tensor, the reason; otherwise `None`. If the layout is unknown or does not match the
    /// tensor, the dtype, shape and chunks of the entry describe the stored parts of the tensor. With any other reason,
    /// the entry has no chunks, and its dtype and shape have no meaning. [`select`](crate::select::select) refuses the
    /// tensor if it is selected.
    pub unreadable: Option<Box<Unreadable>>,
    /// Every stored chunk, including replicas.
    pub chunks: ChunkTable,
}

/// The partial values of a tensor with a `Placement::Partial`: which chunks belong to which partial value, and how the
/// partial values are reduced to the complete value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialValues {
    pub reduction: PartialReduction,
    /// For each chunk, in the order of the chunk table, the index of the partial value to which the chunk belongs: the
    /// row-major index over the Partial mesh dims.
    pub by_chunk: Vec<u64>,
}

impl PartialValues {
    /// Returns the partial values of the chunks of a tensor, or `None` if no placement of the tensor is `Partial`.
    ///
    /// # Errors
    /// `MixedReduction` if the ops of two mesh dims do not commute.
    ///
    /// # Panics
    /// If a chunk belongs to no rank of the mesh.
    pub fn new(placement: MeshPlacement<'_>, chunks: &ChunkTable) -> Result<Option<Self>, LayoutError> {
        let (shape, placements) = (placement.mesh.shape(), &placement.shared.placements);
        let Some(reduction) = PartialReduction::new(shape, placements)? else { return Ok(None) };
        let at = |chunk| placement.mesh.coordinate(chunks.rank(chunk)?);
        let number = |chunk| partial_index(shape, placements, &at(chunk).expect("chunks are of ranks of the mesh"));
        Ok(Some(Self { reduction, by_chunk: (0..chunks.len()).map(number).collect() }))
    }
}

impl TensorEntry {
    /// Makes a plain tensor without chunks.
    #[must_use]
    pub fn new(fqn: Fqn, dtype: Dtype, shape: Dims) -> Self {
        let chunks = ChunkTable::new(shape.len());
        Self {
            fqn,
            dtype,
            shape,
            class: Class::Tensor,
            sharding: None,
            stride: None,
            partial_values: None,
            unreadable: None,
            chunks,
        }
    }

    /// Makes an entry for a tensor or an object that dtshard cannot read.
    #[must_use]
    pub fn unreadable(fqn: Fqn, why: Unreadable) -> Self {
        // A scalar without chunks: a writer that missed `unreadable` would report a tensor that is not covered.
        Self { unreadable: Some(Box::new(why)), ..Self::new(fqn, Dtype::U8, Dims::new()) }
    }

    /// Makes a tensor that is one contiguous chunk at an offset of a file.
    #[must_use]
    pub fn whole(fqn: Fqn, dtype: Dtype, shape: Dims, file: FileId, offset: u64) -> Self {
        let tile = Tile::from_region(&Region::whole(&shape));
        let location = if tile.is_empty() { FileLocation::Empty } else { FileLocation::Bytes { file, offset } };
        let mut entry = Self::new(fqn, dtype, shape);
        entry.chunks.push(Chunk { tile, location, strides: None, rank: None, view: None });
        entry
    }

    /// Returns the local shape of the tensor on each rank that has a chunk. If a rank has chunks of different shapes, the
    /// rank occurs in the result once for each shape.
    pub fn local_shapes(&self) -> Vec<RankPart> {
        let mut known: HashMap<Rank, Dims> = HashMap::with_capacity(self.chunks.len());
        let mut parts = Vec::with_capacity(self.chunks.len());
        for chunk in self.chunks.iter() {
            let Some(rank) = chunk.rank else { continue };
            let sizes = chunk.tile.sizes();
            if known.insert(rank, sizes.clone()).as_ref() != Some(&sizes) {
                parts.push(RankPart { rank, sizes });
            }
        }
        parts
    }

    /// Returns the tensor that the local parts of the ranks form. In `self`, the tile of each chunk is a complete local
    /// tensor, because the layout was not known. `parts` are the local shapes, and `found` is the result of
    /// [`assemble`](crate::layout::whole::assemble) for these shapes.
    ///
    /// # Errors
    /// `MixedReduction` if the ops of two mesh dims do not commute.
    pub fn joined(
        &self,
        (id, mesh): (MeshId, &DeviceMesh),
        shared: SharedTensor,
        parts: &[RankPart],
        found: AssembledTensor,
    ) -> Result<Self, LayoutError> {
        let tiles: HashMap<Rank, Tile> = parts.iter().map(|part| part.rank).zip(found.tiles).collect();
        let mut chunks = ChunkTable::new(found.shape.len());
        for chunk in self.chunks.iter() {
            let tile = chunk.rank.and_then(|rank| tiles.get(&rank)).cloned().unwrap_or(chunk.tile);
            chunks.push(Chunk { tile, ..chunk });
        }
        let partial_values = PartialValues::new(MeshPlacement { mesh, shared: &shared }, &chunks)?.map(Box::new);
        let stride = self.stride.clone().filter(|_| found.shape == self.shape);
        // A 0-d tensor cannot be sharded and is written as a plain tensor.
        let is_scalar = found.shape.is_empty() && partial_values.is_none();
        let sharding = (!is_scalar).then(|| Box::new(Sharding { mesh: id, shared }));
        Ok(Self { shape: found.shape, sharding, stride, partial_values, chunks, ..self.clone() })
    }

    /// Returns whether the tensor is known to be sharded or replicated over ranks. Returns false if every rank has the
    /// complete tensor as a plain tensor, or if the format does not record placements (DCP).
    pub fn is_shared(&self) -> bool {
        self.class != Class::Tensor || self.sharding.is_some()
    }

    /// Returns whether this leaf is an object that dtshard cannot read, and not a tensor.
    pub fn is_unreadable_object(&self) -> bool {
        matches!(self.unreadable.as_deref(), Some(Unreadable { kind: unreadable::UnreadableKind::Object(_), .. }))
    }

    /// Returns the number of elements of the global tensor. Readers refuse shapes whose byte size overflows, so the number
    /// fits `u64`.
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the number of bytes of the global tensor.
    pub fn len_bytes(&self) -> u64 {
        self.numel() * self.dtype.itemsize()
    }
}

/// Returns the byte size of a tensor of this shape. Returns `None` if this size, with each size of 0 in the shape counted
/// as 1, exceeds `i64`.
pub fn checked_len_bytes(shape: &[u64], dtype: Dtype) -> Option<u64> {
    let bytes = crate::layout::numel(shape)?.checked_mul(dtype.itemsize())?;
    // Strides treat a size of 0 as 1, so the product without zeros must fit as well.
    let spanned = shape.iter().try_fold(dtype.itemsize(), |bytes, size| bytes.checked_mul((*size).max(1)))?;
    i64::try_from(spanned).is_ok().then_some(bytes)
}

/// Returns the error about an object or a tensor for which ranks stored different values. `tensors` are the tensors of
/// the catalog.
pub fn conflict_error(path: &Path, rank_values: &[RankValue], tensors: &[TensorEntry]) -> Error {
    let between = if rank_values.len() > FEW {
        let mut ranks: Vec<Rank> = rank_values.iter().flat_map(|rank_value| &rank_value.ranks).copied().collect();
        ranks.sort_unstable();
        list_ranks(&ranks)
    } else {
        rank_values.iter().map(|rank_value| list_ranks(&rank_value.ranks)).collect::<Vec<_>>().join(" and ")
    };
    let show = |rank_value: &RankValue| match &rank_value.value {
        Value::Tensor(id) => {
            let TensorEntry { dtype, shape, .. } = &tensors[id.0 as usize];
            format!("{dtype} {:?}", shape.as_slice())
        }
        value => value::describe(value, tensors, 60),
    };
    let mut shown: Vec<String> = rank_values.iter().map(show).collect();
    let is_tensor = rank_values.iter().all(|rank_value| matches!(rank_value.value, Value::Tensor(_)));
    let look_equal = shown.iter().all(|text| *text == shown[0]);
    if look_equal {
        shown.fill(format!("a different {}", rank_values[0].value.type_name()));
    }
    let has = |(rank_value, text): (&RankValue, &String)| {
        let verb = if rank_value.ranks.len() == 1 { "has" } else { "have" };
        format!("{} {verb} {text}", list_ranks(&rank_value.ranks))
    };
    let entries: Vec<String> = rank_values.iter().zip(&shown).map(has).collect();
    let more = if entries.len() > FEW { format!("; and {} more values", entries.len() - FEW) } else { String::new() };
    Error::Catalog(CatalogError::Conflict {
        fqn: path.to_string(),
        what: if is_tensor { "a tensor" } else { "an object" },
        between,
        detail: entries[..entries.len().min(FEW)].join("; ") + &more,
        hint: Some(String::from(
            if is_tensor {
                "set options::on_conflict: per-rank keeps every value, rank0 keeps the value of the lowest rank, drop leaves the tensor out"
            } else {
                "set options::on_conflict: per-rank keeps every value, rank0 keeps the value of the lowest rank, drop leaves the object out"
            },
        )),
    })
    .naming(&entries)
}

/// The content of a checkpoint.
#[derive(Clone, Debug)]
pub struct Catalog {
    pub meshes: Vec<DeviceMesh>,
    pub tensors: Vec<TensorEntry>,
    /// The computed files of tensors whose elements are computed, in the order of their ids.
    pub computed: Vec<ComputedTensor>,
    /// The state dict: containers and non-tensor values as saved, and tensors as references into `tensors`.
    pub state: Value,
    /// The byte ranges of the `torch.save` archives that the reader has read, so that `verify` can verify their
    /// checksums. Archives that are read only when their data is needed (DCP items) are not in this list.
    pub archives: Vec<FileRange>,
    /// Objects that the reader left out because their classes are unknown, as `FQN (symbol)`.
    pub dropped: Vec<String>,
    /// The flat layout of an FSDP1 source, if the flat layout is known; otherwise `None`.
    pub flat: Option<flat::FlatLayout>,
    /// The names of the groups of model-parallel ranks in makani's `comm_grid`; empty for other checkpoints.
    pub model_parallel_groups: Vec<String>,
    /// True if plain tensors without a recorded layout may be parts of larger tensors, because other plain tensors of
    /// the checkpoint have a recorded layout, or because makani, or DeepSpeed with tensor parallelism, saved the checkpoint.
    pub plain_may_be_parts: bool,
    /// The values that the parameters have, if the checkpoint has both; otherwise `None`.
    pub weights: Option<Weights>,
    /// Problems that a reader found and the user should know.
    pub warnings: Vec<String>,
    /// Texts about actions of a reader that an option requested.
    pub notes: Vec<String>,
    /// Further details for the user, which are shown only on request.
    pub details: Vec<String>,
}

/// The values of parameters that a checkpoint of mixed-precision training has twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The master weights, usually f32, which the optimizer updates.
    Master,
    /// The parameters of the module, in the dtype in which the model computes: the rounded master weights.
    Module,
}

impl Catalog {
    /// Makes a catalog without tensors and with an empty state dict.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            meshes: Vec::new(),
            tensors: Vec::new(),
            computed: Vec::new(),
            state: Value::Dict(Dict::default()),
            archives: Vec::new(),
            dropped: Vec::new(),
            flat: None,
            model_parallel_groups: Vec::new(),
            plain_may_be_parts: false,
            weights: None,
            warnings: Vec::new(),
            notes: Vec::new(),
            details: Vec::new(),
        }
    }

    /// Returns the tensor with this id.
    pub fn tensor(&self, id: TensorId) -> &TensorEntry {
        &self.tensors[id.0 as usize]
    }

    /// Returns whether the layout of every tensor of the model is unknown, so that nothing of the model can be read.
    pub fn is_layout_unknown(&self) -> bool {
        let parameters = state_dict::parameters(&self.state);
        let is_unknown = |id| self.tensor(id).unreadable.as_ref().is_some_and(|why| why.is_of_unknown_layout());
        !parameters.is_empty() && parameters.into_iter().all(|(_, id)| is_unknown(id))
    }

    /// Returns the dtype of each tensor.
    pub fn dtypes(&self) -> Vec<Dtype> {
        self.tensors.iter().map(|entry| entry.dtype).collect()
    }

    /// Returns the mesh of a sharding.
    pub fn mesh(&self, sharding: &Sharding) -> &DeviceMesh {
        &self.meshes[sharding.mesh.0 as usize]
    }

    /// Returns a sharding together with its mesh.
    pub fn on_mesh<'a>(&'a self, sharding: &'a Sharding) -> MeshPlacement<'a> {
        MeshPlacement { mesh: self.mesh(sharding), shared: &sharding.shared }
    }

    /// Returns an error for each object whose values differ between ranks, except random number generator state.
    pub fn conflicts(&self) -> Vec<Error> {
        let disagreed = path::objects(&self.state).into_iter().filter_map(|(path, value)| match value {
            Value::Other(_) if state_dict::is_random_state(path.fqn().as_str()) => None,
            Value::Other(rank_values) => Some(conflict_error(&path, rank_values, &self.tensors)),
            _ => None,
        });
        disagreed.collect()
    }

    /// Adds a tensor and returns its id.
    pub fn push_tensor(&mut self, entry: TensorEntry) -> TensorId {
        let id = TensorId(u32::try_from(self.tensors.len()).expect("fewer than 2^32 tensors"));
        self.tensors.push(entry);
        id
    }

    /// Returns the index of a mesh, and adds the mesh if it is new.
    pub fn intern_mesh(&mut self, mesh: DeviceMesh) -> MeshId {
        let index = self.meshes.iter().position(|known| *known == mesh).unwrap_or_else(|| {
            self.meshes.push(mesh);
            self.meshes.len() - 1
        });
        MeshId(u32::try_from(index).expect("fewer than 2^32 meshes"))
    }
}
