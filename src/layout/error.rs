//! What can be wrong with a layout that somebody wrote down.
//!
//! Each message names what was expected and what was found, and is complete without its context.
//! What can be wrong with *tiles* is [`super::CoverError`].

use super::{MeshDim, Rank, ReduceOp, TensorDim};

fn sum_of(sizes: &[u64]) -> String {
    sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
}

/// A mesh, placement or coordinate that makes no sense by itself or next to the others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    #[error("mesh `{spec}`: expected {expected}, found `{found}`")]
    MeshSpec { spec: String, expected: &'static str, found: String },

    #[error("mesh of shape {shape}: expected every dim to be at least 1, found 0")]
    EmptyMesh { shape: String },

    #[error("mesh of shape {shape}: expected at most {limit} ranks, found more")]
    MeshTooLarge { shape: String, limit: u64 },

    #[error("mesh of shape {shape}: expected as many ranks as cells, found {found} ranks")]
    RankCount { shape: String, found: usize },

    #[error("mesh: expected every rank once, found rank {rank} again")]
    DuplicateRank { rank: Rank },

    #[error("mesh: expected {expected} dim names, found {found}")]
    NameCount { expected: usize, found: usize },

    #[error("mesh: expected distinct dim names, found `{name}` again")]
    DuplicateName { name: String },

    #[error("placement `{spec}`: expected {expected}, found `{found}`")]
    PlacementSpec { spec: String, expected: &'static str, found: String },

    #[error("expected one placement for each of {expected} mesh dims, found {found}")]
    PlacementCount { expected: usize, found: usize },

    #[error("expected a coordinate within the mesh of shape {mesh}, found {found}")]
    Coordinate { mesh: String, found: String },

    #[error("mesh dim {mesh_dim} shards dim {dim}: expected a tensor with that dim, found {ndim} dims")]
    NoSuchDim { mesh_dim: MeshDim, dim: TensorDim, ndim: usize },

    #[error("mesh dim {mesh_dim}: expected a split factor of at least 1, found 0")]
    ZeroSplitFactor { mesh_dim: MeshDim },

    #[error("dim {dim}: expected a local shard of at most {limit} intervals, found {found}")]
    Fragmented { dim: TensorDim, limit: u64, found: u64 },

    #[error("split `{spec}`: expected chunk, balanced, makani or sizes such as 3+1")]
    SplitSpec { spec: String },

    #[error("expected no split or one for each of {expected} mesh dims, found {found}")]
    SplitCount { expected: usize, found: usize },

    #[error("sizes {}: expected {parts} that add up to {numel}", sum_of(sizes))]
    SplitSizes { sizes: Vec<u64>, parts: u64, numel: u64 },

    #[error(
        "mesh dim {mesh_dim}: expected a dim that divides evenly into the parts of _S with split factor {split_factor}, \
         found {numel} elements to be split by {split}"
    )]
    SplitStrided { mesh_dim: MeshDim, split: String, split_factor: u64, numel: u64 },

    #[error("mesh dims reduce by {first} and {second}, which do not commute: there is no one value")]
    MixedReduction { first: ReduceOp, second: ReduceOp },

    #[error("P({from}) cannot become P({to}): summands of one are none of the other")]
    PartialToPartial { from: ReduceOp, to: ReduceOp },

    #[error("P({op}) cannot be made of a whole value: no values of the ranks are known whose {op} it is")]
    NoSummands { op: ReduceOp },

    #[error("shard order of dim {dim}: expected {expected}, found {found}")]
    ShardOrder { dim: TensorDim, expected: &'static str, found: String },

    #[error("style `{text}`: expected {expected}")]
    Style { text: String, expected: &'static str },

    #[error("pattern `{text}`: {problem}")]
    Pattern { text: String, problem: String },

    #[error("placements `{placements}`: expected one for each dim of the mesh {mesh}")]
    PlacementList { placements: String, mesh: String },

    #[error("placements `{placements}`: expected R on mesh dim {mesh_dim}, which is not among the dims of the slice")]
    OutsideSlice { placements: String, mesh_dim: MeshDim },

    /// In a layout file; `said` is the place, with the name of the file.
    #[error("{said}: {problem}")]
    File { file: String, said: String, problem: String, hint: Option<String> },

    #[error("{fqn}: the rule `{rule}` gives it {placement}, which does not fit its shape {shape:?}")]
    RuleMisfit { rule: String, placement: String, fqn: String, shape: Vec<u64> },

    /// A tensor that cannot be cut as somebody said.
    #[error("{fqn}: {error} ({by})")]
    Cut { fqn: String, by: String, error: Box<LayoutError>, hint: &'static str },

    /// One that was met at a tensor.
    #[error("{fqn}: {error}")]
    Tensor { fqn: String, error: Box<LayoutError> },
}

impl LayoutError {
    /// For `map_err`: with the name of the tensor that it was met at.
    pub fn of(fqn: &impl ToString) -> impl Fn(Self) -> Self {
        move |error| Self::Tensor { fqn: fqn.to_string(), error: Box::new(error) }
    }
}
