//! Rank files that hold flat parameters, as what `SHARDED_STATE_DICT` would have held.
//!
//! The files of all ranks are rewritten before they are merged: flat parameters go, and every parameter is there under
//! its name and in its shape, with the boxes that the rank holds of it. Everything after that knows nothing of flat
//! parameters.
//!
//! What the files do not tell comes from a flat layout, given or found beside them, or from a checkpoint of the same
//! model; and whatever it comes from is compared with all that the files do tell. Nothing is guessed.

mod check;
mod gradients;
mod known;
mod like;
mod optimizer;
mod recover;
mod survey;
mod totals;
mod unflatten;

use std::collections::HashSet;
use std::path::Path;

use crate::catalog::flat::{FlatLayout, FlatUnit, SharedName};
use crate::catalog::{self as state, Fqn};
use crate::error::{Error, FormatError, Result};
use crate::format::FlatKnowledge;
use crate::format::torch::ranks::RankFile;
use known::ModelKnowledge;
use like::LikeModel;
use survey::{FlatState, survey};

/// The files of all ranks of one series.
#[derive(Debug)]
pub struct SeriesFiles {
    pub name: String,
    pub files: Vec<RankFile>,
    /// Ranks are missing, and it goes on without them.
    pub incomplete: bool,
}

/// What was found out on the way.
#[derive(Debug, Default)]
pub struct Unflattened {
    /// Whether there were flat parameters.
    pub any: bool,
    /// How the files are laid out, where that is known to the last parameter.
    pub layout: Option<FlatLayout>,
    pub warnings: Vec<String>,
}

/// Put parameters in the place of flat ones in all series of a folder. `model_beside` reads the model series where it is
/// not among them.
///
/// # Errors
/// `Unsupported` where the layout would be a guess; `Malformed`, `Conflict` where files do not fit it; as reading.
pub fn read(
    folder: &Path,
    series: &mut [SeriesFiles],
    model_beside: &dyn Fn() -> Result<Option<Vec<RankFile>>>,
    knowledge: &FlatKnowledge,
) -> Result<Unflattened> {
    let mut found = Unflattened::default();
    let candidates = Candidates::find(series)?;
    let beside: Vec<FlatState> = match candidates.lack_model(series).then(model_beside).transpose()? {
        Some(Some(files)) => survey(&files)?,
        _ => Vec::new(),
    };
    let all: Vec<&FlatState> = candidates.states.iter().map(|(_, state)| state).chain(&beside).collect();
    found.any = !all.is_empty();
    let known = ModelKnowledge::find(folder, knowledge, &all)?;
    if all.is_empty() {
        match &known {
            // Under NO_SHARD, parameters are whole.
            ModelKnowledge::Document { layout, .. }
                if layout.shard_group_size == 1 || candidates.are_without_model(series) => {}
            // It says how to write.
            ModelKnowledge::Document { given: true, .. } => return Ok(found),
            ModelKnowledge::Document { path, .. } => {
                found.warnings.push(format!("{} holds no flat parameters for {}", folder.display(), path.display()));
                return Ok(found);
            }
            ModelKnowledge::Like(_) | ModelKnowledge::Nothing => return Ok(found),
        }
    }
    let mut layout = known.layout(&all, knowledge.raw)?;
    let source = known.describe();
    check_counts(folder, series, &layout, &source)?;
    for state in &all {
        check::check(state, &layout, &source)?;
    }
    let default = default_order(all.first().copied(), &layout);
    found.warnings.extend(candidates.unflatten(series, &mut layout, default.as_deref(), knowledge)?);
    match known {
        ModelKnowledge::Nothing => found.warnings.push(format!("{}: {}", folder.display(), raw_warning(&layout))),
        ModelKnowledge::Like(like) => {
            found.warnings.extend(assumed_ties(&like, &layout));
            found.warnings.extend(like.by_rows());
            found.layout = Some(layout);
        }
        ModelKnowledge::Document { .. } => found.layout = Some(layout),
    }
    Ok(found)
}

/// Where in the files something may be of flat parameters, each with the number of its series.
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

    /// Whether there is something that only flat parameters beside it would explain.
    fn lack_model(&self, series: &[SeriesFiles]) -> bool {
        let may_be_flat = |(index, at): &(usize, state::Path)| optimizer::may_be_flat(&series[*index].files, at);
        self.states.is_empty() && (!self.gradients.is_empty() || self.optimizers.iter().any(may_be_flat))
    }

    /// Whether every series has state or gradients.
    fn are_without_model(&self, series: &[SeriesFiles]) -> bool {
        let has_some = |index| self.optimizers.iter().chain(&self.gradients).any(|(own, _)| *own == index);
        (0..series.len()).all(has_some)
    }

    /// Put parameters in the place of flat ones everywhere; gives what to tell the user. What the optimizer numbers is
    /// part of the layout from then on.
    fn unflatten(
        &self,
        series: &mut [SeriesFiles],
        layout: &mut FlatLayout,
        default: Option<&[Fqn]>,
        knowledge: &FlatKnowledge,
    ) -> Result<Vec<String>> {
        let mut warnings = Vec::new();
        for (index, state) in &self.states {
            unflatten::unflatten(&mut series[*index].files, state, layout);
        }
        for (index, at) in &self.optimizers {
            let files = &mut series[*index].files;
            match optimizer::unflatten(files, at, layout, default) {
                Ok(names) => layout.optimizer = Some(names),
                Err(Error::Format(FormatError::Unsupported { what, .. })) if knowledge.raw => {
                    optimizer::drop_state(files, at);
                    warnings.push(format!("{what}: its state is left out"));
                }
                Err(error) => return Err(error),
            }
        }
        for (index, at) in &self.gradients {
            gradients::unflatten(&mut series[*index].files, at, layout)?;
        }
        Ok(warnings)
    }
}

/// What was concluded from totals and equal values.
fn assumed_ties(like: &LikeModel, layout: &FlatLayout) -> Vec<String> {
    let all = layout.units.iter().flat_map(|unit| &unit.shared).filter(|_| !layout.use_orig_params);
    let copies = all.filter(|shared| like.params.get(&shared.fqn).is_some_and(|param| param.shared_with.is_none()));
    let told = copies.map(|SharedName { fqn, with }| {
        let like = like.path.display();
        format!("{fqn} is taken to be tied to {with}: {like} has the same values, and the files have room for one")
    });
    told.collect()
}

fn raw_warning(layout: &FlatLayout) -> &'static str {
    if layout.use_orig_params {
        "the shapes of parameters are not known, so they are shown with 1 dim; options::flat_layout FILE or options::like CKPT tells"
    } else {
        "what flat parameters hold is not known, so they are shown whole; options::flat_layout FILE or options::like CKPT tells"
    }
}

/// Every rank has a file, or those that have none are known to be missing.
fn check_counts(folder: &Path, series: &[SeriesFiles], layout: &FlatLayout, source: &str) -> Result<()> {
    let expected = layout.world_size;
    match series.iter().find(|own| !own.incomplete && own.files.len() as u64 != u64::from(expected)) {
        None => Ok(()),
        Some(own) => {
            let at = format!("series `{}`", own.name);
            let found = own.files.len().to_string();
            Err(Error::malformed(
                folder,
                at,
                format!("the files of {expected} ranks, the world_size of {source}"),
                found,
            ))
        }
    }
}

/// What an optimizer of one parameter group updates: all that there is, in the order of the state dict. That is known,
/// a flat layout may have been put together in another.
fn default_order(state: Option<&FlatState>, layout: &FlatLayout) -> Option<Vec<Fqn>> {
    if !layout.use_orig_params {
        let Some(state) = state else { return Some(layout.units.iter().map(FlatUnit::key).collect()) };
        let unit = |module: &str| layout.units.iter().find(|unit| *unit.module == *module);
        return state.modules().into_iter().map(|module| unit(module).map(FlatUnit::key)).collect();
    }
    let shared: HashSet<&Fqn> = layout.units.iter().flat_map(|unit| &unit.shared).map(|shared| &shared.fqn).collect();
    let names = state?.parameters().into_iter().filter(|name| !shared.contains(*name));
    Some(names.cloned().collect())
}
