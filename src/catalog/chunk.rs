//! Where the content of a tensor lies: one row a chunk, in packed columns.
//!
//! A chunk is a [`Tile`] of its tensor (nearly always one box) stored at a [`Place`] with strides. A checkpoint has
//! up to a million of them, so a row costs its bounds, its place and its rank, and nothing is allocated per chunk:
//! strides are kept only where the storage is not contiguous, tiles only where they are more than one box. Another has
//! a hundred thousand tensors of one chunk each, whose row lies in the table itself.
//!
//! Bounds, sizes and strides count elements; places count bytes.

use std::collections::BTreeMap;

use smallvec::SmallVec;
pub use torch_pickle::zip::Record;

use crate::layout::flat::StorageOrder;
use crate::layout::{Dims, Intervals, Rank, Tile};
use crate::storage::{FileId, FileRange};

/// Where the bytes of a chunk begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileLocation {
    /// At this byte of the file.
    Bytes { file: FileId, offset: u64 },
    /// `within` bytes into a stored zip record; where its data begins is learnt from its local header, when the chunk
    /// is read.
    Record { file: FileId, record: Record, within: u64 },
    /// In the torch.save archive that fills this stretch (an item of a DCP data file); its own directory and pickle
    /// tell where, and with which strides, when the chunk is read.
    Item(FileRange),
    /// Nowhere: the chunk is empty.
    Nowhere,
}

impl FileLocation {
    #[must_use]
    pub fn file(self) -> Option<FileId> {
        match self {
            Self::Bytes { file, .. } | Self::Record { file, .. } | Self::Item(FileRange { file, .. }) => Some(file),
            Self::Nowhere => None,
        }
    }

    fn spell(&self, tell: &mut impl FnMut(u64)) {
        match *self {
            Self::Nowhere => tell(0),
            Self::Bytes { file, offset } => [1, file.0.into(), offset].into_iter().for_each(tell),
            Self::Record { file, record: Record { header, len, crc }, within } => {
                [2, file.0.into(), header, len, crc.into(), within].into_iter().for_each(tell);
            }
            Self::Item(FileRange { file, offset, len }) => [3, file.0.into(), offset, len].into_iter().for_each(tell),
        }
    }
}

/// A stretch of data with a checksum that its writer computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksummedRange {
    /// Absolute offset of the data.
    pub start: u64,
    pub len: u64,
    pub crc: u32,
}

impl ChecksummedRange {
    /// The data of a record, which begins at `start`; `None` where it has no checksum.
    #[must_use]
    pub fn of_record(record: Record, start: u64) -> Option<Self> {
        (record.crc != 0).then_some(Self { start, len: record.len, crc: record.crc })
    }
}

/// Where element 0 of a chunk lies in the end, and how the others follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedLocation {
    pub file: FileId,
    /// In bytes.
    pub offset: u64,
    /// In elements.
    pub strides: Dims,
    /// The record it is part of, where that has a checksum.
    pub summed: Option<ChecksummedRange>,
}

/// One row of a [`ChunkTable`].
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    pub tile: Tile,
    pub place: FileLocation,
    /// Elements between neighbours along each dim; `None` is row-major contiguous.
    pub strides: Option<Dims>,
    /// The rank that holds it, where the format tells.
    pub rank: Option<Rank>,
}

/// The chunks of one tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChunkTable {
    ndim: usize,
    /// `ndim` offsets, then `ndim` sizes, a chunk.
    bounds: SmallVec<[u64; 4]>,
    /// Where each lies, and the rank that holds it.
    places: SmallVec<[(FileLocation, u32); 1]>,
    odd: Option<Box<RareColumns>>,
}

/// What few chunks have, by their number.
#[derive(Clone, Debug, Default, PartialEq)]
struct RareColumns {
    strides: BTreeMap<u32, Dims>,
    interleaved: BTreeMap<u32, Tile>,
}

const NO_RANK: u32 = u32::MAX;

impl ChunkTable {
    #[must_use]
    pub fn new(ndim: usize) -> Self {
        Self { ndim, ..Self::default() }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// # Panics
    /// Where the tile has another number of dims than the tensor, which readers check first.
    pub fn push(&mut self, chunk: Chunk) {
        let index = u32::try_from(self.places.len()).expect("fewer than 2^32 chunks a tensor");
        assert_eq!(chunk.tile.ndim(), self.ndim, "a chunk has the dims of its tensor");
        let bounds = || chunk.tile.dims().iter().map(Intervals::bounds);
        self.bounds.extend(bounds().map(|dim| dim.start));
        self.bounds.extend(bounds().map(|dim| dim.end - dim.start));
        self.places.push((chunk.place, chunk.rank.map_or(NO_RANK, |rank| rank.0)));
        if let Some(strides) = chunk.strides {
            self.odd().strides.insert(index, strides);
        }
        if !chunk.tile.is_box() && !chunk.tile.is_empty() {
            self.odd().interleaved.insert(index, chunk.tile);
        }
    }

    fn odd(&mut self) -> &mut RareColumns {
        self.odd.get_or_insert_default()
    }

    #[must_use]
    pub fn tile(&self, index: usize) -> Tile {
        let key = u32::try_from(index).expect("an index of this table");
        if let Some(tile) = self.odd.as_ref().and_then(|odd| odd.interleaved.get(&key)) {
            return tile.clone();
        }
        let row = &self.bounds[index * 2 * self.ndim..(index + 1) * 2 * self.ndim];
        let (offsets, sizes) = row.split_at(self.ndim);
        Tile::new(offsets.iter().zip(sizes).map(|(&at, &size)| Intervals::single(at, size)))
    }

    /// The shape of a chunk's local tensor.
    #[must_use]
    pub fn sizes(&self, index: usize) -> Dims {
        match self.odd {
            Some(_) => self.tile(index).sizes(),
            None => Dims::from_slice(self.sizes_of_box(index)),
        }
    }

    /// Elements of a chunk.
    #[must_use]
    pub fn numel(&self, index: usize) -> u64 {
        match self.odd {
            Some(_) => self.tile(index).numel(),
            None => self.sizes_of_box(index).iter().product(),
        }
    }

    fn sizes_of_box(&self, index: usize) -> &[u64] {
        &self.bounds[(2 * index + 1) * self.ndim..2 * (index + 1) * self.ndim]
    }

    #[must_use]
    pub fn place(&self, index: usize) -> FileLocation {
        self.places[index].0
    }

    /// Add to the number of every file: files become part of a longer list.
    pub fn shift_files(&mut self, by: u32) {
        for (place, _) in &mut self.places {
            match place {
                FileLocation::Bytes { file, .. }
                | FileLocation::Record { file, .. }
                | FileLocation::Item(FileRange { file, .. }) => {
                    file.0 += by;
                }
                FileLocation::Nowhere => {}
            }
        }
    }

    #[must_use]
    pub fn rank(&self, index: usize) -> Option<Rank> {
        Some(self.places[index].1).filter(|rank| *rank != NO_RANK).map(Rank)
    }

    #[must_use]
    pub fn strides(&self, index: usize) -> Option<&Dims> {
        self.odd.as_ref()?.strides.get(&u32::try_from(index).expect("an index of this table"))
    }

    #[must_use]
    pub fn get(&self, index: usize) -> Chunk {
        Chunk {
            tile: self.tile(index),
            place: self.place(index),
            strides: self.strides(index).cloned(),
            rank: self.rank(index),
        }
    }

    /// Tell everything it holds in numbers, which no other table has.
    pub fn spell(&self, tell: &mut impl FnMut(u64)) {
        tell(self.ndim as u64);
        tell(self.len() as u64);
        self.bounds.iter().copied().for_each(&mut *tell);
        for (place, rank) in &self.places {
            place.spell(tell);
            tell((*rank).into());
        }
        let none = RareColumns::default();
        let RareColumns { strides, interleaved } = self.odd.as_deref().unwrap_or(&none);
        tell(strides.len() as u64);
        for (chunk, strides) in strides {
            tell((*chunk).into());
            strides.iter().copied().for_each(&mut *tell);
        }
        tell(interleaved.len() as u64);
        for (chunk, tile) in interleaved {
            tell((*chunk).into());
            tile.spell(tell);
        }
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = Chunk> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }
}

/// Row-major strides of a contiguous tensor, in elements. Saturating: a shape whose numel overflows is refused
/// elsewhere.
#[must_use]
pub fn contiguous_strides(sizes: &[u64]) -> Dims {
    let mut strides = Dims::from_elem(1, sizes.len());
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(sizes[dim].max(1));
    }
    strides
}

/// The strides of a tensor that is dense, but not by rows; `None` for any other. What the stride of a dim of one element
/// is does not matter, and a wild one is not passed on.
#[must_use]
pub fn permuted_stride(shape: &[u64], strides: &Dims) -> Option<Dims> {
    let numel = crate::layout::numel(shape).filter(|numel| *numel > 0)?;
    let is_permuted = *strides != contiguous_strides(shape) && strides.iter().all(|stride| *stride <= numel);
    (is_permuted && StorageOrder::of_strides(shape, strides).is_some()).then(|| strides.clone())
}

/// Elements from the first to one past the last that a view touches, or `None` on overflow.
#[must_use]
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
