//! Parallelize plans, which shard modules over the mesh dim of tensor parallelism and parameters over the mesh dim of
//! FSDP.
//!
//! A plan assigns styles to *modules*, by patterns for their names. A style gives each parameter of the module a
//! placement on the mesh dim of tensor parallelism. FSDP then shards dim 0 of the local tensor over a mesh dim of its
//! own.
//!
//! ```text
//!     style                  weight    bias
//!     colwise                S(0)      S(0)      nn.Linear, whose weight is (out, in): the outputs
//!     rowwise                S(1)      R         nn.Linear: the inputs; the bias is added once, after the reduction
//!     colwise-embedding      S(1)                nn.Embedding: its columns
//!     rowwise-embedding      S(0)                nn.Embedding: the vocabulary
//!     colwise-conv1d         S(1)      S(0)      transformers' Conv1D, whose weight is (in, out)
//!     rowwise-conv1d         S(0)      R
//!     colwise(3)             _S(0,3)   _S(0,3)   a fused weight of three (q, k, v), each sharded separately
//!     pairwise                                   colwise, rowwise, ... for linear children; skips an unpaired last one
//!     pairwise(a,b)                              colwise for the child a, rowwise for b
//!     sequence, replicate    R         R         a DTensor that is not sharded
//!     none                                       the module has no style
//! ```
//!
//! A weight with more dims than in the table is a stack of weights (experts), so the dims in the table count from the
//! end. A parameter without a style is sharded by FSDP only, on the FSDP slice of the mesh. Without FSDP it is a plain
//! tensor.
//!
//! Invariant: a fused weight is never sharded as if it were a single weight. If a mesh dim cannot shard its blocks
//! separately, the weight is replicated on this mesh dim, and [`ParameterPlacement::uncut`] has the reason.
//!
//! Source: `torch/distributed/tensor/parallel/style.py` and `api.py`,
//! `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`. `PairwiseParallel`, which PyTorch had up to 2.3, and Conv1D,
//! which PyTorch refuses, are defined here.

mod bind;
mod candidate;
mod family;
mod pairwise;
mod roles;
mod style;

#[cfg(test)]
mod tests;

use std::fmt;

use super::distinct_tiles::SharedTensor;
use super::{LayoutError, Pattern};
use crate::name_list::{FEW, short_list};

pub use candidate::{Parameter, ParameterKind, ParameterOrder, ShapeOrigin, module_of};
pub use family::{Family, similar_families};
pub use roles::{MeshRoles, RoleNames, UnboundPlan};
pub use style::{ParallelStyle, ParameterRole, RuleStyle};

/// A style, and a pattern for the modules that get this style.
#[derive(Clone, Debug)]
pub struct StyleRule {
    /// A pattern for a module name, or for the name of a parameter that is not the weight or bias of a module (stacked
    /// experts).
    pub pattern: Pattern,
    pub style: RuleStyle,
    /// The source of the rule, for messages: `plan llama: layers.*.attention.wo`, `plan.toml line 7`.
    pub origin: String,
}

/// A plan: the styles of modules, and the mesh dims for tensor parallelism and FSDP.
#[derive(Clone, Debug, Default)]
pub struct ParallelizePlan {
    /// The styles of the user. Each of these styles must match a parameter. If several styles match a parameter, the
    /// first style wins.
    pub styles: Vec<StyleRule>,
    /// A built-in plan, tried after the styles. Not all of its patterns need to match.
    pub family: Option<&'static Family>,
    /// The mesh dims of tensor parallelism and FSDP.
    pub roles: MeshRoles,
}

/// The placement that a plan gives one parameter, and the origin of this placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterPlacement {
    /// The placements of a DTensor, or `None` for a plain tensor that every rank has in full.
    pub shared: Option<SharedTensor>,
    /// The rule that decided the placement.
    pub by: PlacementSource,
    /// If the plan would shard the parameter on a mesh dim but the parameter is replicated there, the reason; otherwise
    /// `None`.
    pub uncut: Option<UncutReason>,
    /// A text about an assumption of the built-in plan that the user should know, or `None`.
    pub note: Option<&'static str>,
}

/// The rule that decided the placement of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementSource {
    /// A style of the plan matches the parameter.
    Style(ParallelStyle),
    /// No style matches the parameter; only FSDP may shard it.
    NoStyle,
    /// The tensor is a buffer, not a parameter.
    Buffer,
}

impl fmt::Display for PlacementSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Style(style) => style.fmt(f),
            Self::NoStyle => f.write_str("no style"),
            Self::Buffer => f.write_str("buffers"),
        }
    }
}

/// The reason why a fused tensor is replicated on a mesh dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UncutReason {
    /// The size of the tensor dim is not a multiple of the number of blocks (the weights in the fused tensor), so tensor
    /// parallelism cannot shard each block.
    OddBlocks { blocks: u64, size: u64 },
    /// Tensor parallelism gives each rank a shard of each block, and the FSDP mesh dim is to the left of the TP mesh
    /// dim. No placement can express that FSDP then shards these shards, so the tensor is replicated on the FSDP mesh
    /// dim.
    BlocksWithinFsdp,
}

/// An error in a plan, or a plan that does not fit the mesh or the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("a plan needs named mesh dims, and the mesh {mesh} has no names")]
    UnnamedMesh { mesh: String },

    #[error("{role} {name}: the mesh has no dim `{name}`, only {}", dims.join(", "))]
    NoSuchDim { role: &'static str, name: String, dims: Vec<String> },

    #[error("{first} and {second} both use mesh dim {name}")]
    DimTwice { name: String, first: &'static str, second: &'static str },

    #[error("the plan does not use mesh dim {name} of {mesh}")]
    UnusedDim { name: String, mesh: String },

    #[error("{origin}: the mesh {mesh} has no dim for tensor parallelism")]
    NoTensorDim { origin: String, mesh: String },

    #[error("no plan or style shards modules over mesh dim {name}")]
    NoStyles { name: String },

    #[error("{origin}: no module or parameter matches this pattern")]
    Unmatched { origin: String, pattern: String },

    #[error(
        "plan {plan}: the model has no attention or MLP module of this plan; the model may belong to another family"
    )]
    OtherFamily { plan: &'static str, similar: Vec<&'static str> },

    #[error("{origin}: the registration order of the children of {module} is unknown: {}", short_list(children, FEW))]
    UnknownOrder { origin: String, module: String, children: Vec<String> },

    #[error("{origin}: expected a module with at least two linear children, found {found} in `{module}`")]
    NoPair { origin: String, module: String, found: usize },

    #[error(
        "{origin}: {module}: {first} has {outputs} outputs and {second} has {inputs} inputs, expected equal numbers for \
         a pair of linear modules"
    )]
    SizesOfPair { origin: String, module: String, first: String, outputs: u64, second: String, inputs: u64 },

    #[error("{origin}: {module} has no linear child `{child}`")]
    NoSuchChild { origin: String, module: String, child: String, children: Vec<String> },

    #[error("{0}")]
    Layout(#[from] LayoutError),
}
