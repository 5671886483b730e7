//! Errors in a mesh, placement or layout that the user wrote.
//!
//! Each message can be understood without its context, and most messages name the expected and the found value. Errors
//! about tiles are in [`super::CoverError`]. Sizes are in elements.

use serde_json::{Value as Json, json};

use super::{MeshDim, Rank, ReduceOp, TensorDim};
use crate::document::DocumentError;

/// Returns the text that the user wrote, in backticks; for an empty text, returns the word `nothing`.
fn quoted(found: &str) -> String {
    if found.is_empty() { String::from("nothing") } else { format!("`{found}`") }
}

fn sum_of(sizes: &[u64]) -> String {
    sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
}

/// An error in a mesh, placement or layout that the user wrote.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant shows what its fields are")]
pub enum LayoutError {
    /// The text is not a mesh.
    #[error("mesh `{spec}`: expected {expected}, found {}", quoted(found))]
    MeshSpec { spec: String, expected: &'static str, found: String },

    /// A mesh dim has the size 0.
    #[error("mesh of shape {shape}: expected every dim to be at least 1, found 0")]
    EmptyMesh { shape: String },

    /// The mesh has more ranks than are supported.
    #[error("mesh of shape {shape}: expected at most {limit} ranks, found more")]
    MeshTooLarge { shape: String, limit: u64 },

    /// The number of ranks differs from the number of cells of the mesh.
    #[error("mesh of shape {shape}: expected one rank for each cell of the mesh, found {found} ranks")]
    RankCount { shape: String, found: usize },

    /// A rank is on two cells of the mesh.
    #[error("mesh: expected every rank once, found rank {rank} again")]
    DuplicateRank { rank: Rank },

    /// The number of names differs from the number of mesh dims.
    #[error("mesh: expected {expected} dim names, found {found}")]
    NameCount { expected: usize, found: usize },

    /// Two mesh dims have the same name.
    #[error("mesh: expected distinct dim names, found `{name}` again")]
    DuplicateName { name: String },

    /// The text is not a placement.
    #[error("placement `{spec}`: expected {expected}, found {}", quoted(found))]
    PlacementSpec { spec: String, expected: &'static str, found: String },

    /// The number of placements differs from the number of mesh dims.
    #[error("expected one placement for each of {expected} mesh dims, found {found}")]
    PlacementCount { expected: usize, found: usize },

    /// The coordinate is not on the mesh.
    #[error("expected a coordinate within the mesh of shape {mesh}, found {found}")]
    Coordinate { mesh: String, found: String },

    /// A placement shards a dim that the tensor does not have.
    #[error("mesh dim {mesh_dim} shards dim {dim}, but the tensor has {ndim} dims")]
    NoSuchDim { mesh_dim: MeshDim, dim: TensorDim, ndim: usize },

    /// A strided shard has the split factor 0.
    #[error("mesh dim {mesh_dim} has the split factor 0, but a split factor is at least 1")]
    ZeroSplitFactor { mesh_dim: MeshDim },

    /// A shard has more intervals along a dim than are supported.
    #[error("a local shard has {found} intervals along dim {dim}, but dtshard supports at most {limit}")]
    Fragmented { dim: TensorDim, limit: u64, found: u64 },

    /// The text is not a split rule.
    #[error("split `{spec}`: expected chunk, balanced, makani or sizes such as 3+1")]
    SplitSpec { spec: String },

    /// The number of split rules differs from the number of mesh dims.
    #[error("expected no split or one for each of {expected} mesh dims, found {found}")]
    SplitCount { expected: usize, found: usize },

    /// The number of explicit sizes in a split differs from the size of the mesh dim, or the sizes do not add up to the
    /// size of the tensor dim.
    #[error("the split has the sizes {}, but {parts} ranks need {parts} sizes that add up to {numel}", sum_of(sizes))]
    SplitSizes { sizes: Vec<u64>, parts: u64, numel: u64 },

    /// A strided shard has explicit sizes, or it has another split rule than `torch.chunk` and the tensor dim does not
    /// divide evenly.
    #[error(
        "_S with split factor {split_factor} on mesh dim {mesh_dim} needs a tensor dim that divides evenly under the split \
         rule `{split}`, but this tensor dim has {numel} elements"
    )]
    SplitStrided { mesh_dim: MeshDim, split: String, split_factor: u64, numel: u64 },

    /// Two mesh dims have Partial placements whose reduction operations do not commute, so the reduced value depends on
    /// the order of the two reductions.
    #[error("the mesh dims reduce by {first} and {second}, which do not commute, so the reduced value is not defined")]
    MixedReduction { first: ReduceOp, second: ReduceOp },

    /// The source has partial values of operation `from`, and the target needs partial values of another operation,
    /// `to`.
    #[error(
        "P({from}) cannot be converted to P({to}), because partial values of one op are not partial values of the other"
    )]
    PartialToPartial { from: ReduceOp, to: ReduceOp },

    /// The target needs partial values of `op`, a product or a bit operation, and the source does not have such partial
    /// values on the same mesh dim. A complete value cannot be converted to partial values of these operations.
    #[error(
        "a value that is not Partial cannot be converted to P({op}), because there are many ways to choose the partial \
         values"
    )]
    NoPartialValues { op: ReduceOp },

    /// The shard order of a tensor dim (the order in which mesh dims shard the dim) does not fit the placements.
    #[error("shard order of dim {dim}: expected {expected}, found {found}")]
    ShardOrder { dim: TensorDim, expected: &'static str, found: String },

    /// The text is not a parallel style.
    #[error("style `{text}`: expected {expected}")]
    Style { text: String, expected: &'static str },

    /// The text is not a valid pattern for names.
    #[error("pattern `{text}`: {problem}")]
    Pattern { text: String, problem: String },

    /// A list of placements does not fit the mesh.
    #[error("placements `{placements}`: expected one placement for each dim of the mesh {mesh}")]
    PlacementList { placements: String, mesh: String },

    /// A tensor is on a slice of the mesh, but has a placement other than R on a mesh dim outside this slice.
    #[error("placements `{placements}`: expected R on mesh dim {mesh_dim}, because `slice` does not contain this dim")]
    OutsideSlice { placements: String, mesh_dim: MeshDim },

    /// An error in a layout file.
    #[error(transparent)]
    File(#[from] DocumentError),

    /// A rule gives a tensor placements that do not fit the shape of the tensor.
    #[error("{fqn}: the rule `{rule}` sets {placement}, which does not fit the shape {shape:?}")]
    RuleMisfit { rule: String, placement: String, fqn: String, shape: Vec<u64> },

    /// A tensor cannot be split as requested. `by` describes the origin of the split rule: `from SRC`, `set for all
    /// tensors`.
    #[error("{fqn}: {source} (the split rule is {by})")]
    Cut { fqn: String, by: String, source: Box<LayoutError>, hint: &'static str },

    /// An error about a tensor, with the name of the tensor.
    #[error("{fqn}: {source}")]
    Tensor { fqn: String, source: Box<LayoutError> },
}

impl LayoutError {
    /// Returns a function for `map_err` that adds the name of the tensor.
    pub fn for_tensor(fqn: &impl ToString) -> impl Fn(Self) -> Self {
        move |error| Self::Tensor { fqn: fqn.to_string(), source: Box::new(error) }
    }

    /// Returns the hint: an imperative sentence that tells the user how to correct the input.
    pub fn hint(&self) -> &str {
        match self {
            Self::RuleMisfit { .. } => {
                "change this rule, or add an earlier rule for this tensor, with placements that fit the tensor's dimensions"
            }
            Self::Pattern { .. } => {
                "write a pattern with * (within a component), ** (across components) or {a,b}, and quote it for the shell"
            }
            Self::File(error) => error.hint.as_deref().unwrap_or(
                "correct the file; docs/reference/ describes layout files (layout-file.md) and map files (map-file.md)",
            ),
            Self::Cut { hint, .. } => hint,
            Self::MixedReduction { .. } => "use one reduce op for all mesh dims, or sum and avg",
            Self::RankCount { .. } | Self::DuplicateRank { .. } => {
                "list one rank for each cell of the mesh, each rank once, separated by commas, for example \
                 options::mesh_ranks 0,2,1,3"
            }
            _ => {
                "write a mesh as named dimensions (options::mesh dp=4,tp=2), and one placement for each of them \
                 (options::placements 'S(0),R')"
            }
        }
    }

    /// Returns the name of the tensor that the error is about.
    pub fn fqn(&self) -> Option<&str> {
        match self {
            Self::RuleMisfit { fqn, .. } | Self::Tensor { fqn, .. } | Self::Cut { fqn, .. } => Some(fqn),
            _ => None,
        }
    }

    /// Returns the fields that this error adds to the JSON document that describes the error.
    pub(crate) fn fields(&self) -> Json {
        match self {
            Self::File(error) => json!({ "file": error.file }),
            Self::RuleMisfit { placement, shape, .. } => {
                json!({ "expected": format!("placements that fit its shape {shape:?}"), "found": placement })
            }
            _ => json!({}),
        }
    }
}
