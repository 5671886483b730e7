//! Folding: NCCL reduces, each rank having one summand.
//!
//! Folds of a round are one group of `ncclReduce`, each with a root of its own, which all ranks queue alike: as
//! `ProcessGroupNCCL.cpp` of PyTorch does for a `reduce_scatter` of uneven lengths. What an average is, and in which order
//! and precision is added, is NCCL's.

use std::ops::Range;

use nccl::{DataType, DeviceView, DeviceViewMut, RedOp};

use super::Nccl;
use super::communicator::lent;
use super::memory::DeviceBytes;
use super::stream::Stream;
use crate::catalog::Dtype;
use crate::comm::Communicator;
use crate::error::{DeviceError, Error, Result};
use crate::exchange::{NcclReduction, ReductionKind};
use crate::layout::ReduceOp;

const OP: &str = "reduce";

impl Nccl {
    /// Queue the folds of a round on a stream.
    pub(super) fn queue_folds(
        &self,
        stream: &Stream,
        folds: &[NcclReduction],
        outgoing: &DeviceBytes,
        unpacked: &mut DeviceBytes,
    ) -> Result<()> {
        if folds.is_empty() {
            return Ok(());
        }
        let summands: Vec<Range<usize>> = folds.iter().map(|fold| fold.summand.clone()).collect();
        let values: Vec<Range<usize>> = folds.iter().map(|fold| fold.value.clone().unwrap_or_default()).collect();
        let summands = lent(OP, DeviceView::of(outgoing), DeviceView::split_at, &summands)?;
        let values = lent(OP, DeviceViewMut::of(unpacked), DeviceViewMut::split_at, &values)?;
        let known = folds.iter().map(|fold| known(fold.folding)).collect::<Result<Vec<_>>>()?;
        self.queue(OP, stream, |group| {
            for (((fold, (dtype, op)), summand), value) in folds.iter().zip(known).zip(summands).zip(values) {
                if let Some(summand) = summand {
                    group.reduce(summand, value, dtype, (op, fold.root as usize))?;
                }
            }
            Ok(())
        })?;
        for fold in folds {
            self.counter().fold(fold.root, fold.summand.len() as u64, (self.rank(), self.size()));
        }
        Ok(())
    }
}

/// As NCCL has it.
fn known(ReductionKind { dtype, op }: ReductionKind) -> Result<(DataType, RedOp)> {
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
        Error::Device(DeviceError { op: OP, detail: format!("NCCL has no {op} of {dtype}"), hint: None })
    })
}
