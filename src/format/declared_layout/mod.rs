//! Joins the plain tensors of several rank files to larger tensors. The files do not record how the tensors are
//! sharded, so the user declares the layout.
//!
//! Jobs without DTensors (tensor parallelism with plain tensors, exported local tensors, gradients of each rank) save
//! only the local part of a tensor on each rank, and a file does not record whether a tensor is a part of a larger
//! tensor or a copy. With a declared mesh and declared placements, the local parts of all ranks become one tensor with
//! a [`Sharding`](crate::catalog::Sharding). The shape of this tensor follows from the local shapes of all ranks
//! ([`crate::layout::whole`]), and the placements must give each rank the local shape that it has. Shapes count
//! elements. Invariant: if a tensor is declared as replicated, the copies on all ranks are compared before the tensor
//! is used, as for plain tensors without a declared layout.
//!
//! DTensors and ShardedTensors in the same files record their own layout and keep it. Random state differs between
//! ranks and keeps its value on each rank.

mod effects;
mod misfit;
mod reduce;
mod resolver;

use std::collections::BTreeSet;
use std::path::Path;

pub use misfit::unknown_number;
pub use reduce::ReduceRule;

use super::parallelize::PlanSide;
use super::reading::{RanksWithFiles, without_ranks};
use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::layout::file::LayoutFile;
use crate::layout::parallelize::{ParameterOrder, UnboundPlan};
use crate::layout::rules::{Fallback, MeshLayout, Rule};
use crate::layout::{DeviceMesh, PlacementSpec, Rank, Split};
use crate::storage::Files;
use reduce::ReduceRules;
use resolver::{LayoutResolver, ResolvedLayouts};

/// The layout of plain tensors on the ranks that saved them, declared by the user.
#[derive(Clone, Debug, Default)]
pub struct DeclaredLayout {
    /// The mesh of the ranks; `None` if the mesh is taken from the layout file or, if it has none, from DTensors in the
    /// files.
    pub mesh: Option<DeviceMesh>,
    pub rules: Vec<Rule>,
    /// Placements of tensors without a rule, and the option that declared these placements; `None` if tensors without a
    /// rule are replicated on all ranks.
    pub fallback: Option<(Vec<PlacementSpec>, String)>,
    /// The split rule for dims that do not divide evenly, for tensors whose placement rule has no split rule.
    pub split: Option<Split>,
    /// The tensor-parallel plan, which gives placements to parameters without a rule.
    pub plan: Option<UnboundPlan>,
    /// The content of a layout file. The mesh and rules in the other fields of this struct have priority over the mesh
    /// and rules of the layout file.
    pub file: Option<LayoutFile>,
    /// Mesh dims along which ranks hold partial values, with the operation that reduces these values.
    pub reduce: Vec<ReduceRule>,
    /// True if patterns match names with the wrapper prefixes in the files (such as `_orig_mod.`). False if patterns
    /// match names without these prefixes.
    pub keep_names: bool,
}

/// Joins the local parts of each plain tensor in a catalog to one tensor, with the declared layout.
///
/// # Errors
/// `Usage` if there are no rank files, if the mesh does not match their ranks, or if a declaration has no effect;
/// `Conflict` if local shapes do not match the declaration; `Layout` for rules that do not fit.
pub(super) fn apply(
    declared: &DeclaredLayout,
    catalog: &mut Catalog,
    root: &Path,
    (files, ranks): (&Files, &RanksWithFiles),
    order: ParameterOrder,
) -> Result<()> {
    if ranks.all.is_empty() {
        return Err(without_ranks(root));
    }
    let mesh = declared.resolve_mesh(catalog, root)?;
    check_ranks(&mesh, &ranks.all, ranks.allow_missing)?;
    let reductions = ReduceRules::new(&declared.reduce, &mesh, &catalog.state)?;
    let whole = || vec![PlacementSpec::Replicate; mesh.ndim()];
    let fallback = declared.fallback.as_ref().map_or_else(whole, |(list, _)| list.clone());
    let mut rules = declared.rules.clone();
    let mut split = declared.split.clone();
    if let Some(file) = &declared.file {
        rules.extend(file.rules(&mesh)?);
        split = split.or_else(|| file.split.clone());
    }
    let plan = declared.plan.as_ref().map(|plan| PlanSide::Source.plan(plan, &mesh)).transpose()?;
    let layout = MeshLayout { plan, ..MeshLayout::new(mesh, rules, Fallback::Placements(fallback), split)? };
    let mesh = catalog.intern_mesh(layout.mesh.clone());
    let resolver = LayoutResolver::new(declared, &layout, mesh, catalog, root, (files, ranks), reductions);
    let ResolvedLayouts { entries, notes } = resolver.resolve(order)?;
    for (id, entry) in entries {
        catalog.tensors[id.0 as usize] = entry;
    }
    catalog.notes.extend(notes);
    Ok(())
}

impl DeclaredLayout {
    fn resolve_mesh(&self, catalog: &Catalog, root: &Path) -> Result<DeviceMesh> {
        let own = || DeviceMesh::root_of(&catalog.meshes).cloned();
        let mesh = self.file.as_ref().map_or(Ok(self.mesh.clone()), |file| file.mesh(self.mesh.clone()))?;
        mesh.or_else(own).ok_or_else(|| {
            let own = match catalog.meshes.len() {
                0 => String::from("no mesh of its own"),
                several => format!("{several} meshes"),
            };
            Error::usage(
                format!("options::src_mesh is required, because {} has {own}", root.display()),
                "give the mesh of the job that saved SRC, such as options::src_mesh tp=8 or options::src_mesh dp=4,tp=2",
            )
        })
    }
}

/// Checks that the rank of every file is in the mesh, and, unless `allow_missing` is true, that every rank of the mesh
/// has a file.
fn check_ranks(mesh: &DeviceMesh, ranks: &BTreeSet<Rank>, allow_missing: bool) -> Result<()> {
    let outside = ranks.iter().find(|rank| mesh.coordinate(**rank).is_none());
    let absent = mesh.ranks().iter().filter(|rank| !ranks.contains(rank)).min().filter(|_| !allow_missing);
    let what = match (outside, absent) {
        (None, None) => return Ok(()),
        (Some(rank), _) => format!("rank {rank} is not in the mesh"),
        (None, Some(rank)) => format!("rank {rank} has no file"),
    };
    Err(Error::usage(
        format!(
            "the mesh {mesh} has {} ranks, but there are files of {} ranks: {what}",
            mesh.world_size(),
            ranks.len()
        ),
        "give sizes in options::src_mesh whose product is the number of ranks; if the ranks are not numbered from 0 on, \
         list them with options::src_mesh_ranks",
    ))
}
