//! Reducing summands to a value: the arithmetic behind `P(op)`.
//!
//! Counts bytes at its door and elements inside; elements are little-endian and need no alignment. Summands come one
//! after the other, in the order of ranks, and the first begins the sum, so that a lone -0.0 stays one.
//!
//! | dtypes | are reckoned in | ops |
//! |---|---|---|
//! | f16, bf16, the 8-bit floats but e8m0fnu | f32 | sum, avg, product, max, min |
//! | f32, f64 | f64 | the same |
//! | c32; c64, c128, by real and imaginary part | f32; f64 | sum, avg |
//! | integers | 128 bits, exactly | all |
//! | bool | | max, min, band, bor, bxor |
//!
//! The result is rounded once, to the dtype that is stored, as [`super::cast`] rounds. A NaN stays one in max and min, and
//! what comes out is the quiet one without payload, so that all machines agree. Of zeros that differ in sign max and min
//! keep the first; PyTorch keeps the first or the last, as the length of the tensor will have it. Integers that do not
//! fit, and averages with a remainder, are errors.
//!
//! The ops are those of `Partial` in `torch/distributed/tensor/placement_types.py`. PyTorch reduces in the dtype itself,
//! in the order of the communication library; where all intermediate results are exact the two agree bit for bit.

use std::fmt;
use std::iter::zip;

use super::cast::Cast;
use super::difference::{e4m3fn, e4m3fnuz, e5m2, e5m2fnuz};
use super::floats::{single_of_bf16, single_of_f16};
use super::{SUM_BYTES, room};
use crate::catalog::{Dtype, Fqn, TensorEntry};
use crate::error::Error;
use crate::layout::ReduceOp;
use crate::layout::partial::Share;

/// Who reduces partial values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reducing {
    /// This program, in the order of ranks: the same bits in every run.
    #[default]
    InRankOrder,
    /// NCCL, where it can; the rest is made as ever.
    ByNccl,
}

impl fmt::Display for Reducing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::InRankOrder => "in the order of ranks",
            Self::ByNccl => "by NCCL",
        })
    }
}

/// How summands of one dtype become a value that is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reducer {
    dtype: Dtype,
    op: ReduceOp,
    divisor: u64,
}

/// Why there is no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceError {
    /// The op has no meaning for the dtype.
    Undefined { dtype: Dtype, op: ReduceOp },
    /// The value does not fit the dtype.
    Overflow { dtype: Dtype, op: ReduceOp, value: i128 },
    /// An integer that cannot be divided.
    Remainder { value: i128, divisor: u64 },
}

impl fmt::Display for ReduceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Undefined { dtype, op } => write!(f, "{op} of {dtype} is not defined"),
            Self::Overflow { dtype, op, value } => {
                write!(f, "the {op} of its summands is {value}, which {dtype} cannot hold")
            }
            Self::Remainder { value, divisor } => write!(f, "{value} divided by {divisor} is no integer"),
        }
    }
}

impl ReduceError {
    /// Summands of this tensor have no value.
    #[must_use]
    pub fn of(&self, fqn: &Fqn) -> Error {
        Error::unsupported(format!("{fqn}: {self}"), self.hint())
    }

    /// What can be done about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Undefined { .. } => {
                "sum and avg are of numbers, max and min of real ones, band, bor and bxor of integers and bool"
            }
            Self::Overflow { .. } => "reduce it in the job, in a wider dtype, before it is saved",
            Self::Remainder { .. } => {
                "integers are only divided where nothing is left over; give another placement than Partial"
            }
        }
    }
}

impl Reducer {
    /// That of a share of a tensor; `None` where one summand is taken as it is.
    ///
    /// # Errors
    /// `Unsupported` where summands have no value.
    pub fn of(entry: &TensorEntry, share: &Share) -> crate::error::Result<Option<Self>> {
        if share.summands.len() <= 1 && share.divisor <= 1 {
            return Ok(None);
        }
        let op = entry.summands.as_ref().map_or(ReduceOp::Sum, |summands| summands.reduction.op);
        Self::new(entry.dtype, op, share.divisor).map(Some).map_err(|fault| fault.of(&entry.fqn))
    }

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
        // Who divides wants summands.
        Err(ReduceError::Undefined { dtype, op: if divisor == 1 { op } else { Sum } })
    }

    #[must_use]
    pub fn dtype(self) -> Dtype {
        self.dtype
    }

    #[must_use]
    pub fn op(self) -> ReduceOp {
        self.op
    }

    #[must_use]
    pub fn divisor(self) -> u64 {
        self.divisor
    }

    /// Bytes of the dtype that are reduced at a time, so that sums take no more than `SUM_BYTES`.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        let itemsize = usize::try_from(self.dtype.itemsize()).expect("a few bytes");
        usize::try_from(SUM_BYTES).expect("a scratch fits memory") / (itemsize * self.widening()) * itemsize
    }

    /// Reduce summands that are in memory, the same block of each.
    ///
    /// # Errors
    /// `Overflow` and `Remainder`.
    pub fn reduce<'s>(
        self,
        summands: impl Iterator<Item = &'s [u8]>,
        value: &mut [u8],
        sums: &mut Vec<u8>,
    ) -> Result<(), ReduceError> {
        let sums = room(sums, value.len() * self.widening());
        for (number, summand) in summands.enumerate() {
            self.add(number == 0, summand, sums);
        }
        self.finish(sums, value)
    }

    /// Bytes of room for each byte of the dtype.
    #[must_use]
    pub fn widening(self) -> usize {
        match self.dtype {
            Dtype::F32 | Dtype::C64 | Dtype::F16 | Dtype::Bf16 | Dtype::C32 => 2,
            Dtype::F64 | Dtype::C128 => 1,
            Dtype::F8E4m3fn | Dtype::F8E5m2 | Dtype::F8E4m3fnuz | Dtype::F8E5m2fnuz => 4,
            whole => 16 / usize::try_from(whole.itemsize()).expect("a few bytes"),
        }
    }

    /// Take in a summand; the first of them begins `sums`, whatever that held.
    pub fn add(self, is_first: bool, summand: &[u8], sums: &mut [u8]) {
        let fold = Accumulator { op: if is_first { None } else { Some(self.op) }, summand, sums };
        match self.dtype {
            Dtype::F64 | Dtype::C128 => fold.run(f64::from_le_bytes),
            Dtype::F32 | Dtype::C64 => fold.run(|bytes| f64::from(f32::from_le_bytes(bytes))),
            Dtype::F16 | Dtype::C32 => fold.run(|bytes| f32::from_bits(single_of_f16(bytes))),
            Dtype::Bf16 => fold.run(|bytes| f32::from_bits(single_of_bf16(bytes))),
            Dtype::F8E4m3fn => fold.run(|bytes| exact(e4m3fn(bytes))),
            Dtype::F8E5m2 => fold.run(|bytes| exact(e5m2(bytes))),
            Dtype::F8E4m3fnuz => fold.run(|bytes| exact(e4m3fnuz(bytes))),
            Dtype::F8E5m2fnuz => fold.run(|bytes| exact(e5m2fnuz(bytes))),
            Dtype::Bool => fold.run(|[byte]: [u8; 1]| i128::from(byte != 0)),
            Dtype::U8 => fold.run(|bytes| i128::from(u8::from_le_bytes(bytes))),
            Dtype::U16 => fold.run(|bytes| i128::from(u16::from_le_bytes(bytes))),
            Dtype::U32 => fold.run(|bytes| i128::from(u32::from_le_bytes(bytes))),
            Dtype::U64 => fold.run(|bytes| i128::from(u64::from_le_bytes(bytes))),
            Dtype::I8 => fold.run(|bytes| i128::from(i8::from_le_bytes(bytes))),
            Dtype::I16 => fold.run(|bytes| i128::from(i16::from_le_bytes(bytes))),
            Dtype::I32 => fold.run(|bytes| i128::from(i32::from_le_bytes(bytes))),
            Dtype::I64 => fold.run(|bytes| i128::from(i64::from_le_bytes(bytes))),
            Dtype::F8E8m0fnu | Dtype::F4E2m1fnX2 => unreachable!("{} is not reduced", self.dtype),
        }
    }

    /// Round what `sums` holds into elements of the dtype.
    ///
    /// # Errors
    /// `Overflow` and `Remainder`.
    pub fn finish(self, sums: &mut [u8], value: &mut [u8]) -> Result<(), ReduceError> {
        let round = |from, to, sums: &[u8], value: &mut [u8]| match Cast::new(from, to) {
            Some(cast) => drop(cast.convert(sums, value)),
            None => value.copy_from_slice(sums),
        };
        #[expect(clippy::cast_precision_loss, reason = "it is rounded as any other number is")]
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
        for (sum, slot) in zip(sums.as_chunks::<16>().0, value.as_chunks_mut::<N>().0) {
            let sum = i128::from_le_bytes(*sum);
            let divisor = i128::from(self.divisor);
            if divisor != 1 && sum % divisor != 0 {
                return Err(ReduceError::Remainder { value: sum, divisor: self.divisor });
            }
            let whole = if divisor == 1 { sum } else { sum / divisor };
            *slot = narrow(whole).ok_or(ReduceError::Overflow { dtype: self.dtype, op: self.op, value: whole })?;
        }
        Ok(())
    }
}

/// Every number that is a float of 8 bits is one of 32 bits.
fn exact(number: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "nothing is lost")]
    let single = number as f32;
    single
}

/// What is reckoned with; `A` is its size in bytes.
trait Number<const A: usize>: Copy {
    fn from_bytes(bytes: [u8; A]) -> Self;
    fn bytes(self) -> [u8; A];
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    /// Bit by bit; of floats there is none.
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

    /// What is too much for 128 bits is so for every dtype, unless it is multiplied by 0.
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

/// A summand on its way into the sums.
struct Accumulator<'a> {
    /// `None` for the first.
    op: Option<ReduceOp>,
    summand: &'a [u8],
    sums: &'a mut [u8],
}

impl Accumulator<'_> {
    /// One loop for each dtype and op, in which everything but the values is known to the compiler.
    #[inline]
    fn run<const N: usize, const A: usize, T: Number<A>>(self, load: impl Fn([u8; N]) -> T) {
        match self.op {
            None => self.each(load, |_, summand| summand),
            Some(ReduceOp::Sum | ReduceOp::Avg) => self.each(load, T::plus),
            Some(ReduceOp::Product) => self.each(load, T::times),
            Some(ReduceOp::Max) => self.each(load, T::max),
            Some(ReduceOp::Min) => self.each(load, T::min),
            Some(ReduceOp::Band) => self.each(load, |sum, summand| sum.bits(summand, |a, b| a & b)),
            Some(ReduceOp::Bor) => self.each(load, |sum, summand| sum.bits(summand, |a, b| a | b)),
            Some(ReduceOp::Bxor) => self.each(load, |sum, summand| sum.bits(summand, |a, b| a ^ b)),
        }
    }

    #[inline]
    fn each<const N: usize, const A: usize, T: Number<A>>(
        self,
        load: impl Fn([u8; N]) -> T,
        combine: impl Fn(T, T) -> T,
    ) {
        let (elements, rest) = self.summand.as_chunks::<N>();
        let (sums, left) = self.sums.as_chunks_mut::<A>();
        let fits = elements.len() == sums.len() && rest.is_empty() && left.is_empty();
        assert!(fits, "{} bytes are no summand of {}", self.summand.len(), self.sums.len());
        for (element, sum) in zip(elements, sums) {
            *sum = combine(T::from_bytes(*sum), load(*element)).bytes();
        }
    }
}

/// Divide floats in their place, and make every NaN the same one.
fn divide<const A: usize, T: Number<A> + std::ops::Div<Output = T> + PartialEq>(sums: &mut [u8], divisor: T, nan: T) {
    for sum in sums.as_chunks_mut::<A>().0 {
        let quotient = T::from_bytes(*sum) / divisor;
        // The one value that is not equal to itself.
        #[expect(clippy::eq_op, reason = "what is no number is to be told")]
        let is_number = quotient == quotient;
        *sum = if is_number { quotient } else { nan }.bytes();
    }
}

#[cfg(test)]
mod tests;
