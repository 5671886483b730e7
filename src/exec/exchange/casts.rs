//! Casts: what a round gives, in the dtypes that are written.
//!
//! A shuffle whose values are in the memory of a device casts them there, so that fewer bytes come from it. What a cast
//! makes wider comes as it is, and is cast as it is written: so is all that the shuffle in host memory gives.
//!
//! Counts elements of what arrives of a tile, and bytes of places. Invariant: of the elements that a cast does not keep
//! each counts once, in the first replica of its tile, for whoever writes its first byte there.

use std::iter;
use std::ops::Range;

use super::moves::{Arriving, Moves, next};
use crate::catalog::{Catalog, Reservation, Reserved};
use crate::exec::Extents;
use crate::exec::cast::Cast;

/// Where values become those of the dtype that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Casting {
    /// Where they are put together to be written.
    InStrips,
    /// In the shuffle, as [`Moves::casts`] has it.
    InShuffle,
}

/// How what a round gives is laid out where it is cast.
#[derive(Debug)]
pub struct Casts {
    /// One for each of `Moves::arriving`.
    pub tiles: Vec<Laid>,
    /// Of what is given.
    pub len: usize,
}

/// A tile among what is given.
#[derive(Debug)]
pub struct Laid {
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

impl Moves {
    /// Have what is given cast, if anything is, where this rank has `todo` to write.
    #[must_use]
    pub fn with_casts(self, catalog: &Catalog, reservation: &Reservation, todo: &Extents) -> Self {
        let mut len = 0;
        let laid = |tile: &Arriving| {
            let tensor = &reservation.tensors[tile.tensor];
            let (from, to) = (catalog.tensor(tensor.source).dtype, tensor.dtype());
            let cast = Cast::new(from, to).filter(|_| to.itemsize() <= from.itemsize());
            let numel = tile.elements.end - tile.elements.start;
            let itemsize = cast.map_or(from, |cast| cast.to()).itemsize();
            let place = next(&mut len, numel * itemsize);
            Laid { place, cast: cast.map(|cast| (cast, portions(numel, counted(tensor, tile, todo)))) }
        };
        let tiles: Vec<_> = self.arriving.iter().map(laid).collect();
        let casts = tiles.iter().any(|tile| tile.cast.is_some()).then_some(Casts { tiles, len });
        Self { casts, ..self }
    }
}

/// Elements whose first bytes are to be done in the first replica, ascending.
fn counted(tensor: &Reserved, tile: &Arriving, todo: &Extents) -> impl Iterator<Item = Range<u64>> {
    let itemsize = tensor.dtype().itemsize();
    let place = tile.wanted.chunks.first().and_then(|first| tensor.place(*first));
    let stretches = place.into_iter().flat_map(move |(file, offset)| {
        let [start, end] = [tile.elements.start, tile.elements.end].map(|element| offset + element * itemsize);
        todo.within(file, start..end).map(move |bytes| bytes.start - start..bytes.end - start)
    });
    let elements = stretches.map(move |bytes| bytes.start.div_ceil(itemsize)..bytes.end.div_ceil(itemsize));
    elements.filter(|elements| !elements.is_empty())
}

/// All elements, with at most one stretch of those that are counted in each portion.
fn portions(numel: u64, counted: impl Iterator<Item = Range<u64>>) -> Vec<Portion> {
    let mut counted: Vec<_> = counted.collect();
    if counted.is_empty() {
        counted.push(0..0);
    }
    let starts = iter::once(0).chain(counted[1..].iter().map(|next| next.start));
    let ends = counted[1..].iter().map(|next| next.start).chain([numel]);
    let elements: Vec<_> = starts.zip(ends).map(|(start, end)| start..end).collect();
    elements.into_iter().zip(counted).map(|(elements, counted)| Portion { elements, counted }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_are_all_elements() {
        let of = |counted: &[(u64, u64)]| {
            let portions = portions(10, counted.iter().map(|(start, end)| *start..*end));
            portions.into_iter().map(|Portion { elements, counted }| (elements, counted)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), [(0..10, 0..0)]);
        assert_eq!(of(&[(2, 4)]), [(0..10, 2..4)]);
        assert_eq!(of(&[(0, 4), (6, 7), (9, 10)]), [(0..6, 0..4), (6..9, 6..7), (9..10, 9..10)]);
    }
}
