//! A box of a tensor: the offsets and sizes by which checkpoints describe a chunk.
//!
//! Offsets and sizes count elements of the global tensor, unless the region is made relative to another box. The fields
//! are public because formats read them from files. Their values are untrusted until [`Region::fits`] returns true, so
//! ends saturate and nothing here overflows.
//!
//! PyTorch's counterpart is `ChunkStorageMetadata {offsets, sizes}` in `torch/distributed/checkpoint/metadata.py`.
//! [`Region::cut`] is used for FSDP flat parameters (`torch/distributed/fsdp/_flat_param.py`) and for the write blocks
//! of output files.
//!
//! The linear range `2..11` of a `(4, 3)` box is three boxes:
//!
//! ```text
//!     . . a       [0:1, 2:3]     the rest of a row
//!     b b b       [1:3, 0:3]     whole rows
//!     b b b
//!     c c .       [3:4, 0:2]     the beginning of a row
//! ```

use std::{fmt, ops::Range};

use smallvec::smallvec;

use super::{Dims, unravel};

/// An N-d half-open box. A box without dims is the single element of a 0-d tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    pub offsets: Dims,
    pub sizes: Dims,
}

impl Region {
    /// Makes a region from offsets and sizes.
    ///
    /// # Panics
    /// If offsets and sizes differ in length.
    #[must_use]
    pub fn new(offsets: impl Into<Dims>, sizes: impl Into<Dims>) -> Self {
        let (offsets, sizes) = (offsets.into(), sizes.into());
        assert_eq!(offsets.len(), sizes.len(), "a region has an offset and a size per dim");
        Self { offsets, sizes }
    }

    /// Returns the region that is a complete tensor of this shape.
    #[must_use]
    pub fn whole(shape: &[u64]) -> Self {
        Self { offsets: smallvec![0; shape.len()], sizes: Dims::from_slice(shape) }
    }

    /// Returns the number of dims.
    pub fn ndim(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the number of elements, saturating. The number is exact if the region [fits](Self::fits) a shape whose
    /// number of elements fits `u64`.
    pub fn numel(&self) -> u64 {
        super::numel(&self.sizes).unwrap_or(u64::MAX)
    }

    /// Returns whether the region has no elements.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// Returns the half-open range of each dim.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Range<u64>> + '_ {
        (self.offsets.iter().zip(&self.sizes)).map(|(&at, &size)| at..at.saturating_add(size))
    }

    /// Returns the intersection of two regions of one tensor, or `None` if they share no element.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        debug_assert_eq!(self.ndim(), other.ndim(), "regions of one tensor");
        let mut common = Self { offsets: Dims::new(), sizes: Dims::new() };
        for (a, b) in self.ranges().zip(other.ranges()) {
            let start = a.start.max(b.start);
            let size = a.end.min(b.end).checked_sub(start).filter(|&size| size > 0)?;
            common.offsets.push(start);
            common.sizes.push(size);
        }
        Some(common)
    }

    /// Returns the box relative to `origin`. In each dim, `origin` must not exceed the offset of the box.
    #[must_use]
    pub fn relative_to(&self, origin: &[u64]) -> Self {
        debug_assert_eq!(self.ndim(), origin.len(), "an origin in the same tensor");
        let offsets = (self.offsets.iter().zip(origin)).map(|(&at, &zero)| at - zero).collect();
        Self { offsets, sizes: self.sizes.clone() }
    }

    /// Returns whether the box is within a tensor of this shape. The offsets and sizes may be arbitrarily large.
    pub fn fits(&self, shape: &[u64]) -> bool {
        let ends = || self.offsets.iter().zip(&self.sizes).map(|(at, &size)| at.checked_add(size));
        self.offsets.len() == shape.len()
            && self.sizes.len() == shape.len()
            && ends().zip(shape).all(|(end, &size)| end.is_some_and(|end| end <= size))
    }

    /// Splits the elements `range` of a row-major box of these `sizes` into at most `2 * ndim - 1` boxes in linear
    /// order. Elements beyond the end of the box are ignored.
    ///
    /// Each step takes the largest box that starts at the end of the previous box. The boxes first get larger (the
    /// remaining elements of a row, then the remaining rows of a plane), and then smaller (complete rows, then the
    /// first elements of a row).
    pub fn cut(sizes: &[u64], range: Range<u64>) -> impl Iterator<Item = Self> + '_ {
        let numel = super::numel(sizes);
        let end = range.end.min(numel.unwrap_or(u64::MAX));
        let mut at = range.start;
        std::iter::from_fn(move || {
            let left = end.checked_sub(at).filter(|&left| left > 0)?;
            // Fast path: small tensors are usually read in one piece.
            if numel == Some(left) {
                at = end;
                return Some(Self::whole(sizes));
            }
            // Finds the outermost dim with a complete slice that starts at this element and ends within the range. A
            // slice of more than 2^64 elements never ends within the range.
            let (mut dim, mut slice) = (sizes.len(), 1);
            while let Some(inner) = dim.checked_sub(1).filter(|&inner| inner > 0)
                && let Some(larger) = sizes[inner].checked_mul(slice)
                && at.is_multiple_of(larger)
                && larger <= left
            {
                (dim, slice) = (inner, larger);
            }
            let mut region = Self { offsets: unravel(at, sizes), sizes: Dims::from_slice(sizes) };
            if let Some(dim) = dim.checked_sub(1) {
                let slices = (left / slice).min(sizes[dim] - region.offsets[dim]);
                region.sizes[..dim].fill(1);
                region.sizes[dim] = slices;
                slice *= slices;
            }
            at += slice;
            Some(region)
        })
    }
}

/// Displays the region as `[0:3, 4:8]`, and the region of a 0-d tensor as `[]`.
impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dim, range) in self.ranges().enumerate() {
            let comma = if dim == 0 { "" } else { ", " };
            write!(f, "{comma}{}:{}", range.start, range.end)?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: &[u64], sizes: &[u64]) -> Region {
        Region::new(offsets, sizes)
    }

    fn cut(sizes: &[u64], range: Range<u64>) -> Vec<String> {
        Region::cut(sizes, range).map(|region| region.to_string()).collect()
    }

    #[test]
    fn intersection_is_a_box_or_none() {
        let a = region(&[0, 2], &[4, 4]);
        assert_eq!(a.intersect(&region(&[2, 0], &[4, 3])), Some(region(&[2, 2], &[2, 1])));
        assert_eq!(a.intersect(&region(&[4, 2], &[1, 1])), None, "they only touch");
        assert_eq!(a.intersect(&region(&[1, 3], &[0, 1])), None, "one is empty");
        let scalar = Region::whole(&[]);
        assert_eq!(scalar.intersect(&scalar), Some(scalar.clone()));
        assert_eq!(region(&[2, 3], &[1, 1]).relative_to(&[2, 1]), region(&[0, 2], &[1, 1]));
    }

    #[test]
    fn huge_numbers_neither_fit_nor_overflow() {
        let far = region(&[u64::MAX], &[u64::MAX]);
        assert!(!far.fits(&[u64::MAX]));
        assert_eq!(far.intersect(&Region::whole(&[u64::MAX])), None);
        assert_eq!(far.to_string(), format!("[{0}:{0}]", u64::MAX));
        assert_eq!(Region::whole(&[u64::MAX, 2]).numel(), u64::MAX);
        assert_eq!(Region::whole(&[u64::MAX, u64::MAX, 0]).numel(), 0);
        assert!(!region(&[], &[]).fits(&[1]) && region(&[], &[]).fits(&[]));
        assert_eq!(cut(&[u64::MAX, u64::MAX], 0..2), ["[0:1, 0:2]"]);
    }

    #[test]
    fn linear_range_is_at_most_2n_minus_1_boxes() {
        assert_eq!(cut(&[4, 3], 2..11), ["[0:1, 2:3]", "[1:3, 0:3]", "[3:4, 0:2]"]);
        assert_eq!(cut(&[4, 3], 0..12), ["[0:4, 0:3]"]);
        assert_eq!(cut(&[4, 3], 4..4), [""; 0]);
        assert_eq!(cut(&[4, 0], 0..9), [""; 0]);
        assert_eq!(cut(&[], 0..1), ["[]"]);
        assert_eq!(
            cut(&[3, 3, 3], 1..26),
            ["[0:1, 0:1, 1:3]", "[0:1, 1:3, 0:3]", "[1:2, 0:3, 0:3]", "[2:3, 0:2, 0:3]", "[2:3, 2:3, 0:2]"]
        );
    }
}
