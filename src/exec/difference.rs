//! Measures how two ranges of elements of equal length differ: the first difference, the number of differences, the
//! largest distance, and the sum of the squares of all distances. Positions count elements.
//!
//! Two elements differ if their bits differ: 0.0 and -0.0 differ with distance 0, and two NaNs with different bits also
//! differ with distance 0. The distance of a NaN and a number is NaN; the largest distance is then also NaN. Joining
//! two results is commutative and associative, except that sums of squares are rounded.

use std::iter::zip;

use super::floats::{single_of_bf16, single_of_f16};
use super::squares::SumOfSquares;
use crate::catalog::Dtype;
use crate::layout::{Dims, Region, Tile};

/// The differences between two tensors of equal dtype and shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// The row-major index of the first element that differs.
    pub element: u64,
    /// The largest distance between two elements: their absolute difference, or its modulus for complex elements. NaN
    /// if, for some pair of elements, one element is NaN and the other is not. `None` if no distance is defined: the
    /// dtype is bool, or stores several elements in one byte (f4).
    pub max_abs: Option<f64>,
    /// The number of elements that differ.
    pub differing: u64,
    /// The squares of the distances of all elements. Meaningless if `max_abs` is `None`.
    pub distances: SumOfSquares,
}

impl Difference {
    /// Returns the index of the first element that differs.
    pub fn index(&self, shape: &[u64]) -> Dims {
        Tile::from_region(&Region::whole(shape)).global_index(self.element)
    }

    /// Describes the differences: `first difference at [1, 3], 3 of 40 elements differ, max abs difference 0.25`.
    pub fn detail(&self, shape: &[u64]) -> String {
        let (first, numel) = (self.index(shape), shape.iter().product::<u64>());
        let mut text = match shape {
            [] => String::from("the only element differs"),
            _ => format!(
                "first difference at index {:?}, {} of {numel} elements differ",
                first.as_slice(),
                self.differing
            ),
        };
        if let Some(distance) = self.max_abs_text() {
            text.push_str(&format!(", max abs difference {distance}"));
        }
        text
    }

    /// Returns the largest distance in its shortest decimal form: `0.25`, `3`, `1e-7`, `inf`, `nan`. The result is a
    /// text, because JSON has no number for `inf` and `nan`.
    pub fn max_abs_text(&self) -> Option<String> {
        self.max_abs.map(number_text)
    }

    /// Joins the differences of two element ranges. Both results must come from the same pair of tensors.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self {
            element: self.element.min(other.element),
            max_abs: self.max_abs.zip(other.max_abs).map(|(left, right)| larger(left, right)),
            differing: self.differing + other.differing,
            distances: self.distances.join(other.distances),
        }
    }

    /// Compares two ranges of elements, given as bytes. `first` is the index of the first element in the tensor.
    pub fn between(dtype: Dtype, first: u64, left: &[u8], right: &[u8]) -> Option<Self> {
        if left == right {
            return None;
        }
        let found = match dtype {
            Dtype::Bool | Dtype::F4E2m1fnX2 => {
                let found = measure(left, right, u8::from_le_bytes, integer_distance);
                found.map(|found| Self { max_abs: None, ..found })
            }
            Dtype::U8 => measure(left, right, u8::from_le_bytes, integer_distance),
            Dtype::U16 => measure(left, right, u16::from_le_bytes, integer_distance),
            Dtype::U32 => measure(left, right, u32::from_le_bytes, integer_distance),
            Dtype::U64 => measure(left, right, u64::from_le_bytes, integer_distance),
            Dtype::I8 => measure(left, right, i8::from_le_bytes, integer_distance),
            Dtype::I16 => measure(left, right, i16::from_le_bytes, integer_distance),
            Dtype::I32 => measure(left, right, i32::from_le_bytes, integer_distance),
            Dtype::I64 => measure(left, right, i64::from_le_bytes, integer_distance),
            Dtype::F16 => measure(left, right, decode_f16, float_distance),
            Dtype::Bf16 => measure(left, right, decode_bf16, float_distance),
            Dtype::F32 => measure(left, right, decode_f32, float_distance),
            Dtype::F64 => measure(left, right, f64::from_le_bytes, float_distance),
            Dtype::C32 => measure(left, right, |bytes: [u8; 4]| complex(bytes, decode_f16), complex_distance),
            Dtype::C64 => measure(left, right, |bytes: [u8; 8]| complex(bytes, decode_f32), complex_distance),
            Dtype::C128 => measure(left, right, |bytes: [u8; 16]| complex(bytes, f64::from_le_bytes), complex_distance),
            Dtype::F8E4m3fn => measure(left, right, e4m3fn, float_distance),
            Dtype::F8E5m2 => measure(left, right, e5m2, float_distance),
            Dtype::F8E4m3fnuz => measure(left, right, e4m3fnuz, float_distance),
            Dtype::F8E5m2fnuz => measure(left, right, e5m2fnuz, float_distance),
            Dtype::F8E8m0fnu => measure(left, right, e8m0fnu, float_distance),
        };
        found.map(|found| Self { element: first + found.element, ..found })
    }
}

/// Formats a number in its shortest decimal form: `0.25`, `3`, `1e-7`, `inf`, `nan`.
pub fn number_text(number: f64) -> String {
    if number.is_nan() {
        return String::from("nan");
    }
    let digits = format!("{number:?}");
    digits.strip_suffix(".0").unwrap_or(&digits).to_owned()
}

/// Returns the sum of the squares of the magnitudes of elements, given as bytes. Infinities and NaNs are left out.
/// Returns `None` if no distance is defined for the dtype.
pub fn sum_of_squares(dtype: Dtype, bytes: &[u8]) -> Option<SumOfSquares> {
    Some(match dtype {
        Dtype::Bool | Dtype::F4E2m1fnX2 => return None,
        Dtype::U8 => sum(bytes, |bytes| integer(u8::from_le_bytes(bytes))),
        Dtype::U16 => sum(bytes, |bytes| integer(u16::from_le_bytes(bytes))),
        Dtype::U32 => sum(bytes, |bytes| integer(u32::from_le_bytes(bytes))),
        Dtype::U64 => sum(bytes, |bytes| integer(u64::from_le_bytes(bytes))),
        Dtype::I8 => sum(bytes, |bytes| integer(i8::from_le_bytes(bytes))),
        Dtype::I16 => sum(bytes, |bytes| integer(i16::from_le_bytes(bytes))),
        Dtype::I32 => sum(bytes, |bytes| integer(i32::from_le_bytes(bytes))),
        Dtype::I64 => sum(bytes, |bytes| integer(i64::from_le_bytes(bytes))),
        // The square of a complex magnitude is the sum of the squares of both parts.
        Dtype::F16 | Dtype::C32 => sum(bytes, decode_f16),
        Dtype::Bf16 => sum(bytes, decode_bf16),
        Dtype::F32 | Dtype::C64 => sum(bytes, decode_f32),
        Dtype::F64 | Dtype::C128 => sum(bytes, f64::from_le_bytes),
        Dtype::F8E4m3fn => sum(bytes, e4m3fn),
        Dtype::F8E5m2 => sum(bytes, e5m2),
        Dtype::F8E4m3fnuz => sum(bytes, e4m3fnuz),
        Dtype::F8E5m2fnuz => sum(bytes, e5m2fnuz),
        Dtype::F8E8m0fnu => sum(bytes, e8m0fnu),
    })
}

fn sum<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> SumOfSquares {
    let mut sum = SumOfSquares::default();
    for bytes in bytes.as_chunks::<N>().0 {
        let value = value(*bytes);
        if value.is_finite() {
            sum.add(value);
        }
    }
    sum
}

fn integer<T: Into<i128>>(value: T) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a norm")]
    let value = value.into() as f64;
    value
}

/// Measures the distance of each pair of elements whose bits differ.
fn measure<const N: usize, T>(
    left: &[u8],
    right: &[u8],
    value: impl Fn([u8; N]) -> T,
    distance: impl Fn(T, T) -> f64,
) -> Option<Difference> {
    let mut found: Option<Difference> = None;
    for (index, (left, right)) in (0_u64..).zip(zip(left.as_chunks::<N>().0, right.as_chunks::<N>().0)) {
        if left != right {
            let distance = distance(value(*left), value(*right));
            let here =
                || Difference { element: index, max_abs: None, differing: 0, distances: SumOfSquares::default() };
            let found = found.get_or_insert_with(here);
            found.max_abs = Some(found.max_abs.map_or(distance, |most| larger(most, distance)));
            found.differing += 1;
            found.distances.add(distance);
        }
    }
    found
}

/// Returns the larger of two numbers, or NaN if one of them is NaN; `f64::max` would ignore NaN.
fn larger(left: f64, right: f64) -> f64 {
    if left.is_nan() || right.is_nan() { f64::NAN } else { left.max(right) }
}

fn float_distance(left: f64, right: f64) -> f64 {
    #[expect(clippy::float_cmp, reason = "equal infinities have no difference to take")]
    let same = left == right || left.is_nan() && right.is_nan();
    if same { 0.0 } else { (left - right).abs() }
}

fn integer_distance<T: Into<i128>>(left: T, right: T) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a distance")]
    let distance = (left.into() - right.into()).unsigned_abs() as f64;
    distance
}

type Complex = (f64, f64);

fn complex_distance(left: Complex, right: Complex) -> f64 {
    let (real, imaginary) = (float_distance(left.0, right.0), float_distance(left.1, right.1));
    // `hypot` returns infinity for infinity and NaN, so NaN is tested first.
    if real.is_nan() || imaginary.is_nan() { f64::NAN } else { real.hypot(imaginary) }
}

fn decode_f16(bytes: [u8; 2]) -> f64 {
    f64::from(f32::from_bits(single_of_f16(bytes)))
}

fn decode_bf16(bytes: [u8; 2]) -> f64 {
    f64::from(f32::from_bits(single_of_bf16(bytes)))
}

fn decode_f32(bytes: [u8; 4]) -> f64 {
    f64::from(f32::from_le_bytes(bytes))
}

/// Decodes a complex number from the bytes of its real part and its imaginary part.
fn complex<const N: usize, const M: usize>(bytes: [u8; M], part: impl Fn([u8; N]) -> f64) -> Complex {
    let (parts, _) = bytes.as_chunks::<N>();
    (part(parts[0]), part(parts[1]))
}

/// Decodes an f8_e4m3fn. The four signed 8-bit floats differ in the number of mantissa bits, in the bias, and in the
/// bits of special values.
pub(crate) fn e4m3fn([bits]: [u8; 1]) -> f64 {
    if bits & 0x7f == 0x7f { f64::NAN } else { small(bits, 3, 7) }
}

/// Decodes an f8_e5m2.
pub(crate) fn e5m2([bits]: [u8; 1]) -> f64 {
    match bits & 0x7f {
        0x7c => f64::INFINITY.copysign(small(bits, 2, 15)),
        0x7d.. => f64::NAN,
        _ => small(bits, 2, 15),
    }
}

/// Decodes an f8_e4m3fnuz.
pub(crate) fn e4m3fnuz([bits]: [u8; 1]) -> f64 {
    if bits == 0x80 { f64::NAN } else { small(bits, 3, 8) }
}

/// Decodes an f8_e5m2fnuz.
pub(crate) fn e5m2fnuz([bits]: [u8; 1]) -> f64 {
    if bits == 0x80 { f64::NAN } else { small(bits, 2, 16) }
}

/// Decodes an f8_e8m0fnu: a scale, which is a power of two without sign or mantissa.
fn e8m0fnu([bits]: [u8; 1]) -> f64 {
    if bits == 0xff { f64::NAN } else { f64::powi(2.0, i32::from(bits) - 127) }
}

/// Decodes the finite value of an 8-bit float with this number of mantissa bits and this bias.
fn small(bits: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let mantissa = i32::from(bits) & ((1 << mantissa_bits) - 1);
    let exponent = i32::from(bits & 0x7f) >> mantissa_bits;
    let (units, exponent) = if exponent == 0 { (mantissa, 1) } else { (mantissa + (1 << mantissa_bits), exponent) };
    let size = f64::from(units) * f64::powi(2.0, exponent - bias - mantissa_bits.cast_signed());
    if bits & 0x80 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    fn between(dtype: Dtype, left: &[u8], right: &[u8]) -> Difference {
        Difference::between(dtype, 100, left, right).unwrap()
    }

    fn difference_of_f32(left: &[f32], right: &[f32]) -> Difference {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        between(Dtype::F32, &bytes(left), &bytes(right))
    }

    #[test]
    fn difference_has_first_index_count_and_largest_distance() {
        let found = difference_of_f32(&[1.0, 2.0, 3.0, 4.0], &[1.0, 2.25, 3.0, 4.125]);
        assert_eq!((found.element, found.max_abs, found.differing), (101, Some(0.25), 2));
        let mut of_five = SumOfSquares::default();
        of_five.add(5.0);
        assert!((found.distances.root_ratio(of_five) - 0.078_125_f64.sqrt() / 5.0).abs() < 1e-15);
        assert_eq!(
            found.detail(&[8, 16]),
            "first difference at index [6, 5], 2 of 128 elements differ, max abs difference 0.25"
        );
        assert_eq!(Difference::between(Dtype::F32, 0, &[1; 8], &[1; 8]), None);
    }

    #[test]
    fn nan_against_a_number_has_distance_nan() {
        let text = |left, right| difference_of_f32(&[left, 1.0], &[right, 3.0]).max_abs_text().unwrap();
        assert_eq!(text(f32::NAN, 5.0), "nan");
        assert_eq!(text(5.0, f32::NAN), "nan");
        // Two NaNs with different bits differ, with distance 0.
        assert_eq!(text(f32::NAN, -f32::NAN), "2");
        assert_eq!(difference_of_f32(&[0.0], &[-0.0]).max_abs, Some(0.0));
        assert_eq!(text(f32::INFINITY, 1.0), "inf");
        assert_eq!(text(f32::INFINITY, f32::NEG_INFINITY), "inf");
        assert_eq!(difference_of_f32(&[f32::NAN, 1.0], &[f32::NAN, 2.0]).max_abs, Some(1.0));
        assert_eq!(difference_of_f32(&[1e-7], &[0.0]).max_abs_text().unwrap(), "1.0000000116860974e-7");
    }

    #[test]
    fn norms_leave_out_nan_and_infinity() {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        let sum = |dtype, bytes: &[u8]| sum_of_squares(dtype, bytes).unwrap();
        let mut one = SumOfSquares::default();
        one.add(1.0);
        let norm = sum(Dtype::F32, &bytes(&[3.0, f32::NAN, -4.0, f32::INFINITY])).root_ratio(one);
        assert!((norm - 5.0).abs() < 1e-15, "{norm}");
        let norm = sum(Dtype::C64, &bytes(&[3.0, -4.0])).root_ratio(one);
        assert!((norm - 5.0).abs() < 1e-15, "{norm}");
        let norm = sum(Dtype::I8, &[0x80, 0]).root_ratio(one);
        assert!((norm - 128.0).abs() < 1e-12, "{norm}");
        assert_eq!(sum_of_squares(Dtype::Bool, &[1]), None);
    }

    #[test]
    fn elements_of_every_dtype_are_measured() {
        let distance = |dtype, left: &[u8], right: &[u8]| between(dtype, left, right).max_abs;
        assert_eq!(distance(Dtype::U64, &u64::MAX.to_le_bytes(), &[0; 8]), Some(18_446_744_073_709_551_615.0));
        let (most, least) = (i64::MAX.to_le_bytes(), i64::MIN.to_le_bytes());
        assert_eq!(distance(Dtype::I64, &least, &most), Some(18_446_744_073_709_551_615.0));
        assert_eq!(distance(Dtype::I8, &[0x80], &[0x7f]), Some(255.0));
        assert_eq!(distance(Dtype::U8, &[0x80], &[0x7f]), Some(1.0));
        assert_eq!(distance(Dtype::Bool, &[0], &[1]), None);
        assert_eq!(
            between(Dtype::Bool, &[0, 1], &[1, 1]).detail(&[102]),
            "first difference at index [100], 1 of 102 elements differ"
        );
        assert_eq!(distance(Dtype::F4E2m1fnX2, &[0], &[1]), None);
        assert_eq!(distance(Dtype::F16, &0x3c00_u16.to_le_bytes(), &0xbc00_u16.to_le_bytes()), Some(2.0));
        assert_eq!(distance(Dtype::Bf16, &0x3f80_u16.to_le_bytes(), &0xbf80_u16.to_le_bytes()), Some(2.0));
        assert_eq!(distance(Dtype::C32, &[0x00, 0x42, 0x00, 0x44], &[0; 4]), Some(5.0));
        let complex = |real: f64, imaginary: f64| [real.to_le_bytes(), imaginary.to_le_bytes()].concat();
        assert_eq!(distance(Dtype::C128, &complex(3.0, -4.0), &complex(0.0, 0.0)), Some(5.0));
        let strange = distance(Dtype::C128, &complex(f64::NAN, f64::INFINITY), &complex(0.0, 0.0));
        assert!(strange.unwrap().is_nan());
        let complex = |real: f32, imaginary: f32| [real.to_le_bytes(), imaginary.to_le_bytes()].concat();
        assert_eq!(distance(Dtype::C64, &complex(3.0, 4.0), &complex(3.0, 2.0)), Some(2.0));
    }

    #[test]
    fn all_8_bit_floats_decode_as_in_pytorch() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/cast/cases.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let cases = SafeTensors::deserialize(&bytes).unwrap();
        type Value = fn([u8; 1]) -> f64;
        let all: [(&str, Value); 5] = [
            ("f8_e4m3fn", e4m3fn),
            ("f8_e5m2", e5m2),
            ("f8_e4m3fnuz", e4m3fnuz),
            ("f8_e5m2fnuz", e5m2fnuz),
            ("f8_e8m0fnu", e8m0fnu),
        ];
        for (name, value) in all {
            let expected = cases.tensor(&format!("{name}.f32")).unwrap();
            for (bits, expected) in (0..=u8::MAX).zip(expected.data().as_chunks::<4>().0) {
                let (found, expected) = (value([bits]), f64::from(f32::from_le_bytes(*expected)));
                let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                assert!(same, "{name} {bits:02x}: {found}, expected {expected}");
            }
        }
    }
}
