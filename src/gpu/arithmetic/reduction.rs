//! Reductions on a device: reduces partial values, which follow each other in a buffer, to one value for each element.

use std::iter::zip;
use std::ops::Range;

use cudarc::driver::CudaFunction;
use nccl::DeviceBuffer;

use super::{Arithmetic, BLOCK_UNITS, access_bytes, address, read_records};
use crate::catalog::Dtype;
use crate::error::Result;
use crate::exec::reduce::{ReduceError, Reducer};
use crate::gpu::memory::DeviceBytes;
use crate::gpu::stream::Stream;
use crate::gpu::table::{Job, Jobs, KernelLaunch};
use crate::layout::ReduceOp;

/// A reduction of partial values that follow each other in one buffer. The result is written to another buffer, or into
/// the same buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReductionJob {
    /// The dtype, the operation and the divisor of the reduction.
    pub reducer: Reducer,
    /// The number of partial values, at least one.
    pub partial_count: u32,
    /// The number of elements of each partial value.
    pub numel: u64,
    /// The offset in bytes of the first partial value in its buffer.
    pub partial_values: usize,
    /// The offset in bytes of the result in the target buffer.
    pub target: usize,
}

/// Reduction jobs that are stored in a job table and are ready to run.
#[derive(Debug)]
pub struct ReductionJobs {
    launch: KernelLaunch,
    report_outcomes: CudaFunction,
    reducers: Vec<Reducer>,
    outcomes: Range<usize>,
}

impl Arithmetic {
    /// Builds the jobs of reductions from buffer `from` to buffer `into`, and appends them to the job table.
    ///
    /// # Panics
    /// Panics if a reduction reads or writes outside its buffers.
    pub(in crate::gpu) fn reduction_jobs(
        &self,
        jobs: &[ReductionJob],
        from: &impl DeviceBuffer,
        into: &impl DeviceBuffer,
        table: &mut Vec<u8>,
    ) -> ReductionJobs {
        table.resize(table.len().next_multiple_of(8), 0);
        let mut list = Jobs::at_end_of(table, BLOCK_UNITS);
        for (index, job) in jobs.iter().enumerate() {
            list.push(&job.job(from, into, (jobs.len() * RECORD + index * OUTCOME) as u64), table);
        }
        let launch = KernelLaunch { kernel: self.reduce.clone(), jobs: list };
        let begin = table.len();
        jobs.iter().for_each(|_| table.extend([NO_FAULT, 0, 0].map(u64::to_le_bytes).as_flattened()));
        ReductionJobs {
            launch,
            report_outcomes: self.report_outcomes.clone(),
            reducers: jobs.iter().map(|job| job.reducer).collect(),
            outcomes: begin..table.len(),
        }
    }
}

/// The size in bytes of the kernel's struct `Reduction`.
const RECORD: usize = 64;
/// The size in bytes of the kernel's struct `Outcome`.
const OUTCOME: usize = 24;
/// The index in an outcome if no element failed. Otherwise the outcome has the index of the failed element.
const NO_FAULT: u64 = u64::MAX;

impl ReductionJob {
    /// Returns the entry of this job in the job table: the fields of the kernel's `struct Reduction`. `outcome` is the
    /// offset at which the device writes the outcome.
    fn job(&self, from: &impl DeviceBuffer, into: &impl DeviceBuffer, outcome: u64) -> Job<5, 5> {
        let Self { reducer, partial_count: parts, numel, .. } = *self;
        assert!(parts > 0, "a reduction has partial values");
        let (numel, dtype) = real_elements(reducer.dtype(), numel);
        let itemsize = dtype.itemsize();
        let all = numel.checked_mul(parts.into()).expect("partial values in memory");
        let partial_values = address(from, self.partial_values, all, itemsize);
        let target = address(into, self.target, numel, itemsize);
        let unit_bytes = unit_bytes(dtype);
        let stride = if parts > 1 { numel * itemsize } else { 0 };
        let lane = access_bytes(&[partial_values, stride, target], unit_bytes);
        let itemsize = u32::try_from(itemsize).expect("a few bytes");
        Job {
            longs: [partial_values, target, numel, divisor(dtype, reducer.divisor()), outcome],
            words: [parts, dtype as u32, itemsize, op(reducer.op()), lane],
            units: (numel * u64::from(itemsize)).div_ceil(unit_bytes),
        }
    }
}

/// Returns the number of real elements in `numel` elements, and their dtype. A complex element has two real elements.
fn real_elements(dtype: Dtype, numel: u64) -> (u64, Dtype) {
    let part = match dtype {
        Dtype::C32 => Dtype::F16,
        Dtype::C64 => Dtype::F32,
        Dtype::C128 => Dtype::F64,
        real => return (numel, real),
    };
    (numel.checked_mul(2).expect("elements in memory"), part)
}

/// Returns the number of bytes of one partial value that a thread reduces in one step.
fn unit_bytes(dtype: Dtype) -> u64 {
    match dtype {
        float if float.is_float() => {
            if float.itemsize() == 1 {
                4
            } else {
                16
            }
        }
        integer => integer.itemsize(),
    }
}

/// Returns the divisor of an average in the type in which the sums are computed, as bits.
#[expect(clippy::cast_precision_loss, reason = "it is rounded as on the host")]
fn divisor(dtype: Dtype, divisor: u64) -> u64 {
    match dtype {
        Dtype::F64 | Dtype::F32 => (divisor as f64).to_bits(),
        narrow if narrow.is_float() => (divisor as f32).to_bits().into(),
        _ => divisor,
    }
}

/// Returns the code of an operation in the kernel's `enum class Op`.
fn op(op: ReduceOp) -> u32 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => 0,
        ReduceOp::Product => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Band => 4,
        ReduceOp::Bor => 5,
        ReduceOp::Bxor => 6,
    }
}

impl ReductionJobs {
    /// Queues the reductions on a stream.
    ///
    /// # Safety
    /// The conditions of [`KernelLaunch::run`] hold, and `table` is the table to which the jobs were appended.
    pub unsafe fn run(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.launch.run(stream, table)? };
        if self.reducers.iter().all(|reducer| real_elements(reducer.dtype(), 0).1.is_float()) {
            return Ok(());
        }
        let jobs = Jobs { blocks: self.launch.jobs.count, block_units: 1, ..self.launch.jobs };
        let launch = KernelLaunch { kernel: self.report_outcomes.clone(), jobs };
        // SAFETY: guaranteed by the caller.
        unsafe { launch.run(stream, table) }
    }

    /// Returns the byte range of the job table into which the device writes the outcomes.
    pub fn outcomes_range(&self) -> Range<usize> {
        self.outcomes.clone()
    }

    /// Checks the outcomes that the device wrote.
    ///
    /// # Errors
    /// Returns the index of the first job that failed, with the error that the host would return for the first element
    /// that the dtype cannot represent.
    pub fn check_outcomes(&self, bytes: &[u8]) -> Result<(), (usize, ReduceError)> {
        for (job, (reducer, record)) in zip(&self.reducers, read_records(bytes)).enumerate() {
            let [element, low, high] = record;
            if element != NO_FAULT {
                let mut sum = [low, high].map(u64::to_le_bytes);
                let mut value = [0; 8];
                let value = &mut value[..usize::try_from(reducer.dtype().itemsize()).expect("a few bytes")];
                let error = reducer.finish(sum.as_flattened_mut(), value);
                return Err((job, error.expect_err("a sum that fails on a device fails on the host")));
            }
        }
        Ok(())
    }
}
