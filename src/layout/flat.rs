//! The flat parameter of FSDP1: the concatenated parameters of one wrapped module, split into one shard for each rank.
//!
//! Shapes and offsets count elements. Parameters are in the order of registration, and each parameter is flattened in
//! the order of its storage. With `use_orig_params`, each parameter starts at a multiple of the alignment, and the
//! total is padded so that all shards have equal lengths. Without `use_orig_params`, no padding is stored: the last
//! shards may be shorter or empty, and PyTorch pads them in memory. Shard boundaries do not depend on parameter
//! boundaries:
//!
//! ```text
//!     a (15)          b (15)          c (5)            with use_orig_params, alignment 4, 2 shards
//!     aaaaaaaaaaaaaaa#bbb|bbbbbbbbbbbb#ccccc#          38 elements, # is padding
//!     shard 0: a, b[0:3]  shard 1: b[3:15], c
//! ```
//!
//! Source: `FlatParamHandle._init_flat_param_and_metadata`, `_get_shard_metadata`, `_get_unpadded_shard` in
//! `torch/distributed/fsdp/_flat_param.py`.

use std::ops::Range;

use smallvec::SmallVec;

use super::{Dims, Region, unravel};

/// The range of each parameter of a unit in the unit's flat parameter, and the number of shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatParameter {
    params: Vec<Range<u64>>,
    total: u64,
    shards: u64,
}

/// A contiguous piece of a shard: elements of one parameter, or padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatPiece {
    /// The offset from the start of the shard.
    pub offset: u64,
    pub len: u64,
    pub content: FlatContent,
}

/// The content of a piece of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FlatContent {
    /// Elements of a parameter, in storage order.
    Parameter { index: usize, elements: Range<u64> },
    /// Padding, which is never read.
    Padding,
}

impl FlatParameter {
    /// Computes the range of each parameter in the flat parameter. `numels` has the number of elements of each
    /// parameter. Returns `None` if the total size exceeds `u64`, or if the number of shards or the alignment is 0.
    ///
    /// `align` is the alignment in elements if `use_orig_params` is true; otherwise `None`.
    pub fn new(numels: &[u64], align: Option<u64>, shards: u64) -> Option<Self> {
        let (align, padded_to) = match align {
            Some(align) => (align, shards),
            None => (1, 1),
        };
        let mut params = Vec::with_capacity(numels.len());
        let mut end: u64 = 0;
        for numel in numels {
            let start = end.checked_next_multiple_of(align)?;
            end = start.checked_add(*numel)?;
            params.push(start..end);
        }
        let total = end.checked_next_multiple_of(padded_to)?;
        // Shards of equal length must fit u64.
        total.div_ceil(shards.max(1)).checked_mul(shards)?;
        (shards > 0).then_some(Self { params, total, shards })
    }

    /// Returns the range of each parameter in the flat parameter.
    pub fn params(&self) -> &[Range<u64>] {
        &self.params
    }

    /// Returns the number of elements, including stored padding: PyTorch's `_unpadded_unsharded_size`.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the number of shards.
    pub fn shards(&self) -> u64 {
        self.shards
    }

    /// Returns the number of elements of each shard in memory, including padding. PyTorch pads short shards to this
    /// length.
    pub fn shard_len(&self) -> u64 {
        self.total.div_ceil(self.shards)
    }

    /// Returns the range of a shard in the flat parameter. The last shards may be shorter than the first shard, or empty.
    pub fn shard(&self, index: u64) -> Range<u64> {
        let len = self.shard_len();
        let start = index.saturating_mul(len).min(self.total);
        start..start.saturating_add(len).min(self.total)
    }

    /// Returns the part of a parameter that a shard stores, as a range of the flat parameter. The range is empty if the
    /// shard stores no part.
    pub fn part(&self, param: usize, shard: u64) -> Range<u64> {
        let (param, shard) = (&self.params[param], self.shard(shard));
        let start = param.start.max(shard.start);
        start..param.end.min(shard.end).max(start)
    }

    /// Returns the pieces of a shard in order. Together they cover the shard without gaps.
    pub fn pieces(&self, shard: u64) -> impl Iterator<Item = FlatPiece> + '_ {
        self.pieces_within(self.shard(shard))
    }

    /// Returns the pieces of any range of the flat parameter. The offset of a piece counts from the start of this range.
    pub fn pieces_within(&self, range: Range<u64>) -> impl Iterator<Item = FlatPiece> + '_ {
        let mut at = range.start;
        let mut next = self.params.partition_point(|param| param.end <= range.start);
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            // Skips parameters without elements.
            while self.params.get(next).is_some_and(|param| param.end <= at) {
                next += 1;
            }
            let (start, end, content) = match self.params.get(next) {
                Some(param) if param.start <= at => {
                    let end = param.end.min(range.end);
                    let elements = at - param.start..end - param.start;
                    (at, end, FlatContent::Parameter { index: next, elements })
                }
                following => {
                    let end = following.map_or(self.total, |param| param.start).min(range.end);
                    (at, end, FlatContent::Padding)
                }
            };
            at = end;
            Some(FlatPiece { offset: start - range.start, len: end - start, content })
        })
    }
}

/// The storage order of a dense tensor: the dims of the tensor, in descending order of their strides.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StorageOrder(SmallVec<[usize; 4]>);

impl StorageOrder {
    /// Returns the row-major order of `ndim` dims.
    #[must_use]
    pub fn row_major(ndim: usize) -> Self {
        Self((0..ndim).collect())
    }

    /// Returns the storage order of these strides, or `None` if elements with these strides have gaps between them or
    /// overlap.
    pub fn of_strides(shape: &[u64], strides: &[u64]) -> Option<Self> {
        if shape.len() != strides.len() {
            return None;
        }
        let mut dims: SmallVec<[usize; 4]> = (0..shape.len()).collect();
        // The stride of a dim of size 1 is meaningless.
        dims.sort_by_key(|&dim| (std::cmp::Reverse(if shape[dim] == 1 { u64::MAX } else { strides[dim] }), dim));
        let mut expected: u64 = 1;
        for &dim in dims.iter().rev() {
            if shape[dim] != 1 && strides[dim] != expected {
                return None;
            }
            expected = expected.checked_mul(shape[dim])?;
        }
        Some(Self(dims))
    }

    /// Splits the elements `range` of the storage into boxes: at most two boxes for each dim, in storage order. Each
    /// box comes with the strides that its elements have in the storage.
    pub fn cut(&self, shape: &[u64], range: Range<u64>) -> Vec<(Region, Dims)> {
        let sizes = self.permuted(shape);
        let boxes = Region::cut(&sizes, range).map(|region| {
            let mut strides: Dims = region.sizes.iter().map(|_| 1).collect();
            for dim in (1..strides.len()).rev() {
                strides[dim - 1] = strides[dim] * region.sizes[dim];
            }
            (Region::new(self.unpermuted(&region.offsets), self.unpermuted(&region.sizes)), self.unpermuted(&strides))
        });
        boxes.collect()
    }

    /// Splits the elements `range` of the storage into boxes. Each box is chosen so that its elements are stored in
    /// row-major order.
    pub fn cut_row_major(&self, shape: &[u64], range: Range<u64>) -> Vec<Region> {
        let sizes = self.permuted(shape);
        let mut boxes = Vec::new();
        for region in Region::cut(&sizes, range) {
            let outer = self.outer(&region.sizes);
            for index in 0..outer.iter().product() {
                let (mut offsets, mut sizes) = (region.offsets.clone(), region.sizes.clone());
                for (dim, at) in unravel(index, outer).into_iter().enumerate() {
                    offsets[dim] += at;
                    sizes[dim] = 1;
                }
                boxes.push(Region::new(self.unpermuted(&offsets), self.unpermuted(&sizes)));
            }
        }
        boxes
    }

    /// Returns the number of boxes into which [`Self::cut_row_major`] splits the complete tensor.
    pub fn count_row_major(&self, shape: &[u64]) -> u64 {
        self.outer(&self.permuted(shape)).iter().fold(1, |count, size| count.saturating_mul(*size))
    }

    /// Returns the outer items of `sizes`, which are the sizes of the dims in storage order. Only these outer dims must
    /// be split into single indices to get boxes that are stored in row-major order. The other dims are the innermost
    /// dims in storage, and the storage has them in the order of the tensor, so they need no splitting.
    fn outer<'a>(&self, sizes: &'a [u64]) -> &'a [u64] {
        let mut tail = sizes.len();
        let mut inner = usize::MAX;
        while tail > 0 && (sizes[tail - 1] == 1 || self.0[tail - 1] < inner) {
            tail -= 1;
            if sizes[tail] > 1 {
                inner = self.0[tail];
            }
        }
        &sizes[..tail]
    }

    fn permuted(&self, dims: &[u64]) -> Dims {
        self.0.iter().map(|&dim| dims[dim]).collect()
    }

    fn unpermuted(&self, permuted: &[u64]) -> Dims {
        let mut dims = Dims::from_elem(0, permuted.len());
        for (&dim, &value) in self.0.iter().zip(permuted) {
            dims[dim] = value;
        }
        dims
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use FlatContent::{Padding, Parameter};

    fn shown(flat: &FlatParameter, shard: u64) -> Vec<String> {
        let show = |piece: FlatPiece| match piece.content {
            Parameter { index, elements } => {
                format!("{}[{}..{}]@{}", ["a", "b", "c"][index], elements.start, elements.end, piece.offset)
            }
            Padding => format!("#{}@{}", piece.len, piece.offset),
        };
        flat.pieces(shard).map(show).collect()
    }

    /// The expected values are the flat parameter that PyTorch 2.15 makes of Embedding(5, 3) and Linear(3, 5) on two ranks,
    /// with dtype f32.
    #[test]
    fn flat_parameter_equals_that_of_pytorch() {
        let views = FlatParameter::new(&[15, 15, 5], Some(4), 2).unwrap();
        assert_eq!((views.total(), views.shard_len()), (38, 19));
        assert_eq!(shown(&views, 0), ["a[0..15]@0", "#1@15", "b[0..3]@16"]);
        assert_eq!(shown(&views, 1), ["b[3..15]@0", "#1@12", "c[0..5]@13", "#1@18"]);
        let flat = FlatParameter::new(&[15, 15, 5], None, 2).unwrap();
        assert_eq!((flat.total(), flat.shard_len()), (35, 18));
        assert_eq!(shown(&flat, 0), ["a[0..15]@0", "b[0..3]@15"]);
        assert_eq!((shown(&flat, 1), flat.shard(1)), (vec!["b[3..15]@0".into(), "c[0..5]@12".into()], 18..35));
        let nested = FlatParameter::new(&[15, 3, 3, 3], Some(4), 2).unwrap();
        assert_eq!((nested.total(), nested.shard_len()), (28, 14));
    }

    #[test]
    fn trailing_shards_may_be_short_or_empty() {
        let tiny = FlatParameter::new(&[5], None, 4).unwrap();
        let lens: Vec<u64> = (0..4).map(|shard| tiny.shard(shard)).map(|range| range.end - range.start).collect();
        assert_eq!(lens, [2, 2, 1, 0]);
        assert_eq!(shown(&tiny, 3), [""; 0]);
    }

    #[test]
    fn sizes_beyond_u64_are_none() {
        assert_eq!(FlatParameter::new(&[1], None, 0), None);
        assert_eq!(FlatParameter::new(&[1], Some(0), 2), None);
        assert_eq!(FlatParameter::new(&[u64::MAX, 1], None, 2), None);
        assert_eq!(FlatParameter::new(&[u64::MAX], Some(2), 2), None);
        assert_eq!(FlatParameter::new(&[u64::MAX], None, 2), None);
    }

    #[test]
    fn channels_last_is_split_in_its_storage_order() {
        // (2, 3, 2, 2) as N, H, W, C.
        let order = StorageOrder::of_strides(&[2, 3, 2, 2], &[12, 1, 6, 3]).unwrap();
        assert_eq!(order, StorageOrder(SmallVec::from_slice(&[0, 2, 3, 1])));
        let cut = order.cut(&[2, 3, 2, 2], 12..24);
        assert_eq!(cut.len(), 1);
        assert_eq!((cut[0].0.to_string().as_str(), cut[0].1.to_vec()), ("[1:2, 0:3, 0:2, 0:2]", vec![12, 1, 6, 3]));
        assert_eq!(order.cut_row_major(&[2, 3, 2, 2], 12..24).len(), 4);
        assert_eq!((order.cut_row_major(&[2, 3, 2, 2], 0..24).len(), order.count_row_major(&[2, 3, 2, 2])), (8, 8));
        assert_eq!(StorageOrder::of_strides(&[2, 3], &[4, 1]), None);
        assert_eq!(StorageOrder::of_strides(&[2, 3], &[1, 2]).unwrap().0.to_vec(), [1, 0]);
        assert_eq!(StorageOrder::of_strides(&[1, 3], &[77, 1]).unwrap(), StorageOrder::row_major(2));
    }

    /// Returns the linear index of an element in storage.
    fn position(order: &StorageOrder, shape: &[u64], at: &[u64]) -> u64 {
        let (sizes, at) = (order.permuted(shape), order.permuted(at));
        super::super::ravel(&at, &sizes)
    }

    proptest! {
        #[test]
        fn shards_hold_every_element_once(
            numels in prop::collection::vec(0_u64..40, 0..6),
            align in prop::option::of(1_u64..9),
            shards in 1_u64..7,
        ) {
            let flat = FlatParameter::new(&numels, align, shards).unwrap();
            let mut held: Vec<Vec<u64>> = vec![Vec::new(); numels.len()];
            let mut total = 0;
            for shard in 0..shards {
                let mut offset = 0;
                for piece in flat.pieces(shard) {
                    prop_assert_eq!(piece.offset, offset);
                    prop_assert!(piece.len > 0);
                    offset += piece.len;
                    if let Parameter { index, elements } = piece.content {
                        prop_assert_eq!(elements.end - elements.start, piece.len);
                        let start = flat.params()[index].start;
                        prop_assert_eq!(flat.part(index, shard), start + elements.start..start + elements.end);
                        held[index].extend(elements);
                    }
                }
                let range = flat.shard(shard);
                prop_assert_eq!(offset, range.end - range.start);
                prop_assert!(align.is_none() || offset == flat.shard_len());
                let parts = (0..numels.len()).map(|param| flat.part(param, shard));
                let stored: u64 = parts.map(|part| part.end - part.start).sum();
                prop_assert!(align.is_some() || stored == offset);
                total += offset;
            }
            prop_assert_eq!(total, flat.total());
            for (held, numel) in held.iter().zip(&numels) {
                prop_assert!(held.iter().copied().eq(0..*numel));
            }
        }

        #[test]
        fn boxes_hold_the_elements_in_their_order(
            shape in prop::collection::vec(1_u64..4, 0..4),
            seed in any::<u64>(),
            ends in (0_u64..64, 0_u64..64),
        ) {
            let mut dims: Vec<usize> = (0..shape.len()).collect();
            dims.sort_by_key(|dim| seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(u32::try_from(*dim).unwrap() * 7));
            let order = StorageOrder(dims.into_iter().collect());
            let numel: u64 = shape.iter().product();
            let range = ends.0.min(ends.1).min(numel)..ends.0.max(ends.1).min(numel);
            // The boxes, concatenated in row-major order, are the range itself.
            let mut walked = Vec::new();
            for region in order.cut_row_major(&shape, range.clone()) {
                for index in 0..region.numel() {
                    let within = unravel(index, &region.sizes);
                    let at: Dims = within.iter().zip(&region.offsets).map(|(at, offset)| at + offset).collect();
                    walked.push(position(&order, &shape, &at));
                }
            }
            prop_assert!(walked.into_iter().eq(range.clone()));
            // In strided boxes, each element is at its position in the storage.
            let mut start = range.start;
            for (region, strides) in order.cut(&shape, range.clone()) {
                for index in 0..region.numel() {
                    let within = unravel(index, &region.sizes);
                    let at: Dims = within.iter().zip(&region.offsets).map(|(at, offset)| at + offset).collect();
                    let inside: u64 = within.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
                    prop_assert_eq!(start + inside, position(&order, &shape, &at));
                }
                start += region.numel();
            }
            prop_assert_eq!(start, range.end);
        }
    }
}
