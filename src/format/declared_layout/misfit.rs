//! What to say where files are not as they are told to be.

use std::path::Path;

use crate::catalog::{Fqn, TensorEntry};
use crate::error::{CatalogError, Error};
use crate::layout::shards::SharedTensor;
use crate::layout::whole::{PartError, RankPart, nearest_fit};
use crate::layout::{DeviceMesh, Split, comma_list};

/// A tensor that is not as it is told to be.
pub struct LayoutMisfit<'a> {
    pub entry: &'a TensorEntry,
    /// The name to put into a rule.
    pub name: &'a str,
    pub shared: &'a SharedTensor,
    /// Where it was said.
    pub said: &'a str,
    pub held: &'a [RankPart],
    pub mesh: &'a DeviceMesh,
}

impl LayoutMisfit<'_> {
    /// `file` is that of the rank in question.
    pub fn error(&self, error: PartError, file: &Path) -> Error {
        let placements = comma_list(&self.shared.placements);
        let conflict = |what, between: String, detail| {
            Error::Catalog(CatalogError::Conflict {
                fqn: self.entry.fqn.to_string(),
                what,
                between,
                detail,
                hint: Some(self.hint()),
            })
        };
        let said = self.said;
        match error {
            PartError::WrongSizes { rank, expected, found, shape } => conflict(
                "the local shape",
                format!("rank {rank} and {said}"),
                format!(
                    "expected {:?} ({placements} of {:?}), found {:?} in {}",
                    expected.as_slice(),
                    shape.as_slice(),
                    found.as_slice(),
                    file.display()
                ),
            ),
            PartError::Missing { rank } => conflict(
                "presence",
                format!("rank {rank} and {said}"),
                format!("expected a part on every rank that shares it ({placements}), rank {rank} has no such tensor"),
            ),
            PartError::OutsideMesh { rank } => conflict(
                "presence",
                format!("rank {rank} and the mesh {}", self.mesh),
                format!("{} holds a part of it and is no rank of the mesh", file.display()),
            ),
            PartError::Overflow { dim } => Error::malformed(
                file,
                self.entry.fqn.as_str(),
                "local sizes that add up to a size",
                format!("more than 2^64 along dim {dim}"),
            ),
            PartError::Layout { error, shape } => conflict(
                "the layout",
                format!("the files and {said}"),
                format!("{placements} of {:?}: {error}", shape.as_slice()),
            ),
        }
    }

    /// What would fit.
    fn hint(&self) -> String {
        let Some(near) = nearest_fit(self.mesh, self.shared, self.held) else {
            return String::from(
                "these sizes are what no rule gives: sizes of their own are said in a layout file (options::src_layout); or \
                 check which ranks the mesh has where (options::src_mesh_ranks), and that all the files come from one save of \
                 one job",
            );
        };
        let rule = near.splits.first().unwrap_or(&Split::Chunk);
        if near.placements == self.shared.placements {
            return format!("these sizes are what the rule of {rule} gives: options::src_split {rule}");
        }
        let split =
            if near.splits == self.shared.splits { String::new() } else { format!(" options::src_split {rule}") };
        format!("these sizes would fit options::src_placements '{}={}'{split}", self.name, comma_list(&near.placements))
    }
}

/// A shape that no machine could hold.
pub fn too_large(file: &Path, fqn: &Fqn, shape: &[u64]) -> Error {
    Error::malformed(file, fqn.as_str(), "local shapes of a whole that fits memory", format!("{shape:?}"))
}

/// State that nothing is said of, by a number that stands for nobody knows which parameter.
pub fn unknown_number(fqn: &Fqn) -> Error {
    Error::unsupported(
        format!("{fqn}: the optimizer numbers its parameters, and which this is cannot be told"),
        "save the state by names (get_optimizer_state_dict); or say how it lies, by the number: options::src_placements \
         'optim.state.0=S(0)'",
    )
}
