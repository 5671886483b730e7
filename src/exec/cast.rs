//! Casts between floating-point dtypes, bit for bit equal to PyTorch's CPU `tensor.to(dtype)`.
//!
//! Input and output are bytes; the loops count elements. Elements are little-endian and need no alignment.
//!
//! The rules of PyTorch 2.15.0 apply; see `floats.rs`. Every cast goes through f32, so a cast of f64 to f16, bf16 or an
//! 8-bit float rounds twice.

use std::iter::zip;

use super::floats::{
    BF16, BF16_OF_F16, F8_E4M3FN, F8_E4M3FNUZ, F8_E5M2, F8_E5M2FNUZ, F16, INFINITY, Infinity, LoadedFloat, StoredFloat,
    exact, load_f64, magnitude, single_of_bf16, single_of_f16, store_f32, store_f64,
};
use crate::catalog::Dtype;

/// A cast that changes the dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cast {
    from: Dtype,
    to: Dtype,
}

/// The dtype of a tensor in the source, and its dtype in the target.
pub type DtypePair = (Dtype, Dtype);

/// The numbers of elements for which a cast may give a surprising value: overflows and NaNs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LossCounts {
    /// The number of values beyond the largest finite value of the target dtype. The cast makes them infinite, NaN or
    /// that largest value. If the target dtype has no infinity, infinities also count as overflows.
    pub overflows: u64,
    /// The number of elements that are NaN before the cast.
    pub nans: u64,
}

impl LossCounts {
    /// Adds the counts in `other` to these counts.
    pub fn add(&mut self, other: Self) {
        self.overflows = self.overflows.saturating_add(other.overflows);
        self.nans = self.nans.saturating_add(other.nans);
    }

    /// Returns these counts minus `other`. `other` must be the counts of some of the elements that these counts are
    /// about.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        let overflows = self.overflows.saturating_sub(other.overflows);
        Self { overflows, nans: self.nans.saturating_sub(other.nans) }
    }
}

impl Cast {
    /// Returns the cast between two dtypes, or `None` if the dtypes are equal or if one of them cannot be cast.
    pub fn new(from: Dtype, to: Dtype) -> Option<Self> {
        use Dtype::{Bf16, F8E4m3fn, F8E4m3fnuz, F8E5m2, F8E5m2fnuz, F16, F32, F64};
        let possible = matches!(from, F64 | F32 | F16 | Bf16)
            && matches!(to, F64 | F32 | F16 | Bf16 | F8E4m3fn | F8E5m2 | F8E4m3fnuz | F8E5m2fnuz);
        (possible && from != to).then_some(Self { from, to })
    }

    /// Returns the source dtype.
    pub fn from(&self) -> Dtype {
        self.from
    }

    /// Returns the target dtype.
    pub fn to(&self) -> Dtype {
        self.to
    }

    /// Casts the elements of `source` into `target`.
    ///
    /// # Panics
    /// If `source` and `target` do not have the same number of elements.
    pub fn convert(&self, source: &[u8], target: &mut [u8]) -> LossCounts {
        match self.from {
            Dtype::F64 => self.load_with(source, target, load_f64),
            Dtype::F32 => self.load_with(source, target, |bytes| exact(u32::from_le_bytes(bytes))),
            Dtype::F16 => self.load_with(source, target, |bytes| exact(single_of_f16(bytes))),
            Dtype::Bf16 => self.load_with(source, target, |bytes| exact(single_of_bf16(bytes))),
            other => unreachable!("no cast from {other}"),
        }
    }

    /// Selects the loop for the target dtype. Each pair of dtypes has its own compiled loop, so that the loop contains
    /// no choice between dtypes.
    #[inline]
    fn load_with<const N: usize>(
        self,
        source: &[u8],
        target: &mut [u8],
        load: impl Fn([u8; N]) -> LoadedFloat,
    ) -> LossCounts {
        match self.to {
            Dtype::F64 => convert_elements(source, target, Infinity::Kept, load, store_f64),
            Dtype::F32 => convert_elements(source, target, Infinity::Kept, load, store_f32),
            Dtype::F16 => convert_elements(source, target, F16.infinity, load, |single| F16.store_16(single)),
            Dtype::Bf16 if self.from == Dtype::F16 => {
                convert_elements(source, target, BF16_OF_F16.infinity, load, |single| BF16_OF_F16.store_16(single))
            }
            Dtype::Bf16 => convert_elements(source, target, BF16.infinity, load, |single| BF16.store_16(single)),
            Dtype::F8E4m3fn => {
                convert_elements(source, target, F8_E4M3FN.infinity, load, |single| F8_E4M3FN.store_8(single))
            }
            Dtype::F8E5m2 => convert_elements(source, target, F8_E5M2.infinity, load, |single| F8_E5M2.store_8(single)),
            Dtype::F8E4m3fnuz => {
                convert_elements(source, target, F8_E4M3FNUZ.infinity, load, |single| F8_E4M3FNUZ.store_8(single))
            }
            Dtype::F8E5m2fnuz => {
                convert_elements(source, target, F8_E5M2FNUZ.infinity, load, |single| F8_E5M2FNUZ.store_8(single))
            }
            other => unreachable!("no cast to {other}"),
        }
    }
}

/// The number of elements that are counted in 32-bit counters before the counts are added up. Narrow counters let the
/// compiler vectorise the loop.
const BLOCK: usize = 4096;

/// Casts each element, and returns the counts of overflows and NaNs.
#[inline]
fn convert_elements<const N: usize, const M: usize>(
    source: &[u8],
    target: &mut [u8],
    infinity: Infinity,
    load: impl Fn([u8; N]) -> LoadedFloat,
    store: impl Fn(u32) -> StoredFloat<M>,
) -> LossCounts {
    let (elements, rest) = source.as_chunks::<N>();
    let (outputs, left) = target.as_chunks_mut::<M>();
    let fits = elements.len() == outputs.len() && rest.is_empty() && left.is_empty();
    assert!(fits, "cannot cast {} bytes into {} bytes", source.len(), target.len());
    let mut counts = LossCounts::default();
    for (elements, outputs) in zip(elements.chunks(BLOCK), outputs.chunks_mut(BLOCK)) {
        let (mut overflows, mut nans) = (0_u32, 0_u32);
        for (element, output) in zip(elements, outputs) {
            let loaded = load(*element);
            let stored = store(loaded.single);
            *output = stored.bytes;
            overflows += u32::from(stored.beyond && (loaded.was_finite || infinity == Infinity::Lost));
            nans += u32::from(magnitude(loaded.single) > INFINITY);
        }
        counts.add(LossCounts { overflows: overflows.into(), nans: nans.into() });
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    fn pairs() -> Vec<Cast> {
        let all = Dtype::CAST_TARGETS.iter().flat_map(|from| Dtype::CAST_TARGETS.iter().map(move |to| (*from, *to)));
        all.filter_map(|(from, to)| Cast::new(from, to)).collect()
    }

    fn fixture(name: &str) -> Vec<u8> {
        std::fs::read(format!("{}/tests/fixtures/cast/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    fn converted(cast: Cast, source: &[u8]) -> (Vec<u8>, LossCounts) {
        let numel = source.len() / usize::try_from(cast.from().itemsize()).unwrap();
        let mut target = vec![0x55; numel * usize::try_from(cast.to().itemsize()).unwrap()];
        let counts = cast.convert(source, &mut target);
        (target, counts)
    }

    #[test]
    fn only_two_different_float_dtypes_have_a_cast() {
        assert_eq!(pairs().len(), 28);
        assert_eq!(Cast::new(Dtype::F32, Dtype::F32), None);
        for other in [Dtype::Bool, Dtype::I64, Dtype::C64, Dtype::F8E8m0fnu, Dtype::F4E2m1fnX2] {
            assert_eq!(Cast::new(Dtype::F32, other), None);
            assert_eq!(Cast::new(other, Dtype::F32), None);
        }
        assert_eq!(Cast::new(Dtype::F8E5m2, Dtype::F32), None);
    }

    #[test]
    fn corner_cases_equal_pytorch() {
        let bytes = fixture("cases.safetensors");
        let cases = SafeTensors::deserialize(&bytes).unwrap();
        for cast in pairs() {
            let source = cases.tensor(cast.from().name()).unwrap();
            let expected = cases.tensor(&format!("{}.{}", cast.from(), cast.to())).unwrap();
            // The data is shifted by one byte, so that no element is aligned.
            let shifted: Vec<u8> = std::iter::once(0).chain(source.data().iter().copied()).collect();
            let (found, _) = converted(cast, &shifted[1..]);
            let size = usize::try_from(cast.from().itemsize()).unwrap();
            let sizes = (size, usize::try_from(cast.to().itemsize()).unwrap());
            let elements =
                source.data().chunks(sizes.0).zip(found.chunks(sizes.1).zip(expected.data().chunks(sizes.1)));
            for (element, (found, expected)) in elements {
                assert_eq!(found, expected, "{} to {}: {element:02x?}", cast.from(), cast.to());
            }
        }
    }

    #[test]
    fn dense_bit_patterns_equal_pytorch() {
        let sums: serde_json::Value = serde_json::from_slice(&fixture("sums.json")).unwrap();
        let dense = sums["dense"].as_u64().unwrap();
        for cast in pairs() {
            let source: Vec<u8> = match cast.from() {
                Dtype::F64 => {
                    (0..dense).flat_map(|i| i.wrapping_mul(11_400_714_819_323_198_485).to_le_bytes()).collect()
                }
                Dtype::F32 => {
                    (0..dense).flat_map(|i| i.wrapping_mul(2_654_435_769).to_le_bytes().into_iter().take(4)).collect()
                }
                _ => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
            };
            let found = crc32fast::hash(&converted(cast, &source).0);
            let pair = format!("{}.{}", cast.from(), cast.to());
            assert_eq!(u64::from(found), sums["crc32"][&pair].as_u64().unwrap(), "{pair}");
        }
    }

    #[test]
    fn values_that_the_target_cannot_represent_are_counted() {
        let values = [1.0, 1e30, -1e30, f32::INFINITY, f32::NAN, 65_519.0, 65_520.0, -0.0, 448.0, 464.0, 465.0];
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        for (to, overflows) in [
            (Dtype::F64, 0),
            (Dtype::F16, 3),
            (Dtype::Bf16, 0),
            // These dtypes cannot represent infinity.
            (Dtype::F8E4m3fn, 6),
            (Dtype::F8E4m3fnuz, 8),
            (Dtype::F8E5m2, 4),
            (Dtype::F8E5m2fnuz, 5),
        ] {
            let (_, counts) = converted(Cast::new(Dtype::F32, to).unwrap(), &bytes);
            assert_eq!(counts, LossCounts { overflows, nans: 1 }, "{to}");
        }
        let doubles: Vec<u8> =
            [1e300, f64::INFINITY, f64::NAN, 1.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let (_, counts) = converted(Cast::new(Dtype::F64, Dtype::F32).unwrap(), &doubles);
        assert_eq!(counts, LossCounts { overflows: 1, nans: 1 });
    }

    #[test]
    fn input_of_many_blocks_is_cast_and_counted() {
        let source: Vec<u8> = (0..3 * BLOCK + 7).flat_map(|_| f32::MAX.to_le_bytes()).collect();
        let (found, counts) = converted(Cast::new(Dtype::F32, Dtype::F16).unwrap(), &source);
        assert_eq!(counts.overflows, 3 * BLOCK as u64 + 7);
        assert!(found.as_chunks::<2>().0.iter().all(|half| *half == 0x7c00_u16.to_le_bytes()));
    }
}
