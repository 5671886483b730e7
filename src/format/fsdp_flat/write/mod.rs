//! Writing LOCAL_STATE_DICT files, and the optimizer state that goes with them.
//!
//! A rank's file has the tree of the state dict with its own shards in it. The tree is planned once: each tensor of the
//! target is an [`Item`](plan::Item), a view of a [`Storage`](plan::Storage), and both have the same numbers on all
//! ranks; what a rank holds of them follows from the flat layout. Data of parameters and known bytes of padding lie in
//! one storage behind each other.
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
use crate::catalog::model::is_beside_model;
use crate::catalog::path::key_text;
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

/// What to write.
pub struct FlatTarget<'a> {
    /// Of the target; it has passed [`FlatLayout::check`].
    pub layout: &'a FlatLayout,
    /// Where in the state the model's dict is, if it is there.
    pub model: Option<Path>,
    /// Where the dict of its gradients is, if there are any.
    pub gradients: Option<Path>,
    /// The file of a rank.
    pub name: &'a dyn Fn(Rank) -> PathBuf,
}

/// Lay out a file for each rank, and `flat_layout.json` where the model has units.
///
/// Only dtypes and shapes of `source` are looked at.
///
/// # Errors
/// `Unsupported` where the layout is not that of the model, where parameters or their optimizer state cannot be
/// flattened, and where an object cannot be pickled.
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
    // A layout of no units would only be doubted when it is read.
    if target.model.is_some() && !layout.units.is_empty() {
        let mut beside = OutputFile::new(FILE_NAME);
        beside.push_header(render(&plan.written_layout()).into_bytes());
        reservation.files.push(beside);
    }
    Ok(reservation)
}

/// What is to be known of a part before any is laid out.
pub struct PartSurvey {
    /// Tensors of the source that become one, what is kept and what must be equal to it: tied parameters that the source
    /// has apart, and scalars of optimizer state, of which a flat parameter has one.
    pub merged: Vec<(TensorId, TensorId)>,
    /// What an optimizer in it will number, group by group.
    pub numbered: Option<Vec<Vec<Fqn>>>,
}

/// Look at a part of the state dict.
///
/// # Errors
/// As [`reserve`].
pub fn survey(source: &Catalog, state: &Value, target: &FlatTarget<'_>) -> Result<PartSurvey> {
    let FlatPlan { merged, numbered, .. } = PlannedTree::new(source, state, target)?.plan;
    Ok(PartSurvey { merged, numbered })
}

/// The tree that every rank's file has, with numbers of items for tensors.
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
            Some(path) if planned.plan.dtypes.is_none() => Err(no_model(path)),
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
            Value::Dict(dict) if flattened::is_flattened(dict) => {
                let dict = flattened::unflattened(dict, path, &self.names, self.plan.layout)?;
                optimizer::plan(&dict, path, &self.names, &mut self.plan)?
            }
            Value::Dict(dict) => {
                let entries = dict.entries.iter().map(|(key, child)| {
                    let below = path.child(Key::Name(key_text(key)));
                    Ok((key.clone(), self.convert(child, &below)?))
                });
                let entries = entries.collect::<Result<_>>()?;
                let attributes = dict.attributes.as_ref().map(|value| Box::new(self.plan.whole_value(value)));
                Value::Dict(Dict { kind: dict.kind, entries, attributes })
            }
            Value::List(items) => {
                let items = (0..).zip(items).map(|(index, child)| self.convert(child, &path.child(Key::Index(index))));
                Value::List(items.collect::<Result<_>>()?)
            }
            other => self.plan.whole_value(other),
        })
    }
}

impl PlannedTree<'_> {
    /// The model, and what stands beside it where it is at the top.
    fn convert_model(&mut self, value: &Value, path: &Path) -> Result<Value> {
        let Value::Dict(dict) = value else {
            return Err(no_model(path));
        };
        let is_beside = |(key, value): &&(Value, Value)| path.0.is_empty() && is_beside_model(&key_text(key), value);
        let (beside, own): (Vec<_>, Vec<_>) = dict.entries.iter().partition(|entry| is_beside(entry));
        let own = Dict { entries: own.into_iter().cloned().collect(), ..dict.clone() };
        let mut written = model::plan(&own, &self.names, &mut self.plan, &mut self.notes)?;
        for (key, value) in beside {
            let value = self.convert(value, &path.child(Key::Name(key_text(key))))?;
            written.entries.push((key.clone(), value));
        }
        Ok(Value::Dict(written))
    }
}

fn no_model(path: &Path) -> Error {
    Error::unsupported(format!("no dict of a model at `{path}`"), "options::root names the part that is the model")
}

/// The error for a value of the state dict that pickle cannot hold.
fn cannot_pickle(error: &torch_pickle::pickle::WriteError) -> Error {
    Error::unsupported(format!("the state dict cannot be pickled: {error}"), "leave that object out of the checkpoint")
}
