//! Plain tensors of rank files as parts of one: what the files do not say is told.
//!
//! Jobs without DTensors (tensor parallelism of plain tensors, region mappings, exported local tensors, gradients of each
//! rank) save on every rank what that rank holds, and nothing tells a part from a copy. With a mesh and placements said
//! of them, the parts become one tensor with a [`Sharding`](crate::catalog::Sharding): its shape follows from the local
//! shapes of all ranks ([`crate::layout::whole`]), and every one of these must be what the placements give that rank.
//! Nothing is taken for granted: what is said to be whole on several ranks is compared before it is used, as plain tensors
//! always are.
//!
//! DTensors and ShardedTensors in the same files know how they lie, and keep it. So does random state, which is each
//! rank's own.

mod effects;
mod misfit;
mod reduce;
mod teller;

use std::collections::BTreeSet;
use std::path::Path;

pub use reduce::ReduceRule;

use super::parallelize::PlanSide;
use super::reading::{ReadFindings, without_ranks};
use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::layout::file::LayoutFile;
use crate::layout::parallelize::{ParameterOrder, UnboundPlan};
use crate::layout::rules::{Fallback, MeshLayout, Rule};
use crate::layout::{DeviceMesh, PlacementSpec, Rank, Split};
use reduce::ReduceRules;
use teller::{LayoutResolver, ResolvedLayouts};

/// What somebody says of how plain tensors lie on the ranks that saved them.
#[derive(Clone, Debug, Default)]
pub struct DeclaredLayout {
    /// `None` for the mesh that DTensors of the same files have.
    pub mesh: Option<DeviceMesh>,
    pub rules: Vec<Rule>,
    /// Of tensors without a rule, and where that was said; without it they are whole on every rank.
    pub fallback: Option<(Vec<PlacementSpec>, String)>,
    /// How dims are cut where nothing more particular is said.
    pub split: Option<Split>,
    /// How the parameters of the model lie that have no rule.
    pub plan: Option<UnboundPlan>,
    /// A layout file, whose mesh and rules come behind the ones here.
    pub file: Option<LayoutFile>,
    /// Mesh dims along which ranks hold summands.
    pub reduce: Vec<ReduceRule>,
    /// Whether patterns match names only as they are, with the prefixes of wrappers.
    pub keep_names: bool,
}

/// Put together what ranks hold.
///
/// # Errors
/// `Usage` where there are no rank files, the mesh is not that of their ranks, and for what is said without an effect;
/// `Conflict` where local shapes are not as they are said to be, `Layout` for rules that do not fit.
pub(super) fn tell(
    told: &DeclaredLayout,
    catalog: &mut Catalog,
    root: &Path,
    (reading, order): (&ReadFindings<'_>, ParameterOrder),
) -> Result<()> {
    if reading.ranks.is_empty() {
        return Err(without_ranks(root));
    }
    let mesh = told.mesh_of(catalog, root)?;
    check_ranks(&mesh, &reading.ranks, reading.options.allow_missing)?;
    let reductions = ReduceRules::new(&told.reduce, &mesh, &catalog.state)?;
    let whole = || vec![PlacementSpec::Replicate; mesh.ndim()];
    let fallback = told.fallback.as_ref().map_or_else(whole, |(list, _)| list.clone());
    let mut rules = told.rules.clone();
    let mut split = told.split.clone();
    if let Some(file) = &told.file {
        rules.extend(file.rules(&mesh)?);
        split = split.or_else(|| file.split.clone());
    }
    let plan = told.plan.as_ref().map(|plan| PlanSide::Source.plan(plan, &mesh)).transpose()?;
    let layout = MeshLayout { plan, ..MeshLayout::new(mesh, rules, Fallback::Placements(fallback), split)? };
    let mesh = catalog.intern_mesh(layout.mesh.clone());
    let teller = LayoutResolver::new(told, &layout, mesh, catalog, root, reading, reductions);
    let ResolvedLayouts { entries, notes } = teller.tell(order)?;
    for (id, entry) in entries {
        catalog.tensors[id.0 as usize] = entry;
    }
    catalog.notes.extend(notes);
    Ok(())
}

impl DeclaredLayout {
    fn mesh_of(&self, catalog: &Catalog, root: &Path) -> Result<DeviceMesh> {
        let own = || DeviceMesh::root_of(&catalog.meshes).cloned();
        let said = self.file.as_ref().map_or(Ok(self.mesh.clone()), |file| file.mesh(self.mesh.clone()))?;
        said.or_else(own).ok_or_else(|| {
            let own = match catalog.meshes.len() {
                0 => String::from("no mesh of its own"),
                several => format!("{several} meshes"),
            };
            Error::usage(
                format!("no options::src_mesh is given, and {} has {own}", root.display()),
                "say on which mesh the ranks lay that saved it, such as options::src_mesh tp=8 or options::src_mesh dp=4,tp=2",
            )
        })
    }
}

/// Every rank of the mesh has files, and every file is of one of them.
fn check_ranks(mesh: &DeviceMesh, ranks: &BTreeSet<Rank>, allow_missing: bool) -> Result<()> {
    let outside = ranks.iter().find(|rank| mesh.coordinate(**rank).is_none());
    let absent = mesh.ranks().iter().filter(|rank| !ranks.contains(rank)).min().filter(|_| !allow_missing);
    let what = match (outside, absent) {
        (None, None) => return Ok(()),
        (Some(rank), _) => format!("rank {rank} is none of them"),
        (None, Some(rank)) => format!("rank {rank} has none"),
    };
    Err(Error::usage(
        format!("the mesh {mesh} has {} ranks, and there are files of {}: {what}", mesh.world_size(), ranks.len()),
        "the sizes of options::src_mesh multiply to the number of ranks; options::src_mesh_ranks says which of them are where",
    ))
}
