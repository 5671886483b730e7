//! Who said how the dims of a tensor are cut, for what to say where they cannot be.

use std::fmt;

use super::rules::Rule;
use super::shards::SharedTensor;
use super::{DeviceMesh, LayoutError, Split};

#[derive(Clone, Copy, Debug)]
pub enum SplitChoice<'a> {
    Rule(&'a Rule),
    /// What is said of all tensors.
    All,
    Source,
    /// The checkpoint whose layout is taken.
    Like,
}

impl fmt::Display for SplitChoice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rule(rule) => &rule.said,
            Self::All => "said of all tensors",
            Self::Source => "as in SRC",
            Self::Like => "as in options::like",
        })
    }
}

impl SplitChoice<'_> {
    /// # Errors
    /// `Cut` where a tensor of this shape cannot be cut so.
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
        let told = |error| LayoutError::Cut {
            fqn: fqn.to_string(),
            by: self.to_string(),
            hint: self.hint(&error),
            source: Box::new(error),
        };
        mesh.coordinates().try_for_each(|(_, at)| shared.part(shape, mesh, &at).map(drop)).map_err(told)
    }

    /// What to do instead.
    fn hint(self, error: &LayoutError) -> &'static str {
        match (error, self) {
            (LayoutError::SplitSizes { .. }, Self::Rule(_) | Self::All) => {
                "sizes are one for each coordinate of the mesh dim, and add up to the dim as it is cut"
            }
            (LayoutError::SplitStrided { .. }, Self::All) => {
                "_S takes its parts as torch.chunk cuts them: split = \"chunk\" in a rule for this tensor says so, or leave \
                 options::split out"
            }
            (LayoutError::SplitStrided { .. }, Self::Rule(_)) => {
                "_S takes its parts as torch.chunk cuts them: leave split and sizes out of the rule, or say split = \"chunk\""
            }
            (_, Self::Source | Self::Like) => {
                "options::split chunk cuts all tensors anew; a rule of a layout file gives this one other sizes"
            }
            _ => "give it placements and a split that its dims allow",
        }
    }

    /// What to do where only `torch.chunk` will do.
    #[must_use]
    pub fn to_chunks(self) -> &'static str {
        match self {
            Self::Rule(_) => "leave split and sizes out of the rule",
            Self::All => "leave out options::split",
            Self::Source | Self::Like => "reshard cuts them so (options::split chunk)",
        }
    }
}
