//! The places of parameters in the partitions of ZeRO: which elements of a parameter are where in the vector of which
//! partition. Unit of all lengths and offsets: elements.
//!
//! ZeRO stages 1 and 2 put the parameters of a group one after another into one vector, add zeros, and cut the vector into
//! partitions of equal, even length. The cuts ignore the borders of parameters:
//!
//! ```text
//! a (5)  b (3)  c (1), 2 partitions of 6        aaaaab|bbc...
//! ```
//!
//! ZeRO stage 3 cuts each parameter by itself, and puts the pieces of a partition one after another. The last pieces of
//! a parameter have padding, whose values are arbitrary:
//!
//! ```text
//! a (5)  b (3)  c (1), 2 partitions             aaabbc|aa.b..
//! ```
//!
//! Source: `get_data_parallel_partitions` and `__init__` in `deepspeed/runtime/zero/stage_1_and_2.py`,
//! `partition_parameters.py` and `_create_fp16_sub_groups` in `stage3.py`.

use std::ops::Range;

use crate::catalog::Fqn;
use crate::layout::{Dims, numel};

/// A piece of a parameter: elements that are next to each other, both in the parameter and in the vector of a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub partition: usize,
    /// The first element in the vector of the partition.
    pub at: u64,
    /// The elements of the parameter, in row-major order.
    pub elements: Range<u64>,
}

/// A parameter in the vector of its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    pub fqn: Fqn,
    pub shape: Dims,
    /// The first element: in the vector of all partitions (stages 1 and 2), or in the vector of each partition (stage 3).
    start: u64,
    numel: u64,
}

/// The parameters of one group (of one sub-group at stage 3), and the way in which they are partitioned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partitioned {
    pub params: Vec<Placed>,
    partitions: u64,
    /// The elements of the parameters, with the padding between them: of all partitions (stages 1 and 2), or of each
    /// partition (stage 3).
    total: u64,
    /// The length of each partition.
    len: u64,
    /// True if each parameter is cut by itself (stage 3).
    is_by_parameter: bool,
}

impl Partitioned {
    /// Places the parameters of a group one after another, as stages 1 and 2 do. `paddings` has for each parameter the
    /// number of zeros after it. Returns `None` if sizes exceed `u64`, or if there are no partitions.
    ///
    /// # Panics
    /// If `paddings` does not have one number for each parameter.
    pub fn together(params: Vec<(Fqn, Dims)>, paddings: &[u64], partitions: u64) -> Option<Self> {
        assert_eq!(params.len(), paddings.len(), "one padding for each parameter");
        let mut end: u64 = 0;
        let mut placed = Vec::with_capacity(params.len());
        for ((fqn, shape), padding) in params.into_iter().zip(paddings) {
            let numel = numel(&shape)?;
            placed.push(Placed { fqn, shape, start: end, numel });
            end = end.checked_add(numel)?.checked_add(*padding)?;
        }
        // The length is even: NCCL needs partitions that start at a multiple of 4 bytes, and elements may have 2 bytes.
        let len = end.div_ceil(partitions.checked_mul(2).filter(|number| *number > 0)?).checked_mul(2)?;
        len.checked_mul(partitions)?;
        Some(Self { params: placed, partitions, total: end, len, is_by_parameter: false })
    }

    /// Cuts each parameter of a sub-group by itself, as stage 3 does. Returns `None` if sizes exceed `u64`, or if there
    /// are no partitions.
    pub fn by_parameter(params: Vec<(Fqn, Dims)>, partitions: u64) -> Option<Self> {
        let mut end: u64 = 0;
        let mut placed = Vec::with_capacity(params.len());
        for (fqn, shape) in params {
            let numel = numel(&shape)?;
            placed.push(Placed { fqn, shape, start: end, numel });
            let piece = numel.div_ceil(Some(partitions).filter(|number| *number > 0)?);
            piece.checked_mul(partitions)?;
            end = end.checked_add(piece)?;
        }
        Some(Self { params: placed, partitions, total: end, len: end, is_by_parameter: true })
    }

    /// Returns the length of each partition, including padding.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the length of a partition without the padding at the end of the group. At stage 3, the padding is after each
    /// parameter, and not at the end.
    pub fn filled(&self, partition: u64) -> u64 {
        if self.is_by_parameter { self.len } else { self.total.saturating_sub(partition * self.len).min(self.len) }
    }

    /// Returns the part of a parameter from an element to the end of the piece that has the element; `None` if the
    /// parameter has no such element.
    pub fn piece_from(&self, param: &Placed, first: u64) -> Option<Piece> {
        let Placed { start, numel, .. } = *param;
        if first >= numel {
            return None;
        }
        let (partition, at, count) = if self.is_by_parameter {
            let own = numel.div_ceil(self.partitions);
            (first / own, start + first % own, own - first % own)
        } else {
            let (partition, at) = ((start + first) / self.len, (start + first) % self.len);
            (partition, at, self.len - at)
        };
        let partition = usize::try_from(partition).expect("fewer partitions than files");
        Some(Piece { partition, at, elements: first..first.saturating_add(count).min(numel) })
    }

    /// Returns the pieces of a parameter, in the order of their elements.
    pub fn pieces(&self, param: &Placed) -> impl Iterator<Item = Piece> {
        let mut element = 0;
        std::iter::from_fn(move || {
            let piece = self.piece_from(param, element)?;
            element = piece.elements.end;
            Some(piece)
        })
    }

    /// Returns the ranges of a partition's vector that have no elements of parameters. DeepSpeed fills them with zeros, but
    /// not in the master weights of stage 3.
    pub fn padding(&self, partition: u64) -> Vec<Range<u64>> {
        if self.is_by_parameter {
            let gaps = self.params.iter().map(|param| {
                let own = param.numel.div_ceil(self.partitions);
                let filled = param.numel.saturating_sub(partition.saturating_mul(own)).min(own);
                param.start + filled..param.start + own
            });
            return gaps.filter(|gap| gap.start < gap.end).collect();
        }
        let own = partition * self.len..(partition + 1) * self.len;
        let ends = self.params.iter().map(|param| param.start + param.numel);
        let starts = self.params.iter().skip(1).map(|param| param.start).chain([self.partitions * self.len]);
        let gaps = ends.zip(starts).map(|(end, start)| end.max(own.start)..start.min(own.end));
        gaps.filter(|gap| gap.start < gap.end).map(|gap| gap.start - own.start..gap.end - own.start).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn params(numels: &[u64]) -> Vec<(Fqn, Dims)> {
        let name = |(index, numel): (usize, &u64)| (Fqn::from(format!("p{index}")), Dims::from_slice(&[*numel]));
        numels.iter().enumerate().map(name).collect()
    }

    /// The expected lengths are those of files that DeepSpeed 0.19.8 wrote.
    #[test]
    fn lengths_equal_those_of_deepspeed() {
        for (numel, partitions, len, filled) in [
            (36, 3, 12, vec![12, 12, 12]),
            (37, 3, 14, vec![14, 14, 9]),
            (219, 3, 74, vec![74, 74, 71]),
            (1, 4, 2, vec![1, 0, 0, 0]),
            (36, 4, 10, vec![10, 10, 10, 6]),
        ] {
            let group = Partitioned::together(params(&[numel]), &[0], partitions).unwrap();
            assert_eq!(group.len(), len);
            assert_eq!((0..partitions).map(|partition| group.filled(partition)).collect::<Vec<_>>(), filled);
        }
        let cut = Partitioned::by_parameter(params(&[5, 3, 1]), 2).unwrap();
        assert_eq!(cut.len(), 6);
        let pieces: Vec<Piece> = cut.pieces(&cut.params[1]).collect();
        let piece = |partition, at, elements| Piece { partition, at, elements };
        assert_eq!(pieces, [piece(0, 3, 0..2), piece(1, 3, 2..3)]);
        assert_eq!(cut.pieces(&cut.params[2]).collect::<Vec<_>>(), [piece(0, 5, 0..1)]);
    }

    #[test]
    fn sizes_beyond_u64_are_none() {
        assert_eq!(Partitioned::together(params(&[1]), &[0], 0), None);
        assert_eq!(Partitioned::by_parameter(params(&[1]), 0), None);
        for numels in [&[u64::MAX][..], &[u64::MAX, u64::MAX], &[1 << 63, 1 << 63]] {
            assert_eq!(Partitioned::together(params(numels), &vec![0; numels.len()], 3), None);
        }
        assert_eq!(Partitioned::together(params(&[1]), &[u64::MAX], 2), None);
        assert_eq!(Partitioned::by_parameter(params(&[u64::MAX, u64::MAX]), 1), None);
        assert_eq!(Partitioned::by_parameter(params(&[u64::MAX]), 2), None);
    }

    proptest! {
        #[test]
        fn pieces_and_padding_fill_every_partition(
            numels in prop::collection::vec((0_u64..40, 0_u64..5), 0..6),
            partitions in 1_u64..7,
            is_by_parameter in any::<bool>(),
        ) {
            let (sizes, paddings): (Vec<u64>, Vec<u64>) = numels.into_iter().unzip();
            let group = if is_by_parameter {
                Partitioned::by_parameter(params(&sizes), partitions).unwrap()
            } else {
                Partitioned::together(params(&sizes), &paddings, partitions).unwrap()
            };
            let len = usize::try_from(group.len()).unwrap();
            let mut held = vec![vec![0; len]; usize::try_from(partitions).unwrap()];
            for (param, numel) in group.params.iter().zip(&sizes) {
                let mut next = 0;
                for piece in group.pieces(param) {
                    prop_assert_eq!(piece.elements.start, next);
                    next = piece.elements.end;
                    let count = piece.elements.end - piece.elements.start;
                    for at in piece.at..piece.at + count {
                        held[piece.partition][usize::try_from(at).unwrap()] += 1;
                    }
                }
                prop_assert_eq!(next, *numel);
            }
            for (partition, held) in (0..partitions).zip(&mut held) {
                for gap in group.padding(partition).into_iter().flatten() {
                    held[usize::try_from(gap).unwrap()] += 1;
                }
                prop_assert!(held.iter().all(|count| *count == 1));
            }
        }
    }
}
