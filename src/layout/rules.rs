//! Which placements a tensor gets on a mesh.
//!
//! Rules are tried in order and the first that matches one of a tensor's names wins; a rule must fit the tensor. What
//! no rule matches gets the fallback, which gives Replicate on a mesh dim where it does not fit (`S(1)` of a bias).

use super::parallelize::ParallelizePlan;
use super::shards::{Held, MeshPlacement, SharedTensor, shards};
use super::strided::MeshChange;
use super::{DeviceMesh, LayoutError, MeshDim, Pattern, Placement, PlacementSpec, Split, comma_list};

/// What somebody says of some tensors.
#[derive(Clone, Debug)]
pub struct Rule {
    pub pattern: Pattern,
    pub lies: PlacementChoice,
    /// Where it was said, for messages: `--placements '**.w1=S(0)'`, `layout.toml line 7`.
    pub said: String,
}

impl Rule {
    /// Whether it is for a tensor that is known by these names.
    #[must_use]
    pub fn covers(&self, names: &[String]) -> bool {
        names.iter().any(|name| self.pattern.covers(name))
    }
}

/// What to tell of a rule that never wins; `said` is where it was said.
#[must_use]
pub fn unheard(said: &str) -> String {
    format!("{said}: without effect, since rules before it are for the same tensors")
}

/// How tensors lie, before it has met one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementChoice {
    /// Plain, whole on every rank.
    Plain,
    Shared(PlacementList),
}

/// Placements as written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementList {
    /// One a mesh dim.
    pub placements: Vec<PlacementSpec>,
    /// One a mesh dim, or none for what the layout says of all tensors.
    pub splits: Vec<Split>,
    /// The dims of the tensor's own mesh, ascending, where that is to be a slice.
    pub slice: Option<Vec<MeshDim>>,
}

impl From<Vec<PlacementSpec>> for PlacementList {
    fn from(placements: Vec<PlacementSpec>) -> Self {
        Self { placements, splits: Vec::new(), slice: None }
    }
}

impl PlacementList {
    /// # Errors
    /// `LayoutError` where there is not one placement, or split, a mesh dim, or one for a dim outside the slice.
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

/// What tensors without a rule get.
#[derive(Clone, Debug)]
pub enum Fallback {
    /// These, where they fit.
    Placements(Vec<PlacementSpec>),
    /// What they have in the source, mesh dim by mesh dim of the same name.
    Source,
}

impl Fallback {
    /// Whether everything is whole on every rank.
    #[must_use]
    pub fn is_replicate(&self) -> bool {
        matches!(self, Self::Placements(list) if list.iter().all(|spec| *spec == PlacementSpec::Replicate))
    }
}

/// A mesh and the placements on it.
#[derive(Clone, Debug)]
pub struct MeshLayout {
    pub mesh: DeviceMesh,
    pub rules: Vec<Rule>,
    pub fallback: Fallback,
    /// How dims are cut where nothing more particular is said; `None` as in the source, else as DTensors are.
    pub split: Option<Split>,
    /// What says of the parameters of the model, behind the rules, how they lie. It has to [meet] them first.
    ///
    /// [meet]: Plan::bind
    pub plan: Option<ParallelizePlan>,
}

/// What the fallback is for a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fitted {
    pub shared: SharedTensor,
    /// Where a placement had to become Replicate.
    pub misfit: bool,
}

impl MeshLayout {
    /// # Errors
    /// `LayoutError` where a list of placements has not one a mesh dim, or says something of dims outside its slice.
    pub fn new(
        mesh: DeviceMesh,
        rules: Vec<Rule>,
        fallback: Fallback,
        split: Option<Split>,
    ) -> Result<Self, LayoutError> {
        for rule in &rules {
            if let PlacementChoice::Shared(spec) = &rule.lies {
                spec.check(&mesh)?;
            }
        }
        if let Fallback::Placements(list) = &fallback {
            PlacementList::from(list.clone()).check(&mesh)?;
        }
        Ok(Self { mesh, rules, fallback, split, plan: None })
    }

    /// How a rule has a tensor of this shape that is known by `names`; `None` for a plain one on every rank.
    ///
    /// # Errors
    /// `RuleMisfit` where it does not fit.
    pub fn ruled(&self, rule: &Rule, names: &[String], shape: &[u64]) -> Result<Option<SharedTensor>, LayoutError> {
        let PlacementChoice::Shared(spec) = &rule.lies else { return Ok(None) };
        let placements = spec.placements.iter().map(|placement| {
            placement.resolve(shape.len()).ok_or_else(|| LayoutError::RuleMisfit {
                rule: rule.said.clone(),
                placement: placement.to_string(),
                fqn: names.first().cloned().unwrap_or_default(),
                shape: shape.to_vec(),
            })
        });
        let placements = placements.collect::<Result<_, _>>()?;
        let splits = if spec.splits.is_empty() { self.splits() } else { spec.splits.clone() };
        Ok(Some(SharedTensor { placements, splits, slice: spec.slice.clone() }))
    }

    /// How a tensor of so many dims lies that nothing more particular is said of.
    #[must_use]
    pub fn fitted(&self, ndim: usize, source: Option<MeshPlacement<'_>>) -> Fitted {
        match &self.fallback {
            Fallback::Placements(specs) => {
                let resolved: Vec<Option<Placement>> = specs.iter().map(|spec| spec.resolve(ndim)).collect();
                let misfit = resolved.contains(&None);
                let placements = resolved.into_iter().map(|found| found.unwrap_or(Placement::Replicate)).collect();
                Fitted { shared: SharedTensor { placements, splits: self.splits(), slice: None }, misfit }
            }
            Fallback::Source => {
                let shared = source.map_or_else(|| self.replicated(), |source| self.as_in(source));
                Fitted { shared, misfit: false }
            }
        }
    }

    /// Whole on every rank of the mesh.
    #[must_use]
    pub fn replicated(&self) -> SharedTensor {
        vec![Placement::Replicate; self.mesh.ndim()].into()
    }

    /// Cut as is said of all tensors, where nothing more particular is.
    #[must_use]
    pub fn split_as_said(&self, shared: SharedTensor) -> SharedTensor {
        if shared.splits.is_empty() { SharedTensor { splits: self.splits(), ..shared } } else { shared }
    }

    /// What is said of all tensors.
    fn splits(&self) -> Vec<Split> {
        match &self.split {
            None | Some(Split::Chunk) => Vec::new(),
            Some(split) => vec![split.clone(); self.mesh.ndim()],
        }
    }

    /// The source's placements on the mesh dims of the same names, Replicate on the others.
    #[must_use]
    pub fn as_in(&self, source: MeshPlacement<'_>) -> SharedTensor {
        let SharedTensor { placements: own, splits: own_splits, .. } = source.shared;
        let said = self.split.as_ref().map(|_| self.splits());
        if source.mesh.has_dims_of(&self.mesh) {
            let splits = said.unwrap_or_else(|| own_splits.clone());
            return SharedTensor { placements: own.clone(), splits, slice: None };
        }
        let mut placements = vec![Placement::Replicate; self.mesh.ndim()];
        let mut splits = if own_splits.is_empty() { Vec::new() } else { vec![Split::Chunk; self.mesh.ndim()] };
        let Some(names) = source.mesh.names() else { return placements.into() };
        let target_dims: Vec<Option<usize>> =
            names.iter().map(|name| self.mesh.dim_by_name(name).map(|dim| dim.0)).collect();
        let route = MeshChange { from: source.mesh, to: &self.mesh, dims: &target_dims };
        let sharded: Vec<_> = own.iter().map(|placement| placement.sharded_dim()).collect();
        for (index, placement) in own.iter().enumerate() {
            let Some(target) = target_dims[index] else { continue };
            if let Some(split) = own_splits.get(index) {
                splits[target] = split.clone();
            }
            placements[target] = match *placement {
                Placement::StridedShard { dim, split_factor } => {
                    match route.split_factor(split_factor, index, &sharded) {
                        Some(split_factor) => Placement::StridedShard { dim, split_factor },
                        None => Placement::Shard(dim),
                    }
                }
                other => other,
            };
        }
        SharedTensor { placements, splits: said.unwrap_or(splits), slice: None }
    }

    /// On the dims of the slice that the tensor is on in the source (norms under FSDP over TP), where it is replicated
    /// on the others and nothing else is said.
    #[must_use]
    pub fn sliced(&self, shared: SharedTensor, source: MeshPlacement<'_>) -> SharedTensor {
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

    /// The distinct tiles of a tensor, each with the ranks that hold it.
    ///
    /// # Errors
    /// `LayoutError` where the placements do not fit the shape.
    pub fn shards(&self, shape: &[u64], shared: &SharedTensor) -> Result<Vec<Held>, LayoutError> {
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
                lies: PlacementChoice::Shared(parse_placements(list).unwrap().into()),
                said: (*pattern).to_owned(),
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
        layout.ruled(rule, &names, shape).map(|shared| text(&shared.unwrap()))
    }

    #[test]
    fn a_rule_knows_any_of_the_names_and_must_fit() {
        let layout = layout("dp=2,tp=2", &[("**.w1", "R,S(0)"), ("**.w?", "R,S(-1)")], "S(0),R");
        assert_eq!(ruled(&layout, &["a.w1.weight"], &[4, 4]).unwrap(), "R,S(0)");
        assert_eq!(ruled(&layout, &["a.w2.weight"], &[4, 4]).unwrap(), "R,S(1)");
        assert_eq!(ruled(&layout, &["optim.x", "a.w2.weight"], &[4, 4]).unwrap(), "R,S(1)");
        assert!(ruled(&layout, &["a.w2.scale"], &[]).is_err());
    }

    #[test]
    fn the_fallback_becomes_replicate_where_it_does_not_fit() {
        let layout = layout("dp=2,tp=2", &[], "S(0),S(1)");
        let bias = layout.fitted(1, None);
        assert_eq!((text(&bias.shared).as_str(), bias.misfit), ("S(0),R", true));
        let scalar = layout.fitted(0, None);
        assert_eq!((text(&scalar.shared).as_str(), scalar.misfit), ("R,R", true));
    }

    #[test]
    fn source_placements_follow_mesh_dim_names() {
        let source_mesh = DeviceMesh::parse("dp=2,tp=4").unwrap();
        let dim = TensorDim(0);
        let shared = vec![Placement::StridedShard { dim, split_factor: 4 }, Placement::Shard(dim)].into();
        let source = Some(MeshPlacement { mesh: &source_mesh, shared: &shared });
        let of_source = |mesh, source| text(&layout(mesh, &[], "source").fitted(2, source).shared);
        assert_eq!(of_source("tp=2,dp=8", source), "S(0),S(0)");
        assert_eq!(of_source("dp=8,tp=2", source), "_S(0,2),S(0)");
        assert_eq!(of_source("dp=8", source), "S(0)");
        assert_eq!(of_source("dp=8", None), "R");
    }

    #[test]
    fn placements_on_the_same_mesh_dims_need_no_names() {
        let dims = || smallvec::SmallVec::from_slice(&[2, 2]);
        let mesh = |ranks: [u32; 4]| DeviceMesh::new(dims(), ranks.map(Rank).to_vec(), None).unwrap();
        let target = MeshLayout::new(mesh([0, 2, 1, 3]), vec![], Fallback::Source, None).unwrap();
        let shared = vec![Placement::Shard(TensorDim(1)), Placement::Replicate].into();
        let source = MeshPlacement { mesh: &mesh([0, 1, 2, 3]), shared: &shared };
        assert_eq!(target.as_in(source), shared);
    }

    #[test]
    fn placements_must_be_one_a_mesh_dim() {
        let mesh = DeviceMesh::parse("dp=2,tp=2").unwrap();
        for list in ["S(0)", "S(0),R,R"] {
            let fallback = Fallback::Placements(parse_placements(list).unwrap());
            assert!(MeshLayout::new(mesh.clone(), vec![], fallback, None).is_err(), "{list}");
        }
    }

    #[test]
    fn replicas_share_a_tile() {
        let layout = layout("dp=2,tp=2", &[], "R,S(0)");
        let shards = layout.shards(&[5], &layout.fitted(1, None).shared).unwrap();
        assert_eq!(shards.len(), 2);
        assert_eq!(shards[0].1.as_slice(), [Rank(0), Rank(2)]);
    }
}
