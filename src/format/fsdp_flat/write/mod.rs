//! Writes LOCAL_STATE_DICT files and the optimizer state that belongs to them.
//!
//! The file of a rank has the tree of the state dict with the rank's shards in it. The tree is planned once: each
//! tensor of the target is a [`TreeTensor`](plan::TreeTensor), a view of a [`PlannedStorage`](plan::PlannedStorage).
//! Tensors and storages have the same indices on all ranks; the flat layout determines the part that each rank holds.
//! One storage holds the data of parameters and the known padding bytes between them.
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
    /// The layout of the target; it has passed [`FlatLayout::check`].
    pub layout: &'a FlatLayout,
    /// The path of the model's dict in the state, if the state has a model.
    pub model: Option<Path>,
    /// The path of the dict of gradients, if there are gradients.
    pub gradients: Option<Path>,
    /// A function that returns the file name of a rank.
    pub name: &'a dyn Fn(Rank) -> PathBuf,
}

/// Lays out one file per rank, and `flat_layout.json` if the model has units.
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
    // A layout without units would have no effect except warnings on reading.
    if target.model.is_some() && !layout.units.is_empty() {
        let mut document = OutputFile::new(FILE_NAME);
        document.push_header(render(&plan.written_layout()).into_bytes());
        reservation.files.push(document);
    }
    Ok(reservation)
}

/// Information about a part of the state dict that is needed before the files of any part are laid out.
pub struct PartSurvey {
    /// Pairs of source tensors that are written as one tensor: the tensor that is kept, and a tensor that must be equal
    /// to it. Such pairs are tied parameters that the source stores separately, and scalars of optimizer state, because
    /// a flat parameter has only one of each.
    pub merged: Vec<(TensorId, TensorId)>,
    /// The names of the parameters that the optimizer in this part numbers, one list per parameter group.
    pub numbered: Option<Vec<Vec<Fqn>>>,
}

/// Plans a part of the state dict without laying out files.
///
/// # Errors
/// The errors of [`reserve`].
pub fn survey(source: &Catalog, state: &Value, target: &FlatTarget<'_>) -> Result<PartSurvey> {
    let FlatPlan { merged, numbered, .. } = PlannedTree::new(source, state, target)?.plan;
    Ok(PartSurvey { merged, numbered })
}

/// The state dict of the target, which is the same in all rank files. Its tensors are indices of [`FlatPlan::tensors`].
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
        let names = ParameterNames::new(layout);
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
    /// Converts the model. If the model is at the top of the state dict, its dict may also contain trainer state, which
    /// is converted as well.
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
