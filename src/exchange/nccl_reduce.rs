//! NCCL reductions. `ncclReduce` can reduce the partial values of a tile while it sends them. This is possible if each
//! rank reads a different partial value, and there are as many partial values as ranks. Then no rank needs memory for
//! partial values of other ranks. NCCL adds in its own order and rounds to the dtype at each step. Therefore a result
//! is close to the result of [`crate::exec::reduce`], but may have different bits. All sizes and offsets are in bytes.
//! Invariant: all ranks queue the same reductions in the same order.
//!
//! ```text
//!     in rank order    stage --packs--> outgoing --messages--> incoming --> partial values --reduce--> value
//!     by NCCL          stage --packs--> outgoing --------------ncclReduce----------------------------> value
//! ```
//!
//! If several ranks need parts of a tile, each part is a reduction with its own root. All these reductions are in one
//! NCCL group, as in PyTorch's `ProcessGroupNCCL.cpp` for a `reduce_scatter` with different lengths.

use std::ops::Range;

use super::demand::NeededTile;
use super::load::Load;
use super::strided::StridedCopy;
use crate::catalog::Dtype;
use crate::layout::ReduceOp;

/// The dtype and the operation of an NCCL reduction. Each rank contributes one partial value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReductionKind {
    /// The dtype of the partial values, and also of the result.
    pub dtype: Dtype,
    /// The reduction operation. `Avg` is the sum divided by the number of ranks.
    pub op: ReduceOp,
}

/// An NCCL reduction. All ranks take part in it.
#[derive(Clone, Debug)]
pub struct NcclReduction {
    /// The dtype and the operation of the reduction.
    pub kind: ReductionKind,
    /// The rank that gets the result.
    pub root: u32,
    /// The byte range of the outgoing buffer that contains this rank's partial value.
    pub partial_range: Range<usize>,
    /// The copies that pack this rank's partial value from the stage buffer into `partial_range`. Their target offsets
    /// count from the start of `partial_range`.
    pub packs: Vec<StridedCopy>,
    /// The byte range of the unpacked buffer into which the result is written; `None` if this rank is not the root.
    pub value_range: Option<Range<usize>>,
}

impl ReductionKind {
    /// Returns the kind of NCCL reduction with which `ranks` ranks can reduce a tile. Returns `None` if NCCL does not
    /// support the dtype or the operation. Also returns `None` if some elements of the tile have no partial value,
    /// because these elements must stay 0.
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

/// Adds the bytes of an NCCL reduction to the loads of all ranks. NCCL sends partial sums from rank to rank, and the
/// root is the last rank.
pub fn add_loads(root: u32, len: u64, loads: &mut [Load]) {
    let root = root as usize;
    let first = (root + 1) % loads.len();
    for (rank, load) in loads.iter_mut().enumerate() {
        *if rank == root { &mut load.own_partial_values } else { &mut load.first_phase.sent } += len;
        load.first_phase.received += if rank == first { 0 } else { len };
    }
}
