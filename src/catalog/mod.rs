//! What a checkpoint holds: logical tensors, each covered by chunks that lie somewhere in files, and the Python
//! values around them.
//!
//! Reading any format yields a [`Catalog`]; choosing a target layout and reserving its files yields another one. All
//! the verbs are the intersection of the two. Nothing here knows how a format spells these things.

mod chunk;
mod dtype;
pub(crate) mod error;
pub mod flat;
pub mod model;
pub mod modules;
pub mod optimizer;
pub mod owner;
pub mod path;
mod reserved;
mod validate;
pub mod value;
pub mod wrappers;

use std::fmt;
use std::sync::Arc;

pub use chunk::{
    ChecksummedRange, Chunk, ChunkTable, FileLocation, Record, StridedLocation, contiguous_strides, permuted_stride,
    span,
};
pub use dtype::Dtype;
pub use path::{Key, Path, StateLeaf};
pub use reserved::{ChecksumSpan, HeaderBytes, OutputFile, Reservation, Reserved, SITE_BYTES};
pub use validate::{Holders, Tiling, list_ranks};
pub use value::{Dict, DictKind, RankValue, TensorId, Value, shift_tensors};

use crate::error::{CatalogError, Error};
use crate::layout::partial::{PartialReduction, summand};
use crate::layout::shards::{MeshPlacement, SharedTensor};
use crate::layout::{DeviceMesh, Dims, LayoutError, Region, Tile, comma_list};
use crate::name_list::{FEW, short_list};
use crate::storage::{FileId, FileRange};

/// A fully qualified name: the path of a tensor or object in its state dict, joined with dots. Whoever has it shares it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fqn(Arc<str>);

impl Fqn {
    #[must_use]
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

/// Index of a mesh within [`Catalog::meshes`]. A mesh belongs to a tensor, not to the checkpoint: under FSDP2 x TP
/// norm weights live on a 1-d submesh that differs from rank to rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MeshId(pub u32);

/// How the ranks of a mesh of a catalog share a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// The root, where the tensor lies on a slice of one.
    pub mesh: MeshId,
    pub shared: SharedTensor,
}

impl Sharding {
    /// `S(0),R`
    #[must_use]
    pub fn display_placements(&self) -> String {
        comma_list(&self.shared.placements)
    }
}

/// The Python class of what a rank stores of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// A plain tensor: whole on every rank, or, where it has a [`Sharding`], the part of one that a rank held; also
    /// where the format does not say how ranks shared it (DCP).
    #[default]
    Tensor,
    /// Has a [`Sharding`].
    DTensor,
    /// That of FSDP1: boxes and the ranks that hold them, no mesh.
    ShardedTensor,
}

/// One logical tensor. There may be a million: what few have is in a box.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// The first name it has in the state dict; tied tensors have more.
    pub fqn: Fqn,
    pub dtype: Dtype,
    /// The global shape, in elements.
    pub shape: Dims,
    pub class: Class,
    /// Mesh and placements, where the format records them (DCP does not).
    pub sharding: Option<Box<Sharding>>,
    /// In elements, where the whole tensor was dense in memory in another order than by rows (`channels_last`), and the
    /// format tells. Chunks have strides of their own.
    pub stride: Option<Box<Dims>>,
    /// Set where ranks hold summands, not values: `Placement::Partial`.
    pub summands: Option<Box<PartialValues>>,
    /// Every stored chunk, replicas included.
    pub chunks: ChunkTable,
}

/// Chunks that are to be reduced before they are a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialValues {
    pub reduction: PartialReduction,
    /// Which summand each chunk is a part of, in the order of the chunk table.
    pub of_chunk: Vec<u64>,
}

impl PartialValues {
    /// Those of chunks that ranks of a mesh hold; `None` where they hold values.
    ///
    /// # Errors
    /// `MixedReduction` where they make no value.
    ///
    /// # Panics
    /// Where a chunk is of no rank of the mesh.
    pub fn of(lies: MeshPlacement<'_>, chunks: &ChunkTable) -> Result<Option<Self>, LayoutError> {
        let (shape, placements) = (lies.mesh.shape(), &lies.shared.placements);
        let Some(reduction) = PartialReduction::of(shape, placements)? else { return Ok(None) };
        let at = |chunk| lies.mesh.coordinate(chunks.rank(chunk)?);
        let number = |chunk| summand(shape, placements, &at(chunk).expect("chunks are of ranks of the mesh"));
        Ok(Some(Self { reduction, of_chunk: (0..chunks.len()).map(number).collect() }))
    }
}

impl TensorEntry {
    /// A plain tensor of which no chunk is known.
    #[must_use]
    pub fn new(fqn: Fqn, dtype: Dtype, shape: Dims) -> Self {
        let chunks = ChunkTable::new(shape.len());
        Self { fqn, dtype, shape, class: Class::Tensor, sharding: None, stride: None, summands: None, chunks }
    }

    /// A tensor that lies whole and contiguous at an offset of a file.
    #[must_use]
    pub fn whole(fqn: Fqn, dtype: Dtype, shape: Dims, file: FileId, offset: u64) -> Self {
        let tile = Tile::from_region(&Region::whole(&shape));
        let place = if tile.is_empty() { FileLocation::Nowhere } else { FileLocation::Bytes { file, offset } };
        let mut entry = Self::new(fqn, dtype, shape);
        entry.chunks.push(Chunk { tile, place, strides: None, rank: None });
        entry
    }

    /// Whether ranks are known to share it; else each that has it has all of it, or the format does not say (DCP).
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.class != Class::Tensor || self.sharding.is_some()
    }

    /// Elements of the whole tensor; readers refuse shapes whose byte size overflows.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.numel() * self.dtype.itemsize()
    }
}

/// The byte size of a tensor of this shape, if it is one a machine could hold at all.
#[must_use]
pub fn checked_len_bytes(shape: &[u64], dtype: Dtype) -> Option<u64> {
    let bytes = crate::layout::numel(shape)?.checked_mul(dtype.itemsize())?;
    // Strides take a dim of 0 for one of 1, and whoever multiplies dims meets it last.
    let spanned = shape.iter().try_fold(dtype.itemsize(), |bytes, size| bytes.checked_mul((*size).max(1)))?;
    i64::try_from(spanned).is_ok().then_some(bytes)
}

/// The error for an object of which ranks hold different values.
#[must_use]
pub fn conflict(path: &Path, holdings: &[RankValue]) -> Error {
    let between: Vec<String> = holdings.iter().map(|holding| list_ranks(&holding.ranks)).collect();
    let mut shown: Vec<String> = holdings.iter().map(|holding| format!("{:.60}", holding.value)).collect();
    let alike = shown.iter().all(|text| *text == shown[0]);
    if alike {
        shown.fill(format!("{} of its own", holdings[0].value.type_name()));
    }
    let has = |(holding, text): (&RankValue, &String)| format!("{} has {text}", list_ranks(&holding.ranks));
    let held: Vec<String> = holdings.iter().zip(&shown).map(has).collect();
    let more = if held.len() > FEW { format!("; and {} more values", held.len() - FEW) } else { String::new() };
    Error::Catalog(CatalogError::Conflict {
        fqn: path.to_string(),
        what: "an object",
        between: if between.len() > FEW { short_list(&between, FEW) } else { between.join(" and ") },
        detail: held[..held.len().min(FEW)].join("; ") + &more,
        hint: Some(String::from(
            "options::on_conflict per-rank keeps every rank's, rank0 takes the lowest rank's, drop leaves it out",
        )),
    })
    .naming(&held)
}

/// What a checkpoint holds.
#[derive(Clone, Debug)]
pub struct Catalog {
    pub meshes: Vec<DeviceMesh>,
    pub tensors: Vec<TensorEntry>,
    /// The state dict: containers and non-tensor values as they were saved, tensors as references into `tensors`.
    pub state: Value,
    /// The torch.save archives that were read, where checksums are; items that are located late have their own.
    pub archives: Vec<FileRange>,
    /// Objects that were left out because their classes are not known: `FQN (symbol)`.
    pub dropped: Vec<String>,
    /// How the source laid parameters into flat ones, where it did and that is known.
    pub flat: Option<flat::FlatLayout>,
    /// What a reader noticed and the user should know.
    pub warnings: Vec<String>,
    /// What a reader did because it was asked to.
    pub notes: Vec<String>,
    /// What a reader noticed for who wants to know more.
    pub details: Vec<String>,
}

impl Catalog {
    #[must_use]
    pub fn empty() -> Self {
        Self {
            meshes: Vec::new(),
            tensors: Vec::new(),
            state: Value::Dict(Dict::default()),
            archives: Vec::new(),
            dropped: Vec::new(),
            flat: None,
            warnings: Vec::new(),
            notes: Vec::new(),
            details: Vec::new(),
        }
    }

    #[must_use]
    pub fn tensor(&self, id: TensorId) -> &TensorEntry {
        &self.tensors[id.0 as usize]
    }

    /// The dtype of each tensor.
    #[must_use]
    pub fn dtypes(&self) -> Vec<Dtype> {
        self.tensors.iter().map(|entry| entry.dtype).collect()
    }

    #[must_use]
    pub fn mesh(&self, sharding: &Sharding) -> &DeviceMesh {
        &self.meshes[sharding.mesh.0 as usize]
    }

    /// How a tensor of this sharding lies.
    #[must_use]
    pub fn on_mesh<'a>(&'a self, sharding: &'a Sharding) -> MeshPlacement<'a> {
        MeshPlacement { mesh: self.mesh(sharding), shared: &sharding.shared }
    }

    /// An error for each object of which ranks hold different values without being meant to.
    #[must_use]
    pub fn conflicts(&self) -> Vec<Error> {
        let disagreed = path::objects(&self.state).into_iter().filter_map(|(path, value)| match value {
            Value::Other(_) if model::is_random_state(path.fqn().as_str()) => None,
            Value::Other(holdings) => Some(conflict(&path, holdings)),
            _ => None,
        });
        disagreed.collect()
    }

    /// Add a tensor and give the reference to it.
    pub fn push_tensor(&mut self, entry: TensorEntry) -> TensorId {
        let id = TensorId(u32::try_from(self.tensors.len()).expect("fewer than 2^32 tensors"));
        self.tensors.push(entry);
        id
    }

    /// The index of a mesh, added if it is new.
    pub fn intern_mesh(&mut self, mesh: DeviceMesh) -> MeshId {
        let index = self.meshes.iter().position(|known| *known == mesh).unwrap_or_else(|| {
            self.meshes.push(mesh);
            self.meshes.len() - 1
        });
        MeshId(u32::try_from(index).expect("fewer than 2^32 meshes"))
    }
}
