//! Filling a buffer with a stretch of a target tile, from wherever its bytes lie.
//!
//! Long runs are read straight into the buffer. Short runs are copied out of a mapping where the file system is good
//! at that, or out of a scratch block that is read once and covers many of them. A tile that is read as another dtype
//! passes through a second scratch, in blocks: memory does not follow its size.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::convert::Infallible;

use smallvec::SmallVec;

use super::cast::{Cast, Counts};
use super::passing::Passing;
use super::{BLOCK_BYTES, CAST_BYTES, Input, room};
use crate::catalog::{Dtype, Fqn, Located, Summed, TensorEntry, span};
use crate::error::{Error, Result};
use crate::layout::{Dims, Tile};
use crate::plan::lower::Level;
use crate::plan::{Piece, Pieces, Source, TilePlan};
use crate::storage::{IoMode, OpenFile};

/// The chunks of one tensor that were found already: the tiles of a re-cut share their source chunks.
#[derive(Debug, Default)]
pub struct Locations(HashMap<u32, Located>);

/// Runs at least this long are worth a read of their own; below, many are copied from one mapping or block.
const LONG_RUN_BYTES: u64 = 64 << 10;

/// Buffers of a worker that outlive a read, so that they are allocated once.
#[derive(Debug, Default)]
pub struct Scratch {
    /// What short strided runs are copied out of; at most [`BLOCK_BYTES`].
    block: Vec<u8>,
    /// Elements on their way to another dtype; at most [`CAST_BYTES`].
    uncast: Vec<u8>,
}

impl Scratch {
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.block.capacity() + self.uncast.capacity()
    }
}

/// A target tile with its plan, and every chunk it needs found.
#[derive(Debug)]
pub struct Prepared {
    fqn: Fqn,
    /// Of the source.
    dtype: Dtype,
    cast: Option<Cast>,
    plan: TilePlan,
    /// One an overlap.
    located: Vec<Located>,
    strides: Vec<Dims>,
}

impl Prepared {
    /// Plan `tile` and locate its chunks.
    ///
    /// # Errors
    /// What the resolver returns; `Malformed` where a chunk reaches beyond its file.
    pub fn new(input: Input<'_>, source: &Source<'_>, tile: &Tile, known: &mut Locations) -> Result<Self> {
        Self::from_plan(input, source.entry, source.plan(tile), known)
    }

    /// As [`Prepared::new`], for one stored chunk as it is, whatever the others hold: for comparing replicas.
    ///
    /// # Errors
    /// As [`Prepared::new`].
    pub fn chunk(input: Input<'_>, entry: &TensorEntry, chunk: u32) -> Result<Self> {
        let sizes = entry.chunks.tile(chunk as usize).sizes();
        let whole = |&size: &u64| vec![crate::layout::Segment { left: 0, right: 0, len: size }];
        let segments = sizes.iter().map(whole).collect();
        let overlap = crate::plan::Overlap { chunk, source_sizes: sizes.clone(), segments };
        Self::from_plan(input, entry, TilePlan { sizes, overlaps: vec![overlap] }, &mut Locations::default())
    }

    fn from_plan(input: Input<'_>, entry: &TensorEntry, plan: TilePlan, known: &mut Locations) -> Result<Self> {
        let mut located = Vec::with_capacity(plan.overlaps.len());
        for overlap in &plan.overlaps {
            if let Some(found) = known.0.get(&overlap.chunk) {
                located.push(found.clone());
                continue;
            }
            let found = (input.resolve)(input.files, entry, overlap.chunk)?;
            check_inside(input, entry, &overlap.source_sizes, &found)?;
            known.0.insert(overlap.chunk, found.clone());
            located.push(found);
        }
        let strides = located.iter().map(|found| found.strides.clone()).collect();
        Ok(Self { fqn: entry.fqn.clone(), dtype: entry.dtype, cast: None, plan, located, strides })
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
        self.plan.sizes.iter().product()
    }

    /// Fill `buffer` with the elements of the target tile that begin at `first`, row-major.
    ///
    /// # Errors
    /// `Io` and `Malformed` from reading.
    pub fn read(&self, input: Input<'_>, first: u64, buffer: &mut [u8], scratch: &mut Scratch) -> Result<()> {
        self.read_summing(input, first, buffer, scratch, None).map(drop)
    }

    /// As [`Prepared::read`]; stretches of records with checksums are noted in `passing`, and what a cast met is
    /// returned.
    ///
    /// # Errors
    /// As [`Prepared::read`].
    pub fn read_summing(
        &self,
        input: Input<'_>,
        first: u64,
        buffer: &mut [u8],
        scratch: &mut Scratch,
        passing: Option<&Passing>,
    ) -> Result<Counts> {
        let mut counts = Counts::default();
        let Scratch { block, uncast } = scratch;
        let Some(cast) = self.cast else {
            self.read_uncast(input, first, buffer, block, passing)?;
            return Ok(counts);
        };
        let stored = usize::try_from(cast.from().itemsize()).expect("a few bytes");
        let itemsize = usize::try_from(cast.to().itemsize()).expect("a few bytes");
        let elements = usize::try_from(CAST_BYTES).expect("a scratch fits memory") / stored;
        for (index, target) in (0_u64..).zip(buffer.chunks_mut(elements * itemsize)) {
            let len = target.len() / itemsize * stored;
            let source = room(uncast, len);
            self.read_uncast(input, first + index * elements as u64, source, block, passing)?;
            counts.add(cast.convert(source, target));
        }
        Ok(counts)
    }

    /// Fill `buffer` with elements as they are stored.
    fn read_uncast(
        &self,
        input: Input<'_>,
        first: u64,
        buffer: &mut [u8],
        block: &mut Vec<u8>,
        passing: Option<&Passing>,
    ) -> Result<()> {
        let itemsize = self.dtype.itemsize();
        let range = first..first + buffer.len() as u64 / itemsize;
        Pieces::new(&self.plan, &self.strides, itemsize).visit(range, |piece| {
            let located = &self.located[piece.overlap];
            let file = input.files.open(located.file)?;
            read_piece(&file, input.files.io(), located.offset, &piece, buffer, block)?;
            if let (Some(passing), Some(summed)) = (passing, located.summed) {
                note_runs(passing, &self.fqn, located, summed, &piece, buffer);
            }
            Ok(())
        })
    }

    /// Visit the pieces of the whole tile, for statistics.
    pub fn pieces(&self, mut visit: impl FnMut(&Piece)) {
        let pieces = Pieces::new(&self.plan, &self.strides, self.dtype.itemsize());
        let Ok(()): Result<(), Infallible> = pieces.visit(0..self.numel(), |piece| {
            visit(&piece);
            Ok(())
        });
    }
}

/// Offsets come from files: prove once that the whole chunk lies inside its file, so that reading can trust them.
fn check_inside(input: Input<'_>, entry: &TensorEntry, sizes: &[u64], found: &Located) -> Result<()> {
    let len = input.files.len_bytes(found.file);
    let end = span(sizes, &found.strides)
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

/// Note the runs of a piece that were read in one go each. Short strided runs are not worth it: their record hardly
/// ever passes through whole.
fn note_runs(passing: &Passing, fqn: &Fqn, located: &Located, summed: Summed, piece: &Piece, buffer: &[u8]) {
    if piece.run_bytes < LONG_RUN_BYTES && !piece.levels.is_empty() {
        return;
    }
    let target = usize::try_from(piece.target).expect("a strip fits memory");
    let run = usize::try_from(piece.run_bytes).expect("a strip fits memory");
    let Ok(()): Result<(), Infallible> = for_each_run(&piece.levels, 0, 0, &mut |source, offset| {
        let start = target + offset;
        let at = located.offset + piece.source + source;
        passing.note(fqn, located.file, summed, at, &buffer[start..start + run]);
        Ok(())
    });
}

fn read_piece(
    file: &OpenFile,
    io: IoMode,
    base: u64,
    piece: &Piece,
    strip: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<()> {
    let target = usize::try_from(piece.target).expect("a strip fits memory");
    if piece.run_bytes >= LONG_RUN_BYTES || piece.levels.is_empty() && io != IoMode::Mmap {
        let run = usize::try_from(piece.run_bytes).expect("a strip fits memory");
        return for_each_run(&piece.levels, 0, 0, &mut |source, offset| {
            let start = target + offset;
            file.read_exact_at(&mut strip[start..start + run], base + piece.source + source)
        });
    }
    match io {
        IoMode::Mmap => {
            let source = file.mapped(base + piece.source, piece.source_span())?;
            copy_runs(source, &mut strip[target..], piece.run_bytes, &piece.levels);
            Ok(())
        }
        IoMode::Read | IoMode::Direct => {
            // Along the file, not along the target: of a transposed view each block would else give a few elements, and
            // be read again for the next ones.
            let mut levels = piece.levels.clone();
            levels.sort_by_key(|level| Reverse(level.source_step));
            read_blocks(file, base + piece.source, piece, &levels, &mut strip[target..], scratch)
        }
    }
}

/// Read short strided runs block by block: each block covers as many steps of the outermost level as fit the scratch.
fn read_blocks(
    file: &OpenFile,
    source: u64,
    piece: &Piece,
    levels: &[Level],
    target: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<()> {
    let span = |levels: &[Level]| {
        levels.iter().map(|level| (level.count - 1) * level.source_step).sum::<u64>() + piece.run_bytes
    };
    if span(levels) <= BLOCK_BYTES || levels.is_empty() {
        let block = room(scratch, usize::try_from(span(levels)).expect("bounded by the scratch size"));
        file.read_exact_at(block, source)?;
        copy_runs(block, target, piece.run_bytes, levels);
        return Ok(());
    }
    let (outer, inner) = levels.split_first().expect("checked not empty");
    let room = BLOCK_BYTES.saturating_sub(span(inner));
    // A step of 0, as in an expanded tensor, reads the same bytes again.
    let fitting = room.checked_div(outer.source_step).map_or(outer.count, |steps| (steps + 1).min(outer.count));
    let mut done = 0;
    while done < outer.count {
        let count = fitting.min(outer.count - done);
        let mut block: SmallVec<[Level; 4]> = SmallVec::new();
        if count > 1 {
            block.push(Level { count, ..*outer });
        }
        block.extend_from_slice(inner);
        let offset = usize::try_from(done * outer.target_step).expect("a strip fits memory");
        read_blocks(file, source + done * outer.source_step, piece, &block, &mut target[offset..], scratch)?;
        done += count;
    }
    Ok(())
}

/// Visit the (source, target) offset of every run of a loop nest.
fn for_each_run<E>(
    levels: &[Level],
    source: u64,
    target: usize,
    visit: &mut impl FnMut(u64, usize) -> Result<(), E>,
) -> Result<(), E> {
    let Some((outer, inner)) = levels.split_first() else {
        return visit(source, target);
    };
    let step = usize::try_from(outer.target_step).expect("a strip fits memory");
    for index in 0..outer.count {
        let at = usize::try_from(index).expect("a strip fits memory");
        for_each_run(inner, source + index * outer.source_step, target + at * step, visit)?;
    }
    Ok(())
}

/// Copy a loop nest of runs from memory to memory.
fn copy_runs(source: &[u8], target: &mut [u8], run_bytes: u64, levels: &[Level]) {
    // Runs of one element are what a transposed view or a column cut down to nothing gives; a copy of known size is a
    // single move instruction there.
    match run_bytes {
        1 => copy_sized::<1>(source, target, levels),
        2 => copy_sized::<2>(source, target, levels),
        4 => copy_sized::<4>(source, target, levels),
        8 => copy_sized::<8>(source, target, levels),
        _ => {
            let run = usize::try_from(run_bytes).expect("a strip fits memory");
            let Ok(()): Result<(), Infallible> = for_each_run(levels, 0, 0, &mut |from, to| {
                let from = usize::try_from(from).expect("a mapping fits memory");
                target[to..to + run].copy_from_slice(&source[from..from + run]);
                Ok(())
            });
        }
    }
}

fn copy_sized<const N: usize>(source: &[u8], target: &mut [u8], levels: &[Level]) {
    let Ok(()): Result<(), Infallible> = for_each_run(levels, 0, 0, &mut |from, to| {
        let from = usize::try_from(from).expect("a mapping fits memory");
        let element: [u8; N] = source[from..from + N].try_into().expect("N bytes");
        target[to..to + N].copy_from_slice(&element);
        Ok(())
    });
}
