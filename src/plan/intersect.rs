//! Plans one target tile: finds its elements in the chunks of the source tensor.
//!
//! Shapes and offsets count elements. The elements are copied directly from source chunks to the target. The complete
//! tensor is never assembled in memory.
//!
//! ```text
//!   source: S(0) over 3 ranks          target tile: columns 2..5, all rows
//!   +-------+ rank 0                       +---+
//!   |       |                   overlap    | a |  rows of rank 0
//!   +-------+ rank 1             ==>       | b |  rows of rank 1
//!   |       |                              | c |  rows of rank 2
//!   +-------+ rank 2                       +---+
//! ```
//!
//! Invariant: unless the caller of [`SourceTensor::plan`] restricts the elements to copy, the overlaps of a target tile
//! hold each element of the tile exactly once. PyTorch's counterpart is `create_read_items_for_chunk_list` in
//! `torch/distributed/checkpoint/planner_helpers.py`.

use smallvec::SmallVec;

use crate::catalog::{Holders, TensorEntry, Tiling};
use crate::error::Result;
use crate::layout::{CommonRange, Dims, Segments, Tile};

/// A source tensor that is ready for planning. Its chunks were checked to cover every element exactly once.
#[derive(Debug)]
pub struct SourceTensor<'a> {
    pub entry: &'a TensorEntry,
    /// The tilings of the tensor: one for each partial value, or only one if the tensor has no partial values. A tiling
    /// lists the distinct tiles of the chunks, and the chunks that hold each tile.
    tilings: Vec<Tiling>,
}

impl<'a> SourceTensor<'a> {
    /// Checks that the chunks of a tensor hold every element exactly once, and prepares the tensor for planning.
    ///
    /// # Errors
    /// The errors of [`TensorEntry::tilings`].
    pub fn new(entry: &'a TensorEntry) -> Result<Self> {
        Ok(Self { entry, tilings: entry.tilings()? })
    }

    /// Returns, for each source tile, the chunks that hold the tile: first the chunk that a plan reads, then the
    /// replicas of this chunk. If the tensor has partial values, the tiles of the first partial value come first.
    pub fn holders(&self) -> impl Iterator<Item = &Holders> {
        self.tilings.iter().flat_map(|tiling| &tiling.holders)
    }

    /// Returns the plan of a target tile: its overlaps with one partial value of the source. `partial_index` is 0 if
    /// the source has no partial values. If `within` is given, only elements inside this tile are copied, and the other
    /// elements become zero.
    pub fn plan(&self, target: &Tile, partial_index: u64, within: Option<&Tile>) -> TilePlan {
        let mut overlaps = SmallVec::new();
        if !target.is_empty() {
            let number = usize::try_from(partial_index).expect("an index of the tilings");
            let Tiling { tiles, holders, cover } = &self.tilings[number];
            let kept = within.map(|within| overlap(within, target).unwrap_or_default());
            for index in cover.overlapping(target) {
                let segments = overlap(&tiles[index], target).and_then(|segments| match &kept {
                    Some(kept) => clip(&segments, kept),
                    None => Some(segments),
                });
                if let Some(segments) = segments {
                    overlaps.push(Overlap { chunk: holders[index][0], segments });
                }
            }
        }
        TilePlan { sizes: target.sizes(), overlaps }
    }
}

/// The sources of a target tile: overlaps with source chunks. The overlaps together hold every element of the tile
/// exactly once, except elements that the caller of [`SourceTensor::plan`] excludes; these elements become zero.
#[derive(Debug)]
pub struct TilePlan {
    /// The shape of the target's local tensor.
    pub sizes: Dims,
    /// The overlaps with source chunks. A single overlap, the usual case, is stored without allocation.
    pub overlaps: SmallVec<[Overlap; 1]>,
}

/// The intersection of one source chunk and one target tile, as a product over dims.
#[derive(Debug)]
pub struct Overlap {
    /// The index of the source chunk in the chunk table of the source tensor.
    pub chunk: u32,
    /// For each dim, the index ranges that the source chunk and the target tile share. In each range, `left` is a
    /// position in the chunk's local tensor, and `right` is a position in the target's local tensor.
    pub segments: Common,
}

/// The intersection of two tiles: the common ranges of each dim.
type Common = SmallVec<[Segments; 3]>;

/// Returns the intersection of two tiles, or `None` if the tiles have no common element.
fn overlap(source: &Tile, target: &Tile) -> Option<Common> {
    let mut segments = SmallVec::with_capacity(source.dims().len());
    for (left, right) in source.dims().iter().zip(target.dims()) {
        let common = left.intersect(right);
        if common.is_empty() {
            return None;
        }
        segments.push(common);
    }
    Some(segments)
}

/// Returns the elements of `segments` whose target positions (`right`) are also target positions in `kept`, or `None`
/// if there are no such elements.
fn clip(segments: &Common, kept: &Common) -> Option<Common> {
    let mut clipped = Common::with_capacity(segments.len());
    for (dim, own) in segments.iter().enumerate() {
        let mut common = Segments::new();
        let mut next = kept.get(dim)?.iter().peekable();
        for segment in own {
            // Both lists ascend in their target positions.
            while let Some(stretch) = next.peek() {
                let start = segment.right.max(stretch.right);
                let end = (segment.right + segment.len).min(stretch.right + stretch.len);
                if start < end {
                    common.push(CommonRange {
                        left: segment.left + (start - segment.right),
                        right: start,
                        len: end - start,
                    });
                }
                if stretch.right + stretch.len > segment.right + segment.len {
                    break;
                }
                next.next();
            }
        }
        if common.is_empty() {
            return None;
        }
        clipped.push(common);
    }
    Some(clipped)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Intervals;

    #[test]
    fn clip_keeps_elements_that_are_in_both() {
        let tile = |ranges: &[(u64, u64)]| {
            let mut dim = Intervals::empty();
            ranges.iter().for_each(|(start, end)| dim.push(*start..*end));
            Tile::new([dim])
        };
        let target = tile(&[(0, 4), (6, 20)]);
        for (source, within) in [
            (tile(&[(1, 9), (12, 19)]), tile(&[(0, 2), (3, 7), (8, 14), (18, 20)])),
            (tile(&[(0, 20)]), tile(&[(7, 8)])),
            (tile(&[(0, 2), (9, 10)]), tile(&[(1, 10)])),
            (tile(&[(0, 3)]), tile(&[(3, 20)])),
        ] {
            let held = |tile: &Tile| tile.dims()[0].iter().flatten().collect::<Vec<u64>>();
            let (all, own, kept) = (held(&target), held(&source), held(&within));
            let expected: Vec<(usize, usize)> = (all.iter().enumerate())
                .filter(|(_, element)| own.contains(element) && kept.contains(element))
                .map(|(at, element)| (own.iter().position(|other| other == element).unwrap(), at))
                .collect();
            let found = clip(&overlap(&source, &target).unwrap(), &overlap(&within, &target).unwrap());
            let pairs = |segment: &CommonRange| {
                let CommonRange { left, right, len } = *segment;
                (0..len).map(move |at| (usize::try_from(left + at).unwrap(), usize::try_from(right + at).unwrap()))
            };
            let found: Vec<(usize, usize)> = found.iter().flat_map(|dims| dims[0].iter().flat_map(pairs)).collect();
            assert_eq!(found, expected);
        }
    }
}
