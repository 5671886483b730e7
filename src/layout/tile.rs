//! Tiles: the elements of a global tensor that one local tensor holds, as a product of [`Intervals`] over dims.
//!
//! Shapes and offsets count elements. A `Shard` is one box. Under `_StridedShard` a rank holds several boxes, and a
//! single pair of offsets and sizes cannot describe several boxes: PyTorch's `compute_local_shape_and_global_offset`
//! (`torch/distributed/tensor/_utils.py`) reports only the first box. The product is never expanded in memory;
//! [`Tile::regions`] iterates over its boxes.
//!
//! Invariant: in each dim, the local index of an element is its position in the list of global indices. So the local
//! tensor is the tile with its gaps removed:
//!
//! ```text
//!     tile [0:1+2:3, 0:2] of a (4, 4) tensor        its local (2, 2) tensor
//!         a b . .
//!         . . . .                                        a b
//!         c d . .                                        c d
//!         . . . .
//! ```

use std::fmt;

use smallvec::SmallVec;

use super::{
    Dims, Intervals, Region,
    intervals::{Piece, Pieces},
};

/// The elements of one chunk or local tensor. A tile without dims is the single element of a 0-d tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// For each dim, the indices that the tile holds. Up to three dims are stored without allocation, because planning
    /// makes millions of tiles.
    dims: SmallVec<[Intervals; 3]>,
}

impl Tile {
    /// Makes a tile from the indices that it holds in each dim.
    #[must_use]
    pub fn new(dims: impl IntoIterator<Item = Intervals>) -> Self {
        Self { dims: dims.into_iter().collect() }
    }

    /// Makes a tile of one box. The ends of the box saturate at the maximum of `u64`. If the numbers come from a file,
    /// call [`Region::fits`] first.
    #[must_use]
    pub fn from_region(region: &Region) -> Self {
        Self::new((region.offsets.iter().zip(&region.sizes)).map(|(&at, &size)| Intervals::single(at, size)))
    }

    /// Returns, for each dim, the indices that the tile holds.
    pub fn dims(&self) -> &[Intervals] {
        &self.dims
    }

    /// Returns the number of dims.
    pub fn ndim(&self) -> usize {
        self.dims.len()
    }

    /// Returns the shape of the local tensor.
    pub fn sizes(&self) -> Dims {
        self.dims.iter().map(Intervals::len).collect()
    }

    /// Returns the number of elements, saturating like [`Region::numel`].
    pub fn numel(&self) -> u64 {
        super::numel(&self.sizes()).unwrap_or(u64::MAX)
    }

    /// Passes numbers that encode the tile to `emit`, one by one, for a hash. Unequal tiles have unequal encodings.
    pub fn encode(&self, emit: &mut impl FnMut(u64)) {
        emit(self.dims.len() as u64);
        self.dims.iter().for_each(|dim| dim.encode(emit));
    }

    /// Returns whether the tile has no elements.
    pub fn is_empty(&self) -> bool {
        self.dims.iter().any(Intervals::is_empty)
    }

    /// Returns the number of the tile's elements that come before `element`, in row-major order of a tensor of this
    /// shape.
    ///
    /// The local tensor has its elements in this order, too. So the tile's part of the global elements `start..end` is
    /// the consecutive range `count_before(start)..count_before(end)` of the local tensor.
    pub fn count_before(&self, shape: &[u64], element: u64) -> u64 {
        if Some(element) == super::numel(shape) {
            return self.numel();
        }
        let mut count = 0;
        // The number of elements for each index of the current dim.
        let mut each = self.numel();
        for (dim, index) in self.dims.iter().zip(super::unravel(element, shape)) {
            let Some(inner) = each.checked_div(dim.len()) else { return 0 };
            each = inner;
            count += dim.count_before(index) * each;
            if dim.count_before(index + 1) == dim.count_before(index) {
                break;
            }
        }
        count
    }

    /// Returns the global index of an element of the tile, given its row-major number in the tile.
    pub fn global_index(&self, element: u64) -> Dims {
        let index = |(dim, position): (&Intervals, u64)| dim.slice(position..position + 1).start();
        let positions = super::unravel(element, &self.sizes());
        self.dims.iter().zip(positions).map(|one| index(one).expect("an element of the tile")).collect()
    }

    /// Returns the smallest box that contains the tile. An empty dim is `0:0`.
    pub fn bounds(&self) -> Region {
        let bounds = || self.dims.iter().map(Intervals::bounds);
        Region {
            offsets: bounds().map(|range| range.start).collect(),
            sizes: bounds().map(|range| range.end - range.start).collect(),
        }
    }

    /// Returns the offsets that PyTorch reports for the local tensor: the first index of each dim, or the *size of the
    /// dim* if the shard is empty in that dim.
    pub fn global_offsets(&self, shape: &[u64]) -> Dims {
        (self.dims.iter().zip(shape)).map(|(dim, &n)| dim.start().unwrap_or(n)).collect()
    }

    /// Returns whether the tile is one non-empty box.
    pub fn is_box(&self) -> bool {
        self.dims.iter().all(|dim| dim.as_single().is_some())
    }

    /// Returns the tile as a box, if it is one non-empty box.
    pub fn as_region(&self) -> Option<Region> {
        self.is_box().then(|| self.bounds())
    }

    /// Returns the boxes of the tile in row-major order, each with its offsets in the local tensor.
    pub fn regions(&self) -> impl Iterator<Item = (Region, Dims)> + '_ {
        Boxes::new(&self.dims)
    }

    /// Returns the first box of the tile, or `None` for an empty tile.
    pub(super) fn first_region(&self) -> Option<Region> {
        self.regions().next().map(|(region, _)| region)
    }

    /// Returns the first box that two tiles share. If both tiles are boxes, this box is the intersection of the tiles.
    pub(super) fn first_common(&self, other: &Self) -> Option<Region> {
        let mut common = Region { offsets: Dims::new(), sizes: Dims::new() };
        for (a, b) in self.dims.iter().zip(&other.dims) {
            let range = a.first_common(b)?;
            common.offsets.push(range.start);
            common.sizes.push(range.end - range.start);
        }
        Some(common)
    }
}

/// An iterator over the boxes of a tile, with one counter for each dim.
struct Boxes<'a> {
    dims: &'a [Intervals],
    rest: SmallVec<[Pieces<'a>; 4]>,
    /// For each dim, the interval that the next box has in this dim; `None` after the last box.
    next: Option<SmallVec<[Piece; 4]>>,
}

impl<'a> Boxes<'a> {
    fn new(dims: &'a [Intervals]) -> Self {
        let mut rest: SmallVec<[Pieces<'a>; 4]> = dims.iter().map(Intervals::positioned).collect();
        let next = rest.iter_mut().map(Iterator::next).collect();
        Self { dims, rest, next }
    }

    /// Advances the innermost dim that has another interval to its next interval, and resets all dims inside this dim
    /// to their first interval.
    fn advance(&mut self) {
        let Some(pieces) = &mut self.next else { return };
        for dim in (0..self.dims.len()).rev() {
            if let Some(piece) = self.rest[dim].next() {
                pieces[dim] = piece;
                return;
            }
            self.rest[dim] = self.dims[dim].positioned();
            pieces[dim] = self.rest[dim].next().expect("a dim that had a first piece has it again");
        }
        self.next = None;
    }
}

impl Iterator for Boxes<'_> {
    type Item = (Region, Dims);

    fn next(&mut self) -> Option<Self::Item> {
        let pieces = self.next.as_ref()?;
        let region = Region {
            offsets: pieces.iter().map(|piece| piece.range.start).collect(),
            sizes: pieces.iter().map(|piece| piece.range.end - piece.range.start).collect(),
        };
        let local = pieces.iter().map(|piece| piece.position).collect();
        self.advance();
        Some((region, local))
    }
}

/// Displays the tile as `[0:2+4:6, 0:8]`.
impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in self.dims.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{dim}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use std::iter::zip;

    use super::*;

    #[test]
    fn regions_are_the_boxes_in_row_major_order() {
        let tile = Tile::new([Intervals::progression(0, 4, 2, 2), Intervals::progression(1, 2, 2, 1)]);
        assert_eq!(tile.to_string(), "[0:2+4:6, 1:2+3:4]");
        assert_eq!((tile.sizes().to_vec(), tile.numel()), (vec![4, 2], 8));
        assert_eq!((tile.bounds().to_string(), tile.as_region()), ("[0:6, 1:4]".to_owned(), None));
        let walked: Vec<_> = tile.regions().map(|(region, at)| format!("{region} at {at:?}")).collect();
        let expected = ["[0:2, 1:2] at [0, 0]", "[0:2, 3:4] at [0, 1]", "[4:6, 1:2] at [2, 0]", "[4:6, 3:4] at [2, 1]"];
        assert_eq!(walked, expected);
    }

    #[test]
    fn count_before_equals_a_count_of_elements() {
        let tile = Tile::new([
            Intervals::progression(0, 3, 2, 2),
            Intervals::single(1, 2),
            Intervals::progression(0, 2, 2, 1),
        ]);
        let shape = [5, 4, 3];
        let is_held = |element: &u64| {
            let at = super::super::unravel(*element, &shape);
            zip(tile.dims(), at).all(|(dim, index)| dim.iter().any(|held| held.contains(&index)))
        };
        let held: Vec<u64> = (0..60).filter(is_held).collect();
        assert_eq!(held.len() as u64, tile.numel());
        for element in 0..=60 {
            let before = held.iter().filter(|other| **other < element).count() as u64;
            assert_eq!(tile.count_before(&shape, element), before, "{element}");
        }
        assert_eq!((Tile::new([]).count_before(&[], 0), Tile::new([]).count_before(&[], 1)), (0, 1));
        assert_eq!(Tile::new([Intervals::full(3), Intervals::empty()]).count_before(&[3, 7], 5), 0);
    }

    #[test]
    fn scalar_is_one_box_and_empty_tile_is_none() {
        let scalar = Tile::new([]);
        assert_eq!((scalar.numel(), scalar.is_empty(), scalar.to_string()), (1, false, "[]".to_owned()));
        assert_eq!(scalar.regions().collect::<Vec<_>>(), [(Region::whole(&[]), Dims::new())]);
        assert_eq!(scalar.as_region(), Some(Region::whole(&[])));
        let empty = Tile::new([Intervals::full(3), Intervals::empty()]);
        assert_eq!((empty.numel(), empty.regions().count(), empty.as_region()), (0, 0, None));
        assert_eq!(empty.sizes().to_vec(), [3, 0]);
        assert_eq!(empty.global_offsets(&[3, 7]).to_vec(), [0, 7]);
    }
}
