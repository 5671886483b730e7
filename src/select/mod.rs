//! What of a checkpoint is taken, and under which names and dtypes.
//!
//! [`select`] turns a catalog into a catalog of wishes: the same tensors in the same order, so that a
//! [`TensorId`] of the result finds its data in the source; the dtype each is to be written in; and a new state dict
//! that refers to those that are taken. Nothing is read or written.
//!
//! In this order: wrapper prefixes are cleaned from names; patterns include and exclude by these names; the root is
//! cut; prefixes are stripped; names are rewritten, a prefix is added, the whole is nested. Names are paths joined
//! with dots, as `torch/distributed/checkpoint/_nested_dict.py` does it. A name that is not changed keeps its value,
//! its keys and its containers as they were, to the last attribute.
//!
//! Invariant: a pattern, prefix or rename without an effect is an error that shows the nearest names: a typing error
//! must not quietly ship another model.

mod dtypes;
mod filter;
mod naming;
mod rebuild;
mod rename;
mod scales;
mod steps;
mod survey;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::iter::zip;

use rayon::prelude::*;

pub use dtypes::{CastSummary, DtypeRule, KeptReason};
pub use rename::Rename;

use crate::catalog::path::{self, tensors};
use crate::catalog::{Catalog, ChunkTable, Fqn, Path, TensorEntry, TensorId, Value, model};
use crate::error::{Error, Result};
use crate::layout::Pattern;
use naming::Naming;
use rebuild::Rebuild;
use survey::{Leaf, LeafKind, Survey};

/// Which part of the state dict becomes the whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Root {
    #[default]
    Whole,
    /// The model, wherever it is (see [`crate::catalog::model`]); nothing where there is none.
    Model,
    /// A dotted path, which may end within a key: `model.layers.0` of `{"model": {"layers.0.w": ..}}`.
    At(String),
}

/// What becomes of `_fsdp_wrapped_module.`, `_orig_mod.` and `_checkpoint_wrapped_module.` in names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wrappers {
    /// They are part of the names.
    #[default]
    Keep,
    /// They stay in the names, but patterns match with and without them.
    Match,
    /// They are cut from the names.
    Cut,
}

#[derive(Clone, Debug, Default)]
pub struct NameOptions {
    pub wrappers: Wrappers,
    pub include: Vec<Pattern>,
    pub exclude: Vec<Pattern>,
    /// Leave out the subtree of gradients beside a model, where there is one.
    pub without_gradients: bool,
    pub root: Root,
    pub strip_prefixes: Vec<String>,
    /// In the order given.
    pub renames: Vec<Rename>,
    /// Text put before the first key.
    pub add_prefix: Option<String>,
    /// A dotted path to put everything under.
    pub nest: Option<String>,
    pub dtypes: Vec<DtypeRule>,
}

/// What was taken, and what was not.
#[derive(Debug)]
pub struct Selected {
    /// Tensors without chunks, archives or warnings, which the source has. Their dtype is the one to write, their
    /// first name the new one; those that were not taken are there unchanged, and in the state dict no more.
    pub catalog: Catalog,
    pub left_out: LeftOut,
    pub casts: CastSummary,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// What of the source is not in the result, under the names of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// How many tensors, by the top of their path.
    pub groups: Vec<(String, usize)>,
    /// A tensor with several names is left out where all of them are.
    pub tensors: Vec<String>,
    pub objects: Vec<String>,
}

impl Selected {
    /// Tensors that have several names: the first, and the others, all in the order of the state dict.
    #[must_use]
    pub fn ties(&self) -> Vec<(Fqn, Vec<Fqn>)> {
        let mut seen: HashMap<TensorId, usize> = HashMap::with_capacity(self.catalog.tensors.len());
        let mut names: Vec<(Fqn, Vec<Fqn>)> = Vec::new();
        tensors(&self.catalog.state, &Path::default(), &mut |path, id| match seen.get(&id) {
            Some(first) => names[*first].1.push(path.fqn()),
            None => {
                seen.insert(id, names.len());
                names.push((path.fqn(), Vec::new()));
            }
        });
        names.retain(|(_, aliases)| !aliases.is_empty());
        names
    }
}

/// Choose, rename and say in which dtypes.
///
/// # Errors
/// `Usage`: a pattern, prefix, rename or root that nothing has; two leaves of one name; a leaf without a name.
/// `Unsupported`: a dict with a tensor in a key.
pub fn select(source: &Catalog, options: &NameOptions) -> Result<Selected> {
    if let Some(nest) = options.nest.as_ref().filter(|nest| nest.split('.').any(str::is_empty)) {
        return Err(Error::usage(
            format!("options::nest {nest}: a part of the path is empty"),
            "a path is names joined with dots, such as app.model",
        ));
    }
    let survey = Survey::new(source, options.wrappers);
    let mut kept = filter::keep(&survey, options)?;
    let notes = filter::notes(&survey, options, &kept);
    let state = || match as_it_is(source, &survey, options, &mut kept) {
        Some(part) => Ok(part.clone()),
        None => rename(&survey, options, &mut kept),
    };
    let (state, tensors) = rayon::join(state, || source.tensors.par_iter().map(without_chunks).collect());
    let mut catalog = Catalog { meshes: source.meshes.clone(), tensors, state: state?, ..Catalog::empty() };
    refuse_tensor_keys(&catalog.state)?;
    let casts = dtypes::apply(&survey, &kept, &mut catalog, &options.dtypes)?;
    name_tensors(&mut catalog);
    let notes = notes.into_iter().chain(casts.notes()).collect();
    Ok(Selected { catalog, left_out: left_out(&survey, &kept), casts, notes })
}

fn refuse_tensor_keys(state: &Value) -> Result<()> {
    let Some(path) = path::dict_with_tensor_key(state) else { return Ok(()) };
    let (dict, hint) = if path.0.is_empty() {
        (String::from("the top of the checkpoint"), "save the checkpoint again with names as keys")
    } else {
        (path.to_string(), "leave the dict out with options::exclude, or save the checkpoint again with names as keys")
    };
    Err(Error::unsupported(
        format!("{dict}: a tensor is a key of this dict, or part of a key, where no name leads to it"),
        hint,
    ))
}

/// The part of the state dict that is taken, where nothing in it is renamed or left out; what is beside it is kept no more.
fn as_it_is<'a>(
    source: &'a Catalog,
    survey: &Survey<'_>,
    options: &NameOptions,
    kept: &mut [bool],
) -> Option<&'a Value> {
    let changes = options.add_prefix.is_some() || options.nest.is_some();
    if changes || survey.wrapped || !options.strip_prefixes.is_empty() || !options.renames.is_empty() {
        return None;
    }
    let under_root = |leaf: &Leaf| options.root == Root::Whole || leaf.in_model;
    let part = match options.root {
        Root::Whole => &source.state,
        Root::Model if survey.model_root.is_empty() => survey.leaves.iter().all(under_root).then_some(&source.state)?,
        Root::Model => model::model_root(&source.state).find(&source.state)?,
        Root::At(_) => return None,
    };
    if zip(&survey.leaves, kept.iter()).any(|(leaf, kept)| under_root(leaf) && !kept) {
        return None;
    }
    zip(&survey.leaves, kept).for_each(|(leaf, kept)| *kept = under_root(leaf));
    Some(part)
}

/// The state dict of what is kept; what is not under the root is kept no more.
fn rename(survey: &Survey<'_>, options: &NameOptions, kept: &mut [bool]) -> Result<Value> {
    let mut naming = Naming::new(survey, options)?;
    if survey.optimizers > 0 {
        naming.learn_parameters(kept);
    }
    // Lists of parameters lose those that were excluded, not those that another root leaves behind.
    let filtered = kept.to_vec();
    let mut rebuild = Rebuild::new(survey);
    for (index, leaf) in survey.leaves.iter().enumerate().filter(|(index, _)| filtered[*index]) {
        match naming.path(*leaf)? {
            Some(steps) => rebuild.insert(*leaf, value(survey, &naming, *leaf, &filtered), &steps)?,
            None => kept[index] = false,
        }
    }
    naming.check_used()?;
    rebuild.finish(&naming)
}

fn without_chunks(entry: &TensorEntry) -> TensorEntry {
    TensorEntry {
        fqn: entry.fqn.clone(),
        dtype: entry.dtype,
        shape: entry.shape.clone(),
        class: entry.class,
        sharding: entry.sharding.clone(),
        stride: entry.stride.clone(),
        summands: None,
        chunks: ChunkTable::new(entry.shape.len()),
    }
}

/// A leaf's value in the result: lists of parameters follow what happens to those.
fn value(survey: &Survey<'_>, naming: &Naming<'_, '_>, leaf: Leaf, kept: &[bool]) -> Value {
    let value = survey.value(leaf);
    let listed = leaf.in_groups() && leaf.kind == LeafKind::Object;
    let key = if listed { survey.last_key(leaf).unwrap_or_default() } else { "".into() };
    // `param_names` runs beside numbers, so none may go.
    let may_drop = key == "params";
    if !may_drop && key != "param_names" {
        return value.clone();
    }
    let head = survey.state_head(leaf);
    let rename = |item: &Value| {
        let Value::Str(name) = item else { return Some(item.clone()) };
        let name = survey.clean(name);
        let parameter = survey.parameters.get(&name);
        if may_drop && parameter.is_some_and(|index| !kept[*index as usize]) {
            return None;
        }
        Some(Value::Str(naming.parameter(&name, &head).into_owned().into()))
    };
    match value {
        Value::List(items) => Value::List(items.iter().filter_map(rename).collect()),
        Value::Tuple(items) => Value::Tuple(items.iter().filter_map(rename).collect()),
        other => other.clone(),
    }
}

/// Give every tensor that is taken its first new name.
fn name_tensors(catalog: &mut Catalog) {
    let mut named = vec![false; catalog.tensors.len()];
    let entries = &mut catalog.tensors;
    tensors(&catalog.state, &Path::default(), &mut |path, id| {
        if !std::mem::replace(&mut named[id.0 as usize], true) {
            entries[id.0 as usize].fqn = path.fqn();
        }
    });
}

fn left_out(survey: &Survey<'_>, kept: &[bool]) -> LeftOut {
    let leaves = || zip(&survey.leaves, kept);
    if kept.iter().all(|kept| *kept) {
        return LeftOut::default();
    }
    let taken: HashSet<TensorId> =
        leaves().filter(|(_, kept)| **kept).flat_map(|(leaf, _)| survey.tensor_ids(*leaf)).collect();
    let mut left_out = LeftOut::default();
    let mut groups: BTreeMap<String, usize> = BTreeMap::new();
    let mut seen = HashSet::new();
    for (leaf, _) in leaves().filter(|(_, kept)| !**kept) {
        if leaf.kind == LeafKind::Object {
            left_out.objects.push(survey.raw_name(*leaf));
        }
        survey.tensors(*leaf, &mut |name, id| {
            if !taken.contains(&id) && seen.insert(id) {
                *groups.entry(survey.top(*leaf)).or_default() += 1;
                left_out.tensors.push(name);
            }
        });
    }
    left_out.groups = groups.into_iter().collect();
    left_out
}
