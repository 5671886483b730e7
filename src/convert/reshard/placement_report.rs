//! What is told once all tensors are laid out, and which of what was said had no effect.

use std::collections::BTreeSet;

use super::tensor_context::{ParameterEvidence, TensorContext};
use crate::error::{Error, Result};
use crate::layout::PlacementSpec;
use crate::layout::rules::{Fallback, MeshLayout, unused_rule_warning};
use crate::nearest;
use crate::quantity::count;

#[derive(Default)]
pub struct PlacementReport {
    /// Which rules are for some tensor.
    used: BTreeSet<usize>,
    /// Which of them are the first that is.
    heard: BTreeSet<usize>,
    /// For saying what a pattern came near to.
    names: Vec<String>,
    /// Numbers of dims of the tensors that got the fallback.
    fallback_ndims: BTreeSet<usize>,
    misfits: usize,
    /// Those of them that have no dims at all.
    scalar_misfits: usize,
    /// Tensors with dims that stay plain because the source has them plain beside shared ones.
    plain: usize,
    /// State of parameters that are known by number only.
    nameless: usize,
    /// Tensors of summands, of which only the value can be written.
    reduced: usize,
}

impl PlacementReport {
    pub fn see(&mut self, subject: &TensorContext<'_>, layout: &MeshLayout) {
        let for_it = (0..).zip(&layout.rules).filter(|(_, rule)| rule.covers(&subject.names));
        let mut for_it = for_it.map(|(index, _)| index);
        let first = for_it.next();
        self.heard.extend(first);
        self.used.extend(first.into_iter().chain(for_it));
        self.names.push(subject.path.to_string());
        self.nameless += usize::from(subject.is_nameless() && !subject.entry.shape.is_empty());
    }

    pub fn plain(&mut self, subject: &TensorContext<'_>) {
        self.plain += usize::from(!subject.entry.shape.is_empty() && subject.in_model.is_some());
    }

    pub fn fallback(&mut self, subject: &TensorContext<'_>, is_misfit: bool) {
        let shape = &subject.entry.shape;
        self.fallback_ndims.insert(shape.len());
        self.misfits += usize::from(is_misfit);
        self.scalar_misfits += usize::from(is_misfit && shape.is_empty());
    }

    pub fn reduced(&mut self) {
        self.reduced += 1;
    }

    /// # Errors
    /// `Usage` for rules that are for no tensor, and for placements of all tensors that fit none.
    pub fn check(&self, layout: &MeshLayout) -> Result<()> {
        if let Some((_, rule)) = (0..).zip(&layout.rules).find(|(index, _)| !self.used.contains(index)) {
            return Err(Error::usage(
                format!("{}: no tensor has a name like that", rule.origin),
                nearest::pattern_hint(rule.pattern.as_str(), &self.names),
            ));
        }
        // A placement that fits no tensor at all would leave its mesh dim unused.
        let Fallback::Placements(specs) = &layout.fallback else { return Ok(()) };
        let fits_any = |spec: &&PlacementSpec| self.fallback_ndims.iter().any(|ndim| spec.resolve(*ndim).is_some());
        match specs.iter().find(|spec| !self.fallback_ndims.is_empty() && !fits_any(spec)) {
            None => Ok(()),
            Some(spec) => Err(Error::usage(
                format!("placements {spec} for every tensor: they fit none"),
                "tensors of n dims have the dims 0 to n-1; `dtshard inspect` shows their shapes",
            )),
        }
    }

    /// What is not as somebody may think.
    pub fn notes(&self, layout: &MeshLayout, told_by: ParameterEvidence) -> Vec<String> {
        let mut notes = Vec::new();
        let mut note = |number: usize, what: String| {
            if number > 0 {
                notes.push(format!("{}{what}", count(number, "tensor")));
            }
        };
        let scalars = match self.scalar_misfits {
            0 => String::new(),
            scalars => format!(" ({scalars} of them 0-d)"),
        };
        note(self.misfits, format!("{scalars} kept whole on a mesh dim where the placement does not fit"));
        let why = match told_by {
            ParameterEvidence::Class => "plain in the source (buffers)",
            ParameterEvidence::Optimizer | ParameterEvidence::Nothing => "taken for buffers",
        };
        note(self.plain, format!(" without state of an optimizer, {why}: whole on every rank"));
        note(self.reduced, " R where Partial in SRC or options::like: values are written, not summands".into());
        let unused = self.used.difference(&self.heard).map(|index| unused_rule_warning(&layout.rules[*index].origin));
        if !layout.rules.is_empty() || layout.plan.is_some() {
            let what = " of optimizer state have numbers for names: rules for parameters did not reach them";
            note(self.nameless, what.into());
        }
        notes.extend(unused);
        notes
    }
}
