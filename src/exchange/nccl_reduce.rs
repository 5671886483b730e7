//! Folds: reductions that NCCL makes itself, on the way.
//!
//! Where a tile has as many summands as there are ranks, and each of them has read another one, `ncclReduce` takes them
//! all and puts the value where it is wanted: no rank has summands of others in memory. It adds in an order of its own and
//! rounds to the dtype at each step, so a value is near what [`crate::exec::reduce`] makes, and not the same bits.
//!
//! ```text
//!     in the order of ranks    stage --packs--> outgoing --messages--> incoming --> summands --reduce--> value
//!     by NCCL                  stage --packs--> outgoing --------------ncclReduce----------------------> value
//! ```
//!
//! All ranks must call the same ones in the same order. Parts of a tile that go to several ranks are folds of several
//! roots in one group, as for `reduce_scatter` of uneven lengths in PyTorch's `ProcessGroupNCCL.cpp`. Counts bytes.

use std::ops::Range;

use super::demand::WantedTile;
use super::load::Load;
use super::strided::StridedCopy;
use crate::catalog::Dtype;
use crate::layout::ReduceOp;

/// What NCCL is to do with one summand a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReductionKind {
    pub dtype: Dtype,
    /// `Avg` is the sum divided by the number of ranks.
    pub op: ReduceOp,
}

/// A reduction in which all ranks take part.
#[derive(Clone, Debug)]
pub struct NcclReduction {
    pub folding: ReductionKind,
    /// Who gets the value.
    pub root: u32,
    /// This rank's summand, in what is outgoing.
    pub summand: Range<usize>,
    /// From the stage to the start of the summand.
    pub packs: Vec<StridedCopy>,
    /// Where it comes to, in what is unpacked, if this rank gets it.
    pub value: Option<Range<usize>>,
}

impl ReductionKind {
    /// How a tile would be folded by so many ranks; `None` where NCCL has no such reduction, or none that keeps zeros where
    /// something is left out.
    pub fn of(wanted: &WantedTile, ranks: usize) -> Option<Self> {
        use ReduceOp::{Avg, Max, Min, Product, Sum};
        let reducer = wanted.reducer?;
        let has_gaps = wanted.share.as_ref().is_some_and(|share| share.within.is_some());
        let dtype = reducer.dtype();
        let is_known = matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64);
        if ranks < 2 || wanted.parts.len() != ranks || has_gaps || !is_known {
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

/// Count what a fold takes of everybody. NCCL hands sums on from rank to rank, the last of which is the root.
pub fn weigh(root: u32, len: u64, loads: &mut [Load]) {
    let root = root as usize;
    let first = (root + 1) % loads.len();
    for (rank, load) in loads.iter_mut().enumerate() {
        *if rank == root { &mut load.kept } else { &mut load.first.sent } += len;
        load.first.received += if rank == first { 0 } else { len };
    }
}
