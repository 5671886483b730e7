//! Filling a buffer with a stretch of a target tile, from wherever its bytes lie.
//!
//! A tile that is read as another dtype passes through a scratch, in blocks: memory does not follow its size. So does one
//! of summands that are reduced, which are read one after the other, block by block. How the runs of one piece are read
//! is for `runs.rs`.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::block::{Block, WantedRange};
use super::cast::{Cast, LossCounts};
use super::reduce::Reducer;
use super::runs::{LONG_RUN_BYTES, is_row_by_row, is_scattered, note_runs, read_piece, stretch};
use super::source_crc::CrcRecorder;
use super::{CAST_BYTES, Input, room};
use crate::catalog::{Dtype, Fqn, StridedLocation, TensorEntry, span};
use crate::error::{Error, Result};
use crate::layout::partial::Share;
use crate::layout::{CommonRange, Dims, Tile};
use crate::plan::{Overlap, Piece, Pieces, SourceTensor, TilePlan};

/// The chunks of one tensor that were found already: the tiles of a re-cut share their source chunks. A tensor of which
/// one tile is wanted has nobody to share with, and none.
#[derive(Debug, Default)]
pub struct Locations(Option<HashMap<u32, StridedLocation>>);

impl Locations {
    #[must_use]
    pub fn of_tiles(tiles: usize) -> Self {
        Self((tiles > 1).then(HashMap::new))
    }
}

/// Buffers of a worker that outlive a read, so that they are allocated once.
#[derive(Debug, Default)]
pub struct Scratch {
    /// What short strided runs are copied out of; at most `BLOCK_BYTES`.
    pub block: Block,
    /// Elements on their way to another dtype; at most [`CAST_BYTES`].
    uncast: Vec<u8>,
    /// What summands add up to; at most `SUM_BYTES`.
    sums: Vec<u8>,
}

impl Scratch {
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.block.capacity() + self.uncast.capacity() + self.sums.capacity()
    }
}

/// A target tile with its plan, and every chunk it needs found.
#[derive(Debug)]
pub struct PreparedTile {
    fqn: Fqn,
    /// Of the source.
    dtype: Dtype,
    cast: Option<Cast>,
    numel: u64,
    /// One a summand that it is made of.
    parts: SmallVec<[PartialSource; 1]>,
    /// How they become one; `None` where one is taken as it is.
    reducer: Option<Reducer>,
    /// Whether there is more of it than is gathered.
    fill: Fill,
}

/// What elements are that are not gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fill {
    /// There are none.
    Nothing,
    Zeros,
}

/// Where a summand comes from.
#[derive(Debug)]
enum PartialSource {
    Files(Gathered),
    Memory(TileElements),
}

/// The elements of a tile, row-major, in memory that it shares with others.
#[derive(Clone)]
pub struct TileElements {
    pub memory: Arc<dyn AsRef<[u8]> + Send + Sync>,
    pub place: Range<usize>,
}

impl fmt::Debug for TileElements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("place", &self.place).finish_non_exhaustive()
    }
}

/// Where the bytes of a tile lie.
#[derive(Debug)]
struct Gathered {
    plan: TilePlan,
    /// One an overlap.
    located: SmallVec<[StridedLocation; 1]>,
}

impl PreparedTile {
    /// Plan the values of `tile` and locate their chunks.
    ///
    /// # Errors
    /// What the resolver returns; `Malformed` where a chunk reaches beyond its file; `Unsupported` where summands have no
    /// value.
    pub fn new(input: Input<'_>, source: &SourceTensor<'_>, tile: &Tile, known: &mut Locations) -> Result<Self> {
        Self::share(input, source, tile, None, known)
    }

    /// As [`Prepared::new`], where only a share of the summands is wanted.
    ///
    /// # Errors
    /// As [`Prepared::new`].
    pub fn share(
        input: Input<'_>,
        source: &SourceTensor<'_>,
        tile: &Tile,
        share: Option<&Share>,
        known: &mut Locations,
    ) -> Result<Self> {
        let entry = source.entry;
        let mut prepared = Self::of(entry, tile.numel());
        if tile.is_empty() {
            return Ok(prepared);
        }
        let whole;
        let share = match (share, &entry.summands) {
            (Some(share), _) => share,
            (None, Some(summands)) => {
                whole = summands.reduction.whole();
                &whole
            }
            (None, None) => {
                prepared.parts.push(PartialSource::Files(Gathered::new(
                    input,
                    entry,
                    source.plan(tile, 0, None),
                    known,
                )?));
                return Ok(prepared);
            }
        };
        prepared.reducer = Reducer::of(entry, share)?;
        for &summand in &share.summands {
            let plan = source.plan(tile, summand, share.within.as_ref());
            prepared.parts.push(PartialSource::Files(Gathered::new(input, entry, plan, known)?));
        }
        if share.within.is_some() {
            prepared.fill = Fill::Zeros;
        }
        Ok(prepared)
    }

    /// `numel` values of a tensor that have been brought into memory, of this dtype.
    #[must_use]
    pub fn held(entry: &TensorEntry, dtype: Dtype, numel: u64, values: TileElements) -> Self {
        let mut prepared = Self { dtype, ..Self::of(entry, numel) };
        prepared.parts.push(PartialSource::Memory(values));
        prepared
    }

    /// As [`Prepared::new`], for one stored chunk as it is, whatever the others hold: for comparing replicas.
    ///
    /// # Errors
    /// As [`Prepared::new`].
    pub fn chunk(input: Input<'_>, entry: &TensorEntry, chunk: u32) -> Result<Self> {
        let sizes = entry.chunks.sizes(chunk as usize);
        let whole = |&size: &u64| smallvec![crate::layout::CommonRange { left: 0, right: 0, len: size }];
        let segments = sizes.iter().map(whole).collect();
        let overlap = Overlap { chunk, segments };
        let mut prepared = Self::of(entry, sizes.iter().product());
        let plan = TilePlan { sizes, overlaps: smallvec![overlap] };
        prepared.parts.push(PartialSource::Files(Gathered::new(input, entry, plan, &mut Locations::default())?));
        Ok(prepared)
    }

    fn of(entry: &TensorEntry, numel: u64) -> Self {
        let (fqn, dtype) = (entry.fqn.clone(), entry.dtype);
        Self { fqn, dtype, cast: None, numel, parts: SmallVec::new(), reducer: None, fill: Fill::Nothing }
    }

    /// Read the elements as another dtype than they are stored in.
    ///
    /// # Errors
    /// `Unsupported` where there is no such cast.
    pub fn cast_to(self, dtype: Dtype) -> Result<Self> {
        if dtype == self.dtype {
            return Ok(self);
        }
        let Some(cast) = Cast::new(self.dtype, dtype) else {
            return Err(Error::unsupported(
                format!("{}: {} cannot be cast to {dtype}", self.fqn, self.dtype),
                "casts go from f64, f32, f16 and bf16 to these and to the 8-bit floats",
            ));
        };
        Ok(Self { cast: Some(cast), ..self })
    }

    /// Bytes an element, as it is read.
    #[must_use]
    pub fn itemsize(&self) -> u64 {
        self.cast.map_or(self.dtype, |cast| cast.to()).itemsize()
    }

    /// Elements of the tile.
    #[must_use]
    pub fn numel(&self) -> u64 {
        self.numel
    }

    /// Fill `buffer` with the elements of the target tile that begin at `first`, row-major.
    ///
    /// # Errors
    /// `Io` and `Malformed` from reading.
    pub fn read(&self, input: Input<'_>, first: u64, buffer: &mut [u8], scratch: &mut Scratch) -> Result<()> {
        self.read_summing(input, first, buffer, scratch, None).map(drop)
    }

    /// As [`Prepared::read`]; stretches of records with checksums are noted, and what a cast met is returned. Sums are
    /// those of bytes that stay as they are read.
    ///
    /// # Errors
    /// As [`Prepared::read`].
    pub fn read_summing(
        &self,
        input: Input<'_>,
        first: u64,
        buffer: &mut [u8],
        scratch: &mut Scratch,
        mut noting: Option<CrcRecorder<'_>>,
    ) -> Result<LossCounts> {
        let mut counts = LossCounts::default();
        let Scratch { block, uncast, sums } = scratch;
        let Some(cast) = self.cast else {
            self.read_uncast(input, first, buffer, (block, sums), noting.as_mut())?;
            if let Some(noting) = noting.filter(|_| self.reducer.is_some()) {
                noting.sums.clear();
            }
            return Ok(counts);
        };
        let stored = usize::try_from(cast.from().itemsize()).expect("a few bytes");
        let itemsize = usize::try_from(cast.to().itemsize()).expect("a few bytes");
        let elements = usize::try_from(CAST_BYTES).expect("a scratch fits memory") / stored;
        for (index, target) in (0_u64..).zip(buffer.chunks_mut(elements * itemsize)) {
            let len = target.len() / itemsize * stored;
            let source = room(uncast, len);
            self.read_uncast(input, first + index * elements as u64, source, (block, sums), noting.as_mut())?;
            counts.add(cast.convert(source, target));
        }
        if let Some(noting) = noting {
            noting.sums.clear();
        }
        Ok(counts)
    }

    /// Fill `buffer` with elements of the dtype they are stored in.
    fn read_uncast(
        &self,
        input: Input<'_>,
        first: u64,
        buffer: &mut [u8],
        (block, sums): (&mut Block, &mut Vec<u8>),
        mut noting: Option<&mut CrcRecorder<'_>>,
    ) -> Result<()> {
        let mut read = |part: &PartialSource, first: u64, buffer: &mut [u8]| {
            if self.fill == Fill::Zeros {
                buffer.fill(0);
            }
            let itemsize = self.dtype.itemsize();
            match part {
                PartialSource::Files(part) => {
                    let noted = noting.as_deref_mut().map(|noting| (noting, &self.fqn));
                    part.read(input, itemsize, first, buffer, block, noted)
                }
                PartialSource::Memory(part) => {
                    part.read(first * itemsize, buffer);
                    Ok(())
                }
            }
        };
        let Some(reducer) = self.reducer else {
            return self.parts.iter().try_for_each(|part| read(part, first, buffer));
        };
        let block_bytes = reducer.block_bytes();
        let elements = block_bytes as u64 / self.dtype.itemsize();
        for (index, target) in (0_u64..).zip(buffer.chunks_mut(block_bytes)) {
            let sums = room(sums, target.len() * reducer.widening());
            for (number, part) in self.parts.iter().enumerate() {
                read(part, first + index * elements, target)?;
                reducer.add(number == 0, target, sums);
            }
            reducer.finish(sums, target).map_err(|fault| fault.of(&self.fqn))?;
        }
        Ok(())
    }

    /// Bytes of the source that the tile takes.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        self.numel * self.dtype.itemsize() * self.parts.len() as u64
    }

    /// Whether the tile takes short runs of source rows, with bytes for others between them.
    #[must_use]
    pub fn is_of_short_rows(&self) -> bool {
        self.gathered().any(|part| {
            let pieces = part.pieces(self.dtype.itemsize());
            let first = pieces.visit(0..self.numel, |piece| Err(is_scattered(&piece) && is_row_by_row(&piece)));
            first == Err(true)
        })
    }

    /// Want the stretches of the source that hold the short runs of `numel` elements from `first`.
    pub fn short_runs(&self, first: u64, numel: u64, wanted: &mut WantedRange) {
        for part in self.gathered() {
            let pieces = part.pieces(self.dtype.itemsize());
            let Ok(()): Result<(), Infallible> = pieces.visit(first..first + numel, |piece| {
                if piece.run_bytes < LONG_RUN_BYTES {
                    wanted.add(stretch(&part.located[piece.overlap], &piece));
                }
                Ok(())
            });
        }
    }

    /// Memory it takes besides its own.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        /// What finds a chunk again that another tile needs as well, and what an allocator adds to lists this short.
        const FOUND: usize = size_of::<(u32, StridedLocation)>() * 2 + 128;
        let overlap = size_of::<Overlap>() + size_of::<StridedLocation>() + FOUND;
        let name = self.fqn.as_str().len() + 32;
        let part = |part: &Gathered| {
            let segments = part.plan.overlaps.iter().flat_map(|overlap| &overlap.segments);
            // A single one lies in the tile itself; lists have grown to what they hold, in powers of two.
            let listed = Some(part.plan.overlaps.len()).filter(|overlaps| *overlaps > 1);
            listed.map_or(0, |overlaps| overlaps.next_power_of_two().max(4) * overlap)
                + segments.map(|list| (list.capacity() + 1) * size_of::<CommonRange>()).sum::<usize>()
        };
        (name + self.gathered().map(part).sum::<usize>()) as u64
    }

    /// What is read from files.
    fn gathered(&self) -> impl Iterator<Item = &Gathered> {
        self.parts.iter().filter_map(|part| match part {
            PartialSource::Files(part) => Some(part),
            PartialSource::Memory(_) => None,
        })
    }

    /// Visit the pieces of the whole tile, for statistics.
    pub fn pieces(&self, mut visit: impl FnMut(&Piece)) {
        for part in self.gathered() {
            let pieces = part.pieces(self.dtype.itemsize());
            let Ok(()): Result<(), Infallible> = pieces.visit(0..self.numel(), |piece| {
                visit(&piece);
                Ok(())
            });
        }
    }
}

impl TileElements {
    /// Fill `buffer` with the bytes from `first` on.
    fn read(&self, first: u64, buffer: &mut [u8]) {
        let start = self.place.start + usize::try_from(first).expect("an offset in memory");
        buffer.copy_from_slice(&(*self.memory).as_ref()[start..start + buffer.len()]);
    }
}

impl Gathered {
    fn new(input: Input<'_>, entry: &TensorEntry, plan: TilePlan, known: &mut Locations) -> Result<Self> {
        let mut located: SmallVec<[StridedLocation; 1]> = SmallVec::with_capacity(plan.overlaps.len());
        for overlap in &plan.overlaps {
            if let Some(found) = known.0.as_ref().and_then(|known| known.get(&overlap.chunk)) {
                located.push(found.clone());
                continue;
            }
            let found = (input.resolve)(input.files, entry, overlap.chunk)?;
            check_inside(input, entry, overlap.chunk, &found)?;
            if let Some(known) = &mut known.0 {
                known.insert(overlap.chunk, found.clone());
            }
            located.push(found);
        }
        Ok(Self { plan, located })
    }

    fn pieces<'a>(&'a self, itemsize: u64) -> Pieces<'a, impl Fn(usize) -> &'a Dims> {
        Pieces::new(&self.plan, |overlap| &self.located[overlap].strides, itemsize)
    }

    /// Fill `buffer` with elements as they are stored; the runs of records with checksums are noted.
    fn read(
        &self,
        input: Input<'_>,
        itemsize: u64,
        first: u64,
        buffer: &mut [u8],
        block: &mut Block,
        mut noted: Option<(&mut CrcRecorder<'_>, &Fqn)>,
    ) -> Result<()> {
        let range = first..first + buffer.len() as u64 / itemsize;
        self.pieces(itemsize).visit(range, |piece| {
            let located = &self.located[piece.overlap];
            let file = input.files.open(located.file)?;
            read_piece(&file, input.files.io(), located, &piece, buffer, block)?;
            if let (Some((noting, fqn)), Some(summed)) = (&mut noted, located.summed) {
                note_runs(noting, fqn, located, summed, &piece, buffer);
            }
            Ok(())
        })
    }
}

/// Offsets come from files: prove once that the whole chunk lies inside its file, so that reading can trust them.
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
