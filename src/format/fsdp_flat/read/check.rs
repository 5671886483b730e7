//! Checks rank files against a flat layout: the shard of every flat parameter and the view of every parameter. Nothing
//! is converted unless all shards and views match. Unit of ranges: elements.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::model_record::check_groups;
use super::survey::{FlatPart, FlatState, PlainTensor, RankState};
use super::totals::{self, LayoutMismatch};
use crate::catalog::Fqn;
use crate::catalog::flat::{FlatLayout, FlatUnit};
use crate::catalog::modules::module_of;
use crate::error::Result;
use crate::layout::Region;
use crate::layout::flat::{FlatContent, FlatParameter};
use crate::name_list::{FEW, quoted_list, short_list};

/// Compares a state dict with flat parameters, as found in rank files, with a flat layout. Errors name `source` as the
/// origin of the layout.
///
/// # Errors
/// `Conflict` for the first difference, naming the rank file and the unit or parameter.
pub fn check(state: &FlatState, layout: &FlatLayout, source: &str) -> Result<()> {
    let misfit = LayoutMismatch { file: &state.ranks[0].file_path, source };
    if layout.use_orig_params != state.has_views() && layout.params().any(|(_, param)| param.numel() > 0) {
        let describe = |yes| if yes { "original parameters beside flat parameters" } else { "only flat parameters" };
        let expected = format!("{} (use_orig_params is {})", describe(layout.use_orig_params), layout.use_orig_params);
        return Err(misfit.error("the state dict", expected, describe(state.has_views())));
    }
    let flat_params: Vec<(&FlatUnit, FlatParameter)> =
        layout.units.iter().map(|unit| (unit, layout.flat(unit))).collect();
    check_order(state, layout, misfit)?;
    check_groups(layout, &optimizer_positions(state, layout), misfit)?;
    for rank in &state.ranks {
        check_rank(rank, layout, &flat_params, LayoutMismatch { file: &rank.file_path, source })?;
    }
    Ok(())
}

/// Checks that the parameters of each unit come in the order in which their modules are registered.
fn check_order(state: &FlatState, layout: &FlatLayout, misfit: LayoutMismatch<'_>) -> Result<()> {
    let Some(registered) = &state.module_positions else { return Ok(()) };
    for unit in &layout.units {
        let known =
            unit.params.iter().filter_map(|param| Some((registered.get(module_of(param.fqn.as_str()))?, param)));
        let mut last = None;
        for (position, param) in known {
            if let Some((_, before)) = last.filter(|(highest, _)| *highest > position) {
                let expected = format!("{} before {before}, as in the module order of its _metadata", param.fqn);
                return Err(misfit.error(&unit.describe(), expected, "the opposite order"));
            }
            last = Some((position, &param.fqn));
        }
    }
    Ok(())
}

/// Returns the length of each parameter that an optimizer may list, and its position in the order of registration; without
/// parameters whose position the state dict does not record.
fn optimizer_positions(state: &FlatState, layout: &FlatLayout) -> HashMap<Fqn, (u64, usize)> {
    let Some(registered) = &state.module_positions else { return HashMap::new() };
    if !layout.use_orig_params {
        let unit = |unit: &FlatUnit| Some((unit.key(), (layout.flat(unit).total(), *registered.get(&unit.module)?)));
        return layout.units.iter().filter_map(unit).collect();
    }
    let mut names: Vec<&Fqn> = state.view_names();
    names.retain(|name| registered.contains_key(module_of(name.as_str())));
    names.sort_by_key(|name| registered[module_of(name.as_str())]);
    let lengths: HashMap<&Fqn, u64> = layout.params().map(|(_, param)| (&param.fqn, param.numel())).collect();
    let positions = names.into_iter().zip(0..);
    positions.filter_map(|(name, position)| Some((name.clone(), (*lengths.get(name)?, position)))).collect()
}

fn check_rank(
    rank: &RankState,
    layout: &FlatLayout,
    flat_params: &[(&FlatUnit, FlatParameter)],
    misfit: LayoutMismatch<'_>,
) -> Result<()> {
    let bad = |at: &str, expected: String, found: String| Err(misfit.error(at, expected, found));
    if rank.rank >= layout.world_size {
        let expected = format!("a rank below the world_size {}", layout.world_size);
        return bad("the name of the file", expected, format!("rank {}", rank.rank));
    }
    let known: HashSet<&str> = layout.units.iter().map(|unit| &*unit.module).collect();
    let extra: Vec<String> = rank
        .flat_parts
        .iter()
        .filter(|(module, _)| !known.contains(&***module))
        .map(|(_, part)| part.key.to_string())
        .collect();
    let other_units =
        |found: String| bad("the state dict", String::from("exactly the flat parameters of the layout"), found);
    if !extra.is_empty() {
        return other_units(format!("also {}", quoted_list(&extra, FEW))).map_err(|error| error.naming(&extra));
    }
    let missing: Vec<String> = (flat_params.iter())
        .filter(|(unit, flat)| flat.total() > 0 && !rank.flat_parts.contains_key(&unit.module))
        .map(|(unit, _)| unit.key().to_string())
        .collect();
    if !missing.is_empty() {
        return other_units(format!("no {}", quoted_list(&missing, FEW))).map_err(|error| error.naming(&missing));
    }
    let shard = layout.shard_of(rank.rank);
    for (unit, flat) in flat_params {
        if let Some(part) = rank.flat_parts.get(&unit.module) {
            check_part(rank.rank, part, layout, (unit, flat), misfit)?;
        }
        if layout.use_orig_params {
            check_views(rank, unit, flat, shard, misfit)?;
        } else if let Some(twice) = all_names(unit).find(|(name, _)| rank.other_tensors.contains_key(*name)) {
            let expected = format!("a parameter in `{}`", unit.key());
            return bad(twice.0.as_str(), expected, String::from("a separate tensor"));
        }
    }
    Ok(())
}

/// Checks that the data that a rank has of a flat parameter is the shard that the layout assigns to this rank.
fn check_part(
    rank: u32,
    part: &FlatPart,
    layout: &FlatLayout,
    (unit, flat): (&FlatUnit, &FlatParameter),
    misfit: LayoutMismatch<'_>,
) -> Result<()> {
    let bad = |expected: String, found: String| Err(misfit.error(part.key.as_str(), expected, found));
    let expected = (layout.shard_group_size, layout.world_size);
    if let Some(found) = part.group_sizes.filter(|found| *found != expected) {
        let sizes = |(group, world)| format!("shards over {group} of {world} ranks");
        return bad(sizes(expected), sizes(found));
    }
    if let Some(dtype) = unit.dtype.filter(|dtype| *dtype != part.dtype) {
        return bad(dtype.to_string(), part.dtype.to_string());
    }
    let align = if layout.use_orig_params { unit.align_numel() } else { None };
    totals::check(misfit, unit, align, u64::from(layout.shard_group_size), part.total)?;
    let range = flat.shard(layout.shard_of(rank));
    let found = part.shard.as_ref().map_or(range.start..range.start, |(found, _)| found.clone());
    if found != range {
        return bad(
            format!("elements {} to {} on rank {rank}", range.start, range.end),
            format!("{} to {}", found.start, found.end),
        );
    }
    if !lists_shards(part, flat) {
        let lens: Vec<String> = part.listed_shards.iter().map(ToString::to_string).collect();
        return bad(format!("shards of {} elements", flat.shard_len()), short_list(&lens, FEW));
    }
    Ok(())
}

/// Returns whether the shards of all ranks that the ShardedTensor lists equal the shards in the layout. Empty shards
/// are ignored.
fn lists_shards(part: &FlatPart, flat: &FlatParameter) -> bool {
    let shards = (0..flat.shards()).map(|shard| flat.shard(shard)).take_while(|range| !range.is_empty());
    let listed = part.listed_shards.iter().filter(|region| region.numel() > 0).cloned();
    listed.eq(shards.map(|range| region_from(&range)))
}

fn region_from(range: &Range<u64>) -> Region {
    Region::new([range.start].as_slice(), [range.end - range.start].as_slice())
}

/// Returns all names of a unit's parameters, including further names of tied parameters. Each name comes with the name
/// under which the layout lists the parameter.
fn all_names(unit: &FlatUnit) -> impl Iterator<Item = (&Fqn, &Fqn)> {
    let own = unit.params.iter().map(|param| (&param.fqn, &param.fqn));
    own.chain(unit.shared.iter().map(|shared| (&shared.fqn, &shared.with)))
}

/// Checks, for each name of every parameter, that the tensor with this name is the view of the flat parameter that the
/// layout describes.
fn check_views(
    rank: &RankState,
    unit: &FlatUnit,
    flat: &FlatParameter,
    shard: u64,
    misfit: LayoutMismatch<'_>,
) -> Result<()> {
    let mut expected_views: Vec<Option<Range<u64>>> = vec![None; unit.params.len()];
    let own = flat.shard(shard);
    for piece in flat.pieces(shard) {
        if let FlatContent::Parameter { index, .. } = piece.content {
            let start = own.start + piece.offset;
            expected_views[index] = Some(start..start + piece.len);
        }
    }
    let positions: HashMap<&Fqn, usize> = unit.params.iter().map(|param| &param.fqn).zip(0..).collect();
    for (name, of) in all_names(unit) {
        let Some(expected) = positions.get(of).map(|index| &expected_views[*index]) else { continue };
        let found = match rank.other_tensors.get(name) {
            Some(PlainTensor::View { module, range }) if *module == unit.module => Some(Some(range.clone())),
            Some(PlainTensor::Empty) => Some(None),
            _ => None,
        };
        if found.as_ref() == Some(expected) {
            continue;
        }
        let show = |range: &Option<Range<u64>>| match range {
            Some(range) => format!("elements {} to {} of {}", range.start, range.end, unit.key()),
            None => String::from("an empty tensor on this rank"),
        };
        let found = found.map_or_else(|| format!("no view of `{}`", unit.key()), |found| show(&found));
        return Err(misfit.error(name.as_str(), show(expected), found));
    }
    Ok(())
}
