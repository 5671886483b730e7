//! Determines the sharding of each plain tensor from the user's declarations.
//!
//! Rules for the source match a tensor by the same names as rules for the target. Optimizer state and gradients get the
//! layout of their parameter if, on every rank, the local shape equals the local shape of the parameter. Optimizer
//! state with another local shape (a step, a factored moment) is replicated, unless a rule matches the name of the
//! state tensor itself. Unit of shapes: elements.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path as FilePath, PathBuf};

use super::DeclaredLayout;
use super::effects::DeclarationEffects;
use super::misfit::{self, LayoutMisfit};
use super::reduce::ReduceRules;
use crate::catalog::optimizer::optimizer_state;
use crate::catalog::owner::{Owner, Owners};
use crate::catalog::path::tensors;
use crate::catalog::unreadable::UnreadableKind;
use crate::catalog::wrappers::ModelWrappers;
use crate::catalog::{
    Catalog, Chunk, Fqn, Key, MeshId, Path, TensorEntry, TensorId, Unreadable, checked_len_bytes, state_dict,
};
use crate::error::{Error, Result};
use crate::format::parallelize::{PlanSide, PlannedModel};
use crate::format::reading::RanksWithFiles;
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::parallelize::{Parameter, ParameterKind, ParameterOrder, PlacementSource, ShapeOrigin};
use crate::layout::rules::{MeshLayout, Rule, unused_rule_warning};
use crate::layout::whole::{PartError, assemble};
use crate::layout::{LayoutError, Placement, Rank};
use crate::nearest;
use crate::quantity::count;
use crate::storage::Files;

/// The text in messages for the origin of a layout, if the user declared no layout for the tensor.
const UNDECLARED: &str = "the default layout (whole on every rank)";
/// The text in messages for the origin of a layout, if the tensor is treated as a buffer: no rule matches the model
/// tensor, and it has no optimizer state although other tensors of the model have optimizer state.
const UNTRAINED: &str = "the default for tensors without a rule and optimizer state (buffers, whole on every rank)";

/// Determines the layout of every plain tensor of a catalog.
pub struct LayoutResolver<'a> {
    declared: &'a DeclaredLayout,
    layout: &'a MeshLayout,
    mesh: MeshId,
    catalog: &'a Catalog,
    root: &'a FilePath,
    files: &'a Files,
    ranks: &'a RanksWithFiles,
    owners: Owners<'a>,
    /// The wrapper prefixes in the names of the model's tensors.
    wrappers: ModelWrappers,
    /// The ids of all tensors of the model.
    parameters: HashSet<TensorId>,
    /// For each tensor, its paths in the state dict; empty for a tensor that only occurs in values that differ between
    /// ranks.
    paths: Vec<Vec<Path>>,
    reductions: ReduceRules,
    /// The parameters for which an optimizer has a state tensor whose local shapes equal the local shapes of the
    /// parameter.
    trained: HashSet<TensorId>,
    /// The number of tensors that are treated as buffers.
    buffers: usize,
    effects: DeclarationEffects,
    /// The placements of the parameters under the declared plan, and the name of each parameter; `None` without a plan.
    planned: Option<(PlannedModel, HashMap<TensorId, Fqn>)>,
}

/// The result of [`LayoutResolver::resolve`].
pub struct ResolvedLayouts {
    /// The plain tensors, each with an entry that has its sharding and its full shape.
    pub entries: Vec<(TensorId, TensorEntry)>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// The names by which a rule may match a tensor.
struct TensorNames {
    names: Vec<String>,
    /// If the tensor is optimizer state and its local shapes differ from those of its parameter, the names of this
    /// parameter; otherwise `None`.
    other_shaped_parameter: Option<Vec<String>>,
    /// True if the tensor is optimizer state of a parameter that is not in the checkpoint.
    is_without_parameter: bool,
    is_unnamed_number: bool,
    is_in_model: bool,
    /// If the tensor is optimizer state and has the local shapes of its parameter, the id of this parameter; otherwise
    /// `None`.
    parameter_id: Option<TensorId>,
}

impl TensorNames {
    fn is_covered_by(&self, rule: &Rule) -> bool {
        // A rule for a parameter does not apply to state of another shape.
        let is_of_parameter = || self.other_shaped_parameter.as_ref().is_some_and(|parameter| rule.covers(parameter));
        rule.covers(&self.names) && !is_of_parameter()
    }
}

impl<'a> LayoutResolver<'a> {
    /// Returns a resolver for the tensors of a catalog.
    pub fn new(
        declared: &'a DeclaredLayout,
        layout: &'a MeshLayout,
        mesh: MeshId,
        catalog: &'a Catalog,
        root: &'a FilePath,
        (files, ranks): (&'a Files, &'a RanksWithFiles),
        reductions: ReduceRules,
    ) -> Self {
        let mut paths = vec![Vec::new(); catalog.tensors.len()];
        tensors(&catalog.state, &Path::default(), &mut |path, id| paths[id.0 as usize].push(path.clone()));
        let owners = Owners::new(catalog);
        let parameters = owners.parameters.values().copied().collect();
        let wrappers = ModelWrappers::new(&owners.model_root, owners.parameters.keys().map(Fqn::as_str));
        let (trained, buffers, effects, planned) = (HashSet::new(), 0, DeclarationEffects::default(), None);
        Self {
            declared,
            layout,
            mesh,
            catalog,
            root,
            files,
            ranks,
            owners,
            wrappers,
            parameters,
            paths,
            reductions,
            trained,
            buffers,
            effects,
            planned,
        }
    }

    /// Returns the new catalog entries of all plain tensors, and notes for the user.
    pub fn resolve(mut self, order: ParameterOrder) -> Result<ResolvedLayouts> {
        let mut plain_tensors = Vec::new();
        for (id, entry) in (0..).map(TensorId).zip(&self.catalog.tensors) {
            // The optimizer state shows which parameters are trained, regardless of its layout.
            let tensor_names = self.tensor_names(id);
            if entry.is_shared() || entry.unreadable.is_some() {
                continue;
            }
            let paths = &self.paths[id.0 as usize];
            let is_own = paths.iter().any(|path| state_dict::is_random_state(path.fqn().as_str()));
            if paths.is_empty() || is_own {
                check_equal_shapes(entry)?;
            } else {
                plain_tensors.push((id, entry, tensor_names));
            }
        }
        // Checked first, so that a misspelled rule does not cause a misleading error for the tensor that it should
        // match.
        self.check_rules(&plain_tensors)?;
        let overridden = self.overridden_rules(&plain_tensors);
        self.planned = self.plan(order)?;
        let entries = plain_tensors
            .iter()
            .map(|(id, entry, tensor_names)| Ok((*id, self.resolve_or_defer(*id, entry, tensor_names)?)));
        let entries = entries.collect::<Result<_>>()?;
        self.effects.check(self.declared, self.catalog)?;
        let number = count(self.buffers, "tensor");
        let buffers = if self.buffers == 1 {
            format!("{number} has no optimizer state, so it is treated as a buffer that is whole on every rank")
        } else {
            format!("{number} have no optimizer state, so they are treated as buffers that are whole on every rank")
        };
        let buffers = (self.buffers > 0).then_some(buffers);
        let planned = self.planned.as_ref().map(|(planned, _)| planned.notes("")).unwrap_or_default();
        let notes = self.reductions.finish()?.into_iter().chain(planned).chain(buffers).chain(overridden).collect();
        Ok(ResolvedLayouts { entries, notes })
    }

    /// Gives the parameters of the model the placements of the declared plan. Returns `None` if no plan is declared.
    fn plan(&self, order: ParameterOrder) -> Result<Option<(PlannedModel, HashMap<TensorId, Fqn>)>> {
        let Some(plan) = &self.layout.plan else { return Ok(None) };
        let model = state_dict::parameters(&self.catalog.state);
        let parameter = |(fqn, id): &(Fqn, TensorId)| {
            let entry = self.catalog.tensor(*id);
            let is_trained = self.trained.is_empty() || self.trained.contains(id);
            Parameter {
                name: if self.declared.keep_names { fqn.to_string() } else { self.wrappers.clean(fqn.as_str()) },
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
        // A tied parameter is planned under its first name.
        Ok(Some((planned, model.into_iter().rev().map(|(fqn, id)| (id, fqn)).collect())))
    }

    /// Returns the layout that the plan gives the tensor. If the tensor is optimizer state, returns the layout that the
    /// plan gives the parameter.
    fn planned_layout(&self, id: TensorId, tensor_names: &TensorNames) -> Option<(SharedTensor, PlacementSource)> {
        let (planned, names) = self.planned.as_ref()?;
        let planned = planned.placement(names.get(&tensor_names.parameter_id.unwrap_or(id))?)?;
        let shared = match &planned.shared {
            None => self.layout.replicated(),
            // Partial values may exist along any mesh dim, also outside the slice.
            Some(shared) if !self.declared.reduce.is_empty() => SharedTensor { slice: None, ..shared.clone() },
            Some(shared) => shared.clone(),
        };
        Some((self.layout.with_default_split(shared), planned.by))
    }

    fn check_rules(&self, plain_tensors: &[(TensorId, &TensorEntry, TensorNames)]) -> Result<()> {
        let mut names = plain_tensors.iter().flat_map(|(.., tensor_names)| &tensor_names.names);
        let unused = self.layout.rules.iter().find(|rule| !names.clone().any(|name| rule.pattern.covers(name)));
        let Some(rule) = unused else { return Ok(()) };
        let names: Vec<String> = names.by_ref().cloned().collect();
        Err(Error::usage(
            format!("{}: the pattern matches no plain tensor", rule.origin),
            nearest::pattern_hint(rule.pattern.as_str(), &names),
        ))
    }

    /// Returns a note for each rule that another rule always overrides.
    fn overridden_rules(&self, plain_tensors: &[(TensorId, &TensorEntry, TensorNames)]) -> Vec<String> {
        let (mut applied, mut overridden) = (BTreeSet::new(), BTreeSet::new());
        for (.., tensor_names) in plain_tensors {
            let mut matching =
                (0..).zip(&self.layout.rules).filter(|(_, rule)| tensor_names.is_covered_by(rule)).map(|(at, _)| at);
            applied.extend(matching.next());
            overridden.extend(matching);
        }
        let text = |index: &usize| &self.layout.rules[*index].origin;
        overridden.difference(&applied).map(|index| unused_rule_warning(text(index))).collect()
    }

    fn resolve_entry(
        &mut self,
        id: TensorId,
        entry: &TensorEntry,
        tensor_names: &TensorNames,
    ) -> Result<Option<TensorEntry>> {
        let Some((mut shared, declared_by)) = self.choose_layout(id, entry, tensor_names)? else { return Ok(None) };
        self.reductions.apply(&self.paths[id.0 as usize][0], entry.dtype, &mut shared.placements);
        self.effects.sharded +=
            usize::from(shared.placements.iter().any(|placement| placement.sharded_dim().is_some()));
        let parts = entry.local_shapes();
        let mesh = &self.layout.mesh;
        let ranks = self.ranks_with_file(id);
        let is_missing = |rank: Rank| !ranks.contains(&rank);
        let found = assemble(mesh, &shared, &parts, &is_missing).map_err(|error| {
            let file = self.file_of_rank(entry, rank_of(&error));
            let name = tensor_names.names.last().map_or(entry.fqn.as_str(), String::as_str);
            LayoutMisfit { entry, name, shared: &shared, declared_by: &declared_by, local_shapes: &parts, mesh }
                .error(error, &file)
        })?;
        if checked_len_bytes(&found.shape, entry.dtype).is_none() {
            return Err(misfit::too_large_error(
                &self.file_of_rank(entry, parts.first().map(|part| part.rank)),
                &entry.fqn,
                &found.shape,
            ));
        }
        Ok(Some(entry.joined((self.mesh, mesh), shared, &parts, found)?))
    }

    /// Returns the ranks that have a file of the series to which the tensor belongs. If SRC has several series, the
    /// first key of the tensor's path is the name of the series.
    fn ranks_with_file(&self, id: TensorId) -> &'a BTreeSet<Rank> {
        let ranks = self.ranks;
        let series = match self.paths[id.0 as usize].first().and_then(|path| path.0.first()) {
            Some(Key::Name(name)) if ranks.of_series.len() > 1 => ranks.of_series.get(name.as_ref()),
            _ => None,
        };
        series.unwrap_or(&ranks.all)
    }

    /// Returns the entry of a tensor with its layout. If the layout is unknown or does not match the local shapes,
    /// returns an entry that is marked as unreadable, because the error matters only if the tensor is selected.
    fn resolve_or_defer(
        &mut self,
        id: TensorId,
        entry: &TensorEntry,
        tensor_names: &TensorNames,
    ) -> Result<TensorEntry> {
        let kind = match self.resolve_entry(id, entry, tensor_names) {
            Ok(Some(entry)) => return Ok(entry),
            Ok(None) => misfit::unknown_number(&entry.fqn),
            Err(Error::Catalog(error)) => UnreadableKind::Misfit(error),
            Err(error) => return Err(error),
        };
        let why = Unreadable { file: self.file_of_rank(entry, None), kind };
        Ok(TensorEntry { unreadable: Some(Box::new(why)), ..entry.clone() })
    }

    /// Returns the layout of a tensor, and the origin of the layout for messages. Returns `None` if the layout is
    /// unknown, because the tensor is optimizer state of a parameter of which only the parameter id is known.
    fn choose_layout(
        &mut self,
        id: TensorId,
        entry: &TensorEntry,
        tensor_names: &TensorNames,
    ) -> Result<Option<(SharedTensor, String)>> {
        let layout = self.layout;
        if let Some(rule) = layout.rules.iter().find(|rule| tensor_names.is_covered_by(rule)) {
            match layout.placement_by_rule(rule, &tensor_names.names, &entry.shape) {
                Err(LayoutError::RuleMisfit { .. })
                    if tensor_names.is_without_parameter || tensor_names.other_shaped_parameter.is_some() => {}
                shared => return Ok(Some((shared?.unwrap_or_else(|| layout.replicated()), rule.origin.clone()))),
            }
        }
        if let Some((shared, by)) = self.planned_layout(id, tensor_names) {
            self.effects.by_plan += usize::from(by != PlacementSource::Buffer);
            return Ok(Some((shared, format!("the plan ({by})"))));
        }
        let (shared, declared_by) = match (&tensor_names.other_shaped_parameter, &self.declared.fallback) {
            (Some(_), _) => (layout.with_default_split(layout.replicated()), UNDECLARED),
            (None, declared_by) => {
                let declared_by = declared_by.as_ref().map_or(UNDECLARED, |(_, declared_by)| declared_by.as_str());
                (layout.fallback_placement(entry.shape.len(), None).shared, declared_by)
            }
        };
        let is_whole = shared.placements.iter().all(|placement| *placement == Placement::Replicate);
        if tensor_names.is_unnamed_number
            && !entry.shape.is_empty()
            && !(is_whole && self.layout.rules.is_empty() && self.planned.is_none())
        {
            self.effects.by_fallback += 1;
            return Ok(None);
        }
        // If a whole tensor were treated as a part, the result would be a larger tensor, without any error.
        if tensor_names.is_in_model && !is_whole && !self.trained.is_empty() && !self.trained.contains(&id) {
            self.buffers += 1;
            return Ok(Some((layout.replicated(), UNTRAINED.to_owned())));
        }
        self.effects.by_fallback +=
            usize::from(tensor_names.other_shaped_parameter.is_none() && !entry.shape.is_empty());
        Ok(Some((shared, declared_by.to_owned())))
    }

    fn tensor_names(&mut self, id: TensorId) -> TensorNames {
        let mut tensor_names = TensorNames {
            names: Vec::new(),
            other_shaped_parameter: None,
            is_without_parameter: false,
            is_unnamed_number: false,
            is_in_model: false,
            parameter_id: None,
        };
        for path in self.paths[id.0 as usize].clone() {
            let owner = self.owners.owner_of(&path);
            let parameter = owner.as_ref().and_then(|owner| owner.id);
            let follows = parameter.filter(|parameter| self.has_local_shapes_of(id, *parameter));
            let has_other_shape = parameter.is_some() && follows.is_none();
            tensor_names.names.extend(self.owners.rule_names(&path, owner.as_ref(), has_other_shape));
            for own in parameter.iter().flat_map(|parameter| &self.paths[parameter.0 as usize]) {
                let names = state_dict::rule_names(own, &self.owners.model_root);
                if has_other_shape {
                    tensor_names.other_shaped_parameter.get_or_insert_default().extend(names);
                } else {
                    tensor_names.names.extend(names);
                }
            }
            tensor_names.parameter_id = tensor_names.parameter_id.or(follows);
            if let Some(parameter) = follows.filter(|_| optimizer_state(&path).is_some()) {
                self.trained.insert(parameter);
            }
            tensor_names.is_in_model |= owner.is_none() && self.parameters.contains(&id);
            tensor_names.is_without_parameter |= owner.is_some() && parameter.is_none();
            tensor_names.is_unnamed_number |= matches!(owner, Some(Owner { by_number: true, name: None, .. }));
        }
        if !self.declared.keep_names {
            let names = tensor_names.other_shaped_parameter.iter_mut().chain([&mut tensor_names.names]);
            names.for_each(|names| self.wrappers.with_clean(names));
        }
        tensor_names
    }

    /// Returns whether the optimizer state and the parameter have equal local shapes on each rank that has both. Ranks
    /// that lack the state or the parameter are ignored: a tensor of optimizer state that some ranks lack is still
    /// sharded like its parameter.
    fn has_local_shapes_of(&self, state: TensorId, parameter: TensorId) -> bool {
        let parameter = self.catalog.tensor(parameter).local_shapes();
        let ranks: HashSet<Rank> = parameter.iter().map(|part| part.rank).collect();
        let known: HashSet<_> = parameter.iter().map(|part| (part.rank, part.sizes.as_slice())).collect();
        let mut common = self.catalog.tensor(state).local_shapes();
        common.retain(|part| ranks.contains(&part.rank));
        !common.is_empty() && common.iter().all(|part| known.contains(&(part.rank, part.sizes.as_slice())))
    }

    /// Returns the path of a file in which `rank` (or, if it is `None`, any rank) stores a chunk of the tensor. If
    /// there is no such file, returns the path of SRC.
    fn file_of_rank(&self, entry: &TensorEntry, rank: Option<Rank>) -> PathBuf {
        let mut own = entry.chunks.iter().filter(|chunk| rank.is_none() || chunk.rank == rank);
        let file = own.find_map(|chunk| chunk.location.file());
        file.map_or_else(|| self.root.to_path_buf(), |file| self.files.path(file).to_path_buf())
    }
}

/// Checks that a tensor without a declared layout has the same shape on all ranks. Does not compare the values.
fn check_equal_shapes(entry: &TensorEntry) -> Result<()> {
    let other = entry.chunks.iter().find(|chunk| chunk.tile.sizes() != entry.shape);
    let Some(other) = other else { return Ok(()) };
    let between = format!("{} and {}", entry.chunk_name(0), describe_rank(&other));
    let detail = format!("{:?} and {:?}", entry.shape.as_slice(), other.tile.sizes().as_slice());
    Err(entry.fqn.disagreement("shape", between, detail))
}

fn describe_rank(chunk: &Chunk) -> String {
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
