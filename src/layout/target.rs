//! Which placements a tensor gets on the target mesh.
//!
//! Rules are tried in order and the first that matches one of a tensor's names wins; a rule must fit the tensor. What
//! no rule matches gets the fallback, which gives Replicate on a mesh dim where it does not fit (`S(1)` of a bias).

use super::{DeviceMesh, LayoutError, Pattern, Placement, PlacementSpec, Rank, Tile, local_shard};

/// A rule of `--placements`.
#[derive(Clone, Debug)]
pub struct Rule {
    pub pattern: Pattern,
    pub placements: Vec<PlacementSpec>,
}

/// What tensors without a rule get.
#[derive(Clone, Debug)]
pub enum Fallback {
    /// These, where they fit.
    Placements(Vec<PlacementSpec>),
    /// What they have in the source, mesh dim by mesh dim of the same name.
    Source,
}

/// A mesh and the placements on it.
#[derive(Clone, Debug)]
pub struct TargetLayout {
    pub mesh: DeviceMesh,
    pub rules: Vec<Rule>,
    pub fallback: Fallback,
}

/// The layout a tensor has in the source.
#[derive(Clone, Copy, Debug)]
pub struct SourceLayout<'a> {
    pub mesh: &'a DeviceMesh,
    pub placements: &'a [Placement],
}

/// The placements chosen for a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    pub placements: Vec<Placement>,
    /// Index of the rule, if one matched.
    pub rule: Option<usize>,
    /// Where the fallback had to become Replicate.
    pub misfit: bool,
}

impl TargetLayout {
    /// # Errors
    /// `LayoutError` where a list of placements has not one a mesh dim, or is Partial.
    pub fn new(mesh: DeviceMesh, rules: Vec<Rule>, fallback: Fallback) -> Result<Self, LayoutError> {
        let lists = rules.iter().map(|rule| &rule.placements);
        let fallback_list = match &fallback {
            Fallback::Placements(list) => Some(list),
            Fallback::Source => None,
        };
        for list in lists.chain(fallback_list) {
            let text = || list.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            if list.len() != mesh.ndim() {
                return Err(LayoutError::PlacementList { placements: text(), mesh: mesh.to_string() });
            }
            if list.iter().any(|spec| matches!(spec, PlacementSpec::Partial(_))) {
                return Err(LayoutError::PartialTarget { placements: text() });
            }
        }
        Ok(Self { mesh, rules, fallback })
    }

    /// The placements of a tensor of `ndim` dims that is known by `names`.
    ///
    /// # Errors
    /// `LayoutError` where a rule does not fit.
    pub fn choose(
        &self,
        names: &[&str],
        shape: &[u64],
        source: Option<SourceLayout<'_>>,
    ) -> Result<Chosen, LayoutError> {
        for (index, rule) in self.rules.iter().enumerate() {
            if names.iter().any(|name| rule.pattern.covers(name)) {
                let placements = rule.placements.iter().map(|spec| {
                    spec.resolve(shape.len()).ok_or_else(|| LayoutError::RuleMisfit {
                        rule: rule.pattern.to_string(),
                        placement: spec.to_string(),
                        fqn: names.first().copied().unwrap_or_default().to_owned(),
                        shape: shape.to_vec(),
                    })
                });
                return Ok(Chosen {
                    placements: placements.collect::<Result<_, _>>()?,
                    rule: Some(index),
                    misfit: false,
                });
            }
        }
        Ok(match &self.fallback {
            Fallback::Placements(specs) => {
                let resolved: Vec<Option<Placement>> = specs.iter().map(|spec| spec.resolve(shape.len())).collect();
                let misfit = resolved.contains(&None);
                let placements = resolved.into_iter().map(|found| found.unwrap_or(Placement::Replicate)).collect();
                Chosen { placements, rule: None, misfit }
            }
            Fallback::Source => {
                let replicated = || vec![Placement::Replicate; self.mesh.ndim()];
                let placements = source.map_or_else(replicated, |source| self.as_in(source));
                Chosen { placements, rule: None, misfit: false }
            }
        })
    }

    /// The source's placements on the mesh dims of the same names, Replicate on the others.
    #[must_use]
    pub fn as_in(&self, source: SourceLayout<'_>) -> Vec<Placement> {
        if (source.mesh.shape(), source.mesh.names()) == (self.mesh.shape(), self.mesh.names()) {
            return source.placements.to_vec();
        }
        let mut placements = vec![Placement::Replicate; self.mesh.ndim()];
        let Some(names) = source.mesh.names() else { return placements };
        let target_dims: Vec<Option<usize>> =
            names.iter().map(|name| self.mesh.dim_by_name(name).map(|dim| dim.0)).collect();
        for (index, placement) in source.placements.iter().enumerate() {
            let Some(target) = target_dims[index] else { continue };
            placements[target] = match *placement {
                // A split factor that stands for the mesh dims further right (FSDP over TP) follows their new sizes;
                // where they come to stand further left, a plain shard already means that they split first.
                Placement::StridedShard { dim, split_factor } => {
                    let inner: Vec<usize> = (index + 1..source.placements.len())
                        .filter(|&later| source.placements[later].sharded_dim() == Some(dim))
                        .collect();
                    let before: u64 = inner.iter().map(|&later| source.mesh.shape()[later]).product();
                    let still_inner = inner.iter().filter_map(|&later| target_dims[later]).filter(|&at| at > target);
                    let after: u64 = still_inner.map(|at| self.mesh.shape()[at]).product();
                    match (before == split_factor, after) {
                        (true, 0 | 1) => Placement::Shard(dim),
                        (true, after) => Placement::StridedShard { dim, split_factor: after },
                        (false, _) => Placement::StridedShard { dim, split_factor },
                    }
                }
                other => other,
            };
        }
        placements
    }

    /// The distinct tiles of a tensor, each with the ranks that hold it.
    ///
    /// # Errors
    /// `LayoutError` where the placements do not fit the shape.
    pub fn shards(&self, shape: &[u64], placements: &[Placement]) -> Result<Vec<(Tile, Vec<Rank>)>, LayoutError> {
        let mut shards: indexmap::IndexMap<Tile, Vec<Rank>> = indexmap::IndexMap::new();
        for (rank, coordinate) in self.mesh.coordinates() {
            let tile = local_shard(shape, self.mesh.shape(), placements, &coordinate)?;
            shards.entry(tile).or_default().push(rank);
        }
        for ranks in shards.values_mut() {
            ranks.sort_unstable();
        }
        Ok(shards.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{TensorDim, parse_placements};
    use super::*;

    fn layout(mesh: &str, rules: &[(&str, &str)], fallback: &str) -> TargetLayout {
        let rules = rules
            .iter()
            .map(|(pattern, list)| Rule {
                pattern: Pattern::parse(pattern).unwrap(),
                placements: parse_placements(list).unwrap(),
            })
            .collect();
        let fallback = match fallback {
            "source" => Fallback::Source,
            list => Fallback::Placements(parse_placements(list).unwrap()),
        };
        TargetLayout::new(DeviceMesh::parse(mesh).unwrap(), rules, fallback).unwrap()
    }

    fn text(chosen: &Chosen) -> String {
        chosen.placements.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }

    #[test]
    fn the_first_rule_wins_and_must_fit() {
        let layout = layout("dp=2,tp=2", &[("**.w1", "R,S(0)"), ("**.w?", "R,S(-1)")], "S(0),R");
        assert_eq!(text(&layout.choose(&["a.w1.weight"], &[4, 4], None).unwrap()), "R,S(0)");
        assert_eq!(text(&layout.choose(&["a.w2.weight"], &[4, 4], None).unwrap()), "R,S(1)");
        assert_eq!(text(&layout.choose(&["optim.x", "a.w2.weight"], &[4, 4], None).unwrap()), "R,S(1)");
        assert!(layout.choose(&["a.w2.scale"], &[], None).is_err());
    }

    #[test]
    fn the_fallback_becomes_replicate_where_it_does_not_fit() {
        let layout = layout("dp=2,tp=2", &[], "S(0),S(1)");
        let bias = layout.choose(&["b"], &[4], None).unwrap();
        assert_eq!((text(&bias).as_str(), bias.misfit), ("S(0),R", true));
        let scalar = layout.choose(&["s"], &[], None).unwrap();
        assert_eq!((text(&scalar).as_str(), scalar.misfit), ("R,R", true));
    }

    #[test]
    fn source_placements_follow_mesh_dim_names() {
        let source_mesh = DeviceMesh::parse("dp=2,tp=4").unwrap();
        let dim = TensorDim(0);
        let placements = [Placement::StridedShard { dim, split_factor: 4 }, Placement::Shard(dim)];
        let source = Some(SourceLayout { mesh: &source_mesh, placements: &placements });
        assert_eq!(text(&layout("tp=2,dp=8", &[], "source").choose(&["w"], &[8, 8], source).unwrap()), "S(0),S(0)");
        assert_eq!(text(&layout("dp=8,tp=2", &[], "source").choose(&["w"], &[8, 8], source).unwrap()), "_S(0,2),S(0)");
        assert_eq!(text(&layout("dp=8", &[], "source").choose(&["w"], &[8, 8], source).unwrap()), "S(0)");
        assert_eq!(text(&layout("dp=8", &[], "source").choose(&["w"], &[8, 8], None).unwrap()), "R");
    }

    #[test]
    fn placements_on_the_same_mesh_dims_need_no_names() {
        let dims = || smallvec::SmallVec::from_slice(&[2, 2]);
        let mesh = |ranks: [u32; 4]| DeviceMesh::new(dims(), ranks.map(Rank).to_vec(), None).unwrap();
        let target = TargetLayout::new(mesh([0, 2, 1, 3]), vec![], Fallback::Source).unwrap();
        let placements = [Placement::Shard(TensorDim(1)), Placement::Replicate];
        let source = SourceLayout { mesh: &mesh([0, 1, 2, 3]), placements: &placements };
        assert_eq!(target.as_in(source), placements);
    }

    #[test]
    fn placements_must_be_one_a_mesh_dim_and_whole() {
        let mesh = DeviceMesh::parse("dp=2,tp=2").unwrap();
        for list in ["S(0)", "S(0),R,R", "S(0),P(sum)"] {
            let fallback = Fallback::Placements(parse_placements(list).unwrap());
            assert!(TargetLayout::new(mesh.clone(), vec![], fallback).is_err(), "{list}");
        }
    }

    #[test]
    fn replicas_share_a_tile() {
        let layout = layout("dp=2,tp=2", &[], "R,S(0)");
        let shards = layout.shards(&[5], &layout.choose(&["w"], &[5], None).unwrap().placements).unwrap();
        assert_eq!(shards.len(), 2);
        assert_eq!(shards[0].1, [Rank(0), Rank(2)]);
    }
}
