//! Windows: the tensors that are planned and located at a time.
//!
//! A window is some hundred MiB of output, or some thousand tiles where those are small, cut between tensors. Each of its
//! tensors is proven and planned and its chunks are located, in parallel. Only one window's plans exist at a time, so
//! memory follows the window, not the model.
//!
//! Counts bytes of output. Invariant: of what [`prepare`] gives, each payload has the number of its slot, and groups of
//! different tensors have different numbers.

use std::collections::HashSet;
use std::iter::zip;
use std::sync::Arc;

use rayon::prelude::*;

use super::bands::{self, Member, Of};
use super::copy::DtypePair;
use super::strips::Payload;
use super::{Input, Locations, Prepared};
use crate::catalog::Reserved;
use crate::error::Result;
use crate::plan::Source;

/// Output planned and located at a time.
const WINDOW_BYTES: u64 = 256 << 20;

/// Tiles planned and located at a time, where they are small.
const WINDOW_TILES: usize = 1 << 14;

/// Cut the target's tensors into windows of bounded output and number of tiles.
pub fn windows<'a>(input: Input<'a>, tensors: &'a [Reserved]) -> impl Iterator<Item = &'a [Reserved]> {
    let mut rest = tensors;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (mut bytes, mut tiles, mut count) = (0, 0, 0);
        while let Some(tensor) = rest.get(count) {
            bytes += tensor.payload_bytes();
            tiles += tensor.tiles_read(input.catalog.tensor(tensor.source));
            count += 1;
            if bytes >= WINDOW_BYTES || tiles >= WINDOW_TILES {
                break;
            }
        }
        let (window, after) = rest.split_at(count);
        rest = after;
        Some(window)
    })
}

/// A tile to fill.
pub struct Slot {
    pub tile: Prepared,
    /// Where what its cast meets is counted; `None` without a cast, and for all replicas but the first.
    pub counted: Option<DtypePair>,
    /// The tiles that are equal to it.
    pub copies: Option<usize>,
}

/// Prove, plan and locate the tensors of a window.
///
/// # Errors
/// That of the first tensor that has one.
pub fn prepare(input: Input<'_>, window: &[Reserved]) -> Result<(Vec<Slot>, Vec<Payload>)> {
    // Each for itself, so that of several faults the first is told, whichever thread was faster.
    let per_tensor: Vec<Result<_>> = window.par_iter().map(|tensor| prepare_tensor(input, tensor)).collect();
    let per_tensor: Vec<Vec<(Slot, Payload)>> = per_tensor.into_iter().collect::<Result<_>>()?;
    let mut slots = Vec::new();
    let mut payloads = Vec::new();
    for tiles in per_tensor {
        let first_group = slots.len();
        for (mut slot, mut payload) in tiles {
            payload.slot = slots.len();
            if let Some(group) = &mut payload.group {
                group.number += first_group;
                slot.copies = matches!(group.of, Of::Copies { .. }).then_some(group.number);
            }
            slots.push(slot);
            payloads.push(payload);
        }
    }
    Ok((slots, payloads))
}

/// The tiles of one tensor that have a place, with groups that count from 0.
fn prepare_tensor(input: Input<'_>, tensor: &Reserved) -> Result<Vec<(Slot, Payload)>> {
    let source = Source::new(input.catalog.tensor(tensor.source))?;
    let pair = (source.entry.dtype, tensor.dtype());
    let mut known = Locations::default();
    let mut counted = HashSet::new();
    let mut tiles = Vec::with_capacity(tensor.entry.chunks.len());
    for index in 0..tensor.entry.chunks.len() {
        let Some((file, offset)) = tensor.place(index) else { continue };
        let tile = tensor.entry.chunks.tile(index);
        let share = tensor.shares.get(index);
        let prepared = Prepared::share(input, &source, &tile, share.map(Arc::as_ref), &mut known)?;
        let is_new = pair.0 != pair.1 && counted.insert((tile, share));
        let slot = Slot { tile: prepared.cast_to(pair.1)?, counted: is_new.then_some(pair), copies: None };
        let itemsize = pair.1.itemsize();
        let payload = Payload { file, offset, len: tensor.chunk_bytes(index), slot: 0, itemsize, group: None };
        tiles.push((slot, payload));
    }
    if tiles.len() < 2 {
        return Ok(tiles);
    }
    let placed = (0..tensor.entry.chunks.len()).filter(|index| tensor.place(*index).is_some());
    bands::group(zip(&mut tiles, placed).map(|((slot, payload), index)| Member {
        tile: tensor.entry.chunks.tile(index),
        share: tensor.shares.get(index).map(Arc::as_ref),
        source_bytes: slot.tile.source_bytes(),
        is_scattered: slot.tile.is_scattered(),
        payload,
    }));
    Ok(tiles)
}
