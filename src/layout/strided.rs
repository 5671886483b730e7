//! Split factors of `_StridedShard` that depend on the sizes of other mesh dims.
//!
//! A split factor is a number of parts. FSDP over tensor parallelism on dp=2,tp=4 gives the placements `_S(0,4),S(0)`:
//! tp splits first, into 4 parts, so the split factor of dp is the size of tp. If another mesh has another size of tp,
//! the split factor changes to this size. A split factor that depends on no mesh dim, such as `_S(0,3)` of a fused
//! weight of three, stays the same.
//!
//! Source: `_StridedShard` in `torch/distributed/tensor/placement_types.py`, and
//! `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`.

use std::collections::BTreeSet;

use super::{DeviceMesh, PlacementSpec};

/// A change from an old mesh to a new mesh, and the pairs of mesh dims of the two meshes that correspond.
pub struct MeshChange<'a> {
    pub from: &'a DeviceMesh,
    pub to: &'a DeviceMesh,
    /// For each dim of the old mesh, the corresponding dim of the new mesh, or `None` if there is none.
    pub dims: &'a [Option<usize>],
}

impl MeshChange<'_> {
    /// Returns the split factor on the new mesh of a mesh dim that has the split factor `factor` on the old mesh. `at` is
    /// the index of the mesh dim on the old mesh. `sharded` has the tensor dim that each mesh dim of the old mesh shards.
    ///
    /// Consider the old mesh dims to the right of `at` that shard the same tensor dim. If `factor` is not the product of
    /// the sizes of these mesh dims, `factor` stays. Otherwise the new split factor is the product of the sizes that
    /// these mesh dims have on the new mesh, without mesh dims that the new mesh lacks or has to the left of `at`.
    /// Returns `None` if this product is 1, because a plain `Shard` is then enough.
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

/// Returns the mesh dims to the right of `at` that shard the same tensor dim as mesh dim `at`.
fn inner<D: PartialEq>(at: usize, sharded: &[Option<D>]) -> impl Iterator<Item = usize> {
    (at + 1..sharded.len()).filter(move |&later| sharded[at].is_some() && sharded[later] == sharded[at])
}

fn sharded(list: &[PlacementSpec]) -> Vec<Option<i64>> {
    list.iter().map(|spec| spec.sharded_dim()).collect()
}

/// Adapts the split factors in placements for the mesh `from` to the sizes of the mesh `to`. If the meshes have
/// different numbers of dims, the placements are returned unchanged.
pub fn adapt_split_factors(list: &[PlacementSpec], from: &DeviceMesh, to: &DeviceMesh) -> Vec<PlacementSpec> {
    if from.shape() == to.shape() || from.ndim() != to.ndim() || from.ndim() != list.len() {
        return list.to_vec();
    }
    let dims: Vec<Option<usize>> = (0..to.ndim()).map(Some).collect();
    let (mesh_change, sharded) = (MeshChange { from, to, dims: &dims }, sharded(list));
    let follow = |(at, spec): (usize, &PlacementSpec)| match *spec {
        PlacementSpec::StridedShard { dim, split_factor } => match mesh_change.split_factor(split_factor, at, &sharded)
        {
            Some(split_factor) => PlacementSpec::StridedShard { dim, split_factor },
            None => PlacementSpec::Shard(dim),
        },
        other => other,
    };
    list.iter().enumerate().map(follow).collect()
}

/// A split factor that cannot be explained by the mesh: it is not the product of the sizes of some of the mesh dims in
/// `inner`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnknownSplitFactor {
    /// The index of the mesh dim that has the split factor.
    pub at: usize,
    pub spec: PlacementSpec,
    /// The indices of the mesh dims to the right of `at` that shard the same tensor dim.
    pub inner: Vec<usize>,
    /// The placement in `spec`, but with the product of the sizes of all mesh dims in `inner` as the split factor.
    pub expected: PlacementSpec,
}

/// Returns the first split factor in a list of placements that the mesh cannot explain, or `None`. A split factor is
/// explained if it is the product of the sizes of some mesh dims that are to the right of its mesh dim and shard the same
/// tensor dim. If there are no such mesh dims, every split factor is accepted.
pub fn find_unknown_split_factor(list: &[PlacementSpec], mesh: &DeviceMesh) -> Option<UnknownSplitFactor> {
    let sharded = sharded(list);
    let of = |(at, spec): (usize, &PlacementSpec)| {
        let PlacementSpec::StridedShard { dim, split_factor } = *spec else { return None };
        let inner: Vec<usize> = inner(at, &sharded).collect();
        let sizes = || inner.iter().map(|&dim| mesh.shape()[dim]);
        // Any subset of the inner mesh dims may split first.
        let products = sizes().fold(BTreeSet::from([1]), |products: BTreeSet<u64>, size| {
            products.iter().flat_map(|product| [*product, product * size]).collect()
        });
        let usual = PlacementSpec::StridedShard { dim, split_factor: sizes().product() };
        let is_stray = !inner.is_empty() && !products.contains(&split_factor);
        is_stray.then_some(UnknownSplitFactor { at, spec: *spec, inner, expected: usual })
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
    fn split_factors_change_with_mesh_sizes() {
        let of = |list: &str, from: &str, to: &str| {
            comma_list(&adapt_split_factors(&parse_placements(list).unwrap(), &mesh(from), &mesh(to)))
        };
        assert_eq!(of("_S(0,2),S(0)", "dp=2,tp=2", "dp=2,tp=4"), "_S(0,4),S(0)");
        assert_eq!(of("_S(-1,2),S(-1)", "dp=2,tp=2", "dp=4,tp=1"), "S(-1),S(-1)");
        assert_eq!(of("R,_S(0,6),S(0),S(0)", "r=2,dp=2,cp=3,tp=2", "r=1,dp=2,cp=3,tp=4"), "R,_S(0,12),S(0),S(0)");
        // Split factors that are not the product of mesh dims stay the same, such as those of fused weights.
        assert_eq!(of("S(1),_S(0,3)", "dp=2,tp=2", "dp=2,tp=4"), "S(1),_S(0,3)");
        assert_eq!(of("_S(0,3),S(0)", "dp=2,tp=2", "dp=2,tp=4"), "_S(0,3),S(0)");
        assert_eq!(of("_S(0,1),R", "dp=2,tp=2", "dp=2,tp=2"), "_S(0,1),R");
        assert_eq!(of("_S(0,2)", "dp=2,tp=2", "dp=2,tp=4"), "_S(0,2)", "too few placements are an error elsewhere");
    }

    #[test]
    fn split_factors_of_no_mesh_dim_are_found() {
        let of = |list: &str, on: &str| {
            find_unknown_split_factor(&parse_placements(list).unwrap(), &mesh(on))
                .map(|unknown| (unknown.at, unknown.expected.to_string()))
        };
        assert_eq!(of("_S(0,2),S(0)", "dp=2,tp=4"), Some((0, "_S(0,4)".to_owned())));
        assert_eq!(of("R,_S(0,2),S(0),S(0)", "r=2,dp=2,cp=3,tp=4"), Some((1, "_S(0,12)".to_owned())));
        for fine in ["_S(0,4),S(0)", "_S(0,3),R", "_S(0,3),S(1)", "R,_S(0,3)", "S(0),S(0)"] {
            assert_eq!(of(fine, "dp=2,tp=4"), None, "{fine}");
        }
        assert_eq!(of("_S(0,2),_S(0,2),S(0)", "a=4,b=3,c=2"), None, "c, then a, then b");
    }
}
