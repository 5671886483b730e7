//! Bounds for the number of bytes that an exchange sends. They are computed element by element.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::Case;
use crate::catalog::Reserved;
use crate::exec::tests::*;
use crate::layout::partial::Share;
use crate::storage::FileId;

impl Case {
    /// Returns the number of source bytes that a process needs for its output and cannot read itself. `todo` is the
    /// output of the process, and `sees` returns true for the files that it can read.
    pub(super) fn missing_bytes(&self, todo: &Extents, sees: &dyn Fn(FileId) -> bool) -> u64 {
        let lacking = self.reservation.tensors.iter().map(|tensor| {
            let source = self.catalog.tensor(tensor.source);
            let (shape, itemsize) = (&source.shape, tensor.dtype().itemsize());
            let mut needed = HashSet::new();
            for (index, chunk) in tensor.entry.chunks.iter().enumerate() {
                let Some((file, offset)) = tensor.file_offset(index) else { continue };
                for (local, element) in (0..).zip(linear_indices(shape, &chunk.tile)) {
                    let at = offset + local * itemsize;
                    if todo.overlaps(file, &(at..at + itemsize)) {
                        needed.insert(element);
                    }
                }
            }
            let mut lacking = 0;
            let partial_values = source.partial_values.as_ref();
            for partial in 0..partial_values.map_or(1, |of| of.reduction.count()) {
                let mut lacked = needed.clone();
                for (index, chunk) in source.chunks.iter().enumerate() {
                    let is_of_it = partial_values.is_none_or(|of| of.by_chunk[index] == partial);
                    if is_of_it && chunk.location.file().is_some_and(sees) {
                        for element in linear_indices(shape, &chunk.tile) {
                            lacked.remove(&element);
                        }
                    }
                }
                lacking += lacked.len() as u64 * source.dtype.itemsize();
            }
            lacking
        });
        lacking.sum()
    }

    /// Returns the maximum number of bytes that all processes together may send: for each element, each of its partial
    /// values once, and the result once to each other process that needs it. `todos` has the output of each process.
    pub(super) fn max_wire_bytes(&self, todos: &[Extents]) -> u64 {
        let of_tensor = |tensor: &Reserved| {
            let source = self.catalog.tensor(tensor.source);
            let whole = source.partial_values.as_ref().map(|partial_values| partial_values.reduction.full_reduction());
            let itemsize = tensor.dtype().itemsize();
            // For each element, identified by tile, share and index: the ranks that need it.
            let mut ranks: HashMap<(Tile, Option<&Share>, u64), HashSet<usize>> = HashMap::new();
            for (index, chunk) in tensor.entry.chunks.iter().enumerate() {
                let Some((file, offset)) = tensor.file_offset(index) else { continue };
                let share = tensor.shares.get(index).map(Arc::as_ref).or(whole.as_ref());
                for element in 0..chunk.tile.numel() {
                    let at = offset + element * itemsize;
                    let needers = ranks.entry((chunk.tile.clone(), share, element)).or_default();
                    needers.extend((0..todos.len()).filter(|rank| todos[*rank].overlaps(file, &(at..at + itemsize))));
                }
            }
            let most = ranks.iter().filter(|(_, needers)| !needers.is_empty()).map(|((_, share, _), needers)| {
                let count = share.map_or(1, |share| share.partial_values.len());
                if count > 1 { count + needers.len() - 1 } else { needers.len() }
            });
            most.sum::<usize>() as u64 * source.dtype.itemsize()
        };
        self.reservation.tensors.iter().map(of_tensor).sum()
    }
}
