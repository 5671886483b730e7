//! Rules that split a sharded dim into one part for each coordinate of a mesh dim.
//!
//! Shapes and offsets count elements. DTensor has one rule, `torch.chunk`. Jobs without DTensors use other rules: the
//! region mappings of makani, PhysicsNeMo and torch-harmonics (`compute_split_shapes`), the balanced rule of
//! `numpy.array_split`, or explicit sizes. If the dim divides evenly, all rules except explicit sizes agree.
//!
//! ```text
//!     10 elements over 4      chunk      3 3 3 1
//!                             balanced   3 3 2 2      the first n mod k have one more
//!                             makani     3 3 3 1
//!      5 elements over 4      chunk      2 2 1 0
//!                             balanced   2 1 1 1
//!                             makani     1 1 1 2      no part is empty
//! ```
//!
//! Invariant: parts are consecutive, in the order of coordinates, and together they cover the dim.

use std::{fmt, ops::Range, str::FromStr, sync::Arc};

use super::{LayoutError, chunk};

/// A split rule: the sizes of the parts into which a mesh dim splits a tensor dim. `n` is the size of the tensor dim,
/// and `k` the number of parts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Split {
    /// `torch.chunk`, the only rule of DTensor.
    #[default]
    Chunk,
    /// Parts whose sizes differ by at most one element. The first `n mod k` parts have one more element than the
    /// remaining parts.
    Balanced,
    /// Parts of `ceil(n / k)` elements; the last part has the remaining elements. If the last part would be empty, the
    /// parts have `floor(n / k)` elements instead.
    Makani,
    /// Explicit sizes, one for each coordinate of the mesh dim.
    Sizes(Arc<[u64]>),
}

impl Split {
    /// Returns part `r` of `n` elements split into `k` parts. `r` must be below `k`.
    ///
    /// # Errors
    /// `SplitSizes` if the number of explicit sizes is not `k`, or if they do not add up to `n`.
    pub fn part(&self, n: u64, k: u64, r: u64) -> Result<Range<u64>, LayoutError> {
        Ok(match self {
            Self::Chunk => chunk(n, k, r),
            Self::Balanced => {
                let (len, more) = (n / k, n % k);
                let start = r * len + r.min(more);
                start..start + len + u64::from(r < more)
            }
            Self::Makani => {
                let ceil = n.div_ceil(k);
                let fits = ceil.checked_mul(k - 1).is_some_and(|all_but_last| all_but_last < n);
                let len = if fits { ceil } else { n / k };
                let end = if r + 1 == k { n } else { (r + 1) * len };
                r * len..end
            }
            Self::Sizes(sizes) => {
                let total = sizes.iter().try_fold(0_u64, |sum, size| sum.checked_add(*size));
                if sizes.len() as u64 != k || total != Some(n) {
                    return Err(LayoutError::SplitSizes { sizes: sizes.to_vec(), parts: k, numel: n });
                }
                let index = usize::try_from(r).expect("an index of a list");
                let start = sizes[..index].iter().sum();
                start..start + sizes[index]
            }
        })
    }

    /// Returns the sum of `sizes` if this rule splits a dim of that size into parts of exactly these sizes; otherwise
    /// `None`.
    pub fn total(&self, sizes: &[u64]) -> Option<u64> {
        let total = sizes.iter().try_fold(0_u64, |sum, size| sum.checked_add(*size))?;
        let k = sizes.len() as u64;
        let fits = |(r, size): (u64, &u64)| self.part(total, k, r).is_ok_and(|part| part.end - part.start == *size);
        (0..).zip(sizes).all(fits).then_some(total)
    }
}

/// Displays the name that the split rule has on the command line; explicit sizes are displayed as `3+1`.
impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chunk => f.pad("chunk"),
            Self::Balanced => f.pad("balanced"),
            Self::Makani => f.pad("makani"),
            Self::Sizes(sizes) => {
                let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
                f.pad(&sizes.join("+"))
            }
        }
    }
}

impl FromStr for Split {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        match text {
            "chunk" => Ok(Self::Chunk),
            "balanced" => Ok(Self::Balanced),
            "makani" => Ok(Self::Makani),
            sizes => {
                let sizes: Result<Vec<u64>, _> = sizes.split('+').map(|size| size.trim().parse()).collect();
                sizes.map(|sizes| Self::Sizes(sizes.into())).map_err(|_| LayoutError::SplitSpec { spec: text.into() })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(split: &Split, n: u64, k: u64) -> Vec<u64> {
        let parts: Vec<_> = (0..k).map(|r| split.part(n, k, r).unwrap()).collect();
        let mut end = 0;
        for part in &parts {
            assert_eq!(part.start.min(n), end, "{split}: {n} over {k}");
            end = part.end;
        }
        assert_eq!(end, n, "{split}: {n} over {k}");
        parts.into_iter().map(|part| part.end - part.start).collect()
    }

    #[test]
    fn sizes_equal_those_of_makani_and_numpy() {
        assert_eq!(sizes(&Split::Makani, 721, 4), [181, 181, 181, 178]);
        assert_eq!(sizes(&Split::Makani, 5, 4), [1, 1, 1, 2]);
        assert_eq!(sizes(&Split::Makani, 9, 8), [1, 1, 1, 1, 1, 1, 1, 2]);
        assert_eq!(sizes(&Split::Balanced, 721, 4), [181, 180, 180, 180]);
        assert_eq!(sizes(&Split::Balanced, 5, 4), [2, 1, 1, 1]);
        assert_eq!(sizes(&Split::Balanced, 3, 4), [1, 1, 1, 0]);
        assert_eq!(sizes(&Split::Makani, 3, 4), [0, 0, 0, 3]);
        assert_eq!(sizes(&Split::Sizes([4, 0, 1].into()), 5, 3), [4, 0, 1]);
        for split in [Split::Chunk, Split::Balanced, Split::Makani] {
            for n in 0..40 {
                for k in 1..9 {
                    let parts = sizes(&split, n, k);
                    assert_eq!(split.total(&parts), Some(n));
                    assert_eq!(split.to_string().parse(), Ok(split.clone()));
                }
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_an_error() {
        let split = Split::Sizes([2, 1].into());
        assert!(split.part(4, 2, 0).unwrap_err().to_string().contains("2+1"));
        assert!(split.part(3, 3, 0).is_err());
        assert!(Split::Sizes([u64::MAX, 1].into()).part(0, 2, 0).is_err());
        assert_eq!("2+1".parse(), Ok(split));
        assert_eq!(Split::Chunk.total(&[1, 2]), None);
        assert_eq!(Split::Balanced.total(&[3, 2, 2]), Some(7));
        assert!("even".parse::<Split>().unwrap_err().to_string().contains("balanced"));
        for n in [u64::MAX, u64::MAX - 3] {
            for split in [Split::Chunk, Split::Balanced, Split::Makani] {
                assert_eq!(split.part(n, 4, 3).unwrap().end, n);
            }
        }
    }
}
