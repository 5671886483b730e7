//! Casts: what a round gives, in the dtypes that are written.
//!
//! A shuffle whose values are in the memory of a device casts them there, so that fewer bytes come from it. What a cast
//! makes wider comes as it is, and is cast as it is written: so is all that the shuffle in host memory gives.
//!
//! Counts elements of what arrives of a tile, and bytes of places. Invariant: of the elements that a cast does not keep
//! each counts once, in the first replica of its tile, for whoever writes its first byte there.

use std::iter;
use std::ops::Range;

use crate::exec::cast::Cast;

/// Where values become those of the dtype that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Casting {
    /// Where they are put together to be written.
    InStrips,
    /// In the shuffle, as [`Casts`] say.
    InShuffle,
}

/// How what a round gives is laid out where it is cast.
#[derive(Debug)]
pub struct Casts {
    /// One for each tile that arrives.
    pub tiles: Vec<CastTile>,
    /// Of what is given.
    pub len: usize,
}

/// A tile among what is given.
#[derive(Debug)]
pub struct CastTile {
    pub place: Range<usize>,
    /// `None` where it stays as it is.
    pub cast: Option<(Cast, Vec<Portion>)>,
}

/// Elements that are cast together, one portion behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portion {
    pub elements: Range<u64>,
    /// Of these those that are counted.
    pub counted: Range<u64>,
}

impl Portion {
    /// All elements, with at most one stretch of those that are counted in each portion.
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
    fn portions_are_all_elements() {
        let of = |counted: &[(u64, u64)]| {
            let portions = Portion::all(10, counted.iter().map(|(start, end)| *start..*end));
            portions.into_iter().map(|Portion { elements, counted }| (elements, counted)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), [(0..10, 0..0)]);
        assert_eq!(of(&[(2, 4)]), [(0..10, 2..4)]);
        assert_eq!(of(&[(0, 4), (6, 7), (9, 10)]), [(0..6, 0..4), (6..9, 6..7), (9..10, 9..10)]);
    }
}
