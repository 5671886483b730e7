//! Reduction of partial values on the host. [`Reducer`] reduces the partial values in the order of their coordinates on
//! the mesh of SRC, so the result has the same bits on every process and with every bucket size. All sizes and offsets
//! are in bytes.

use rayon::prelude::*;

use super::buffers::disjoint_slices;
use super::moves::{Moves, ValueSource};
use crate::error::Result;
use crate::exec::reduce::Reducer;

/// Reduces all partial values of a round that this process reduces. The partial values and the results are in
/// `unpacked`, which has [`Moves::unpacked_len`] bytes.
///
/// # Errors
/// Returns `Unsupported` if the dtype of the partial values cannot hold a result.
pub fn reduce(moves: &Moves, unpacked: &mut [u8]) -> Result<()> {
    let (output, partial_values) = unpacked.split_at_mut(moves.output_len);
    let reduced =
        || moves.arriving_tiles.iter().filter(|tile| matches!(tile.value_source, ValueSource::Reduced { .. }));
    let values = disjoint_slices(output, reduced().map(|tile| (tile.value_range.start, tile.value_range.len())));
    values.into_par_iter().zip(reduced().collect::<Vec<_>>()).try_for_each(|(values, tile)| {
        let ValueSource::Reduced { partial_range, reducer, .. } = &tile.value_source else { return Ok(()) };
        let partial_values =
            &partial_values[partial_range.start - moves.output_len..partial_range.end - moves.output_len];
        reduce_tile(*reducer, partial_values, values).map_err(|error| error.for_tensor(&tile.needed.fqn))
    })
}

/// Reduces one tile. Its partial values follow each other in memory, and each has the length of the result.
fn reduce_tile(
    reducer: Reducer,
    partial_values: &[u8],
    values: &mut [u8],
) -> Result<(), crate::exec::reduce::ReduceError> {
    let (len, block) = (values.len(), reducer.block_bytes());
    values.par_chunks_mut(block).enumerate().try_for_each_init(Vec::new, |sums, (number, values)| {
        let own = number * block..number * block + values.len();
        reducer.reduce(partial_values.chunks(len).map(|partial| &partial[own.clone()]), values, sums)
    })
}
