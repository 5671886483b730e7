//! Reads rank files with flat parameters (`LOCAL_STATE_DICT`) and converts their content, in memory, to the form that
//! `SHARDED_STATE_DICT` stores.
//!
//! The content of each rank file is converted before the ranks are merged: flat parameters are removed, and every
//! parameter gets an entry with its name, its shape, and the boxes that the rank holds. Later steps never see a flat
//! parameter. Unit of lengths: elements.
//!
//! The files do not contain all the information about flat parameters. A flat layout (given by the user, or found next
//! to the files) or a checkpoint of the same model provides the missing information. dtshard checks this information
//! against the information in the files, and never guesses.

mod check;
mod gradients;
mod known;
mod like;
mod model_record;
mod optimizer;
mod recover;
mod sharded_model;
mod survey;
mod totals;
mod unflatten;

use std::collections::HashSet;
use std::path::Path;

use crate::catalog::flat::{FlatLayout, FlatUnit, SharedName};
use crate::catalog::{self as state, Fqn, TensorId};
use crate::error::{Error, FormatError, Result};
use crate::format::FlatKnowledge;
use crate::format::fsdp_flat::unknown_layout_error;
use crate::format::torch::{RankFile, TensorNode};
use crate::layout::{Dims, numel};
use known::ModelKnowledge;
use like::LikeModel;
use model_record::ModelRecord;
use optimizer::OptimizerOrder;
use sharded_model::{ShardedModel, assumed_ties, longest_vector};
use survey::{FlatState, survey};

/// The files of all ranks of one series.
#[derive(Debug)]
pub struct SeriesFiles {
    pub name: String,
    pub files: Vec<RankFile>,
    /// True if some ranks have no file, and `options::allow_missing` permits this.
    pub has_missing_ranks: bool,
}

/// The result of replacing flat parameters.
#[derive(Debug, Default)]
pub struct Unflattened {
    /// True if the files had flat parameters.
    pub has_flat_params: bool,
    /// The flat layout of the files, if the complete flat layout is known.
    pub layout: Option<FlatLayout>,
    pub warnings: Vec<String>,
}

/// Replaces flat parameters by parameters in all series of a folder. `model_beside` reads the model series of the
/// folder. This function calls `model_beside` only if `series` has no flat parameters, but may have optimizer state or
/// gradients of flat parameters.
///
/// # Errors
/// `Unsupported` if the flat layout is unknown; `Malformed` or `Conflict` if the files do not match the layout; the
/// errors of reading the files.
pub fn read(
    folder: &Path,
    series: &mut [SeriesFiles],
    model_beside: &dyn Fn() -> Result<Option<Vec<RankFile>>>,
    knowledge: &FlatKnowledge,
) -> Result<Unflattened> {
    let mut found = Unflattened::default();
    let candidates = Candidates::find(series)?;
    let skipped_model = candidates.need_model(series).then(model_beside).transpose()?.flatten().unwrap_or_default();
    let skipped_models: Vec<FlatState> = survey(&skipped_model)?;
    let all: Vec<&FlatState> = candidates.states.iter().map(|(_, state)| state).chain(&skipped_models).collect();
    found.has_flat_params = !all.is_empty();
    let known = ModelKnowledge::find(folder, knowledge, &all)?;
    let mut model = None;
    if all.is_empty() {
        model = candidates.sharded_model(series, &skipped_model);
        let is_document = matches!(known, ModelKnowledge::Document { .. });
        // Under NO_SHARD a layout document is enough: no parameter of the model is flat.
        if let Some(model) = model.as_ref().filter(|model| !(is_document && model.is_no_shard())) {
            return candidates.unflatten_beside(model, folder, series, &known, knowledge);
        }
        match &known {
            // Without flat parameters, the layout is still needed for optimizer state and gradients: under NO_SHARD, or
            // if no series has a model.
            ModelKnowledge::Document { layout, .. }
                if model.is_some() || layout.shard_group_size == 1 || candidates.have_no_model(series) => {}
            // The layout that the user gave may be meant for the target alone, so it is no error that it has no effect.
            ModelKnowledge::Document { given: true, .. } => return Ok(found),
            ModelKnowledge::Document { path, .. } => {
                found.warnings.push(format!(
                    "{} has no flat parameters, so {} is not used",
                    folder.display(),
                    path.display()
                ));
                return Ok(found);
            }
            ModelKnowledge::Like(_) | ModelKnowledge::Unknown if knowledge.raw => return Ok(found),
            ModelKnowledge::Like(_) | ModelKnowledge::Unknown => {
                candidates.check_vectors(series, &skipped_model)?;
                return Ok(found);
            }
        }
    }
    let mut layout = known.layout(&all, knowledge.raw)?;
    let source = known.describe();
    if let (Some(model), Some((index, at))) = (&model, candidates.optimizers.first()) {
        layout = model.adapt(&layout, &series[*index].files, at, &source)?;
    }
    check_counts(folder, series, &layout, (&source, known.document()))?;
    for state in &all {
        check::check(state, &layout, &source)?;
    }
    let beside = match (model, known.document()) {
        (Some(model), _) => Some(model.record),
        (None, Some(_)) if all.is_empty() => candidates.whole_model(series, &skipped_model, &layout),
        _ => None,
    };
    if let Some(model) = &beside {
        model.check(&layout, &source)?;
    }
    let recorded = beside.as_ref().and_then(|model| model.optimizer_order(&layout));
    let default = recorded.or_else(|| default_optimizer_order(all.first().copied(), &layout));
    let plain = beside.as_ref().map(ModelRecord::names).or_else(|| plain_names(&all));
    let order = OptimizerOrder { default: default.as_deref(), plain: plain.as_ref(), document: known.document() };
    found.warnings.extend(candidates.unflatten(series, &mut layout, order, knowledge)?);
    match known {
        ModelKnowledge::Unknown => found.warnings.push(format!("{}: {}", folder.display(), raw_warning(&layout))),
        ModelKnowledge::Like(like) => {
            found.warnings.extend(assumed_tie_warnings(&like, &layout));
            found.warnings.extend(like.row_major_warning());
            found.layout = Some(layout);
        }
        ModelKnowledge::Document { .. } => found.layout = Some(layout),
    }
    Ok(found)
}

/// Returns whether the files of a series may have optimizer state of flat parameters: an optimizer that identifies
/// parameters by parameter ids, with at least one state tensor and only state tensors of at most 1 dim.
pub fn may_have_flat_state(files: &[RankFile]) -> bool {
    let has_state = |at: &state::Path| {
        let state = files.first().and_then(|file| optimizer::optimizer_state(&file.contents.value, at));
        state.is_some_and(state::Value::contains_tensor)
    };
    optimizer::find(files).iter().any(|at| has_state(at) && optimizer::may_be_flat(files, at))
}

/// The paths in rank files at which flat parameters, their optimizer state or their gradients may be. Each path comes
/// with the index of its series.
struct Candidates {
    states: Vec<(usize, FlatState)>,
    optimizers: Vec<(usize, state::Path)>,
    gradients: Vec<(usize, state::Path)>,
}

impl Candidates {
    fn find(series: &[SeriesFiles]) -> Result<Self> {
        let mut candidates = Self { states: Vec::new(), optimizers: Vec::new(), gradients: Vec::new() };
        for (index, own) in series.iter().enumerate() {
            candidates.states.extend(survey(&own.files)?.into_iter().map(|state| (index, state)));
            candidates.optimizers.extend(optimizer::find(&own.files).into_iter().map(|path| (index, path)));
            candidates.gradients.extend(gradients::find(own).into_iter().map(|path| (index, path)));
        }
        Ok(candidates)
    }

    /// Returns true if the model series must be read as well: the given series have no flat parameters, but may have
    /// optimizer state or gradients of flat parameters.
    fn need_model(&self, series: &[SeriesFiles]) -> bool {
        self.states.is_empty()
            && (!self.gradients.is_empty() || self.optimizers_may_be_flat(series).any(|may_be| may_be))
    }

    /// Returns for each optimizer whether its state may be of flat parameters.
    fn optimizers_may_be_flat(&self, series: &[SeriesFiles]) -> impl Iterator<Item = bool> {
        self.optimizers.iter().map(|(index, at)| optimizer::may_be_flat(&series[*index].files, at))
    }

    /// Returns the model, saved by `SHARDED_STATE_DICT` or under `NO_SHARD`, that is beside optimizer state of flat
    /// parameters. `skipped` has the files of the model series, if no given series has the model.
    fn sharded_model(&self, series: &[SeriesFiles], skipped: &[RankFile]) -> Option<ShardedModel> {
        if self.optimizers.is_empty() {
            return None;
        }
        let model = series.iter().map(|own| &*own.files).chain([skipped]).find_map(ShardedModel::find)?;
        // Under NO_SHARD with use_orig_params, the state has the shapes of parameters.
        if !model.is_no_shard() && !self.optimizers_may_be_flat(series).all(|may_be| may_be) {
            return None;
        }
        let is_flat = |(index, at): &(usize, state::Path)| model.has_flat_state(&series[*index].files, at);
        self.optimizers.iter().any(is_flat).then_some(model)
    }

    /// Returns an error if an optimizer seems to have state of flat parameters, although no flat layout was found. The
    /// sign is a 1-d state tensor that is longer than every dim of every tensor of the model, and whose length differs
    /// from the number of elements of every tensor of the model.
    fn check_vectors(&self, series: &[SeriesFiles], skipped: &[RankFile]) -> Result<()> {
        if self.optimizers.is_empty() || !self.optimizers_may_be_flat(series).all(|may_be| may_be) {
            return Ok(());
        }
        let (mut longest, mut numels) = (0, HashSet::new());
        let all = series.iter().enumerate().map(|(index, own)| (Some(index), &*own.files)).chain([(None, skipped)]);
        for (index, file) in all.filter_map(|(index, files)| Some((index, files.first()?))) {
            let optimizers = self.optimizers.iter().filter(|(own, _)| Some(*own) == index);
            let state = optimizers.filter_map(|(_, at)| optimizer::optimizer_state(&file.contents.value, at));
            let state: HashSet<TensorId> = state.flat_map(state::Value::tensor_ids).collect();
            let others = file.contents.value.tensor_ids().into_iter().filter(|id| !state.contains(id));
            for shape in others.filter_map(|id| float_shape(&file.contents.tensors[id.0 as usize])) {
                longest = shape.iter().copied().max().unwrap_or(0).max(longest);
                numels.extend(numel(shape));
            }
        }
        for (index, at) in self.optimizers.iter().filter(|_| !numels.is_empty()) {
            let files = &series[*index].files;
            // LBFGS keeps the state of all parameters as state of the first one.
            if !files.first().is_some_and(|file| optimizer::has_state_of_all(&file.contents.value, at)) {
                continue;
            }
            if let Some(len) = longest_vector(files, at).filter(|len| *len > longest && !numels.contains(len)) {
                return Err(unknown_layout_error(format!(
                    "{}: the optimizer seems to have state of FSDP1's flat parameters (a 1-d tensor of {len} elements), and the \
                     flat layout of the model is unknown",
                    files.first().map_or(Path::new(""), |file| &file.path).display()
                )));
            }
        }
        Ok(())
    }

    /// Replaces the optimizer state of flat parameters beside a model with sharded parameters.
    fn unflatten_beside(
        &self,
        model: &ShardedModel,
        folder: &Path,
        series: &mut [SeriesFiles],
        known: &ModelKnowledge,
        knowledge: &FlatKnowledge,
    ) -> Result<Unflattened> {
        let mut found = Unflattened::default();
        let document = known.document();
        for (index, at) in &self.optimizers {
            let files = &mut series[*index].files;
            let layout = match known {
                ModelKnowledge::Document { layout, .. } => model.adapt(layout, files, at, &known.describe()),
                ModelKnowledge::Like(_) | ModelKnowledge::Unknown => model.layout(files, at),
            };
            // Under NO_SHARD with use_orig_params no state is flat, so it is complete without a layout.
            if layout.is_err() && model.is_no_shard() && !model.has_other_vectors(files, at) {
                continue;
            }
            let unflattened = layout.and_then(|mut layout| {
                let default = model.record.optimizer_order(&layout).or_else(|| default_optimizer_order(None, &layout));
                let plain = Some(&model.record.others);
                let order = OptimizerOrder { default: default.as_deref(), plain, document };
                layout.optimizer = Some(optimizer::unflatten(files, at, &layout, order)?);
                Ok(layout)
            });
            match unflattened {
                Ok(layout) => {
                    found.warnings.extend(assumed_ties(&layout).into_iter().filter(|_| document.is_none()));
                    found.layout = Some(layout);
                }
                Err(Error::Format(FormatError::Unsupported { what, .. })) if knowledge.raw && !knowledge.is_strict => {
                    optimizer::drop_state(files, at);
                    found.warnings.push(format!("{what}; its state is left out"));
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(layout) = &found.layout {
            check_counts(folder, series, layout, (&model.record.file.display().to_string(), None))?;
        }
        Ok(found)
    }

    /// Returns the record of a model that is not sharded, beside optimizer state of flat parameters. `skipped` has the files
    /// of the model series, if no given series has the model.
    fn whole_model(&self, series: &[SeriesFiles], skipped: &[RankFile], layout: &FlatLayout) -> Option<ModelRecord> {
        if self.optimizers.is_empty() {
            return None;
        }
        let mut files = series.iter().map(|own| &*own.files).chain([skipped]);
        files.find_map(|files| ModelRecord::of_whole_model(files, layout))
    }

    /// Returns whether no series is a model, because every series has optimizer state or gradients.
    fn have_no_model(&self, series: &[SeriesFiles]) -> bool {
        let has_some = |index| self.optimizers.iter().chain(&self.gradients).any(|(own, _)| *own == index);
        (0..series.len()).all(has_some)
    }

    /// Replaces flat parameters by parameters in all series, and returns warnings. Stores in `layout` the names of the
    /// parameters that the optimizer updates.
    fn unflatten(
        &self,
        series: &mut [SeriesFiles],
        layout: &mut FlatLayout,
        order: OptimizerOrder<'_>,
        knowledge: &FlatKnowledge,
    ) -> Result<Vec<String>> {
        let mut warnings = Vec::new();
        for (index, state) in &self.states {
            unflatten::unflatten(&mut series[*index].files, state, layout);
        }
        for (index, at) in &self.optimizers {
            let files = &mut series[*index].files;
            match optimizer::unflatten(files, at, layout, order) {
                Ok(names) => layout.optimizer = Some(names),
                Err(Error::Format(FormatError::Unsupported { what, .. })) if knowledge.raw => {
                    optimizer::drop_state(files, at);
                    warnings.push(format!("{what}; its state is left out"));
                }
                Err(error) => return Err(error),
            }
        }
        for (index, at) in &self.gradients {
            gradients::unflatten(&mut series[*index].files, at, layout, order.document)?;
        }
        Ok(warnings)
    }
}

/// Returns the global shape of a float tensor; `None` for other tensors, such as random states.
fn float_shape(node: &TensorNode) -> Option<&Dims> {
    let (shape, dtype) = match node {
        TensorNode::Plain(view) => (&view.sizes, view.dtype),
        TensorNode::Distributed { shape, local, .. } => (shape, local.dtype),
        TensorNode::Sharded { shape, dtype, .. } => (shape, *dtype),
        TensorNode::Unreadable(_) => return None,
    };
    dtype.is_float().then_some(shape)
}

/// Returns a warning for each pair of parameters that is assumed to be tied. The reason for the assumption: both
/// parameters have equal values in the checkpoint `like`, and the flat parameter is too short for both.
fn assumed_tie_warnings(like: &LikeModel, layout: &FlatLayout) -> Vec<String> {
    let all = layout.units.iter().flat_map(|unit| &unit.shared).filter(|_| !layout.use_orig_params);
    let copies = all.filter(|shared| like.params.get(&shared.fqn).is_some_and(|param| param.shared_with.is_none()));
    let warnings = copies.map(|SharedName { fqn, with }| {
        let like = like.path.display();
        format!(
            "`{fqn}` is assumed to be tied to `{with}`, because {like} has equal values for both, and the files \
                 have space for only one"
        )
    });
    warnings.collect()
}

fn raw_warning(layout: &FlatLayout) -> &'static str {
    if layout.use_orig_params {
        "the shapes of the original parameters are unknown, so these parameters are shown as 1-d tensors; give \
         options::flat_layout FILE or options::like CKPT to see the shapes"
    } else {
        "the original parameters inside flat parameters are unknown, so flat parameters are shown whole; give \
         options::flat_layout FILE or options::like CKPT to see the original parameters"
    }
}

/// Checks that every rank has a file. Does not check a series for which `options::allow_missing` permits missing ranks.
/// Errors name `source` as the origin of the layout; `document` is the flat layout file, if there is one.
fn check_counts(
    folder: &Path,
    series: &[SeriesFiles],
    layout: &FlatLayout,
    (source, document): (&str, Option<&Path>),
) -> Result<()> {
    let expected = layout.world_size;
    match series.iter().find(|own| !own.has_missing_ranks && own.files.len() as u64 != u64::from(expected)) {
        None => Ok(()),
        Some(own) => {
            let at = format!("series `{}`", own.name);
            let found = format!("the files of {} ranks", own.files.len());
            let expected = format!("the files of {expected} ranks (the world_size in {source})");
            let mut error = Error::malformed(folder, at, expected, found);
            if let Some((_, hint)) = error.damaged_mut() {
                let correct = document.map(|path| format!(", or correct the world_size in {}", path.display()));
                let all = "copy the files of all ranks into the folder";
                *hint = Some(format!("{all}{}", correct.unwrap_or_default()).into());
            }
            Err(error)
        }
    }
}

/// Returns the names of all tensors of the model that are not flat parameters; `None` if no file has flat parameters.
fn plain_names(states: &[&FlatState]) -> Option<HashSet<Fqn>> {
    let ranks = states.iter().flat_map(|state| &state.ranks);
    (!states.is_empty()).then(|| ranks.flat_map(|rank| rank.other_tensors.keys()).cloned().collect())
}

/// Returns the names of the tensors that an optimizer with one parameter group updates, in the order of the state dict
/// `state`: all parameters with `use_orig_params`, otherwise all flat parameters. Without `state`, returns the flat
/// parameters in the order of the units in the layout, but `None` for parameters: a user may have written the layout
/// with the parameters of a unit in another order.
fn default_optimizer_order(state: Option<&FlatState>, layout: &FlatLayout) -> Option<Vec<Fqn>> {
    if !layout.use_orig_params {
        let Some(state) = state else { return Some(layout.units.iter().map(FlatUnit::key).collect()) };
        let unit = |module: &str| layout.units.iter().find(|unit| *unit.module == *module);
        return state.unit_modules().into_iter().map(|module| unit(module).map(FlatUnit::key)).collect();
    }
    let shared: HashSet<&Fqn> = layout.units.iter().flat_map(|unit| &unit.shared).map(|shared| &shared.fqn).collect();
    let names = state?.view_names().into_iter().filter(|name| !shared.contains(*name));
    Some(names.cloned().collect())
}
