//! Reduction: what is made of summands that have arrived.
//!
//! Summands are in the order of ranks, and become what [`Reducer`] makes of them: so a value is the same, bit for bit,
//! whoever makes it, of rounds of whatever size. Counts bytes.

use rayon::prelude::*;

use super::buffers::pieces;
use super::moves::{Making, Moves};
use crate::error::Result;
use crate::exec::reduce::Reducer;

/// Make the values of a round of their summands; both are in what is unpacked, of [`Moves::unpacked_len`] bytes.
///
/// # Errors
/// `Unsupported` where summands have no value.
pub fn reduce(moves: &Moves, unpacked: &mut [u8]) -> Result<()> {
    let (given, behind) = unpacked.split_at_mut(moves.given_len);
    let made = || moves.arriving.iter().filter(|tile| matches!(tile.making, Making::Reduced { .. }));
    let values = pieces(given, made().map(|tile| (tile.place.start, tile.place.len())));
    values.into_par_iter().zip(made().collect::<Vec<_>>()).try_for_each(|(values, tile)| {
        let Making::Reduced { summands, reducer, .. } = &tile.making else { return Ok(()) };
        let summands = &behind[summands.start - moves.given_len..summands.end - moves.given_len];
        reduce_tile(*reducer, summands, values).map_err(|fault| fault.for_tensor(&tile.wanted.fqn))
    })
}

/// Summands lie one behind the other, each as long as the values.
fn reduce_tile(reducer: Reducer, summands: &[u8], values: &mut [u8]) -> Result<(), crate::exec::reduce::ReduceError> {
    let (len, block) = (values.len(), reducer.block_bytes());
    values.par_chunks_mut(block).enumerate().try_for_each_init(Vec::new, |sums, (number, values)| {
        let own = number * block..number * block + values.len();
        reducer.reduce(summands.chunks(len).map(|summand| &summand[own.clone()]), values, sums)
    })
}
