//! Reads the runs of one piece. A piece is a strided copy from one source chunk into one write block; a run is a range
//! of bytes without gaps.
//!
//! All sizes and offsets are in bytes. Long runs are read directly into the write block. Short runs are copied from a
//! memory mapping if mappings are fast on the file system; otherwise they are copied from a scratch block, which is
//! filled by one read for many runs. Invariant: an earlier check has shown that the chunk is within its file.

use std::cmp::Reverse;
use std::convert::Infallible;

use smallvec::SmallVec;

use super::computed::ComputedSource;
use super::digest::MIN_COMBINE_BYTES;
use super::finished_ranges::ChecksumPart;
use super::source_block::SourceBlock;
use super::source_crc::CrcRecorder;
use super::{BLOCK_BYTES, Input};
use crate::catalog::{ChecksummedRange, Fqn, StridedLocation};
use crate::error::Result;
use crate::plan::Piece;
use crate::plan::lower::LoopLevel;
use crate::storage::{FileRange, IoMode, Opened};

/// The length in bytes of the shortest run that is read by a separate call. Shorter runs are copied together from one
/// mapping or block.
pub const LONG_RUN_BYTES: u64 = 64 << 10;

/// Records the CRCs of the runs of a piece (a strided copy from a source chunk), if each run was read by its own call.
/// Short strided runs are not recorded, because they hardly ever cover a complete zip record.
pub fn record_runs(
    recorder: &mut CrcRecorder<'_>,
    fqn: &Fqn,
    located: &StridedLocation,
    summed: ChecksummedRange,
    piece: &Piece,
    buffer: &[u8],
) {
    if is_scattered(piece) {
        return;
    }
    let target = usize::try_from(piece.target).expect("a write block fits memory");
    let run = usize::try_from(piece.run_bytes).expect("a write block fits memory");
    let Ok(()): Result<(), Infallible> = for_each_run(&piece.levels, 0, 0, &mut |source, offset| {
        let start = target + offset;
        let at = located.offset + piece.source + source;
        let crc = recorder.source_crcs.record(fqn, located.file, summed, at, &buffer[start..start + run]);
        if piece.run_bytes >= MIN_COMBINE_BYTES {
            recorder.parts.push(ChecksumPart { offset: start as u64, len: piece.run_bytes, crc });
        }
        Ok(())
    });
}

/// Returns whether a piece (a strided copy from a source chunk) has short runs with gaps between them.
pub fn is_scattered(piece: &Piece) -> bool {
    piece.run_bytes < LONG_RUN_BYTES && !piece.levels.is_empty()
}

/// Returns whether a piece (a strided copy from a source chunk) goes through its file row by row, front to back.
/// Returns false for a piece of a transposed view.
pub fn is_row_by_row(piece: &Piece) -> bool {
    let steps = || piece.levels.iter().map(|level| level.source_step);
    steps().max() == steps().next()
}

/// Returns the length in bytes of a row of the target if a piece transposes short runs: neighbours in a row are not neighbours in
/// the source, and each row is next to the row before it there.
pub fn transposed_row_bytes(piece: &Piece) -> Option<u64> {
    let nearest = piece.levels.iter().min_by_key(|level| level.source_step)?;
    let is_transposed = piece.run_bytes < STRETCH_BYTES && piece.levels.last() != Some(nearest);
    is_transposed.then_some(nearest.target_step)
}

/// Returns the range of the source file that contains all bytes of a piece (a strided copy), including the gaps between
/// its runs.
pub fn source_range(located: &StridedLocation, piece: &Piece) -> FileRange {
    FileRange { file: located.file, offset: located.offset + piece.source, len: piece.source_span() }
}

/// A file from which a piece is read.
pub enum SourceFile<'a> {
    /// A stored file, and the method by which it is read.
    Stored(Opened<'a>, IoMode),
    /// A computed file, whose bytes are computed from the tensors of this input.
    Computed(&'a ComputedSource, Input<'a>),
}

impl SourceFile<'_> {
    /// Returns whether the file can be mapped.
    fn is_mapped(&self) -> bool {
        matches!(self, Self::Stored(_, IoMode::Mmap))
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        match self {
            Self::Stored(file, _) => file.read_exact_at(buffer, offset),
            Self::Computed(computed, input) => computed.read(*input, offset, buffer),
        }
    }

    /// Calls `read` with bytes of the mapped file. Returns `None` if the file is not mapped.
    fn mapped(&self, offset: u64, len: u64, read: impl FnOnce(&[u8])) -> Result<Option<()>> {
        match self {
            Self::Stored(file, IoMode::Mmap) => file.mapped(offset, len, read),
            _ => Ok(None),
        }
    }
}

/// Reads a piece of a source chunk (a strided copy) into its position in `buffer`.
///
/// # Errors
/// `Io`.
pub fn read_piece(
    file: &SourceFile<'_>,
    located: &StridedLocation,
    piece: &Piece,
    target_block: &mut [u8],
    block: &mut SourceBlock,
) -> Result<()> {
    let target = usize::try_from(piece.target).expect("a write block fits memory");
    let base = located.offset;
    if piece.run_bytes < LONG_RUN_BYTES
        && let Some(source) = block.get(source_range(located, piece))
    {
        copy_runs(source, &mut target_block[target..], piece.run_bytes, &piece.levels);
        return Ok(());
    }
    if piece.run_bytes >= LONG_RUN_BYTES || piece.levels.is_empty() && !file.is_mapped() {
        let run = usize::try_from(piece.run_bytes).expect("a write block fits memory");
        return for_each_run(&piece.levels, 0, 0, &mut |source, offset| {
            let start = target + offset;
            file.read_exact_at(&mut target_block[start..start + run], base + piece.source + source)
        });
    }
    let mapped = file.mapped(base + piece.source, piece.source_span(), |source| {
        copy_runs(source, &mut target_block[target..], piece.run_bytes, &piece.levels);
    })?;
    match mapped {
        Some(()) => Ok(()),
        None => {
            // The levels are ordered by their source step, so that the loops run in the order of the source file. In
            // the order of the target, each scratch block of a transposed view would give only a few elements, and
            // would be read again for the next elements.
            let mut levels = piece.levels.clone();
            levels.sort_by_key(|level| Reverse(level.source_step));
            read_blocks(file, base + piece.source, piece, &levels, &mut target_block[target..], block)
        }
    }
}

/// The length in bytes of the shortest stretch of the source that is read by a call of its own, if most of the bytes up to the
/// next stretch are not needed.
const STRETCH_BYTES: u64 = 512;

/// Reads short strided runs, with one read call for many runs. Each call covers as many steps of the outermost loop
/// level as fit into the scratch buffer. If most of these bytes would not be needed, as for a part of a transposed view, each
/// step of the outermost level has a call of its own.
fn read_blocks(
    file: &SourceFile<'_>,
    source: u64,
    piece: &Piece,
    levels: &[LoopLevel],
    target: &mut [u8],
    block: &mut SourceBlock,
) -> Result<()> {
    let span = |levels: &[LoopLevel]| {
        levels.iter().map(|level| (level.count - 1) * level.source_step).sum::<u64>() + piece.run_bytes
    };
    if span(levels) <= BLOCK_BYTES || levels.is_empty() {
        let bytes = block.reuse(span(levels));
        file.read_exact_at(bytes, source)?;
        copy_runs(bytes, target, piece.run_bytes, levels);
        return Ok(());
    }
    let (outer, inner) = levels.split_first().expect("checked not empty");
    let stretch = span(inner);
    if (STRETCH_BYTES..=BLOCK_BYTES).contains(&stretch) && outer.source_step >= 3 * stretch {
        return read_stretches(file, source, piece, (outer, inner), stretch, target, block);
    }
    let spare = BLOCK_BYTES.saturating_sub(stretch);
    // A step of 0, as in an expanded tensor, reads the same bytes again.
    let fitting = spare.checked_div(outer.source_step).map_or(outer.count, |steps| (steps + 1).min(outer.count));
    let mut done = 0;
    while done < outer.count {
        let count = fitting.min(outer.count - done);
        let mut steps: SmallVec<[LoopLevel; 4]> = SmallVec::new();
        if count > 1 {
            steps.push(LoopLevel { count, ..*outer });
        }
        steps.extend_from_slice(inner);
        let offset = usize::try_from(done * outer.target_step).expect("a write block fits memory");
        read_blocks(file, source + done * outer.source_step, piece, &steps, &mut target[offset..], block)?;
        done += count;
    }
    Ok(())
}

/// Reads the stretch of `stretch` bytes that each step of the outermost level needs, as many stretches at a time as fit into the
/// scratch buffer, and copies the runs out of it.
fn read_stretches(
    file: &SourceFile<'_>,
    source: u64,
    piece: &Piece,
    (outer, inner): (&LoopLevel, &[LoopLevel]),
    stretch: u64,
    target: &mut [u8],
    block: &mut SourceBlock,
) -> Result<()> {
    let fitting = BLOCK_BYTES / stretch;
    let mut done = 0;
    while done < outer.count {
        let count = fitting.min(outer.count - done);
        let bytes = block.reuse(count * stretch);
        let len = usize::try_from(stretch).expect("a scratch buffer fits memory");
        for (step, bytes) in (done..).zip(bytes.chunks_exact_mut(len)) {
            file.read_exact_at(bytes, source + step * outer.source_step)?;
        }
        let mut levels: SmallVec<[LoopLevel; 4]> = SmallVec::new();
        levels.push(LoopLevel { count, source_step: stretch, ..*outer });
        levels.extend_from_slice(inner);
        let offset = usize::try_from(done * outer.target_step).expect("a write block fits memory");
        copy_runs(bytes, &mut target[offset..], piece.run_bytes, &levels);
        done += count;
    }
    Ok(())
}

/// Calls a function with the source offset and the target offset of every run of a loop nest.
fn for_each_run<E>(
    levels: &[LoopLevel],
    source: u64,
    target: usize,
    visit: &mut impl FnMut(u64, usize) -> Result<(), E>,
) -> Result<(), E> {
    let Some((outer, inner)) = levels.split_first() else {
        return visit(source, target);
    };
    let step = usize::try_from(outer.target_step).expect("a write block fits memory");
    for index in 0..outer.count {
        let at = usize::try_from(index).expect("a write block fits memory");
        for_each_run(inner, source + index * outer.source_step, target + at * step, visit)?;
    }
    Ok(())
}

/// Copies a loop nest of runs from memory to memory.
pub fn copy_runs(source: &[u8], target: &mut [u8], run_bytes: u64, levels: &[LoopLevel]) {
    // A transposed view, or a column cut to a width of one, has runs of one element; a copy of known size is then a
    // single move instruction.
    match run_bytes {
        1 => copy_sized::<1>(source, target, levels),
        2 => copy_sized::<2>(source, target, levels),
        4 => copy_sized::<4>(source, target, levels),
        8 => copy_sized::<8>(source, target, levels),
        _ => {
            let run = usize::try_from(run_bytes).expect("a write block fits memory");
            let Ok(()): Result<(), Infallible> = for_each_run(levels, 0, 0, &mut |from, to| {
                let from = usize::try_from(from).expect("a mapping fits memory");
                target[to..to + run].copy_from_slice(&source[from..from + run]);
                Ok(())
            });
        }
    }
}

fn copy_sized<const N: usize>(source: &[u8], target: &mut [u8], levels: &[LoopLevel]) {
    if let Some(transposition) = Transposition::find(levels, N as u64) {
        let Ok(()): Result<(), Infallible> = for_each_run(&transposition.others, 0, 0, &mut |from, to| {
            let from = usize::try_from(from).expect("a mapping fits memory");
            transposition.copy::<N>(&source[from..], &mut target[to..]);
            Ok(())
        });
        return;
    }
    let Ok(()): Result<(), Infallible> = for_each_run(levels, 0, 0, &mut |from, to| {
        let from = usize::try_from(from).expect("a mapping fits memory");
        let element: [u8; N] = source[from..from + N].try_into().expect("N bytes");
        target[to..to + N].copy_from_slice(&element);
        Ok(())
    });
}

/// The number of rows and columns of a tile that [`Transposition::copy`] transposes at once. A row of 2-byte elements is
/// then one cache line.
const TILE: usize = 32;

/// A loop nest that copies single elements, in which one level is contiguous in the source and another level is contiguous
/// in the target.
struct Transposition {
    /// The level whose elements are next to each other in the source.
    rows: LoopLevel,
    /// The level whose elements are next to each other in the target.
    columns: LoopLevel,
    others: SmallVec<[LoopLevel; 4]>,
}

impl Transposition {
    /// Returns `None` for a loop nest that is not of this kind, or so small that tiles have no benefit.
    fn find(levels: &[LoopLevel], itemsize: u64) -> Option<Self> {
        let is_long = |level: &LoopLevel| level.count >= 8;
        let rows = levels.iter().position(|level| level.source_step == itemsize && is_long(level))?;
        let columns = levels.iter().position(|level| level.target_step == itemsize && is_long(level))?;
        let others = levels.iter().enumerate().filter(|(index, _)| ![rows, columns].contains(index));
        let others = others.map(|(_, level)| *level).collect();
        (rows != columns).then(|| Self { rows: levels[rows], columns: levels[columns], others })
    }

    /// Copies all elements of the two levels, tile by tile. Each cache line of the source and of the target is used once:
    /// with steps that are powers of two, the lines of one tile displace each other from the cache.
    fn copy<const N: usize>(&self, source: &[u8], target: &mut [u8]) {
        let size = |number: u64| usize::try_from(number).expect("a mapping and a write block fit memory");
        let (rows, columns) = (size(self.rows.count), size(self.columns.count));
        let (source_step, target_step) = (size(self.columns.source_step), size(self.rows.target_step));
        let mut tile = [[[0; N]; TILE]; TILE];
        for first_row in (0..rows).step_by(TILE) {
            let height = TILE.min(rows - first_row);
            for first_column in (0..columns).step_by(TILE) {
                let width = TILE.min(columns - first_column);
                for (column, elements) in (first_column..).zip(&mut tile[..width]) {
                    let (from, _) = source[column * source_step + first_row * N..].as_chunks::<N>();
                    elements[..height].copy_from_slice(&from[..height]);
                }
                for row in 0..height {
                    let at = (first_row + row) * target_step + first_column * N;
                    let (to, _) = target[at..at + width * N].as_chunks_mut::<N>();
                    for (element, elements) in to.iter_mut().zip(&tile) {
                        *element = elements[row];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::storage::Files;

    /// Returns a loop nest over a tensor of these sizes: the source has the dims in the order `order`, and the target in
    /// their own order. `gap` is the number of bytes after each innermost row of the source.
    fn permuted(sizes: &[u64], order: &[usize], itemsize: u64, gap: u64) -> Vec<LoopLevel> {
        let mut levels: Vec<LoopLevel> =
            sizes.iter().map(|count| LoopLevel { count: *count, source_step: 0, target_step: 0 }).collect();
        let mut step = itemsize;
        for (position, dim) in order.iter().rev().enumerate() {
            levels[*dim].source_step = step;
            step = step * sizes[*dim] + if position == 0 { gap } else { 0 };
        }
        let mut step = itemsize;
        for level in levels.iter_mut().rev() {
            level.target_step = step;
            step *= level.count;
        }
        levels
    }

    /// Copies element by element, in the order of the loop nest.
    fn by_elements(source: &[u8], target: &mut [u8], itemsize: usize, levels: &[LoopLevel]) {
        let Ok(()): Result<(), Infallible> = for_each_run(levels, 0, 0, &mut |from, to| {
            let from = usize::try_from(from).unwrap();
            target[to..to + itemsize].copy_from_slice(&source[from..from + itemsize]);
            Ok(())
        });
    }

    fn bytes(len: u64) -> Vec<u8> {
        (0..len).map(|at| (at * 31 % 251) as u8).collect()
    }

    fn span(levels: &[LoopLevel], itemsize: u64) -> u64 {
        levels.iter().map(|level| (level.count - 1) * level.source_step).sum::<u64>() + itemsize
    }

    proptest! {
        #[test]
        fn permuted_elements_are_those_of_a_copy_element_by_element(
            sizes in (1..70_u64, 1..5_u64, 1..70_u64),
            order in Just([0, 1, 2]).prop_shuffle(),
            itemsize in prop_oneof![Just(1_u64), Just(2), Just(4), Just(8)],
            gap in 0..3_u64,
        ) {
            let sizes = [sizes.0, sizes.1, sizes.2];
            let levels = permuted(&sizes, &order, itemsize, gap * itemsize);
            let source = bytes(span(&levels, itemsize));
            let len = usize::try_from(sizes.iter().product::<u64>() * itemsize).unwrap();
            let (mut found, mut expected) = (vec![0; len], vec![0; len]);
            copy_runs(&source, &mut found, itemsize, &levels);
            by_elements(&source, &mut expected, usize::try_from(itemsize).unwrap(), &levels);
            prop_assert_eq!(found, expected);
        }
    }

    /// Transposes 700 of the 3,000 columns of a matrix of 1,500 rows. Reads hardly more bytes than these columns have.
    #[test]
    fn part_of_a_transposed_matrix_is_read_once() {
        let (rows, columns, wanted) = (1500, 3000, 700);
        let source = bytes(rows * columns * 2);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("matrix");
        std::fs::write(&path, &source).unwrap();
        let levels = [
            LoopLevel { count: wanted, source_step: 2, target_step: rows * 2 },
            LoopLevel { count: rows, source_step: columns * 2, target_step: 2 },
        ];
        let piece = Piece { overlap: 0, source: 400, target: 0, run_bytes: 2, levels: levels.into_iter().collect() };
        let mut expected = vec![0; usize::try_from(rows * wanted * 2).unwrap()];
        by_elements(&source[400..], &mut expected, 2, &levels);
        for io in [IoMode::Mmap, IoMode::Read] {
            let mut files = Files::new(io);
            let file = files.add(&path).unwrap();
            let located = StridedLocation { file, offset: 0, strides: crate::layout::Dims::new(), checksum: None };
            let (mut found, mut block) = (vec![0; expected.len()], SourceBlock::default());
            let source = SourceFile::Stored(files.open(file).unwrap(), io);
            read_piece(&source, &located, &piece, &mut found, &mut block).unwrap();
            assert!(found == expected, "{io:?}");
            assert!(files.bytes_read() <= rows * wanted * 2, "{io:?}: {}", files.bytes_read());
        }
    }
}
