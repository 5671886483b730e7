//! Writes the rank files of FSDP1's `LOCAL_STATE_DICT`, including optimizer state and gradients.
//!
//! The file of a rank has the state dict with the rank's shards. The state dict is planned once for all ranks: each
//! tensor of the target is a [`TreeTensor`](plan::TreeTensor), which is a view of a
//! [`PlannedStorage`](plan::PlannedStorage). A tensor or storage has the same index on all ranks; the flat layout
//! determines which of its elements each rank holds. A storage contains the data of parameters, and padding bytes of
//! known value between the parameters.
//!
//! Invariant: in every file the data of tensors comes in the order of [`Reservation::tensors`].
//!
//! Source: `_local_post_state_dict_hook` and `_local_pre_load_state_dict_hook` in
//! `torch/distributed/fsdp/_state_dict_utils.py`.

mod flattened;
mod gradients;
mod groups;
mod metadata;
mod model;
mod optimizer;
mod params;
mod plan;
mod rank_file;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use super::document::{FILE_NAME, render};
use crate::catalog::flat::FlatLayout;
use crate::catalog::path::key_text;
use crate::catalog::state_dict::is_beside_model;
use crate::catalog::{
    Catalog, ChunkTable, Dict, Fqn, Key, OutputFile, Path, Reservation, Reserved, TensorEntry, TensorId, Value,
};
use crate::error::{Error, Result};
use crate::format::archive::SharedBytes;
use crate::layout::Rank;
use crate::storage::FileId;
use params::ParameterNames;
use plan::FlatPlan;
use rank_file::FlatRankFile;

/// The input of [`reserve`]: a layout, and paths in the state dict.
pub struct FlatTarget<'a> {
    /// The flat layout of the target. [`FlatLayout::check`] has accepted this layout.
    pub layout: &'a FlatLayout,
    /// The path of the model's dict in the state, if the state dict has a model; otherwise `None`.
    pub model: Option<Path>,
    /// The path of the dict of gradients, if the state dict has gradients; otherwise `None`.
    pub gradients: Option<Path>,
    /// A function that returns the file name of a rank.
    pub name: &'a dyn Fn(Rank) -> PathBuf,
}

/// Lays out one file per rank. Also lays out `flat_layout.json` if the state dict has a model, the layout has units,
/// and the alignment of their parameters is known.
///
/// Reads only dtypes and shapes of `source`.
///
/// # Errors
/// `Unsupported` if the layout does not match the model, if parameters or their optimizer state cannot be flattened, or
/// if an object cannot be pickled.
pub fn reserve(source: &Catalog, state: &Value, target: FlatTarget<'_>) -> Result<Reservation> {
    let FlatTarget { layout, name, .. } = target;
    let PlannedTree { tree, plan, notes, .. } = PlannedTree::new(source, state, &target)?;
    let mut reservation = Reservation { notes, ..Reservation::default() };
    let mut chunks: Vec<Vec<ChunkTable>> = plan.storages.iter().map(|storage| storage.chunk_tables(source)).collect();
    let mut frames = SharedBytes::default();
    for rank in (0..layout.world_size).map(Rank) {
        let file = FileId(u32::try_from(reservation.files.len()).expect("fewer than 2^32 files"));
        let mut output = OutputFile::of_rank(rank, name(rank));
        FlatRankFile::new(&plan, rank).lay_out(&tree, file, &mut output, &mut frames, &mut chunks)?;
        reservation.files.push(output);
    }
    for (storage, tables) in plan.storages.iter().zip(chunks) {
        for (source_id, chunks) in storage.tensors().into_iter().zip(tables) {
            let TensorEntry { fqn, dtype, shape, .. } = source.tensor(source_id);
            let entry = TensorEntry { chunks, ..TensorEntry::new(fqn.clone(), *dtype, shape.clone()) };
            reservation.tensors.push(Reserved::new(source_id, entry));
        }
    }
    // A layout without units would have no effect except warnings on reading. A layout file states facts, so it must not
    // contain an assumed alignment.
    if target.model.is_some() && !layout.units.is_empty() && !layout.has_assumed_alignment {
        let mut document = OutputFile::new(FILE_NAME);
        document.push_header(render(&plan.written_layout()).into_bytes());
        reservation.files.push(document);
    }
    Ok(reservation)
}

/// Information about the state dict of one series, such as the optimizer files. dtshard collects it for all series
/// before it lays out any file.
pub struct PartSurvey {
    /// Pairs of source tensors of which the target stores only the first. The second is not written, so its values must
    /// equal those of the first. The two tensors of a pair are one of these: the two copies of a tied parameter that
    /// the source stores under two names; the two copies of its gradient; 0-d optimizer state (step counters) of two
    /// parameters, because a flat parameter has a single step counter.
    pub merged: Vec<(TensorId, TensorId)>,
    /// The names of the parameters or flat parameters that the target's optimizer updates, in the order of their
    /// parameter ids, one list per parameter group; `None` if the state dict has no optimizer.
    pub numbered: Option<Vec<Vec<Fqn>>>,
}

/// Plans the state dict of one series without laying out files.
///
/// # Errors
/// The errors of [`reserve`].
pub fn survey(source: &Catalog, state: &Value, target: &FlatTarget<'_>) -> Result<PartSurvey> {
    let FlatPlan { merged, numbered, .. } = PlannedTree::new(source, state, target)?.plan;
    Ok(PartSurvey { merged, numbered })
}

/// The state dict of the target, planned once for all rank files. The tensors in `tree` are indices of
/// [`FlatPlan::tensors`].
struct PlannedTree<'a> {
    tree: Value,
    plan: FlatPlan<'a>,
    notes: Vec<String>,
    names: ParameterNames<'a>,
    model: Option<&'a Path>,
    gradients: Option<&'a Path>,
}

impl<'a> PlannedTree<'a> {
    fn new(source: &'a Catalog, state: &Value, target: &'a FlatTarget<'a>) -> Result<Self> {
        let FlatTarget { layout, model, gradients, .. } = target;
        let (model, gradients) = (model.as_ref(), gradients.as_ref());
        let plan = FlatPlan::new(source, layout)?;
        let names = ParameterNames::new(layout, &plan.outside);
        let mut planned = Self { tree: Value::None, plan, notes: Vec::new(), names, model, gradients };
        planned.tree = planned.convert(state, &Path::default())?;
        match model {
            Some(path) if planned.plan.dtypes.is_none() => Err(no_model_error(path)),
            _ => Ok(planned),
        }
    }

    fn convert(&mut self, value: &Value, path: &Path) -> Result<Value> {
        if self.model == Some(path) {
            return self.convert_model(value, path);
        }
        Ok(match value {
            Value::Dict(dict) if self.gradients == Some(path) => {
                gradients::plan(dict, path, &self.names, &mut self.plan)?
            }
            Value::Dict(dict) if optimizer::is_optimizer(dict) => {
                optimizer::plan(dict, path, &self.names, &mut self.plan)?
            }
            Value::Dict(dict) if flattened::has_dotted_keys(dict) => {
                let dict = flattened::nest(dict, path, &self.names, self.plan.layout)?;
                optimizer::plan(&dict, path, &self.names, &mut self.plan)?
            }
            Value::Dict(dict) => {
                let entries = dict.entries.iter().map(|(key, child)| {
                    let below = path.child(Key::Name(key_text(key)));
                    Ok((key.clone(), self.convert(child, &below)?))
                });
                let entries = entries.collect::<Result<_>>()?;
                let attributes = dict.attributes.as_ref().map(|value| Box::new(self.plan.replicated_value(value)));
                Value::Dict(Dict { kind: dict.kind, entries, attributes })
            }
            Value::List(items) => {
                let items = (0..).zip(items).map(|(index, child)| self.convert(child, &path.child(Key::Index(index))));
                Value::List(items.collect::<Result<_>>()?)
            }
            other => self.plan.replicated_value(other),
        })
    }
}

impl PlannedTree<'_> {
    /// Converts the model. If the model is at the top of the state dict, this dict may also contain trainer state; the
    /// trainer state is converted as well.
    fn convert_model(&mut self, value: &Value, path: &Path) -> Result<Value> {
        let Value::Dict(dict) = value else {
            return Err(no_model_error(path));
        };
        let is_beside = |(key, value): &&(Value, Value)| path.0.is_empty() && is_beside_model(&key_text(key), value);
        let (others, own): (Vec<_>, Vec<_>) = dict.entries.iter().partition(|entry| is_beside(entry));
        let own = Dict { entries: own.into_iter().cloned().collect(), ..dict.clone() };
        let mut written = model::plan(&own, &self.names, &mut self.plan, &mut self.notes)?;
        for (key, value) in others {
            let value = self.convert(value, &path.child(Key::Name(key_text(key))))?;
            written.entries.push((key.clone(), value));
        }
        Ok(Value::Dict(written))
    }
}

fn no_model_error(path: &Path) -> Error {
    Error::unsupported(
        format!("the state dict has no model dict at `{path}`"),
        "name the part that is the model with options::root",
    )
}

/// Returns the error for a value of the state dict that cannot be pickled.
fn cannot_pickle(error: &torch_pickle::pickle::WriteError) -> Error {
    Error::unsupported(format!("the state dict cannot be pickled: {error}"), "remove that object from the checkpoint")
}
