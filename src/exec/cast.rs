//! Casts between floating-point dtypes, bit for bit as PyTorch's CPU `tensor.to(dtype)`.
//!
//! Counts bytes at its door and elements inside; elements are little-endian and need no alignment.
//!
//! Source of the rule: PyTorch 2.15.0 on x86-64, measured over every 16-bit pattern and millions of 32- and 64-bit ones
//! (`tests/fixtures/cast` keeps the answers). What was found:
//!
//! - Every cast goes through f32, so f64 to f16, bf16 and the 8-bit floats rounds twice. Each step rounds to nearest,
//!   ties to even; subnormals are kept.
//! - f8_e4m3fn has no infinity and saturates at 448, infinities too. The `fnuz` dtypes have one NaN, 0x80, which is also
//!   what overflows and infinities become, and no negative zero.
//! - Tensors of 1, 3 and 10,000 elements agree in every value, and in every NaN but these: a contiguous tensor long
//!   enough for vector instructions gives bf16 NaNs as 0xffff, whatever sign and payload, and widens f16 NaNs with their
//!   payload; the scalar code (strided tensors, f64 to bf16 and f16 to f32 of a few elements and at the end of many)
//!   gives 0x7fc0 and 0x7fffffff. f16 to bf16 gives 0x7fc0 at any length. Here it is always what long contiguous
//!   tensors give, and the same on every machine.
//!
//! Rejected: the `half` crate. Where the processor has f16c its f64 to f16 rounds twice, elsewhere once, and it keeps
//! the payload of bf16 NaNs.

use std::iter::zip;

use crate::catalog::Dtype;

/// A cast that changes the dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cast {
    from: Dtype,
    to: Dtype,
}

/// What a cast met that its target does not hold, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Values beyond the largest finite one of the target, which became infinite, NaN or that largest one. Infinities
    /// count where the target has none.
    pub overflows: u64,
    /// NaNs of the source.
    pub nans: u64,
}

impl Counts {
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
    pub fn convert(&self, source: &[u8], target: &mut [u8]) -> Counts {
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
    fn load_with<const N: usize>(self, source: &[u8], target: &mut [u8], load: impl Fn([u8; N]) -> Loaded) -> Counts {
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

/// An element of the source as the bits of an f32.
#[derive(Clone, Copy)]
struct Loaded {
    single: u32,
    /// Finite before anything was rounded.
    was_finite: bool,
}

/// What a target stores for the bits of an f32.
struct Stored<const M: usize> {
    bytes: [u8; M],
    /// The value is beyond the largest finite one of the target.
    beyond: bool,
}

/// Elements that 32-bit counters are kept for: narrow counters let the loop be vectorised.
const BLOCK: usize = 4096;

#[inline]
fn each<const N: usize, const M: usize>(
    source: &[u8],
    target: &mut [u8],
    infinity: Infinity,
    load: impl Fn([u8; N]) -> Loaded,
    store: impl Fn(u32) -> Stored<M>,
) -> Counts {
    let (elements, rest) = source.as_chunks::<N>();
    let (slots, left) = target.as_chunks_mut::<M>();
    let fits = elements.len() == slots.len() && rest.is_empty() && left.is_empty();
    assert!(fits, "{} bytes do not become {}", source.len(), target.len());
    let mut counts = Counts::default();
    for (elements, slots) in zip(elements.chunks(BLOCK), slots.chunks_mut(BLOCK)) {
        let (mut overflows, mut nans) = (0_u32, 0_u32);
        for (element, slot) in zip(elements, slots) {
            let loaded = load(*element);
            let stored = store(loaded.single);
            *slot = stored.bytes;
            overflows += u32::from(stored.beyond && (loaded.was_finite || infinity == Infinity::Lost));
            nans += u32::from(magnitude(loaded.single) > INFINITY);
        }
        counts.add(Counts { overflows: overflows.into(), nans: nans.into() });
    }
    counts
}

/// Whether a target has infinities.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Infinity {
    Kept,
    Lost,
}

/// The bits of a NaN in a target.
#[derive(Clone, Copy)]
enum Nan {
    /// Quiet, with sign and what fits of the payload.
    Payload,
    /// These bits with the sign.
    Signed(u32),
    /// These bits.
    Fixed(u32),
}

/// How values lie in the bits of a float that is narrower than f32: sign, exponent, `mantissa` bits.
struct Narrow {
    bits: u32,
    mantissa: u32,
    bias: u32,
    /// The bits of the least f32 that rounds beyond the largest finite value.
    first_beyond: u32,
    /// What is stored for it and all above, without the sign.
    beyond: u32,
    infinity: Infinity,
    nan: Nan,
}

const F16: Narrow = Narrow {
    bits: 16,
    mantissa: 10,
    bias: 15,
    first_beyond: 65_520_f32.to_bits(),
    beyond: 0x7c00,
    infinity: Infinity::Kept,
    nan: Nan::Payload,
};

const BF16: Narrow = Narrow {
    bits: 16,
    mantissa: 7,
    bias: 127,
    // Half a step above the largest finite value, 0x7f7f.
    first_beyond: 0x7f7f_8000,
    beyond: 0x7f80,
    infinity: Infinity::Kept,
    nan: Nan::Fixed(0xffff),
};

const BF16_OF_F16: Narrow = Narrow { nan: Nan::Fixed(0x7fc0), ..BF16 };

const F8_E4M3FN: Narrow = Narrow {
    bits: 8,
    mantissa: 3,
    bias: 7,
    // 464 is the tie of 448 and what would be 480; it goes to 448, which is even.
    first_beyond: 464_f32.to_bits() + 1,
    beyond: 0x7e,
    infinity: Infinity::Lost,
    nan: Nan::Signed(0x7f),
};

const F8_E5M2: Narrow = Narrow {
    bits: 8,
    mantissa: 2,
    bias: 15,
    first_beyond: 61_440_f32.to_bits(),
    beyond: 0x7c,
    infinity: Infinity::Kept,
    nan: Nan::Signed(0x7f),
};

const F8_E4M3FNUZ: Narrow = Narrow {
    bits: 8,
    mantissa: 3,
    bias: 8,
    first_beyond: 248_f32.to_bits(),
    beyond: FNUZ_NAN,
    infinity: Infinity::Lost,
    nan: Nan::Fixed(FNUZ_NAN),
};

const F8_E5M2FNUZ: Narrow = Narrow {
    bits: 8,
    mantissa: 2,
    bias: 16,
    first_beyond: 61_440_f32.to_bits(),
    beyond: FNUZ_NAN,
    infinity: Infinity::Lost,
    nan: Nan::Fixed(FNUZ_NAN),
};

/// The one NaN of the `fnuz` dtypes takes the bits that would be negative zero.
const FNUZ_NAN: u32 = 0x80;

impl Narrow {
    /// Round the bits of an f32 to this format; true where the value is beyond it. Both roundings are computed and one
    /// is chosen, so that loops have no branches.
    #[inline]
    fn round(&self, single: u32) -> (u32, bool) {
        let value = magnitude(single);
        let sign = (single >> 31) << (self.bits - 1);
        let drop = 23 - self.mantissa;
        // Normal: add just under half a step, or half a step where the last bit kept is odd; carries go up into the
        // exponent as they should.
        let carried = value.wrapping_add((1 << (drop - 1)) - 1 + ((value >> drop) & 1));
        let normal = (carried >> drop).wrapping_sub((127 - self.bias) << self.mantissa);
        // Subnormal: in the sum with a float whose last bit is worth the least subnormal, the processor rounds at it.
        let anchor = (127 + 24 - self.bias - self.mantissa) << 23;
        let sum = f32::from_bits(value) + f32::from_bits(anchor);
        let subnormal = sum.to_bits().wrapping_sub(anchor);
        // The exponents of bf16 are those of f32, and so are its subnormals.
        let least_normal = if self.bias == 127 { 0 } else { (128 - self.bias) << 23 };
        let finite = if value < least_normal { subnormal } else { normal };
        let beyond = value >= self.first_beyond;
        let unsigned = if beyond { self.beyond } else { finite };
        let signed = if unsigned == 0 && self.beyond == FNUZ_NAN { 0 } else { unsigned | sign };
        let nan = match self.nan {
            Nan::Payload => {
                let quiet = (1 << (self.bits - 1)) - (1 << (self.mantissa - 1));
                sign | quiet | ((value >> drop) & ((1 << self.mantissa) - 1))
            }
            Nan::Signed(bits) => bits | sign,
            Nan::Fixed(bits) => bits,
        };
        let is_nan = value > INFINITY;
        (if is_nan { nan } else { signed }, beyond && !is_nan)
    }

    #[inline]
    fn store_16(&self, single: u32) -> Stored<2> {
        let (bits, beyond) = self.round(single);
        let [low, high, ..] = bits.to_le_bytes();
        Stored { bytes: [low, high], beyond }
    }

    #[inline]
    fn store_8(&self, single: u32) -> Stored<1> {
        let (bits, beyond) = self.round(single);
        let [low, ..] = bits.to_le_bytes();
        Stored { bytes: [low], beyond }
    }
}

/// The bits of infinity as an f32; those of NaNs are above.
const INFINITY: u32 = 0x7f80_0000;

#[inline]
fn magnitude(single: u32) -> u32 {
    single & 0x7fff_ffff
}

/// An f32, f16 or bf16 as it is.
#[inline]
fn exact(single: u32) -> Loaded {
    Loaded { single, was_finite: magnitude(single) < INFINITY }
}

/// Rounded once here, and a second time where it goes on to a narrower float.
#[inline]
fn load_f64(bytes: [u8; 8]) -> Loaded {
    const INFINITY_64: u64 = 0x7ff << 52;
    let bits = u64::from_le_bytes(bytes);
    let value = bits & !(1 << 63);
    #[expect(clippy::cast_possible_truncation, reason = "rounding is what is wanted")]
    let rounded = (f64::from_bits(bits) as f32).to_bits();
    // Rust leaves the payload of a NaN open; PyTorch keeps its upper bits.
    #[expect(clippy::cast_possible_truncation, reason = "the upper bits are cut away")]
    let nan = ((bits >> 32) as u32 & 0x8000_0000) | 0x7fc0_0000 | ((bits >> 29) as u32 & 0x003f_ffff);
    Loaded { single: if value > INFINITY_64 { nan } else { rounded }, was_finite: value < INFINITY_64 }
}

#[inline]
pub(super) fn single_of_bf16(bytes: [u8; 2]) -> u32 {
    u32::from(u16::from_le_bytes(bytes)) << 16
}

#[inline]
pub(super) fn single_of_f16(bytes: [u8; 2]) -> u32 {
    const LEAST_NORMAL: u32 = 113 << 23;
    let bits = u32::from(u16::from_le_bytes(bytes));
    let sign = (bits & 0x8000) << 16;
    let shifted = (bits & 0x7fff) << 13;
    let normal = shifted + (112 << 23);
    // 2^-14 with the mantissa of the subnormal is 2^-14 too much.
    let subnormal = (f32::from_bits(shifted + LEAST_NORMAL) - f32::from_bits(LEAST_NORMAL)).to_bits();
    let finite = if shifted < 1 << 23 { subnormal } else { normal };
    // The largest exponent stands for infinity and NaN, which come out quiet.
    let is_nan = shifted > 31 << 23;
    let special = shifted | INFINITY | (u32::from(is_nan) << 22);
    sign | if shifted >= 31 << 23 { special } else { finite }
}

#[inline]
fn store_f32(single: u32) -> Stored<4> {
    Stored { bytes: single.to_le_bytes(), beyond: magnitude(single) == INFINITY }
}

#[inline]
fn store_f64(single: u32) -> Stored<8> {
    let exact = f64::from(f32::from_bits(single)).to_bits();
    let value = u64::from(magnitude(single));
    let nan = (u64::from(single >> 31) << 63) | (0x7ff8 << 48) | (value & 0x007f_ffff) << 29;
    let bits = if magnitude(single) > INFINITY { nan } else { exact };
    Stored { bytes: bits.to_le_bytes(), beyond: magnitude(single) == INFINITY }
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

    fn converted(cast: Cast, source: &[u8]) -> (Vec<u8>, Counts) {
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
            assert_eq!(counts, Counts { overflows, nans: 1 }, "{to}");
        }
        let doubles: Vec<u8> =
            [1e300, f64::INFINITY, f64::NAN, 1.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let (_, counts) = converted(Cast::new(Dtype::F64, Dtype::F32).unwrap(), &doubles);
        assert_eq!(counts, Counts { overflows: 1, nans: 1 });
    }

    #[test]
    fn counts_and_values_go_on_over_many_blocks() {
        let source: Vec<u8> = (0..3 * BLOCK + 7).flat_map(|_| f32::MAX.to_le_bytes()).collect();
        let (found, counts) = converted(Cast::new(Dtype::F32, Dtype::F16).unwrap(), &source);
        assert_eq!(counts.overflows, 3 * BLOCK as u64 + 7);
        assert!(found.as_chunks::<2>().0.iter().all(|half| *half == 0x7c00_u16.to_le_bytes()));
    }
}
