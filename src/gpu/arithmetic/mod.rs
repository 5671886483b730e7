//! Arithmetic on a device: what summands come to, and casts. The bits are those of [`exec::reduce`](crate::exec::reduce)
//! and [`exec::cast`](crate::exec::cast), of every dtype that these know.
//!
//! A launch does a table of jobs, as copies have it. What jobs have to tell (values that do not fit, elements that a cast
//! loses) the device writes into the table behind them, and the table is copied back as far as that goes.
//!
//! Counts elements, and bytes where a name says so. Why the bits are the same:
//!
//! - sums have the types they have on the host, and summands the same order;
//! - additions, products and divisions are those of IEEE 754, rounded to nearest: NVRTC is told to fuse nothing, to keep
//!   subnormals and to divide exactly;
//! - every rounding to a narrower float is integer arithmetic on its bits, or a conversion that IEEE 754 defines;
//! - a NaN that comes out has the bits that the host gives it, whatever those of the device are;
//! - integers have 128 bits, as on the host.

mod conversion;
mod reduction;

use std::iter::zip;

use cudarc::driver::CudaFunction;
use nccl::DeviceBuffer;

pub use conversion::CastJob;
pub(super) use conversion::CastJobs;
pub use reduction::ReductionJob;
pub(super) use reduction::ReductionJobs;

use super::device::Device;
use super::kernels::ARITHMETIC;
use super::settings::Kernels;

/// Units that one block of threads does.
const BLOCK_UNITS: u32 = 1024;

/// Kernels that compute.
#[derive(Clone, Debug)]
pub struct Arithmetic {
    reduce: CudaFunction,
    tell_outcomes: CudaFunction,
    cast: CudaFunction,
}

impl Arithmetic {
    /// Compiled for a device, or why not.
    ///
    /// # Errors
    /// What is missing.
    pub fn open(device: &Device, kernels: &Kernels) -> Result<Self, String> {
        let program = ARITHMETIC.load(device, kernels)?;
        let [reduce, tell_outcomes, cast] = ["reduce", "tell_outcomes", "cast"].map(|name| program.kernel(name));
        Ok(Self { reduce: reduce?, tell_outcomes: tell_outcomes?, cast: cast? })
    }
}

/// The address of so many elements in a buffer.
///
/// # Panics
/// Where they are not all in it.
fn address(memory: &impl DeviceBuffer, offset: usize, numel: u64, itemsize: u64) -> u64 {
    let end = numel.checked_mul(itemsize).and_then(|len| len.checked_add(offset as u64));
    assert!(end.is_some_and(|end| end <= memory.bytes() as u64), "{numel} elements from {offset} on, in their buffer");
    memory.address() + offset as u64
}

/// The widest access, up to 16 bytes, that these are all multiples of.
fn lane(numbers: &[u64], widest: u64) -> u32 {
    1 << numbers.iter().fold(widest, |bits, number| bits | number).trailing_zeros()
}

/// Numbers that the device wrote.
fn told<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u64; N]> + '_ {
    bytes.chunks_exact(8 * N).map(|record| {
        let mut told = [0; N];
        zip(&mut told, record.as_chunks::<8>().0).for_each(|(number, bytes)| *number = u64::from_le_bytes(*bytes));
        told
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_as_wide_as_all_numbers_allow() {
        assert_eq!([&[0, 48][..], &[32, 8], &[6], &[4097]].map(|numbers| lane(numbers, 16)), [16, 8, 2, 1]);
        assert_eq!(lane(&[64], 4), 4);
    }
}
