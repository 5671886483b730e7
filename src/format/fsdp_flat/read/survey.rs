//! What rank files hold of flat parameters, before anything is known of the model.
//!
//! A state dict with flat parameters has, a unit, the key `<module>._flat_param`: a 1-d ShardedTensor of which the rank
//! holds at most one stretch. With `use_orig_params` the parameters stand beside it, as 1-d views of the same storage;
//! what a rank holds nothing of is empty. Everything else is a buffer. Counts elements.
//!
//! Source: `_local_post_state_dict_hook` in `torch/distributed/fsdp/_state_dict_utils.py`.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use indexmap::IndexMap;

use crate::catalog::flat::FLAT_PARAM;
use crate::catalog::modules::{self, module_of};
use crate::catalog::path::key_text;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Dict, Dtype, Fqn, Key, Path, Value};
use crate::error::{Error, Result};
use crate::format::torch::ranks::RankFile;
use crate::format::torch::{TensorNode, View};
use crate::layout::Region;

/// A state dict with flat parameters, as all ranks have it.
#[derive(Debug)]
pub struct FlatState {
    pub path: Path,
    /// One a file that has it.
    pub ranks: Vec<RankState>,
    /// Which module is registered before which, where the state dict has PyTorch's `_metadata`.
    pub registered: Option<HashMap<Box<str>, usize>>,
}

/// A state dict with flat parameters in one rank's file.
#[derive(Debug)]
pub struct RankState {
    /// Which of the files.
    pub file: usize,
    pub rank: u32,
    pub at: PathBuf,
    /// By module.
    pub flats: IndexMap<Box<str>, FlatPart>,
    /// The other tensors, in the order of the file.
    pub beside: IndexMap<Fqn, PlainTensor>,
}

/// What one rank has of a flat parameter.
#[derive(Debug)]
pub struct FlatPart {
    pub key: Fqn,
    pub dtype: Dtype,
    pub total: u64,
    /// Where its stretch lies in the flat parameter, and in the file; `None` where it has no element.
    pub stretch: Option<(Range<u64>, View)>,
    /// Ranks of the shard group and of the job.
    pub sizes: Option<(u32, u32)>,
    /// The stretches of all ranks.
    pub listed: Arc<[Region]>,
}

/// A tensor beside flat parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlainTensor {
    /// A stretch of a parameter that is a view of its unit's flat parameter, and where it lies in that.
    View {
        module: Box<str>,
        range: Range<u64>,
    },
    /// 1-d and without elements, as a parameter that the rank holds nothing of.
    Empty,
    Other,
}

impl FlatState {
    /// Whether parameters stand beside their flat ones: `use_orig_params`.
    #[must_use]
    pub fn has_views(&self) -> bool {
        self.ranks.iter().flat_map(|rank| rank.beside.values()).any(|beside| matches!(beside, PlainTensor::View { .. }))
    }

    /// The names of parameters that are views on any rank, in the order of the state dict.
    #[must_use]
    pub fn parameters(&self) -> Vec<&Fqn> {
        let mut views: HashSet<&Fqn> = HashSet::new();
        for rank in &self.ranks {
            views.extend(
                rank.beside.iter().filter(|(_, is)| matches!(is, PlainTensor::View { .. })).map(|(name, _)| name),
            );
        }
        let mut seen = HashSet::new();
        // All ranks have all names.
        let names = self.ranks.iter().flat_map(|rank| rank.beside.keys());
        names.filter(|name| views.contains(name) && seen.insert(*name)).collect()
    }

    /// The units, each before those within it, siblings in the order of the files.
    #[must_use]
    pub fn modules(&self) -> Vec<&str> {
        let mut seen = HashSet::new();
        let found = self.ranks.iter().flat_map(|rank| rank.flats.keys()).map(|module| &**module);
        let found: Vec<&str> = found.filter(|module| seen.insert(*module)).collect();
        let mut within: HashMap<Option<&str>, Vec<&str>> = HashMap::new();
        for module in &found {
            within.entry(enclosing(module, &seen)).or_default().push(module);
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

/// The unit around a module, which may be one itself.
fn enclosing<'a>(module: &'a str, units: &HashSet<&str>) -> Option<&'a str> {
    if module.is_empty() {
        return None;
    }
    unit_of(module_of(module), units)
}

/// The innermost unit that a module is, or lies in.
pub fn unit_of<'a>(module: &'a str, units: &HashSet<&str>) -> Option<&'a str> {
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

/// The module of a flat parameter's key, without wrappers; `None` for other keys.
pub fn flat_module(key: &str) -> Option<Box<str>> {
    let module = match key.strip_suffix(FLAT_PARAM)? {
        "" => "",
        module => module.strip_suffix('.')?,
    };
    Some(clean_name(module).into())
}

/// Every state dict with flat parameters of the files of one series.
///
/// # Errors
/// `Malformed` for a flat parameter that is none.
pub fn survey(files: &[RankFile]) -> Result<Vec<FlatState>> {
    let mut states: IndexMap<Path, FlatState> = IndexMap::new();
    for (index, file) in files.iter().enumerate() {
        let mut error = None;
        visit_dicts(&file.contents.value, &Path::default(), &mut |path, dict| match rank_state(index, file, dict) {
            Ok(None) => {}
            Ok(Some(own)) => {
                let make = || FlatState { path: path.clone(), ranks: Vec::new(), registered: positions(dict) };
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

/// The places of modules in the order in which a state dict visits them.
fn positions(dict: &Dict) -> Option<HashMap<Box<str>, usize>> {
    let mut positions = HashMap::new();
    for (position, module) in modules::registered_modules(dict)?.into_iter().enumerate() {
        positions.entry(module.into()).or_insert(position);
    }
    Some(positions)
}

/// Every dict that names lead to.
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
    let mut state =
        RankState { file: index, rank: rank.0, at: file.path.clone(), flats: IndexMap::new(), beside: IndexMap::new() };
    let mut plain: Vec<(Fqn, &View)> = Vec::new();
    for (key, value) in &dict.entries {
        let (Some(name), Value::Tensor(id)) = (key.as_str(), value) else { continue };
        match &file.contents.tensors[id.0 as usize] {
            found @ TensorNode::Sharded { .. } => {
                let Some(module) = flat_module(name) else { continue };
                let part = flat_part(file, name, found)?;
                if state.flats.insert(module, part).is_some() {
                    return Err(Error::malformed(&file.path, name, "one flat parameter a module", "another one"));
                }
            }
            TensorNode::Plain(view) => plain.push((Fqn::from(clean_name(name)), view)),
            TensorNode::Distributed { .. } => {}
        }
    }
    if state.flats.is_empty() {
        return Ok(None);
    }
    // Of each storage, the module and its stretch.
    let mut storages: HashMap<&str, (&str, &Range<u64>, &View)> = HashMap::new();
    for (module, part) in &state.flats {
        if let Some((range, view)) = &part.stretch {
            storages.insert(&view.key, (module, range, view));
        }
    }
    for (name, view) in plain {
        let numel: u64 = view.sizes.iter().product();
        let beside = match (storages.get(&*view.key), view.sizes.as_slice()) {
            (_, [0]) => PlainTensor::Empty,
            (Some((module, range, flat)), [_]) => {
                let start = view.offset.checked_sub(flat.offset).and_then(|start| start.checked_add(range.start));
                let end = start.and_then(|start| start.checked_add(numel)).filter(|end| *end <= range.end);
                let dense = numel == 1 || view.strides.as_slice() == [1];
                let (Some(start), Some(end), true) = (start, end, dense && view.dtype == flat.dtype) else {
                    let expected = format!("elements {} to {} of its unit's flat parameter", range.start, range.end);
                    let found = format!("{numel} from element {} of the storage", view.offset);
                    return Err(Error::malformed(&file.path, name.as_str(), expected, found));
                };
                PlainTensor::View { module: (*module).into(), range: start..end }
            }
            _ => PlainTensor::Other,
        };
        state.beside.insert(name, beside);
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
        let found = format!("a ShardedTensor saved by rank {}: the name of the file does not say its rank", group.rank);
        return bad(format!("the file of rank {own}"), found);
    }
    let stretch = match local.as_slice() {
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
    let listed = Arc::clone(all);
    Ok(FlatPart { key: Fqn::from(name), dtype: *dtype, total: *total, stretch, sizes: group.sizes, listed })
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A rank, and of what it holds the module, the name and where it lies.
    pub type Views<'a> = (u32, &'a [(&'a str, &'a str, Range<u64>)]);

    /// A state dict with views.
    pub fn state_of_views(total: u64, sizes: (u32, u32), ranks: &[Views<'_>]) -> FlatState {
        let rank_state = |(rank, views): &Views<'_>| {
            let (mut flats, mut beside) = (IndexMap::new(), IndexMap::new());
            for (module, name, range) in *views {
                let part = FlatPart {
                    key: format!("{module}.{FLAT_PARAM}").into(),
                    dtype: Dtype::F32,
                    total,
                    stretch: None,
                    sizes: Some(sizes),
                    listed: Arc::default(),
                };
                flats.entry(Box::from(*module)).or_insert(part);
                beside.insert(Fqn::from(*name), PlainTensor::View { module: (*module).into(), range: range.clone() });
            }
            RankState { file: *rank as usize, rank: *rank, at: format!("rank_{rank}.pt").into(), flats, beside }
        };
        FlatState { path: Path::default(), ranks: ranks.iter().map(rank_state).collect(), registered: None }
    }

    #[test]
    fn keys_of_flat_parameters() {
        for (key, module) in [
            ("_flat_param", Some("")),
            ("layers.0._flat_param", Some("layers.0")),
            ("_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._flat_param", Some("layers.0")),
            ("my_flat_param", None),
            ("_flat_param.x", None),
            ("", None),
        ] {
            assert_eq!(flat_module(key).as_deref(), module, "{key}");
        }
    }

    #[test]
    fn units_come_before_those_within_them() {
        let inner_first =
            [("a.b.c", "x", 0..1), ("a.b", "x", 0..1), ("a.b2", "x", 0..1), ("", "x", 0..1), ("z", "x", 0..1)];
        let state = state_of_views(1, (1, 1), &[(0, &inner_first)]);
        assert_eq!(state.modules(), ["", "a.b", "a.b.c", "a.b2", "z"]);
        let rootless = [("b.x", "x", 0..1), ("a", "x", 0..1), ("b", "x", 0..1)];
        assert_eq!(state_of_views(1, (1, 1), &[(0, &rootless)]).modules(), ["a", "b", "b.x"]);
        let units = HashSet::from(["", "a.b"]);
        assert_eq!(
            (unit_of("a.b.c.d", &units), unit_of("a.bc", &units), unit_of("x", &HashSet::new())),
            (Some("a.b"), Some(""), None)
        );
    }
}
