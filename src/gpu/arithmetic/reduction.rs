//! Reductions: summands that lie one behind the other become their value.

use std::iter::zip;
use std::ops::Range;

use cudarc::driver::CudaFunction;
use nccl::DeviceBuffer;

use super::{Arithmetic, BLOCK_UNITS, address, lane, told};
use crate::catalog::Dtype;
use crate::error::Result;
use crate::exec::reduce::{ReduceError, Reducer};
use crate::gpu::memory::DeviceBytes;
use crate::gpu::stream::Stream;
use crate::gpu::table::{Job, Jobs, KernelLaunch};
use crate::layout::ReduceOp;

/// Summands in one buffer whose value goes to another, or elsewhere in the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReductionJob {
    pub reducer: Reducer,
    /// How many there are, one at least.
    pub parts: u32,
    /// Elements of each.
    pub numel: u64,
    /// Where the first begins, in bytes.
    pub summands: usize,
    /// Where the value does.
    pub target: usize,
}

/// Those of a table, ready to be done.
#[derive(Debug)]
pub struct ReductionJobs {
    launch: KernelLaunch,
    tell_outcomes: CudaFunction,
    reducers: Vec<Reducer>,
    outcomes: Range<usize>,
}

impl Arithmetic {
    /// Reductions from one buffer into another, whose records go behind what the table has.
    ///
    /// # Panics
    /// Where they leave their buffers.
    pub(in crate::gpu) fn reductions(
        &self,
        jobs: &[ReductionJob],
        from: &impl DeviceBuffer,
        into: &impl DeviceBuffer,
        table: &mut Vec<u8>,
    ) -> ReductionJobs {
        table.resize(table.len().next_multiple_of(8), 0);
        let mut listed = Jobs::behind(table, BLOCK_UNITS);
        for (nth, job) in jobs.iter().enumerate() {
            listed.push(&job.job(from, into, (jobs.len() * RECORD + nth * OUTCOME) as u64), table);
        }
        let launch = KernelLaunch { kernel: self.reduce.clone(), jobs: listed };
        let begin = table.len();
        jobs.iter().for_each(|_| table.extend([NONE, 0, 0].map(u64::to_le_bytes).as_flattened()));
        ReductionJobs {
            launch,
            tell_outcomes: self.tell_outcomes.clone(),
            reducers: jobs.iter().map(|job| job.reducer).collect(),
            outcomes: begin..table.len(),
        }
    }
}

/// Bytes of `struct Reduction`, and of `struct Outcome`.
const RECORD: usize = 64;
const OUTCOME: usize = 24;
/// No element is wrong.
const NONE: u64 = u64::MAX;

impl ReductionJob {
    /// As `struct Reduction` of the kernel.
    fn job(&self, from: &impl DeviceBuffer, into: &impl DeviceBuffer, outcome: u64) -> Job<5, 5> {
        let Self { reducer, parts, numel, .. } = *self;
        assert!(parts > 0, "a value has summands");
        let (numel, dtype) = scalars(reducer.dtype(), numel);
        let itemsize = dtype.itemsize();
        let all = numel.checked_mul(parts.into()).expect("summands in memory");
        let summands = address(from, self.summands, all, itemsize);
        let target = address(into, self.target, numel, itemsize);
        let unit_bytes = unit_bytes(dtype);
        let stride = if parts > 1 { numel * itemsize } else { 0 };
        let lane = lane(&[summands, stride, target], unit_bytes);
        let itemsize = u32::try_from(itemsize).expect("a few bytes");
        Job {
            longs: [summands, target, numel, divisor(dtype, reducer.divisor()), outcome],
            words: [parts, dtype as u32, itemsize, op(reducer.op()), lane],
            units: (numel * u64::from(itemsize)).div_ceil(unit_bytes),
        }
    }
}

/// As what elements are reduced: complex numbers by real and imaginary part.
fn scalars(dtype: Dtype, numel: u64) -> (u64, Dtype) {
    let part = match dtype {
        Dtype::C32 => Dtype::F16,
        Dtype::C64 => Dtype::F32,
        Dtype::C128 => Dtype::F64,
        real => return (numel, real),
    };
    (numel.checked_mul(2).expect("elements in memory"), part)
}

/// What a thread does at a time.
fn unit_bytes(dtype: Dtype) -> u64 {
    match dtype {
        float if float.is_float() => {
            if float.itemsize() == 1 {
                4
            } else {
                16
            }
        }
        whole => whole.itemsize(),
    }
}

/// The bits of a divisor in the type that sums have.
#[expect(clippy::cast_precision_loss, reason = "it is rounded as on the host")]
fn divisor(dtype: Dtype, divisor: u64) -> u64 {
    match dtype {
        Dtype::F64 | Dtype::F32 => (divisor as f64).to_bits(),
        narrow if narrow.is_float() => (divisor as f32).to_bits().into(),
        _ => divisor,
    }
}

/// As `enum class Op` has it.
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
    /// Do them on a stream.
    ///
    /// # Safety
    /// As [`Launch::run`]; the table is that of which the records are a part.
    pub unsafe fn run(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { self.launch.run(stream, table)? };
        if self.reducers.iter().all(|reducer| scalars(reducer.dtype(), 0).1.is_float()) {
            return Ok(());
        }
        let jobs = Jobs { blocks: self.launch.jobs.count, block_units: 1, ..self.launch.jobs };
        let launch = KernelLaunch { kernel: self.tell_outcomes.clone(), jobs };
        // SAFETY: promised by the caller.
        unsafe { launch.run(stream, table) }
    }

    /// Where in the table the device tells how it went, in bytes.
    pub fn outcomes(&self) -> Range<usize> {
        self.outcomes.clone()
    }

    /// Of what the device told: the first job that failed, and why.
    ///
    /// # Errors
    /// As the host has it, of the first element of the job that has no value.
    pub fn outcome(&self, told_bytes: &[u8]) -> Result<(), (usize, ReduceError)> {
        for (job, (reducer, told)) in zip(&self.reducers, told(told_bytes)).enumerate() {
            let [element, low, high] = told;
            if element != NONE {
                let mut sum = [low, high].map(u64::to_le_bytes);
                let mut value = [0; 8];
                let value = &mut value[..usize::try_from(reducer.dtype().itemsize()).expect("a few bytes")];
                let fault = reducer.finish(sum.as_flattened_mut(), value);
                return Err((job, fault.expect_err("what has no value on a device has none on the host")));
            }
        }
        Ok(())
    }
}
