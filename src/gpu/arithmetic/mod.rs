//! Arithmetic on a device: reductions of partial values, and casts. The results have the same bits as the results of
//! [`exec::reduce`](crate::exec::reduce) and [`exec::cast`](crate::exec::cast), for every dtype that these two modules
//! support. Sizes and offsets count elements, or bytes where the name contains `bytes`.
//!
//! A launch of a kernel runs the jobs of a job table. The device writes the outcome of each job into the table, after
//! the jobs. The outcome of a reduction states whether the dtype cannot represent a sum; the outcome of a cast is the
//! number of lost values. The host then copies the outcomes back.
//!
//! The bits are the same for these reasons:
//!
//! - sums have the same types as on the host, and partial values are added in the same order;
//! - additions, products and divisions follow IEEE 754, rounded to nearest: the NVRTC options forbid fused operations,
//!   keep subnormals and request exact division;
//! - each rounding to a narrower float is done by integer arithmetic on the bits, or by a conversion that IEEE 754
//!   defines;
//! - a NaN result gets the bits that the host would give it, whatever the device computed;
//! - integer sums have 128 bits, as on the host.

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

/// The number of units that one thread block processes. A unit is the elements that one thread processes in one step.
const BLOCK_UNITS: u32 = 1024;

/// The compiled kernels that reduce and cast.
#[derive(Clone, Debug)]
pub struct Arithmetic {
    reduce: CudaFunction,
    report_outcomes: CudaFunction,
    cast: CudaFunction,
}

impl Arithmetic {
    /// Compiles the kernels that reduce and cast for a device.
    ///
    /// # Errors
    /// Returns the reason why the kernels cannot be compiled.
    pub fn open(device: &Device, kernels: &Kernels) -> Result<Self, String> {
        let program = ARITHMETIC.load(device, kernels)?;
        let [reduce, report_outcomes, cast] = ["reduce", "report_outcomes", "cast"].map(|name| program.kernel(name));
        Ok(Self { reduce: reduce?, report_outcomes: report_outcomes?, cast: cast? })
    }
}

/// Returns the device address of `numel` elements that start at a byte offset in a buffer.
///
/// # Panics
/// Panics if the elements are not all in the buffer.
fn address(memory: &impl DeviceBuffer, offset: usize, numel: u64, itemsize: u64) -> u64 {
    let end = numel.checked_mul(itemsize).and_then(|len| len.checked_add(offset as u64));
    assert!(
        end.is_some_and(|end| end <= memory.bytes() as u64),
        "{numel} elements from offset {offset} leave their buffer"
    );
    memory.address() + offset as u64
}

/// Returns the largest power of two that divides `widest` and all `numbers`: the width in bytes of a memory access that
/// is aligned for all these addresses and strides.
fn access_bytes(numbers: &[u64], widest: u64) -> u32 {
    1 << numbers.iter().fold(widest, |bits, number| bits | number).trailing_zeros()
}

/// Parses groups of `N` 64-bit numbers that the device wrote.
fn read_records<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u64; N]> + '_ {
    bytes.chunks_exact(8 * N).map(|record| {
        let mut numbers = [0; N];
        zip(&mut numbers, record.as_chunks::<8>().0).for_each(|(number, bytes)| *number = u64::from_le_bytes(*bytes));
        numbers
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_width_divides_all_numbers() {
        assert_eq!([&[0, 48][..], &[32, 8], &[6], &[4097]].map(|numbers| access_bytes(numbers, 16)), [16, 8, 2, 1]);
        assert_eq!(access_bytes(&[64], 4), 4);
    }
}
