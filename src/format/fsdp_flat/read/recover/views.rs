//! Recovers units from the views in files with `use_orig_params`: the position of every parameter in the flat
//! parameter, tied parameters, and the alignment. The shapes of parameters come from another checkpoint. Unit of
//! lengths and positions: elements.
//!
//! Source: `FlatParamHandle._use_sharded_views` in `torch/distributed/fsdp/_flat_param.py`.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::super::like::LikeModel;
use super::super::survey::{FlatState, PlainTensor};
use super::{ShapeSource, dtype_and_total, stride_of};
use crate::catalog::flat::{FlatParam, FlatUnit, SharedName};
use crate::catalog::{Dtype, Fqn};
use crate::error::{CatalogError, Error, Result};
use crate::format::fsdp_flat::unknown_layout_error;
use crate::layout::Dims;
use crate::layout::flat::FlatParameter;
use crate::name_list::{FEW, short_list};

/// Returns the units of a state dict with views. `group` is the number of ranks in a shard group.
pub fn units(state: &FlatState, group: u32, shapes: ShapeSource<'_>) -> Result<Vec<FlatUnit>> {
    refuse_empty(state, shapes)?;
    let mut by_unit: HashMap<&str, Vec<(&Fqn, Range<u64>)>> = HashMap::new();
    for name in state.view_names() {
        let (module, range) = whole_range(state, group, name)?;
        by_unit.entry(module).or_default().push((name, range));
    }
    let unit = |module: &str| {
        let mut found = by_unit.remove(module).unwrap_or_default();
        // If several names are tied, the first name in the order of the state dict becomes the name of the parameter.
        found.sort_by_key(|(_, range)| range.start);
        let (mut params, mut shared): (Vec<(&Fqn, Range<u64>)>, Vec<SharedName>) = (Vec::new(), Vec::new());
        for (name, range) in found {
            match params.last() {
                Some((with, known)) if *known == range => {
                    shared.push(SharedName { fqn: name.clone(), with: (*with).clone() });
                }
                _ => params.push((name, range)),
            }
        }
        let (dtype, total) = dtype_and_total(state, module).expect("a unit of the state dict");
        let align = alignment(state, module, dtype, total, group, &params)?;
        let params = params.into_iter().map(|(name, range)| {
            let numel = range.end - range.start;
            let (shape, stride) = match shapes {
                ShapeSource::Raw => (Dims::from_elem(numel, 1), None),
                ShapeSource::Like(like) => shape_in(like, name, numel)?,
            };
            Ok(FlatParam { fqn: name.clone(), shape, stride })
        });
        let params = params.collect::<Result<_>>()?;
        Ok(FlatUnit { module: module.into(), dtype: Some(dtype), align_numel: Some(align), params, shared })
    };
    state.unit_modules().into_iter().map(unit).collect()
}

/// Returns an error for a parameter without elements, such as a parameter of shape `[0, 4]`: such a parameter has no
/// data in a flat parameter, so its unit and position are unknown. The shape comes from the other checkpoint. A tensor
/// of shape `[0]` is not an error, because it may be a buffer.
fn refuse_empty(state: &FlatState, shapes: ShapeSource<'_>) -> Result<()> {
    let ShapeSource::Like(like) = shapes else { return Ok(()) };
    let viewed: HashSet<&Fqn> = state.view_names().into_iter().collect();
    let mut empty =
        state.ranks[0].other_tensors.iter().filter(|(name, is)| **is == PlainTensor::Empty && !viewed.contains(name));
    let differs = |name: &Fqn| like.params.get(name).is_some_and(|param| *param.shape != [0]);
    match empty.find(|(name, _)| differs(name)) {
        None => Ok(()),
        Some((name, _)) => {
            let shape = like.params[name].shape.as_slice();
            Err(unknown_layout_error(format!(
                "{name}: the files do not record the position of a parameter without elements (shape {shape:?})"
            )))
        }
    }
}

/// Returns the module whose flat parameter contains the parameter `name`, and the range of the parameter in this flat
/// parameter. The views on all ranks must together form one range without gaps.
fn whole_range<'a>(state: &'a FlatState, group: u32, name: &Fqn) -> Result<(&'a str, Range<u64>)> {
    let mut pieces: Vec<(u32, &str, &Range<u64>)> = Vec::new();
    for rank in &state.ranks {
        if let Some(PlainTensor::View { module, range }) = rank.other_tensors.get(name) {
            pieces.push((rank.rank, module, range));
        }
    }
    pieces.sort_by_key(|(rank, _, range)| (range.start, range.end, *rank));
    // Replicas of a shard have equal parts.
    pieces.dedup_by(|next, piece| next.2 == piece.2 && next.0 % group == piece.0 % group);
    let (_, module, first) = pieces[0];
    let mut whole = first.clone();
    for (rank, other, range) in &pieces[1..] {
        if *other != module || range.start != whole.end {
            let expected = format!("the elements of the flat parameter of `{module}` from {} on", whole.end);
            let found = format!("{} to {} of `{other}`", range.start, range.end);
            let at = state.ranks.iter().find(|own| own.rank == *rank).map(|own| &own.file_path);
            return Err(Error::malformed(at.unwrap_or(&state.ranks[0].file_path), name.as_str(), expected, found));
        }
        whole.end = range.end;
    }
    Ok((module, whole))
}

/// Returns the alignment, in elements, that explains the position of every parameter in the flat parameter.
fn alignment(
    state: &FlatState,
    module: &str,
    dtype: Dtype,
    total: u64,
    group: u32,
    params: &[(&Fqn, Range<u64>)],
) -> Result<u64> {
    let numels: Vec<u64> = params.iter().map(|(_, range)| range.end - range.start).collect();
    // The candidates are, in this order: the alignment of the dtype, the alignments of narrower dtypes in mixed
    // precision, and no alignment, as before PyTorch 2.1.
    let candidates = [16 / dtype.itemsize(), 4, 8, 16, 2, 1];
    let fits = |align: &u64| {
        let flat = FlatParameter::new(&numels, Some(*align), u64::from(group));
        flat.is_some_and(|flat| {
            flat.total() == total && flat.params().iter().zip(params).all(|(placed, (_, range))| placed == range)
        })
    };
    candidates.into_iter().find(fits).ok_or_else(|| {
        let places: Vec<String> = params.iter().map(|(name, range)| format!("{name} at {}", range.start)).collect();
        let expected = format!("parameters that follow each other, padded to 16 bytes, in {total} elements");
        Error::malformed(
            &state.ranks[0].file_path,
            FlatUnit::new(module, None).describe(),
            expected,
            short_list(&places, FEW),
        )
    })
}

fn shape_in(like: &LikeModel, name: &Fqn, numel: u64) -> Result<(Dims, Option<Dims>)> {
    let Some(param) = like.params.get(name) else {
        return Err(unknown_layout_error(format!("{name}: {} has no parameter of this name", like.path.display())));
    };
    let found = crate::layout::numel(&param.shape);
    if found != Some(numel) {
        return Err(Error::Catalog(CatalogError::Conflict {
            fqn: name.to_string(),
            what: "the number of elements",
            between: format!("its flat parameter and {}", like.path.display()),
            detail: format!("expected {numel}, found shape {:?}", param.shape.as_slice()),
            hint: Some(String::from("give options::like a checkpoint of the same model")),
        }));
    }
    Ok((param.shape.clone(), stride_of(like, name, param)?))
}

#[cfg(test)]
mod tests {
    use super::super::super::survey::tests::state_of_views;
    use super::super::recover;
    use super::*;
    use crate::catalog::flat::FlatLayout;

    fn shown(layout: &FlatLayout) -> Vec<String> {
        let unit = |unit: &FlatUnit| {
            let params = unit.params.iter().map(|param| format!("{} {}", param.fqn, param.numel()));
            let shared = unit.shared.iter().map(|shared| format!("{}={}", shared.fqn, shared.with));
            let all: Vec<String> = params.chain(shared).collect();
            format!("{} align {}: {}", unit.module, unit.align_numel().unwrap(), all.join(", "))
        };
        layout.units.iter().map(unit).collect()
    }

    /// The shards that PyTorch makes of Embedding(5, 3), tied with a head, and Linear(3, 5) on two ranks.
    #[test]
    fn views_give_order_numels_ties_and_alignment() {
        let of_rank_0 = [("", "emb", 0..15), ("", "weight", 16..19), ("", "head", 0..15)];
        let of_rank_1 = [("", "weight", 19..31), ("", "bias", 32..37)];
        let ranks: [(u32, &[_]); 2] = [(0, &of_rank_0), (1, &of_rank_1)];
        let layout = recover(&state_of_views(38, (2, 2), &ranks), ShapeSource::Raw).unwrap();
        assert_eq!(shown(&layout), [" align 4: emb 15, weight 15, bias 5, head=emb"]);
        // All replicas of both shards exist; then one replica is missing; then all replicas of one shard are missing.
        let ranks: [(u32, &[_]); 4] = [(0, &of_rank_0), (1, &of_rank_1), (2, &of_rank_0), (3, &of_rank_1)];
        let hybrid = recover(&state_of_views(38, (2, 4), &ranks), ShapeSource::Raw).unwrap();
        assert_eq!((hybrid.units == layout.units, hybrid.shard_group_size, hybrid.world_size), (true, 2, 4));
        assert!(recover(&state_of_views(38, (2, 4), &ranks[..3]), ShapeSource::Raw).is_ok());
        let error = recover(&state_of_views(38, (2, 2), &ranks[1..2]), ShapeSource::Raw).unwrap_err().to_string();
        assert!(error.contains("expected parameters that follow each other, padded to 16 bytes"), "{error}");
    }

    #[test]
    fn contradictory_views_are_an_error() {
        let with = |second: Range<u64>| {
            let ranks: [(u32, &[_]); 2] = [(0, &[("", "w", 0..8)]), (1, &[("", "w", second)])];
            recover(&state_of_views(16, (2, 2), &ranks), ShapeSource::Raw)
        };
        assert!(with(8..16).is_ok());
        for second in [9..16, 7..16, 8..20] {
            assert!(with(second.clone()).is_err(), "{second:?}");
        }
        let mixed: [(u32, &[_]); 1] = [(0, &[("", "a", 0..3), ("", "b", 8..11)])];
        let layout = recover(&state_of_views(11, (1, 1), &mixed), ShapeSource::Raw).unwrap();
        assert_eq!(layout.units[0].align_numel, Some(8));
        for sizes in [(0, 2), (2, 3), (3, 2)] {
            assert!(recover(&state_of_views(11, sizes, &mixed), ShapeSource::Raw).is_err(), "{sizes:?}");
        }
    }
}
