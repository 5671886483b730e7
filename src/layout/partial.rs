//! Summands: what a mesh dim with `Partial` means for the ranks along it.
//!
//! Counts elements. Along a Partial dim every rank holds a *summand* (or a candidate for the maximum) of the same part
//! of the tensor, so what ranks hold there are no replicas. Summands are numbered row-major over the Partial dims of a
//! layout, and reduced in that order. The way back, from a value to summands, is defined for some ops only:
//!
//! ```text
//!     target dim      source                            a rank gets
//!     P(sum)          P(sum) on the same mesh           its own summand, as it is
//!     P(sum)          S(d) or _S(d,f), same mesh        what ranks at its coordinate held, and zeros around it
//!     P(sum)          anything else                     the value divided by the size of the mesh dim
//!     P(avg|max|min)  anything but another P            the value
//!     P(product|...)  anything but the same P           refused
//!     P(a)            P(b)                              refused
//! ```
//!
//! On the same mesh the source dim is that dim; elsewhere every Partial dim of the source stands against it.
//!
//! The rules are PyTorch's: `Partial` in `torch/distributed/tensor/placement_types.py` and `redistribute_local_tensor` in
//! `_redistribute.py`, which has the second line, but refuses to divide.

use std::collections::BTreeMap;

use super::shard::MAX_INTERVALS;
use super::shards::MeshPlacement;
use super::{
    AsTuple, Dims, Intervals, LayoutError, Placement, ReduceOp, TensorDim, Tile, local_part, numel, ravel, unravel,
};

/// How summands become the value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialReduction {
    /// Never `Avg`, which is a sum that is divided.
    pub op: ReduceOp,
    /// Sizes of the Partial mesh dims, outermost first.
    pub dims: Dims,
    /// Which of them average.
    averages: Vec<bool>,
}

impl PartialReduction {
    /// That of these placements; `None` where none of them is Partial.
    ///
    /// # Errors
    /// `MixedReduction` where the ops of two mesh dims do not commute: only sum and avg do.
    pub fn of(mesh_shape: &[u64], placements: &[Placement]) -> Result<Option<Self>, LayoutError> {
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

    /// How many summands there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        numel(&self.dims).expect("a mesh has fewer than 2^64 ranks")
    }

    /// A summand, for messages: by the coordinate on the Partial mesh dims, `summand (1, 0) of (2, 2)`.
    #[must_use]
    pub fn name(&self, number: u64) -> String {
        format!("summand {} of {}", AsTuple(&unravel(number, &self.dims)), AsTuple(&self.dims))
    }

    /// The whole value.
    #[must_use]
    pub fn whole(&self) -> Share {
        let averaged = self.dims.iter().zip(&self.averages).filter(|(_, average)| **average);
        Share { summands: (0..self.count()).collect(), divisor: averaged.map(|(size, _)| size).product(), within: None }
    }
}

/// The number of the summand that the rank at a coordinate holds; 0 where nothing is Partial.
#[must_use]
pub fn summand(mesh_shape: &[u64], placements: &[Placement], coordinate: &[u64]) -> u64 {
    let is_partial = |dim: &usize| placements[*dim].is_partial();
    let dims: Vec<usize> = (0..placements.len()).filter(is_partial).collect();
    let pick = |of: &[u64]| -> Dims { dims.iter().map(|&dim| of[dim]).collect() };
    ravel(&pick(coordinate), &pick(mesh_shape))
}

impl MeshPlacement<'_> {
    /// What the ranks hold together that have `coordinate` on the mesh dims that `stay`, all of which shard.
    fn held_along(&self, shape: &[u64], stay: &[bool], coordinate: &[u64]) -> Result<Tile, LayoutError> {
        let own = &self.shared.placements;
        let mut placements = own.clone();
        // Other mesh dims matter only where they cut before; else their parts are all there is.
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
        let mut held: Vec<BTreeMap<u64, u64>> = vec![BTreeMap::new(); shape.len()];
        for cell in 0..numel(&sizes).expect("a mesh has fewer than 2^64 ranks") {
            before.iter().zip(unravel(cell, &sizes)).for_each(|(dim, position)| at[*dim] = position);
            let tile = local_part(shape, self.mesh.shape(), &placements, &self.shared.splits, &at)?;
            if before.is_empty() {
                return Ok(tile);
            }
            for (dim, (held, own)) in held.iter_mut().zip(tile.dims()).enumerate() {
                let found = (held.len() as u64).saturating_add(own.count());
                if found > MAX_INTERVALS {
                    return Err(LayoutError::Fragmented { dim: TensorDim(dim), limit: MAX_INTERVALS, found });
                }
                held.extend(own.iter().map(|range| (range.start, range.end)));
            }
        }
        let ascending = |held: BTreeMap<u64, u64>| {
            let mut intervals = Intervals::empty();
            held.into_iter().for_each(|(start, end)| intervals.push(start..end));
            intervals
        };
        Ok(Tile::new(held.into_iter().map(ascending)))
    }
}

/// What of the source's summands a rank of the target gets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    /// The summands that are reduced for it, ascending.
    pub summands: Vec<u64>,
    /// What the result is divided by.
    pub divisor: u64,
    /// Where it is not zero, in the whole tensor; `None` for all of it.
    pub within: Option<Tile>,
}

impl Share {
    /// Tell everything it is in numbers, which no other share has.
    pub fn spell(&self, tell: &mut impl FnMut(u64)) {
        tell(self.summands.len() as u64);
        self.summands.iter().copied().for_each(&mut *tell);
        tell(self.divisor);
        tell(self.within.is_some().into());
        self.within.iter().for_each(|tile| tile.spell(tell));
    }

    /// The part that falls to the rank at `coordinate` of the target. `source` is `None` where nothing is known of how
    /// the value lay.
    ///
    /// # Errors
    /// `PartialToPartial`, `NoSummands`, `MixedReduction` for what has no definition, and as [`local_part`].
    pub fn of(
        shape: &[u64],
        source: Option<MeshPlacement<'_>>,
        target: MeshPlacement<'_>,
        coordinate: &[u64],
    ) -> Result<Self, LayoutError> {
        let (mesh, placements) = (target.mesh, &target.shared.placements);
        PartialReduction::of(mesh.shape(), placements)?;
        let reduction = match source {
            Some(source) => PartialReduction::of(source.mesh.shape(), &source.shared.placements)?,
            None => None,
        };
        // There a coordinate means the same rank as here.
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
            // On the same mesh each dim is a matter of its own; elsewhere none is the other's.
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
                    return Err(LayoutError::NoSummands { op: to });
                }
            }
        }
        let within = match source.filter(|_| stays.contains(&true)) {
            Some(source) => Some(source.held_along(shape, &stays, coordinate)?),
            None => None,
        };
        let Some(reduction) = reduction else { return Ok(Self { summands: vec![0], divisor, within }) };
        for ((at, &size), &average) in kept.iter().zip(&reduction.dims).zip(&reduction.averages) {
            if at.is_none() && average {
                divisor = divisor.saturating_mul(size);
            }
        }
        let is_kept = |number: &u64| {
            let at = unravel(*number, &reduction.dims);
            kept.iter().zip(&at).all(|(kept, at)| kept.is_none_or(|kept| kept == *at))
        };
        let summands = (0..reduction.count()).filter(is_kept).collect();
        Ok(Self { summands, divisor, within })
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::layout::shards::SharedTensor;
    use crate::layout::{DeviceMesh, PlacementSpec, Rank, parse_placements};

    fn resolve(list: &str) -> Vec<Placement> {
        parse_placements(list).unwrap().into_iter().map(|spec: PlacementSpec| spec.resolve(2).unwrap()).collect()
    }

    /// On which mesh the source lies.
    #[derive(PartialEq)]
    enum Lies {
        Here,
        Elsewhere,
    }

    /// The share of a rank on a mesh of 2x2, as `summands /divisor within`.
    fn share(source: &str, target: &str, lies: Lies, at: &[u64]) -> Result<String, String> {
        let mesh = |ranks: [u32; 4]| DeviceMesh::new([2, 2].as_slice(), ranks.map(Rank).to_vec(), None).unwrap();
        let (here, there) = (mesh([0, 1, 2, 3]), mesh([3, 2, 1, 0]));
        let (from, to): (SharedTensor, SharedTensor) = (resolve(source).into(), resolve(target).into());
        let source_mesh = if lies == Lies::Here { &here } else { &there };
        let source = MeshPlacement { mesh: source_mesh, shared: &from };
        let share = Share::of(&[4, 4], Some(source), MeshPlacement { mesh: &here, shared: &to }, at);
        let share = share.map_err(|error| error.to_string())?;
        let within = share.within.map_or(String::new(), |tile| format!(" {tile}"));
        Ok(format!("{:?} /{}{within}", share.summands, share.divisor))
    }

    #[test]
    fn summands_are_numbered_over_partial_dims() {
        let placements = resolve("P(sum),S(0),P(avg)");
        assert_eq!(summand(&[2, 3, 4], &placements, &[1, 2, 3]), 7);
        assert_eq!(summand(&[2, 3, 4], &resolve("R,S(0),R"), &[1, 2, 3]), 0);
        let reduction = PartialReduction::of(&[2, 3, 4], &placements).unwrap().unwrap();
        assert_eq!((reduction.op, reduction.count()), (ReduceOp::Sum, 8));
        assert_eq!(PartialReduction::of(&[2], &resolve("R")), Ok(None));
        assert!(PartialReduction::of(&[2, 2], &resolve("P(sum),P(max)")).is_err());
    }

    #[test]
    fn summands_are_reduced_kept_or_made() {
        assert_eq!(share("P(sum),R", "R,R", Lies::Here, &[1, 0]), Ok("[0, 1] /1".into()));
        assert_eq!(share("P(avg),P(sum)", "R,S(0)", Lies::Here, &[1, 0]), Ok("[0, 1, 2, 3] /2".into()));
        assert_eq!(share("P(sum),S(0)", "P(sum),S(1)", Lies::Here, &[1, 0]), Ok("[1] /1".into()));
        assert_eq!(share("P(avg),P(avg)", "P(avg),R", Lies::Here, &[1, 0]), Ok("[2, 3] /2".into()));
        assert_eq!(share("R,P(avg)", "R,P(avg)", Lies::Here, &[0, 1]), Ok("[1] /1".into()));
        assert_eq!(share("R,R", "P(sum),P(sum)", Lies::Here, &[0, 1]), Ok("[0] /4".into()));
        assert_eq!(share("R,R", "P(max),R", Lies::Here, &[0, 1]), Ok("[0] /1".into()));
        assert_eq!(share("S(0),R", "P(sum),R", Lies::Here, &[1, 1]), Ok("[0] /1 [2:4, 0:4]".into()));
        assert_eq!(share("S(0),R", "P(max),R", Lies::Here, &[1, 1]), Ok("[0] /1".into()));
        assert_eq!(share("R,P(max)", "P(sum),R", Lies::Here, &[1, 0]), Ok("[0, 1] /2".into()));
        assert_eq!(share("P(max),S(0)", "R,P(sum)", Lies::Here, &[0, 1]), Ok("[0, 1] /1 [2:4, 0:4]".into()));
        // Each element stays where it is along the mesh dim: rows 0, 2 of the first two, 1, 3 of the others.
        assert_eq!(share("S(0),S(0)", "R,P(sum)", Lies::Here, &[1, 0]), Ok("[0] /1 [0:1+2:3, 0:4]".into()));
        assert_eq!(share("S(0),S(0)", "P(sum),R", Lies::Here, &[1, 0]), Ok("[0] /1 [2:4, 0:4]".into()));
        assert_eq!(share("S(0),S(0)", "P(sum),P(sum)", Lies::Here, &[1, 0]), Ok("[0] /1 [2:3, 0:4]".into()));
        // Elsewhere a coordinate means another rank.
        assert_eq!(share("P(sum),R", "P(sum),R", Lies::Elsewhere, &[1, 1]), Ok("[0, 1] /2".into()));
        assert_eq!(share("S(0),R", "P(sum),R", Lies::Elsewhere, &[1, 1]), Ok("[0] /2".into()));
    }

    #[test]
    fn what_has_no_definition_is_refused() {
        assert!(share("P(sum),R", "P(max),R", Lies::Here, &[0, 0]).unwrap_err().contains("P(sum)"));
        assert!(share("R,P(max)", "P(sum),R", Lies::Elsewhere, &[0, 0]).is_err());
        assert!(share("R,R", "P(product),R", Lies::Here, &[0, 0]).unwrap_err().contains("P(product)"));
        assert!(share("R,R", "P(sum),P(max)", Lies::Here, &[0, 0]).is_err());
        assert!(share("P(sum),P(min)", "R,R", Lies::Here, &[0, 0]).is_err());
        assert_eq!(share("P(product),R", "P(product),R", Lies::Here, &[1, 0]), Ok("[1] /1".into()));
    }
}
