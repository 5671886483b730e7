//! `inspect --layout`: the layout of a checkpoint as a layout file that `reshard` and `flatten` take.
//!
//! What each tensor of rank files is to be, reshard's own [`Chooser`] tells where it keeps the layout of its source. The
//! most frequent list becomes the fallback, other tensors of the model get rules, and the same chooser, asked with the
//! document that was made, tells what still needs one. Invariant: a document that is printed says of every tensor what
//! the checkpoint has.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashSet};

use indexmap::{IndexMap, IndexSet};
use serde_json::{Value as Json, json};

use crate::catalog::{Catalog, Class, Path, TensorEntry, TensorId, model, path};
use crate::convert::{PlacementResolver, row_specs, shared_mesh};
use crate::error::{Error, Result};
use crate::format::torch::RankLayout;
use crate::format::{Checkpoint, Format, TensorStorage, WriteShards, fsdp_flat};
use crate::layout::file::{self, LayoutFile};
use crate::layout::rules::{Fallback, MeshLayout, PlacementChoice, PlacementList, Rule};
use crate::layout::shards::SharedTensor;
use crate::layout::{DeviceMesh, LayoutError, Pattern, Placement, PlacementSpec, Split, TensorDim};
use crate::select::Wrappers;
pub use file::toml;

/// The document of a checkpoint.
///
/// # Errors
/// `Unsupported` where its files do not tell, or what they tell is not one layout.
pub fn document(checkpoint: &Checkpoint) -> Result<Json> {
    if let Some(flat) = &checkpoint.catalog.flat {
        let text = fsdp_flat::document::render(flat);
        let flat: Json = serde_json::from_str(&text).expect("a document that was just written");
        return Ok(json!({ "flat": flat }));
    }
    let mesh = shared_mesh(checkpoint).ok_or_else(|| untold(checkpoint))?;
    Ok(file::document(&of_tensors(&checkpoint.catalog, checkpoint.format, mesh)?))
}

/// The layout of tensors that ranks share.
fn of_tensors(catalog: &Catalog, format: Format, mesh: DeviceMesh) -> Result<MeshLayout> {
    let tensors = tensors(catalog, format, &mesh)?;
    let mut layout = beginning(mesh, &tensors)?;
    let wanting = (0..).zip(&tensors).filter(|(_, tensor)| tensor.of_model && !tensor.is_as_usual(&layout));
    let wanting: BTreeSet<usize> = wanting.map(|(index, _)| index).collect();
    layout.rules = rules_of(&tensors, &wanting, RuleNames::InModel, &layout)?;
    for naming in [RuleNames::Wide, RuleNames::Whole] {
        let wanting = misled(catalog, format, &layout, &tensors)?;
        let more = rules_of(&tensors, &wanting, naming, &layout)?;
        layout.rules.splice(..0, more);
    }
    match misled(catalog, format, &layout, &tensors)?.first() {
        None => Ok(layout),
        Some(index) => Err(Error::unsupported(
            format!("{}: no rules by names tell how it lies", tensors[*index].path),
            "`dtshard inspect` shows the layout of every tensor; options::like CKPT takes it as it is",
        )),
    }
}

/// Why there is no layout to print.
fn untold(checkpoint: &Checkpoint) -> Error {
    let (root, meshes) = (checkpoint.root.display(), &checkpoint.catalog.meshes);
    if !meshes.is_empty() {
        let meshes: Vec<String> = meshes.iter().map(ToString::to_string).collect();
        return Error::unsupported(
            format!("{root}: its tensors lie on several meshes, {}, and a layout has one", meshes.join(" and ")),
            "`dtshard inspect` shows the mesh of every tensor; options::like CKPT takes its layout as it is",
        );
    }
    let by_hand = "write a layout by hand: docs/reference/layout-file.md";
    match checkpoint.format.tensors() {
        TensorStorage::Ranks => Error::unsupported(format!("{root}: none of its tensors lies on a mesh"), by_hand),
        TensorStorage::Boxes => Error::unsupported(
            format!("{root}: a DCP directory does not record on which mesh, and how, its tensors lie"),
            format!("inspect rank files of the same job; or {by_hand}"),
        ),
        TensorStorage::Whole | TensorStorage::Flat => Error::unsupported(
            format!("{root}: {} holds whole tensors, which lie on no mesh", checkpoint.format),
            format!("inspect rank files of the same job; or {by_hand}"),
        ),
    }
}

/// A name of a tensor, and how it lies.
struct NamedTensor {
    path: Path,
    id: TensorId,
    /// Within the model, where it is of that.
    name: String,
    of_model: bool,
    ndim: usize,
    lies: PlacementChoice,
}

impl NamedTensor {
    /// Whether it needs no rule: it lies as the fallback says, or there is nothing to say.
    fn is_as_usual(&self, layout: &MeshLayout) -> bool {
        match &self.lies {
            PlacementChoice::Plain => self.ndim == 0,
            PlacementChoice::Shared(spec) => *spec == usual(layout, self.ndim),
        }
    }
}

/// What the fallback gives a tensor of so many dims.
fn usual(layout: &MeshLayout, ndim: usize) -> PlacementList {
    let Fallback::Placements(list) = &layout.fallback else { unreachable!("a layout that is printed says all") };
    let fitting = |spec: &PlacementSpec| spec.resolve(ndim).map_or(PlacementSpec::Replicate, PlacementSpec::from);
    let placements: Vec<PlacementSpec> = list.iter().map(fitting).collect();
    let split = layout.split.clone().unwrap_or_default();
    PlacementList { splits: splits_of(&placements, &vec![split; list.len()]), placements, slice: None }
}

/// Splits of what is cut; none where all is cut as in DTensors.
fn splits_of(placements: &[PlacementSpec], splits: &[Split]) -> Vec<Split> {
    let is_cut = |spec: &PlacementSpec| matches!(spec, PlacementSpec::Shard(_) | PlacementSpec::StridedShard { .. });
    let of_dim = |(spec, split): (&PlacementSpec, &Split)| if is_cut(spec) { split.clone() } else { Split::Chunk };
    let splits: Vec<Split> = placements.iter().zip(splits).map(of_dim).collect();
    if splits.iter().all(|split| *split == Split::Chunk) { Vec::new() } else { splits }
}

/// How a tensor lies where reshard writes it again in the same format.
fn lies(
    chooser: &mut PlacementResolver,
    format: Format,
    mesh: &DeviceMesh,
    path: &Path,
    entry: &TensorEntry,
) -> Result<PlacementChoice> {
    let records_splits = format.entry().write_shards.is_some_and(WriteShards::records_splits);
    let local = if records_splits { chooser.local_layout(path, entry)? } else { None };
    let shared = match local.filter(|(class, _)| *class != Class::ShardedTensor) {
        Some((_, shared)) => shared,
        None => match chooser.rank_layout(path, entry)? {
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

/// Every tensor, as reshard would write it again.
fn tensors(catalog: &Catalog, format: Format, mesh: &DeviceMesh) -> Result<Vec<NamedTensor>> {
    // ShardedTensors lie by rows, and record no mesh.
    let by_rows = || Fallback::Placements(row_specs(mesh));
    let as_it_is = if catalog.meshes.is_empty() { by_rows() } else { Fallback::Source };
    let layout = MeshLayout::new(mesh.clone(), Vec::new(), as_it_is, None)?;
    let mut chooser = PlacementResolver::new(catalog, &layout, Wrappers::Match, None);
    let found = model::model(&catalog.state);
    let names: BTreeSet<&str> = found.tensors.iter().map(|(fqn, _)| fqn.as_str()).collect();
    let mut paths = Vec::new();
    path::tensors(&catalog.state, &Path::default(), &mut |path, id| paths.push((path.clone(), id)));
    let tensor = |(path, id): (Path, TensorId)| {
        let entry = catalog.tensor(id);
        let lies = lies(&mut chooser, format, mesh, &path, entry)?;
        let inner = path.0.strip_prefix(found.root.0.as_slice());
        let name = inner.map(|inner| Path(inner.to_vec()).to_string()).filter(|name| names.contains(name.as_str()));
        let of_model = name.is_some();
        Ok(NamedTensor { name: name.unwrap_or_default(), path, id, of_model, ndim: entry.shape.len(), lies })
    };
    paths.into_iter().map(tensor).collect()
}

/// The mesh, what most tensors have, and no rules.
fn beginning(mesh: DeviceMesh, tensors: &[NamedTensor]) -> Result<MeshLayout> {
    /// Lists that are tried: the most frequent one may serve fewer tensors than another, but not many are frequent.
    const TRIED: usize = 16;
    let mut lists: IndexMap<Vec<PlacementSpec>, usize> = IndexMap::new();
    let mut splits: IndexSet<Option<Split>> = IndexSet::from([None]);
    for tensor in tensors {
        if let PlacementChoice::Shared(spec) = &tensor.lies {
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

/// What rules call tensors.
#[derive(Clone, Copy)]
enum RuleNames {
    /// Names within the model, or `*` for their numbers.
    InModel,
    /// Whole names, `*` for their numbers, or what is first and last in them: `optim.**.exp_avg`.
    Wide,
    /// Whole names alone.
    Whole,
}

impl RuleNames {
    /// Patterns to try before the name itself. A pattern is taken where all that it covers lies alike.
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
        // All experts of one layer.
        wider.extend(numbers.iter().filter(|_| numbers.len() > 1).map(|at| numbered(Some(*at))));
        wider
    }
}

/// A rule for each of these tensors, or for several.
fn rules_of(
    tensors: &[NamedTensor],
    wanting: &BTreeSet<usize>,
    naming: RuleNames,
    layout: &MeshLayout,
) -> Result<Vec<Rule>> {
    let name_of = |tensor: &NamedTensor| match naming {
        RuleNames::InModel => tensor.name.clone(),
        RuleNames::Wide | RuleNames::Whole => tensor.path.to_string(),
    };
    let mut found: IndexMap<String, &PlacementChoice> = IndexMap::new();
    let mut mixed: HashSet<String> = HashSet::new();
    for &index in wanting {
        let tensor = &tensors[index];
        check_size(found.len() + mixed.len(), tensors.len())?;
        let name = name_of(tensor);
        let wider = naming.wider(&literal(&name));
        if wider.iter().any(|pattern| found.get(pattern).is_some_and(|known| **known == tensor.lies)) {
            continue;
        }
        let mut chosen = literal(&name);
        for wider in wider.into_iter().filter(|wider| !mixed.contains(wider)).collect::<Vec<_>>() {
            let pattern = Pattern::parse(&wider)?;
            let mut others = tensors.iter().filter(|other| !matches!(naming, RuleNames::InModel) || other.of_model);
            if others.all(|other| other.lies == tensor.lies || !pattern.covers(&name_of(other))) {
                chosen = wider;
                break;
            }
            mixed.insert(wider);
        }
        found.insert(chosen, &tensor.lies);
    }
    let rule = |(pattern, lies): (String, &PlacementChoice)| {
        let lies = match lies {
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
        Ok(Rule { origin: pattern.clone(), pattern: Pattern::parse(&pattern)?, choice: lies })
    };
    found.into_iter().map(rule).collect()
}

/// The splits that tensors with these placements have where no rule says any.
fn usual_splits(spec: &PlacementList, layout: &MeshLayout) -> Vec<Split> {
    splits_of(&spec.placements, &vec![layout.split.clone().unwrap_or_default(); spec.placements.len()])
}

/// The number of a layer, or of an expert.
fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

/// A pattern that covers a name; what means something in patterns is any one character.
fn literal(name: &str) -> String {
    name.replace(['*', '?', '{', '}'], "?")
}

/// Every pattern is held against every tensor, here and by whoever takes the layout.
const MAX_TRIALS: usize = 1 << 24;

/// # Errors
/// `Unsupported` where tensors lie in too many ways to be told by rules.
fn check_size(patterns: usize, tensors: usize) -> Result<()> {
    if patterns.saturating_mul(tensors) <= MAX_TRIALS {
        return Ok(());
    }
    Err(Error::unsupported(
        format!("{tensors} tensors lie in so many ways that a layout would take {patterns} rules, and more"),
        "options::like CKPT takes the layout as it is",
    ))
}

/// The tensors that a layout, as it will be read, says something else of than it should.
fn misled(catalog: &Catalog, format: Format, layout: &MeshLayout, tensors: &[NamedTensor]) -> Result<BTreeSet<usize>> {
    check_size(layout.rules.len(), tensors.len())?;
    let read = LayoutFile::parse("the layout", &toml(&file::document(layout)))?;
    let layout = MeshLayout::new(layout.mesh.clone(), read.rules(&layout.mesh)?, layout.fallback.clone(), read.split)?;
    let mut chooser = PlacementResolver::new(catalog, &layout, Wrappers::Match, None);
    let mut wrong = BTreeSet::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let is_right = match lies(&mut chooser, format, &layout.mesh, &tensor.path, catalog.tensor(tensor.id)) {
            Ok(found) => found == tensor.lies,
            // The pattern of another one that covers it, too: `w` covers `w.scale`.
            Err(Error::Layout(LayoutError::RuleMisfit { .. } | LayoutError::Cut { .. })) => false,
            Err(error) => return Err(error),
        };
        if !is_right {
            wrong.insert(index);
        }
    }
    Ok(wrong)
}
