//! From the parts that ranks hold to the whole: the inverse of [`Shared::part`].
//!
//! Counts elements. Where a job keeps plain tensors that are parts, a file has the *local* shape and nothing else. With
//! placements said of it, the parts of all ranks together give the global shape: along a tensor dim, those of the ranks
//! that share it add up to it. Whether the placements were right is then proven rank by rank: every local shape must be
//! the one that the placements give that rank of that whole.
//!
//! ```text
//!     local 181, 181, 181, 178 over S(0)       721 in all
//!                                              makani's rule gives 181, 181, 181, 178: so it is
//!                                              balanced gives 181, 180, 180, 180: so it is not
//! ```
//!
//! Ranks along a mesh dim that replicates hold the same parts, so one such group of ranks is enough to know the whole,
//! and a group may lack the tensor altogether (a stage of a pipeline has some of the layers).

use std::collections::HashMap;

use super::shards::SharedTensor;
use super::{DeviceMesh, Dims, LayoutError, Placement, Rank, Split, TensorDim, Tile};

/// What a rank holds of a tensor: the shape of its part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPart {
    pub rank: Rank,
    pub sizes: Dims,
}

/// A whole, and the part of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssembledTensor {
    pub shape: Dims,
    /// In the order of what is held.
    pub tiles: Vec<Tile>,
}

/// Why parts make no whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartError {
    /// A rank that the mesh does not have holds a part.
    Outside { rank: Rank },
    /// A rank lacks its part.
    Absent { rank: Rank },
    /// A part of another shape.
    Sizes { rank: Rank, expected: Dims, found: Dims, shape: Dims },
    /// Sizes that add up to more than there are numbers.
    Overflow { dim: TensorDim },
    /// Placements that fit no tensor of these dims, or no whole of this shape.
    Layout { error: Box<LayoutError>, shape: Dims },
}

/// Put together what ranks hold, each of them once. A rank for which `is_missing` may lack its part, where others have
/// the same.
///
/// # Errors
/// [`PartError`] for the first rank whose part is not as `shared` says.
///
/// # Panics
/// Where parts differ in their number of dims.
pub fn whole(
    mesh: &DeviceMesh,
    shared: &SharedTensor,
    held: &[RankPart],
    is_missing: &dyn Fn(Rank) -> bool,
) -> Result<AssembledTensor, PartError> {
    if let Some(outside) = held.iter().find(|part| mesh.coordinate(part.rank).is_none()) {
        return Err(PartError::Outside { rank: outside.rank });
    }
    let ndim = held.first().map_or(0, |part| part.sizes.len());
    let sizes: HashMap<Rank, &Dims> = held.iter().map(|part| (part.rank, &part.sizes)).collect();
    let group = group(mesh, shared, &sizes, is_missing)?;
    let mut shape = Dims::new();
    for dim in (0..ndim).map(TensorDim) {
        let shares = |mesh_dim: usize| {
            shared.placements.get(mesh_dim).is_some_and(|placement| placement.sharded_dim() == Some(dim))
        };
        // One rank for each part of this dim: where others share, the first.
        let first = &group[0].1;
        let along = group.iter().filter(|(_, at)| (0..at.len()).all(|dim| shares(dim) || at[dim] == first[dim]));
        let total = along.map(|(rank, _)| sizes[rank][dim.0]).try_fold(0_u64, u64::checked_add);
        shape.push(total.ok_or(PartError::Overflow { dim })?);
    }
    let mut tiles = Vec::with_capacity(held.len());
    for RankPart { rank, sizes: found } in held {
        let at = mesh.coordinate(*rank).expect("a rank of the mesh");
        let tile = shared.part(&shape, mesh, &at);
        let tile = tile.map_err(|error| PartError::Layout { error: Box::new(error), shape: shape.clone() })?;
        let expected = tile.sizes();
        if expected != *found {
            return Err(PartError::Sizes { rank: *rank, expected, found: found.clone(), shape });
        }
        tiles.push(tile);
    }
    Ok(AssembledTensor { shape, tiles })
}

/// The ranks of a group that has everything, with their coordinates, in the order of the mesh. A group is what differs
/// along mesh dims that replicate not at all.
fn group(
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
                    return Err(PartError::Absent { rank: *rank });
                }
                absent = absent.or(group.iter().find(lacking).map(|(rank, _)| *rank));
            }
        }
    }
    // Somebody holds something, so that there is the one or the other.
    complete.ok_or(PartError::Absent { rank: absent.unwrap_or(mesh.ranks()[0]) })
}

/// Placements that the parts would fit, where they do not fit those of `shared`: cut by another rule, else changed on
/// one mesh dim. The first that fits, in this order.
#[must_use]
pub fn nearest(mesh: &DeviceMesh, shared: &SharedTensor, held: &[RankPart]) -> Option<SharedTensor> {
    let fits = |shared: &SharedTensor| whole(mesh, shared, held, &|_| false).is_ok();
    let ndim = held.first().map_or(0, |part| part.sizes.len());
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

    fn held(parts: &[(u32, [u64; 2])]) -> Vec<RankPart> {
        parts.iter().map(|(rank, sizes)| RankPart { rank: Rank(*rank), sizes: sizes.as_slice().into() }).collect()
    }

    fn put(mesh: &str, list: &str, split: Option<Split>, parts: &[(u32, [u64; 2])]) -> Result<Vec<u64>, PartError> {
        let mesh = DeviceMesh::parse(mesh).unwrap();
        let found = whole(&mesh, &shared(list, split, &mesh), &held(parts), &|_| false)?;
        assert_eq!(found.tiles.len(), parts.len());
        Ok(found.shape.to_vec())
    }

    #[test]
    fn every_layout_is_told_from_its_parts() {
        let splits = [None, Some(Split::Balanced), Some(Split::Makani)];
        let lists = ["S(0),R", "R,S(1)", "S(0),S(0)", "S(1),S(0)", "S(0),P", "P,P", "R,R", "_S(0,3),S(0)", "S(1),S(1)"];
        for (mesh, list) in ["dp=2,tp=3", "dp=1,tp=3", "dp=4,tp=3"].iter().flat_map(|mesh| lists.map(|l| (mesh, l))) {
            let mesh = DeviceMesh::parse(mesh).unwrap();
            for (split, shape) in splits.iter().flat_map(|split| [[7, 5], [1, 2], [0, 3], [24, 36]].map(|s| (split, s)))
            {
                let shared = shared(list, split.clone(), &mesh);
                let part =
                    |(rank, at): (Rank, Dims)| Ok(RankPart { rank, sizes: shared.part(&shape, &mesh, &at)?.sizes() });
                // A strided shard that another rule would cut otherwise has no parts.
                let Ok(held) = mesh.coordinates().map(part).collect::<Result<Vec<_>, LayoutError>>() else { continue };
                let found = whole(&mesh, &shared, &held, &|_| false);
                assert_eq!(found.unwrap().shape.as_slice(), shape, "{list} of {shape:?} on {mesh}, {split:?}");
            }
        }
    }

    #[test]
    fn parts_that_fit_nothing_are_named() {
        let rows = |sizes: [u64; 3]| (0..).zip(sizes).map(|(rank, size)| (rank, [size, 2])).collect::<Vec<_>>();
        assert_eq!(put("tp=3", "S(0)", None, &rows([3, 3, 1])), Ok(vec![7, 2]));
        let sizes = |found: Result<_, PartError>| match found.unwrap_err() {
            PartError::Sizes { rank, expected, found, .. } => (rank.0, expected[0], found[0]),
            other => panic!("{other:?}"),
        };
        assert_eq!(sizes(put("tp=3", "S(0)", None, &rows([3, 2, 2]))), (1, 3, 2));
        assert_eq!(put("tp=3", "S(0)", Some(Split::Balanced), &rows([3, 2, 2])), Ok(vec![7, 2]));
        assert_eq!(sizes(put("tp=3", "R", None, &rows([3, 3, 1]))), (2, 3, 1));
        assert_eq!(put("tp=3", "S(0)", None, &rows([u64::MAX, 1, 0])), Err(PartError::Overflow { dim: TensorDim(0) }));
        assert_eq!(put("tp=2", "S(0)", None, &rows([1, 1, 1])), Err(PartError::Outside { rank: Rank(2) }));
        assert_eq!(put("tp=4", "S(0)", None, &rows([1, 1, 1])), Err(PartError::Absent { rank: Rank(3) }));
        let explicit = Split::Sizes([3, 1, 4].into());
        assert_eq!(put("tp=3", "S(0)", Some(explicit.clone()), &rows([3, 1, 4])), Ok(vec![8, 2]));
        assert!(matches!(put("tp=3", "S(0)", Some(explicit), &rows([3, 4, 1])), Err(PartError::Sizes { .. })));
        let wrong = Split::Sizes([3, 1, 5].into());
        assert!(matches!(put("tp=3", "S(0)", Some(wrong), &rows([3, 1, 4])), Err(PartError::Layout { .. })));
    }

    #[test]
    fn groups_may_lack_a_tensor_and_ranks_of_a_group_may_not() {
        let parts = [(2, [1, 2]), (3, [1, 2])];
        assert_eq!(put("pp=2,tp=2", "R,S(0)", None, &parts), Ok(vec![2, 2]));
        assert_eq!(put("pp=2,tp=2", "P,S(0)", None, &parts), Err(PartError::Absent { rank: Rank(0) }));
        assert_eq!(put("pp=2,tp=2", "R,S(0)", None, &parts[..1]), Err(PartError::Absent { rank: Rank(3) }));
        let mesh = DeviceMesh::parse("dp=2,tp=2").unwrap();
        let parts = held(&[(0, [1, 2]), (2, [1, 2]), (3, [1, 2])]);
        let found = whole(&mesh, &shared("R,S(0)", None, &mesh), &parts, &|rank| rank == Rank(1));
        assert_eq!(found.unwrap().shape.as_slice(), [2, 2]);
        let found = whole(&mesh, &shared("R,S(0)", None, &mesh), &parts[..1], &|rank| rank == Rank(1));
        assert_eq!(found, Err(PartError::Absent { rank: Rank(1) }));
    }

    #[test]
    fn what_would_fit_is_found() {
        let mesh = DeviceMesh::parse("tp=3").unwrap();
        let near = |list: &str, parts: &[(u32, [u64; 2])]| {
            let found = nearest(&mesh, &shared(list, None, &mesh), &held(parts))?;
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
