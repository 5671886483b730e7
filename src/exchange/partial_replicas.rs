//! Torn replicas: what is done of some copies of a value and not of others.
//!
//! Values that NCCL makes are another run's only nearly. A run that goes on makes what is missing; where ranks have copies
//! of that, those that are done are made again with it, or they would differ.
//!
//! Counts bytes. Invariant: where no copy is missing, nothing is made again.

use indexmap::IndexMap;

use crate::catalog::{Catalog, Reservation, Reserved};
use crate::exec::Extents;

/// All copies of what is missing of reduced tensors where `done` is done.
#[must_use]
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
            // Tensors are as long as their tables say, which was checked when they were laid out.
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
