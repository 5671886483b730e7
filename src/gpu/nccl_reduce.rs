//! NCCL reductions of a round: one NCCL group of `ncclReduce` calls, each with its own root, the process that gets the
//! result. All processes queue the same group, as PyTorch's `ProcessGroupNCCL.cpp` does for a `reduce_scatter` with
//! different lengths. NCCL defines the average, the order of additions and their precision. All sizes and offsets are
//! in bytes.

use std::ops::Range;

use nccl::{DataType, DeviceView, DeviceViewMut, RedOp};

use super::Nccl;
use super::memory::DeviceBytes;
use super::nccl_communicator::lent;
use super::stream::Stream;
use crate::catalog::Dtype;
use crate::comm::Communicator;
use crate::error::{DeviceError, Error, Result};
use crate::exchange::{NcclReduction, ReductionKind};
use crate::layout::ReduceOp;

const OP: &str = "reduce";

impl Nccl {
    /// Queues the NCCL reductions of a round on a stream. Partial values are read from the outgoing buffer, and results
    /// are written to the unpacked buffer.
    pub(super) fn queue_reductions(
        &self,
        stream: &Stream,
        reductions: &[NcclReduction],
        outgoing: &DeviceBytes,
        unpacked: &mut DeviceBytes,
    ) -> Result<()> {
        if reductions.is_empty() {
            return Ok(());
        }
        let partial_values: Vec<Range<usize>> =
            reductions.iter().map(|reduction| reduction.partial_range.clone()).collect();
        let values: Vec<Range<usize>> =
            reductions.iter().map(|reduction| reduction.value_range.clone().unwrap_or_default()).collect();
        let partial_values = lent(OP, DeviceView::of(outgoing), DeviceView::split_at, &partial_values)?;
        let values = lent(OP, DeviceViewMut::of(unpacked), DeviceViewMut::split_at, &values)?;
        let types = reductions.iter().map(|reduction| nccl_types(reduction.kind)).collect::<Result<Vec<_>>>()?;
        self.queue(OP, stream, |group| {
            for (((reduction, (dtype, op)), partial_value), value) in
                reductions.iter().zip(types).zip(partial_values).zip(values)
            {
                if let Some(partial_value) = partial_value {
                    group.reduce(partial_value, value, dtype, (op, reduction.root as usize))?;
                }
            }
            Ok(())
        })?;
        for reduction in reductions {
            self.counter().fold(reduction.root, reduction.partial_range.len() as u64, (self.rank(), self.size()));
        }
        Ok(())
    }
}

/// Returns NCCL's codes for a dtype and an operation. Fails if NCCL cannot reduce them.
fn nccl_types(ReductionKind { dtype, op }: ReductionKind) -> Result<(DataType, RedOp)> {
    let element = match dtype {
        Dtype::F16 => Some(DataType::Float16),
        Dtype::Bf16 => Some(DataType::Bfloat16),
        Dtype::F32 => Some(DataType::Float32),
        Dtype::F64 => Some(DataType::Float64),
        _ => None,
    };
    let reduction = match op {
        ReduceOp::Sum => Some(RedOp::Sum),
        ReduceOp::Avg => Some(RedOp::Avg),
        ReduceOp::Product => Some(RedOp::Prod),
        ReduceOp::Max => Some(RedOp::Max),
        ReduceOp::Min => Some(RedOp::Min),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => None,
    };
    element.zip(reduction).ok_or_else(|| {
        Error::Device(DeviceError { op: OP, detail: format!("NCCL cannot reduce {dtype} by {op}"), hint: None })
    })
}
