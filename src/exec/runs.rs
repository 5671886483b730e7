//! Reads the runs of one piece. A piece is a strided copy from one source chunk into one write block; a run is a range
//! of bytes without gaps.
//!
//! All sizes and offsets are in bytes. Long runs are read directly into the write block. Short runs are copied from a
//! memory mapping if mappings are fast on the file system; otherwise they are copied from a scratch block, which is
//! filled by one read for many runs. Invariant: an earlier check has shown that the chunk is within its file.

use std::cmp::Reverse;
use std::convert::Infallible;

use smallvec::SmallVec;

use super::BLOCK_BYTES;
use super::digest::MIN_COMBINE_BYTES;
use super::finished_ranges::ChecksumPart;
use super::source_block::SourceBlock;
use super::source_crc::CrcRecorder;
use crate::catalog::{ChecksummedRange, Fqn, StridedLocation};
use crate::error::Result;
use crate::plan::Piece;
use crate::plan::lower::LoopLevel;
use crate::storage::{FileRange, IoMode, OpenFile};

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
#[must_use]
pub fn is_scattered(piece: &Piece) -> bool {
    piece.run_bytes < LONG_RUN_BYTES && !piece.levels.is_empty()
}

/// Returns whether a piece (a strided copy from a source chunk) goes through its file row by row, front to back.
/// Returns false for a piece of a transposed view.
#[must_use]
pub fn is_row_by_row(piece: &Piece) -> bool {
    let steps = || piece.levels.iter().map(|level| level.source_step);
    steps().max() == steps().next()
}

/// Returns the range of the source file that contains all bytes of a piece (a strided copy), including the gaps between
/// its runs.
#[must_use]
pub fn source_range(located: &StridedLocation, piece: &Piece) -> FileRange {
    FileRange { file: located.file, offset: located.offset + piece.source, len: piece.source_span() }
}

/// Reads a piece of a source chunk (a strided copy) into its position in `buffer`.
///
/// # Errors
/// `Io`.
pub fn read_piece(
    file: &OpenFile,
    io: IoMode,
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
    if piece.run_bytes >= LONG_RUN_BYTES || piece.levels.is_empty() && io != IoMode::Mmap {
        let run = usize::try_from(piece.run_bytes).expect("a write block fits memory");
        return for_each_run(&piece.levels, 0, 0, &mut |source, offset| {
            let start = target + offset;
            file.read_exact_at(&mut target_block[start..start + run], base + piece.source + source)
        });
    }
    let mapped = match io {
        IoMode::Mmap => file.mapped(base + piece.source, piece.source_span(), |source| {
            copy_runs(source, &mut target_block[target..], piece.run_bytes, &piece.levels);
        })?,
        IoMode::Read | IoMode::Direct => None,
    };
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

/// Reads short strided runs, with one read call for many runs. Each call covers as many steps of the outermost loop
/// level as fit into the scratch buffer.
fn read_blocks(
    file: &OpenFile,
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
    let spare = BLOCK_BYTES.saturating_sub(span(inner));
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
    let Ok(()): Result<(), Infallible> = for_each_run(levels, 0, 0, &mut |from, to| {
        let from = usize::try_from(from).expect("a mapping fits memory");
        let element: [u8; N] = source[from..from + N].try_into().expect("N bytes");
        target[to..to + N].copy_from_slice(&element);
        Ok(())
    });
}
