//! Reduces partial values to one value: the arithmetic of the placement `P(op)`.
//!
//! Input and output are bytes; the loops count elements. Elements are little-endian and need no alignment. Partial
//! values are added one after the other, in the order of their coordinates on the mesh. The first partial value
//! initialises the sum, so that a single -0.0 stays -0.0.
//!
//! | dtypes | computed in | ops |
//! |---|---|---|
//! | f16, bf16, the 8-bit floats except f8_e8m0fnu | f32 | sum, avg, product, max, min |
//! | f32, f64 | f64 | sum, avg, product, max, min |
//! | c32; c64, c128, by real and imaginary part | f32; f64 | sum, avg |
//! | integers | 128 bits, exactly | all |
//! | bool | | max, min, band, bor, bxor |
//!
//! The result is rounded once, to the stored dtype, as [`super::cast`] rounds. NaN propagates in max and min, and the
//! result is the quiet NaN without payload, so that all machines agree. Of zeros with different signs, max and min keep
//! the first; PyTorch keeps the first or the last, depending on the length of the tensor. Integers that overflow, and
//! averages with a remainder, are errors.
//!
//! The ops are those of `Partial` in `torch/distributed/tensor/placement_types.py`. PyTorch reduces in the dtype
//! itself, in the order of the communication library; if all intermediate results are exact, the results of PyTorch and
//! of this module are equal bit for bit.

use std::fmt;
use std::iter::zip;

use super::cast::Cast;
use super::difference::{e4m3fn, e4m3fnuz, e5m2, e5m2fnuz};
use super::floats::{single_of_bf16, single_of_f16};
use super::{SUM_BYTES, sized_buffer};
use crate::catalog::{Dtype, Fqn, TensorEntry};
use crate::error::Error;
use crate::layout::ReduceOp;
use crate::layout::partial::Share;

/// The method by which partial values are reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReductionMethod {
    /// dtshard reduces the partial values itself, in the order of their coordinates on the mesh: the result has the
    /// same bits in every run.
    #[default]
    InRankOrder,
    /// NCCL reduces the values that it can reduce. dtshard reduces all other values, as [`Self::InRankOrder`] does.
    Nccl,
}

impl fmt::Display for ReductionMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::InRankOrder => "in rank order",
            Self::Nccl => "by NCCL",
        })
    }
}

/// A reducer, which reduces partial values of one dtype and divides the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reducer {
    dtype: Dtype,
    op: ReduceOp,
    divisor: u64,
}

/// The reason why partial values cannot be reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceError {
    /// The op is not defined for the dtype.
    Undefined { dtype: Dtype, op: ReduceOp },
    /// The result does not fit the dtype.
    Overflow { dtype: Dtype, op: ReduceOp, value: i128 },
    /// The integer result is not a multiple of the divisor.
    Remainder { value: i128, divisor: u64 },
}

impl fmt::Display for ReduceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Undefined { dtype, op } => write!(f, "the reduce op {op} is not defined for {dtype}"),
            Self::Overflow { dtype, op, value } => {
                write!(f, "the {op} of its partial values is {value}, which does not fit {dtype}")
            }
            Self::Remainder { value, divisor } => write!(f, "{value} divided by {divisor} is not an integer"),
        }
    }
}

impl ReduceError {
    /// Returns this error as an error about the tensor `fqn`.
    pub fn for_tensor(&self, fqn: &Fqn) -> Error {
        Error::unsupported(format!("{fqn}: {self}"), self.hint())
    }

    /// Returns the hint for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Undefined { .. } => {
                "use sum or avg for numbers, max or min for real numbers, and band, bor or bxor for integers and bool"
            }
            Self::Overflow { .. } => "reduce the tensor in the job, in a wider dtype, before saving it",
            Self::Remainder { .. } => {
                "use another placement than Partial, because dtshard divides integers only without a remainder"
            }
        }
    }
}

impl Reducer {
    /// Returns the reducer for a share of a tensor, or `None` if a single partial value is copied.
    ///
    /// # Errors
    /// `Unsupported` if the partial values cannot be reduced.
    pub fn for_share(entry: &TensorEntry, share: &Share) -> crate::error::Result<Option<Self>> {
        if share.partial_values.len() <= 1 && share.divisor <= 1 {
            return Ok(None);
        }
        let op = entry.partial_values.as_ref().map_or(ReduceOp::Sum, |partial_values| partial_values.reduction.op);
        Self::new(entry.dtype, op, share.divisor).map(Some).map_err(|fault| fault.for_tensor(&entry.fqn))
    }

    /// Returns the reducer for a dtype, an op and a divisor.
    ///
    /// # Errors
    /// `Undefined`.
    pub fn new(dtype: Dtype, op: ReduceOp, divisor: u64) -> Result<Self, ReduceError> {
        use ReduceOp::{Avg, Max, Min, Product, Sum};
        let averages = matches!(op, Sum | Avg);
        let defined = match dtype {
            Dtype::F8E8m0fnu | Dtype::F4E2m1fnX2 => false,
            Dtype::C32 | Dtype::C64 | Dtype::C128 => averages,
            Dtype::Bool => !averages && op != Product && divisor == 1,
            _ if dtype.is_float() => averages || matches!(op, Max | Min | Product),
            _ => true,
        };
        if defined {
            return Ok(Self { dtype, op, divisor });
        }
        // Only a sum can be divided.
        Err(ReduceError::Undefined { dtype, op: if divisor == 1 { op } else { Sum } })
    }

    /// Returns the dtype of the partial values.
    pub fn dtype(self) -> Dtype {
        self.dtype
    }

    /// Returns the reduction op.
    pub fn op(self) -> ReduceOp {
        self.op
    }

    /// Returns the number by which the result is divided.
    pub fn divisor(self) -> u64 {
        self.divisor
    }

    /// Returns how many bytes of one partial value are reduced at a time, so that the sums are at most `SUM_BYTES`
    /// long.
    pub fn block_bytes(self) -> usize {
        let itemsize = usize::try_from(self.dtype.itemsize()).expect("a few bytes");
        usize::try_from(SUM_BYTES).expect("a scratch fits memory") / (itemsize * self.widening()) * itemsize
    }

    /// Reduces `partial_values`, which has the bytes of each partial value for the same elements. Writes the result
    /// into `value`; `sums` is a scratch buffer.
    ///
    /// # Errors
    /// `Overflow` and `Remainder`.
    pub fn reduce<'s>(
        self,
        partial_values: impl Iterator<Item = &'s [u8]>,
        value: &mut [u8],
        sums: &mut Vec<u8>,
    ) -> Result<(), ReduceError> {
        let sums = sized_buffer(sums, value.len() * self.widening());
        for (number, partial_value) in partial_values.enumerate() {
            self.add(number == 0, partial_value, sums);
        }
        self.finish(sums, value)
    }

    /// Returns how many bytes of sums are needed for one byte of a partial value, because sums are computed in a wider
    /// type.
    pub fn widening(self) -> usize {
        match self.dtype {
            Dtype::F32 | Dtype::C64 | Dtype::F16 | Dtype::Bf16 | Dtype::C32 => 2,
            Dtype::F64 | Dtype::C128 => 1,
            Dtype::F8E4m3fn | Dtype::F8E5m2 | Dtype::F8E4m3fnuz | Dtype::F8E5m2fnuz => 4,
            whole => 16 / usize::try_from(whole.itemsize()).expect("a few bytes"),
        }
    }

    /// Adds a partial value to `sums`. The first partial value overwrites the content of `sums`.
    pub fn add(self, is_first: bool, partial_value: &[u8], sums: &mut [u8]) {
        let accumulator = Accumulator { op: if is_first { None } else { Some(self.op) }, partial_value, sums };
        match self.dtype {
            Dtype::F64 | Dtype::C128 => accumulator.run(f64::from_le_bytes),
            Dtype::F32 | Dtype::C64 => accumulator.run(|bytes| f64::from(f32::from_le_bytes(bytes))),
            Dtype::F16 | Dtype::C32 => accumulator.run(|bytes| f32::from_bits(single_of_f16(bytes))),
            Dtype::Bf16 => accumulator.run(|bytes| f32::from_bits(single_of_bf16(bytes))),
            Dtype::F8E4m3fn => accumulator.run(|bytes| exact(e4m3fn(bytes))),
            Dtype::F8E5m2 => accumulator.run(|bytes| exact(e5m2(bytes))),
            Dtype::F8E4m3fnuz => accumulator.run(|bytes| exact(e4m3fnuz(bytes))),
            Dtype::F8E5m2fnuz => accumulator.run(|bytes| exact(e5m2fnuz(bytes))),
            Dtype::Bool => accumulator.run(|[byte]: [u8; 1]| i128::from(byte != 0)),
            Dtype::U8 => accumulator.run(|bytes| i128::from(u8::from_le_bytes(bytes))),
            Dtype::U16 => accumulator.run(|bytes| i128::from(u16::from_le_bytes(bytes))),
            Dtype::U32 => accumulator.run(|bytes| i128::from(u32::from_le_bytes(bytes))),
            Dtype::U64 => accumulator.run(|bytes| i128::from(u64::from_le_bytes(bytes))),
            Dtype::I8 => accumulator.run(|bytes| i128::from(i8::from_le_bytes(bytes))),
            Dtype::I16 => accumulator.run(|bytes| i128::from(i16::from_le_bytes(bytes))),
            Dtype::I32 => accumulator.run(|bytes| i128::from(i32::from_le_bytes(bytes))),
            Dtype::I64 => accumulator.run(|bytes| i128::from(i64::from_le_bytes(bytes))),
            Dtype::F8E8m0fnu | Dtype::F4E2m1fnX2 => unreachable!("{} is not reduced", self.dtype),
        }
    }

    /// Divides the elements of `sums` by the divisor, rounds them to the dtype of the partial values, and stores them
    /// in `value`.
    ///
    /// # Errors
    /// `Overflow` and `Remainder`.
    pub fn finish(self, sums: &mut [u8], value: &mut [u8]) -> Result<(), ReduceError> {
        let round = |from, to, sums: &[u8], value: &mut [u8]| match Cast::new(from, to) {
            Some(cast) => drop(cast.convert(sums, value)),
            None => value.copy_from_slice(sums),
        };
        #[expect(clippy::cast_precision_loss, reason = "the divisor is rounded as any other number")]
        match self.dtype {
            Dtype::F64 | Dtype::C128 | Dtype::F32 | Dtype::C64 => {
                let to = if matches!(self.dtype, Dtype::F64 | Dtype::C128) { Dtype::F64 } else { Dtype::F32 };
                divide(sums, self.divisor as f64, f64::NAN);
                round(Dtype::F64, to, sums, value);
                Ok(())
            }
            Dtype::F16 | Dtype::C32 | Dtype::Bf16 => {
                let to = if self.dtype == Dtype::Bf16 { Dtype::Bf16 } else { Dtype::F16 };
                divide(sums, self.divisor as f32, f32::NAN);
                round(Dtype::F32, to, sums, value);
                Ok(())
            }
            Dtype::F8E4m3fn | Dtype::F8E5m2 | Dtype::F8E4m3fnuz | Dtype::F8E5m2fnuz => {
                divide(sums, self.divisor as f32, f32::NAN);
                round(Dtype::F32, self.dtype, sums, value);
                Ok(())
            }
            Dtype::Bool | Dtype::U8 => self.store(sums, value, |whole| u8::try_from(whole).ok().map(u8::to_le_bytes)),
            Dtype::U16 => self.store(sums, value, |whole| u16::try_from(whole).ok().map(u16::to_le_bytes)),
            Dtype::U32 => self.store(sums, value, |whole| u32::try_from(whole).ok().map(u32::to_le_bytes)),
            Dtype::U64 => self.store(sums, value, |whole| u64::try_from(whole).ok().map(u64::to_le_bytes)),
            Dtype::I8 => self.store(sums, value, |whole| i8::try_from(whole).ok().map(i8::to_le_bytes)),
            Dtype::I16 => self.store(sums, value, |whole| i16::try_from(whole).ok().map(i16::to_le_bytes)),
            Dtype::I32 => self.store(sums, value, |whole| i32::try_from(whole).ok().map(i32::to_le_bytes)),
            Dtype::I64 => self.store(sums, value, |whole| i64::try_from(whole).ok().map(i64::to_le_bytes)),
            Dtype::F8E8m0fnu | Dtype::F4E2m1fnX2 => unreachable!("{} is not reduced", self.dtype),
        }
    }

    fn store<const N: usize>(
        self,
        sums: &[u8],
        value: &mut [u8],
        narrow: impl Fn(i128) -> Option<[u8; N]>,
    ) -> Result<(), ReduceError> {
        for (sum, output) in zip(sums.as_chunks::<16>().0, value.as_chunks_mut::<N>().0) {
            let sum = i128::from_le_bytes(*sum);
            let divisor = i128::from(self.divisor);
            if divisor != 1 && sum % divisor != 0 {
                return Err(ReduceError::Remainder { value: sum, divisor: self.divisor });
            }
            let whole = if divisor == 1 { sum } else { sum / divisor };
            *output = narrow(whole).ok_or(ReduceError::Overflow { dtype: self.dtype, op: self.op, value: whole })?;
        }
        Ok(())
    }
}

/// Converts an 8-bit float to f32; every 8-bit float has an equal f32.
fn exact(number: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "nothing is lost")]
    let single = number as f32;
    single
}

/// A number type in which sums are computed. `A` is its size in bytes.
trait Number<const A: usize>: Copy {
    fn from_bytes(bytes: [u8; A]) -> Self;
    fn bytes(self) -> [u8; A];
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    /// Applies a bitwise op to two integers. Floats do not support bitwise ops.
    fn bits(self, other: Self, op: impl Fn(i128, i128) -> i128) -> Self;
}

macro_rules! float {
    ($float:ty, $size:literal) => {
        impl Number<$size> for $float {
            fn from_bytes(bytes: [u8; $size]) -> Self {
                Self::from_le_bytes(bytes)
            }

            fn bytes(self) -> [u8; $size] {
                self.to_le_bytes()
            }

            fn plus(self, other: Self) -> Self {
                self + other
            }

            fn times(self, other: Self) -> Self {
                self * other
            }

            fn max(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }

            fn min(self, other: Self) -> Self {
                if other < self || other.is_nan() { other } else { self }
            }

            fn bits(self, _: Self, _: impl Fn(i128, i128) -> i128) -> Self {
                unreachable!("floats have no such op")
            }
        }
    };
}

float!(f32, 4);
float!(f64, 8);

impl Number<16> for i128 {
    fn from_bytes(bytes: [u8; 16]) -> Self {
        Self::from_le_bytes(bytes)
    }

    fn bytes(self) -> [u8; 16] {
        self.to_le_bytes()
    }

    fn plus(self, other: Self) -> Self {
        self.saturating_add(other)
    }

    /// Returns the product, or the nearest 128-bit integer if the product overflows. Such a product is too large for
    /// every dtype, unless a later factor is 0; the result is then 0.
    fn times(self, other: Self) -> Self {
        self.saturating_mul(other)
    }

    fn max(self, other: Self) -> Self {
        Ord::max(self, other)
    }

    fn min(self, other: Self) -> Self {
        Ord::min(self, other)
    }

    fn bits(self, other: Self, op: impl Fn(i128, i128) -> i128) -> Self {
        op(self, other)
    }
}

/// A partial value, and the sums to which it is added.
struct Accumulator<'a> {
    /// The reduction op, or `None` for the first partial value, which overwrites the sums.
    op: Option<ReduceOp>,
    partial_value: &'a [u8],
    sums: &'a mut [u8],
}

impl Accumulator<'_> {
    /// Runs the loop of one dtype and op. Each combination has its own compiled loop, so that the loop contains no
    /// choice between dtypes or ops.
    #[inline]
    fn run<const N: usize, const A: usize, T: Number<A>>(self, load: impl Fn([u8; N]) -> T) {
        match self.op {
            None => self.accumulate(load, |_, partial_value| partial_value),
            Some(ReduceOp::Sum | ReduceOp::Avg) => self.accumulate(load, T::plus),
            Some(ReduceOp::Product) => self.accumulate(load, T::times),
            Some(ReduceOp::Max) => self.accumulate(load, T::max),
            Some(ReduceOp::Min) => self.accumulate(load, T::min),
            Some(ReduceOp::Band) => self.accumulate(load, |sum, partial_value| sum.bits(partial_value, |a, b| a & b)),
            Some(ReduceOp::Bor) => self.accumulate(load, |sum, partial_value| sum.bits(partial_value, |a, b| a | b)),
            Some(ReduceOp::Bxor) => self.accumulate(load, |sum, partial_value| sum.bits(partial_value, |a, b| a ^ b)),
        }
    }

    #[inline]
    fn accumulate<const N: usize, const A: usize, T: Number<A>>(
        self,
        load: impl Fn([u8; N]) -> T,
        combine: impl Fn(T, T) -> T,
    ) {
        let (elements, rest) = self.partial_value.as_chunks::<N>();
        let (sums, left) = self.sums.as_chunks_mut::<A>();
        let fits = elements.len() == sums.len() && rest.is_empty() && left.is_empty();
        assert!(fits, "cannot add {} bytes to sums of {} bytes", self.partial_value.len(), self.sums.len());
        for (element, sum) in zip(elements, sums) {
            *sum = combine(T::from_bytes(*sum), load(*element)).bytes();
        }
    }
}

/// Divides the sums in place, and replaces every NaN by the NaN `nan`.
fn divide<const A: usize, T: Number<A> + std::ops::Div<Output = T> + PartialEq>(sums: &mut [u8], divisor: T, nan: T) {
    for sum in sums.as_chunks_mut::<A>().0 {
        let quotient = T::from_bytes(*sum) / divisor;
        // NaN is the only value that is not equal to itself.
        #[expect(clippy::eq_op, reason = "finds NaN")]
        let is_number = quotient == quotient;
        *sum = if is_number { quotient } else { nan }.bytes();
    }
}

#[cfg(test)]
mod tests;
