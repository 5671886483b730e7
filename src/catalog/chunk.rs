//! The chunks of a tensor and their locations in files, stored in packed columns.
//!
//! Bounds, sizes and strides count elements; locations are in bytes. A chunk is a [`Tile`] of its tensor (nearly always
//! one box) that is stored at a [`FileLocation`] with strides. A checkpoint has up to a million chunks, so a chunk is a
//! table row with only bounds, location and rank, and nothing is allocated for each chunk. Strides are stored only for
//! chunks that are not contiguous, tiles only for chunks of several boxes, and views only for chunks of mapped tensors. Some checkpoints have a hundred thousand
//! tensors with a single chunk each, so the first row of a table is stored without allocation. PyTorch's counterpart is
//! `TensorStorageMetadata.chunks`.

use std::collections::BTreeMap;

use smallvec::SmallVec;
pub use torch_pickle::zip::Record;

use crate::layout::flat::StorageOrder;
use crate::layout::{Dims, Intervals, Rank, Tile};
use crate::storage::{FileId, FileRange};

/// The position where the bytes of a chunk start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileLocation {
    /// The chunk starts at this byte of the file.
    Bytes { file: FileId, offset: u64 },
    /// The chunk starts `within` bytes after the start of a zip record's data. The start of the data follows from the
    /// local header of the zip record. This header is read together with the chunk, not when the checkpoint is opened.
    Record { file: FileId, record: Record, within: u64 },
    /// The chunk is an item of a DCP data file: a torch.save archive at this range of the file. The ZIP directory and
    /// the pickle of this archive record the offset and strides of the chunk. The directory and the pickle are read
    /// together with the chunk, not when the checkpoint is opened.
    Item(FileRange),
    /// The chunk is empty and stored nowhere.
    Empty,
}

impl FileLocation {
    /// Returns the file of the location, or `None` for an empty chunk.
    pub fn file(self) -> Option<FileId> {
        match self {
            Self::Bytes { file, .. } | Self::Record { file, .. } | Self::Item(FileRange { file, .. }) => Some(file),
            Self::Empty => None,
        }
    }

    fn encode(&self, emit: &mut impl FnMut(u64)) {
        match *self {
            Self::Empty => emit(0),
            Self::Bytes { file, offset } => [1, file.0.into(), offset].into_iter().for_each(emit),
            Self::Record { file, record: Record { header, len, crc }, within } => {
                [2, file.0.into(), header, len, crc.into(), within].into_iter().for_each(emit);
            }
            Self::Item(FileRange { file, offset, len }) => [3, file.0.into(), offset, len].into_iter().for_each(emit),
        }
    }
}

/// A byte range of a file, with the CRC-32 that the file records for this range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksummedRange {
    /// The offset of the first byte in the file.
    pub start: u64,
    pub len: u64,
    pub crc: u32,
}

impl ChecksummedRange {
    /// Returns the range of a zip record whose data starts at `start`, or `None` if the zip record has no checksum.
    pub fn of_record(record: Record, start: u64) -> Option<Self> {
        (record.crc != 0).then_some(Self { start, len: record.len, crc: record.crc })
    }
}

/// The location of a chunk in its file: the offset of the first element, and the strides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedLocation {
    pub file: FileId,
    /// The offset of the first element of the chunk from the start of the file, in bytes.
    pub offset: u64,
    /// The stride of each dim, in elements.
    pub strides: Dims,
    /// The range of the zip record that contains the chunk, if the zip record has a checksum.
    pub checksum: Option<ChecksummedRange>,
}

impl StridedLocation {
    /// Returns the location of a view of the tensor at this location. `itemsize` is the number of bytes of an element.
    /// Returns `None` on overflow, which only strides from a damaged file can cause.
    pub fn of_view(&self, view: &StoredView, itemsize: u64) -> Option<Self> {
        let mut first = 0_u64;
        for (start, stride) in view.start.iter().zip(&self.strides) {
            first = first.checked_add(start.checked_mul(*stride)?)?;
        }
        let stride = |(dim, step): &(u32, u64)| step.checked_mul(self.strides.get(*dim as usize).copied().unwrap_or(0));
        Some(Self {
            offset: self.offset.checked_add(first.checked_mul(itemsize)?)?,
            strides: view.steps.iter().map(stride).collect::<Option<_>>()?,
            ..*self
        })
    }
}

/// A view of a stored tensor: a chunk of a mapped tensor (see [`crate::maps`]) has the elements of a part of a stored tensor,
/// perhaps in another order of dims or with gaps. The view is relative to the stored tensor, so it can be made before the
/// offset and the strides of the stored tensor are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredView {
    /// The shape of the stored tensor.
    pub shape: Dims,
    /// For each dim of the stored tensor, the index of the first element of the view.
    pub start: Dims,
    /// For each dim of the chunk, a dim of the stored tensor, and the distance in this dim from one index of the chunk to the
    /// next.
    pub steps: SmallVec<[(u32, u64); 4]>,
}

impl StoredView {
    fn encode(&self, emit: &mut impl FnMut(u64)) {
        emit(self.shape.len() as u64);
        self.shape.iter().chain(&self.start).copied().for_each(&mut *emit);
        self.steps.iter().flat_map(|(dim, step)| [(*dim).into(), *step]).for_each(emit);
    }
}

/// A chunk of a tensor, which is one row of a [`ChunkTable`].
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    pub tile: Tile,
    pub location: FileLocation,
    /// The strides of the stored tensor in elements; `None` if it is row-major contiguous.
    pub strides: Option<Dims>,
    /// The rank that holds the chunk, if the format records it.
    pub rank: Option<Rank>,
    /// The view of the stored tensor that the chunk is; `None` if the chunk is the complete stored tensor.
    pub view: Option<StoredView>,
}

/// The chunks of one tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChunkTable {
    ndim: usize,
    /// For each chunk, `ndim` offsets followed by `ndim` sizes.
    bounds: SmallVec<[u64; 4]>,
    /// For each chunk, the location and the rank; the rank is `NO_RANK` if the format records no rank.
    locations: SmallVec<[(FileLocation, u32); 1]>,
    rare: Option<Box<RareColumns>>,
}

/// Columns of the chunk table in which only few chunks have a value. The key of a value is the index of the chunk.
#[derive(Clone, Debug, Default, PartialEq)]
struct RareColumns {
    strides: BTreeMap<u32, Dims>,
    interleaved: BTreeMap<u32, Tile>,
    views: BTreeMap<u32, StoredView>,
}

const NO_RANK: u32 = u32::MAX;

impl ChunkTable {
    /// Makes an empty table for a tensor with `ndim` dims.
    #[must_use]
    pub fn new(ndim: usize) -> Self {
        Self { ndim, ..Self::default() }
    }

    /// Returns the number of chunks.
    pub fn len(&self) -> usize {
        self.locations.len()
    }

    /// Returns whether the table has no chunks.
    pub fn is_empty(&self) -> bool {
        self.locations.is_empty()
    }

    /// Appends a chunk.
    ///
    /// # Panics
    /// If the tile and the tensor differ in their number of dims. Readers check this first.
    pub fn push(&mut self, chunk: Chunk) {
        let index = u32::try_from(self.locations.len()).expect("fewer than 2^32 chunks a tensor");
        assert_eq!(chunk.tile.ndim(), self.ndim, "a chunk has the dims of its tensor");
        let bounds = || chunk.tile.dims().iter().map(Intervals::bounds);
        self.bounds.extend(bounds().map(|dim| dim.start));
        self.bounds.extend(bounds().map(|dim| dim.end - dim.start));
        self.locations.push((chunk.location, chunk.rank.map_or(NO_RANK, |rank| rank.0)));
        if let Some(strides) = chunk.strides {
            self.rare_mut().strides.insert(index, strides);
        }
        if let Some(view) = chunk.view {
            self.rare_mut().views.insert(index, view);
        }
        if !chunk.tile.is_box() && !chunk.tile.is_empty() {
            self.rare_mut().interleaved.insert(index, chunk.tile);
        }
    }

    fn rare_mut(&mut self) -> &mut RareColumns {
        self.rare.get_or_insert_default()
    }

    /// Returns the tile of a chunk.
    pub fn tile(&self, index: usize) -> Tile {
        let key = u32::try_from(index).expect("an index of this table");
        if let Some(tile) = self.rare.as_ref().and_then(|odd| odd.interleaved.get(&key)) {
            return tile.clone();
        }
        let row = &self.bounds[index * 2 * self.ndim..(index + 1) * 2 * self.ndim];
        let (offsets, sizes) = row.split_at(self.ndim);
        Tile::new(offsets.iter().zip(sizes).map(|(&at, &size)| Intervals::single(at, size)))
    }

    /// Returns the shape of a chunk's local tensor.
    pub fn sizes(&self, index: usize) -> Dims {
        match self.rare {
            Some(_) => self.tile(index).sizes(),
            None => Dims::from_slice(self.sizes_of_box(index)),
        }
    }

    /// Returns the number of elements of a chunk.
    pub fn numel(&self, index: usize) -> u64 {
        match self.rare {
            Some(_) => self.tile(index).numel(),
            None => self.sizes_of_box(index).iter().product(),
        }
    }

    fn sizes_of_box(&self, index: usize) -> &[u64] {
        &self.bounds[(2 * index + 1) * self.ndim..2 * (index + 1) * self.ndim]
    }

    /// Returns the location of a chunk.
    pub fn location(&self, index: usize) -> FileLocation {
        self.locations[index].0
    }

    /// Adds `by` to the file id of every chunk. This is needed if the files of the table were appended to a list that
    /// already had `by` files.
    pub fn shift_files(&mut self, by: u32) {
        for (place, _) in &mut self.locations {
            match place {
                FileLocation::Bytes { file, .. }
                | FileLocation::Record { file, .. }
                | FileLocation::Item(FileRange { file, .. }) => {
                    file.0 += by;
                }
                FileLocation::Empty => {}
            }
        }
    }

    /// Returns the rank of a chunk, if the format records it.
    pub fn rank(&self, index: usize) -> Option<Rank> {
        Some(self.locations[index].1).filter(|rank| *rank != NO_RANK).map(Rank)
    }

    /// Returns the view of the stored tensor that a chunk is, or `None` if the chunk is the complete stored tensor.
    pub fn view(&self, index: usize) -> Option<&StoredView> {
        self.rare.as_ref()?.views.get(&u32::try_from(index).expect("an index of this table"))
    }

    /// Returns the shape of the stored tensor that contains a chunk.
    pub fn stored_shape(&self, index: usize) -> Dims {
        self.view(index).map_or_else(|| self.sizes(index), |view| view.shape.clone())
    }

    /// Returns the strides of the stored tensor that contains a chunk, or `None` if it is row-major contiguous.
    pub fn strides(&self, index: usize) -> Option<&Dims> {
        self.rare.as_ref()?.strides.get(&u32::try_from(index).expect("an index of this table"))
    }

    /// Returns whether some chunk is a view, or is not stored row by row.
    pub fn has_strides_or_views(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| !rare.strides.is_empty() || !rare.views.is_empty())
    }

    /// Returns a row of the table.
    pub fn get(&self, index: usize) -> Chunk {
        Chunk {
            tile: self.tile(index),
            location: self.location(index),
            strides: self.strides(index).cloned(),
            rank: self.rank(index),
            view: self.view(index).cloned(),
        }
    }

    /// Returns whether both tables have equal chunks on equal ranks, wherever the chunks are stored.
    pub fn is_laid_out_as(&self, other: &Self) -> bool {
        let ranks = |(left, right): (&(FileLocation, u32), &(FileLocation, u32))| left.1 == right.1;
        let none = RareColumns::default();
        let [own, others] = [self, other].map(|table| table.rare.as_deref().unwrap_or(&none));
        (self.ndim, self.len()) == (other.ndim, other.len())
            && self.bounds == other.bounds
            && self.locations.iter().zip(&other.locations).all(ranks)
            && own.interleaved == others.interleaved
    }

    /// Passes the bounds of all chunks to a hash. Tables that are laid out equally have equal hashes.
    pub fn hash_bounds(&self, state: &mut impl std::hash::Hasher) {
        std::hash::Hash::hash(&self.bounds, state);
    }

    /// Passes numbers that encode the table to `emit`, one by one, for a hash. Unequal tables have unequal encodings.
    pub fn encode(&self, emit: &mut impl FnMut(u64)) {
        emit(self.ndim as u64);
        emit(self.len() as u64);
        self.bounds.iter().copied().for_each(&mut *emit);
        for (location, rank) in &self.locations {
            location.encode(emit);
            emit((*rank).into());
        }
        let none = RareColumns::default();
        let RareColumns { strides, interleaved, views } = self.rare.as_deref().unwrap_or(&none);
        emit(strides.len() as u64);
        for (chunk, strides) in strides {
            emit((*chunk).into());
            strides.iter().copied().for_each(&mut *emit);
        }
        emit(interleaved.len() as u64);
        for (chunk, tile) in interleaved {
            emit((*chunk).into());
            tile.encode(emit);
        }
        // Plans without views keep the encoding that they had before views existed.
        for (chunk, view) in views {
            emit((*chunk).into());
            view.encode(emit);
        }
    }

    /// Returns the rows of the table, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Chunk> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }
}

/// Returns the row-major strides of a contiguous tensor, in elements. Strides that exceed `u64` saturate; readers
/// refuse the shapes of such tensors.
pub fn contiguous_strides(sizes: &[u64]) -> Dims {
    let mut strides = Dims::from_elem(1, sizes.len());
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(sizes[dim].max(1));
    }
    strides
}

/// Returns `strides` if the tensor is dense but not row-major, otherwise `None`. Also returns `None` for an empty
/// tensor, and for strides that exceed the number of elements. In a dense tensor, only a dim of size 1 can have such a
/// stride.
pub fn permuted_stride(shape: &[u64], strides: &Dims) -> Option<Dims> {
    let numel = crate::layout::numel(shape).filter(|numel| *numel > 0)?;
    let is_permuted = *strides != contiguous_strides(shape) && strides.iter().all(|stride| *stride <= numel);
    (is_permuted && StorageOrder::of_strides(shape, strides).is_some()).then(|| strides.clone())
}

/// Returns the number of storage elements from the first to the last element of a view, both included, or `None` on
/// overflow.
pub fn span(sizes: &[u64], strides: &[u64]) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    let mut last = 0_u64;
    for (&size, &stride) in sizes.iter().zip(strides) {
        last = last.checked_add((size - 1).checked_mul(stride)?)?;
    }
    last.checked_add(1)
}
