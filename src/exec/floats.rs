//! Converts floats as bit patterns: reads each format as an f32, and rounds an f32 to each format. [Casts](super::cast)
//! and [reductions](super::reduce) use this module; `src/gpu/kernels/floats.cuh` converts floats on devices, with equal
//! results.
//!
//! Each function converts single elements, which are little-endian. Each rounding is to nearest, ties to even, and
//! subnormals are kept.
//!
//! The rules are those of PyTorch 2.15.0 on x86-64, measured over every 16-bit pattern and millions of 32- and 64-bit
//! patterns (`tests/fixtures/cast` has the results). Findings:
//!
//! - f8_e4m3fn has no infinity and saturates at 448; infinities also become 448. The `fnuz` dtypes have no negative
//!   zero and a single NaN, 0x80. Overflows and infinities also become this NaN.
//! - Tensors of 1, 3 and 10,000 elements give the same result for every value that is not NaN. For NaNs, this module
//!   always gives the result of long contiguous tensors: a cast from f32 or f64 to bf16 gives 0xffff, a cast from f16 to
//!   bf16 gives 0x7fc0, and a cast from f16 to f32 keeps the payload. Short and strided tensors have other NaNs in
//!   PyTorch (decision record 7 has a table).
//!
//! The `half` crate is not used, because its results depend on the processor: with f16c, its cast from f64 to f16
//! rounds twice, otherwise once. The crate also keeps the payload of bf16 NaNs.

/// A source element, converted to the bits of an f32.
#[derive(Clone, Copy)]
pub(crate) struct LoadedFloat {
    /// The bits of the f32.
    pub single: u32,
    /// True if the source element was finite. An f64 can be finite although its value as an f32 is infinite.
    pub was_finite: bool,
}

/// A target element, converted from an f32.
pub(crate) struct StoredFloat<const M: usize> {
    /// The bytes of the element.
    pub bytes: [u8; M],
    /// True if the value is beyond the largest finite value of the target dtype.
    pub beyond: bool,
}

/// Whether a target dtype can represent infinities.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Infinity {
    Kept,
    Lost,
}

/// The bits that a target dtype stores for a NaN.
#[derive(Clone, Copy)]
enum Nan {
    /// A quiet NaN with the sign and the upper payload bits of the source.
    Payload,
    /// A NaN with these bits and the sign of the source.
    Signed(u32),
    /// A NaN with these bits, whatever the sign of the source.
    Fixed(u32),
}

/// The bit format of a float that is narrower than f32: the widths of its parts, and the bits of its special values.
pub(crate) struct NarrowFloat {
    bits: u32,
    mantissa: u32,
    bias: u32,
    /// The bits of the smallest f32 that rounds to a value beyond the largest finite value.
    first_beyond: u32,
    /// The bits, without the sign, that are stored for `first_beyond` and all larger values.
    beyond: u32,
    /// Whether the dtype can represent infinities.
    pub infinity: Infinity,
    nan: Nan,
}

/// The format of IEEE 754 half precision.
pub(crate) const F16: NarrowFloat = NarrowFloat {
    bits: 16,
    mantissa: 10,
    bias: 15,
    first_beyond: 65_520_f32.to_bits(),
    beyond: 0x7c00,
    infinity: Infinity::Kept,
    nan: Nan::Payload,
};

/// The format of bfloat16 as the target of casts from f32 and f64.
pub(crate) const BF16: NarrowFloat = NarrowFloat {
    bits: 16,
    mantissa: 7,
    bias: 127,
    // The f32 that is half a step above the largest finite value, 0x7f7f.
    first_beyond: 0x7f7f_8000,
    beyond: 0x7f80,
    infinity: Infinity::Kept,
    nan: Nan::Fixed(0xffff),
};

/// The format of bfloat16 as the target of casts from f16. It differs from [`BF16`] in the bits of NaN: 0x7fc0, as in
/// PyTorch.
pub(crate) const BF16_OF_F16: NarrowFloat = NarrowFloat { nan: Nan::Fixed(0x7fc0), ..BF16 };

/// The format of f8_e4m3fn, which has no infinities and saturates.
pub(crate) const F8_E4M3FN: NarrowFloat = NarrowFloat {
    bits: 8,
    mantissa: 3,
    bias: 7,
    // 464 is halfway between 448 and 480, and the dtype cannot represent 480. The tie goes to 448, whose last bit is
    // even.
    first_beyond: 464_f32.to_bits() + 1,
    beyond: 0x7e,
    infinity: Infinity::Lost,
    nan: Nan::Signed(0x7f),
};

/// The format of f8_e5m2, which has infinities.
pub(crate) const F8_E5M2: NarrowFloat = NarrowFloat {
    bits: 8,
    mantissa: 2,
    bias: 15,
    first_beyond: 61_440_f32.to_bits(),
    beyond: 0x7c,
    infinity: Infinity::Kept,
    nan: Nan::Signed(0x7f),
};

/// The format of f8_e4m3fnuz, which has no infinities and no negative zero.
pub(crate) const F8_E4M3FNUZ: NarrowFloat = NarrowFloat {
    bits: 8,
    mantissa: 3,
    bias: 8,
    first_beyond: 248_f32.to_bits(),
    beyond: FNUZ_NAN,
    infinity: Infinity::Lost,
    nan: Nan::Fixed(FNUZ_NAN),
};

/// The format of f8_e5m2fnuz, which has no infinities and no negative zero.
pub(crate) const F8_E5M2FNUZ: NarrowFloat = NarrowFloat {
    bits: 8,
    mantissa: 2,
    bias: 16,
    first_beyond: 61_440_f32.to_bits(),
    beyond: FNUZ_NAN,
    infinity: Infinity::Lost,
    nan: Nan::Fixed(FNUZ_NAN),
};

/// The bits of the only NaN of the `fnuz` dtypes. In other dtypes, these are the bits of negative zero.
const FNUZ_NAN: u32 = 0x80;

impl NarrowFloat {
    /// Rounds the bits of an f32 to this format. The second value is true if the value is beyond the largest finite
    /// value. The function computes both the result for a normal number and the result for a subnormal number and
    /// chooses one, so that loops have no branches.
    #[inline]
    fn round(&self, single: u32) -> (u32, bool) {
        let value = magnitude(single);
        let sign = (single >> 31) << (self.bits - 1);
        let drop = 23 - self.mantissa;
        // Normal results: adds just under half a step, or half a step if the last bit kept is odd. A carry into the
        // exponent gives the correct result.
        let carried = value.wrapping_add((1 << (drop - 1)) - 1 + ((value >> drop) & 1));
        let normal = (carried >> drop).wrapping_sub((127 - self.bias) << self.mantissa);
        // Subnormal results: adds a float whose last bit is worth the smallest subnormal, so that the processor rounds
        // at that bit.
        let anchor = (127 + 24 - self.bias - self.mantissa) << 23;
        let sum = f32::from_bits(value) + f32::from_bits(anchor);
        let subnormal = sum.to_bits().wrapping_sub(anchor);
        // bf16 has the same exponents as f32, and therefore the same subnormals.
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

    /// Rounds the bits of an f32 to this format, and returns the 2 bytes of the result.
    #[inline]
    pub fn store_16(&self, single: u32) -> StoredFloat<2> {
        let (bits, beyond) = self.round(single);
        let [low, high, ..] = bits.to_le_bytes();
        StoredFloat { bytes: [low, high], beyond }
    }

    /// Rounds the bits of an f32 to this format, and returns the byte of the result.
    #[inline]
    pub fn store_8(&self, single: u32) -> StoredFloat<1> {
        let (bits, beyond) = self.round(single);
        let [low, ..] = bits.to_le_bytes();
        StoredFloat { bytes: [low], beyond }
    }
}

/// The bits of infinity as an f32. NaNs have larger bits.
pub(crate) const INFINITY: u32 = 0x7f80_0000;

/// Returns the bits of an f32 with the sign bit set to 0.
#[inline]
pub(crate) fn magnitude(single: u32) -> u32 {
    single & 0x7fff_ffff
}

/// Returns the bits of an f32 as a source element that was not rounded. An f16 or bf16 must be converted to an f32
/// first.
#[inline]
pub(crate) fn exact(single: u32) -> LoadedFloat {
    LoadedFloat { single, was_finite: magnitude(single) < INFINITY }
}

/// Loads an f64 and rounds it to f32. A cast to a narrower float rounds a second time.
#[inline]
pub(crate) fn load_f64(bytes: [u8; 8]) -> LoadedFloat {
    const INFINITY_64: u64 = 0x7ff << 52;
    let bits = u64::from_le_bytes(bytes);
    let value = bits & !(1 << 63);
    #[expect(clippy::cast_possible_truncation, reason = "the value is rounded on purpose")]
    let rounded = (f64::from_bits(bits) as f32).to_bits();
    // Rust does not define the payload of a NaN after a cast, so this code keeps the upper payload bits, as PyTorch
    // does.
    #[expect(clippy::cast_possible_truncation, reason = "the upper bits are cut away")]
    let nan = ((bits >> 32) as u32 & 0x8000_0000) | 0x7fc0_0000 | ((bits >> 29) as u32 & 0x003f_ffff);
    LoadedFloat { single: if value > INFINITY_64 { nan } else { rounded }, was_finite: value < INFINITY_64 }
}

/// Converts a bf16 to the bits of an f32, exactly.
#[inline]
pub(crate) fn single_of_bf16(bytes: [u8; 2]) -> u32 {
    u32::from(u16::from_le_bytes(bytes)) << 16
}

/// Converts an f16 to the bits of an f32. No value changes, and NaNs keep sign and payload; a signalling NaN becomes
/// quiet.
#[inline]
pub(crate) fn single_of_f16(bytes: [u8; 2]) -> u32 {
    const LEAST_NORMAL: u32 = 113 << 23;
    let bits = u32::from(u16::from_le_bytes(bytes));
    let sign = (bits & 0x8000) << 16;
    let shifted = (bits & 0x7fff) << 13;
    let normal = shifted + (112 << 23);
    // 2^-14 with the mantissa of the subnormal is too large by 2^-14.
    let subnormal = (f32::from_bits(shifted + LEAST_NORMAL) - f32::from_bits(LEAST_NORMAL)).to_bits();
    let finite = if shifted < 1 << 23 { subnormal } else { normal };
    // The largest exponent means infinity or NaN; NaNs become quiet.
    let is_nan = shifted > 31 << 23;
    let special = shifted | INFINITY | (u32::from(is_nan) << 22);
    sign | if shifted >= 31 << 23 { special } else { finite }
}

/// Converts an f8_e4m3fn to the bits of an f32, exactly. A NaN keeps sign and payload.
#[inline]
pub(crate) fn single_of_f8_e4m3fn(bits: u8) -> u32 {
    let (sign, value) = (u32::from(bits & 0x80) << 24, u32::from(bits & 0x7f) << 20);
    // The exponent of `value` is too small by 120. The product is exact, also if `value` is a subnormal.
    let finite = (f32::from_bits(value) * f32::from_bits((127 + 120) << 23)).to_bits();
    sign | if value == 0x7f << 20 { value | INFINITY } else { finite }
}

/// Converts an f8_e5m2 to the bits of an f32, exactly. A NaN keeps sign and payload, and becomes quiet.
#[inline]
pub(crate) fn single_of_f8_e5m2(bits: u8) -> u32 {
    let (sign, value) = (u32::from(bits & 0x80) << 24, u32::from(bits & 0x7f) << 21);
    let finite = (f32::from_bits(value) * f32::from_bits((127 + 112) << 23)).to_bits();
    let is_nan = value > 0x7c << 21;
    let special = value | INFINITY | (u32::from(is_nan) << 22);
    sign | if value >= 0x7c << 21 { special } else { finite }
}

/// Converts the exponent of a power of two, which is larger by 127 than the exponent, to the bits of an f32. 2^128 is infinite.
#[inline]
pub(crate) fn single_of_exponent(exponent: u8) -> u32 {
    // 2^-127 is a subnormal f32.
    if exponent == 0 { 1 << 22 } else { u32::from(exponent) << 23 }
}

/// Converts an f8_e8m0fnu to the bits of an f32: a power of two, or NaN for the largest exponent.
#[inline]
pub(crate) fn single_of_f8_e8m0fnu(bits: u8) -> u32 {
    if bits == u8::MAX { 0x7fc0_0000 } else { single_of_exponent(bits) }
}

/// Stores an f32 without rounding.
#[inline]
pub(crate) fn store_f32(single: u32) -> StoredFloat<4> {
    StoredFloat { bytes: single.to_le_bytes(), beyond: magnitude(single) == INFINITY }
}

/// Converts an f32 to f64. No value changes, and NaNs keep sign and payload; a signalling NaN becomes quiet.
#[inline]
pub(crate) fn store_f64(single: u32) -> StoredFloat<8> {
    let exact = f64::from(f32::from_bits(single)).to_bits();
    let value = u64::from(magnitude(single));
    let nan = (u64::from(single >> 31) << 63) | (0x7ff8 << 48) | (value & 0x007f_ffff) << 29;
    let bits = if magnitude(single) > INFINITY { nan } else { exact };
    StoredFloat { bytes: bits.to_le_bytes(), beyond: magnitude(single) == INFINITY }
}
