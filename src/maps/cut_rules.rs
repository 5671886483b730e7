//! Chooses the placements of tensors that several ranks cut, as a side declares them.
//!
//! If a side declares several placements for a tensor, the right one gives the whole tensor the sizes of the axes in the brackets.
//! Unit of shapes: elements.

use super::cell::Dim;
use super::cut::Cut;
use super::error::MapError;
use super::file::WeightMap;
use super::sizes::{DimFault, KnownSize, SizeOrigin, Sizes};
use crate::layout::{Pattern, PlacementSpec};

/// A tensor of which each rank has a part.
#[derive(Clone, Debug)]
pub struct CutTensor {
    /// The name of the tensor within its model.
    pub name: String,
    /// The shapes of the parts, in the order of the ranks.
    pub parts: Vec<Vec<u64>>,
}

/// The placement of all tensors whose names match a pattern.
#[derive(Clone, Debug)]
pub struct CutRule {
    pub pattern: Pattern,
    pub placement: PlacementSpec,
    /// True if the side declares several placements, and the shapes gave this one.
    pub is_chosen: bool,
}

/// Returns the shape of a tensor whose parts a placement cuts; `None` if the parts do not have the dim, or their sum is too large.
fn whole_shape(placement: PlacementSpec, parts: &[Vec<u64>]) -> Option<Vec<u64>> {
    let mut shape = parts.first()?.clone();
    let Some(dim) = placement.sharded_dim() else { return Some(shape) };
    let dim = usize::try_from(if dim < 0 { dim.checked_add(i64::try_from(shape.len()).ok()?)? } else { dim }).ok()?;
    let sum = parts.iter().try_fold(0_u64, |sum, part| sum.checked_add(*part.get(dim)?))?;
    *shape.get_mut(dim)? = sum;
    Some(shape)
}

impl WeightMap {
    /// Returns the placements of the tensors of a model on the ranks that saved them, as a side declares them. `sizes` are the sizes
    /// that are known without the tensors.
    ///
    /// # Errors
    /// [`MapError`] if no declared placement gives the tensors the sizes of the model, or if several do.
    pub fn cut_rules(&self, side: usize, tensors: &[CutTensor], sizes: &Sizes) -> Result<Vec<CutRule>, MapError> {
        let side = &self.sides[side];
        let mut own: Vec<Vec<&CutTensor>> = vec![Vec::new(); side.cut.len()];
        for tensor in tensors {
            let first = side.cut.iter().position(|cut| cut.tensor.name.matches(&tensor.name, sizes).is_some());
            if let Some(first) = first {
                own[first].push(tensor);
            }
        }
        let mut sizes = sizes.clone();
        let mut placements: Vec<Option<PlacementSpec>> = vec![None; side.cut.len()];
        // Tensors with one placement may give sizes that tell the placement of the others.
        for is_choice in [false, true] {
            let indices = (0..side.cut.len()).filter(|index| (side.cut[*index].placements.len() > 1) == is_choice);
            for index in indices.filter(|index| !own[*index].is_empty()) {
                let cut = &side.cut[index];
                let after = |placement: &PlacementSpec| {
                    let all = own[index].iter().try_fold(sizes.clone(), |mut sizes, tensor| {
                        let with_tensor = cut.sizes_with(*placement, tensor, &sizes)?;
                        // An axis that is not under `[sizes]` belongs to its tensor.
                        for rule in &self.sizes {
                            if let Some(known) = with_tensor.known(&rule.axis) {
                                sizes.insert(&rule.axis, known.clone()).ok()?;
                            }
                        }
                        Some(sizes)
                    });
                    Some((*placement, all?))
                };
                let mut fitting: Vec<(PlacementSpec, Sizes)> = cut.placements.iter().filter_map(after).collect();
                let fits = |tensor: &CutTensor| {
                    cut.placements.iter().any(|placement| cut.sizes_with(*placement, tensor, &sizes).is_some())
                };
                let first = own[index].iter().find(|tensor| !fits(tensor)).unwrap_or(&own[index][0]);
                let (name, tried) = (first.name.clone(), cut.tried(first));
                let is_whole = own[index].iter().all(|tensor| tensor.parts.len() == 1);
                match fitting.len() {
                    // A tensor in one part is the same by all placements.
                    number if number == 1 || number > 1 && is_whole => {
                        let (placement, known) = fitting.remove(0);
                        placements[index] = Some(placement);
                        sizes = known;
                    }
                    0 => {
                        let known = self.sizes.iter().filter_map(|rule| {
                            let known = sizes.known(&rule.axis)?;
                            cut.tensor
                                .all_dim_axes()
                                .contains(&&rule.axis)
                                .then(|| format!("{} is {} by {}", rule.axis, known.value, known.origin))
                        });
                        return Err(MapError::CutMisfit { name, tried, known: known.collect() });
                    }
                    _ => {
                        let axis = cut.tensor.all_dim_axes().first().map_or_else(|| "".into(), |axis| (*axis).clone());
                        return Err(MapError::UnknownCut { name, tried, axis });
                    }
                }
            }
        }
        let rule = |(cut, placement): (&Cut, Option<PlacementSpec>)| {
            let (pattern, is_chosen) = (cut.pattern.clone(), cut.placements.len() > 1);
            Some(CutRule { pattern, placement: placement?, is_chosen })
        };
        Ok(side.cut.iter().zip(placements).filter_map(rule).collect())
    }
}

impl Cut {
    /// Returns the sizes of the axes in the brackets, with `sizes`, if a placement cuts the tensor. Returns `None` if the shape of the
    /// whole tensor contradicts `sizes`.
    fn sizes_with(&self, placement: PlacementSpec, tensor: &CutTensor, sizes: &Sizes) -> Option<Sizes> {
        let (shape, mut sizes) = (whole_shape(placement, &tensor.parts)?, sizes.clone());
        if self.tensor.has_rest() {
            return Some(sizes);
        }
        let dims = (self.tensor.dims.len() == shape.len()).then_some(&self.tensor.dims)?;
        for (dim, size) in dims.iter().zip(shape) {
            let Dim::Sum(sum) = dim else { continue };
            match sizes.solve(sum, size) {
                Ok(None) | Err(DimFault::Unknown(_)) => {}
                Ok(Some((axis, value))) => {
                    let origin = SizeOrigin::Shape(tensor.name.clone());
                    sizes.insert(&axis, KnownSize { value, origin }).ok()?;
                }
                Err(_) => return None,
            }
        }
        Some(sizes)
    }

    /// Describes the placements, and the shape that each gives a tensor.
    fn tried(&self, tensor: &CutTensor) -> Vec<String> {
        let describe = |placement: &PlacementSpec| match whole_shape(*placement, &tensor.parts) {
            Some(shape) => format!("{placement} gives {shape:?}"),
            None => format!("{placement} fits no tensor of {} dims", tensor.parts.first().map_or(0, Vec::len)),
        };
        self.placements.iter().map(describe).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name of a tensor and the shape of its part on each rank.
    type NamedShape<'a> = (&'a str, &'a [u64]);

    const MAP: &str = r#"
family = "f"
[sides]
cut = { files = ["part.{rank}.bin", "all.bin"], cut = { "norm.weight [d]" = "R", "layers.{l}.{x:q,k}.weight" = "S(0)", "embed.weight [v d]" = ["S(0)", "S(1)"] } }
whole = {}
[sizes]
d = "dim"
v = "vocab_size"
[[map]]
rows = [{ cut = "**", whole = "**" }]
"#;

    fn rules(tensors: &[NamedShape<'_>], known: &[(&str, u64)]) -> Result<Vec<String>, MapError> {
        let map = WeightMap::parse("f.toml", MAP).unwrap();
        let known: Vec<(String, u64)> = known.iter().map(|(axis, size)| ((*axis).to_owned(), *size)).collect();
        let sizes = Sizes::new(&[], &known, None).unwrap();
        let tensor = |(name, part): &NamedShape<'_>| CutTensor { name: (*name).into(), parts: vec![part.to_vec(); 4] };
        let tensors: Vec<CutTensor> = tensors.iter().map(tensor).collect();
        let rules = map.cut_rules(0, &tensors, &sizes)?;
        Ok(rules.iter().map(|rule| format!("{} {}", rule.pattern, rule.placement)).collect())
    }

    #[test]
    fn placement_is_the_one_that_gives_the_sizes_of_the_model() {
        let norm: NamedShape<'_> = ("norm.weight", &[8]);
        let (by_rows, by_columns): (NamedShape<'_>, NamedShape<'_>) =
            (("embed.weight", &[3, 8]), ("embed.weight", &[12, 2]));
        assert_eq!(rules(&[norm, by_rows], &[]).unwrap(), ["norm.weight R", "embed.weight S(0)"]);
        assert_eq!(rules(&[by_columns, norm], &[]).unwrap(), ["norm.weight R", "embed.weight S(1)"]);
        assert_eq!(rules(&[by_columns], &[("v", 12)]).unwrap(), ["embed.weight S(1)"]);
        assert_eq!(
            rules(&[("layers.3.k.weight", &[2, 8]), ("other", &[1])], &[]).unwrap(),
            ["layers.*.{q,k}.weight S(0)"]
        );
    }

    #[test]
    fn sizes_that_no_placement_or_several_give_are_an_error() {
        let (norm, embed): (NamedShape<'_>, NamedShape<'_>) = (("norm.weight", &[8]), ("embed.weight", &[3, 4]));
        assert!(matches!(rules(&[norm, embed], &[]), Err(MapError::CutMisfit { .. })));
        assert!(matches!(rules(&[norm], &[("d", 9)]), Err(MapError::CutMisfit { .. })));
        assert!(matches!(rules(&[embed], &[]), Err(MapError::UnknownCut { .. })));
        assert!(matches!(rules(&[("embed.weight", &[u64::MAX, u64::MAX])], &[]), Err(MapError::CutMisfit { .. })));
    }
}
