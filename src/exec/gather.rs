//! Gathers the elements of a target tile into a buffer, from the source chunks that contain them. Offsets and sizes
//! count elements, or bytes if the name contains `bytes`.
//!
//! A tile that is cast is read through a scratch buffer, block by block, so memory does not grow with the tile. Partial
//! values that are reduced are also read block by block, one partial value after the other. `runs.rs` reads the bytes
//! from one source chunk.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::cast::{Cast, LossCounts};
use super::computed::ComputedSource;
use super::reduce::Reducer;
use super::runs::{
    LONG_RUN_BYTES, SourceFile, is_row_by_row, is_scattered, read_piece, record_runs, source_range,
    transposed_row_bytes,
};
use super::source_block::{SourceBlock, WantedRanges};
use super::source_crc::CrcRecorder;
use super::{CAST_BYTES, Input, sized_buffer};
use crate::catalog::{Dtype, Fqn, StridedLocation, TensorEntry, span};
use crate::error::{Error, Result};
use crate::layout::partial::Share;
use crate::layout::{CommonRange, Dims, Tile};
use crate::plan::{Overlap, Piece, Pieces, SourceTensor, TilePlan};
use crate::storage::FileId;

/// A cache of the chunk locations of one tensor, because the tiles of a tensor share source chunks.
#[derive(Debug, Default)]
pub struct Locations {
    /// The locations of the chunks; `None` if only one tile of the tensor is read.
    chunks: Option<HashMap<u32, StridedLocation>>,
    /// The computed files that have chunks of the tensor.
    computed: Vec<(FileId, Arc<ComputedSource>)>,
}

impl Locations {
    /// Makes the cache for a tensor with this number of tiles.
    #[must_use]
    pub fn for_tiles(tiles: usize) -> Self {
        Self { chunks: (tiles > 1).then(HashMap::new), computed: Vec::new() }
    }

    /// Returns how the bytes of a file are computed, or `None` if the file is stored.
    fn computed(&mut self, input: Input<'_>, file: FileId) -> Result<Option<Arc<ComputedSource>>> {
        let Some(computed) = input.catalog.computed(file) else { return Ok(None) };
        if let Some((_, known)) = self.computed.iter().find(|(known, _)| *known == file) {
            return Ok(Some(Arc::clone(known)));
        }
        let source = Arc::new(ComputedSource::new(input, computed)?);
        self.computed.push((file, Arc::clone(&source)));
        Ok(Some(source))
    }
}

/// The buffers of a worker, which are reused for many reads.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Source bytes from which short runs are copied (bytes without gaps); at most `BLOCK_BYTES` bytes.
    pub block: SourceBlock,
    /// Elements before they are cast; at most [`CAST_BYTES`] bytes.
    uncast: Vec<u8>,
    /// Sums of partial values; at most `SUM_BYTES` bytes.
    sums: Vec<u8>,
}

impl Scratch {
    /// Returns the number of bytes that the buffers have allocated.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.block.capacity() + self.uncast.capacity() + self.sums.capacity()
    }
}

/// A target tile with its plan, and the location of every chunk that it needs.
#[derive(Debug)]
pub struct PreparedTile {
    fqn: Fqn,
    /// The dtype of the source tensor.
    dtype: Dtype,
    cast: Option<Cast>,
    numel: u64,
    /// The data from which the tile is computed: one item for each partial value, or a single item with the complete
    /// value.
    sources: SmallVec<[PartialSource; 1]>,
    /// The reducer of the partial values, or `None` if a single partial value or the complete value is copied.
    reducer: Option<Reducer>,
    /// The value of elements that are in none of `sources`.
    fill: Fill,
}

/// The value of tile elements that no source data contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fill {
    /// There are no such elements, so no value is needed.
    Nothing,
    Zeros,
}

/// The place of the data of one partial value, or of the complete value: source files, or memory.
#[derive(Debug)]
enum PartialSource {
    Files(LocatedPlan),
    Memory(TileElements),
}

/// The elements of a tile, row-major, in shared memory.
#[derive(Clone)]
pub struct TileElements {
    /// The memory that contains the elements of this tile and of other tiles.
    pub memory: Arc<dyn AsRef<[u8]> + Send + Sync>,
    /// The byte range of this tile in the shared memory.
    pub range: Range<usize>,
}

impl fmt::Debug for TileElements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TileElements").field("range", &self.range).finish_non_exhaustive()
    }
}

/// The plan of a tile: from which source chunks it is read, with the location of each of these chunks.
#[derive(Debug)]
struct LocatedPlan {
    plan: TilePlan,
    /// For each overlap in `plan` (the elements that the tile shares with one source chunk): the location of this
    /// chunk.
    located: SmallVec<[StridedLocation; 1]>,
    /// For each overlap whose chunk is in a computed file, how the bytes of this file are computed; empty if there is none.
    computed: HashMap<usize, Arc<ComputedSource>>,
}

impl PreparedTile {
    /// Plans the values of `tile` and locates their chunks.
    ///
    /// # Errors
    /// Errors of the resolver; `Malformed` if a chunk reaches beyond its file; `Unsupported` if the partial values
    /// cannot be reduced.
    pub fn new(input: Input<'_>, source: &SourceTensor<'_>, tile: &Tile, locations: &mut Locations) -> Result<Self> {
        Self::with_share(input, source, tile, None, locations)
    }

    /// Plans as [`PreparedTile::new`] does, for a tile that is reduced from only some partial values of the source:
    /// those that `share` lists.
    ///
    /// # Errors
    /// Errors of [`PreparedTile::new`].
    pub fn with_share(
        input: Input<'_>,
        source: &SourceTensor<'_>,
        tile: &Tile,
        share: Option<&Share>,
        locations: &mut Locations,
    ) -> Result<Self> {
        let entry = source.entry;
        let mut prepared = Self::without_sources(entry, tile.numel());
        if tile.is_empty() {
            return Ok(prepared);
        }
        let whole;
        let share = match (share, &entry.partial_values) {
            (Some(share), _) => share,
            (None, Some(partial_values)) => {
                whole = partial_values.reduction.full_reduction();
                &whole
            }
            (None, None) => {
                prepared.sources.push(PartialSource::Files(LocatedPlan::new(
                    input,
                    entry,
                    source.plan(tile, 0, None),
                    locations,
                )?));
                return Ok(prepared);
            }
        };
        prepared.reducer = Reducer::for_share(entry, share)?;
        for &index in &share.partial_values {
            let plan = source.plan(tile, index, share.within.as_ref());
            prepared.sources.push(PartialSource::Files(LocatedPlan::new(input, entry, plan, locations)?));
        }
        if share.within.is_some() {
            prepared.fill = Fill::Zeros;
        }
        Ok(prepared)
    }

    /// Makes a tile from `numel` values of this dtype that are already in memory.
    #[must_use]
    pub fn from_memory(entry: &TensorEntry, dtype: Dtype, numel: u64, values: TileElements) -> Self {
        let mut prepared = Self { dtype, ..Self::without_sources(entry, numel) };
        prepared.sources.push(PartialSource::Memory(values));
        prepared
    }

    /// Plans to read one stored chunk unchanged and without its replicas, so that replicas can be compared.
    ///
    /// # Errors
    /// Errors of [`PreparedTile::new`].
    pub fn chunk(input: Input<'_>, entry: &TensorEntry, chunk: u32) -> Result<Self> {
        let sizes = entry.chunks.sizes(chunk as usize);
        let whole = |&size: &u64| smallvec![crate::layout::CommonRange { left: 0, right: 0, len: size }];
        let segments = sizes.iter().map(whole).collect();
        let overlap = Overlap { chunk, segments };
        let mut prepared = Self::without_sources(entry, sizes.iter().product());
        let plan = TilePlan { sizes, overlaps: smallvec![overlap] };
        prepared.sources.push(PartialSource::Files(LocatedPlan::new(input, entry, plan, &mut Locations::default())?));
        Ok(prepared)
    }

    fn without_sources(entry: &TensorEntry, numel: u64) -> Self {
        let (fqn, dtype) = (entry.fqn.clone(), entry.dtype);
        Self { fqn, dtype, cast: None, numel, sources: SmallVec::new(), reducer: None, fill: Fill::Nothing }
    }

    /// Returns the tile with a cast to `dtype`, which is applied when elements are read.
    ///
    /// # Errors
    /// `Unsupported` if there is no such cast.
    pub fn cast_to(self, dtype: Dtype) -> Result<Self> {
        if dtype == self.dtype {
            return Ok(self);
        }
        let Some(cast) = Cast::new(self.dtype, dtype) else {
            return Err(Error::unsupported(
                format!("{}: {} cannot be cast to {dtype}", self.fqn, self.dtype),
                "cast from f64, f32, f16 or bf16 to one of these or to an 8-bit float",
            ));
        };
        Ok(Self { cast: Some(cast), ..self })
    }

    /// Returns the size in bytes of an element that [`PreparedTile::read`] returns.
    pub fn itemsize(&self) -> u64 {
        self.cast.map_or(self.dtype, |cast| cast.to()).itemsize()
    }

    /// Returns the number of elements of the tile.
    pub fn numel(&self) -> u64 {
        self.numel
    }

    /// Fills `buffer` with elements of the tile in row-major order, starting at element `first`.
    ///
    /// # Errors
    /// `Io` and `Malformed` from reading.
    pub fn read(&self, input: Input<'_>, first: u64, buffer: &mut [u8], scratch: &mut Scratch) -> Result<()> {
        self.read_with_checksums(input, first, buffer, scratch, None).map(drop)
    }

    /// Reads as [`PreparedTile::read`] does. Records the CRCs of the source bytes that were read, so that zip records
    /// can be checked. Returns the numbers of overflows and NaNs in the cast. The recorder keeps CRCs for the output
    /// only if the bytes are neither cast nor reduced.
    ///
    /// # Errors
    /// Errors of [`PreparedTile::read`].
    pub fn read_with_checksums(
        &self,
        input: Input<'_>,
        first: u64,
        buffer: &mut [u8],
        scratch: &mut Scratch,
        mut recorder: Option<CrcRecorder<'_>>,
    ) -> Result<LossCounts> {
        let mut counts = LossCounts::default();
        let Scratch { block, uncast, sums } = scratch;
        let Some(cast) = self.cast else {
            self.read_uncast(input, first, buffer, (block, sums), recorder.as_mut())?;
            if let Some(recorder) = recorder.filter(|_| self.reducer.is_some()) {
                recorder.parts.clear();
            }
            return Ok(counts);
        };
        let stored = usize::try_from(cast.from().itemsize()).expect("a few bytes");
        let itemsize = usize::try_from(cast.to().itemsize()).expect("a few bytes");
        let most = CAST_BYTES / cast.from().itemsize();
        let row = self.transposed_row().filter(|row| *row <= most).unwrap_or(1);
        let elements = usize::try_from(most / row * row).expect("a scratch buffer fits memory");
        for (index, target) in (0_u64..).zip(buffer.chunks_mut(elements * itemsize)) {
            let len = target.len() / itemsize * stored;
            let source = sized_buffer(uncast, len);
            self.read_uncast(input, first + index * elements as u64, source, (block, sums), recorder.as_mut())?;
            counts.add(cast.convert(source, target));
        }
        if let Some(recorder) = recorder {
            recorder.parts.clear();
        }
        Ok(counts)
    }

    /// Fills `buffer` with elements of the source dtype, before any cast.
    fn read_uncast(
        &self,
        input: Input<'_>,
        first: u64,
        buffer: &mut [u8],
        (block, sums): (&mut SourceBlock, &mut Vec<u8>),
        mut recorder: Option<&mut CrcRecorder<'_>>,
    ) -> Result<()> {
        let mut read = |source: &PartialSource, first: u64, buffer: &mut [u8]| {
            if self.fill == Fill::Zeros {
                buffer.fill(0);
            }
            let itemsize = self.dtype.itemsize();
            match source {
                PartialSource::Files(part) => {
                    let recorder = recorder.as_deref_mut().map(|recorder| (recorder, &self.fqn));
                    part.read(input, itemsize, first, buffer, block, recorder)
                }
                PartialSource::Memory(part) => {
                    part.read(first * itemsize, buffer);
                    Ok(())
                }
            }
        };
        let Some(reducer) = self.reducer else {
            return self.sources.iter().try_for_each(|part| read(part, first, buffer));
        };
        let block_bytes = reducer.block_bytes();
        let elements = block_bytes as u64 / self.dtype.itemsize();
        for (index, target) in (0_u64..).zip(buffer.chunks_mut(block_bytes)) {
            let sums = sized_buffer(sums, target.len() * reducer.widening());
            for (number, part) in self.sources.iter().enumerate() {
                read(part, first + index * elements, target)?;
                reducer.add(number == 0, target, sums);
            }
            reducer.finish(sums, target).map_err(|fault| fault.for_tensor(&self.fqn))?;
        }
        Ok(())
    }

    /// Returns the number of source bytes that the tile reads.
    pub fn source_bytes(&self) -> u64 {
        self.numel * self.dtype.itemsize() * self.sources.len() as u64
    }

    /// Returns whether the tile reads short runs of source rows, with bytes of other tiles between the runs.
    pub fn has_short_row_runs(&self) -> bool {
        self.file_sources().any(|part| {
            let pieces = part.pieces(self.dtype.itemsize());
            let first = pieces.visit(0..self.numel, |piece| Err(is_scattered(&piece) && is_row_by_row(&piece)));
            first == Err(true)
        })
    }

    /// Adds to `wanted` the source ranges of short runs (bytes without gaps) that are read for the `numel` elements of
    /// the tile from element `first` on.
    pub fn add_short_runs(&self, first: u64, numel: u64, wanted: &mut WantedRanges) {
        for part in self.file_sources() {
            let pieces = part.pieces(self.dtype.itemsize());
            let Ok(()): Result<(), Infallible> = pieces.visit(first..first + numel, |piece| {
                if piece.run_bytes < LONG_RUN_BYTES {
                    wanted.add(source_range(&part.located[piece.overlap], &piece), part.computed.get(&piece.overlap));
                }
                Ok(())
            });
        }
    }

    /// Returns the number of elements of a row of the tile if the tile reads a transposed view. The elements of a row are far from
    /// each other in the source, so a read of a part of a row touches as much of the source as a read of many rows.
    pub fn transposed_row(&self) -> Option<u64> {
        let itemsize = self.dtype.itemsize();
        // Rows that are contiguous in the source are the usual case, and are found without a piece.
        let has_far_neighbours = |part: &&LocatedPlan| {
            part.located.first().and_then(|located| located.strides.last()).is_some_and(|stride| *stride != 1)
        };
        self.file_sources().filter(has_far_neighbours).find_map(|part| {
            let first = part.pieces(itemsize).visit(0..self.numel, |piece| Err(transposed_row_bytes(&piece)));
            first.err().flatten().map(|bytes| bytes / itemsize)
        })
    }

    /// Returns the file and the offset in bytes at which one run holds all elements of the tile, in row-major order. Returns
    /// `None` if the elements are in several runs, or are computed, reduced or cast.
    pub fn single_run(&self) -> Option<(FileId, u64)> {
        let [PartialSource::Files(part)] = &self.sources[..] else { return None };
        if self.cast.is_some() || !part.computed.is_empty() {
            return None;
        }
        let bytes = self.numel * self.dtype.itemsize();
        let run = part.pieces(self.dtype.itemsize()).visit(0..self.numel, |piece| {
            let located = &part.located[piece.overlap];
            let is_whole = piece.levels.is_empty() && piece.run_bytes == bytes;
            Err(is_whole.then_some((located.file, located.offset + piece.source)))
        });
        run.err().flatten()
    }

    /// Returns the heap memory of the tile, in bytes.
    pub fn heap_bytes(&self) -> u64 {
        /// The memory in bytes of a location in [`Locations`], including the overhead of an allocator for a short list.
        const FOUND: usize = size_of::<(u32, StridedLocation)>() * 2 + 128;
        let overlap = size_of::<Overlap>() + size_of::<StridedLocation>() + FOUND;
        let name = self.fqn.as_str().len() + 32;
        let part = |part: &LocatedPlan| {
            let segments = part.plan.overlaps.iter().flat_map(|overlap| &overlap.segments);
            // A single location is stored in the tile itself. The capacity of a longer list is a power of two.
            let listed = Some(part.plan.overlaps.len()).filter(|overlaps| *overlaps > 1);
            listed.map_or(0, |overlaps| overlaps.next_power_of_two().max(4) * overlap)
                + segments.map(|list| (list.capacity() + 1) * size_of::<CommonRange>()).sum::<usize>()
        };
        (name + self.file_sources().map(part).sum::<usize>()) as u64
    }

    /// Returns the plans of those sources whose bytes are read from files.
    fn file_sources(&self) -> impl Iterator<Item = &LocatedPlan> {
        self.sources.iter().filter_map(|part| match part {
            PartialSource::Files(part) => Some(part),
            PartialSource::Memory(_) => None,
        })
    }

    /// Visits all pieces (strided copies from one source chunk) of the tile, for statistics.
    pub fn pieces(&self, mut visit: impl FnMut(&Piece)) {
        for part in self.file_sources() {
            let pieces = part.pieces(self.dtype.itemsize());
            let Ok(()): Result<(), Infallible> = pieces.visit(0..self.numel(), |piece| {
                visit(&piece);
                Ok(())
            });
        }
    }
}

impl TileElements {
    /// Fills `buffer` with bytes of the tile, starting at byte `first`.
    fn read(&self, first: u64, buffer: &mut [u8]) {
        let start = self.range.start + usize::try_from(first).expect("an offset in memory");
        buffer.copy_from_slice(&(*self.memory).as_ref()[start..start + buffer.len()]);
    }
}

impl LocatedPlan {
    fn new(input: Input<'_>, entry: &TensorEntry, plan: TilePlan, locations: &mut Locations) -> Result<Self> {
        let mut located: SmallVec<[StridedLocation; 1]> = SmallVec::with_capacity(plan.overlaps.len());
        let mut computed = HashMap::new();
        for (index, overlap) in plan.overlaps.iter().enumerate() {
            let found = match locations.chunks.as_ref().and_then(|known| known.get(&overlap.chunk)) {
                Some(found) => found.clone(),
                None => {
                    let found = (input.resolve)(input.files, entry, overlap.chunk)?;
                    check_inside(input, entry, overlap.chunk, &found)?;
                    if let Some(chunks) = &mut locations.chunks {
                        chunks.insert(overlap.chunk, found.clone());
                    }
                    found
                }
            };
            if let Some(source) = locations.computed(input, found.file)? {
                computed.insert(index, source);
            }
            located.push(found);
        }
        Ok(Self { plan, located, computed })
    }

    fn pieces<'a>(&'a self, itemsize: u64) -> Pieces<'a, impl Fn(usize) -> &'a Dims> {
        Pieces::new(&self.plan, |overlap| &self.located[overlap].strides, itemsize)
    }

    /// Fills `buffer` with elements of the source dtype, and records the CRCs of the runs that are in zip records with
    /// checksums.
    fn read(
        &self,
        input: Input<'_>,
        itemsize: u64,
        first: u64,
        buffer: &mut [u8],
        block: &mut SourceBlock,
        mut recorder: Option<(&mut CrcRecorder<'_>, &Fqn)>,
    ) -> Result<()> {
        let range = first..first + buffer.len() as u64 / itemsize;
        self.pieces(itemsize).visit(range, |piece| {
            let located = &self.located[piece.overlap];
            let file = match self.computed.get(&piece.overlap) {
                Some(computed) => SourceFile::Computed(computed, input),
                None => SourceFile::Stored(input.files.open(located.file)?, input.files.io()),
            };
            read_piece(&file, located, &piece, buffer, block)?;
            if let (Some((recorder, fqn)), Some(summed)) = (&mut recorder, located.checksum) {
                record_runs(recorder, fqn, located, summed, &piece, buffer);
            }
            Ok(())
        })
    }
}

/// Checks that the complete chunk is inside its file. Offsets come from files, and reading trusts them after this
/// check.
fn check_inside(input: Input<'_>, entry: &TensorEntry, chunk: u32, found: &StridedLocation) -> Result<()> {
    let len = input.files.len_bytes(found.file);
    let end = span(&entry.chunks.sizes(chunk as usize), &found.strides)
        .and_then(|elements| elements.checked_mul(entry.dtype.itemsize()))
        .and_then(|bytes| bytes.checked_add(found.offset));
    if end.is_some_and(|end| end <= len) {
        return Ok(());
    }
    let end = end.map_or_else(|| String::from("more than 2^64"), |end| end.to_string());
    Err(Error::malformed(
        input.files.path(found.file),
        entry.fqn.to_string(),
        format!("tensor data up to byte {end}"),
        format!("a file of {len} bytes"),
    ))
}
