//! Chooses the placements of each tensor on the target mesh, and the Python class of the tensor in rank files.
//!
//! Four inputs can set the placements of a tensor, and the first that applies wins: a rule that matches its name, the
//! plan, the checkpoint of `--like`, and the fallback placements for all other tensors. A tensor that is plain in a
//! source of DTensors (a buffer, a step) stays plain unless a rule or the plan shards it. Plain integers outside the model
//! (a random state) stay plain unless a rule shards them.
//!
//! ```text
//!     rule  -->  plan  -->  --like  -->  fallback
//!       a rule that does not fit is an error; a fallback placement that does not fit becomes R
//! ```

use super::attention_heads::AttentionHeads;
use super::class::usual_class;
use super::like::{LikeLayout, is_whole_anyway};
use super::mesh_and_rules::without_placements;
use super::placement_report::PlacementReport;
use super::sharded_tensor_mesh::rows;
use super::tensor_context::{ParameterEvidence, TensorContext, TensorContexts};
use crate::catalog::{Catalog, Class, Path, TensorEntry, state_dict};
use crate::error::{Error, Result};
use crate::format::local::LocalLayout;
use crate::format::parallelize::{PlanSide, PlannedModel};
use crate::format::torch::RankLayout;
use crate::layout::cut::SplitChoice;
use crate::layout::distinct_tiles::{HeldTile, SharedTensor};
use crate::layout::parallelize::{ParameterOrder, ParameterPlacement};
use crate::layout::rules::{Fallback, MeshLayout, PlacementChoice};
use crate::layout::{LayoutError, Placement};
use crate::select::Wrappers;

/// Chooses the placements of each tensor of the target, and collects notes for the user.
pub struct PlacementResolver<'a> {
    layout: &'a MeshLayout,
    subjects: TensorContexts<'a>,
    /// The layout's parallelize plan, applied to the parameters of this model.
    planned: Option<PlannedModel>,
    /// The checkpoint of `--like`, which sets the placements of tensors without a rule.
    like: Option<LikeLayout<'a>>,
    /// The class that every sharded tensor gets; `None` if each tensor keeps its class from `--like` or the source.
    class: Option<Class>,
    /// The class for sharded tensors of the target that are not sharded in the source.
    usual_class: Class,
    report: PlacementReport,
}

/// The layout that was chosen for a tensor.
enum Choice<'a> {
    /// The tensor is a plain tensor, and every rank has a copy of it.
    Plain,
    /// The tensor is distributed over the mesh with these placements.
    Shared(ResolvedPlacements<'a>),
}

/// The placements of a tensor on the mesh, and the input that set them.
struct ResolvedPlacements<'a> {
    shared: SharedTensor,
    by: PlacementOrigin,
    cut: SplitChoice<'a>,
}

/// The input that set the placements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlacementOrigin {
    /// The placements come from a rule, the plan or the fallback placements, not from a checkpoint. The user gave them
    /// on the command line or in a layout file, or they are a default.
    CommandLine,
    /// The placements are the placements of the source.
    Source,
    /// The placements come from the checkpoint of `--like`. The field is the class that the tensor has in that
    /// checkpoint.
    Like(Class),
}

impl<'a> PlacementResolver<'a> {
    /// Creates a resolver with a layout for the tensors of a catalog. `class` is the class that all sharded tensors
    /// get; `None` if the user did not choose a class.
    pub fn new(catalog: &'a Catalog, layout: &'a MeshLayout, wrappers: Wrappers, class: Option<Class>) -> Self {
        Self {
            layout,
            subjects: TensorContexts::new(catalog, wrappers, class),
            planned: None,
            like: None,
            class,
            usual_class: usual_class(catalog),
            report: PlacementReport::default(),
        }
    }

    /// Sets the checkpoint of `--like`.
    pub fn like(self, like: Option<LikeLayout<'a>>) -> Self {
        Self { like, ..self }
    }

    /// Accepts rules that match no tensor of DST, but one of `names`. These are tensors of SRC that a filter, such as
    /// `--include`, leaves out.
    pub fn left_out(mut self, names: &[String]) -> Self {
        self.report.left_out(names, self.layout);
        self
    }

    /// Applies the plan of the layout, if it has one, to the parameters of the model.
    ///
    /// # Errors
    /// `Usage` if the plan does not fit the model.
    pub fn plan(self, order: ParameterOrder) -> Result<Self> {
        let Some(plan) = &self.layout.plan else { return Ok(self) };
        let model = state_dict::parameters(&self.subjects.catalog.state);
        let parameters: Vec<_> = model.iter().map(|(fqn, id)| self.subjects.parameter(fqn, *id)).collect();
        let names = model.iter().map(|(fqn, _)| fqn.clone()).collect();
        let planned = PlannedModel::new(PlanSide::Target, (plan, &self.layout.mesh), names, &parameters, order)?;
        Ok(Self { planned: Some(planned), ..self })
    }

    /// Returns details of the plan for verbose output.
    pub fn details(&self) -> Vec<String> {
        self.planned.as_ref().map(PlannedModel::details).unwrap_or_default()
    }

    /// Returns the notes for the user, and checks that the inputs had an effect. `heads` are the numbers of attention
    /// heads of the model.
    ///
    /// # Errors
    /// `Usage` for rules or placements without effect, and for tensors that `--like` lacks.
    pub fn finish(self, heads: AttentionHeads) -> Result<Vec<String>> {
        self.report.check(self.layout)?;
        self.like.map_or(Ok(()), LikeLayout::finish)?;
        let mut notes = Vec::new();
        if let Some(planned) = &self.planned {
            // Without optimizer state, a tensor that no style names may be a parameter or a buffer.
            let may_be_buffers = planned.has_fsdp() && self.subjects.evidence == ParameterEvidence::Nothing;
            let more = if may_be_buffers { "; mark buffers with options::placements 'NAME=plain'" } else { "" };
            notes.extend(planned.notes(more));
            notes.extend(heads.notes(planned));
        }
        notes.extend(self.report.notes(self.layout, self.subjects.evidence));
        Ok(notes)
    }

    // ------------------------------------------------------------------------------------------ for each format

    /// Returns the distinct tiles of a tensor, for a format that stores each tile once.
    pub fn shards(&mut self, path: &Path, entry: &TensorEntry) -> Result<Vec<HeldTile>> {
        let shared = match self.choose(path, entry)? {
            Choice::Plain => self.layout.replicated(),
            Choice::Shared(ResolvedPlacements { shared, by, .. }) => self.without_partial_values(path, shared, by)?,
        };
        Ok(self.layout.shards(&entry.shape, &shared).map_err(LayoutError::for_tensor(&entry.fqn))?)
    }

    /// Returns the layout of a tensor in rank files of `torch.save`.
    pub fn rank_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<RankLayout> {
        let mesh = &self.layout.mesh;
        match self.with_class(path, entry)? {
            None => Ok(RankLayout::Plain),
            Some((Class::ShardedTensor, ResolvedPlacements { shared, cut, .. })) => {
                RankLayout::fsdp1(&path.fqn(), entry, mesh, &shared, cut)
            }
            Some((Class::DTensor, ResolvedPlacements { shared, cut, .. })) => {
                RankLayout::dtensor(&path.fqn(), entry, mesh, shared, cut)
            }
            Some((Class::Tensor, ResolvedPlacements { shared, by: PlacementOrigin::CommandLine, .. })) => {
                Ok(RankLayout::Local(shared))
            }
            // A plain tensor has no field that marks it as a partial value.
            Some((Class::Tensor, ResolvedPlacements { shared, by, .. })) => {
                Ok(RankLayout::Local(self.without_partial_values(path, shared, by)?))
            }
        }
    }

    /// Returns the class and the placements of a tensor; `None` for a plain tensor of which every rank has a copy.
    pub fn local_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<LocalLayout> {
        Ok(self.with_class(path, entry)?.map(|(class, chosen)| (class, chosen.shared)))
    }

    fn with_class(&mut self, path: &Path, entry: &TensorEntry) -> Result<Option<(Class, ResolvedPlacements<'a>)>> {
        let Choice::Shared(chosen) = self.choose(path, entry)? else { return Ok(None) };
        let own = entry.is_shared().then_some(entry.class);
        let of_like = if let PlacementOrigin::Like(class) = chosen.by { Some(class) } else { None };
        Ok(Some((self.class.or(of_like).or(own).unwrap_or(self.usual_class), chosen)))
    }

    /// Replaces Partial placements by Replicate, so that the reduced value is written. This is done for DCP, which
    /// cannot store partial values, and for plain tensors, which cannot be marked as partial values.
    ///
    /// # Errors
    /// `Unsupported` if the user gave the Partial placement.
    fn without_partial_values(
        &mut self,
        path: &Path,
        mut shared: SharedTensor,
        by: PlacementOrigin,
    ) -> Result<SharedTensor> {
        let mut partial = shared.placements.iter_mut().filter(|placement| placement.is_partial()).peekable();
        let Some(first) = partial.peek() else { return Ok(shared) };
        if by == PlacementOrigin::CommandLine {
            return Err(Error::unsupported(
                format!(
                    "{path}: placement {first} cannot be written to a DCP directory, which holds no partial values"
                ),
                "write rank files (options::to torch-ranks), or use S or R placements to write the reduced value",
            ));
        }
        partial.for_each(|placement| *placement = Placement::Replicate);
        self.report.reduced();
        Ok(shared)
    }

    // ------------------------------------------------------------------------------------------ the four inputs

    fn choose(&mut self, path: &Path, entry: &TensorEntry) -> Result<Choice<'a>> {
        let subject = self.subjects.subject(path, entry);
        self.report.see(&subject, self.layout);
        let mut choice = self.by_rule(&subject)?;
        match (&choice, &mut self.planned, &subject) {
            (Some(_), Some(planned), TensorContext { in_model: Some(name), owner: None, .. }) => {
                planned.mark_covered_by_rule(name);
            }
            (Some(_), ..) => {}
            (None, ..) => choice = self.by_plan(&subject),
        }
        if choice.is_none() {
            choice = self.by_like(&subject)?;
        }
        let choice = match choice {
            Some(choice) => choice,
            None => self.by_fallback(&subject)?,
        };
        if let Choice::Shared(ResolvedPlacements { shared, cut, .. }) = &choice {
            cut.check(path, &entry.shape, &self.layout.mesh, shared)?;
        }
        Ok(choice)
    }

    /// Returns the split rule for a tensor (the sizes of shards if a dim does not divide evenly): the rule that the
    /// user gave for all tensors, otherwise `theirs`, the rule of SRC or `--like`.
    fn cut_as(&self, theirs: SplitChoice<'a>) -> SplitChoice<'a> {
        if self.layout.split.is_some() { SplitChoice::AllTensors } else { theirs }
    }

    fn by_rule(&self, subject: &TensorContext<'_>) -> Result<Option<Choice<'a>>> {
        let Some(rule) = self.layout.rules.iter().find(|rule| rule.covers(&subject.names)) else { return Ok(None) };
        let shared = match self.layout.placement_by_rule(rule, &subject.names, &subject.entry.shape) {
            // The user means the parameter with `**.w1.weight`, and not the parameter's step, although the path of the
            // step contains the same name.
            Err(LayoutError::RuleMisfit { .. }) if subject.is_stray() => return Ok(None),
            shared => shared?,
        };
        Ok(Some(match shared {
            Some(shared) => {
                let has_own = matches!(&rule.choice, PlacementChoice::Shared(spec) if !spec.splits.is_empty());
                let cut = if has_own { SplitChoice::Rule(rule) } else { SplitChoice::AllTensors };
                Choice::Shared(ResolvedPlacements {
                    shared: self.sliced(shared, subject),
                    by: PlacementOrigin::CommandLine,
                    cut,
                })
            }
            None => Choice::Plain,
        }))
    }

    /// Returns the layout that the plan gives a tensor. Optimizer state with the shape of its parameter gets the layout
    /// of the parameter. A tensor that the plan does not cover stays plain, or, if `--like` or fallback placements can
    /// shard it, the result is `None`, and they decide.
    fn by_plan(&self, subject: &TensorContext<'_>) -> Option<Choice<'a>> {
        let planned = self.planned.as_ref()?;
        let name = match &subject.owner {
            None => subject.in_model.as_ref(),
            Some(_) if subject.is_misshapen() => None,
            Some(owner) => owner.name.as_ref(),
        };
        match name.and_then(|name| planned.placement(name)) {
            Some(ParameterPlacement { shared: Some(shared), .. }) => {
                let shared = self.layout.with_default_split(shared.clone());
                Some(Choice::Shared(ResolvedPlacements {
                    shared,
                    by: PlacementOrigin::CommandLine,
                    cut: SplitChoice::AllTensors,
                }))
            }
            Some(ParameterPlacement { shared: None, .. }) => Some(Choice::Plain),
            // The plan has no layout for the tensor, because the tensor is not part of the model.
            None if self.like.is_some() || !self.layout.fallback.is_replicate() => None,
            None => Some(Choice::Plain),
        }
    }

    fn by_like(&mut self, subject: &TensorContext<'_>) -> Result<Option<Choice<'a>>> {
        let Some(like) = &mut self.like else { return Ok(None) };
        let TensorContext { path, entry, in_model, owner, .. } = subject;
        let parameter = owner.as_ref().and_then(|owner| owner.name.as_ref());
        let Some(found) = like.find(path, in_model.as_ref(), parameter, entry)? else {
            // Optimizer state whose shape differs from the shape of its parameter cannot use the parameter's
            // placements.
            if subject.is_misshapen() || is_whole_anyway(path, entry) {
                return Ok(Some(Choice::Plain));
            }
            if matches!(self.layout.fallback, Fallback::Source) {
                like.miss(path, in_model.as_ref());
                return Ok(Some(Choice::Plain));
            }
            return Ok(None);
        };
        let shared = match &found.sharding {
            _ if found.class == Class::ShardedTensor => rows(&self.layout.mesh).into(),
            None => return Ok(Some(Choice::Plain)),
            Some(sharding) => {
                let source = like.catalog.on_mesh(sharding);
                self.layout.with_source_slice(self.layout.source_placement(source), source)
            }
        };
        let (by, cut) = (PlacementOrigin::Like(found.class), self.cut_as(SplitChoice::Like));
        Ok(Some(Choice::Shared(ResolvedPlacements { shared, by, cut })))
    }

    fn by_fallback(&mut self, subject: &TensorContext<'_>) -> Result<Choice<'a>> {
        let as_it_is = matches!(self.layout.fallback, Fallback::Source);
        let is_plain = self.subjects.is_plain(subject.is_shared());
        if is_plain && as_it_is {
            return Ok(Choice::Plain);
        }
        if is_plain && !self.subjects.is_trained(subject) {
            self.report.plain(subject);
            return Ok(Choice::Plain);
        }
        if is_plain && self.is_outside_units() {
            self.report.outside_units(subject);
            return Ok(Choice::Plain);
        }
        // Random states and counters outside the model are equal on all ranks.
        if subject.is_outside_model() && !subject.entry.dtype.is_float() {
            return Ok(Choice::Plain);
        }
        let shape = &subject.entry.shape;
        if matches!(self.layout.fallback, Fallback::Missing) && !shape.is_empty() {
            return Err(without_placements(&self.layout.mesh, subject.names.first()));
        }
        let fitted = self.layout.fallback_placement(shape.len(), self.subjects.source(subject));
        self.report.fallback(subject, fitted.misfit);
        if shape.is_empty() && subject.sharding().is_none() {
            return Ok(Choice::Plain);
        }
        let (by, cut) = if as_it_is {
            (PlacementOrigin::Source, self.cut_as(SplitChoice::Source))
        } else {
            (PlacementOrigin::CommandLine, SplitChoice::AllTensors)
        };
        Ok(Choice::Shared(ResolvedPlacements { shared: self.sliced(fitted.shared, subject), by, cut }))
    }

    /// Returns true if a parameter that is plain in SRC must stay plain. This is so if other parameters are
    /// ShardedTensors in SRC and in DST: FSDP1 then has no unit for the plain parameter, and loads it from a plain
    /// tensor only.
    fn is_outside_units(&self) -> bool {
        let class = self.class.unwrap_or(self.usual_class);
        self.subjects.has_sharded_tensors && class == Class::ShardedTensor
    }

    /// Returns the layout `shared`, restricted to the mesh dims on which SRC stores the tensor. A tensor that SRC
    /// stores on all mesh dims, or as a plain tensor, keeps `shared`.
    fn sliced(&self, shared: SharedTensor, subject: &TensorContext<'_>) -> SharedTensor {
        match self.subjects.source(subject) {
            Some(source) => self.layout.with_source_slice(shared, source),
            None => shared,
        }
    }
}
