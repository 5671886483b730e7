//! Checks a flat layout against the state dict of the model, for checkpoints in which the optimizer has state of flat
//! parameters, but the model has no flat parameters.
//!
//! The state dict of such a model has the name and the shape of every parameter. If the state dict has PyTorch's
//! `_metadata`, it also records which modules FSDP1 wraps, and the order in which the modules were registered; FSDP1
//! traverses the modules in this order. A layout that contradicts this record is an error, because it would assign
//! optimizer state to wrong parameters. The check uses only what the state dict records.
//!
//! Source: `FlatParamHandle._init_flat_param_and_metadata` in `torch/distributed/fsdp/_flat_param.py`.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use super::survey::{innermost_unit, visit_dicts};
use super::totals::LayoutMismatch;
use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit};
use crate::catalog::modules::{metadata, module_of, registered_modules};
use crate::catalog::wrappers::{FSDP_WRAPPED, clean_name};
use crate::catalog::{Dict, Dtype, Fqn, Path, Value, contiguous_strides};
use crate::error::Result;
use crate::format::torch::{RankFile, TensorNode, View};
use crate::layout::Dims;

/// The parameters and modules of a model, as the state dict of the model records them.
#[derive(Debug)]
pub struct ModelRecord {
    pub file: PathBuf,
    /// The parameters, in the order of registration if the state dict records this order. A tied parameter is in the list
    /// under each of its names.
    pub params: Vec<RecordedParam>,
    /// True if every tensor in `params` is a parameter, because FSDP1 shards it. False if `params` has all tensors of a
    /// model that is not sharded, some of which may be buffers.
    pub are_sharded: bool,
    /// The paths of the modules that FSDP1 wraps, in the order of registration. Empty if the state dict does not record
    /// which modules are wrapped.
    pub wrapped: Vec<String>,
    /// The names of all tensors that are not in `params`: buffers, and parameters that FSDP1 does not shard.
    pub others: HashSet<Fqn>,
    /// The modules in the state dict's `_metadata`.
    registered: HashSet<String>,
}

/// A parameter and its dtype.
#[derive(Debug)]
pub struct RecordedParam {
    pub param: FlatParam,
    pub dtype: Dtype,
}

/// The shape, the strides and the dtype of a tensor. The strides are `None` for a row-major tensor.
pub struct TensorMeta {
    pub shape: Dims,
    pub stride: Option<Dims>,
    pub dtype: Dtype,
}

impl TensorMeta {
    /// Returns the metadata of a plain tensor.
    pub fn of_view(view: &View) -> Self {
        Self::of_part(view, &view.sizes)
    }

    /// Returns the metadata of a whole tensor with the shape `shape`. `part` is the part of the tensor on one rank; the
    /// strides of the part show the memory order of the tensor.
    pub fn of_part(part: &View, shape: &Dims) -> Self {
        let mut dims: Vec<usize> = (0..shape.len().min(part.sizes.len())).collect();
        // The stride of a dim of size 1 is meaningless.
        dims.sort_by_key(|&dim| Reverse(if part.sizes[dim] > 1 { part.strides[dim] } else { u64::MAX }));
        let is_row_major = dims.iter().filter(|&&dim| part.sizes[dim] > 1).is_sorted();
        let mut stride: Dims = shape.iter().map(|_| 1).collect();
        for pair in dims.windows(2).rev() {
            stride[pair[0]] = stride[pair[1]].saturating_mul(shape[pair[1]]);
        }
        let stride = (!is_row_major && part.sizes.iter().all(|size| *size > 0)).then_some(stride);
        Self { shape: shape.clone(), stride, dtype: part.dtype }
    }
}

impl ModelRecord {
    /// Reads the record of a state dict. `find` returns the metadata of a parameter, and `None` for any other tensor.
    pub fn new(
        file: &RankFile,
        dict: &Dict,
        are_sharded: bool,
        mut find: impl FnMut(&TensorNode) -> Option<TensorMeta>,
    ) -> Self {
        let mut positions: HashMap<String, usize> = HashMap::new();
        for (position, module) in registered_modules(dict).into_iter().flatten().enumerate() {
            positions.entry(module).or_insert(position);
        }
        let mut record = Self {
            file: file.path.clone(),
            params: Vec::new(),
            are_sharded,
            wrapped: wrapped_modules(dict),
            others: HashSet::new(),
            registered: HashSet::new(),
        };
        for (key, value) in &dict.entries {
            let (Some(key), Value::Tensor(id)) = (key.as_str(), value) else { continue };
            let fqn = Fqn::from(clean_name(key));
            match find(&file.contents.tensors[id.0 as usize]) {
                Some(TensorMeta { shape, stride, dtype }) => {
                    record.params.push(RecordedParam { param: FlatParam { fqn, shape, stride }, dtype });
                }
                None => drop(record.others.insert(fqn)),
            }
        }
        record.params.sort_by_cached_key(|RecordedParam { param, .. }| {
            positions.get(module_of(param.fqn.as_str())).copied().unwrap_or(usize::MAX)
        });
        record.registered = positions.into_keys().collect();
        record
    }

    /// Makes a record of parameters for tests.
    #[cfg(test)]
    pub fn of_params(params: Vec<FlatParam>, dtype: Dtype) -> Self {
        Self {
            file: PathBuf::new(),
            params: params.into_iter().map(|param| RecordedParam { param, dtype }).collect(),
            are_sharded: true,
            wrapped: vec![String::new()],
            others: HashSet::new(),
            registered: HashSet::new(),
        }
    }

    /// Finds the model of a job with `NO_SHARD`: the first state dict with a plain tensor that has the name of a parameter
    /// in the layout.
    pub fn of_whole_model(files: &[RankFile], layout: &FlatLayout) -> Option<Self> {
        let file = files.first()?;
        let names: HashSet<&Fqn> = layout.params().map(|(_, param)| &param.fqn).collect();
        let mut found = None;
        visit_dicts(&file.contents.value, &Path::default(), &mut |_, dict| {
            let has_name = |key: &Value| key.as_str().is_some_and(|key| names.contains(&Fqn::from(clean_name(key))));
            let is_param = |(key, value): &(Value, Value)| matches!(value, Value::Tensor(_)) && has_name(key);
            if found.is_none() && dict.entries.iter().any(is_param) {
                found = Some(Self::new(file, dict, false, |node| match node {
                    TensorNode::Plain(view) => Some(TensorMeta::of_view(view)),
                    _ => None,
                }));
            }
        });
        found
    }

    /// Returns the parameters.
    pub fn params(&self) -> impl Iterator<Item = &FlatParam> {
        self.params.iter().map(|recorded| &recorded.param)
    }

    /// Returns the names of all tensors.
    pub fn names(&self) -> HashSet<Fqn> {
        self.params().map(|param| &param.fqn).chain(&self.others).cloned().collect()
    }

    /// Returns the positions of the recorded parameters and units in the order of registration. `layout` gives the
    /// modules of the units.
    fn traversal<'a>(&'a self, layout: &'a FlatLayout) -> Traversal<'a> {
        let names = self.params().map(|param| &param.fqn).zip(0..);
        let is_registered = |(fqn, _): &(&Fqn, usize)| self.registered.contains(module_of(fqn.as_str()));
        Traversal {
            params: names.filter(is_registered).collect(),
            units: self.wrapped.iter().map(String::as_str).zip(0..).collect(),
            modules: layout.units.iter().map(|unit| &*unit.module).collect(),
        }
    }

    /// Returns the names of the tensors that an optimizer with one parameter group updates, in the order of their
    /// parameter ids. With `use_orig_params` these tensors are parameters, otherwise flat parameters. Returns `None` if
    /// the state dict does not record the order of registration.
    pub fn optimizer_order(&self, layout: &FlatLayout) -> Option<Vec<Fqn>> {
        let traversal = self.traversal(layout);
        let mut names = Vec::new();
        if layout.use_orig_params {
            for (unit, param) in layout.params() {
                names.push((traversal.position(unit, param)?, param.fqn.clone()));
            }
        } else {
            for unit in layout.units.iter().filter(|unit| !unit.params.is_empty()) {
                names.push((*traversal.units.get(&*unit.module)?, unit.key()));
            }
        }
        names.sort();
        Some(names.into_iter().map(|(_, name)| name).collect())
    }

    /// Checks a flat layout against this record. Errors name `source` as the origin of the layout.
    ///
    /// # Errors
    /// `Conflict` for the first difference, naming the parameter or the unit.
    pub fn check(&self, layout: &FlatLayout, source: &str) -> Result<()> {
        let misfit = LayoutMismatch { file: &self.file, source };
        let recorded: HashMap<&Fqn, &FlatParam> = self.params().map(|param| (&param.fqn, param)).collect();
        let wrapped: HashSet<&str> = self.wrapped.iter().map(String::as_str).collect();
        let mut names_of: HashMap<&Fqn, Vec<&Fqn>> = HashMap::new();
        for shared in layout.units.iter().flat_map(|unit| &unit.shared) {
            names_of.entry(&shared.with).or_default().push(&shared.fqn);
        }
        let mut listed: HashSet<&Fqn> = HashSet::new();
        for (unit, param) in layout.params() {
            let aliases = names_of.get(&param.fqn).into_iter().flatten().copied();
            let names: Vec<&Fqn> = std::iter::once(&param.fqn).chain(aliases).collect();
            if !names.iter().any(|name| recorded.contains_key(name)) {
                let expected = format!("a parameter of shape {:?}", param.shape.as_slice());
                return Err(misfit.error(param.fqn.as_str(), expected, self.describe_unknown(&param.fqn)));
            }
            for found in names.iter().filter_map(|name| recorded.get(name)) {
                check_param(param, found, misfit)?;
            }
            if recorded.contains_key(&param.fqn)
                && let Some(module) = innermost_unit(module_of(param.fqn.as_str()), &wrapped)
                && module != &*unit.module
            {
                let found = format!("a parameter of {}", FlatUnit::new(module, None).describe());
                return Err(misfit.error(param.fqn.as_str(), format!("a parameter of {}", unit.describe()), found));
            }
            listed.extend(names);
        }
        if let Some(missing) = self.params().find(|param| self.are_sharded && !listed.contains(&param.fqn)) {
            let found = format!("a parameter of shape {:?}", missing.shape.as_slice());
            return Err(misfit.error(missing.fqn.as_str(), "no parameter of this name", found));
        }
        self.check_order(layout, misfit)
    }

    /// Returns a description of a name that no parameter of the model has.
    fn describe_unknown(&self, name: &Fqn) -> String {
        if self.others.contains(name) {
            return String::from("a tensor that FSDP1 does not shard");
        }
        let is_below = |long: &Fqn, short: &Fqn| {
            long.as_str().strip_suffix(short.as_str()).is_some_and(|prefix| prefix.ends_with('.'))
        };
        let similar = self.params().find(|param| is_below(&param.fqn, name) || is_below(name, &param.fqn));
        let other = similar.map(|param| format!(", but `{}`", param.fqn)).unwrap_or_default();
        format!("no parameter of this name{other}")
    }

    /// Checks that the parameters of each unit are in the order of registration, and that parameters of equal length
    /// are in this order in each group of the optimizer. The order of parameters of different lengths in a group is not
    /// checked here: if it is wrong, the optimizer state later turns out to have wrong lengths.
    fn check_order(&self, layout: &FlatLayout, misfit: LayoutMismatch<'_>) -> Result<()> {
        let traversal = self.traversal(layout);
        let mut lengths: HashMap<Fqn, (u64, usize)> = HashMap::new();
        for unit in &layout.units {
            let mut last: Option<(usize, &Fqn)> = None;
            for param in &unit.params {
                let Some(position) = traversal.position(unit, param) else { continue };
                if let Some((_, before)) = last.filter(|(highest, _)| *highest > position) {
                    let (expected, found) = describe_orders(before, &param.fqn);
                    return Err(misfit.error(&unit.describe(), expected, found));
                }
                last = Some((position, &param.fqn));
                if layout.use_orig_params {
                    lengths.insert(param.fqn.clone(), (param.numel(), position));
                }
            }
            if let (Some(position), false) = (traversal.units.get(&*unit.module), layout.use_orig_params) {
                lengths.insert(unit.key(), (layout.flat(unit).total(), *position));
            }
        }
        check_groups(layout, &lengths, misfit)
    }
}

/// The positions of parameters and units in the order of registration. Parameters and units that the state dict does
/// not record are absent.
struct Traversal<'a> {
    params: HashMap<&'a Fqn, usize>,
    units: HashMap<&'a str, usize>,
    /// The modules of the units of the layout.
    modules: HashSet<&'a str>,
}

impl Traversal<'_> {
    /// Returns the position at which FSDP1's traversal of the modules finds a parameter. A tied parameter has a
    /// position for each of its names in the unit; the first of these positions is returned. Returns `None` if the
    /// state dict does not record a position.
    fn position(&self, unit: &FlatUnit, param: &FlatParam) -> Option<usize> {
        let is_own = |name: &&Fqn| innermost_unit(module_of(name.as_str()), &self.modules) == Some(&*unit.module);
        let aliases = unit.shared.iter().filter(|shared| shared.with == param.fqn).map(|shared| &shared.fqn);
        let names = std::iter::once(&param.fqn).chain(aliases.filter(is_own));
        names.filter_map(|name| self.params.get(name).copied()).min()
    }
}

/// Checks that a parameter of the layout has the shape and the strides of the parameter in the state dict. Row-major
/// strides in the state dict are not compared, because a tool may have copied the model in row-major order.
fn check_param(param: &FlatParam, found: &FlatParam, misfit: LayoutMismatch<'_>) -> Result<()> {
    let name = found.fqn.as_str();
    if param.shape != found.shape {
        let shape = |param: &FlatParam| format!("shape {:?}", param.shape.as_slice());
        return Err(misfit.error(name, shape(param), shape(found)));
    }
    // Row-major strides do not show the memory order in the job: a tool may have copied the model in row-major order.
    let Some(stride) = &found.stride else { return Ok(()) };
    let expected = param.stride.clone().unwrap_or_else(|| contiguous_strides(&param.shape));
    let differ =
        (param.shape.iter().zip(expected.iter().zip(stride))).any(|(size, (own, other))| *size > 1 && own != other);
    if differ {
        let strides = |stride: &Dims| format!("strides {:?}", stride.as_slice());
        return Err(misfit.error(name, strides(&expected), strides(stride)));
    }
    Ok(())
}

/// Checks that parameters of equal length are in the order of registration in each group of the optimizer. `lengths` has
/// the length and the position of each parameter that the optimizer may list.
///
/// # Errors
/// `Conflict` naming the first parameter that comes too late.
pub fn check_groups(
    layout: &FlatLayout,
    lengths: &HashMap<Fqn, (u64, usize)>,
    misfit: LayoutMismatch<'_>,
) -> Result<()> {
    for group in layout.optimizer.iter().flatten() {
        let mut last: HashMap<u64, (usize, &Fqn)> = HashMap::new();
        for name in group {
            let Some((length, position)) = lengths.get(name) else { continue };
            if let Some((_, before)) = last.get(length).filter(|(highest, _)| highest > position) {
                let (expected, found) = describe_orders(before, name);
                return Err(misfit.optimizer_error(expected, found));
            }
            last.insert(*length, (*position, name));
        }
    }
    Ok(())
}

/// Returns a description of the order in the layout and of the order in the model, for an error.
fn describe_orders(first: &Fqn, second: &Fqn) -> (String, String) {
    (format!("{first} before {second}"), format!("{second} before {first}, as the model registers them"))
}

/// Returns the paths of the modules that FSDP1 wraps, in the order of registration.
pub fn wrapped_modules(dict: &Dict) -> Vec<String> {
    let paths = metadata(dict).into_iter().flat_map(|paths| &paths.entries).filter_map(|(path, _)| path.as_str());
    let wrapped = |path: &str| Some(path.strip_suffix(FSDP_WRAPPED)?.trim_end_matches('.').to_owned());
    paths.filter_map(wrapped).map(|path| clean_name(&path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_a_tensor_shows_the_memory_order_of_the_tensor() {
        let stride = |sizes: &[u64], strides: &[u64], shape: &[u64]| {
            let (sizes, strides) = (sizes.into(), strides.into());
            let part = View { dtype: Dtype::F32, key: "0".into(), storage_bytes: 0, offset: 0, sizes, strides };
            TensorMeta::of_part(&part, &shape.into()).stride.map(|stride| stride.to_vec())
        };
        assert_eq!(stride(&[3, 2, 2, 2], &[8, 1, 4, 2], &[6, 2, 2, 2]), Some(vec![8, 1, 4, 2]));
        assert_eq!(stride(&[2, 6], &[1, 2], &[4, 6]), Some(vec![1, 4]));
        assert_eq!(stride(&[2, 6], &[6, 1], &[4, 6]), None);
        // One row has the same order in both memory orders.
        assert_eq!(stride(&[1, 6], &[1, 1], &[4, 6]), None);
        assert_eq!(stride(&[0, 6], &[1, 1], &[4, 6]), None);
        assert_eq!(stride(&[], &[], &[]), None);
    }
}
