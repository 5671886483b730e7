//! What can be wrong with a layout that somebody wrote down.
//!
//! Each message names what was expected and what was found, and is complete without its context.
//! What can be wrong with *tiles* is [`super::CoverError`].

use super::{MeshDim, Rank, TensorDim};

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

    #[error("shard order of dim {dim}: expected {expected}, found {found}")]
    ShardOrder { dim: TensorDim, expected: &'static str, found: String },

    #[error("pattern `{text}`: {problem}")]
    Pattern { text: String, problem: String },

    #[error("placements `{placements}`: expected one for each dim of the mesh {mesh}")]
    PlacementList { placements: String, mesh: String },

    #[error("placements `{placements}`: expected S, _S or R, found a Partial, which is no layout to save in")]
    PartialTarget { placements: String },

    #[error("{fqn}: the rule `{rule}` gives it {placement}, which does not fit its shape {shape:?}")]
    RuleMisfit { rule: String, placement: String, fqn: String, shape: Vec<u64> },
}
