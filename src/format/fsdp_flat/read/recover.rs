//! The flat layout that rank files tell by themselves, with shapes from another checkpoint of the model.
//!
//! Files with views tell units, order, numels and padding. Files without tell only units and totals: what a unit holds
//! is every parameter below its module that no unit within it holds, in the order of registration. Nothing is ever
//! taken in the order of its name: where the order is not known, this refuses. Counts elements.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::like::{Like, LikeParam};
use super::survey::{Beside, FlatState, unit_of};
use super::totals::{self, Misfit};
use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit, Shared};
use crate::catalog::modules::module_of;
use crate::catalog::{Dtype, Fqn};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::format::fsdp_flat::order::Order;
use crate::format::fsdp_flat::refuse;
use crate::layout::Dims;
use crate::layout::flat::FlatParameter;

/// What tells shapes.
#[derive(Clone, Copy, Debug)]
pub enum Shapes<'a> {
    Like(&'a Like),
    /// Nothing: parameters as flat as they lie.
    Raw,
}

/// The layout of a state dict with flat parameters.
///
/// # Errors
/// `Unsupported` where the order would be a guess, `Malformed` and `Conflict` where the files do not fit.
pub fn recover(state: &FlatState, shapes: Shapes<'_>) -> Result<FlatLayout> {
    let (shard_group_size, world_size) = sizes(state)?;
    let mut layout = FlatLayout {
        world_size,
        shard_group_size,
        use_orig_params: state.has_views(),
        units: Vec::new(),
        optimizer: None,
    };
    layout.units = if layout.use_orig_params {
        units_of_views(state, shard_group_size, shapes)?
    } else {
        match shapes {
            Shapes::Raw => state.modules().into_iter().map(|module| raw_unit(state, module)).collect(),
            Shapes::Like(like) => units_of_like(state, shard_group_size, like)?,
        }
    };
    match layout.check() {
        Ok(()) => Ok(layout),
        Err(wrong) => Err(Error::malformed(&state.ranks[0].at, wrong.at, wrong.expected, wrong.found)),
    }
}

/// Ranks of a shard group and of the job, as every flat parameter has them.
fn sizes(state: &FlatState) -> Result<(u32, u32)> {
    let first = &state.ranks[0];
    let Some((_, part)) = first.flats.first() else { unreachable!("a state with flat parameters") };
    match part.sizes {
        Some((group, world)) if group > 0 && world.is_multiple_of(group) => Ok((group, world)),
        Some((group, world)) => {
            let found = format!("a group of {group} of {world}");
            Err(Error::malformed(&first.at, part.key.as_str(), "a shard group that divides the ranks", found))
        }
        None => Err(refuse(format!("{}: {} does not say how many ranks share it", first.at.display(), part.key))),
    }
}

fn dtype_and_total(state: &FlatState, module: &str) -> Option<(Dtype, u64)> {
    let part = state.ranks.iter().find_map(|rank| rank.flats.get(module))?;
    Some((part.dtype, part.total))
}

/// A unit whose flat parameter is a parameter.
fn raw_unit(state: &FlatState, module: &str) -> FlatUnit {
    let (dtype, total) = dtype_and_total(state, module).unwrap_or((Dtype::F32, 0));
    let mut unit = FlatUnit::new(module, Some(dtype));
    let shape = Dims::from_elem(total, 1);
    unit.params.push(FlatParam { fqn: unit.key(), shape, stride: None });
    unit
}

// ---------------------------------------------------------------------------------------------------------------
// From views
// ---------------------------------------------------------------------------------------------------------------

fn units_of_views(state: &FlatState, group: u32, shapes: Shapes<'_>) -> Result<Vec<FlatUnit>> {
    refuse_empty(state, shapes)?;
    let mut by_unit: HashMap<&str, Vec<(&Fqn, Range<u64>)>> = HashMap::new();
    for name in state.parameters() {
        let (module, range) = whole_range(state, group, name)?;
        by_unit.entry(module).or_default().push((name, range));
    }
    let unit = |module: &str| {
        let mut found = by_unit.remove(module).unwrap_or_default();
        // The first of tied names, in the order of the state dict, is the parameter's own.
        found.sort_by_key(|(_, range)| range.start);
        let (mut params, mut shared): (Vec<(&Fqn, Range<u64>)>, Vec<Shared>) = (Vec::new(), Vec::new());
        for (name, range) in found {
            match params.last() {
                Some((with, known)) if *known == range => {
                    shared.push(Shared { fqn: name.clone(), with: (*with).clone() });
                }
                _ => params.push((name, range)),
            }
        }
        let (dtype, total) = dtype_and_total(state, module).expect("a unit of the state dict");
        let align = alignment(state, module, dtype, total, group, &params)?;
        let params = params.into_iter().map(|(name, range)| {
            let numel = range.end - range.start;
            let (shape, stride) = match shapes {
                Shapes::Raw => (Dims::from_elem(numel, 1), None),
                Shapes::Like(like) => shape_in(like, name, numel)?,
            };
            Ok(FlatParam { fqn: name.clone(), shape, stride })
        });
        let params = params.collect::<Result<_>>()?;
        Ok(FlatUnit { module: module.into(), dtype: Some(dtype), align_numel: Some(align), params, shared })
    };
    state.modules().into_iter().map(unit).collect()
}

/// A parameter without elements is a view of nothing, so its unit and its place are not known, nor that it is none.
fn refuse_empty(state: &FlatState, shapes: Shapes<'_>) -> Result<()> {
    let Shapes::Like(like) = shapes else { return Ok(()) };
    let viewed: HashSet<&Fqn> = state.parameters().into_iter().collect();
    let mut empty = state.ranks[0].beside.iter().filter(|(name, is)| **is == Beside::Empty && !viewed.contains(name));
    let differs = |name: &Fqn| like.params.get(name).is_some_and(|param| *param.shape != [0]);
    match empty.find(|(name, _)| differs(name)) {
        None => Ok(()),
        Some((name, _)) => {
            let shape = like.params[name].shape.as_slice();
            Err(refuse(format!(
                "{name}: of shape {shape:?}, and the files do not tell where a parameter without elements is"
            )))
        }
    }
}

/// Where a parameter lies in its flat parameter: what ranks have of it must be one stretch.
fn whole_range<'a>(state: &'a FlatState, group: u32, name: &Fqn) -> Result<(&'a str, Range<u64>)> {
    let mut pieces: Vec<(u32, &str, &Range<u64>)> = Vec::new();
    for rank in &state.ranks {
        if let Some(Beside::View { module, range }) = rank.beside.get(name) {
            pieces.push((rank.rank, module, range));
        }
    }
    pieces.sort_by_key(|(rank, _, range)| (range.start, range.end, *rank));
    // Replicas have the same pieces.
    pieces.dedup_by(|next, piece| next.2 == piece.2 && next.0 % group == piece.0 % group);
    let (_, module, first) = pieces[0];
    let mut whole = first.clone();
    for (rank, other, range) in &pieces[1..] {
        if *other != module || range.start != whole.end {
            let expected = format!("the elements of the flat parameter of `{module}` from {} on", whole.end);
            let found = format!("{} to {} of `{other}`", range.start, range.end);
            let at = state.ranks.iter().find(|own| own.rank == *rank).map(|own| &own.at);
            return Err(Error::malformed(at.unwrap_or(&state.ranks[0].at), name.as_str(), expected, found));
        }
        whole.end = range.end;
    }
    Ok((module, whole))
}

/// The alignment that puts parameters where they are.
fn alignment(
    state: &FlatState,
    module: &str,
    dtype: Dtype,
    total: u64,
    group: u32,
    params: &[(&Fqn, Range<u64>)],
) -> Result<u64> {
    let numels: Vec<u64> = params.iter().map(|(_, range)| range.end - range.start).collect();
    // That of the dtype first; then of narrower ones in mixed precision; none before PyTorch 2.1.
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
        Error::malformed(&state.ranks[0].at, FlatUnit::new(module, None).describe(), expected, shortened(&places))
    })
}

/// A list that fits a message.
pub fn shortened(items: &[String]) -> String {
    const SHOWN: usize = 8;
    let more = if items.len() > SHOWN { format!(" and {} more", items.len() - SHOWN) } else { String::new() };
    items[..items.len().min(SHOWN)].join(", ") + &more
}

fn shape_in(like: &Like, name: &Fqn, numel: u64) -> Result<(Dims, Option<Dims>)> {
    let Some(param) = like.params.get(name) else {
        return Err(refuse(format!("{name}: {} has no parameter of this name", like.path.display())));
    };
    let found = crate::layout::numel(&param.shape);
    if found != Some(numel) {
        return Err(Error::Conflict {
            fqn: name.to_string(),
            what: "the number of elements",
            between: format!("its flat parameter and {}", like.path.display()),
            detail: format!("expected {numel}, found shape {:?}", param.shape.as_slice()),
            hint: Some(String::from("--like takes a checkpoint of the same model")),
        });
    }
    Ok((param.shape.clone(), stride_of(like, name, param)?))
}

fn stride_of(like: &Like, name: &Fqn, param: &LikeParam) -> Result<Option<Dims>> {
    match &param.order {
        Order::RowMajor => Ok(None),
        Order::Strides(strides) => Ok(Some(strides.clone())),
        Order::Unknown => Err(refuse(format!(
            "{name}: of shape {:?}, it may lie by rows or channels last, and {} ({}) does not tell",
            param.shape.as_slice(),
            like.path.display(),
            like.format
        ))),
    }
}

// ---------------------------------------------------------------------------------------------------------------
// From another checkpoint
// ---------------------------------------------------------------------------------------------------------------

fn units_of_like(state: &FlatState, group: u32, like: &Like) -> Result<Vec<FlatUnit>> {
    let modules = state.modules();
    let known: HashSet<&str> = modules.iter().copied().collect();
    let buffers: HashSet<&Fqn> = state.ranks.iter().flat_map(|rank| rank.beside.keys()).collect();
    let mut units: Vec<FlatUnit> = Vec::new();
    for module in &modules {
        let dtype = dtype_and_total(state, module).map(|(dtype, _)| dtype);
        units.push(FlatUnit::new(*module, dtype));
    }
    let positions: HashMap<&str, usize> = modules.iter().copied().zip(0..).collect();
    for (name, param) in &like.params {
        if buffers.contains(name) {
            continue;
        }
        let Some(unit) = unit_of(module_of(name.as_str()), &known) else {
            return Err(refuse(format!(
                "{name}: {} has it, and no unit of the files is around it",
                like.path.display()
            )));
        };
        let unit = &mut units[positions[unit]];
        match &param.shared_with {
            Some(with) => unit.shared.push(Shared { fqn: name.clone(), with: with.clone() }),
            None => {
                unit.params.push(FlatParam { fqn: name.clone(), shape: param.shape.clone(), stride: None });
            }
        }
    }
    if let Some(unit) = units.iter().find(|unit| unit.params.len() > 1 && !like.is_ordered()) {
        let several = format!("{} has {} parameters", unit.describe(), unit.params.len());
        return Err(refuse(format!(
            "{}: {several}, and {} ({}{}) does not tell their order",
            state.ranks[0].at.display(),
            like.path.display(),
            like.format,
            if matches!(like.format, Format::Torch | Format::TorchRanks) { ", sorted by names" } else { "" }
        )));
    }
    for unit in &mut units {
        for param in &mut unit.params {
            param.stride = stride_of(like, &param.fqn, &like.params[&param.fqn])?;
        }
        let total = dtype_and_total(state, &unit.module).map_or(0, |(_, total)| total);
        tie_copies(unit, like, total)?;
        let source = like.path.display().to_string();
        let misfit = Misfit { file: &state.ranks[0].at, source: &source };
        totals::check(misfit, unit, None, u64::from(group), total)?;
    }
    Ok(units)
}

/// Where a unit is too long by one weight, and there is one that the other checkpoint has twice, that is tied.
fn tie_copies(unit: &mut FlatUnit, like: &Like, total: u64) -> Result<()> {
    let sum = unit.params.iter().try_fold(0_u64, |sum, param| sum.checked_add(param.numel()));
    let Some(extra) = sum.and_then(|sum| sum.checked_sub(total)).filter(|extra| *extra > 0) else { return Ok(()) };
    const MAX_CANDIDATES: usize = 32;
    let mut copies: Vec<(usize, usize)> = Vec::new();
    // Vectors are equal by themselves: new norms are all ones.
    let candidates: Vec<usize> = (0..unit.params.len())
        .filter(|index| unit.params[*index].numel() == extra && unit.params[*index].shape.len() > 1)
        .take(MAX_CANDIDATES)
        .collect();
    for (at, &second) in candidates.iter().enumerate() {
        for &first in &candidates[..at] {
            if like.are_copies(&unit.params[first].fqn, &unit.params[second].fqn)? {
                copies.push((first, second));
            }
        }
    }
    if let [(first, second)] = copies.as_slice() {
        let with = unit.params[*first].fqn.clone();
        let FlatParam { fqn, .. } = unit.params.remove(*second);
        unit.shared.push(Shared { fqn, with });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::survey::tests::state_of_views;
    use super::*;

    fn shown(layout: &FlatLayout) -> Vec<String> {
        let unit = |unit: &FlatUnit| {
            let params = unit.params.iter().map(|param| format!("{} {}", param.fqn, param.numel()));
            let shared = unit.shared.iter().map(|shared| format!("{}={}", shared.fqn, shared.with));
            let all: Vec<String> = params.chain(shared).collect();
            format!("{} align {}: {}", unit.module, unit.align_numel().unwrap(), all.join(", "))
        };
        layout.units.iter().map(unit).collect()
    }

    /// What PyTorch made of Embedding(5, 3) tied with a head and Linear(3, 5) on two ranks.
    #[test]
    fn views_tell_order_numels_ties_and_alignment() {
        let of_rank_0 = [("", "emb", 0..15), ("", "weight", 16..19), ("", "head", 0..15)];
        let of_rank_1 = [("", "weight", 19..31), ("", "bias", 32..37)];
        let ranks: [(u32, &[_]); 2] = [(0, &of_rank_0), (1, &of_rank_1)];
        let layout = recover(&state_of_views(38, (2, 2), &ranks), Shapes::Raw).unwrap();
        assert_eq!(shown(&layout), [" align 4: emb 15, weight 15, bias 5, head=emb"]);
        // Replicas of both shards; then without one, and without both holders of another.
        let ranks: [(u32, &[_]); 4] = [(0, &of_rank_0), (1, &of_rank_1), (2, &of_rank_0), (3, &of_rank_1)];
        let hybrid = recover(&state_of_views(38, (2, 4), &ranks), Shapes::Raw).unwrap();
        assert_eq!((hybrid.units == layout.units, hybrid.shard_group_size, hybrid.world_size), (true, 2, 4));
        assert!(recover(&state_of_views(38, (2, 4), &ranks[..3]), Shapes::Raw).is_ok());
        let error = recover(&state_of_views(38, (2, 2), &ranks[1..2]), Shapes::Raw).unwrap_err().to_string();
        assert!(error.contains("expected parameters that follow each other, padded to 16 bytes"), "{error}");
    }

    #[test]
    fn views_that_cannot_be_are_refused() {
        let with = |second: Range<u64>| {
            let ranks: [(u32, &[_]); 2] = [(0, &[("", "w", 0..8)]), (1, &[("", "w", second)])];
            recover(&state_of_views(16, (2, 2), &ranks), Shapes::Raw)
        };
        assert!(with(8..16).is_ok());
        for second in [9..16, 7..16, 8..20] {
            assert!(with(second.clone()).is_err(), "{second:?}");
        }
        let mixed: [(u32, &[_]); 1] = [(0, &[("", "a", 0..3), ("", "b", 8..11)])];
        let layout = recover(&state_of_views(11, (1, 1), &mixed), Shapes::Raw).unwrap();
        assert_eq!(layout.units[0].align_numel, Some(8));
        for sizes in [(0, 2), (2, 3), (3, 2)] {
            assert!(recover(&state_of_views(11, sizes, &mixed), Shapes::Raw).is_err(), "{sizes:?}");
        }
    }
}
