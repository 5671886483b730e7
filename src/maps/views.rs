//! Chunks of a mapped tensor: the elements that a piece of the tensor and a chunk of the source have in common.
//!
//! A piece takes, along each of its dims, indices at equal distances of one source dim. A chunk of the source holds
//! intervals of each source dim. The indices of the piece that are in one interval are consecutive, so each combination of
//! intervals gives one strided view of the chunk. Unit of all numbers: elements. Invariant: the views of a piece cover
//! exactly the elements that the chunks hold.

use super::pieces::{Piece, Progression};
use crate::layout::{Intervals, Tile};

/// A strided view of one chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkView {
    /// The elements of the mapped tensor.
    pub tile: Tile,
    /// For each dim of the source, the position of the view's first element in the local tensor of the chunk.
    pub start: Vec<u64>,
    /// For each dim of the mapped tensor, the dim of the source, and the distance in the local tensor of the chunk from one
    /// index of the tile to the next.
    pub steps: Vec<(usize, u64)>,
}

/// Consecutive indices of a dim of a piece that lie in one interval of a chunk.
#[derive(Clone, Copy, Debug)]
struct Overlap {
    /// The first index of the piece's dim, counted from 0, and the number of indices.
    first: u64,
    count: u64,
    /// The position of the first index in the local tensor of the chunk.
    position: u64,
}

/// The maximum number of views of a piece in one chunk.
pub const MAX_VIEWS: u64 = 1 << 20;

/// Returns the views of a piece in a chunk whose elements are `tile`, or `None` if there are more than [`MAX_VIEWS`].
pub fn views(piece: &Piece, tile: &Tile) -> Option<Vec<ChunkView>> {
    let mut found = Vec::new();
    let mut left = MAX_VIEWS;
    for piece in without_shared_dims(piece.clone(), &mut left)? {
        add_views(&piece, tile, &mut found);
    }
    Some(found)
}

/// Divides a piece until no two of its dims take their indices from one source dim. Of two such dims, the one with the
/// longer steps is counted out. `left` is the number of further pieces that are allowed; `None` if there are more.
fn without_shared_dims(piece: Piece, left: &mut u64) -> Option<Vec<Piece>> {
    let is_long = |dim: &usize| piece.target[*dim].count > 1;
    let long: Vec<usize> = (0..piece.target.len()).filter(is_long).collect();
    let shared = long.iter().find_map(|first| {
        let other = long.iter().find(|other| *other > first && piece.steps[**other].0 == piece.steps[*first].0)?;
        Some(if piece.steps[*first].1 >= piece.steps[*other].1 { *first } else { *other })
    });
    let Some(dim) = shared else { return Some(vec![piece]) };
    let Progression { start, step, count } = piece.target[dim];
    *left = left.checked_sub(count)?;
    let (source, source_step) = piece.steps[dim];
    let single = |at: u64| {
        let mut own = piece.clone();
        own.target[dim] = Progression { start: start + at * step, step: 1, count: 1 };
        own.start[source] += at * source_step;
        own.steps[dim] = (0, 0);
        own
    };
    let mut pieces = Vec::new();
    for at in 0..count {
        pieces.extend(without_shared_dims(single(at), left)?);
    }
    Some(pieces)
}

fn add_views(piece: &Piece, tile: &Tile, found: &mut Vec<ChunkView>) {
    let mut overlaps: Vec<Vec<Overlap>> = Vec::new();
    let mut start: Vec<u64> = Vec::new();
    // Source dims of which the piece has one index.
    for (dim, intervals) in tile.dims().iter().enumerate() {
        let is_taken = piece.target.iter().zip(&piece.steps).any(|(own, (source, _))| own.count > 1 && *source == dim);
        let index = piece.start[dim];
        start.push(intervals.count_before(index));
        if !is_taken && !intervals.iter().any(|interval| interval.contains(&index)) {
            return;
        }
    }
    for (own, (source, step)) in piece.target.iter().zip(&piece.steps) {
        overlaps.push(if own.count > 1 {
            in_intervals(piece.start[*source], *step, own.count, &tile.dims()[*source])
        } else {
            vec![Overlap { first: 0, count: 1, position: 0 }]
        });
    }
    combine(piece, &overlaps, &mut Vec::new(), &start, found);
}

/// Returns the overlaps of the indices `start`, `start + step`, ... with each interval.
fn in_intervals(start: u64, step: u64, count: u64, intervals: &Intervals) -> Vec<Overlap> {
    let mut before = 0;
    let mut found = Vec::new();
    for interval in intervals.iter() {
        let first = interval.start.saturating_sub(start).div_ceil(step);
        let end = interval.end.saturating_sub(start).div_ceil(step).min(count);
        if first < end {
            let position = before + (start + first * step - interval.start);
            found.push(Overlap { first, count: end - first, position });
        }
        before += interval.end - interval.start;
    }
    found
}

/// Adds a view for each combination of overlaps of the dims.
fn combine(
    piece: &Piece,
    overlaps: &[Vec<Overlap>],
    chosen: &mut Vec<Overlap>,
    start: &[u64],
    found: &mut Vec<ChunkView>,
) {
    let Some((dim, others)) = overlaps.split_first() else {
        let mut start = start.to_vec();
        let mut dims = Vec::new();
        for ((own, (source, _)), overlap) in piece.target.iter().zip(&piece.steps).zip(&*chosen) {
            let first = own.start + overlap.first * own.step;
            dims.push(Intervals::progression(first, own.step, overlap.count, 1));
            if own.count > 1 {
                start[*source] = overlap.position;
            }
        }
        found.push(ChunkView { tile: Tile::new(dims), start, steps: piece.steps.clone() });
        return;
    };
    for overlap in dim {
        chosen.push(*overlap);
        combine(piece, others, chosen, start, found);
        chosen.pop();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::maps::names::NameMatch;

    fn piece(target: &[(u64, u64, u64)], start: &[u64], steps: &[(usize, u64)]) -> Piece {
        let progression =
            |(start, step, count): &(u64, u64, u64)| Progression { start: *start, step: *step, count: *count };
        Piece {
            pattern: 0,
            source: NameMatch::default(),
            target: target.iter().map(progression).collect(),
            start: start.to_vec(),
            steps: steps.to_vec(),
        }
    }

    /// Returns, for each element of the mapped tensor, the chunk and the local index of its source, by counting through the
    /// piece.
    fn by_definition(piece: &Piece, chunks: &[Tile]) -> Vec<(Vec<u64>, usize, Vec<u64>)> {
        let mut found = Vec::new();
        let counts: Vec<u64> = piece.target.iter().map(|own| own.count).collect();
        for number in 0..counts.iter().product() {
            let at = crate::layout::unravel(number, &counts);
            let target = piece.target.iter().zip(&at).map(|(own, at)| own.start + own.step * at).collect::<Vec<_>>();
            let mut source = piece.start.clone();
            for ((dim, step), at) in piece.steps.iter().zip(&at) {
                source[*dim] += step * at;
            }
            for (index, tile) in chunks.iter().enumerate() {
                let has = |(intervals, index): (&Intervals, &u64)| intervals.iter().any(|own| own.contains(index));
                if tile.dims().iter().zip(&source).all(has) {
                    let local = tile.dims().iter().zip(&source).map(|(own, index)| own.count_before(*index)).collect();
                    found.push((target.clone(), index, local));
                }
            }
        }
        found.sort();
        found
    }

    fn by_views(piece: &Piece, chunks: &[Tile]) -> Vec<(Vec<u64>, usize, Vec<u64>)> {
        let mut found = Vec::new();
        for (index, tile) in chunks.iter().enumerate() {
            for view in views(piece, tile).unwrap() {
                let sizes: Vec<u64> = view.tile.sizes().to_vec();
                for number in 0..sizes.iter().product() {
                    let mut local = view.start.clone();
                    for ((dim, step), at) in view.steps.iter().zip(crate::layout::unravel(number, &sizes)) {
                        local[*dim] += step * at;
                    }
                    found.push((view.tile.global_index(number).to_vec(), index, local));
                }
            }
        }
        found.sort();
        found
    }

    /// Divides a dim among `ranks`, in blocks of `block` indices in turn.
    fn shard(size: u64, ranks: u64, block: u64, rank: u64) -> Intervals {
        let starts = (rank * block..size).step_by(usize::try_from(ranks * block).unwrap());
        starts.map(|start| start..(start + block).min(size)).collect()
    }

    proptest! {
        #[test]
        fn views_are_the_elements_that_piece_and_chunks_share(
            (first, second) in ((0..3_u64, 1..4_u64, 1..5_u64), (0..3_u64, 1..4_u64, 1..5_u64)),
            start in (0..3_u64, 0..3_u64),
            steps in (1..4_u64, 1..4_u64),
            (dims, ranks, block) in (prop_oneof![Just([0, 1]), Just([1, 0]), Just([0, 0])], (1..4_u64, 1..3_u64), 1..4_u64),
        ) {
            let piece = piece(&[first, second], &[start.0, start.1], &[(dims[0], steps.0), (dims[1], steps.1)]);
            let tile = |rank: (u64, u64)| Tile::new([shard(40, ranks.0, block, rank.0), shard(40, ranks.1, block, rank.1)]);
            let chunks: Vec<Tile> =
                (0..ranks.0).flat_map(|row| (0..ranks.1).map(move |column| (row, column))).map(tile).collect();
            let expected = by_definition(&piece, &chunks);
            prop_assert_eq!(by_views(&piece, &chunks), expected);
        }
    }
}
