//! Whether rank files are what a flat layout says, flat parameter by flat parameter and view by view.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::survey::{FlatPart, FlatState, PlainTensor, RankState};
use super::totals::{self, LayoutMismatch};
use crate::catalog::Fqn;
use crate::catalog::flat::{FlatLayout, FlatUnit};
use crate::catalog::modules::module_of;
use crate::error::Result;
use crate::layout::Region;
use crate::layout::flat::{FlatContent, FlatParameter};
use crate::name_list::{FEW, short_list};

/// Compare a state dict with flat parameters with its layout; `source` is where that is from, for messages.
///
/// # Errors
/// `Conflict` for the first thing that differs, naming rank file and unit or parameter.
pub fn check(state: &FlatState, layout: &FlatLayout, source: &str) -> Result<()> {
    let misfit = LayoutMismatch { file: &state.ranks[0].at, source };
    if layout.use_orig_params != state.has_views() && layout.params().any(|(_, param)| param.numel() > 0) {
        let says = |yes| if yes { "views of parameters beside flat ones" } else { "flat parameters alone" };
        let expected = format!("{}, as use_orig_params says", says(layout.use_orig_params));
        return Err(misfit.error("the state dict", expected, says(state.has_views())));
    }
    let flats: Vec<(&FlatUnit, FlatParameter)> = layout.units.iter().map(|unit| (unit, layout.flat(unit))).collect();
    check_order(state, layout, misfit)?;
    for rank in &state.ranks {
        check_rank(rank, layout, &flats, LayoutMismatch { file: &rank.at, source })?;
    }
    Ok(())
}

/// Parameters come module by module, in the order in which the modules are registered.
fn check_order(state: &FlatState, layout: &FlatLayout, misfit: LayoutMismatch<'_>) -> Result<()> {
    let Some(registered) = &state.registered else { return Ok(()) };
    for unit in &layout.units {
        let known =
            unit.params.iter().filter_map(|param| Some((registered.get(module_of(param.fqn.as_str()))?, param)));
        let mut last = None;
        for (position, param) in known {
            if let Some((_, before)) = last.filter(|(highest, _)| *highest > position) {
                let expected = format!("{} before {before}, as its _metadata has the modules", param.fqn);
                return Err(misfit.error(&unit.describe(), expected, "the other order"));
            }
            last = Some((position, &param.fqn));
        }
    }
    Ok(())
}

fn check_rank(
    rank: &RankState,
    layout: &FlatLayout,
    flats: &[(&FlatUnit, FlatParameter)],
    misfit: LayoutMismatch<'_>,
) -> Result<()> {
    let bad = |at: &str, expected: String, found: String| Err(misfit.error(at, expected, found));
    if rank.rank >= layout.world_size {
        let expected = format!("a rank below {}, the world_size", layout.world_size);
        return bad("the name of the file", expected, format!("rank {}", rank.rank));
    }
    let known: HashSet<&str> = layout.units.iter().map(|unit| &*unit.module).collect();
    let extra: Vec<String> = rank
        .flats
        .iter()
        .filter(|(module, _)| !known.contains(&***module))
        .map(|(_, part)| part.key.to_string())
        .collect();
    let other_units = |found: String| bad("the state dict", String::from("the units of the layout"), found);
    if !extra.is_empty() {
        return other_units(format!("{} as well", short_list(&extra, FEW))).map_err(|error| error.naming(&extra));
    }
    let missing: Vec<String> = (flats.iter())
        .filter(|(unit, flat)| flat.total() > 0 && !rank.flats.contains_key(&unit.module))
        .map(|(unit, _)| unit.key().to_string())
        .collect();
    if !missing.is_empty() {
        return other_units(format!("no {}", short_list(&missing, FEW))).map_err(|error| error.naming(&missing));
    }
    let shard = layout.shard_of(rank.rank);
    for (unit, flat) in flats {
        if let Some(part) = rank.flats.get(&unit.module) {
            check_part(rank.rank, part, layout, (unit, flat), misfit)?;
        }
        if layout.use_orig_params {
            check_views(rank, unit, flat, shard, misfit)?;
        } else if let Some(twice) = names(unit).find(|(name, _)| rank.beside.contains_key(*name)) {
            let expected = format!("a parameter in {}", unit.key());
            return bad(twice.0.as_str(), expected, String::from("a tensor of its own"));
        }
    }
    Ok(())
}

/// What a rank has of a flat parameter is the shard that the layout gives it.
fn check_part(
    rank: u32,
    part: &FlatPart,
    layout: &FlatLayout,
    (unit, flat): (&FlatUnit, &FlatParameter),
    misfit: LayoutMismatch<'_>,
) -> Result<()> {
    let bad = |expected: String, found: String| Err(misfit.error(part.key.as_str(), expected, found));
    let expected = (layout.shard_group_size, layout.world_size);
    if let Some(found) = part.sizes.filter(|found| *found != expected) {
        let sizes = |(group, world)| format!("shards over {group} of {world} ranks");
        return bad(sizes(expected), sizes(found));
    }
    if let Some(dtype) = unit.dtype.filter(|dtype| *dtype != part.dtype) {
        return bad(dtype.to_string(), part.dtype.to_string());
    }
    let align = if layout.use_orig_params { unit.align_numel() } else { None };
    totals::check(misfit, unit, align, u64::from(layout.shard_group_size), part.total)?;
    let range = flat.shard(layout.shard_of(rank));
    let found = part.stretch.as_ref().map_or(range.start..range.start, |(found, _)| found.clone());
    if found != range {
        return bad(
            format!("elements {} to {} on rank {rank}", range.start, range.end),
            format!("{} to {}", found.start, found.end),
        );
    }
    if !lists_shards(part, flat) {
        let lens: Vec<String> = part.listed.iter().map(ToString::to_string).collect();
        return bad(format!("shards of {} elements", flat.shard_len()), short_list(&lens, FEW));
    }
    Ok(())
}

/// Whether it says of all ranks what each has.
fn lists_shards(part: &FlatPart, flat: &FlatParameter) -> bool {
    let shards = (0..flat.shards()).map(|shard| flat.shard(shard)).take_while(|range| !range.is_empty());
    let listed = part.listed.iter().filter(|region| region.numel() > 0).cloned();
    listed.eq(shards.map(|range| region_of(&range)))
}

fn region_of(range: &Range<u64>) -> Region {
    Region::new([range.start].as_slice(), [range.end - range.start].as_slice())
}

/// All names of a unit, each with the parameter that it is of.
fn names(unit: &FlatUnit) -> impl Iterator<Item = (&Fqn, &Fqn)> {
    let own = unit.params.iter().map(|param| (&param.fqn, &param.fqn));
    own.chain(unit.shared.iter().map(|shared| (&shared.fqn, &shared.with)))
}

/// Every parameter, under each of its names, is the view that the layout says.
fn check_views(
    rank: &RankState,
    unit: &FlatUnit,
    flat: &FlatParameter,
    shard: u64,
    misfit: LayoutMismatch<'_>,
) -> Result<()> {
    let mut held: Vec<Option<Range<u64>>> = vec![None; unit.params.len()];
    let own = flat.shard(shard);
    for piece in flat.pieces(shard) {
        if let FlatContent::Parameter { index, .. } = piece.content {
            let start = own.start + piece.offset;
            held[index] = Some(start..start + piece.len);
        }
    }
    let positions: HashMap<&Fqn, usize> = unit.params.iter().map(|param| &param.fqn).zip(0..).collect();
    for (name, of) in names(unit) {
        let Some(expected) = positions.get(of).map(|index| &held[*index]) else { continue };
        let found = match rank.beside.get(name) {
            Some(PlainTensor::View { module, range }) if *module == unit.module => Some(Some(range.clone())),
            Some(PlainTensor::Empty) => Some(None),
            _ => None,
        };
        if found.as_ref() == Some(expected) {
            continue;
        }
        let show = |range: &Option<Range<u64>>| match range {
            Some(range) => format!("elements {} to {} of {}", range.start, range.end, unit.key()),
            None => String::from("nothing of it on this rank"),
        };
        let found = found.map_or_else(|| format!("no view of {}", unit.key()), |found| show(&found));
        return Err(misfit.error(name.as_str(), show(expected), found));
    }
    Ok(())
}
