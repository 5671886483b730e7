//! Assembles a global tensor from the parts of the ranks. This is the inverse of [`SharedTensor::part`].
//!
//! Shapes and offsets count elements. If a job saves local shards as plain tensors, a file has only the *local* shape.
//! With declared placements, the local shapes of all ranks give the global shape: along a tensor dim, the sizes of the
//! ranks that shard it add up to the global size. The placements are then checked rank by rank: every local shape must
//! be the shape that the placements give this rank for the global shape. PyTorch has no counterpart.
//!
//! ```text
//!     local 181, 181, 181, 178 over S(0)       global 721
//!                                              makani gives 181, 181, 181, 178: it matches
//!                                              balanced gives 181, 180, 180, 180: it does not match
//! ```
//!
//! A group is a set of ranks with equal coordinates on all replicated mesh dims. Every group holds the complete tensor,
//! so the ranks of one group are enough to get the global shape. A group may have no part at all (a pipeline stage has
//! only some of the layers).

use std::collections::HashMap;

use super::distinct_tiles::SharedTensor;
use super::{DeviceMesh, Dims, LayoutError, Placement, Rank, Split, TensorDim, Tile};

/// The local shape of a tensor on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPart {
    pub rank: Rank,
    pub sizes: Dims,
}

/// A global shape, and the tile of the global tensor that each rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssembledTensor {
    pub shape: Dims,
    /// The tile of each part, in the order of the parts given to [`assemble`].
    pub tiles: Vec<Tile>,
}

/// The reason why parts do not form a global tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartError {
    /// A rank outside the mesh has a part.
    OutsideMesh { rank: Rank },
    /// A rank of the mesh has no part, although a part is needed.
    Missing { rank: Rank },
    /// The part of a rank does not have the local shape that the placements give this rank.
    WrongSizes { rank: Rank, expected: Dims, found: Dims, shape: Dims },
    /// The sum of the local sizes along a dim exceeds `u64`.
    Overflow { dim: TensorDim },
    /// The placements do not fit a tensor of this shape.
    Layout { error: Box<LayoutError>, shape: Dims },
}

/// Assembles the global shape from the parts of ranks; each rank has at most one part. A rank for which `is_missing` is
/// true may have no part, if other ranks hold the same elements.
///
/// # Errors
/// [`PartError`] for the first rank whose part does not match `shared`.
///
/// # Panics
/// If parts differ in their number of dims.
pub fn assemble(
    mesh: &DeviceMesh,
    shared: &SharedTensor,
    parts: &[RankPart],
    is_missing: &dyn Fn(Rank) -> bool,
) -> Result<AssembledTensor, PartError> {
    if let Some(outside) = parts.iter().find(|part| mesh.coordinate(part.rank).is_none()) {
        return Err(PartError::OutsideMesh { rank: outside.rank });
    }
    let ndim = parts.first().map_or(0, |part| part.sizes.len());
    let sizes: HashMap<Rank, &Dims> = parts.iter().map(|part| (part.rank, &part.sizes)).collect();
    let group = complete_group(mesh, shared, &sizes, is_missing)?;
    let mut shape = Dims::new();
    for dim in (0..ndim).map(TensorDim) {
        let shares = |mesh_dim: usize| {
            shared.placements.get(mesh_dim).is_some_and(|placement| placement.sharded_dim() == Some(dim))
        };
        // Takes one rank for each part of this dim: on mesh dims that do not shard this dim, its coordinate equals the
        // coordinate of the first rank.
        let first = &group[0].1;
        let along = group.iter().filter(|(_, at)| (0..at.len()).all(|dim| shares(dim) || at[dim] == first[dim]));
        let total = along.map(|(rank, _)| sizes[rank][dim.0]).try_fold(0_u64, u64::checked_add);
        shape.push(total.ok_or(PartError::Overflow { dim })?);
    }
    let mut tiles = Vec::with_capacity(parts.len());
    for RankPart { rank, sizes: found } in parts {
        let at = mesh.coordinate(*rank).expect("a rank of the mesh");
        let tile = shared.part(&shape, mesh, &at);
        let tile = tile.map_err(|error| PartError::Layout { error: Box::new(error), shape: shape.clone() })?;
        let expected = tile.sizes();
        if expected != *found {
            return Err(PartError::WrongSizes { rank: *rank, expected, found: found.clone(), shape });
        }
        tiles.push(tile);
    }
    Ok(AssembledTensor { shape, tiles })
}

/// Returns the ranks of the first group in which every rank has a part. The ranks are in the order of the mesh and come
/// with their coordinates. A group is a set of ranks with equal coordinates on all replicated mesh dims. If some ranks
/// of a group have a part and others do not, `is_missing` must be true for the ranks without a part; otherwise, and if
/// there is no complete group, the function returns an error.
fn complete_group(
    mesh: &DeviceMesh,
    shared: &SharedTensor,
    sizes: &HashMap<Rank, &Dims>,
    is_missing: &dyn Fn(Rank) -> bool,
) -> Result<Vec<(Rank, Dims)>, PartError> {
    let mut groups: indexmap::IndexMap<Dims, Vec<(Rank, Dims)>> = indexmap::IndexMap::new();
    for (rank, at) in mesh.coordinates() {
        let replicates = |dim: &usize| shared.placements.get(*dim) == Some(&Placement::Replicate);
        let key = (0..at.len()).filter(replicates).map(|dim| at[dim]).collect();
        groups.entry(key).or_default().push((rank, at));
    }
    let has = |(rank, _): &&(Rank, Dims)| sizes.contains_key(rank);
    let mut complete = None;
    let mut absent = None;
    for group in groups.into_values() {
        match group.iter().filter(has).count() {
            0 => {}
            all if all == group.len() => complete = complete.or(Some(group)),
            _ => {
                let lacking = |(rank, _): &&(Rank, Dims)| !sizes.contains_key(rank);
                let unexplained = group.iter().filter(lacking).find(|(rank, _)| !is_missing(*rank));
                if let Some((rank, _)) = unexplained {
                    return Err(PartError::Missing { rank: *rank });
                }
                absent = absent.or(group.iter().find(lacking).map(|(rank, _)| *rank));
            }
        }
    }
    // At least one rank has a part, so there is a complete group or a missing rank.
    complete.ok_or(PartError::Missing { rank: absent.unwrap_or(mesh.ranks()[0]) })
}

/// Returns placements that are similar to `shared` and match the parts, for the hint of an error. The function first
/// tries other split rules. It then tries a `Shard` of each tensor dim on each single mesh dim, with every split rule. It
/// returns the first match.
pub fn nearest_fit(mesh: &DeviceMesh, shared: &SharedTensor, parts: &[RankPart]) -> Option<SharedTensor> {
    let fits = |shared: &SharedTensor| assemble(mesh, shared, parts, &|_| false).is_ok();
    let ndim = parts.first().map_or(0, |part| part.sizes.len());
    let cut = |placements: &[Placement], split: Option<&Split>| SharedTensor {
        placements: placements.to_vec(),
        splits: split.map_or_else(|| shared.splits.clone(), |split| vec![split.clone(); mesh.ndim()]),
        slice: None,
    };
    let rules = [Split::Chunk, Split::Balanced, Split::Makani];
    let other_rules = || std::iter::once(None).chain(rules.iter().map(Some));
    let mut candidates = vec![shared.placements.clone()];
    for mesh_dim in 0..shared.placements.len() {
        for dim in (0..ndim).map(TensorDim) {
            let mut changed = shared.placements.clone();
            changed[mesh_dim] = Placement::Shard(dim);
            candidates.push(changed);
        }
    }
    candidates.iter().flat_map(|placements| other_rules().map(move |rule| cut(placements, rule))).find(fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::parse_placements;

    fn shared(list: &str, split: Option<Split>, mesh: &DeviceMesh) -> SharedTensor {
        let specs = parse_placements(list).unwrap();
        let placements = specs.into_iter().map(|spec| spec.resolve(2).unwrap()).collect();
        let splits = split.map_or_else(Vec::new, |split| vec![split; mesh.ndim()]);
        SharedTensor { placements, splits, slice: None }
    }

    fn rank_parts(parts: &[(u32, [u64; 2])]) -> Vec<RankPart> {
        parts.iter().map(|(rank, sizes)| RankPart { rank: Rank(*rank), sizes: sizes.as_slice().into() }).collect()
    }

    fn put(mesh: &str, list: &str, split: Option<Split>, parts: &[(u32, [u64; 2])]) -> Result<Vec<u64>, PartError> {
        let mesh = DeviceMesh::parse(mesh).unwrap();
        let found = assemble(&mesh, &shared(list, split, &mesh), &rank_parts(parts), &|_| false)?;
        assert_eq!(found.tiles.len(), parts.len());
        Ok(found.shape.to_vec())
    }

    #[test]
    fn global_shape_is_assembled_for_every_layout() {
        let splits = [None, Some(Split::Balanced), Some(Split::Makani)];
        let lists = ["S(0),R", "R,S(1)", "S(0),S(0)", "S(1),S(0)", "S(0),P", "P,P", "R,R", "_S(0,3),S(0)", "S(1),S(1)"];
        for (mesh, list) in ["dp=2,tp=3", "dp=1,tp=3", "dp=4,tp=3"].iter().flat_map(|mesh| lists.map(|l| (mesh, l))) {
            let mesh = DeviceMesh::parse(mesh).unwrap();
            for (split, shape) in splits.iter().flat_map(|split| [[7, 5], [1, 2], [0, 3], [24, 36]].map(|s| (split, s)))
            {
                let shared = shared(list, split.clone(), &mesh);
                let part =
                    |(rank, at): (Rank, Dims)| Ok(RankPart { rank, sizes: shared.part(&shape, &mesh, &at)?.sizes() });
                // A strided shard is an error if its split rule gives other parts than torch.chunk.
                let Ok(parts) = mesh.coordinates().map(part).collect::<Result<Vec<_>, LayoutError>>() else { continue };
                let found = assemble(&mesh, &shared, &parts, &|_| false);
                assert_eq!(found.unwrap().shape.as_slice(), shape, "{list} of {shape:?} on {mesh}, {split:?}");
            }
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_errors() {
        let rows = |sizes: [u64; 3]| (0..).zip(sizes).map(|(rank, size)| (rank, [size, 2])).collect::<Vec<_>>();
        assert_eq!(put("tp=3", "S(0)", None, &rows([3, 3, 1])), Ok(vec![7, 2]));
        let sizes = |found: Result<_, PartError>| match found.unwrap_err() {
            PartError::WrongSizes { rank, expected, found, .. } => (rank.0, expected[0], found[0]),
            other => panic!("{other:?}"),
        };
        assert_eq!(sizes(put("tp=3", "S(0)", None, &rows([3, 2, 2]))), (1, 3, 2));
        assert_eq!(put("tp=3", "S(0)", Some(Split::Balanced), &rows([3, 2, 2])), Ok(vec![7, 2]));
        assert_eq!(sizes(put("tp=3", "R", None, &rows([3, 3, 1]))), (2, 3, 1));
        assert_eq!(put("tp=3", "S(0)", None, &rows([u64::MAX, 1, 0])), Err(PartError::Overflow { dim: TensorDim(0) }));
        assert_eq!(put("tp=2", "S(0)", None, &rows([1, 1, 1])), Err(PartError::OutsideMesh { rank: Rank(2) }));
        assert_eq!(put("tp=4", "S(0)", None, &rows([1, 1, 1])), Err(PartError::Missing { rank: Rank(3) }));
        let explicit = Split::Sizes([3, 1, 4].into());
        assert_eq!(put("tp=3", "S(0)", Some(explicit.clone()), &rows([3, 1, 4])), Ok(vec![8, 2]));
        assert!(matches!(put("tp=3", "S(0)", Some(explicit), &rows([3, 4, 1])), Err(PartError::WrongSizes { .. })));
        let wrong = Split::Sizes([3, 1, 5].into());
        assert!(matches!(put("tp=3", "S(0)", Some(wrong), &rows([3, 1, 4])), Err(PartError::Layout { .. })));
    }

    #[test]
    fn group_without_a_tensor_is_allowed_and_incomplete_group_is_an_error() {
        let parts = [(2, [1, 2]), (3, [1, 2])];
        assert_eq!(put("pp=2,tp=2", "R,S(0)", None, &parts), Ok(vec![2, 2]));
        assert_eq!(put("pp=2,tp=2", "P,S(0)", None, &parts), Err(PartError::Missing { rank: Rank(0) }));
        assert_eq!(put("pp=2,tp=2", "R,S(0)", None, &parts[..1]), Err(PartError::Missing { rank: Rank(3) }));
        let mesh = DeviceMesh::parse("dp=2,tp=2").unwrap();
        let parts = rank_parts(&[(0, [1, 2]), (2, [1, 2]), (3, [1, 2])]);
        let found = assemble(&mesh, &shared("R,S(0)", None, &mesh), &parts, &|rank| rank == Rank(1));
        assert_eq!(found.unwrap().shape.as_slice(), [2, 2]);
        let found = assemble(&mesh, &shared("R,S(0)", None, &mesh), &parts[..1], &|rank| rank == Rank(1));
        assert_eq!(found, Err(PartError::Missing { rank: Rank(1) }));
    }

    #[test]
    fn nearest_fit_finds_a_matching_split_or_placement() {
        let mesh = DeviceMesh::parse("tp=3").unwrap();
        let near = |list: &str, parts: &[(u32, [u64; 2])]| {
            let found = nearest_fit(&mesh, &shared(list, None, &mesh), &rank_parts(parts))?;
            Some(format!("{} {}", found.placements[0], found.splits.first().unwrap_or(&Split::Chunk)))
        };
        let columns = |sizes: [u64; 3]| (0..).zip(sizes).map(|(rank, size)| (rank, [4, size])).collect::<Vec<_>>();
        assert_eq!(near("S(1)", &columns([3, 2, 2])).as_deref(), Some("S(1) balanced"));
        assert_eq!(near("S(1)", &columns([1, 1, 2])).as_deref(), Some("S(1) makani"));
        assert_eq!(near("R", &columns([3, 3, 1])).as_deref(), Some("S(1) chunk"));
        assert_eq!(near("S(0)", &columns([3, 2, 2])).as_deref(), Some("S(1) balanced"));
        assert_eq!(near("S(1)", &columns([1, 5, 2])), None);
    }
}
