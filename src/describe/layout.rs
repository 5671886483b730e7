//! `inspect --layout`: the layout of a checkpoint as a layout file that `reshard` and `flatten` take.
//!
//! The [`PlacementResolver`] of `reshard` returns the layout that each tensor has in the source. The list of placements
//! that fits the most tensors becomes the fallback, which is the list for all tensors without a rule. Tensors of the
//! model with other placements get rules. Then the [`PlacementResolver`] applies the finished document to all tensors.
//! A tensor that gets a wrong layout in this way gets a rule, too. Invariant: a printed document gives every tensor the
//! layout that it has in the checkpoint.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashSet};

use indexmap::{IndexMap, IndexSet};
use serde_json::{Value as Json, json};

use crate::catalog::{Catalog, Class, Path, TensorEntry, TensorId, path, state_dict};
use crate::convert::{PlacementResolver, row_specs, shared_mesh};
use crate::error::{Error, Result};
use crate::format::torch::RankLayout;
use crate::format::{Checkpoint, Format, TensorStorage, WriteShards, fsdp_flat};
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::file::{self, LayoutFile};
use crate::layout::rules::{Fallback, MeshLayout, PlacementChoice, PlacementList, Rule};
use crate::layout::{DeviceMesh, LayoutError, Pattern, Placement, PlacementSpec, Split, TensorDim};
use crate::select::Wrappers;
pub use file::toml;

/// Returns the layout document of a checkpoint: units of flat parameters, or a mesh with placement rules.
///
/// # Errors
/// `Unsupported` if the files do not record a layout, or record more than one.
pub fn document(checkpoint: &Checkpoint) -> Result<Json> {
    if let Some(flat) = &checkpoint.catalog.flat {
        let text = fsdp_flat::document::render(flat);
        let flat: Json = serde_json::from_str(&text).expect("a document that was just written");
        return Ok(json!({ "flat": flat }));
    }
    let mesh = shared_mesh(checkpoint).ok_or_else(|| no_recorded_layout(checkpoint))?;
    Ok(file::document(&of_tensors(&checkpoint.catalog, checkpoint.format, mesh)?))
}

/// Returns the layout of a checkpoint whose tensors are sharded on a mesh.
fn of_tensors(catalog: &Catalog, format: Format, mesh: DeviceMesh) -> Result<MeshLayout> {
    let tensors = tensors(catalog, format, &mesh)?;
    let mut layout = beginning(mesh, &tensors)?;
    let unmatched = (0..).zip(&tensors).filter(|(_, tensor)| tensor.of_model && !tensor.is_as_usual(&layout));
    let unmatched: BTreeSet<usize> = unmatched.map(|(index, _)| index).collect();
    layout.rules = rules_of(&tensors, &unmatched, RuleNames::InModel, &layout)?;
    for naming in [RuleNames::Wide, RuleNames::Whole] {
        let unmatched = differently_laid_out(catalog, format, &layout, &tensors)?;
        let more = rules_of(&tensors, &unmatched, naming, &layout)?;
        layout.rules.splice(..0, more);
    }
    match differently_laid_out(catalog, format, &layout, &tensors)?.first() {
        None => Ok(layout),
        Some(index) => Err(Error::unsupported(
            format!("{}: no rule by name can describe its layout", tensors[*index].path),
            "see the layout of every tensor with `dtshard inspect`; use it unchanged with options::like CKPT",
        )),
    }
}

/// Returns the error for a checkpoint that records no layout, or more than one layout.
fn no_recorded_layout(checkpoint: &Checkpoint) -> Error {
    let (root, meshes) = (checkpoint.root.display(), &checkpoint.catalog.meshes);
    if !meshes.is_empty() {
        let meshes: Vec<String> = meshes.iter().map(ToString::to_string).collect();
        return Error::unsupported(
            format!(
                "{root}: its tensors are on several meshes, {}, but a layout file has only one",
                meshes.join(" and ")
            ),
            "see the mesh of every tensor with `dtshard inspect`; use its layout unchanged with options::like CKPT",
        );
    }
    let by_hand = "write a layout by hand: docs/reference/layout-file.md";
    match checkpoint.format.tensors() {
        TensorStorage::Ranks => Error::unsupported(format!("{root}: none of its tensors is on a mesh"), by_hand),
        TensorStorage::Boxes => Error::unsupported(
            format!("{root}: a DCP directory does not record the mesh and placements of its tensors"),
            format!("inspect rank files of the same job; or {by_hand}"),
        ),
        TensorStorage::Whole | TensorStorage::Flat => Error::unsupported(
            format!("{root}: {} holds whole tensors, which are not on a mesh", checkpoint.format),
            format!("inspect rank files of the same job; or {by_hand}"),
        ),
    }
}

/// A tensor under one of its names, with its layout.
struct NamedTensor {
    path: Path,
    id: TensorId,
    /// The name within the model; empty if the tensor is not part of the model.
    name: String,
    of_model: bool,
    ndim: usize,
    choice: PlacementChoice,
}

impl NamedTensor {
    /// Returns true if the tensor needs no rule: the fallback placements give it exactly the layout that it has, or it
    /// is a plain 0-d tensor.
    fn is_as_usual(&self, layout: &MeshLayout) -> bool {
        match &self.choice {
            PlacementChoice::Plain => self.ndim == 0,
            PlacementChoice::Shared(spec) => *spec == usual(layout, self.ndim),
        }
    }
}

/// Returns the placements that the fallback of `layout` gives to a tensor of `ndim` dimensions.
fn usual(layout: &MeshLayout, ndim: usize) -> PlacementList {
    let Fallback::Placements(list) = &layout.fallback else { unreachable!("a printed layout has a fallback") };
    let fitting = |spec: &PlacementSpec| spec.resolve(ndim).map_or(PlacementSpec::Replicate, PlacementSpec::from);
    let placements: Vec<PlacementSpec> = list.iter().map(fitting).collect();
    let split = layout.split.clone().unwrap_or_default();
    PlacementList { splits: splits_of(&placements, &vec![split; list.len()]), placements, slice: None }
}

/// Returns the split rule of each mesh dimension, with `torch.chunk` for mesh dimensions that shard nothing. The list
/// is empty if all split rules are `torch.chunk`, as they are in DTensors.
fn splits_of(placements: &[PlacementSpec], splits: &[Split]) -> Vec<Split> {
    let is_cut = |spec: &PlacementSpec| matches!(spec, PlacementSpec::Shard(_) | PlacementSpec::StridedShard { .. });
    let of_dim = |(spec, split): (&PlacementSpec, &Split)| if is_cut(spec) { split.clone() } else { Split::Chunk };
    let splits: Vec<Split> = placements.iter().zip(splits).map(of_dim).collect();
    if splits.iter().all(|split| *split == Split::Chunk) { Vec::new() } else { splits }
}

/// Returns the layout that `reshard` would give a tensor if `reshard` wrote the format of the source.
fn reshard_layout(
    resolver: &mut PlacementResolver,
    format: Format,
    mesh: &DeviceMesh,
    path: &Path,
    entry: &TensorEntry,
) -> Result<PlacementChoice> {
    let records_splits = format.entry().writers.shards.is_some_and(WriteShards::records_splits);
    let local = if records_splits { resolver.local_layout(path, entry)? } else { None };
    let shared = match local.filter(|(class, _)| *class != Class::ShardedTensor) {
        Some((_, shared)) => shared,
        None => match resolver.rank_layout(path, entry)? {
            RankLayout::Plain => return Ok(PlacementChoice::Plain),
            RankLayout::Distributed { placements, slice } => SharedTensor { placements, splits: Vec::new(), slice },
            RankLayout::Local(shared) => shared,
            RankLayout::Sharded { dim } => {
                let mut placements = vec![Placement::Replicate; mesh.ndim()];
                placements[dim.0] = Placement::Shard(TensorDim(0));
                placements.into()
            }
        },
    };
    let placements: Vec<PlacementSpec> = shared.placements.into_iter().map(Into::into).collect();
    Ok(PlacementChoice::Shared(PlacementList {
        splits: splits_of(&placements, &shared.splits),
        placements,
        slice: shared.slice,
    }))
}

/// Returns every tensor, with the layout that `reshard` would give the tensor if `reshard` wrote the format of the
/// source.
fn tensors(catalog: &Catalog, format: Format, mesh: &DeviceMesh) -> Result<Vec<NamedTensor>> {
    // ShardedTensors are sharded by rows, and record no mesh.
    let by_rows = || Fallback::Placements(row_specs(mesh));
    let as_it_is = if catalog.meshes.is_empty() { by_rows() } else { Fallback::Source };
    let layout = MeshLayout::new(mesh.clone(), Vec::new(), as_it_is, None)?;
    let mut resolver = PlacementResolver::new(catalog, &layout, Wrappers::Match, None);
    let found = state_dict::model(&catalog.state);
    let names: BTreeSet<&str> = found.tensors.iter().map(|(fqn, _)| fqn.as_str()).collect();
    let mut paths = Vec::new();
    path::tensors(&catalog.state, &Path::default(), &mut |path, id| paths.push((path.clone(), id)));
    let tensor = |(path, id): (Path, TensorId)| {
        let entry = catalog.tensor(id);
        let choice = reshard_layout(&mut resolver, format, mesh, &path, entry)?;
        let inner = path.0.strip_prefix(found.root.0.as_slice());
        let name = inner.map(|inner| Path(inner.to_vec()).to_string()).filter(|name| names.contains(name.as_str()));
        let of_model = name.is_some();
        Ok(NamedTensor { name: name.unwrap_or_default(), path, id, of_model, ndim: entry.shape.len(), choice })
    };
    paths.into_iter().map(tensor).collect()
}

/// Returns the layout to start from: the mesh, the fallback that fits the most tensors, and no rules.
fn beginning(mesh: DeviceMesh, tensors: &[NamedTensor]) -> Result<MeshLayout> {
    /// The maximum number of placement lists that are tried as the fallback, the most frequent lists first. Several
    /// lists are tried, because the most frequent list is not always the list that fits the most tensors as a fallback.
    const TRIED: usize = 16;
    let mut lists: IndexMap<Vec<PlacementSpec>, usize> = IndexMap::new();
    let mut splits: IndexSet<Option<Split>> = IndexSet::from([None]);
    for tensor in tensors {
        if let PlacementChoice::Shared(spec) = &tensor.choice {
            *lists.entry(spec.placements.clone()).or_default() += 1;
            let words = spec.splits.iter().filter(|split| !matches!(split, Split::Chunk | Split::Sizes(_)));
            splits.extend(words.cloned().map(Some));
        }
    }
    let whole = vec![PlacementSpec::Replicate; mesh.ndim()];
    let mut best = (0, MeshLayout::new(mesh.clone(), Vec::new(), Fallback::Placements(whole), None)?);
    lists.sort_by(|_, left, _, right| right.cmp(left));
    for list in lists.into_keys().take(TRIED) {
        for split in &splits {
            let fallback = Fallback::Placements(list.clone());
            let layout = MeshLayout::new(mesh.clone(), Vec::new(), fallback, split.clone())?;
            let served = tensors.iter().filter(|tensor| tensor.ndim > 0 && tensor.is_as_usual(&layout)).count();
            if served > best.0 {
                best = (served, layout);
            }
        }
    }
    Ok(best.1)
}

/// The form of the patterns in printed rules.
#[derive(Clone, Copy)]
enum RuleNames {
    /// Patterns match names within the model. Numbers in a pattern may be replaced by `*`.
    InModel,
    /// Patterns match names in the state dict. Numbers in a pattern may be replaced by `*`, and all components between
    /// the first and the last by `**` (`optim.**.exp_avg`).
    Wide,
    /// A pattern is the complete name of one tensor, without wildcards.
    Whole,
}

impl RuleNames {
    /// Returns the patterns to try for a tensor before the complete name, the widest pattern first. The caller uses a
    /// pattern only if all tensors that the pattern covers have one layout.
    fn wider(self, name: &str) -> Vec<String> {
        let parts: Vec<&str> = name.split('.').collect();
        let numbers: Vec<usize> = (0..parts.len()).filter(|at| is_number(parts[*at])).collect();
        let numbered = |kept: Option<usize>| {
            let part = |at: usize| if numbers.contains(&at) && kept != Some(at) { "*" } else { parts[at] };
            (0..parts.len()).map(part).collect::<Vec<_>>().join(".")
        };
        let mut wider = match (self, parts.as_slice()) {
            (Self::Whole, _) => return Vec::new(),
            (Self::Wide, [first, _, .., last]) => vec![format!("{first}.**.{last}")],
            (Self::InModel | Self::Wide, _) => Vec::new(),
        };
        wider.push(numbered(None));
        // With several numbers, each pattern keeps one of them, for example to cover all experts of one layer.
        wider.extend(numbers.iter().filter(|_| numbers.len() > 1).map(|at| numbered(Some(*at))));
        wider
    }
}

/// Returns rules for the tensors whose indices are in `unmatched`. One rule may cover several tensors.
fn rules_of(
    tensors: &[NamedTensor],
    unmatched: &BTreeSet<usize>,
    naming: RuleNames,
    layout: &MeshLayout,
) -> Result<Vec<Rule>> {
    let name_of = |tensor: &NamedTensor| match naming {
        RuleNames::InModel => tensor.name.clone(),
        RuleNames::Wide | RuleNames::Whole => tensor.path.to_string(),
    };
    let mut found: IndexMap<String, &PlacementChoice> = IndexMap::new();
    let mut mixed: HashSet<String> = HashSet::new();
    for &index in unmatched {
        let tensor = &tensors[index];
        check_size(found.len() + mixed.len(), tensors.len())?;
        let name = name_of(tensor);
        let wider = naming.wider(&literal(&name));
        if wider.iter().any(|pattern| found.get(pattern).is_some_and(|known| **known == tensor.choice)) {
            continue;
        }
        let mut chosen = literal(&name);
        for wider in wider.into_iter().filter(|wider| !mixed.contains(wider)).collect::<Vec<_>>() {
            let pattern = Pattern::parse(&wider)?;
            let mut others = tensors.iter().filter(|other| !matches!(naming, RuleNames::InModel) || other.of_model);
            if others.all(|other| other.choice == tensor.choice || !pattern.covers(&name_of(other))) {
                chosen = wider;
                break;
            }
            mixed.insert(wider);
        }
        found.insert(chosen, &tensor.choice);
    }
    let rule = |(pattern, choice): (String, &PlacementChoice)| {
        let choice = match choice {
            PlacementChoice::Shared(spec) if layout.split.is_some() && spec.splits == usual_splits(spec, layout) => {
                PlacementChoice::Shared(PlacementList { splits: Vec::new(), ..spec.clone() })
            }
            PlacementChoice::Shared(spec) if layout.split.is_some() && spec.splits.is_empty() => {
                PlacementChoice::Shared(PlacementList {
                    splits: vec![Split::Chunk; layout.mesh.ndim()],
                    ..spec.clone()
                })
            }
            other => other.clone(),
        };
        Ok(Rule { origin: pattern.clone(), pattern: Pattern::parse(&pattern)?, choice })
    };
    found.into_iter().map(rule).collect()
}

/// Returns the split rules that a tensor with the placements `spec` has in `layout` if no rule sets a split.
fn usual_splits(spec: &PlacementList, layout: &MeshLayout) -> Vec<Split> {
    splits_of(&spec.placements, &vec![layout.split.clone().unwrap_or_default(); spec.placements.len()])
}

/// Returns true if a component of a name is a number, such as the number of a layer.
fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns a pattern for one name. In the pattern, `?` (any character) replaces each character that has a special
/// meaning in patterns.
fn literal(name: &str) -> String {
    name.replace(['*', '?', '{', '}'], "?")
}

/// The maximum of (number of patterns) x (number of tensors). This module and each reader of the layout match every
/// pattern with every tensor.
const MAX_TRIALS: usize = 1 << 24;

/// Checks that (number of patterns) x (number of tensors) is at most [`MAX_TRIALS`].
///
/// # Errors
/// `Unsupported` if it is larger, because the tensors have too many different layouts.
fn check_size(patterns: usize, tensors: usize) -> Result<()> {
    if patterns.saturating_mul(tensors) <= MAX_TRIALS {
        return Ok(());
    }
    Err(Error::unsupported(
        format!(
            "{tensors} tensors have so many different layouts that a layout file would take {patterns} rules or more"
        ),
        "use the layout unchanged with options::like CKPT",
    ))
}

/// Converts a layout to a layout file, reads this file, and returns the indices of the tensors that get another layout
/// from the file than they have in the checkpoint.
fn differently_laid_out(
    catalog: &Catalog,
    format: Format,
    layout: &MeshLayout,
    tensors: &[NamedTensor],
) -> Result<BTreeSet<usize>> {
    check_size(layout.rules.len(), tensors.len())?;
    let read = LayoutFile::parse("the layout", &toml(&file::document(layout)))?;
    let layout = MeshLayout::new(layout.mesh.clone(), read.rules(&layout.mesh)?, layout.fallback.clone(), read.split)?;
    let mut resolver = PlacementResolver::new(catalog, &layout, Wrappers::Match, None);
    let mut wrong = BTreeSet::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let is_right =
            match reshard_layout(&mut resolver, format, &layout.mesh, &tensor.path, catalog.tensor(tensor.id)) {
                Ok(found) => found == tensor.choice,
                // The pattern of another tensor also covers this tensor: `w` covers `w.scale`.
                Err(Error::Layout(LayoutError::RuleMisfit { .. } | LayoutError::Cut { .. })) => false,
                Err(error) => return Err(error),
            };
        if !is_right {
            wrong.insert(index);
        }
    }
    Ok(wrong)
}
