//! Windows: the tensors that are planned and located at a time.
//!
//! A window is up to 1 GiB of output, or some thousand tiles where those are small, cut between tensors. Each of its
//! tensors is proven and planned and its chunks are located, in parallel. Only one window's plans exist at a time, so
//! memory follows the window, not the model. Tensors, and chunks of them, of which nothing is to be done are passed over.
//!
//! What a stopped run loses is the window it is at. So windows follow [time](Pace): however slow a disk is, one is the
//! work of a few seconds, if no tensor of it is more than that.
//!
//! Counts bytes of output. Invariant: of what [`prepare`] gives, each payload has the number of its slot, and groups of
//! different tensors have different numbers.

use std::collections::HashSet;
use std::iter::zip;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use smallvec::SmallVec;

use super::cast::{DtypePair, LossCounts};
use super::row_groups::{self, Member, OutputRange, RowGroupKind};
use super::{Extents, Input, Locations, PreparedTile};
use crate::catalog::{Reserved, TensorId};
use crate::error::Result;
use crate::fault;
use crate::plan::SourceTensor;

/// Output planned and located at a time, at most.
const WINDOW_BYTES: u64 = 1 << 30;

/// The first window, which tells how fast it goes, and the least one: strips for many threads.
const FIRST_BYTES: u64 = 128 << 20;
const LEAST_BYTES: u64 = 32 << 20;

/// What a window is to take.
const WINDOW_TIME: Duration = Duration::from_secs(5);

/// So little that small checkpoints have many windows, where a test wants to stop between them.
const HURRIED_BYTES: u64 = 256 << 10;

/// Tiles planned and located at a time, where they are small.
const WINDOW_TILES: usize = 1 << 12;

/// Parts of a window that a thread prepares, one after the other: some take longer than others.
const PARTS: usize = 16;

/// How much to do at a time, by how long it took the last time.
pub struct WindowPace {
    bytes: u64,
    since: Instant,
}

impl WindowPace {
    #[must_use]
    pub fn start() -> Self {
        Self { bytes: FIRST_BYTES, since: Instant::now() }
    }

    /// The most a plan can get.
    #[must_use]
    pub fn at_most() -> u64 {
        if fault::is_hurried() { HURRIED_BYTES } else { WINDOW_BYTES }
    }

    /// Bytes of the next window.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.bytes.min(Self::at_most())
    }

    /// A window of so many bytes is done.
    pub fn done(&mut self, bytes: u64) {
        self.bytes = next_bytes(bytes, self.since.elapsed());
        self.since = Instant::now();
    }
}

/// What takes as long as a window is to take, where this many bytes took that long.
fn next_bytes(bytes: u64, took: Duration) -> u64 {
    let next = u128::from(bytes) * WINDOW_TIME.as_micros() / took.as_micros().max(1);
    u64::try_from(next).unwrap_or(u64::MAX).clamp(LEAST_BYTES, WINDOW_BYTES)
}

/// Cuts what is to be done of the target's tensors into windows of bounded output and number of tiles.
pub struct Windows<'a> {
    input: Input<'a>,
    rest: std::slice::Iter<'a, Reserved>,
    todo: &'a Extents,
}

impl<'a> Windows<'a> {
    #[must_use]
    pub fn new(input: Input<'a>, tensors: &'a [Reserved], todo: &'a Extents) -> Self {
        Self { input, rest: tensors.iter(), todo }
    }

    /// The tensors of the next window, which is full with so many bytes; `None` where nothing is left.
    pub fn next(&mut self, most_bytes: u64) -> Option<Vec<&'a Reserved>> {
        let mut window = Vec::new();
        let (mut bytes, mut tiles) = (0, 0);
        while bytes < most_bytes && tiles < WINDOW_TILES {
            let Some(tensor) = self.rest.next() else { break };
            let source = self.input.catalog.tensor(tensor.source);
            let before = tiles;
            for chunk in (0..tensor.entry.chunks.len()).filter(|chunk| is_wanted(tensor, *chunk, self.todo)) {
                bytes += tensor.chunk_bytes(chunk);
                tiles = tensor.tiles_of(chunk, source).saturating_add(tiles);
            }
            // One of which nothing is stored is proven all the same.
            let is_nowhere = || (0..tensor.entry.chunks.len()).all(|chunk| tensor.place(chunk).is_none());
            if tiles > before || is_nowhere() {
                window.push(tensor);
            }
        }
        (!window.is_empty()).then_some(window)
    }
}

/// The source tensors of what is to be done, ascending.
#[must_use]
pub fn sources(tensors: &[Reserved], todo: &Extents) -> Vec<TensorId> {
    let is_touched = |tensor: &&Reserved| (0..tensor.entry.chunks.len()).any(|chunk| is_wanted(tensor, chunk, todo));
    let mut ids: Vec<TensorId> = tensors.iter().filter(is_touched).map(|tensor| tensor.source).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Whether something of the chunk is to be done.
fn is_wanted(tensor: &Reserved, chunk: usize, todo: &Extents) -> bool {
    let of_place = |(file, offset)| todo.overlaps(file, &(offset..offset + tensor.chunk_bytes(chunk)));
    tensor.place(chunk).is_some_and(of_place)
}

/// A tile to fill.
pub struct PlannedTile {
    pub tile: PreparedTile,
    /// Where what its cast meets is counted; `None` without a cast, and for all replicas but the first.
    pub counted: Option<CastCounter>,
    /// The tiles that are equal to it.
    pub copies: Option<usize>,
}

/// Where what a cast of a tile meets is counted.
#[derive(Clone, Debug)]
pub enum CastCounter {
    InStrips(DtypePair),
    /// It was, with what comes to the strips of these elements.
    Before(DtypePair, Vec<(u64, LossCounts)>),
}

/// Prove, plan and locate the tensors of a window. Its slots take the place of those of the window before.
///
/// # Errors
/// That of the first tensor that has one.
pub fn prepare(
    input: Input<'_>,
    window: &[&Reserved],
    todo: &Extents,
    slots: &mut Vec<PlannedTile>,
) -> Result<Vec<OutputRange>> {
    slots.clear();
    let of_part = |tensors: &[&Reserved]| -> Result<Vec<(PlannedTile, OutputRange)>> {
        let mut tiles = Vec::with_capacity(tensors.iter().map(|tensor| tensor.entry.chunks.len()).sum());
        tensors.iter().try_for_each(|tensor| prepare_tensor(input, tensor, todo, &mut tiles))?;
        Ok(tiles)
    };
    let tensors = window.len().div_ceil(PARTS * rayon::current_num_threads()).max(1);
    // Each for itself, so that of several faults the first is told, whichever thread was faster.
    let parts: Vec<Result<_>> = window.par_chunks(tensors).map(of_part).collect();
    let parts: Vec<Vec<(PlannedTile, OutputRange)>> = parts.into_iter().collect::<Result<_>>()?;
    let tiles = parts.iter().map(Vec::len).sum();
    let mut payloads = Vec::with_capacity(tiles);
    slots.reserve(tiles);
    for part in parts {
        let before = slots.len();
        for (mut slot, mut payload) in part {
            payload.slot = slots.len();
            if let Some(group) = &mut payload.group {
                group.number += before;
                slot.copies = matches!(group.of, RowGroupKind::Copies { .. }).then_some(group.number);
            }
            slots.push(slot);
            payloads.push(payload);
        }
    }
    Ok(payloads)
}

/// Add the tiles of one tensor that are to be done, with groups that count from where these begin.
fn prepare_tensor(
    input: Input<'_>,
    tensor: &Reserved,
    todo: &Extents,
    tiles: &mut Vec<(PlannedTile, OutputRange)>,
) -> Result<()> {
    let source = SourceTensor::new(input.catalog.tensor(tensor.source))?;
    let pair = (source.entry.dtype, tensor.dtype());
    let mut known = Locations::of_tiles(tensor.entry.chunks.len());
    let mut counted = HashSet::new();
    let mut wanted: SmallVec<[usize; 1]> = SmallVec::new();
    let first = tiles.len();
    for index in 0..tensor.entry.chunks.len() {
        let Some((file, offset)) = tensor.place(index) else { continue };
        let tile = tensor.entry.chunks.tile(index);
        let share = tensor.shares.get(index);
        // Of replicas the first counts, whoever does it.
        let is_new = pair.0 != pair.1 && counted.insert((tile.clone(), share));
        if !is_wanted(tensor, index, todo) {
            continue;
        }
        let prepared = PreparedTile::share(input, &source, &tile, share.map(Arc::as_ref), &mut known)?;
        let slot = PlannedTile {
            tile: prepared.cast_to(pair.1)?,
            counted: is_new.then_some(CastCounter::InStrips(pair)),
            copies: None,
        };
        let itemsize = pair.1.itemsize();
        let payload = OutputRange { file, offset, len: tensor.chunk_bytes(index), slot: 0, itemsize, group: None };
        tiles.push((slot, payload));
        wanted.push(index);
    }
    let tiles = &mut tiles[first..];
    if tiles.len() < 2 {
        return Ok(());
    }
    let members = zip(tiles, wanted).map(|((slot, payload), index)| Member {
        tile: tensor.entry.chunks.tile(index),
        share: tensor.shares.get(index).map(Arc::as_ref),
        source_bytes: slot.tile.source_bytes(),
        is_of_short_rows: slot.tile.is_of_short_rows(),
        payload,
    });
    row_groups::group(members, first);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_follow_time() {
        let mb = 1 << 20;
        let next = |bytes, millis| next_bytes(bytes, Duration::from_millis(millis));
        assert_eq!(next(128 * mb, 100), WINDOW_BYTES, "of a fast disk");
        assert_eq!(next(128 * mb, 2000), 320 * mb);
        assert_eq!(next(1024 * mb, 50_000), 102 * mb + 419_430);
        assert_eq!(next(128 * mb, 60_000), LEAST_BYTES, "of a slow one");
        assert_eq!(next(0, 0), LEAST_BYTES);
        assert_eq!(next(u64::MAX, 0), WINDOW_BYTES);
    }
}
