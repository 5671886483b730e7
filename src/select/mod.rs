//! Selects tensors and objects of a checkpoint, and sets their names and dtypes.
//!
//! [`select`] makes a catalog of the selection. The catalog has the tensors of the source in the order of the source,
//! so that a [`TensorId`] of the result is valid in the source; the dtype to write for each tensor; and a new state
//! dict with references to the selected tensors. The function reads and writes no tensor data.
//!
//! The steps, in order: wrapper components are removed from names; the include and exclude patterns are compared with
//! these names; the root is removed; prefixes are stripped; names are renamed; a prefix is added; all names are put
//! below a path (`--nest`). Names are paths joined with dots, as in `torch/distributed/checkpoint/_nested_dict.py`. A
//! name that does not change keeps its value, keys and containers, including all attributes.
//!
//! Invariant: a pattern, prefix or rename without effect is an error that shows the nearest names, because a typing
//! mistake must not silently write another model.

mod compared;
pub mod dequantized;
mod dtypes;
mod filter;
pub mod mapped;
mod naming;
mod rebuild;
mod rename;
mod scales;
mod split_name;
mod survey;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::iter::zip;

use rayon::prelude::*;

pub use compared::{select_and_list_left_out, select_both};
pub use dtypes::{CastSummary, DtypeRule, KeptReason};
pub use rename::Rename;

use crate::catalog::error::shown_name;
use crate::catalog::path::{self, tensors};
use crate::catalog::{Catalog, ChunkTable, Fqn, Path, TensorEntry, TensorId, Unreadable, Value, state_dict};
use crate::error::{Error, Result};
use crate::layout::Pattern;
use filter::{Kept, SelectedByPatterns};
use naming::Naming;
use rebuild::Rebuild;
use survey::{Leaf, LeafKind, Survey};

/// The part of the state dict that becomes the root of the result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Root {
    #[default]
    Whole,
    /// The model becomes the root (see [`crate::catalog::state_dict`]). If the state dict has no model, the result is
    /// empty.
    Model,
    /// The value at this dotted path becomes the root. The path may end inside a key: `model.layers.0` of `{"model":
    /// {"layers.0.w": ..}}`.
    At(String),
}

/// The treatment of `_fsdp_wrapped_module.`, `_orig_mod.` and `_checkpoint_wrapped_module.` in names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wrappers {
    /// Names keep wrapper components, and patterns are compared with these names.
    #[default]
    Keep,
    /// Names keep wrapper components, but patterns are compared with names with and without wrapper components.
    Match,
    /// Names lose wrapper components.
    Cut,
}

/// The options that select, rename and cast tensors.
#[derive(Clone, Debug, Default)]
pub struct NameOptions {
    pub wrappers: Wrappers,
    /// The patterns of names that are kept. If there is no pattern, all names are kept.
    pub include: Vec<Pattern>,
    /// The patterns of names that are left out.
    pub exclude: Vec<Pattern>,
    /// If true, the gradients that are stored beside a model are left out.
    pub without_gradients: bool,
    /// If true, tensors may be selected although their layout is unknown, because no values are read.
    pub allow_unknown_layouts: bool,
    /// If true, tensors and objects that cannot be read may be selected, because the caller refuses to read them later.
    pub allow_unreadable: bool,
    pub root: Root,
    pub strip_prefixes: Vec<String>,
    /// The renames, in the order in which the user gave them.
    pub renames: Vec<Rename>,
    /// A text that is put before the first key of every name.
    pub add_prefix: Option<String>,
    /// A dotted path. If given, the complete result is nested below this path.
    pub nest: Option<String>,
    pub dtypes: Vec<DtypeRule>,
    /// The names that the options match, for hints.
    pub matched: MatchedNames,
}

/// The names that the options match: a weight map changes names between the filters and all other options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatchedNames {
    /// The names of the source; no map is applied.
    #[default]
    Only,
    /// The names of the source, before a map.
    BeforeMap,
    /// The names that a map gave.
    AfterMap,
}

impl MatchedNames {
    /// Returns the hint about an option that matches nothing. If a map is applied, the hint begins with the names that the option
    /// matches.
    fn hint(self, option: &str, hint: String) -> String {
        match self {
            Self::Only => hint,
            Self::BeforeMap => format!("{option} matches the names of SRC, before options::map changes them; {hint}"),
            Self::AfterMap => format!("{option} matches the names after options::map; {hint}"),
        }
    }
}

/// The selection, and the names that were left out.
#[derive(Debug)]
pub struct Selected {
    /// The catalog of the selection. Each tensor has the dtype to write and its first new name, but no chunks. Tensors
    /// that were not selected are still in the list of tensors, but not in the state dict. The warnings of the source,
    /// and its list of `torch.save` archives for checksums, are not copied.
    pub catalog: Catalog,
    pub left_out: LeftOut,
    /// The numbers of tensors that are cast, and of tensors that keep their dtype although a cast rule matches.
    pub casts: CastSummary,
    /// The notes about the selection for the user.
    pub notes: Vec<String>,
}

/// The tensors and objects of the source that are not in the result, with their names in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// The number of left-out tensors for each top-level key of their paths.
    pub groups: Vec<(String, usize)>,
    /// The names of the left-out tensors. A tensor with several names is left out only if all its names are left out.
    pub tensors: Vec<String>,
    pub objects: Vec<String>,
}

impl LeftOut {
    /// Adds the names that an earlier selection left out.
    pub fn extend(&mut self, earlier: Self) {
        for (key, number) in earlier.groups {
            match self.groups.iter_mut().find(|(known, _)| *known == key) {
                Some((_, known)) => *known += number,
                None => self.groups.push((key, number)),
            }
        }
        self.tensors.extend(earlier.tensors);
        self.objects.extend(earlier.objects);
    }
}

impl Selected {
    /// Returns the tied tensors of the result: for each tensor with several names, the first name and the further
    /// names. The order is the order of the state dict.
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

/// Selects and renames tensors, and sets their dtypes.
///
/// # Errors
/// `Usage` for a pattern, prefix, rename or root that matches nothing, for two leaves with one name, and for a leaf
/// with an empty name. `Unsupported` for a dict with a tensor in a key, and for a selected leaf that is
/// [unreadable](crate::catalog::Unreadable).
pub fn select(source: &Catalog, options: &NameOptions) -> Result<Selected> {
    if let Some(nest) = options.nest.as_ref().filter(|nest| nest.split('.').any(str::is_empty)) {
        return Err(Error::usage(
            format!("options::nest {nest}: expected names joined with dots, found an empty name"),
            "give a path such as app.model",
        ));
    }
    let survey = Survey::new(source, options.wrappers);
    let kept = filter::keep(&survey, options);
    if let Some(unused) = kept.unused.first() {
        return Err(filter::unused_error(&survey, unused, options.matched));
    }
    let selected = select_kept(source, options, &survey, kept)?;
    reject_unsupported(source, &selected.catalog.state, options)?;
    Ok(selected)
}

/// Renames and casts the leaves that the filters keep.
fn select_kept(source: &Catalog, options: &NameOptions, survey: &Survey<'_>, kept: Kept) -> Result<Selected> {
    let Kept { leaves: mut kept, by_patterns, .. } = kept;
    let notes = filter::notes(survey, options, &kept);
    let state = || match unchanged_state(source, survey, options, &mut kept) {
        Some(part) => Ok(part.clone()),
        None => rename(survey, options, &mut kept, by_patterns.as_ref()),
    };
    let (state, tensors) = rayon::join(state, || source.tensors.par_iter().map(without_chunks).collect());
    let (meshes, model_parallel_groups) = (source.meshes.clone(), source.model_parallel_groups.clone());
    let mut catalog = Catalog { meshes, tensors, state: state?, model_parallel_groups, ..Catalog::empty() };
    let casts = dtypes::apply(survey, &kept, &mut catalog, &options.dtypes, options.matched)?;
    name_tensors(&mut catalog);
    let notes = notes.into_iter().chain(casts.notes()).collect();
    Ok(Selected { catalog, left_out: left_out(source, survey, &kept), casts, notes })
}

fn reject_tensor_keys(state: &Value) -> Result<()> {
    let Some(path) = path::dict_with_tensor_key(state) else { return Ok(()) };
    let (dict, hint) = if path.0.is_empty() {
        (shown_name("").to_owned(), "save the checkpoint again with names as keys")
    } else {
        (path.to_string(), "leave the dict out with options::exclude, or save the checkpoint again with names as keys")
    };
    Err(Error::unsupported(
        format!("{dict}: a key of this dict is a tensor or contains one, and dtshard cannot name a tensor in a key"),
        hint,
    ))
}

/// Refuses a selected dict with a tensor in a key, and selected tensors and objects that cannot be read.
fn reject_unsupported(source: &Catalog, selected: &Value, options: &NameOptions) -> Result<()> {
    reject_tensor_keys(selected)?;
    if options.allow_unreadable || source.tensors.iter().all(|entry| entry.unreadable.is_none()) {
        return Ok(());
    }
    let entries = selected.tensor_ids().into_iter().map(|id| source.tensor(id));
    let is_refused = |why: &Unreadable| !(options.allow_unknown_layouts && why.is_of_unknown_layout());
    let refused: Vec<&TensorEntry> =
        entries.filter(|entry| entry.unreadable.as_deref().is_some_and(is_refused)).collect();
    let Some((entry, why)) = refused.first().and_then(|entry| Some((entry, entry.unreadable.as_ref()?))) else {
        return Ok(());
    };
    let names: Vec<String> = refused.iter().map(|entry| entry.fqn.to_string()).collect();
    Err(why.error(entry.fqn.as_str()).naming(&names))
}

/// Returns the part of the state dict below the root, if nothing in this part is renamed or left out, so that it need
/// not be rebuilt. Also marks all leaves outside the part as not kept. Otherwise returns `None`, and the caller must
/// build a new state dict.
fn unchanged_state<'a>(
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
        Root::Model => state_dict::model_root(&source.state).find(&source.state)?,
        Root::At(_) => return None,
    };
    if zip(&survey.leaves, kept.iter()).any(|(leaf, kept)| under_root(leaf) && !kept) {
        return None;
    }
    zip(&survey.leaves, kept).for_each(|(leaf, kept)| *kept = under_root(leaf));
    Some(part)
}

/// Builds the new state dict from the kept leaves. Marks leaves outside the root as not kept.
fn rename(
    survey: &Survey<'_>,
    options: &NameOptions,
    kept: &mut [bool],
    by_patterns: Option<&SelectedByPatterns>,
) -> Result<Value> {
    let mut naming = Naming::new(survey, options)?;
    if survey.optimizers > 0 {
        naming.record_parameters(kept);
    }
    // Lists of parameters lose the excluded parameters, but keep parameters outside the root.
    let filtered = kept.to_vec();
    let listed = KeptParameters::new(survey, &filtered, by_patterns);
    let mut rebuild = Rebuild::new(survey);
    for (index, leaf) in survey.leaves.iter().enumerate().filter(|(index, _)| filtered[*index]) {
        match naming.path(*leaf)? {
            Some(steps) => rebuild.insert(*leaf, value(survey, &naming, (index, *leaf), &listed), &steps)?,
            None => kept[index] = false,
        }
    }
    naming.check_used()?;
    rebuild.finish(&|module| naming.module(module))
}

fn without_chunks(entry: &TensorEntry) -> TensorEntry {
    TensorEntry {
        fqn: entry.fqn.clone(),
        dtype: entry.dtype,
        shape: entry.shape.clone(),
        class: entry.class,
        sharding: entry.sharding.clone(),
        stride: entry.stride.clone(),
        partial_values: None,
        unreadable: entry.unreadable.clone(),
        chunks: ChunkTable::new(entry.shape.len()),
    }
}

/// The parameters that the filters keep, in the model or in optimizers.
struct KeptParameters<'k> {
    /// For each leaf, whether it is kept.
    leaves: &'k [bool],
    by_patterns: Option<&'k SelectedByPatterns>,
    /// The parameters whose optimizer state is kept, each with the number of its optimizer.
    with_state: HashSet<(u32, String)>,
}

impl<'k> KeptParameters<'k> {
    fn new(survey: &Survey<'_>, leaves: &'k [bool], by_patterns: Option<&'k SelectedByPatterns>) -> Self {
        let mut with_state = HashSet::new();
        if by_patterns.is_some() {
            for leaf in zip(&survey.leaves, leaves).filter_map(|(leaf, kept)| kept.then_some(leaf)) {
                let Some((number, _)) = leaf.optimizer.filter(|_| leaf.in_state()) else { continue };
                let named = survey.named(*leaf);
                with_state.extend(named.parameter().map(|name| (number, survey.clean(name))));
            }
        }
        Self { leaves, by_patterns, with_state }
    }

    /// Returns whether a list of parameters in an optimizer keeps a parameter. It does if one of these holds: the model
    /// does not contain the parameter; the filters keep the parameter in the model; the filters keep state of the
    /// parameter in this optimizer; the patterns select the list and do not exclude the parameter.
    fn is_listed(&self, survey: &Survey<'_>, (list, leaf): (usize, Leaf), name: &str) -> bool {
        let Some(&parameter) = survey.parameters.get(name) else { return true };
        let by_patterns = |by: &SelectedByPatterns| by.selected[list] && !by.excluded[parameter as usize];
        let has_state = |(number, _)| self.with_state.contains(&(number, name.to_owned()));
        self.leaves[parameter as usize]
            || leaf.optimizer.is_some_and(has_state)
            || self.by_patterns.is_some_and(by_patterns)
    }
}

/// Returns the value of a leaf in the result. In the lists `params` and `param_names` of an optimizer, the name of each
/// parameter is replaced by its new name. A parameter is removed from `params` if [`KeptParameters::is_listed`] returns
/// false. No parameter is removed from `param_names`.
fn value(
    survey: &Survey<'_>,
    naming: &Naming<'_, '_>,
    (index, leaf): (usize, Leaf),
    kept: &KeptParameters<'_>,
) -> Value {
    let value = survey.value(leaf);
    let listed = leaf.in_groups() && leaf.kind == LeafKind::Object;
    let key = if listed { survey.last_key(leaf).unwrap_or_default() } else { "".into() };
    // `param_names` has one item for each item of a list of numbers, so none of its items may be removed.
    let may_drop = key == "params";
    if !may_drop && key != "param_names" {
        return value.clone();
    }
    let head = survey.state_head(leaf);
    let rename = |item: &Value| {
        let Value::Str(name) = item else { return Some(item.clone()) };
        let name = survey.clean(name);
        if may_drop && !kept.is_listed(survey, (index, leaf), &name) {
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

/// Sets the name of every selected tensor to its first name in the new state dict.
fn name_tensors(catalog: &mut Catalog) {
    let mut named = vec![false; catalog.tensors.len()];
    let entries = &mut catalog.tensors;
    tensors(&catalog.state, &Path::default(), &mut |path, id| {
        if !std::mem::replace(&mut named[id.0 as usize], true) {
            entries[id.0 as usize].fqn = path.fqn();
        }
    });
}

fn left_out(source: &Catalog, survey: &Survey<'_>, kept: &[bool]) -> LeftOut {
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
            if taken.contains(&id) || !seen.insert(id) {
                return;
            }
            if source.tensor(id).is_unreadable_object() {
                left_out.objects.push(name);
            } else {
                *groups.entry(survey.top_key(*leaf)).or_default() += 1;
                left_out.tensors.push(name);
            }
        });
    }
    left_out.groups = groups.into_iter().collect();
    left_out
}
