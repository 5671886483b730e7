//! Split factors that stand for other mesh dims.
//!
//! Counts parts. Where FSDP cuts what tensor parallelism left, `_S(0,4),S(0)` on dp=2,tp=4 says that tp has cut first: the
//! factor of dp is the size of tp, and follows it to another mesh. A factor that stands for no mesh dim (`_S(0,3)` of
//! three weights in one) is what it is.
//!
//! Source: `_StridedShard` in `torch/distributed/tensor/placement_types.py`, and
//! `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`.

use std::collections::BTreeSet;

use super::{DeviceMesh, PlacementSpec};

/// From one mesh to another.
pub struct MeshChange<'a> {
    pub from: &'a DeviceMesh,
    pub to: &'a DeviceMesh,
    /// Which dim of the new mesh each dim of the old one is.
    pub dims: &'a [Option<usize>],
}

impl MeshChange<'_> {
    /// The split factor that mesh dim `at` has afterwards; `None` where a plain shard means the same. `sharded` has the
    /// tensor dim of each mesh dim.
    ///
    /// A factor that stands for the mesh dims further right follows their new sizes; where they come to stand further
    /// left, a plain shard already means that they split first.
    #[must_use]
    pub fn split_factor<D: PartialEq>(&self, factor: u64, at: usize, sharded: &[Option<D>]) -> Option<u64> {
        let before: u64 = inner(at, sharded).map(|dim| self.from.shape()[dim]).product();
        if before != factor {
            return Some(factor);
        }
        let still_inner = inner(at, sharded).filter_map(|dim| self.dims[dim]).filter(|&dim| Some(dim) > self.dims[at]);
        let after: u64 = still_inner.map(|dim| self.to.shape()[dim]).product();
        (after > 1).then_some(after)
    }
}

/// The mesh dims further right that shard the same tensor dim.
fn inner<D: PartialEq>(at: usize, sharded: &[Option<D>]) -> impl Iterator<Item = usize> {
    (at + 1..sharded.len()).filter(move |&later| sharded[at].is_some() && sharded[later] == sharded[at])
}

fn sharded(list: &[PlacementSpec]) -> Vec<Option<i64>> {
    list.iter().map(|spec| spec.sharded_dim()).collect()
}

/// Placements that were written for a mesh, on one with the same dims in other sizes.
#[must_use]
pub fn follow(list: &[PlacementSpec], from: &DeviceMesh, to: &DeviceMesh) -> Vec<PlacementSpec> {
    if from.shape() == to.shape() || from.ndim() != to.ndim() || from.ndim() != list.len() {
        return list.to_vec();
    }
    let dims: Vec<Option<usize>> = (0..to.ndim()).map(Some).collect();
    let (route, sharded) = (MeshChange { from, to, dims: &dims }, sharded(list));
    let follow = |(at, spec): (usize, &PlacementSpec)| match *spec {
        PlacementSpec::StridedShard { dim, split_factor } => match route.split_factor(split_factor, at, &sharded) {
            Some(split_factor) => PlacementSpec::StridedShard { dim, split_factor },
            None => PlacementSpec::Shard(dim),
        },
        other => other,
    };
    list.iter().enumerate().map(follow).collect()
}

/// A split factor that stands for none of the mesh dims further right that shard the same tensor dim.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnknownSplitFactor {
    /// The mesh dim that has it.
    pub at: usize,
    pub spec: PlacementSpec,
    /// Those further right, and what `spec` would be for them.
    pub inner: Vec<usize>,
    pub usual: PlacementSpec,
}

/// The first in a list.
#[must_use]
pub fn stray(list: &[PlacementSpec], mesh: &DeviceMesh) -> Option<UnknownSplitFactor> {
    let sharded = sharded(list);
    let of = |(at, spec): (usize, &PlacementSpec)| {
        let PlacementSpec::StridedShard { dim, split_factor } = *spec else { return None };
        let inner: Vec<usize> = inner(at, &sharded).collect();
        let sizes = || inner.iter().map(|&dim| mesh.shape()[dim]);
        // Any of them may have split before this one.
        let products = sizes().fold(BTreeSet::from([1]), |products: BTreeSet<u64>, size| {
            products.iter().flat_map(|product| [*product, product * size]).collect()
        });
        let usual = PlacementSpec::StridedShard { dim, split_factor: sizes().product() };
        let is_stray = !inner.is_empty() && !products.contains(&split_factor);
        is_stray.then_some(UnknownSplitFactor { at, spec: *spec, inner, usual })
    };
    list.iter().take(mesh.ndim()).enumerate().find_map(of)
}

#[cfg(test)]
mod tests {
    use super::super::{comma_list, parse_placements};
    use super::*;

    fn mesh(text: &str) -> DeviceMesh {
        DeviceMesh::parse(text).unwrap()
    }

    #[test]
    fn factors_of_mesh_dims_follow_their_sizes() {
        let of = |list: &str, from: &str, to: &str| {
            comma_list(&follow(&parse_placements(list).unwrap(), &mesh(from), &mesh(to)))
        };
        assert_eq!(of("_S(0,2),S(0)", "dp=2,tp=2", "dp=2,tp=4"), "_S(0,4),S(0)");
        assert_eq!(of("_S(-1,2),S(-1)", "dp=2,tp=2", "dp=4,tp=1"), "S(-1),S(-1)");
        assert_eq!(of("R,_S(0,6),S(0),S(0)", "r=2,dp=2,cp=3,tp=2", "r=1,dp=2,cp=3,tp=4"), "R,_S(0,12),S(0),S(0)");
        // Weights in one, and what lies otherwise.
        assert_eq!(of("S(1),_S(0,3)", "dp=2,tp=2", "dp=2,tp=4"), "S(1),_S(0,3)");
        assert_eq!(of("_S(0,3),S(0)", "dp=2,tp=2", "dp=2,tp=4"), "_S(0,3),S(0)");
        assert_eq!(of("_S(0,1),R", "dp=2,tp=2", "dp=2,tp=2"), "_S(0,1),R");
        assert_eq!(of("_S(0,2)", "dp=2,tp=2", "dp=2,tp=4"), "_S(0,2)", "one too few is told elsewhere");
    }

    #[test]
    fn factors_that_stand_for_no_mesh_dim_are_found() {
        let of = |list: &str, on: &str| {
            stray(&parse_placements(list).unwrap(), &mesh(on)).map(|stray| (stray.at, stray.usual.to_string()))
        };
        assert_eq!(of("_S(0,2),S(0)", "dp=2,tp=4"), Some((0, "_S(0,4)".to_owned())));
        assert_eq!(of("R,_S(0,2),S(0),S(0)", "r=2,dp=2,cp=3,tp=4"), Some((1, "_S(0,12)".to_owned())));
        for fine in ["_S(0,4),S(0)", "_S(0,3),R", "_S(0,3),S(1)", "R,_S(0,3)", "S(0),S(0)"] {
            assert_eq!(of(fine, "dp=2,tp=4"), None, "{fine}");
        }
        assert_eq!(of("_S(0,2),_S(0,2),S(0)", "a=4,b=3,c=2"), None, "c, then a, then b");
    }
}
