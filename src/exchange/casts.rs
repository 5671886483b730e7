//! Casts in the shuffle. If a cast does not enlarge the values, a GPU with kernels casts them before it copies them to the
//! host, so that fewer bytes are copied. Casts to a larger dtype, and all casts in a shuffle without kernels, are done
//! when values are written. Buffer ranges are in bytes; portions of tiles count elements. Invariant: an element whose
//! value is lost in a cast is counted once: in the first replica of its tile, by the process that writes the first byte of
//! the element in this replica.

use std::iter;
use std::ops::Range;

use crate::exec::cast::Cast;

/// The step in which values are cast to the dtype of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Casting {
    /// The writer casts values when it assembles the write blocks.
    InWriter,
    /// The shuffle casts values before they reach the writer, as [`Casts`] describes. Only casts to a larger dtype are
    /// left to the writer.
    InShuffle,
}

/// The layout of a round's output buffer after the shuffle has cast the values.
#[derive(Debug)]
pub struct Casts {
    /// The byte range and the cast of each tile that this process receives in the round.
    pub tiles: Vec<CastTile>,
    /// The length of the output buffer after the casts, in bytes.
    pub len: usize,
}

/// The byte range of one tile in the output buffer, and the cast of its values.
#[derive(Debug)]
pub struct CastTile {
    /// The byte range of the tile in the output buffer, after the cast.
    pub range: Range<usize>,
    /// The cast, and the portions of the tile that are cast one by one. `None` if the tile needs no cast, or if the
    /// writer casts it.
    pub cast: Option<(Cast, Vec<Portion>)>,
}

/// A range of a tile's elements that is cast in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portion {
    /// The range of elements in the portion, counted from the first element of the tile.
    pub elements: Range<u64>,
    /// The part of `elements` in which this process counts the values that the cast loses. Empty if this process counts
    /// no values in this portion.
    pub counted: Range<u64>,
}

impl Portion {
    /// Splits the elements of a tile into portions, so that each portion contains at most one of the ranges in
    /// `counted`.
    pub fn all(numel: u64, counted: impl Iterator<Item = Range<u64>>) -> Vec<Self> {
        let mut counted: Vec<_> = counted.collect();
        if counted.is_empty() {
            counted.push(0..0);
        }
        let starts = iter::once(0).chain(counted[1..].iter().map(|next| next.start));
        let ends = counted[1..].iter().map(|next| next.start).chain([numel]);
        let elements: Vec<_> = starts.zip(ends).map(|(start, end)| start..end).collect();
        elements.into_iter().zip(counted).map(|(elements, counted)| Self { elements, counted }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_cover_all_elements() {
        let of = |counted: &[(u64, u64)]| {
            let portions = Portion::all(10, counted.iter().map(|(start, end)| *start..*end));
            portions.into_iter().map(|Portion { elements, counted }| (elements, counted)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), [(0..10, 0..0)]);
        assert_eq!(of(&[(2, 4)]), [(0..10, 2..4)]);
        assert_eq!(of(&[(0, 4), (6, 7), (9, 10)]), [(0..6, 0..4), (6..9, 6..7), (9..10, 9..10)]);
    }
}
