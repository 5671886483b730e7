//! Rules that choose the placements of each tensor on a mesh.
//!
//! Rules are tried in order, and the first rule whose pattern matches one of the tensor's names wins. It is an error if
//! this rule does not fit the tensor. A tensor that no rule matches gets the placements of the fallback. If a placement
//! of the fallback does not fit the tensor, such as `S(1)` for a 1-d bias, the tensor is replicated on that mesh dim.
//! PyTorch has no counterpart: its jobs choose placements in code.

use super::distinct_tiles::{HeldTile, MeshPlacement, SharedTensor, shards};
use super::parallelize::ParallelizePlan;
use super::strided::MeshChange;
use super::{DeviceMesh, LayoutError, MeshDim, Pattern, Placement, PlacementSpec, Split, comma_list};

/// The placements that the user chose for all tensors whose names match a pattern.
#[derive(Clone, Debug)]
pub struct Rule {
    pub pattern: Pattern,
    pub choice: PlacementChoice,
    /// The source of the rule, for messages: `options::placements '**.w1=S(0)'`, `layout.toml line 7`.
    pub origin: String,
}

impl Rule {
    /// Returns whether the rule applies to a tensor with these names.
    pub fn covers(&self, names: &[String]) -> bool {
        names.iter().any(|name| self.pattern.covers(name))
    }
}

/// Returns the warning about a rule that never wins. `origin` is the source of the rule.
pub fn unused_rule_warning(origin: &str) -> String {
    format!("{origin}: this rule has no effect, because earlier rules match the same tensors")
}

/// The placements that a rule chooses for a tensor, before they are applied to the tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementChoice {
    /// The tensor becomes a plain tensor, which every rank has in full.
    Plain,
    /// The tensor becomes a DTensor with these placements.
    Shared(PlacementList),
}

/// The placements of a rule, as the user wrote them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementList {
    /// One placement for each mesh dim.
    pub placements: Vec<PlacementSpec>,
    /// One split rule for each mesh dim; empty if the default split rule of the layout applies.
    pub splits: Vec<Split>,
    /// If the tensor is on a slice of the mesh, the mesh dims of this slice, ascending; otherwise `None`.
    pub slice: Option<Vec<MeshDim>>,
}

impl From<Vec<PlacementSpec>> for PlacementList {
    fn from(placements: Vec<PlacementSpec>) -> Self {
        Self { placements, splits: Vec::new(), slice: None }
    }
}

impl PlacementList {
    /// Checks that the list fits a mesh.
    ///
    /// # Errors
    /// `LayoutError` if the number of placements or splits differs from the number of mesh dims, or if a mesh dim
    /// outside the slice has a placement other than Replicate.
    pub fn check(&self, mesh: &DeviceMesh) -> Result<(), LayoutError> {
        let text = || comma_list(&self.placements);
        if self.placements.len() != mesh.ndim() {
            return Err(LayoutError::PlacementList { placements: text(), mesh: mesh.to_string() });
        }
        if !self.splits.is_empty() && self.splits.len() != mesh.ndim() {
            return Err(LayoutError::SplitCount { expected: mesh.ndim(), found: self.splits.len() });
        }
        let in_slice = |dim: usize| self.slice.as_ref().is_none_or(|dims| dims.contains(&MeshDim(dim)));
        let outside = self
            .placements
            .iter()
            .enumerate()
            .find(|(dim, spec)| **spec != PlacementSpec::Replicate && !in_slice(*dim));
        match outside {
            None => Ok(()),
            Some((dim, _)) => Err(LayoutError::OutsideSlice { placements: text(), mesh_dim: MeshDim(dim) }),
        }
    }
}

/// The placements of tensors without a rule.
#[derive(Clone, Debug)]
pub enum Fallback {
    /// The placements that the user gave. On each mesh dim where a placement does not fit the tensor, the tensor is
    /// replicated.
    Placements(Vec<PlacementSpec>),
    /// On each mesh dim, the placement that the tensor has in the source on the mesh dim with the same name.
    Source,
    /// No placements: a rule must match every tensor that has at least one dim.
    Missing,
}

impl Fallback {
    /// Returns whether the fallback replicates every tensor on every rank.
    pub fn is_replicate(&self) -> bool {
        matches!(self, Self::Placements(list) if list.iter().all(|spec| *spec == PlacementSpec::Replicate))
    }
}

/// A mesh, and the rules that place tensors on it.
#[derive(Clone, Debug)]
pub struct MeshLayout {
    pub mesh: DeviceMesh,
    pub rules: Vec<Rule>,
    pub fallback: Fallback,
    /// The default split rule, for tensors whose placement rule has no split rule. If `None`, the split rule of the
    /// source is used, or `torch.chunk` if the source has none.
    pub split: Option<Split>,
    /// The plan that places parameters without a rule, after [`ParallelizePlan::bind`] has matched it with the model.
    pub plan: Option<ParallelizePlan>,
}

/// The placements that the fallback gives one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FallbackPlacement {
    pub shared: SharedTensor,
    /// True if at least one fallback placement did not fit the tensor and was replaced by Replicate.
    pub misfit: bool,
}

impl MeshLayout {
    /// Makes a layout without a plan.
    ///
    /// # Errors
    /// `LayoutError` if a list of placements does not fit the mesh; see [`PlacementList::check`].
    pub fn new(
        mesh: DeviceMesh,
        rules: Vec<Rule>,
        fallback: Fallback,
        split: Option<Split>,
    ) -> Result<Self, LayoutError> {
        for rule in &rules {
            if let PlacementChoice::Shared(spec) = &rule.choice {
                spec.check(&mesh)?;
            }
        }
        if let Fallback::Placements(list) = &fallback {
            PlacementList::from(list.clone()).check(&mesh)?;
        }
        Ok(Self { mesh, rules, fallback, split, plan: None })
    }

    /// Returns the placements that a rule gives a tensor of this shape and these names, or `None` for a plain tensor.
    ///
    /// # Errors
    /// `RuleMisfit` if the rule shards a dim that the tensor does not have.
    pub fn placement_by_rule(
        &self,
        rule: &Rule,
        names: &[String],
        shape: &[u64],
    ) -> Result<Option<SharedTensor>, LayoutError> {
        let PlacementChoice::Shared(spec) = &rule.choice else { return Ok(None) };
        let placements = spec.placements.iter().map(|placement| {
            placement.resolve(shape.len()).ok_or_else(|| LayoutError::RuleMisfit {
                rule: rule.origin.clone(),
                placement: placement.to_string(),
                fqn: names.first().cloned().unwrap_or_default(),
                shape: shape.to_vec(),
            })
        });
        let placements = placements.collect::<Result<_, _>>()?;
        let splits = if spec.splits.is_empty() { self.default_splits() } else { spec.splits.clone() };
        Ok(Some(SharedTensor { placements, splits, slice: spec.slice.clone() }))
    }

    /// Returns the placements of a tensor with `ndim` dims that no rule matches.
    pub fn fallback_placement(&self, ndim: usize, source: Option<MeshPlacement<'_>>) -> FallbackPlacement {
        match &self.fallback {
            Fallback::Placements(specs) => {
                let resolved: Vec<Option<Placement>> = specs.iter().map(|spec| spec.resolve(ndim)).collect();
                let misfit = resolved.contains(&None);
                let placements = resolved.into_iter().map(|found| found.unwrap_or(Placement::Replicate)).collect();
                FallbackPlacement {
                    shared: SharedTensor { placements, splits: self.default_splits(), slice: None },
                    misfit,
                }
            }
            Fallback::Source => {
                let shared = source.map_or_else(|| self.replicated(), |source| self.source_placement(source));
                FallbackPlacement { shared, misfit: false }
            }
            Fallback::Missing => FallbackPlacement { shared: self.replicated(), misfit: false },
        }
    }

    /// Returns placements that replicate a tensor on every rank of the mesh.
    pub fn replicated(&self) -> SharedTensor {
        vec![Placement::Replicate; self.mesh.ndim()].into()
    }

    /// Adds the default split rule of the layout, if `shared` has no split rules.
    pub fn with_default_split(&self, shared: SharedTensor) -> SharedTensor {
        if shared.splits.is_empty() { SharedTensor { splits: self.default_splits(), ..shared } } else { shared }
    }

    /// Returns the default split rule for each mesh dim; empty if the default rule is `torch.chunk`.
    fn default_splits(&self) -> Vec<Split> {
        match &self.split {
            None | Some(Split::Chunk) => Vec::new(),
            Some(split) => vec![split.clone(); self.mesh.ndim()],
        }
    }

    /// Returns placements for the mesh of the layout. Each mesh dim has the placement that the tensor has in the source
    /// on the mesh dim of the same name, or Replicate if the source has no mesh dim of this name. Split factors are
    /// adapted to the sizes of the new mesh.
    pub fn source_placement(&self, source: MeshPlacement<'_>) -> SharedTensor {
        let SharedTensor { placements: own, splits: own_splits, .. } = source.shared;
        let default = self.split.as_ref().map(|_| self.default_splits());
        if source.mesh.has_dims_of(&self.mesh) {
            let splits = default.unwrap_or_else(|| own_splits.clone());
            return SharedTensor { placements: own.clone(), splits, slice: None };
        }
        let mut placements = vec![Placement::Replicate; self.mesh.ndim()];
        let mut splits = if own_splits.is_empty() { Vec::new() } else { vec![Split::Chunk; self.mesh.ndim()] };
        let Some(names) = source.mesh.names() else { return placements.into() };
        let target_dims: Vec<Option<usize>> =
            names.iter().map(|name| self.mesh.dim_by_name(name).map(|dim| dim.0)).collect();
        let mesh_change = MeshChange { from: source.mesh, to: &self.mesh, dims: &target_dims };
        let sharded: Vec<_> = own.iter().map(|placement| placement.sharded_dim()).collect();
        for (index, placement) in own.iter().enumerate() {
            let Some(target) = target_dims[index] else { continue };
            if let Some(split) = own_splits.get(index) {
                splits[target] = split.clone();
            }
            placements[target] = match *placement {
                Placement::StridedShard { dim, split_factor } => {
                    match mesh_change.split_factor(split_factor, index, &sharded) {
                        Some(split_factor) => Placement::StridedShard { dim, split_factor },
                        None => Placement::Shard(dim),
                    }
                }
                other => other,
            };
        }
        SharedTensor { placements, splits: default.unwrap_or(splits), slice: None }
    }

    /// Adds the slice of the source to `shared`: if the source has the tensor on a slice of the source's mesh, `shared`
    /// gets the slice whose mesh dims have the same names. For example, under FSDP and TP, norms are on the FSDP slice.
    ///
    /// If `shared` already has a slice (from a rule), this slice stays. The slice of the source is used only if `shared`
    /// replicates the tensor on all other mesh dims.
    pub fn with_source_slice(&self, shared: SharedTensor, source: MeshPlacement<'_>) -> SharedTensor {
        let slice = || {
            let names = source.mesh.names()?;
            let dims = source.shared.slice.as_ref()?.iter().map(|dim| self.mesh.dim_by_name(&names[dim.0]));
            let dims: Vec<MeshDim> = dims.collect::<Option<_>>()?;
            let mut outside = (0..self.mesh.ndim()).filter(|dim| !dims.contains(&MeshDim(*dim)));
            let replicated = outside.all(|dim| shared.placements[dim] == Placement::Replicate);
            (replicated && dims.is_sorted() && dims.len() < self.mesh.ndim()).then_some(dims)
        };
        let slice = shared.slice.clone().or_else(slice);
        SharedTensor { slice, ..shared }
    }

    /// Returns the distinct tiles of a tensor, each with the ranks that hold it.
    ///
    /// # Errors
    /// `LayoutError` if the placements do not fit the shape.
    pub fn shards(&self, shape: &[u64], shared: &SharedTensor) -> Result<Vec<HeldTile>, LayoutError> {
        shards(shape, MeshPlacement { mesh: &self.mesh, shared })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Rank, TensorDim, parse_placements};
    use super::*;

    fn layout(mesh: &str, rules: &[(&str, &str)], fallback: &str) -> MeshLayout {
        let rules = rules
            .iter()
            .map(|(pattern, list)| Rule {
                pattern: Pattern::parse(pattern).unwrap(),
                choice: PlacementChoice::Shared(parse_placements(list).unwrap().into()),
                origin: (*pattern).to_owned(),
            })
            .collect();
        let fallback = match fallback {
            "source" => Fallback::Source,
            list => Fallback::Placements(parse_placements(list).unwrap()),
        };
        MeshLayout::new(DeviceMesh::parse(mesh).unwrap(), rules, fallback, None).unwrap()
    }

    fn text(shared: &SharedTensor) -> String {
        comma_list(&shared.placements)
    }

    fn ruled(layout: &MeshLayout, names: &[&str], shape: &[u64]) -> Result<String, LayoutError> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let rule = layout.rules.iter().find(|rule| rule.covers(&names)).unwrap();
        layout.placement_by_rule(rule, &names, shape).map(|shared| text(&shared.unwrap()))
    }

    #[test]
    fn rule_matches_any_name_and_errors_if_it_does_not_fit() {
        let layout = layout("dp=2,tp=2", &[("**.w1", "R,S(0)"), ("**.w?", "R,S(-1)")], "S(0),R");
        assert_eq!(ruled(&layout, &["a.w1.weight"], &[4, 4]).unwrap(), "R,S(0)");
        assert_eq!(ruled(&layout, &["a.w2.weight"], &[4, 4]).unwrap(), "R,S(1)");
        assert_eq!(ruled(&layout, &["optim.x", "a.w2.weight"], &[4, 4]).unwrap(), "R,S(1)");
        assert!(ruled(&layout, &["a.w2.scale"], &[]).is_err());
    }

    #[test]
    fn fallback_that_does_not_fit_becomes_replicate() {
        let layout = layout("dp=2,tp=2", &[], "S(0),S(1)");
        let bias = layout.fallback_placement(1, None);
        assert_eq!((text(&bias.shared).as_str(), bias.misfit), ("S(0),R", true));
        let scalar = layout.fallback_placement(0, None);
        assert_eq!((text(&scalar.shared).as_str(), scalar.misfit), ("R,R", true));
    }

    #[test]
    fn source_placements_follow_mesh_dim_names() {
        let source_mesh = DeviceMesh::parse("dp=2,tp=4").unwrap();
        let dim = TensorDim(0);
        let shared = vec![Placement::StridedShard { dim, split_factor: 4 }, Placement::Shard(dim)].into();
        let source = Some(MeshPlacement { mesh: &source_mesh, shared: &shared });
        let of_source = |mesh, source| text(&layout(mesh, &[], "source").fallback_placement(2, source).shared);
        assert_eq!(of_source("tp=2,dp=8", source), "S(0),S(0)");
        assert_eq!(of_source("dp=8,tp=2", source), "_S(0,2),S(0)");
        assert_eq!(of_source("dp=8", source), "S(0)");
        assert_eq!(of_source("dp=8", None), "R");
    }

    #[test]
    fn unnamed_mesh_of_equal_shape_keeps_source_placements() {
        let dims = || smallvec::SmallVec::from_slice(&[2, 2]);
        let mesh = |ranks: [u32; 4]| DeviceMesh::new(dims(), ranks.map(Rank).to_vec(), None).unwrap();
        let target = MeshLayout::new(mesh([0, 2, 1, 3]), vec![], Fallback::Source, None).unwrap();
        let shared = vec![Placement::Shard(TensorDim(1)), Placement::Replicate].into();
        let source = MeshPlacement { mesh: &mesh([0, 1, 2, 3]), shared: &shared };
        assert_eq!(target.source_placement(source), shared);
    }

    #[test]
    fn wrong_number_of_placements_is_an_error() {
        let mesh = DeviceMesh::parse("dp=2,tp=2").unwrap();
        for list in ["S(0)", "S(0),R,R"] {
            let fallback = Fallback::Placements(parse_placements(list).unwrap());
            assert!(MeshLayout::new(mesh.clone(), vec![], fallback, None).is_err(), "{list}");
        }
    }

    #[test]
    fn replicated_mesh_dim_lists_both_ranks_for_one_tile() {
        let layout = layout("dp=2,tp=2", &[], "R,S(0)");
        let shards = layout.shards(&[5], &layout.fallback_placement(1, None).shared).unwrap();
        assert_eq!(shards.len(), 2);
        assert_eq!(shards[0].1.as_slice(), [Rank(0), Rank(2)]);
    }
}
