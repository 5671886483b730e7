//! Converts floats as bit patterns: reads each format as an f32, and rounds an f32 to each format. [Casts](super::cast)
//! and [reductions](super::reduce) use it; `src/gpu/kernels/floats.cuh` does the same on devices.
//!
//! Each function converts single elements, which are little-endian. Each rounding is to nearest, ties to even, and
//! subnormals are kept.
//!
//! The rules are those of PyTorch 2.15.0 on x86-64, measured over every 16-bit pattern and millions of 32- and 64-bit
//! patterns (`tests/fixtures/cast` has the results). Findings:
//!
//! - f8_e4m3fn has no infinity and saturates at 448; infinities also become 448. The `fnuz` dtypes have no negative
//!   zero and a single NaN, 0x80. Overflows and infinities also become this NaN.
//! - Tensors of 1, 3 and 10,000 elements give the same result for every value that is not NaN. NaNs differ. PyTorch's
//!   vector code (contiguous tensors that are long enough) gives bf16 NaNs as 0xffff, whatever the sign and payload,
//!   and widens f16 NaNs with their payload. PyTorch's scalar code (strided tensors; for f64 to bf16 and f16 to f32
//!   also short tensors and the last elements of long ones) gives 0x7fc0 and 0x7fffffff. A cast from f16 to bf16 gives
//!   0x7fc0 at any length. This module always gives the results of long contiguous tensors, on every machine.
//!
//! The `half` crate is not used, because its results depend on the processor: with f16c, its cast from f64 to f16
//! rounds twice, otherwise once. It also keeps the payload of bf16 NaNs.

/// A source element as the bits of an f32.
#[derive(Clone, Copy)]
pub(crate) struct LoadedFloat {
    /// Bits of the f32.
    pub single: u32,
    /// True if the element was finite before rounding.
    pub was_finite: bool,
}

/// A target element, converted from an f32.
pub(crate) struct StoredFloat<const M: usize> {
    /// The bytes of the element.
    pub bytes: [u8; M],
    /// True if the value is beyond the largest finite value of the target.
    pub beyond: bool,
}

/// Support of a target dtype for infinities.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Infinity {
    Kept,
    Lost,
}

/// The bits of NaN in a target dtype.
#[derive(Clone, Copy)]
enum Nan {
    /// Quiet NaN with the sign and the upper bits of the payload.
    Payload,
    /// These bits, with the sign.
    Signed(u32),
    /// These bits, without the sign.
    Fixed(u32),
}

/// Bit format of a float that is narrower than f32: sign, exponent, `mantissa` bits.
pub(crate) struct NarrowFloat {
    bits: u32,
    mantissa: u32,
    bias: u32,
    /// Bits of the smallest f32 that rounds beyond the largest finite value.
    first_beyond: u32,
    /// Bits that are stored for `first_beyond` and all larger values, without the sign.
    beyond: u32,
    /// Support of the dtype for infinities.
    pub infinity: Infinity,
    nan: Nan,
}

/// IEEE 754 half precision.
pub(crate) const F16: NarrowFloat = NarrowFloat {
    bits: 16,
    mantissa: 10,
    bias: 15,
    first_beyond: 65_520_f32.to_bits(),
    beyond: 0x7c00,
    infinity: Infinity::Kept,
    nan: Nan::Payload,
};

/// bfloat16 as the target of casts from f32 and f64.
pub(crate) const BF16: NarrowFloat = NarrowFloat {
    bits: 16,
    mantissa: 7,
    bias: 127,
    // Half a step above the largest finite value, 0x7f7f.
    first_beyond: 0x7f7f_8000,
    beyond: 0x7f80,
    infinity: Infinity::Kept,
    nan: Nan::Fixed(0xffff),
};

/// bfloat16 as the target of casts from f16, which give another NaN.
pub(crate) const BF16_OF_F16: NarrowFloat = NarrowFloat { nan: Nan::Fixed(0x7fc0), ..BF16 };

/// f8_e4m3fn: no infinities, saturates.
pub(crate) const F8_E4M3FN: NarrowFloat = NarrowFloat {
    bits: 8,
    mantissa: 3,
    bias: 7,
    // 464 is halfway between 448 and 480, which the dtype does not have; the tie goes to 448, which is even.
    first_beyond: 464_f32.to_bits() + 1,
    beyond: 0x7e,
    infinity: Infinity::Lost,
    nan: Nan::Signed(0x7f),
};

/// f8_e5m2: with infinities.
pub(crate) const F8_E5M2: NarrowFloat = NarrowFloat {
    bits: 8,
    mantissa: 2,
    bias: 15,
    first_beyond: 61_440_f32.to_bits(),
    beyond: 0x7c,
    infinity: Infinity::Kept,
    nan: Nan::Signed(0x7f),
};

/// f8_e4m3fnuz: no infinities, no negative zero.
pub(crate) const F8_E4M3FNUZ: NarrowFloat = NarrowFloat {
    bits: 8,
    mantissa: 3,
    bias: 8,
    first_beyond: 248_f32.to_bits(),
    beyond: FNUZ_NAN,
    infinity: Infinity::Lost,
    nan: Nan::Fixed(FNUZ_NAN),
};

/// f8_e5m2fnuz: no infinities, no negative zero.
pub(crate) const F8_E5M2FNUZ: NarrowFloat = NarrowFloat {
    bits: 8,
    mantissa: 2,
    bias: 16,
    first_beyond: 61_440_f32.to_bits(),
    beyond: FNUZ_NAN,
    infinity: Infinity::Lost,
    nan: Nan::Fixed(FNUZ_NAN),
};

/// The only NaN of the `fnuz` dtypes has the bits of negative zero.
const FNUZ_NAN: u32 = 0x80;

impl NarrowFloat {
    /// Rounds the bits of an f32 to this format; the second value is true if the value is out of range. Computes the
    /// rounding for normal and for subnormal results and chooses one of the two, so that loops have no branches.
    #[inline]
    fn round(&self, single: u32) -> (u32, bool) {
        let value = magnitude(single);
        let sign = (single >> 31) << (self.bits - 1);
        let drop = 23 - self.mantissa;
        // Normal: adds just under half a step, or half a step if the last bit kept is odd. A carry into the exponent
        // gives the correct result.
        let carried = value.wrapping_add((1 << (drop - 1)) - 1 + ((value >> drop) & 1));
        let normal = (carried >> drop).wrapping_sub((127 - self.bias) << self.mantissa);
        // Subnormal: adds a float whose last bit is worth the smallest subnormal, so that the processor rounds at that
        // bit.
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

    /// Rounds the bits of an f32 to this format of 16 bits.
    #[inline]
    pub fn store_16(&self, single: u32) -> StoredFloat<2> {
        let (bits, beyond) = self.round(single);
        let [low, high, ..] = bits.to_le_bytes();
        StoredFloat { bytes: [low, high], beyond }
    }

    /// Rounds the bits of an f32 to this format of 8 bits.
    #[inline]
    pub fn store_8(&self, single: u32) -> StoredFloat<1> {
        let (bits, beyond) = self.round(single);
        let [low, ..] = bits.to_le_bytes();
        StoredFloat { bytes: [low], beyond }
    }
}

/// Bits of infinity as an f32; NaNs have larger bits.
pub(crate) const INFINITY: u32 = 0x7f80_0000;

/// Returns the bits of an f32 without the sign.
#[inline]
pub(crate) fn magnitude(single: u32) -> u32 {
    single & 0x7fff_ffff
}

/// Loads an f32, f16 or bf16, without rounding.
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
    // Rust does not define the payload of the NaN; PyTorch keeps its upper bits.
    #[expect(clippy::cast_possible_truncation, reason = "the upper bits are cut away")]
    let nan = ((bits >> 32) as u32 & 0x8000_0000) | 0x7fc0_0000 | ((bits >> 29) as u32 & 0x003f_ffff);
    LoadedFloat { single: if value > INFINITY_64 { nan } else { rounded }, was_finite: value < INFINITY_64 }
}

/// Converts a bf16 to the bits of an f32, exactly.
#[inline]
pub(crate) fn single_of_bf16(bytes: [u8; 2]) -> u32 {
    u32::from(u16::from_le_bytes(bytes)) << 16
}

/// Converts an f16 to the bits of an f32, exactly except for quiet NaNs.
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

/// Stores an f32 without rounding.
#[inline]
pub(crate) fn store_f32(single: u32) -> StoredFloat<4> {
    StoredFloat { bytes: single.to_le_bytes(), beyond: magnitude(single) == INFINITY }
}

/// Widens an f32 to f64, exactly.
#[inline]
pub(crate) fn store_f64(single: u32) -> StoredFloat<8> {
    let exact = f64::from(f32::from_bits(single)).to_bits();
    let value = u64::from(magnitude(single));
    let nan = (u64::from(single >> 31) << 63) | (0x7ff8 << 48) | (value & 0x007f_ffff) << 29;
    let bits = if magnitude(single) > INFINITY { nan } else { exact };
    StoredFloat { bytes: bits.to_le_bytes(), beyond: magnitude(single) == INFINITY }
}
