//! Each plain tensor gets the sharding that it is told to have.
//!
//! Rules know a tensor by the names that rules for a target know it by. State and gradients follow their parameter where
//! every rank holds of both the same shape. State of another shape (a step, a factored moment) is not meant by what is
//! said of parameters: it is whole on every rank, unless a rule is for that state itself.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path as FilePath, PathBuf};

use super::DeclaredLayout;
use super::effects::DeclarationEffects;
use super::misfit::{self, LayoutMisfit};
use super::reduce::ReduceRules;
use crate::catalog::optimizer::optimizer_state;
use crate::catalog::owner::{Owner, Owners};
use crate::catalog::path::tensors;
use crate::catalog::wrappers::{clean_name, with_clean};
use crate::catalog::{
    Catalog, Chunk, ChunkTable, Fqn, MeshId, PartialValues, Path, Sharding, TensorEntry, TensorId, checked_len_bytes,
    model,
};
use crate::error::{Error, Result};
use crate::format::parallelize::{PlanSide, PlannedModel};
use crate::format::reading::ReadFindings;
use crate::layout::parallelize::{Parameter, ParameterKind, ParameterOrder, PlacementSource, ShapeOrigin};
use crate::layout::rules::{MeshLayout, Rule, unused_rule_warning};
use crate::layout::shards::{MeshPlacement, SharedTensor};
use crate::layout::whole::{PartError, RankPart, assemble};
use crate::layout::{Dims, LayoutError, Placement, Rank, Tile};
use crate::nearest;
use crate::quantity::count;

/// What tensors without a rule are, where nothing is said of them.
const UNSAID: &str = "the others (nothing is said of it: whole on every rank)";
/// What tensors of a model are without a rule where an optimizer has state of others.
const UNTRAINED: &str =
    "the others (no rule is for it and no optimizer has state of it: a buffer, whole on every rank)";

pub struct LayoutResolver<'a> {
    told: &'a DeclaredLayout,
    layout: &'a MeshLayout,
    mesh: MeshId,
    catalog: &'a Catalog,
    root: &'a FilePath,
    reading: &'a ReadFindings<'a>,
    owners: Owners<'a>,
    /// Tensors of the model.
    parameters: HashSet<TensorId>,
    /// Where each tensor stands, by number; nowhere where only ranks that disagree have it.
    paths: Vec<Vec<Path>>,
    reductions: ReduceRules,
    /// Parameters that an optimizer has state of, in their shape.
    trained: HashSet<TensorId>,
    /// Tensors that were taken for buffers.
    buffers: usize,
    effects: DeclarationEffects,
    /// How a plan has the parameters.
    planned: Option<(PlannedModel, HashMap<TensorId, Fqn>)>,
}

/// What was found out.
pub struct ResolvedLayouts {
    /// Tensors as they are.
    pub entries: Vec<(TensorId, TensorEntry)>,
    /// What to tell of it.
    pub notes: Vec<String>,
}

/// By what a rule may know a tensor.
struct TensorNames {
    names: Vec<String>,
    /// It belongs to a parameter of other shapes, which goes by these names.
    stray: Option<Vec<String>>,
    /// The parameter it belongs to is not there.
    is_orphan: bool,
    is_nameless: bool,
    is_of_model: bool,
    /// The parameter that it is, or whose shape it has.
    parameter: Option<TensorId>,
}

impl TensorNames {
    fn is_meant_by(&self, rule: &Rule) -> bool {
        // What is said of a parameter is not said of the stray.
        let is_of_parameter = || self.stray.as_ref().is_some_and(|parameter| rule.covers(parameter));
        rule.covers(&self.names) && !is_of_parameter()
    }
}

impl<'a> LayoutResolver<'a> {
    pub fn new(
        told: &'a DeclaredLayout,
        layout: &'a MeshLayout,
        mesh: MeshId,
        catalog: &'a Catalog,
        root: &'a FilePath,
        reading: &'a ReadFindings<'a>,
        reductions: ReduceRules,
    ) -> Self {
        let mut paths = vec![Vec::new(); catalog.tensors.len()];
        tensors(&catalog.state, &Path::default(), &mut |path, id| paths[id.0 as usize].push(path.clone()));
        let owners = Owners::new(catalog);
        let parameters = owners.parameters.values().copied().collect();
        let (trained, buffers, effects, planned) = (HashSet::new(), 0, DeclarationEffects::default(), None);
        Self {
            told,
            layout,
            mesh,
            catalog,
            root,
            reading,
            owners,
            parameters,
            paths,
            reductions,
            trained,
            buffers,
            effects,
            planned,
        }
    }

    pub fn tell(mut self, order: ParameterOrder) -> Result<ResolvedLayouts> {
        let mut meant = Vec::new();
        for (id, entry) in (0..).map(TensorId).zip(&self.catalog.tensors) {
            // State tells what is trained, however it lies.
            let known = self.known(id);
            if entry.is_shared() {
                continue;
            }
            let paths = &self.paths[id.0 as usize];
            let is_own = paths.iter().any(|path| model::is_random_state(path.fqn().as_str()));
            if paths.is_empty() || is_own {
                same_shapes(entry)?;
            } else {
                meant.push((id, entry, known));
            }
        }
        // A misspelt rule would be missed at the first tensor that it was for.
        self.check_rules(&meant)?;
        let unheard = self.unheard(&meant);
        self.planned = self.plan(order)?;
        let entries = meant.iter().map(|(id, entry, known)| Ok((*id, self.entry(*id, entry, known)?)));
        let entries = entries.collect::<Result<_>>()?;
        self.effects.check(self.told, self.catalog)?;
        let number = count(self.buffers, "tensor");
        let buffers = format!("{number} without state of an optimizer, taken for buffers: whole on every rank");
        let buffers = (self.buffers > 0).then_some(buffers);
        let planned = self.planned.as_ref().map(|(planned, _)| planned.notes("")).unwrap_or_default();
        let notes = self.reductions.finish()?.into_iter().chain(planned).chain(buffers).chain(unheard).collect();
        Ok(ResolvedLayouts { entries, notes })
    }

    /// Let the plan meet the parameters.
    fn plan(&self, order: ParameterOrder) -> Result<Option<(PlannedModel, HashMap<TensorId, Fqn>)>> {
        let Some(plan) = &self.layout.plan else { return Ok(None) };
        let model = model::parameters(&self.catalog.state);
        let parameter = |(fqn, id): &(Fqn, TensorId)| {
            let entry = self.catalog.tensor(*id);
            let is_trained = self.trained.is_empty() || self.trained.contains(id);
            Parameter {
                name: if self.told.keep_names { fqn.to_string() } else { clean_name(fqn.as_str()) },
                shape: &entry.shape,
                shape_origin: ShapeOrigin::LocalShard,
                kind: if entry.dtype.is_float() && is_trained {
                    ParameterKind::Parameter
                } else {
                    ParameterKind::Buffer
                },
            }
        };
        let parameters: Vec<Parameter<'_>> = model.iter().map(parameter).collect();
        let names = model.iter().map(|(fqn, _)| fqn.clone()).collect();
        let planned = PlannedModel::new(PlanSide::Source, (plan, &self.layout.mesh), names, &parameters, order)?;
        // What is tied goes by its first name.
        Ok(Some((planned, model.into_iter().rev().map(|(fqn, id)| (id, fqn)).collect())))
    }

    /// How the plan has it, or the parameter whose shape it has.
    fn planned(&self, id: TensorId, known: &TensorNames) -> Option<(SharedTensor, PlacementSource)> {
        let (planned, names) = self.planned.as_ref()?;
        let laid = planned.laid(names.get(&known.parameter.unwrap_or(id))?)?;
        let shared = match &laid.shared {
            None => self.layout.replicated(),
            // Ranks of any dim may hold summands.
            Some(shared) if !self.told.reduce.is_empty() => SharedTensor { slice: None, ..shared.clone() },
            Some(shared) => shared.clone(),
        };
        Some((self.layout.with_default_split(shared), laid.by))
    }

    fn check_rules(&self, meant: &[(TensorId, &TensorEntry, TensorNames)]) -> Result<()> {
        let mut names = meant.iter().flat_map(|(.., known)| &known.names);
        let unused = self.layout.rules.iter().find(|rule| !names.clone().any(|name| rule.pattern.covers(name)));
        let Some(rule) = unused else { return Ok(()) };
        let names: Vec<String> = names.by_ref().cloned().collect();
        Err(Error::usage(
            format!("{}: no plain tensor has a name like that", rule.origin),
            nearest::pattern_hint(rule.pattern.as_str(), &names),
        ))
    }

    /// What to tell of rules that never win.
    fn unheard(&self, meant: &[(TensorId, &TensorEntry, TensorNames)]) -> Vec<String> {
        let (mut heard, mut late) = (BTreeSet::new(), BTreeSet::new());
        for (.., known) in meant {
            let mut for_it =
                (0..).zip(&self.layout.rules).filter(|(_, rule)| known.is_meant_by(rule)).map(|(at, _)| at);
            heard.extend(for_it.next());
            late.extend(for_it);
        }
        let said = |at: &usize| &self.layout.rules[*at].origin;
        late.difference(&heard).map(|at| unused_rule_warning(said(at))).collect()
    }

    fn entry(&mut self, id: TensorId, entry: &TensorEntry, known: &TensorNames) -> Result<TensorEntry> {
        let (mut shared, said) = self.choose(id, entry, known)?;
        self.reductions.apply(&self.paths[id.0 as usize][0], entry.dtype, &mut shared.placements);
        self.effects.cut += usize::from(shared.placements.iter().any(|placement| placement.sharded_dim().is_some()));
        let held = held(entry);
        let mesh = &self.layout.mesh;
        let is_missing = |rank: Rank| !self.reading.ranks.contains(&rank);
        let found = assemble(mesh, &shared, &held, &is_missing).map_err(|error| {
            let file = self.file(entry, rank_of(&error));
            let name = known.names.last().map_or(entry.fqn.as_str(), String::as_str);
            LayoutMisfit { entry, name, shared: &shared, said: &said, held: &held, mesh }.error(error, &file)
        })?;
        if checked_len_bytes(&found.shape, entry.dtype).is_none() {
            return Err(misfit::too_large(
                &self.file(entry, held.first().map(|part| part.rank)),
                &entry.fqn,
                &found.shape,
            ));
        }
        let tiles: HashMap<Rank, Tile> = held.iter().map(|part| part.rank).zip(found.tiles).collect();
        let mut chunks = ChunkTable::new(found.shape.len());
        for chunk in entry.chunks.iter() {
            let tile = chunk.rank.and_then(|rank| tiles.get(&rank)).cloned().unwrap_or(chunk.tile);
            chunks.push(Chunk { tile, ..chunk });
        }
        let summands = PartialValues::new(MeshPlacement { mesh, shared: &shared }, &chunks)?.map(Box::new);
        let stride = entry.stride.clone().filter(|_| found.shape == entry.shape);
        // One element is nothing to share; whoever has none is a plain tensor in any job.
        let is_scalar = found.shape.is_empty() && summands.is_none();
        let sharding = (!is_scalar).then(|| Box::new(Sharding { mesh: self.mesh, shared }));
        Ok(TensorEntry { shape: found.shape, sharding, stride, partial_values: summands, chunks, ..entry.clone() })
    }

    fn choose(&mut self, id: TensorId, entry: &TensorEntry, known: &TensorNames) -> Result<(SharedTensor, String)> {
        let layout = self.layout;
        if let Some(rule) = layout.rules.iter().find(|rule| known.is_meant_by(rule)) {
            match layout.placement_by_rule(rule, &known.names, &entry.shape) {
                Err(LayoutError::RuleMisfit { .. }) if known.is_orphan || known.stray.is_some() => {}
                shared => return Ok((shared?.unwrap_or_else(|| layout.replicated()), rule.origin.clone())),
            }
        }
        if let Some((shared, by)) = self.planned(id, known) {
            self.effects.by_plan += usize::from(by != PlacementSource::Buffer);
            return Ok((shared, format!("the plan ({by})")));
        }
        let (shared, said) = match (&known.stray, &self.told.fallback) {
            (Some(_), _) => (layout.with_default_split(layout.replicated()), UNSAID),
            (None, said) => {
                let said = said.as_ref().map_or(UNSAID, |(_, said)| said.as_str());
                (layout.fallback_placement(entry.shape.len(), None).shared, said)
            }
        };
        let is_whole = shared.placements.iter().all(|placement| *placement == Placement::Replicate);
        if known.is_nameless
            && !entry.shape.is_empty()
            && !(is_whole && self.layout.rules.is_empty() && self.planned.is_none())
        {
            return Err(misfit::unknown_number(&entry.fqn));
        }
        // To take a whole tensor for a part would make up a larger one, and nothing would show it.
        if known.is_of_model && !is_whole && !self.trained.is_empty() && !self.trained.contains(&id) {
            self.buffers += 1;
            return Ok((layout.replicated(), UNTRAINED.to_owned()));
        }
        self.effects.by_fallback += usize::from(known.stray.is_none() && !entry.shape.is_empty());
        Ok((shared, said.to_owned()))
    }

    fn known(&mut self, id: TensorId) -> TensorNames {
        let mut known = TensorNames {
            names: Vec::new(),
            stray: None,
            is_orphan: false,
            is_nameless: false,
            is_of_model: false,
            parameter: None,
        };
        for path in self.paths[id.0 as usize].clone() {
            let owner = self.owners.owner_of(&path);
            let parameter = owner.as_ref().and_then(|owner| owner.id);
            let follows = parameter.filter(|parameter| self.lie_alike(*parameter, id));
            let is_stray = parameter.is_some() && follows.is_none();
            known.names.extend(self.owners.rule_names(&path, owner.as_ref(), is_stray));
            for own in parameter.iter().flat_map(|parameter| &self.paths[parameter.0 as usize]) {
                let names = model::rule_names(own, &self.owners.model_root);
                if is_stray {
                    known.stray.get_or_insert_default().extend(names);
                } else {
                    known.names.extend(names);
                }
            }
            known.parameter = known.parameter.or(follows);
            if let Some(parameter) = follows.filter(|_| optimizer_state(&path).is_some()) {
                self.trained.insert(parameter);
            }
            known.is_of_model |= owner.is_none() && self.parameters.contains(&id);
            known.is_orphan |= owner.is_some() && parameter.is_none();
            known.is_nameless |= matches!(owner, Some(Owner { by_number: true, name: None, .. }));
        }
        if !self.told.keep_names {
            with_clean(&mut known.names);
            known.stray.iter_mut().for_each(with_clean);
        }
        known
    }

    /// Whether every rank holds of both the same shape.
    fn lie_alike(&self, left: TensorId, right: TensorId) -> bool {
        let (left, right) = (held(self.catalog.tensor(left)), held(self.catalog.tensor(right)));
        left == right
    }

    /// The file of a rank, where it has a chunk that is anywhere.
    fn file(&self, entry: &TensorEntry, rank: Option<Rank>) -> PathBuf {
        let mut own = entry.chunks.iter().filter(|chunk| rank.is_none() || chunk.rank == rank);
        let file = own.find_map(|chunk| chunk.location.file());
        file.map_or_else(|| self.root.to_path_buf(), |file| self.reading.files.path(file).to_path_buf())
    }
}

/// What ranks hold of it; a tensor that is tied on some ranks may be there twice.
fn held(entry: &TensorEntry) -> Vec<RankPart> {
    let mut known: HashMap<Rank, Dims> = HashMap::with_capacity(entry.chunks.len());
    let mut held = Vec::with_capacity(entry.chunks.len());
    for chunk in entry.chunks.iter() {
        let Some(rank) = chunk.rank else { continue };
        let sizes = chunk.tile.sizes();
        if known.insert(rank, sizes.clone()).as_ref() != Some(&sizes) {
            held.push(RankPart { rank, sizes });
        }
    }
    held
}

/// What nothing is said of is the same everywhere, its values apart.
fn same_shapes(entry: &TensorEntry) -> Result<()> {
    let other = entry.chunks.iter().find(|chunk| chunk.tile.sizes() != entry.shape);
    let Some(other) = other else { return Ok(()) };
    let between = format!("{} and {}", entry.chunk_name(0), list_rank(&other));
    let detail = format!("{:?} and {:?}", entry.shape.as_slice(), other.tile.sizes().as_slice());
    Err(entry.fqn.disagreement("shape", between, detail))
}

fn list_rank(chunk: &Chunk) -> String {
    chunk.rank.map_or_else(|| String::from("another"), |rank| format!("rank {rank}"))
}

fn rank_of(error: &PartError) -> Option<Rank> {
    match error {
        PartError::WrongSizes { rank, .. } | PartError::Missing { rank } | PartError::OutsideMesh { rank } => {
            Some(*rank)
        }
        PartError::Overflow { .. } | PartError::Layout { .. } => None,
    }
}
