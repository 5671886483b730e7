//! Handles partial replicas: after an interrupted run, some replicas of a value are written and others are not. If an
//! NCCL reduction runs twice, the two results may have different bits. Therefore, if a resumed run must write a missing
//! replica, it also writes the completed replicas of the same elements again, so that all replicas are equal. All sizes
//! and offsets are in bytes. Invariant: if no replica is missing, nothing is written again.

use indexmap::IndexMap;

use crate::catalog::{Catalog, Reservation, Reserved};
use crate::exec::Extents;

/// Finds the elements of reduced tensors that are missing in at least one of several replicas. Returns the byte ranges
/// of these elements in all replicas. `done` has the byte ranges of the output files that earlier runs completed.
pub fn partial_replicas(catalog: &Catalog, reservation: &Reservation, done: &Extents) -> Extents {
    let mut partial = Extents::new();
    let reduced = |tensor: &&Reserved| catalog.tensor(tensor.source).partial_values.is_some();
    for tensor in reservation.tensors.iter().filter(reduced) {
        let mut copies: IndexMap<_, Vec<(u32, u64)>> = IndexMap::new();
        for chunk in 0..tensor.entry.chunks.len() {
            let Some(place) = tensor.file_offset(chunk) else { continue };
            let key = (tensor.entry.chunks.tile(chunk), tensor.shares.get(chunk));
            copies.entry(key).or_default().push(place);
        }
        for ((tile, _), places) in copies.into_iter().filter(|(_, places)| places.len() > 1) {
            // This product fits in 64 bits, because it was checked when the output files were laid out.
            let len = tile.numel() * tensor.dtype().itemsize();
            for (file, offset) in &places {
                let mut all = Extents::new();
                all.insert(*file, *offset..*offset + len);
                for (_, missing) in all.without(done).iter() {
                    let (start, end) = (missing.start - offset, missing.end - offset);
                    places.iter().for_each(|(file, offset)| partial.insert(*file, offset + start..offset + end));
                }
            }
        }
    }
    partial
}
