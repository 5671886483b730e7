//! Collects the flat parameters in rank files, without any knowledge of the model.
//!
//! A state dict with flat parameters has one key `<module>._flat_param` per unit: a 1-d ShardedTensor of which the rank
//! holds at most one shard. With `use_orig_params` the state dict also has the parameters, as 1-d views of the shard's
//! storage. A parameter that has no element in the rank's shard is an empty tensor. All other tensors are buffers.
//! Ranges and lengths count elements.
//!
//! Source: `_local_post_state_dict_hook` in `torch/distributed/fsdp/_state_dict_utils.py`.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use indexmap::IndexMap;

use crate::catalog::flat::flat_module;
use crate::catalog::modules::{self, module_of};
use crate::catalog::path::key_text;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Dict, Dtype, Fqn, Key, Path, Value};
use crate::error::{Error, FormatError, Result};
use crate::format::torch::RankFile;
use crate::format::torch::{TensorNode, View};
use crate::layout::{Rank, Region};

/// A state dict with flat parameters, collected from all rank files.
#[derive(Debug)]
pub struct FlatState {
    pub path: Path,
    /// The content of this state dict in each rank file that has the state dict.
    pub ranks: Vec<RankState>,
    /// The position of each module in the order of registration, if the state dict has PyTorch's `_metadata`.
    pub module_positions: Option<HashMap<Box<str>, usize>>,
}

/// A state dict with flat parameters, as found in the file of one rank.
#[derive(Debug)]
pub struct RankState {
    /// The index of the file in its series.
    pub file_index: usize,
    pub rank: u32,
    pub file_path: PathBuf,
    /// The rank's shard of each flat parameter, by the path of the unit's module.
    pub flat_parts: IndexMap<Box<str>, FlatPart>,
    /// The tensors that are not flat parameters, in the order of the file.
    pub other_tensors: IndexMap<Fqn, PlainTensor>,
}

/// A flat parameter in the file of one rank, with the shard that this rank has.
#[derive(Debug)]
pub struct FlatPart {
    pub key: Fqn,
    pub dtype: Dtype,
    pub total: u64,
    /// The rank's shard: its range in the flat parameter, and the view that stores it; `None` if the shard is empty.
    pub shard: Option<(Range<u64>, View)>,
    /// The number of ranks in the shard group, and the number of ranks in the job.
    pub group_sizes: Option<(u32, u32)>,
    /// The shards of all ranks, as this file lists them.
    pub listed_shards: Arc<[Region]>,
}

/// A tensor in a state dict that also has flat parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlainTensor {
    /// A parameter that is a view of its unit's flat parameter. `range` is the range of the view in the flat parameter.
    View {
        module: Box<str>,
        range: Range<u64>,
    },
    /// A 1-d tensor without elements, such as a parameter that has no element in the rank's shard.
    Empty,
    Other,
}

impl FlatState {
    /// Returns whether parameters are stored next to their flat parameters (`use_orig_params`).
    pub fn has_views(&self) -> bool {
        self.ranks
            .iter()
            .flat_map(|rank| rank.other_tensors.values())
            .any(|tensor| matches!(tensor, PlainTensor::View { .. }))
    }

    /// Returns the names of parameters that are views on at least one rank, in the order of the state dict.
    pub fn view_names(&self) -> Vec<&Fqn> {
        let mut views: HashSet<&Fqn> = HashSet::new();
        for rank in &self.ranks {
            views.extend(
                rank.other_tensors
                    .iter()
                    .filter(|(_, tensor)| matches!(tensor, PlainTensor::View { .. }))
                    .map(|(name, _)| name),
            );
        }
        let mut seen = HashSet::new();
        // All ranks have the same names, but a name may be a view on some ranks only.
        let names = self.ranks.iter().flat_map(|rank| rank.other_tensors.keys());
        names.filter(|name| views.contains(name) && seen.insert(*name)).collect()
    }

    /// Returns the module paths of all units. An outer unit comes before its inner units; units in the same outer unit
    /// are in the order of the files.
    pub fn unit_modules(&self) -> Vec<&str> {
        let mut seen = HashSet::new();
        let found = self.ranks.iter().flat_map(|rank| rank.flat_parts.keys()).map(|module| &**module);
        let found: Vec<&str> = found.filter(|module| seen.insert(*module)).collect();
        let mut within: HashMap<Option<&str>, Vec<&str>> = HashMap::new();
        for module in &found {
            within.entry(enclosing_unit(module, &seen)).or_default().push(module);
        }
        let mut ordered = Vec::new();
        let mut next: Vec<&str> = within.remove(&None).unwrap_or_default();
        next.reverse();
        while let Some(module) = next.pop() {
            ordered.push(module);
            next.extend(within.remove(&Some(module)).unwrap_or_default().into_iter().rev());
        }
        ordered
    }
}

/// Returns the innermost unit whose module contains `module`. A unit that wraps `module` itself is not returned.
fn enclosing_unit<'a>(module: &'a str, units: &HashSet<&str>) -> Option<&'a str> {
    if module.is_empty() {
        return None;
    }
    innermost_unit(module_of(module), units)
}

/// Returns the innermost unit whose module is `module` or contains `module`.
pub fn innermost_unit<'a>(module: &'a str, units: &HashSet<&str>) -> Option<&'a str> {
    let mut at = module;
    loop {
        if units.contains(at) {
            return Some(at);
        }
        if at.is_empty() {
            return None;
        }
        at = module_of(at);
    }
}

/// Returns every state dict with flat parameters in the files of one series.
///
/// # Errors
/// `Malformed` for an invalid flat parameter.
pub fn survey(files: &[RankFile]) -> Result<Vec<FlatState>> {
    let mut states: IndexMap<Path, FlatState> = IndexMap::new();
    for (index, file) in files.iter().enumerate() {
        let mut error = None;
        visit_dicts(&file.contents.value, &Path::default(), &mut |path, dict| match rank_state(index, file, dict) {
            Ok(None) => {}
            Ok(Some(own)) => {
                let make =
                    || FlatState { path: path.clone(), ranks: Vec::new(), module_positions: module_positions(dict) };
                states.entry(path.clone()).or_insert_with(make).ranks.push(own);
            }
            Err(found) => error = error.take().or(Some(found)),
        });
        if let Some(error) = error {
            return Err(error);
        }
    }
    Ok(states.into_values().collect())
}

/// Returns the position of each module in the `_metadata` of a state dict, which is the order of registration.
fn module_positions(dict: &Dict) -> Option<HashMap<Box<str>, usize>> {
    let mut positions = HashMap::new();
    for (position, module) in modules::registered_modules(dict)?.into_iter().enumerate() {
        positions.entry(module.into()).or_insert(position);
    }
    Some(positions)
}

/// Visits every dict that can be reached through dicts and lists.
pub fn visit_dicts<'a>(value: &'a Value, path: &Path, visit: &mut dyn FnMut(&Path, &'a Dict)) {
    match value {
        Value::Dict(dict) => {
            visit(path, dict);
            for (key, value) in &dict.entries {
                if matches!(value, Value::Dict(_) | Value::List(_)) {
                    visit_dicts(value, &path.child(Key::Name(key_text(key))), visit);
                }
            }
        }
        Value::List(items) => {
            for (index, value) in (0..).zip(items) {
                if matches!(value, Value::Dict(_) | Value::List(_)) {
                    visit_dicts(value, &path.child(Key::Index(index)), visit);
                }
            }
        }
        _ => {}
    }
}

fn rank_state(index: usize, file: &RankFile, dict: &Dict) -> Result<Option<RankState>> {
    let Some(rank) = file.rank else { return Ok(None) };
    let mut state = RankState {
        file_index: index,
        rank: rank.0,
        file_path: file.path.clone(),
        flat_parts: IndexMap::new(),
        other_tensors: IndexMap::new(),
    };
    let mut plain: Vec<(Fqn, &View)> = Vec::new();
    for (key, value) in &dict.entries {
        let (Some(name), Value::Tensor(id)) = (key.as_str(), value) else { continue };
        match &file.contents.tensors[id.0 as usize] {
            found @ TensorNode::Sharded { .. } => {
                let Some(module) = flat_module(name) else { continue };
                let part = flat_part(file, name, found)?;
                if state.flat_parts.insert(module, part).is_some() {
                    return Err(Error::malformed(&file.path, name, "one flat parameter per module", "a second one"));
                }
            }
            TensorNode::Plain(view) => plain.push((Fqn::from(clean_name(name)), view)),
            TensorNode::Distributed { .. } | TensorNode::Unreadable(_) => {}
        }
    }
    if state.flat_parts.is_empty() {
        return Ok(None);
    }
    // For the key of each storage that has a shard: the module of the unit, the range of the shard, and the view.
    let mut storages: HashMap<&str, (&str, &Range<u64>, &View)> = HashMap::new();
    for (module, part) in &state.flat_parts {
        if let Some((range, view)) = &part.shard {
            storages.insert(&view.key, (module, range, view));
        }
    }
    for (name, view) in plain {
        let numel: u64 = view.sizes.iter().product();
        let other = match (storages.get(&*view.key), view.sizes.as_slice()) {
            (_, [0]) => PlainTensor::Empty,
            (Some((module, range, flat)), [_]) => {
                let start = view.offset.checked_sub(flat.offset).and_then(|start| start.checked_add(range.start));
                let end = start.and_then(|start| start.checked_add(numel)).filter(|end| *end <= range.end);
                let dense = numel == 1 || view.strides.as_slice() == [1];
                let (Some(start), Some(end), true) = (start, end, dense && view.dtype == flat.dtype) else {
                    let expected =
                        format!("a view within elements {} to {} of its unit's flat parameter", range.start, range.end);
                    let found = format!("{numel} elements from element {} of the storage", view.offset);
                    return Err(Error::malformed(&file.path, name.as_str(), expected, found));
                };
                PlainTensor::View { module: (*module).into(), range: start..end }
            }
            _ => PlainTensor::Other,
        };
        state.other_tensors.insert(name, other);
    }
    Ok(Some(state))
}

fn flat_part(file: &RankFile, name: &str, found: &TensorNode) -> Result<FlatPart> {
    let bad = |expected: String, found: String| Err(Error::malformed(&file.path, name, expected, found));
    let TensorNode::Sharded { dtype, shape, group, local, all, .. } = found else { unreachable!("a ShardedTensor") };
    let [total] = shape.as_slice() else {
        return bad(String::from("a flat parameter of 1 dim"), format!("shape {:?}", shape.as_slice()));
    };
    if let Some(own) = file.rank.filter(|own| own.0 != group.rank) {
        return Err(FormatError::wrong_rank(&file.path, name, own, "ShardedTensor", Rank(group.rank)).into());
    }
    let shard = match local.as_slice() {
        [] => None,
        [(region, view)] => {
            let fits = region.fits(shape) && region.sizes == view.sizes && view.dtype == *dtype;
            let numel = region.numel();
            if !fits || numel > 1 && view.strides.as_slice() != [1] {
                let expected = format!("a contiguous shard of dtype {dtype} inside {total} elements");
                let found =
                    format!("offsets and sizes {region}, a tensor of {} {:?}", view.dtype, view.sizes.as_slice());
                return bad(expected, found);
            }
            if !all.contains(region) {
                return bad(String::from("a shard listed in shards_metadata"), format!("{region}"));
            }
            let start = region.offsets[0];
            (numel > 0).then(|| (start..start + numel, view.clone()))
        }
        several => return bad(String::from("one shard of a flat parameter"), several.len().to_string()),
    };
    let listed_shards = Arc::clone(all);
    Ok(FlatPart { key: Fqn::from(name), dtype: *dtype, total: *total, shard, group_sizes: group.sizes, listed_shards })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::catalog::flat::FLAT_PARAM;

    /// A rank number, and the views in the file of this rank: for each view the path of the unit's module, the name of
    /// the parameter, and the range in the flat parameter.
    pub type Views<'a> = (u32, &'a [(&'a str, &'a str, Range<u64>)]);

    /// Returns a state dict with flat parameters of length `total`, whose rank files have the views `ranks`. `sizes`
    /// has the number of ranks in a shard group and in the job.
    pub fn state_of_views(total: u64, sizes: (u32, u32), ranks: &[Views<'_>]) -> FlatState {
        let rank_state = |(rank, views): &Views<'_>| {
            let (mut flat_parts, mut other_tensors) = (IndexMap::new(), IndexMap::new());
            for (module, name, range) in *views {
                let part = FlatPart {
                    key: format!("{module}.{FLAT_PARAM}").into(),
                    dtype: Dtype::F32,
                    total,
                    shard: None,
                    group_sizes: Some(sizes),
                    listed_shards: Arc::default(),
                };
                flat_parts.entry(Box::from(*module)).or_insert(part);
                other_tensors
                    .insert(Fqn::from(*name), PlainTensor::View { module: (*module).into(), range: range.clone() });
            }
            RankState {
                file_index: *rank as usize,
                rank: *rank,
                file_path: format!("rank_{rank}.pt").into(),
                flat_parts,
                other_tensors,
            }
        };
        FlatState { path: Path::default(), ranks: ranks.iter().map(rank_state).collect(), module_positions: None }
    }

    #[test]
    fn outer_units_come_before_inner_units() {
        let inner_first =
            [("a.b.c", "x", 0..1), ("a.b", "x", 0..1), ("a.b2", "x", 0..1), ("", "x", 0..1), ("z", "x", 0..1)];
        let state = state_of_views(1, (1, 1), &[(0, &inner_first)]);
        assert_eq!(state.unit_modules(), ["", "a.b", "a.b.c", "a.b2", "z"]);
        let rootless = [("b.x", "x", 0..1), ("a", "x", 0..1), ("b", "x", 0..1)];
        assert_eq!(state_of_views(1, (1, 1), &[(0, &rootless)]).unit_modules(), ["a", "b", "b.x"]);
        let units = HashSet::from(["", "a.b"]);
        assert_eq!(
            (innermost_unit("a.b.c.d", &units), innermost_unit("a.bc", &units), innermost_unit("x", &HashSet::new())),
            (Some("a.b"), Some(""), None)
        );
    }
}
