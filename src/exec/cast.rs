//! Casts between floating-point dtypes, bit for bit as PyTorch's CPU `tensor.to(dtype)`.
//!
//! Counts bytes at its door and elements inside; elements are little-endian and need no alignment.
//!
//! Source of the rule: PyTorch 2.15.0, as `floats.rs` has it. Every cast goes through f32, so f64 to f16, bf16
//! and the 8-bit floats rounds twice.

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

/// The dtype of a tensor in the source, and the one in the target.
pub type DtypePair = (Dtype, Dtype);

/// What a cast met that its target does not hold, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LossCounts {
    /// Values beyond the largest finite one of the target, which became infinite, NaN or that largest one. Infinities
    /// count where the target has none.
    pub overflows: u64,
    /// NaNs of the source.
    pub nans: u64,
}

impl LossCounts {
    pub fn add(&mut self, other: Self) {
        self.overflows = self.overflows.saturating_add(other.overflows);
        self.nans = self.nans.saturating_add(other.nans);
    }

    /// Without those of some of the elements.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        let overflows = self.overflows.saturating_sub(other.overflows);
        Self { overflows, nans: self.nans.saturating_sub(other.nans) }
    }
}

impl Cast {
    /// `None` where the dtypes are equal or one of them is not castable.
    #[must_use]
    pub fn new(from: Dtype, to: Dtype) -> Option<Self> {
        use Dtype::{Bf16, F8E4m3fn, F8E4m3fnuz, F8E5m2, F8E5m2fnuz, F16, F32, F64};
        let possible = matches!(from, F64 | F32 | F16 | Bf16)
            && matches!(to, F64 | F32 | F16 | Bf16 | F8E4m3fn | F8E5m2 | F8E4m3fnuz | F8E5m2fnuz);
        (possible && from != to).then_some(Self { from, to })
    }

    #[must_use]
    pub fn from(&self) -> Dtype {
        self.from
    }

    #[must_use]
    pub fn to(&self) -> Dtype {
        self.to
    }

    /// Cast the elements of `source` to those of `target`.
    ///
    /// # Panics
    /// Where the two do not have the same number of elements.
    pub fn convert(&self, source: &[u8], target: &mut [u8]) -> LossCounts {
        match self.from {
            Dtype::F64 => self.load_with(source, target, load_f64),
            Dtype::F32 => self.load_with(source, target, |bytes| exact(u32::from_le_bytes(bytes))),
            Dtype::F16 => self.load_with(source, target, |bytes| exact(single_of_f16(bytes))),
            Dtype::Bf16 => self.load_with(source, target, |bytes| exact(single_of_bf16(bytes))),
            other => unreachable!("{other} is not cast from"),
        }
    }

    /// One loop for each pair of dtypes, in which everything but the values is known to the compiler.
    #[inline]
    fn load_with<const N: usize>(
        self,
        source: &[u8],
        target: &mut [u8],
        load: impl Fn([u8; N]) -> LoadedFloat,
    ) -> LossCounts {
        match self.to {
            Dtype::F64 => each(source, target, Infinity::Kept, load, store_f64),
            Dtype::F32 => each(source, target, Infinity::Kept, load, store_f32),
            Dtype::F16 => each(source, target, F16.infinity, load, |single| F16.store_16(single)),
            Dtype::Bf16 if self.from == Dtype::F16 => {
                each(source, target, BF16_OF_F16.infinity, load, |single| BF16_OF_F16.store_16(single))
            }
            Dtype::Bf16 => each(source, target, BF16.infinity, load, |single| BF16.store_16(single)),
            Dtype::F8E4m3fn => each(source, target, F8_E4M3FN.infinity, load, |single| F8_E4M3FN.store_8(single)),
            Dtype::F8E5m2 => each(source, target, F8_E5M2.infinity, load, |single| F8_E5M2.store_8(single)),
            Dtype::F8E4m3fnuz => each(source, target, F8_E4M3FNUZ.infinity, load, |single| F8_E4M3FNUZ.store_8(single)),
            Dtype::F8E5m2fnuz => each(source, target, F8_E5M2FNUZ.infinity, load, |single| F8_E5M2FNUZ.store_8(single)),
            other => unreachable!("{other} is not cast to"),
        }
    }
}

/// Elements that 32-bit counters are kept for: narrow counters let the loop be vectorised.
const BLOCK: usize = 4096;

#[inline]
fn each<const N: usize, const M: usize>(
    source: &[u8],
    target: &mut [u8],
    infinity: Infinity,
    load: impl Fn([u8; N]) -> LoadedFloat,
    store: impl Fn(u32) -> StoredFloat<M>,
) -> LossCounts {
    let (elements, rest) = source.as_chunks::<N>();
    let (slots, left) = target.as_chunks_mut::<M>();
    let fits = elements.len() == slots.len() && rest.is_empty() && left.is_empty();
    assert!(fits, "{} bytes do not become {}", source.len(), target.len());
    let mut counts = LossCounts::default();
    for (elements, slots) in zip(elements.chunks(BLOCK), slots.chunks_mut(BLOCK)) {
        let (mut overflows, mut nans) = (0_u32, 0_u32);
        for (element, slot) in zip(elements, slots) {
            let loaded = load(*element);
            let stored = store(loaded.single);
            *slot = stored.bytes;
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
    fn casts_are_between_different_floats() {
        assert_eq!(pairs().len(), 28);
        assert_eq!(Cast::new(Dtype::F32, Dtype::F32), None);
        for other in [Dtype::Bool, Dtype::I64, Dtype::C64, Dtype::F8E8m0fnu, Dtype::F4E2m1fnX2] {
            assert_eq!(Cast::new(Dtype::F32, other), None);
            assert_eq!(Cast::new(other, Dtype::F32), None);
        }
        assert_eq!(Cast::new(Dtype::F8E5m2, Dtype::F32), None);
    }

    #[test]
    fn hard_cases_are_as_in_pytorch() {
        let bytes = fixture("cases.safetensors");
        let cases = SafeTensors::deserialize(&bytes).unwrap();
        for cast in pairs() {
            let source = cases.tensor(cast.from().name()).unwrap();
            let wanted = cases.tensor(&format!("{}.{}", cast.from(), cast.to())).unwrap();
            // One byte off, so that nothing is aligned.
            let shifted: Vec<u8> = std::iter::once(0).chain(source.data().iter().copied()).collect();
            let (found, _) = converted(cast, &shifted[1..]);
            let size = usize::try_from(cast.from().itemsize()).unwrap();
            let sizes = (size, usize::try_from(cast.to().itemsize()).unwrap());
            let elements = source.data().chunks(sizes.0).zip(found.chunks(sizes.1).zip(wanted.data().chunks(sizes.1)));
            for (element, (found, wanted)) in elements {
                assert_eq!(found, wanted, "{} to {}: {element:02x?}", cast.from(), cast.to());
            }
        }
    }

    #[test]
    fn very_many_patterns_are_as_in_pytorch() {
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
    fn what_the_target_does_not_hold_is_counted() {
        let values = [1.0, 1e30, -1e30, f32::INFINITY, f32::NAN, 65_519.0, 65_520.0, -0.0, 448.0, 464.0, 465.0];
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        for (to, overflows) in [
            (Dtype::F64, 0),
            (Dtype::F16, 3),
            (Dtype::Bf16, 0),
            // Infinity, too, is something that these do not have.
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
    fn counts_and_values_go_on_over_many_blocks() {
        let source: Vec<u8> = (0..3 * BLOCK + 7).flat_map(|_| f32::MAX.to_le_bytes()).collect();
        let (found, counts) = converted(Cast::new(Dtype::F32, Dtype::F16).unwrap(), &source);
        assert_eq!(counts.overflows, 3 * BLOCK as u64 + 7);
        assert!(found.as_chunks::<2>().0.iter().all(|half| *half == 0x7c00_u16.to_le_bytes()));
    }
}
