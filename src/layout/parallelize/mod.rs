//! Parallelize plans: how modules are cut over the mesh dim of tensor parallelism, and parameters over that of FSDP.
//!
//! Counts elements. A plan gives *modules* styles, by patterns of their names; a style says how each parameter of the
//! module lies on the one mesh dim it is applied to. FSDP then cuts dim 0 of what tensor parallelism left, over a mesh
//! dim of its own.
//!
//! ```text
//!     style                  weight    bias
//!     colwise                S(0)      S(0)      nn.Linear, whose weight is (out, in): the outputs
//!     rowwise                S(1)      R         nn.Linear: the inputs; the bias is added once, after the reduction
//!     colwise-embedding      S(1)                nn.Embedding: its columns
//!     rowwise-embedding      S(0)                nn.Embedding: the vocabulary
//!     colwise-conv1d         S(1)      S(0)      transformers' Conv1D, whose weight is (in, out)
//!     rowwise-conv1d         S(0)      R
//!     colwise(3)             _S(0,3)   _S(0,3)   three weights in one (q, k, v), each cut by itself
//!     pairwise                                   linear children in turn: colwise, rowwise; a last odd one is left alone
//!     sequence, replicate    R         R         a DTensor all the same
//!     none                                       as if no style named it
//! ```
//!
//! Weights of more dims are stacks of such weights (experts), and dims count from the end. What no style names is left
//! to FSDP, on the slice of the mesh that is FSDP's; without FSDP it is a plain tensor.
//!
//! Invariant: the parts of a fused weight are never cut across in silence. Where they cannot be cut each by itself, the
//! weight stays whole on that mesh dim, and [`Laid`] says so.
//!
//! Source: `torch/distributed/tensor/parallel/style.py` and `api.py`, `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`;
//! `PairwiseParallel`, which was in PyTorch to 2.3, and Conv1D, which it refuses, are defined here.

mod bind;
mod family;
mod roles;
mod style;

#[cfg(test)]
mod tests;

use std::fmt;

use super::shards::SharedTensor;
use super::{LayoutError, Pattern};
use crate::name_list::{FEW, short_list};

pub use bind::{Parameter, ParameterKind, ParameterOrder, ShapeOrigin};
pub use family::{Family, alike};
pub use roles::{MeshRoles, RoleNames, UnboundPlan};
pub use style::{ParallelStyle, ParameterRole};

/// A style and the modules that have it.
#[derive(Clone, Debug)]
pub struct StyleRule {
    /// Of the module itself, or of a parameter that has none of its own (stacked experts).
    pub pattern: Pattern,
    pub style: ParallelStyle,
    /// Where it was said, for messages: `plan llama: layers.*.attention.wo`, `plan.toml line 7`.
    pub said: String,
}

/// Styles, and the mesh dims they are for.
#[derive(Clone, Debug, Default)]
pub struct ParallelizePlan {
    /// Each has to name something. The first that names a parameter wins.
    pub styles: Vec<StyleRule>,
    /// A built-in plan behind them, of which not everything need be there.
    pub family: Option<&'static Family>,
    pub roles: MeshRoles,
}

/// How a parameter comes to lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterPlacement {
    /// `None` for a plain tensor on every rank.
    pub shared: Option<SharedTensor>,
    pub by: PlacementSource,
    /// Where it was not cut that would have been.
    pub uncut: Option<UncutReason>,
    /// What a built-in plan takes for granted.
    pub note: Option<&'static str>,
}

/// Who decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementSource {
    Style(ParallelStyle),
    /// No style names it: FSDP, or nobody.
    Nobody,
    /// It is no parameter.
    Buffer,
}

impl fmt::Display for PlacementSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Style(style) => style.fmt(f),
            Self::Nobody => f.write_str("no style"),
            Self::Buffer => f.write_str("buffers"),
        }
    }
}

/// Why a mesh dim has all of a tensor that is made of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UncutReason {
    /// The dim of tensor parallelism: blocks of a whole number of elements there are none.
    OddBlocks { blocks: u64, size: u64 },
    /// The dim of FSDP, which no placement puts behind that of tensor parallelism where that takes a part of each block.
    BlocksWithinFsdp,
}

/// What can be wrong with a plan, by itself or next to a mesh or a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("a plan goes by the names of mesh dims, and the mesh {mesh} has none")]
    UnnamedMesh { mesh: String },

    #[error("{role} {name}: expected a dim of the mesh, found {}", dims.join(", "))]
    NoSuchDim { role: &'static str, name: String, dims: Vec<String> },

    #[error("mesh dim {name}: expected one use, found {first} and {second}")]
    DimTwice { name: String, first: &'static str, second: &'static str },

    #[error("mesh dim {name} of {mesh}: a plan does not know what it is for")]
    LeftOver { name: String, mesh: String },

    #[error("{said}: the mesh {mesh} has no dim for tensor parallelism")]
    NoTensorDim { said: String, mesh: String },

    #[error("mesh dim {name}: no plan says how modules are cut over it")]
    NoStyles { name: String },

    #[error("{said}: no module or parameter has a name like that")]
    Unmatched { said: String, pattern: String },

    #[error("plan {plan}: the model has none of its attention or MLP modules: is it of another family?")]
    OtherFamily { plan: &'static str, alike: Vec<&'static str> },

    #[error("{said}: the order in which {module} registered its children {} is not known", short_list(children, FEW))]
    UnknownOrder { said: String, module: String, children: Vec<String> },

    #[error("{said}: expected a module with two linear children at least, found {found} in {module}")]
    NoPair { said: String, module: String, found: usize },

    #[error("{0}")]
    Layout(#[from] LayoutError),
}
