//! Errors for files that do not match the declared layout.

use std::path::Path;

use crate::catalog::unreadable::UnreadableKind;
use crate::catalog::{Fqn, TensorEntry};
use crate::error::{CatalogError, Error};
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::whole::{PartError, RankPart, nearest_fit};
use crate::layout::{DeviceMesh, Split, comma_list};

/// A tensor whose local shapes do not match its declared layout.
pub struct LayoutMisfit<'a> {
    pub entry: &'a TensorEntry,
    /// A name of the tensor that the pattern of a rule can match. The hint suggests a rule with this name.
    pub name: &'a str,
    pub shared: &'a SharedTensor,
    /// Text for messages that names the source of the tensor's layout: an option, a rule, the plan, or the default
    /// layout.
    pub declared_by: &'a str,
    pub local_shapes: &'a [RankPart],
    pub mesh: &'a DeviceMesh,
}

impl LayoutMisfit<'_> {
    /// Converts the error to an error of the crate. `file` is the file of the rank that `error` names; if `error` names
    /// no rank, `file` is any file that has a part of the tensor.
    pub fn error(&self, error: PartError, file: &Path) -> Error {
        let placements = comma_list(&self.shared.placements);
        let conflict = |what, between: String, detail| {
            Error::Catalog(CatalogError::Conflict {
                fqn: self.entry.fqn.to_string(),
                what,
                between,
                detail,
                hint: Some(self.hint(&error)),
            })
        };
        let declared_by = self.declared_by;
        match &error {
            PartError::WrongSizes { rank, expected, found, shape } => conflict(
                "the local shape",
                format!("rank {rank} and {declared_by}"),
                format!(
                    "expected {:?} ({placements} of {:?}), found {:?} in {}",
                    expected.as_slice(),
                    shape.as_slice(),
                    found.as_slice(),
                    file.display()
                ),
            ),
            PartError::Missing { rank } => conflict(
                "the set of ranks",
                format!("the files and {declared_by}"),
                format!(
                    "expected a shard on every rank that shares the tensor ({placements}), but the files have no shard of \
                     rank {rank}"
                ),
            ),
            PartError::OutsideMesh { rank } => conflict(
                "the set of ranks",
                format!("the files and the mesh {}", self.mesh),
                format!("rank {rank} is not in the mesh, but {} has a part of the tensor", file.display()),
            ),
            PartError::Overflow { dim } => Error::malformed(
                file,
                self.entry.fqn.as_str(),
                "local sizes whose sum is below 2^64",
                format!("more than 2^64 along dim {dim}"),
            ),
            PartError::Layout { error, shape } => conflict(
                "the layout",
                format!("the files and {declared_by}"),
                format!("{placements} of {:?}: {error}", shape.as_slice()),
            ),
        }
    }

    /// Returns the hint for an error. If the local sizes do not fit the placements, the hint suggests similar
    /// placements or a split rule that fit these sizes, if there are any.
    fn hint(&self, error: &PartError) -> String {
        match error {
            PartError::Missing { rank } => {
                return format!(
                    "check that the file of rank {rank} exists and that the save finished; if rank {rank} never had the \
                     tensor, as with pipeline stages, declare R on the mesh dim along which ranks lack the tensor; \
                     otherwise check the order of ranks in the mesh (options::src_mesh_ranks)"
                );
            }
            PartError::OutsideMesh { .. } => {
                return String::from("check the mesh and the ranks in it (options::src_mesh, options::src_mesh_ranks)");
            }
            PartError::WrongSizes { .. } | PartError::Overflow { .. } | PartError::Layout { .. } => {}
        }
        let Some(near) = nearest_fit(self.mesh, self.shared, self.local_shapes) else {
            return String::from(
                "no split rule gives these sizes: declare the sizes in a layout file (options::src_layout), or check \
                 the order of ranks in the mesh (options::src_mesh_ranks) and that all files come from one save of \
                 one job",
            );
        };
        let rule = near.splits.first().unwrap_or(&Split::Chunk);
        if near.placements == self.shared.placements {
            return format!("declare the split with options::src_split {rule}, which gives these sizes");
        }
        let split =
            if near.splits == self.shared.splits { String::new() } else { format!(" options::src_split {rule}") };
        format!(
            "declare options::src_placements '{}={}'{split}, which fits these sizes",
            self.name,
            comma_list(&near.placements)
        )
    }
}

/// Returns the error for a tensor whose shape is too large for any machine.
pub fn too_large_error(file: &Path, fqn: &Fqn, shape: &[u64]) -> Error {
    Error::malformed(file, fqn.as_str(), "local shapes whose whole tensor fits memory", format!("{shape:?}"))
}

/// Returns the reason why the optimizer tensor `fqn` cannot be read: its layout is unknown, because the optimizer
/// identifies the parameter only by a number (the parameter id), and the parameter with this number is unknown.
pub fn unknown_number(fqn: &Fqn) -> UnreadableKind {
    let of_parameter = fqn.as_str().rsplit_once('.').map_or(fqn.as_str(), |(parameter, _)| parameter);
    UnreadableKind::UnknownLayout {
        what: format!(
            "{fqn}: optimizer state is stored by parameter index, and the parameter with this index is unknown"
        ),
        hint: format!(
            "save the state with parameter names (get_optimizer_state_dict), or declare its layout by index, for \
             example options::src_placements '{of_parameter}=S(0)'"
        ),
    }
}
