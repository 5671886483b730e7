//! NCCL reductions. `ncclReduce` can reduce the partial values of a tile while it sends them. This is possible if each
//! process reads a different partial value, and there are as many partial values as processes. Then no process needs
//! memory for partial values of other processes. NCCL adds in its own order and rounds to the dtype at each step.
//! Therefore a result is close to the result of [`crate::exec::reduce`], but may have different bits. All sizes and
//! offsets are in bytes. Invariant: all processes queue the same reductions in the same order.
//!
//! ```text
//!     in rank order    stage --packs--> outgoing --messages--> incoming --> partial values --reduce--> value
//!     by NCCL          stage --packs--> outgoing --------------ncclReduce----------------------------> value
//! ```
//!
//! If several processes need different parts of a tile, each part is a reduction with its own root (the process that
//! gets the result). All these reductions are in one NCCL group, as in PyTorch's `ProcessGroupNCCL.cpp` for a
//! `reduce_scatter` with different lengths.

use std::ops::Range;

use super::demand::NeededTile;
use super::load::Load;
use super::strided::StridedCopy;
use crate::catalog::Dtype;
use crate::layout::ReduceOp;

/// The dtype and the operation of an NCCL reduction. Each process contributes one partial value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReductionKind {
    /// The dtype of the partial values, and also of the result.
    pub dtype: Dtype,
    /// The reduction operation. `Avg` is the sum divided by the number of processes.
    pub op: ReduceOp,
}

/// An NCCL reduction. All processes take part in it.
#[derive(Clone, Debug)]
pub struct NcclReduction {
    /// The dtype and the operation of the reduction.
    pub kind: ReductionKind,
    /// The process that gets the result.
    pub root: u32,
    /// The byte range of the outgoing buffer that contains this process's partial value.
    pub partial_range: Range<usize>,
    /// The copies that pack this process's partial value from the stage buffer into `partial_range`. Their target
    /// offsets count from the start of `partial_range`.
    pub packs: Vec<StridedCopy>,
    /// The byte range of the unpacked buffer into which the result is written; `None` if this process is not the root.
    pub value_range: Option<Range<usize>>,
}

impl ReductionKind {
    /// Returns the kind of NCCL reduction with which `ranks` processes can reduce a tile. Returns `None` unless all of
    /// these hold: there are at least two processes; there is one partial value for each process; NCCL supports the
    /// dtype, the operation and the divisor; every element of the tile gets the reduced value (NCCL cannot set the
    /// other elements to 0).
    pub fn for_tile(needed: &NeededTile, ranks: usize) -> Option<Self> {
        use ReduceOp::{Avg, Max, Min, Product, Sum};
        let reducer = needed.reducer?;
        let has_gaps = needed.share.as_ref().is_some_and(|share| share.within.is_some());
        let dtype = reducer.dtype();
        let is_known = matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64);
        if ranks < 2 || needed.sources.len() != ranks || has_gaps || !is_known {
            return None;
        }
        let op = match (reducer.op(), reducer.divisor()) {
            (Sum | Avg, 1) => Sum,
            (Sum | Avg, divisor) if divisor == ranks as u64 => Avg,
            (op @ (Product | Max | Min), 1) => op,
            _ => return None,
        };
        Some(Self { dtype, op })
    }
}

/// Adds the `len` bytes of an NCCL reduction to the loads of all processes. NCCL sends partial sums from process to
/// process, in a chain that ends at `root`.
pub fn add_loads(root: u32, len: u64, loads: &mut [Load]) {
    let root = root as usize;
    let first = (root + 1) % loads.len();
    for (rank, load) in loads.iter_mut().enumerate() {
        *if rank == root { &mut load.own_partial_values } else { &mut load.first_phase.sent } += len;
        load.first_phase.received += if rank == first { 0 } else { len };
    }
}
