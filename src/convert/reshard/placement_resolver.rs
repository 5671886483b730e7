//! The placements of each tensor on the target mesh, and the Python class it has in rank files.
//!
//! Four may say how a tensor lies, and the first that does is heard: a rule for it, the plan, the checkpoint of --like,
//! and what is said of all tensors. What the source stores plain beside DTensors (buffers, steps) stays plain unless a
//! rule or the plan says otherwise.
//!
//! ```text
//!     rule  -->  plan  -->  --like  -->  fallback
//!       a rule that does not fit is an error, the fallback is R where it does not fit
//! ```

use super::attention_heads::AttentionHeads;
use super::class::usual_class;
use super::like::{LikeLayout, is_whole_anyway};
use super::placement_report::PlacementReport;
use super::sharded::rows;
use super::tensor_context::{ParameterEvidence, TensorContext, TensorContexts};
use crate::catalog::{Catalog, Class, Path, TensorEntry, model};
use crate::error::{Error, Result};
use crate::format::local::LocalLayout;
use crate::format::parallelize::{PlanSide, PlannedModel};
use crate::format::torch::RankLayout;
use crate::layout::cut::SplitChoice;
use crate::layout::parallelize::{ParameterOrder, ParameterPlacement};
use crate::layout::rules::{Fallback, MeshLayout, PlacementChoice};
use crate::layout::shards::{HeldTile, SharedTensor};
use crate::layout::{LayoutError, Placement};
use crate::select::Wrappers;

/// Chooses the placements of each tensor, and remembers what to tell the user.
pub struct PlacementResolver<'a> {
    layout: &'a MeshLayout,
    subjects: TensorContexts<'a>,
    /// How the layout's plan has the parameters of this model.
    planned: Option<PlannedModel>,
    /// A checkpoint whose tensors say how those without a rule lie.
    like: Option<LikeLayout<'a>>,
    /// The class of tensors that ranks share; `None` for that of each in the source.
    class: Option<Class>,
    /// The same for those that have none there.
    usual_class: Class,
    tally: PlacementReport,
}

/// How a tensor is to lie.
enum Choice<'a> {
    /// Plain on every rank.
    Plain,
    Shared(ResolvedPlacements<'a>),
}

struct ResolvedPlacements<'a> {
    shared: SharedTensor,
    by: PlacementOrigin,
    cut: SplitChoice<'a>,
}

/// Who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlacementOrigin {
    /// A rule, the plan or a fallback: it was asked for.
    CommandLine,
    Source,
    /// --like, where it has this class.
    Like(Class),
}

impl<'a> PlacementResolver<'a> {
    pub fn new(catalog: &'a Catalog, layout: &'a MeshLayout, wrappers: Wrappers, class: Option<Class>) -> Self {
        Self {
            layout,
            subjects: TensorContexts::new(catalog, wrappers, class),
            planned: None,
            like: None,
            class,
            usual_class: usual_class(catalog),
            tally: PlacementReport::default(),
        }
    }

    pub fn like(self, like: Option<LikeLayout<'a>>) -> Self {
        Self { like, ..self }
    }

    /// Let the plan of the layout, where it has one, meet the parameters of the model.
    ///
    /// # Errors
    /// `Usage` where it does not fit.
    pub fn plan(self, order: ParameterOrder) -> Result<Self> {
        let Some(plan) = &self.layout.plan else { return Ok(self) };
        let model = model::parameters(&self.subjects.catalog.state);
        let parameters: Vec<_> = model.iter().map(|(fqn, id)| self.subjects.parameter(fqn, *id)).collect();
        let names = model.iter().map(|(fqn, _)| fqn.clone()).collect();
        let planned = PlannedModel::new(PlanSide::Target, (plan, &self.layout.mesh), names, &parameters, order)?;
        Ok(Self { planned: Some(planned), ..self })
    }

    /// What there is to tell of the plan to who wants to know more.
    pub fn details(&self) -> Vec<String> {
        self.planned.as_ref().map(PlannedModel::details).unwrap_or_default()
    }

    /// What to tell, or the error for what was said without an effect. `heads` are those of the model.
    pub fn finish(self, heads: AttentionHeads) -> Result<Vec<String>> {
        self.tally.check(self.layout)?;
        self.like.map_or(Ok(()), LikeLayout::finish)?;
        let mut notes = Vec::new();
        if let Some(planned) = &self.planned {
            // Nothing tells which of those that no style names are trained.
            let may_be_buffers = planned.has_fsdp() && self.subjects.told_by == ParameterEvidence::Nothing;
            let more = if may_be_buffers { "; options::placements 'NAME=plain' says which are buffers" } else { "" };
            notes.extend(planned.notes(more));
            notes.extend(heads.notes(planned));
        }
        notes.extend(self.tally.notes(self.layout, self.subjects.told_by));
        Ok(notes)
    }

    // ------------------------------------------------------------------------------------------ for each format

    /// The distinct tiles of a tensor, for a format that stores those.
    pub fn shards(&mut self, path: &Path, entry: &TensorEntry) -> Result<Vec<HeldTile>> {
        let shared = match self.choose(path, entry)? {
            Choice::Plain => self.layout.replicated(),
            Choice::Shared(ResolvedPlacements { shared, by, .. }) => self.without_summands(path, shared, by)?,
        };
        Ok(self.layout.shards(&entry.shape, &shared).map_err(LayoutError::for_tensor(&entry.fqn))?)
    }

    /// How rank files of torch.save have it.
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
            // Nothing in the file would say that it is a summand.
            Some((Class::Tensor, ResolvedPlacements { shared, by, .. })) => {
                Ok(RankLayout::Local(self.without_summands(path, shared, by)?))
            }
        }
    }

    /// The class of a tensor that ranks share, and how; `None` for a plain tensor on every rank.
    pub fn local_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<LocalLayout> {
        Ok(self.with_class(path, entry)?.map(|(class, chosen)| (class, chosen.shared)))
    }

    fn with_class(&mut self, path: &Path, entry: &TensorEntry) -> Result<Option<(Class, ResolvedPlacements<'a>)>> {
        let Choice::Shared(chosen) = self.choose(path, entry)? else { return Ok(None) };
        let own = entry.is_shared().then_some(entry.class);
        let of_like = if let PlacementOrigin::Like(class) = chosen.by { Some(class) } else { None };
        Ok(Some((self.class.or(of_like).or(own).unwrap_or(self.usual_class), chosen)))
    }

    /// A DCP directory has no place for summands, and a plain tensor does not say that it is one: their value goes there.
    fn without_summands(&mut self, path: &Path, mut shared: SharedTensor, by: PlacementOrigin) -> Result<SharedTensor> {
        let mut partial = shared.placements.iter_mut().filter(|placement| placement.is_partial()).peekable();
        let Some(first) = partial.peek() else { return Ok(shared) };
        if by == PlacementOrigin::CommandLine {
            return Err(Error::unsupported(
                format!("{path}: {first} in a DCP directory, which holds values, not summands"),
                "write rank files (options::to torch-ranks), or give it S or R placements, for which it is reduced",
            ));
        }
        partial.for_each(|placement| *placement = Placement::Replicate);
        self.tally.reduced();
        Ok(shared)
    }

    // ------------------------------------------------------------------------------------------ who says how it lies

    fn choose(&mut self, path: &Path, entry: &TensorEntry) -> Result<Choice<'a>> {
        let subject = self.subjects.subject(path, entry);
        self.tally.see(&subject, self.layout);
        let mut choice = self.by_rule(&subject)?;
        match (&choice, &mut self.planned, &subject) {
            (Some(_), Some(planned), TensorContext { in_model: Some(name), owner: None, .. }) => {
                planned.mark_covered_by_rule(name)
            }
            (Some(_), ..) => {}
            (None, ..) => choice = self.by_plan(&subject),
        }
        if choice.is_none() {
            choice = self.by_like(&subject)?;
        }
        let choice = choice.unwrap_or_else(|| self.by_fallback(&subject));
        if let Choice::Shared(ResolvedPlacements { shared, cut, .. }) = &choice {
            cut.check(path, &entry.shape, &self.layout.mesh, shared)?;
        }
        Ok(choice)
    }

    /// Who said how a tensor is cut whose own splits are those of somebody else, unless something is said of all.
    fn cut_as(&self, theirs: SplitChoice<'a>) -> SplitChoice<'a> {
        if self.layout.split.is_some() { SplitChoice::AllTensors } else { theirs }
    }

    fn by_rule(&self, subject: &TensorContext<'_>) -> Result<Option<Choice<'a>>> {
        let Some(rule) = self.layout.rules.iter().find(|rule| rule.covers(&subject.names)) else { return Ok(None) };
        let shared = match self.layout.placement_by_rule(rule, &subject.names, &subject.entry.shape) {
            // `**.w1.weight` is meant for the parameter, not for the step that has its name in its own.
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

    /// A parameter, or what has the shape of the one that it is of.
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
            // What is no part of the model.
            None if self.like.is_some() || !self.layout.fallback.is_replicate() => None,
            None => Some(Choice::Plain),
        }
    }

    fn by_like(&mut self, subject: &TensorContext<'_>) -> Result<Option<Choice<'a>>> {
        let Some(like) = &mut self.like else { return Ok(None) };
        let TensorContext { path, entry, in_model, owner, .. } = subject;
        let parameter = owner.as_ref().and_then(|owner| owner.name.as_ref());
        let Some(found) = like.find(path, in_model.as_ref(), parameter, entry)? else {
            // State of another shape than its parameter has nothing to follow.
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

    fn by_fallback(&mut self, subject: &TensorContext<'_>) -> Choice<'a> {
        let as_it_is = matches!(self.layout.fallback, Fallback::Source);
        let is_plain = self.subjects.is_plain(subject.is_shared());
        if is_plain && as_it_is {
            return Choice::Plain;
        }
        if is_plain && !self.subjects.is_trained(subject) {
            self.tally.plain(subject);
            return Choice::Plain;
        }
        let shape = &subject.entry.shape;
        let fitted = self.layout.fallback_placement(shape.len(), self.subjects.source(subject));
        self.tally.fallback(subject, fitted.misfit);
        if shape.is_empty() && subject.sharding().is_none() {
            return Choice::Plain;
        }
        let (by, cut) = if as_it_is {
            (PlacementOrigin::Source, self.cut_as(SplitChoice::Source))
        } else {
            (PlacementOrigin::CommandLine, SplitChoice::AllTensors)
        };
        Choice::Shared(ResolvedPlacements { shared: self.sliced(fitted.shared, subject), by, cut })
    }

    /// What was on a slice of its mesh stays there.
    fn sliced(&self, shared: SharedTensor, subject: &TensorContext<'_>) -> SharedTensor {
        match self.subjects.source(subject) {
            Some(source) => self.layout.with_source_slice(shared, source),
            None => shared,
        }
    }
}
