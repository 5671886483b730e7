//! Finds the flat layout of an FSDP1 job whose model was saved with `SHARDED_STATE_DICT`, and whose optimizer was saved
//! with `optimizer.state_dict()`. verl saves such checkpoints.
//!
//! The model is in DTensors or ShardedTensors, or under `NO_SHARD` in plain tensors, but the optimizer has state of flat
//! parameters. The state dict of the model records everything that a flat layout needs: `_metadata` lists the modules in
//! the order of registration and shows which of them FSDP1 wraps, and the tensors have names and shapes. The lengths of
//! the optimizer state are checked against the layout, and show which parameters are tied. Unit of lengths: elements.
//!
//! Source: `FlatParamHandle._init_flat_param_and_metadata` in `torch/distributed/fsdp/_flat_param.py`.

use std::collections::{HashMap, HashSet};
use std::path::Path as FilePath;

use super::model_record::{ModelRecord, RecordedParam, TensorMeta, wrapped_modules};
use super::optimizer::{group_numbers, optimizer_state, unknown_groups};
use super::survey::{innermost_unit, visit_dicts};
use crate::catalog::flat::{ALIGNMENTS, FlatLayout, FlatParam, FlatUnit, SharedName};
use crate::catalog::modules::module_of;
use crate::catalog::{Dict, Fqn, Path, Value};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::document;
use crate::format::torch::{RankFile, TensorNode};
use crate::layout::{Dims, Placement, TensorDim, numel};

/// The model of an FSDP1 job, as its state dict with sharded parameters describes it.
#[derive(Debug)]
pub struct ShardedModel {
    pub record: ModelRecord,
    /// The units with their parameters, in the order of registration. A tied parameter is in the list under each of its
    /// names. Empty if the state dict does not record which modules FSDP1 wraps.
    units: Vec<FlatUnit>,
    /// The lengths of the 1-d tensors of the model: of each whole tensor, and of its part on one rank.
    vector_lengths: HashSet<u64>,
    /// The number of ranks that shard a parameter, and the number of ranks in the job.
    sizes: (u32, u32),
}

/// For each parameter id with state: the length of the state on each rank that has the state.
type StateLengths = HashMap<i64, Vec<StateLength>>;

/// The length of the state of one parameter on one rank: the number of elements of the first tensor of the state that is
/// not 0-d.
#[derive(Clone, Copy)]
struct StateLength {
    rank: u32,
    len: u64,
    /// Whether the tensor is 1-d, as state of flat parameters is.
    is_vector: bool,
}

impl ShardedModel {
    /// Finds the model in the files of a series. Returns `None` if no file has a model with sharded parameters.
    pub fn find(files: &[RankFile]) -> Option<Self> {
        let file = files.first()?;
        let mut found = None;
        visit_dicts(&file.contents.value, &Path::default(), &mut |_, dict| {
            if found.is_none() {
                found = Self::from_state_dict(file, dict, files.len());
            }
        });
        found
    }

    /// Reads the model from a state dict of a job with `ranks` ranks. Returns `None` if the state dict is not a model
    /// that FSDP1 shards. Under `NO_SHARD`, which FSDP1 uses if a shard group has one rank, all tensors of the state
    /// dict are plain tensors.
    fn from_state_dict(file: &RankFile, dict: &Dict, ranks: usize) -> Option<Self> {
        let records_units = !wrapped_modules(dict).is_empty();
        let is_plain = |(_, value): &(_, Value)| match value {
            Value::Tensor(id) => matches!(file.contents.tensors[id.0 as usize], TensorNode::Plain(_)),
            _ => true,
        };
        let is_no_shard = records_units && dict.entries.iter().all(is_plain);
        let unsharded = (1, u32::try_from(ranks).ok()?);
        let mut sizes: Vec<(u32, u32)> = Vec::new();
        let mut vector_lengths = HashSet::new();
        let record = ModelRecord::new(file, dict, !is_no_shard, |node| {
            vector_lengths.extend(lengths_of_vector(node));
            let (meta, own_sizes) = match node {
                TensorNode::Plain(view) if is_no_shard => (TensorMeta::of_view(view), unsharded),
                found => sharded(found)?,
            };
            sizes.push(own_sizes);
            Some(meta)
        });
        let sizes = sizes.iter().all(|own| *own == sizes[0]).then(|| sizes.first().copied()).flatten();
        let sizes = sizes.filter(|(group, world)| *group > 0 && world.is_multiple_of(*group))?;
        let known: HashSet<&str> = record.wrapped.iter().map(String::as_str).collect();
        let mut units: Vec<FlatUnit> =
            record.wrapped.iter().map(|module| FlatUnit::new(module.as_str(), None)).collect();
        let positions: HashMap<&str, usize> = record.wrapped.iter().map(String::as_str).zip(0..).collect();
        for RecordedParam { param, dtype } in record.params.iter().filter(|_| records_units) {
            let unit = &mut units[positions[innermost_unit(module_of(param.fqn.as_str()), &known)?]];
            unit.dtype.get_or_insert(*dtype);
            unit.params.push(param.clone());
        }
        units.retain(|unit| !unit.params.is_empty());
        Some(Self { record, units, vector_lengths, sizes })
    }

    /// Returns whether the optimizer at a path may have state of flat parameters: the model records which modules FSDP1
    /// wraps, or some state is a 1-d tensor with a length that no 1-d tensor of the model has.
    pub fn has_flat_state(&self, files: &[RankFile], at: &Path) -> bool {
        !self.units.is_empty() || self.has_other_vectors(files, at)
    }

    /// Returns whether some state of the optimizer at a path is a 1-d tensor with a length that no 1-d tensor of the model
    /// has.
    pub fn has_other_vectors(&self, files: &[RankFile], at: &Path) -> bool {
        let mut lengths = state_lengths(files, at).into_values().flatten();
        lengths.any(|state| state.is_vector && !self.vector_lengths.contains(&state.len))
    }

    /// Returns whether the job uses `NO_SHARD`.
    pub fn is_no_shard(&self) -> bool {
        self.sizes.0 == 1
    }

    /// Returns the flat layout of the optimizer at a path. With `use_orig_params` the optimizer has a parameter id for
    /// each parameter, otherwise for each flat parameter. The number of parameter ids and the lengths of the state show
    /// which of the two holds.
    ///
    /// # Errors
    /// `Unsupported` if no layout matches the number of parameter ids and the lengths, if several match, if the
    /// optimizer has several parameter groups, or if the model does not record the memory order of every parameter;
    /// `Malformed` if the model is damaged.
    pub fn layout(&self, files: &[RankFile], at: &Path) -> Result<FlatLayout> {
        if self.units.is_empty() {
            return Err(unknown_layout(format!(
                "{}: the optimizer seems to have state of FSDP1's flat parameters, but the model in {} does not record which \
                 modules FSDP1 wraps (`_metadata` of its state dict)",
                files.first().map_or(FilePath::new(""), |file| &file.path).display(),
                self.record.file.display()
            )));
        }
        let lengths = state_lengths(files, at);
        let first = files.first().and_then(|file| at.find(&file.contents.value)?.as_dict());
        let groups = first.and_then(group_numbers).unwrap_or_default();
        // A parameter group may have any parameters, and the lengths of the state do not always show which.
        if groups.len() > 1 {
            return Err(unknown_groups(at, groups.len()));
        }
        let count = groups.iter().flatten().count();
        let found = if count == self.units.len() { self.flat(&lengths) } else { None };
        let Some((mut layout, numbered)) = found.or_else(|| self.views(count, &lengths)) else {
            return Err(unknown_layout(format!(
                "{}: the optimizer has {count} parameters, and its state does not match the {} units with {} parameters of \
                 the model in {}",
                files.first().map_or(FilePath::new(""), |file| &file.path).display(),
                self.units.len(),
                self.record.params.len(),
                self.record.file.display()
            )));
        };
        // FSDP1 flattens parameters in the order of their memory, but saved shards are row-major. Under NO_SHARD with
        // use_orig_params, the state is not flattened.
        let is_flattened = !(lengths.is_empty() || layout.use_orig_params && self.is_no_shard());
        let is_unknown =
            |param: &&FlatParam| param.stride.is_some() || is_flattened && may_be_channels_last(&param.shape);
        if let Some(param) = self.record.params().find(is_unknown) {
            return Err(unknown_layout(format!(
                "{}: {} may be in channels_last order, so the order of its elements in the optimizer state of flat parameters \
                 must be given",
                self.record.file.display(),
                param.fqn
            )));
        }
        let name = |number: &i64| numbered.get(usize::try_from(*number).ok()?).cloned();
        layout.optimizer = groups.iter().map(|group| group.iter().map(name).collect()).collect();
        match layout.check() {
            Ok(()) => Ok(layout),
            Err(wrong) => Err(Error::malformed(&self.record.file, wrong.at, wrong.expected, wrong.found)),
        }
    }

    /// Returns the layout without `use_orig_params` that matches the lengths of the optimizer state, and the names of
    /// its flat parameters. Returns `None` if no layout matches, or several match.
    fn flat(&self, lengths: &StateLengths) -> Option<(FlatLayout, Vec<Fqn>)> {
        let layout = self.with_units(Vec::new(), false);
        let unit = |(unit, number): (&FlatUnit, i64)| {
            let fits = |unit: &FlatUnit| {
                let expected = layout.checked_flat(unit).map(|flat| flat.shard_len());
                lengths.get(&number).into_iter().flatten().all(|state| state.is_vector && Some(state.len) == expected)
            };
            if fits(unit) { Some(unit.clone()) } else { only(tied(unit).filter(fits)) }
        };
        let units = self.units.iter().zip(0..).map(unit).collect::<Option<Vec<_>>>()?;
        let names = units.iter().map(FlatUnit::key).collect();
        Some((FlatLayout { units, ..layout }, names))
    }

    /// Returns the layout with `use_orig_params` that matches the lengths of the optimizer state and the number of
    /// parameter ids (`count`), and the names of its parameters. Returns `None` if no layout matches, or several
    /// layouts with different tied parameters match.
    fn views(&self, count: usize, lengths: &StateLengths) -> Option<(FlatLayout, Vec<Fqn>)> {
        let aligned = |units: &[FlatUnit]| {
            let fitting = |align| {
                let units = units.iter().map(|unit| FlatUnit { align_numel: align, ..unit.clone() }).collect();
                let layout = self.with_units(units, true);
                let shared: HashSet<&Fqn> =
                    layout.units.iter().flat_map(|unit| &unit.shared).map(|shared| &shared.fqn).collect();
                let names = self.record.params().map(|param| &param.fqn);
                let names: Vec<Fqn> = names.filter(|name| !shared.contains(name)).cloned().collect();
                (names.len() == count && views_fit(&layout, &names, lengths)).then_some((layout, names))
            };
            let mut fitting = ALIGNMENTS.into_iter().filter_map(fitting);
            let (mut layout, names) = fitting.next()?;
            let flat = |layout: &FlatLayout| layout.units.iter().map(|unit| layout.flat(unit)).collect::<Vec<_>>();
            layout.has_assumed_alignment = fitting.any(|(other, _)| flat(&other) != flat(&layout));
            Some((layout, names))
        };
        if count + 1 != self.record.params.len() {
            return aligned(&self.units);
        }
        let with_tie = |index: usize| {
            tied(&self.units[index]).filter_map(move |unit| {
                let mut units = self.units.clone();
                units[index] = unit;
                aligned(&units)
            })
        };
        only((0..self.units.len()).flat_map(with_tie))
    }

    /// Adapts a layout to the job that saved this model and the optimizer at a path: the result has the number of
    /// ranks, the size of a shard group and the value of `use_orig_params` of this job. Checks the result against the
    /// model. Errors name `source` as the origin of the layout.
    ///
    /// # Errors
    /// `Conflict` for the first difference; `Malformed` if the layout is not consistent.
    pub fn adapt(&self, layout: &FlatLayout, files: &[RankFile], at: &Path, source: &str) -> Result<FlatLayout> {
        let (shard_group_size, world_size) = self.sizes;
        let mut layout = FlatLayout { world_size, shard_group_size, ..layout.clone() };
        let first = files.first().and_then(|file| at.find(&file.contents.value)?.as_dict());
        let count = first.and_then(group_numbers).unwrap_or_default().iter().flatten().count();
        let units = layout.units.iter().filter(|unit| !unit.params.is_empty()).count();
        let params = layout.params().count();
        let (own, other) = if layout.use_orig_params { (params, units) } else { (units, params) };
        if count == other && own != other {
            layout.use_orig_params = !layout.use_orig_params;
            // With `use_orig_params` an optimizer numbers parameters; without it, an optimizer numbers flat parameters.
            layout.optimizer = None;
        }
        if let Err(wrong) = layout.check() {
            return Err(document::with_hint(wrong.within(FilePath::new(source)).into()));
        }
        self.record.check(&layout, source)?;
        Ok(layout)
    }

    fn with_units(&self, units: Vec<FlatUnit>, use_orig_params: bool) -> FlatLayout {
        let (shard_group_size, world_size) = self.sizes;
        FlatLayout {
            world_size,
            shard_group_size,
            use_orig_params,
            has_assumed_alignment: false,
            units,
            optimizer: None,
        }
    }
}

/// Returns one warning for each pair of parameters in `layout` that dtshard assumes to be tied, because of the lengths
/// of the optimizer state and the number of parameters in the optimizer.
pub fn assumed_ties(layout: &FlatLayout) -> Vec<String> {
    let shared = layout.units.iter().flat_map(|unit| &unit.shared);
    let warning = |SharedName { fqn, with }: &SharedName| {
        format!("`{fqn}` is assumed to be tied to `{with}`, because the optimizer has state for only one of the two")
    };
    shared.map(warning).collect()
}

/// Returns the error for an optimizer whose flat layout is not found. The hint does not offer another checkpoint of the
/// model: its shapes would not help, because the model beside the optimizer has the shapes already.
fn unknown_layout(what: String) -> Error {
    let hint = "give options::flat_layout FILE (docs/how-to/fsdp1.md has the Python snippet that writes FILE from a live model), or \
                leave the optimizer out with options::series model";
    Error::unsupported(what, hint)
}

/// Returns whether `channels_last` differs from row-major order for a parameter of this shape. The two differ for a
/// shape with at least 4 dims, at least two channels, and at least two elements in each channel.
fn may_be_channels_last(shape: &Dims) -> bool {
    matches!(shape.as_slice(), [_, channels, spatial @ ..] if *channels > 1 && spatial.len() > 1 && spatial.iter().any(|size| *size > 1))
}

/// Returns the only item of an iterator; `None` if there is no item or more than one.
fn only<T>(mut items: impl Iterator<Item = T>) -> Option<T> {
    items.next().filter(|_| items.next().is_none())
}

/// Returns variants of a unit, in each of which two parameters are tied: one variant for each shape of two or more dims
/// that exactly two parameters have.
fn tied(unit: &FlatUnit) -> impl Iterator<Item = FlatUnit> + '_ {
    let mut by_shape: HashMap<&Dims, Vec<usize>> = HashMap::new();
    for (index, param) in unit.params.iter().enumerate().filter(|(_, param)| param.shape.len() > 1) {
        by_shape.entry(&param.shape).or_default().push(index);
    }
    let pairs = by_shape.into_values().filter_map(|indices| <[usize; 2]>::try_from(indices).ok());
    pairs.map(|[first, second]| {
        let mut unit = unit.clone();
        let FlatParam { fqn, .. } = unit.params.remove(second);
        unit.shared.push(SharedName { fqn, with: unit.params[first].fqn.clone() });
        unit
    })
}

/// Returns whether, on every rank, the state of each parameter is as long as the rank's part of the parameter.
fn views_fit(layout: &FlatLayout, names: &[Fqn], lengths: &StateLengths) -> bool {
    let numbers: HashMap<&Fqn, i64> = names.iter().zip(0..).collect();
    let unit_fits = |unit: &FlatUnit| {
        let Some(flat) = layout.checked_flat(unit) else { return false };
        unit.params.iter().enumerate().all(|(index, param)| {
            let lengths = numbers.get(&param.fqn).and_then(|number| lengths.get(number));
            lengths.into_iter().flatten().all(|state| {
                let part = flat.part(index, layout.shard_of(state.rank));
                state.len == part.end - part.start
            })
        })
    };
    layout.units.iter().all(unit_fits)
}

/// Returns the number of elements of the longest 1-d state tensor of the optimizer at a path, on any rank.
pub fn longest_vector(files: &[RankFile], at: &Path) -> Option<u64> {
    let lengths = state_lengths(files, at).into_values().flatten();
    lengths.filter(|state| state.is_vector).map(|state| state.len).max()
}

/// Returns the lengths of the state of the optimizer at a path.
fn state_lengths(files: &[RankFile], at: &Path) -> StateLengths {
    let mut lengths = StateLengths::new();
    for file in files {
        let states = optimizer_state(&file.contents.value, at).and_then(Value::as_dict);
        for (key, state) in states.iter().flat_map(|states| &states.entries) {
            let first = state.tensor_ids().into_iter().find_map(|id| match &file.contents.tensors[id.0 as usize] {
                TensorNode::Plain(view) if !view.sizes.is_empty() => Some(&view.sizes),
                _ => None,
            });
            if let (Some(rank), Some(number), Some(sizes)) = (file.rank, key.as_i64(), first) {
                let len = numel(sizes).unwrap_or(u64::MAX);
                lengths.entry(number).or_default().push(StateLength { rank: rank.0, len, is_vector: sizes.len() == 1 });
            }
        }
    }
    lengths
}

/// Returns the lengths of a 1-d tensor: of the whole tensor, and of the part in the file. Returns no length for any
/// other tensor.
fn lengths_of_vector(node: &TensorNode) -> Vec<u64> {
    match node {
        TensorNode::Plain(view) if view.sizes.len() == 1 => vec![view.sizes[0]],
        TensorNode::Distributed { local, shape, .. } if shape.len() == 1 => {
            shape.iter().chain(local.sizes.first()).copied().collect()
        }
        TensorNode::Sharded { shape, local, .. } if shape.len() == 1 => {
            shape.iter().copied().chain(local.iter().map(|(region, _)| region.numel())).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the metadata of a parameter, the number of ranks that shard the parameter, and the number of ranks in the
/// job. Returns `None` if the tensor is not sharded as FSDP1 shards parameters.
fn sharded(node: &TensorNode) -> Option<(TensorMeta, (u32, u32))> {
    match node {
        // PyTorch makes ShardedTensors only of row-major parameters.
        TensorNode::Sharded { dtype, shape, group, .. } => {
            Some((TensorMeta { shape: shape.clone(), stride: None, dtype: *dtype }, group.sizes?))
        }
        // Under `HYBRID_SHARD`, the first mesh dim has the replicas.
        TensorNode::Distributed { local, shape, mesh, placements } => {
            let mesh = &mesh.mesh;
            let (last, others) = placements.split_last()?;
            let is_fsdp = *last == Placement::Shard(TensorDim(0))
                && others.iter().all(|placement| *placement == Placement::Replicate)
                && mesh.ranks_are_row_major();
            let sizes = (u32::try_from(*mesh.shape().last()?).ok()?, mesh.job_size());
            is_fsdp.then(|| (TensorMeta::of_part(local, shape), sizes))
        }
        TensorNode::Plain(_) | TensorNode::Unreadable(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::catalog::Dtype;

    fn param(fqn: &str, shape: Dims) -> FlatParam {
        FlatParam { fqn: fqn.into(), shape, stride: None }
    }

    /// Returns a model of two ranks with one unit, whose two matrices have equal shapes.
    fn model() -> ShardedModel {
        let params = vec![param("emb", smallvec![5, 4]), param("norm", smallvec![4]), param("head", smallvec![5, 4])];
        let unit = FlatUnit { params: params.clone(), ..FlatUnit::new("", Some(Dtype::F32)) };
        ShardedModel {
            record: ModelRecord::of_params(params, Dtype::F32),
            units: vec![unit],
            vector_lengths: HashSet::from([2, 4]),
            sizes: (2, 2),
        }
    }

    fn lengths(of_numbers: &[[u64; 2]]) -> StateLengths {
        let on_ranks = |lens: &[u64; 2]| {
            let lens = (0..).zip(lens).filter(|(_, len)| **len > 0);
            lens.map(|(rank, len)| StateLength { rank, len: *len, is_vector: true }).collect()
        };
        (0..).zip(of_numbers.iter().map(on_ranks)).collect()
    }

    fn ties(found: Option<(FlatLayout, Vec<Fqn>)>) -> Option<Vec<(String, String)>> {
        let (layout, _) = found?;
        let shared = layout.units.iter().flat_map(|unit| &unit.shared);
        Some(shared.map(|shared| (shared.fqn.to_string(), shared.with.to_string())).collect())
    }

    #[test]
    fn lengths_of_the_state_show_which_parameters_are_tied() {
        let head_is_tied = Some(vec![("head".to_owned(), "emb".to_owned())]);
        // Without use_orig_params, the flat parameter has 44 elements, or 24 if the matrices are tied.
        assert_eq!(ties(model().flat(&lengths(&[[22, 22]]))), Some(Vec::new()));
        assert_eq!(ties(model().flat(&lengths(&[[12, 12]]))), head_is_tied);
        assert_eq!(ties(model().flat(&lengths(&[[13, 13]]))), None);
        // With use_orig_params, the optimizer has 3 parameters, or 2.
        assert_eq!(ties(model().views(3, &lengths(&[[20, 0], [2, 2], [0, 20]]))), Some(Vec::new()));
        assert_eq!(ties(model().views(2, &lengths(&[[12, 8], [0, 4]]))), head_is_tied);
        assert_eq!(ties(model().views(2, &lengths(&[[11, 9], [0, 4]]))), None);
    }

    #[test]
    fn memory_order_of_convolutions_is_unknown() {
        let shapes: [(Dims, bool); 6] = [
            (smallvec![8, 3, 3, 3], true),
            (smallvec![8, 3, 1, 2], true),
            (smallvec![8, 1, 3, 3], false),
            (smallvec![8, 3, 1, 1], false),
            (smallvec![8, 3, 3], false),
            (smallvec![8, 3], false),
        ];
        for (shape, expected) in shapes {
            assert_eq!(may_be_channels_last(&shape), expected, "{shape:?}");
        }
    }
}
