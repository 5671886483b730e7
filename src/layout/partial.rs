//! Partial values: the meaning of `Partial` on a mesh dim, and conversions from and to `Partial`.
//!
//! Regions count elements. Along a Partial mesh dim every rank holds a *partial value* (a term of a sum, or a candidate
//! for the maximum) for the same elements of the tensor, so these ranks do not hold replicas. Partial values are
//! numbered row-major over the Partial mesh dims of a layout, and are reduced in that order. The conversion of a value
//! to partial values is defined for some ops only:
//!
//! ```text
//!     target dim      source                            a rank gets
//!     P(a)            P(a) on the same mesh             its own partial value, unchanged
//!     P(sum)          S(d) or _S(d,f), same mesh        the elements that the source has at its coordinate, else zeros
//!     P(a)            P(b), a different op              an error
//!     P(sum)          anything else                     the value divided by the size of the mesh dim
//!     P(avg|max|min)  anything else                     the value
//!     P(product|...)  anything else                     an error
//! ```
//!
//! If source and target have the same mesh, "source" is the placement on the same mesh dim. Otherwise "source" is any
//! Partial mesh dim of the source.
//!
//! The rules are PyTorch's: `Partial` in `torch/distributed/tensor/placement_types.py`, and `redistribute_local_tensor`
//! in `_redistribute.py`, which has the second row of the table but refuses to divide.

use std::collections::BTreeMap;

use super::distinct_tiles::MeshPlacement;
use super::shard::MAX_INTERVALS;
use super::{
    AsTuple, Dims, Intervals, LayoutError, Placement, ReduceOp, TensorDim, Tile, local_part, numel, ravel, unravel,
};

/// The reduction of the partial values of a tensor to its complete value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialReduction {
    /// The reduction op. The op is never `Avg`: an average is stored as `Sum`, and `averages` is true for the mesh dim.
    pub op: ReduceOp,
    /// The sizes of the Partial mesh dims, outermost first.
    pub dims: Dims,
    /// For each Partial mesh dim, true if its op is `Avg`.
    averages: Vec<bool>,
}

impl PartialReduction {
    /// Returns the reduction of these placements, or `None` if none of them is Partial.
    ///
    /// # Errors
    /// `MixedReduction` if two mesh dims have different ops. Only sum and avg may occur together, because they commute.
    pub fn new(mesh_shape: &[u64], placements: &[Placement]) -> Result<Option<Self>, LayoutError> {
        let mut found: Option<Self> = None;
        for (&size, &placement) in mesh_shape.iter().zip(placements) {
            let Placement::Partial(stated) = placement else { continue };
            let op = if stated == ReduceOp::Avg { ReduceOp::Sum } else { stated };
            let known = found.get_or_insert_with(|| Self { op, dims: Dims::new(), averages: Vec::new() });
            if known.op != op {
                return Err(LayoutError::MixedReduction { first: known.op, second: stated });
            }
            known.dims.push(size);
            known.averages.push(stated == ReduceOp::Avg);
        }
        Ok(found)
    }

    /// Returns the number of partial values.
    pub fn count(&self) -> u64 {
        numel(&self.dims).expect("a mesh has fewer than 2^64 ranks")
    }

    /// Returns the name of a partial value for messages, with its coordinate on the Partial mesh dims:
    /// `partial value (1, 0) of (2, 2)`.
    pub fn describe_partial_value(&self, number: u64) -> String {
        format!("partial value {} of {}", AsTuple(&unravel(number, &self.dims)), AsTuple(&self.dims))
    }

    /// Returns the conversion for a rank that gets the complete value: the rank reduces all partial values, and divides
    /// the result by the size of each mesh dim whose op is `Avg`.
    pub fn full_reduction(&self) -> Share {
        let averaged = self.dims.iter().zip(&self.averages).filter(|(_, average)| **average);
        Share {
            partial_values: (0..self.count()).collect(),
            divisor: averaged.map(|(size, _)| size).product(),
            within: None,
        }
    }
}

/// Returns the row-major index, over the Partial mesh dims, of the partial value that the rank at a coordinate holds. The
/// index is 0 if no placement is Partial.
pub fn partial_index(mesh_shape: &[u64], placements: &[Placement], coordinate: &[u64]) -> u64 {
    let is_partial = |dim: &usize| placements[*dim].is_partial();
    let dims: Vec<usize> = (0..placements.len()).filter(is_partial).collect();
    let pick = |of: &[u64]| -> Dims { dims.iter().map(|&dim| of[dim]).collect() };
    ravel(&pick(coordinate), &pick(mesh_shape))
}

impl MeshPlacement<'_> {
    /// Returns the union of the elements that a group of ranks holds. A rank belongs to the group if, on all mesh dims
    /// that are marked in `stay`, its coordinates equal `coordinate`. Each marked mesh dim must shard the tensor.
    fn tile_held_by_group(&self, shape: &[u64], stay: &[bool], coordinate: &[u64]) -> Result<Tile, LayoutError> {
        let own = &self.shared.placements;
        let mut placements = own.clone();
        // A mesh dim that is not marked in `stay` matters only if it splits a tensor dim before a marked mesh dim
        // splits the same tensor dim. Otherwise the union of its parts is the complete tensor dim.
        let cuts_before = |dim: &usize| {
            let sharded = own[*dim].sharded_dim();
            let later = (dim + 1..stay.len()).filter(|later| stay[*later]);
            sharded.is_some() && later.into_iter().any(|later| own[later].sharded_dim() == sharded)
        };
        let (before, others): (Vec<usize>, Vec<usize>) =
            (0..stay.len()).filter(|dim| !stay[*dim]).partition(cuts_before);
        others.iter().for_each(|dim| placements[*dim] = Placement::Replicate);
        let sizes: Dims = before.iter().map(|dim| self.mesh.shape()[*dim]).collect();
        let mut at: Dims = coordinate.into();
        let mut union: Vec<BTreeMap<u64, u64>> = vec![BTreeMap::new(); shape.len()];
        for cell in 0..numel(&sizes).expect("a mesh has fewer than 2^64 ranks") {
            before.iter().zip(unravel(cell, &sizes)).for_each(|(dim, position)| at[*dim] = position);
            let tile = local_part(shape, self.mesh.shape(), &placements, &self.shared.splits, &at)?;
            if before.is_empty() {
                return Ok(tile);
            }
            for (dim, (union, own)) in union.iter_mut().zip(tile.dims()).enumerate() {
                let found = (union.len() as u64).saturating_add(own.count());
                if found > MAX_INTERVALS {
                    return Err(LayoutError::Fragmented { dim: TensorDim(dim), limit: MAX_INTERVALS, found });
                }
                union.extend(own.iter().map(|range| (range.start, range.end)));
            }
        }
        let ascending = |union: BTreeMap<u64, u64>| {
            let mut intervals = Intervals::empty();
            union.into_iter().for_each(|(start, end)| intervals.push(start..end));
            intervals
        };
        Ok(Tile::new(union.into_iter().map(ascending)))
    }
}

/// The conversion of partial values of the source to the values of one rank of the target: which partial values are
/// reduced, and how the result is scaled and masked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    /// The row-major indices of the partial values to reduce, ascending.
    pub partial_values: Vec<u64>,
    /// The number by which the reduced value is divided.
    pub divisor: u64,
    /// The elements of the global tensor that keep the reduced value; all other elements become zero. If `None`, all
    /// elements keep the value.
    pub within: Option<Tile>,
}

impl Share {
    /// Passes numbers that encode the share to `emit`, one by one, for a hash. Unequal shares have unequal encodings.
    pub fn encode(&self, emit: &mut impl FnMut(u64)) {
        emit(self.partial_values.len() as u64);
        self.partial_values.iter().copied().for_each(&mut *emit);
        emit(self.divisor);
        emit(self.within.is_some().into());
        self.within.iter().for_each(|tile| tile.encode(emit));
    }

    /// Returns the conversion for the rank at `coordinate` of the target mesh. `source` has the placements of the tensor
    /// in the source. If these placements are not known, `source` is `None`, and the source counts as a complete value.
    ///
    /// # Errors
    /// `PartialToPartial`, `NoPartialValues` or `MixedReduction` for undefined conversions, and the errors of
    /// [`local_part`].
    pub fn new(
        shape: &[u64],
        source: Option<MeshPlacement<'_>>,
        target: MeshPlacement<'_>,
        coordinate: &[u64],
    ) -> Result<Self, LayoutError> {
        let (mesh, placements) = (target.mesh, &target.shared.placements);
        PartialReduction::new(mesh.shape(), placements)?;
        let reduction = match source {
            Some(source) => PartialReduction::new(source.mesh.shape(), &source.shared.placements)?,
            None => None,
        };
        // On equal meshes, a coordinate belongs to the same rank in source and target.
        let same = source.filter(|source| source.mesh == mesh).map(|source| source.shared);
        let mut kept: Vec<Option<u64>> = vec![None; reduction.as_ref().map_or(0, |reduction| reduction.dims.len())];
        let mut divisor: u64 = 1;
        let mut stays = vec![false; placements.len()];
        for (dim, &placement) in placements.iter().enumerate() {
            let Placement::Partial(to) = placement else { continue };
            let from = same.map(|same| same.placements[dim]);
            match from {
                Some(Placement::Partial(from)) if from == to => {
                    let before = same.expect("it has this dim").placements[..dim].iter();
                    kept[before.filter(|other| other.is_partial()).count()] = Some(coordinate[dim]);
                    continue;
                }
                Some(Placement::Shard(_) | Placement::StridedShard { .. }) if to == ReduceOp::Sum => {
                    stays[dim] = true;
                    continue;
                }
                _ => {}
            }
            // On equal meshes, each mesh dim of the target is compared with the same mesh dim of the source. Otherwise
            // it is compared with all mesh dims of the source.
            let facing =
                from.as_ref().map_or(source.map_or(&[][..], |source| &source.shared.placements), std::slice::from_ref);
            let other = facing.iter().find_map(|placement| match placement {
                Placement::Partial(from) if *from != to => Some(*from),
                _ => None,
            });
            if let Some(from) = other {
                return Err(LayoutError::PartialToPartial { from, to });
            }
            match to {
                ReduceOp::Sum => divisor = divisor.saturating_mul(mesh.shape()[dim]),
                ReduceOp::Avg | ReduceOp::Max | ReduceOp::Min => {}
                ReduceOp::Product | ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => {
                    return Err(LayoutError::NoPartialValues { op: to });
                }
            }
        }
        let within = match source.filter(|_| stays.contains(&true)) {
            Some(source) => Some(source.tile_held_by_group(shape, &stays, coordinate)?),
            None => None,
        };
        let Some(reduction) = reduction else { return Ok(Self { partial_values: vec![0], divisor, within }) };
        for ((at, &size), &average) in kept.iter().zip(&reduction.dims).zip(&reduction.averages) {
            if at.is_none() && average {
                divisor = divisor.saturating_mul(size);
            }
        }
        let is_kept = |number: &u64| {
            let at = unravel(*number, &reduction.dims);
            kept.iter().zip(&at).all(|(kept, at)| kept.is_none_or(|kept| kept == *at))
        };
        let partial_values = (0..reduction.count()).filter(is_kept).collect();
        Ok(Self { partial_values, divisor, within })
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::layout::distinct_tiles::SharedTensor;
    use crate::layout::{DeviceMesh, PlacementSpec, Rank, parse_placements};

    fn resolve(list: &str) -> Vec<Placement> {
        parse_placements(list).unwrap().into_iter().map(|spec: PlacementSpec| spec.resolve(2).unwrap()).collect()
    }

    /// The mesh of the source in a test: the mesh of the target, or another mesh.
    #[derive(PartialEq)]
    enum SourceMesh {
        Same,
        Other,
    }

    /// Displays the share of the rank at `at` on a 2x2 mesh as `partial values /divisor within`.
    fn share(source: &str, target: &str, mesh_of_source: SourceMesh, at: &[u64]) -> Result<String, String> {
        let mesh = |ranks: [u32; 4]| DeviceMesh::new([2, 2].as_slice(), ranks.map(Rank).to_vec(), None).unwrap();
        let (here, there) = (mesh([0, 1, 2, 3]), mesh([3, 2, 1, 0]));
        let (from, to): (SharedTensor, SharedTensor) = (resolve(source).into(), resolve(target).into());
        let source_mesh = if mesh_of_source == SourceMesh::Same { &here } else { &there };
        let source = MeshPlacement { mesh: source_mesh, shared: &from };
        let share = Share::new(&[4, 4], Some(source), MeshPlacement { mesh: &here, shared: &to }, at);
        let share = share.map_err(|error| error.to_string())?;
        let within = share.within.map_or(String::new(), |tile| format!(" {tile}"));
        Ok(format!("{:?} /{}{within}", share.partial_values, share.divisor))
    }

    #[test]
    fn partial_values_are_numbered_over_partial_dims() {
        let placements = resolve("P(sum),S(0),P(avg)");
        assert_eq!(partial_index(&[2, 3, 4], &placements, &[1, 2, 3]), 7);
        assert_eq!(partial_index(&[2, 3, 4], &resolve("R,S(0),R"), &[1, 2, 3]), 0);
        let reduction = PartialReduction::new(&[2, 3, 4], &placements).unwrap().unwrap();
        assert_eq!((reduction.op, reduction.count()), (ReduceOp::Sum, 8));
        assert_eq!(PartialReduction::new(&[2], &resolve("R")), Ok(None));
        assert!(PartialReduction::new(&[2, 2], &resolve("P(sum),P(max)")).is_err());
    }

    #[test]
    fn share_reduces_keeps_or_creates_partial_values() {
        assert_eq!(share("P(sum),R", "R,R", SourceMesh::Same, &[1, 0]), Ok("[0, 1] /1".into()));
        assert_eq!(share("P(avg),P(sum)", "R,S(0)", SourceMesh::Same, &[1, 0]), Ok("[0, 1, 2, 3] /2".into()));
        assert_eq!(share("P(sum),S(0)", "P(sum),S(1)", SourceMesh::Same, &[1, 0]), Ok("[1] /1".into()));
        assert_eq!(share("P(avg),P(avg)", "P(avg),R", SourceMesh::Same, &[1, 0]), Ok("[2, 3] /2".into()));
        assert_eq!(share("R,P(avg)", "R,P(avg)", SourceMesh::Same, &[0, 1]), Ok("[1] /1".into()));
        assert_eq!(share("R,R", "P(sum),P(sum)", SourceMesh::Same, &[0, 1]), Ok("[0] /4".into()));
        assert_eq!(share("R,R", "P(max),R", SourceMesh::Same, &[0, 1]), Ok("[0] /1".into()));
        assert_eq!(share("S(0),R", "P(sum),R", SourceMesh::Same, &[1, 1]), Ok("[0] /1 [2:4, 0:4]".into()));
        assert_eq!(share("S(0),R", "P(max),R", SourceMesh::Same, &[1, 1]), Ok("[0] /1".into()));
        assert_eq!(share("R,P(max)", "P(sum),R", SourceMesh::Same, &[1, 0]), Ok("[0, 1] /2".into()));
        assert_eq!(share("P(max),S(0)", "R,P(sum)", SourceMesh::Same, &[0, 1]), Ok("[0, 1] /1 [2:4, 0:4]".into()));
        // Each element keeps its coordinate along the mesh dim: rows 0 and 2 have the first, rows 1 and 3 the second.
        assert_eq!(share("S(0),S(0)", "R,P(sum)", SourceMesh::Same, &[1, 0]), Ok("[0] /1 [0:1+2:3, 0:4]".into()));
        assert_eq!(share("S(0),S(0)", "P(sum),R", SourceMesh::Same, &[1, 0]), Ok("[0] /1 [2:4, 0:4]".into()));
        assert_eq!(share("S(0),S(0)", "P(sum),P(sum)", SourceMesh::Same, &[1, 0]), Ok("[0] /1 [2:3, 0:4]".into()));
        // On another mesh, a coordinate belongs to another rank.
        assert_eq!(share("P(sum),R", "P(sum),R", SourceMesh::Other, &[1, 1]), Ok("[0, 1] /2".into()));
        assert_eq!(share("S(0),R", "P(sum),R", SourceMesh::Other, &[1, 1]), Ok("[0] /2".into()));
    }

    #[test]
    fn undefined_conversion_is_an_error() {
        assert!(share("P(sum),R", "P(max),R", SourceMesh::Same, &[0, 0]).unwrap_err().contains("P(sum)"));
        assert!(share("R,P(max)", "P(sum),R", SourceMesh::Other, &[0, 0]).is_err());
        assert!(share("R,R", "P(product),R", SourceMesh::Same, &[0, 0]).unwrap_err().contains("P(product)"));
        assert!(share("R,R", "P(sum),P(max)", SourceMesh::Same, &[0, 0]).is_err());
        assert!(share("P(sum),P(min)", "R,R", SourceMesh::Same, &[0, 0]).is_err());
        assert_eq!(share("P(product),R", "P(product),R", SourceMesh::Same, &[1, 0]), Ok("[1] /1".into()));
    }
}
