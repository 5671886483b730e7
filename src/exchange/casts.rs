//! Casts in the shuffle. If a cast does not enlarge the values, a GPU casts them before it copies them to the host, so
//! that fewer bytes are copied. Casts to a larger dtype, and all casts of the host shuffle, are done when values are
//! written. Units: elements for tiles, bytes for ranges. Invariant: an element whose value is lost in a cast is counted
//! once: in the first replica of its tile, on the rank that writes the first byte of the element there.

use std::iter;
use std::ops::Range;

use crate::exec::cast::Cast;

/// The place where values are cast to the dtype of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Casting {
    /// The writer casts values when it assembles the write blocks.
    InWriter,
    /// The shuffle casts values, as [`Casts`] describes.
    InShuffle,
}

/// The layout of the output of a round after casts.
#[derive(Debug)]
pub struct Casts {
    /// The layout of each arriving tile.
    pub tiles: Vec<CastTile>,
    /// The length of the output, in bytes.
    pub len: usize,
}

/// The range and the cast of one tile.
#[derive(Debug)]
pub struct CastTile {
    /// The range of the output.
    pub range: Range<usize>,
    /// The cast and its portions; `None` if the tile is not cast.
    pub cast: Option<(Cast, Vec<Portion>)>,
}

/// A range of elements that is cast in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portion {
    /// The elements of the portion.
    pub elements: Range<u64>,
    /// The elements whose lost values are counted: a part of `elements`.
    pub counted: Range<u64>,
}

impl Portion {
    /// Splits all elements of a tile into portions, each of which contains at most one of the `counted` ranges.
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
