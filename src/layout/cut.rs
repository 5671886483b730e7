//! The origin of the split rule of a tensor. If a tensor cannot be split as requested, the error names this origin.
//!
//! Unit of sizes: elements. A split rule is `torch.chunk` (the only rule of DTensor), `balanced`, `makani`, or a list
//! of explicit sizes; see [`Split`]. The hint of an error depends on the origin of the split: a rule, the layout, SRC,
//! or the checkpoint in `options::like`.

use std::fmt;

use super::distinct_tiles::SharedTensor;
use super::rules::Rule;
use super::{DeviceMesh, LayoutError, Split};

/// The origin of the split rule of a tensor: a placement rule, the layout, SRC, or another checkpoint.
#[derive(Clone, Copy, Debug)]
pub enum SplitChoice<'a> {
    /// A placement rule that matches the tensor has this split rule.
    Rule(&'a Rule),
    /// The split rule is the layout's default for all tensors.
    AllTensors,
    /// The tensor has this split rule in SRC.
    Source,
    /// The tensor has this split rule in the checkpoint given as `options::like`.
    Like,
}

impl fmt::Display for SplitChoice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(rule) => write!(f, "from {}", rule.origin),
            Self::AllTensors => f.write_str("set for all tensors"),
            Self::Source => f.write_str("from SRC"),
            Self::Like => f.write_str("from options::like"),
        }
    }
}

impl SplitChoice<'_> {
    /// Checks that a tensor of this shape can be split on every rank of the mesh.
    ///
    /// # Errors
    /// `Cut` if the tensor cannot be split on at least one rank.
    pub fn check(
        self,
        fqn: &impl ToString,
        shape: &[u64],
        mesh: &DeviceMesh,
        shared: &SharedTensor,
    ) -> Result<(), LayoutError> {
        if shared.splits.iter().all(|split| *split == Split::Chunk) {
            return Ok(());
        }
        let with_hint = |error| LayoutError::Cut {
            fqn: fqn.to_string(),
            by: self.to_string(),
            hint: self.hint(&error),
            source: Box::new(error),
        };
        mesh.coordinates().try_for_each(|(_, at)| shared.part(shape, mesh, &at).map(drop)).map_err(with_hint)
    }

    /// Returns the hint for an error.
    fn hint(self, error: &LayoutError) -> &'static str {
        match (error, self) {
            (LayoutError::SplitSizes { .. }, Self::Rule(_) | Self::AllTensors) => {
                "give one size for each coordinate of the mesh dim; the sizes must add up to the size of the tensor dim"
            }
            (LayoutError::SplitStrided { .. }, Self::AllTensors) => {
                "_S needs the split of torch.chunk: write split = \"chunk\" in a rule for this tensor, or leave \
                 options::split out"
            }
            (LayoutError::SplitStrided { .. }, Self::Rule(_)) => {
                "_S needs the split of torch.chunk: leave split and sizes out of the rule, or write split = \"chunk\""
            }
            (_, Self::Source | Self::Like) => {
                "use options::split chunk for all tensors, or set the sizes of this tensor with a rule in a layout file"
            }
            _ => "choose placements and a split that fit the dims of this tensor",
        }
    }

    /// Returns the hint for the case that the tensor is split in another way than by `torch.chunk`, but the format can
    /// record only `torch.chunk`.
    pub fn hint_for_chunk_split(self) -> &'static str {
        match self {
            Self::Rule(_) => "leave split and sizes out of the rule",
            Self::AllTensors => "leave out options::split",
            Self::Source | Self::Like => "use reshard with options::split chunk",
        }
    }
}
