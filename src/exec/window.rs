//! Windows: groups of tensors that are planned and located together. The size of a window is in bytes of the output.
//!
//! A window contains only complete tensors. It ends at the latest with the tensor with which its output reaches 1 GiB
//! or its number of tiles reaches a few thousand, so a single large tensor can be a window of more than 1 GiB. For each
//! tensor of a window, threads in parallel check that the chunks cover the tensor exactly once, plan the tensor, and
//! locate its chunks. Only one window's plans exist at a time, so memory depends on the window, not on the model.
//! Tensors and chunks without bytes to write are skipped.
//!
//! A stopped run loses its current window. Therefore [`WindowPace`] chooses the size of a window by time: on a disk of
//! any speed, a window takes a few seconds, unless a single tensor takes longer.
//!
//! Invariant: each output range of [`prepare_window`] has the index of its tile, and tile groups of different tensors
//! have different numbers.

use std::collections::HashSet;
use std::iter::zip;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use smallvec::SmallVec;

use super::cast::{DtypePair, LossCounts};
use super::row_groups::{self, GroupCandidate, OutputRange, TileGroupKind};
use super::{Extents, Input, Locations, PreparedTile};
use crate::catalog::{Reserved, TensorId};
use crate::error::Result;
use crate::fault;
use crate::plan::SourceTensor;

/// A window ends with the tensor with which its output reaches this number of bytes.
const WINDOW_BYTES: u64 = 1 << 30;

/// The size in bytes of the first window, which measures the speed.
const FIRST_BYTES: u64 = 128 << 20;
/// The minimum size of a window in bytes. A window of this size still has write blocks for many threads.
const LEAST_BYTES: u64 = 32 << 20;

/// The time that a window should take.
const WINDOW_TIME: Duration = Duration::from_secs(5);

/// The window size in bytes for tests that stop between windows. The size is so small that small checkpoints have many
/// windows.
const TEST_BYTES: u64 = 256 << 10;

/// A window ends with the tensor with which it reaches this number of tiles.
const WINDOW_TILES: usize = 1 << 12;

/// The number of tasks for each thread into which the tensors of a window are divided. With several tasks for each
/// thread, all threads are busy although some tasks take longer than others.
const PARTS: usize = 16;

/// The pace of windows: it chooses the size of the next window from the time that the last window took.
pub struct WindowPace {
    bytes: u64,
    since: Instant,
}

impl WindowPace {
    /// Starts the clock of the first window.
    #[must_use]
    pub fn start() -> Self {
        Self { bytes: FIRST_BYTES, since: Instant::now() }
    }

    /// Returns the number of bytes of output at which a window ends at the latest.
    pub fn max_bytes() -> u64 {
        if fault::is_testing_faults() { TEST_BYTES } else { WINDOW_BYTES }
    }

    /// Returns the number of bytes of output at which the next window ends.
    pub fn next(&self) -> u64 {
        self.bytes.min(Self::max_bytes())
    }

    /// Records that a window of `bytes` bytes is finished.
    pub fn finish_window(&mut self, bytes: u64) {
        self.bytes = scaled_to_window_time(bytes, self.since.elapsed());
        self.since = Instant::now();
    }
}

/// Returns the size in bytes of a window that would take `WINDOW_TIME`, if it is as fast as the last window. The last
/// window had `bytes` bytes and took the time `took`.
fn scaled_to_window_time(bytes: u64, took: Duration) -> u64 {
    let next = u128::from(bytes) * WINDOW_TIME.as_micros() / took.as_micros().max(1);
    u64::try_from(next).unwrap_or(u64::MAX).clamp(LEAST_BYTES, WINDOW_BYTES)
}

/// An iterator that groups the target tensors with bytes to write into windows. Both the output and the number of tiles
/// of a window are limited.
pub struct Windows<'a> {
    input: Input<'a>,
    rest: std::slice::Iter<'a, Reserved>,
    todo: &'a Extents,
}

impl<'a> Windows<'a> {
    /// Starts before the first tensor.
    #[must_use]
    pub fn new(input: Input<'a>, tensors: &'a [Reserved], todo: &'a Extents) -> Self {
        Self { input, rest: tensors.iter(), todo }
    }

    /// Returns the tensors of the next window, or `None` if no tensor is left. The window ends with the tensor with
    /// which it reaches `most_bytes` bytes of output or `WINDOW_TILES` tiles.
    pub fn next(&mut self, most_bytes: u64) -> Option<Vec<&'a Reserved>> {
        let mut window = Vec::new();
        let (mut bytes, mut tiles) = (0, 0);
        while bytes < most_bytes && tiles < WINDOW_TILES {
            let Some(tensor) = self.rest.next() else { break };
            let source = self.input.catalog.tensor(tensor.source);
            let before = tiles;
            for chunk in (0..tensor.entry.chunks.len()).filter(|chunk| is_to_be_written(tensor, *chunk, self.todo)) {
                bytes += tensor.chunk_bytes(chunk);
                tiles = tensor.tiles_read_by_chunk(chunk, source).saturating_add(tiles);
            }
            // A tensor without stored data is put into a window, too, because its coverage must be checked.
            let is_nowhere = || (0..tensor.entry.chunks.len()).all(|chunk| tensor.file_offset(chunk).is_none());
            if tiles > before || is_nowhere() {
                window.push(tensor);
            }
        }
        (!window.is_empty()).then_some(window)
    }
}

/// Returns the source tensors of all target tensors that have bytes to write, ascending.
pub fn source_tensors(tensors: &[Reserved], todo: &Extents) -> Vec<TensorId> {
    let is_touched =
        |tensor: &&Reserved| (0..tensor.entry.chunks.len()).any(|chunk| is_to_be_written(tensor, chunk, todo));
    let mut ids: Vec<TensorId> = tensors.iter().filter(is_touched).map(|tensor| tensor.source).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Returns whether at least one byte of the chunk is to be written.
fn is_to_be_written(tensor: &Reserved, chunk: usize, todo: &Extents) -> bool {
    let is_touched = |(file, offset)| todo.overlaps(file, &(offset..offset + tensor.chunk_bytes(chunk)));
    tensor.file_offset(chunk).is_some_and(is_touched)
}

/// A target tile that is planned, and whose source chunks are located.
pub struct PlannedTile {
    /// The plan, with the locations of its chunks.
    pub tile: PreparedTile,
    /// The counter of the overflows and NaNs in the cast of the tile. `None` if nothing is counted: the tile is not
    /// cast, or it is a replica that is not the first.
    pub cast_counter: Option<CastCounter>,
    /// The number of the tile group that contains this tile and tiles with equal elements, which are gathered once and
    /// written to several files. `None` if the tile is not in such a group.
    pub copy_group: Option<usize>,
}

/// A counter of the overflows and NaNs in the cast of a tile.
#[derive(Clone, Debug)]
pub enum CastCounter {
    /// The elements are counted while write blocks are filled.
    WhileWriting(DtypePair),
    /// The elements were counted earlier, range by range. The list has one item for each range: the index of its first
    /// element in the tile, and its counts.
    Counted(DtypePair, Vec<(u64, LossCounts)>),
}

/// Checks, plans and locates the tensors of a window. Replaces the content of `tiles` by the tiles of these tensors,
/// and returns the position of each tile in the output files.
///
/// # Errors
/// The error of the first tensor that has one.
pub fn prepare_window(
    input: Input<'_>,
    window: &[&Reserved],
    todo: &Extents,
    tiles: &mut Vec<PlannedTile>,
) -> Result<Vec<OutputRange>> {
    tiles.clear();
    let prepare_part = |tensors: &[&Reserved]| -> Result<Vec<(PlannedTile, OutputRange)>> {
        let mut tiles = Vec::with_capacity(tensors.iter().map(|tensor| tensor.entry.chunks.len()).sum());
        tensors.iter().try_for_each(|tensor| prepare_tensor(input, tensor, todo, &mut tiles))?;
        Ok(tiles)
    };
    let tensors = window.len().div_ceil(PARTS * rayon::current_num_threads()).max(1);
    // Each part has its own result, so that the first of several errors is returned, no matter which thread is faster.
    let parts: Vec<Result<_>> = window.par_chunks(tensors).map(prepare_part).collect();
    let parts: Vec<Vec<(PlannedTile, OutputRange)>> = parts.into_iter().collect::<Result<_>>()?;
    let count = parts.iter().map(Vec::len).sum();
    let mut output_ranges = Vec::with_capacity(count);
    tiles.reserve(count);
    for part in parts {
        let before = tiles.len();
        for (mut tile, mut range) in part {
            range.tile_index = tiles.len();
            if let Some(group) = &mut range.group {
                group.number += before;
                tile.copy_group = matches!(group.kind, TileGroupKind::Copies { .. }).then_some(group.number);
            }
            tiles.push(tile);
            output_ranges.push(range);
        }
    }
    Ok(output_ranges)
}

/// Appends the tiles of one tensor that are to be written. Tile groups get ascending numbers, from the number of tiles
/// in the list before the call.
fn prepare_tensor(
    input: Input<'_>,
    tensor: &Reserved,
    todo: &Extents,
    tiles: &mut Vec<(PlannedTile, OutputRange)>,
) -> Result<()> {
    let source = SourceTensor::new(input.catalog.tensor(tensor.source))?;
    let pair = (source.entry.dtype, tensor.dtype());
    let mut locations = Locations::for_tiles(tensor.entry.chunks.len());
    let mut counted = HashSet::new();
    let mut chunks: SmallVec<[usize; 1]> = SmallVec::new();
    let first = tiles.len();
    for index in 0..tensor.entry.chunks.len() {
        let Some((file, offset)) = tensor.file_offset(index) else { continue };
        let tile = tensor.entry.chunks.tile(index);
        let share = tensor.shares.get(index);
        // If a tile has several replicas, only the first replica is counted, no matter which run writes it.
        let is_new = pair.0 != pair.1 && counted.insert((tile.clone(), share));
        if !is_to_be_written(tensor, index, todo) {
            continue;
        }
        let prepared = PreparedTile::with_share(input, &source, &tile, share.map(Arc::as_ref), &mut locations)?;
        let itemsize = pair.1.itemsize();
        let transposed_row = prepared.transposed_row().map(|elements| elements * itemsize);
        let planned = PlannedTile {
            tile: prepared.cast_to(pair.1)?,
            cast_counter: is_new.then_some(CastCounter::WhileWriting(pair)),
            copy_group: None,
        };
        let len = tensor.chunk_bytes(index);
        let output_range = OutputRange { file, offset, len, tile_index: 0, itemsize, transposed_row, group: None };
        tiles.push((planned, output_range));
        chunks.push(index);
    }
    let tiles = &mut tiles[first..];
    if tiles.len() < 2 {
        return Ok(());
    }
    let members = zip(tiles, chunks).map(|((planned, output_range), index)| GroupCandidate {
        tile: tensor.entry.chunks.tile(index),
        share: tensor.shares.get(index).map(Arc::as_ref),
        source_bytes: planned.tile.source_bytes(),
        has_short_row_runs: planned.tile.has_short_row_runs(),
        output_range,
    });
    row_groups::assign_groups(members, first);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_size_follows_the_time_of_the_last_window() {
        let mb = 1 << 20;
        let next = |bytes, millis| scaled_to_window_time(bytes, Duration::from_millis(millis));
        assert_eq!(next(128 * mb, 100), WINDOW_BYTES, "of a fast disk");
        assert_eq!(next(128 * mb, 2000), 320 * mb);
        assert_eq!(next(1024 * mb, 50_000), 102 * mb + 419_430);
        assert_eq!(next(128 * mb, 60_000), LEAST_BYTES, "of a slow one");
        assert_eq!(next(0, 0), LEAST_BYTES);
        assert_eq!(next(u64::MAX, 0), WINDOW_BYTES);
    }
}
