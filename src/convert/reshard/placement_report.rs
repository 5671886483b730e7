//! Collects the facts that the user should know after all target placements are chosen: placements that did not fit,
//! tensors that stay plain, and rules without effect.
//!
//! The fallback placements are the placements of tensors without a rule.

use std::collections::BTreeSet;

use super::tensor_context::{ParameterEvidence, TensorContext};
use crate::error::{Error, Result};
use crate::layout::PlacementSpec;
use crate::layout::rules::{Fallback, MeshLayout, unused_rule_warning};
use crate::nearest;
use crate::quantity::count;

/// Counts of tensors and rules for the notes to the user. Each tensor is counted when its placements are chosen.
#[derive(Default)]
pub struct PlacementReport {
    /// Indices of the rules that match at least one tensor.
    used: BTreeSet<usize>,
    /// Indices of the rules that have an effect: they are the first match of at least one tensor.
    effective: BTreeSet<usize>,
    /// Names of all tensors, for a suggestion if a pattern matches no tensor.
    names: Vec<String>,
    /// Numbers of dimensions of the tensors with fallback placements; each number occurs once.
    fallback_ndims: BTreeSet<usize>,
    /// Number of tensors for which a fallback placement does not fit on some mesh dimension.
    misfits: usize,
    /// Number of 0-d tensors among the tensors that `misfits` counts.
    scalar_misfits: usize,
    /// Number of model tensors of one or more dimensions that stay plain, because they are treated as buffers.
    plain: usize,
    /// Number of parameters that stay plain, because FSDP1 loads them outside all units.
    outside_units: usize,
    /// Number of optimizer state tensors of one or more dimensions whose parameter is known by parameter id only, not
    /// by name.
    nameless: usize,
    /// Number of tensors for which the reduced value is written, because the target cannot store partial values.
    reduced: usize,
}

impl PlacementReport {
    /// Records the name of a tensor, the rules that match it, and whether the name of its parameter is unknown.
    pub fn see(&mut self, subject: &TensorContext<'_>, layout: &MeshLayout) {
        let matching = (0..).zip(&layout.rules).filter(|(_, rule)| rule.covers(&subject.names));
        let mut matching = matching.map(|(index, _)| index);
        let first = matching.next();
        self.effective.extend(first);
        self.used.extend(first.into_iter().chain(matching));
        self.names.push(subject.path.to_string());
        self.nameless += usize::from(subject.is_nameless() && !subject.entry.shape.is_empty());
    }

    /// Records that the rules that match `names` have an effect, so that they cause no error or warning. `names` are
    /// tensors of SRC that a filter, such as `--include`, leaves out.
    pub fn left_out(&mut self, names: &[String], layout: &MeshLayout) {
        for (index, _) in (0..).zip(&layout.rules).filter(|(_, rule)| rule.covers(names)) {
            self.used.insert(index);
            self.effective.insert(index);
        }
    }

    /// Counts a tensor that stays plain, if it is a model tensor of one or more dimensions.
    pub fn plain(&mut self, subject: &TensorContext<'_>) {
        self.plain += usize::from(!subject.entry.shape.is_empty() && subject.in_model.is_some());
    }

    /// Counts a parameter that stays plain because it is outside all units of FSDP1.
    pub fn outside_units(&mut self, subject: &TensorContext<'_>) {
        self.outside_units += usize::from(subject.in_model.is_some() && subject.owner.is_none());
    }

    /// Counts a tensor that gets the fallback placements. `is_misfit` is true if one of the placements does not fit the
    /// tensor.
    pub fn fallback(&mut self, subject: &TensorContext<'_>, is_misfit: bool) {
        let shape = &subject.entry.shape;
        self.fallback_ndims.insert(shape.len());
        self.misfits += usize::from(is_misfit);
        self.scalar_misfits += usize::from(is_misfit && shape.is_empty());
    }

    /// Counts a tensor for which the reduced value is written instead of partial values.
    pub fn reduced(&mut self) {
        self.reduced += 1;
    }

    /// Checks that every rule matches a tensor, and that every fallback placement fits a tensor.
    ///
    /// # Errors
    /// `Usage` for a rule that matches no tensor, and for a fallback placement that fits no tensor.
    pub fn check(&self, layout: &MeshLayout) -> Result<()> {
        if let Some((_, rule)) = (0..).zip(&layout.rules).find(|(index, _)| !self.used.contains(index)) {
            return Err(Error::usage(
                format!("{}: no tensor name matches", rule.origin),
                nearest::pattern_hint(rule.pattern.as_str(), &self.names),
            ));
        }
        // If a placement fits no tensor at all, its mesh dimension would have no effect.
        let Fallback::Placements(specs) = &layout.fallback else { return Ok(()) };
        let fits_any = |spec: &&PlacementSpec| self.fallback_ndims.iter().any(|ndim| spec.resolve(*ndim).is_some());
        match specs.iter().find(|spec| !self.fallback_ndims.is_empty() && !fits_any(spec)) {
            None => Ok(()),
            Some(spec) => Err(Error::usage(
                format!("placement {spec}, given for all tensors, fits none of them"),
                "use dims 0 to n-1 for a tensor of n dims; `dtshard inspect` shows the shapes",
            )),
        }
    }

    /// Returns notes about results that the user may not expect, and warnings about rules that are never the first
    /// match.
    pub fn notes(&self, layout: &MeshLayout, evidence: ParameterEvidence) -> Vec<String> {
        let mut notes = Vec::new();
        let (scalars, others) = (self.scalar_misfits, self.misfits - self.scalar_misfits);
        let be = |number: usize| if number == 1 { "is" } else { "are" };
        if scalars > 0 {
            let (number, be) = (count(scalars, "scalar"), be(scalars));
            notes.push(format!("{number} {be} replicated: a 0-d tensor cannot be sharded"));
        }
        let mut note = |number: usize, of_one: &str, of_many: &str| {
            if number > 0 {
                let what = if number == 1 { of_one } else { of_many };
                notes.push(format!("{} {what}", count(number, "tensor")));
            }
        };
        note(
            others,
            "is replicated on a mesh dimension where the placement does not fit its shape",
            "are replicated on a mesh dimension where the placement does not fit their shapes",
        );
        match evidence {
            ParameterEvidence::Class => note(
                self.plain,
                "is plain in SRC and has no optimizer state, so it is treated as a buffer and replicated on every rank",
                "are plain in SRC and have no optimizer state, so they are treated as buffers and replicated on every \
                 rank",
            ),
            ParameterEvidence::Optimizer | ParameterEvidence::Nothing => note(
                self.plain,
                "has no optimizer state, so it is treated as a buffer and replicated on every rank",
                "have no optimizer state, so they are treated as buffers and replicated on every rank",
            ),
        }
        note(
            self.outside_units,
            "with optimizer state is plain in SRC, so it is outside all units of FSDP1 and stays plain",
            "with optimizer state are plain in SRC, so they are outside all units of FSDP1 and stay plain",
        );
        note(
            self.reduced,
            "has Partial placements in SRC or options::like; its reduced value is written, with R instead of Partial",
            "have Partial placements in SRC or options::like; their reduced values are written, with R instead of \
             Partial",
        );
        let unused =
            self.used.difference(&self.effective).map(|index| unused_rule_warning(&layout.rules[*index].origin));
        if !layout.rules.is_empty() || layout.plan.is_some() {
            note(
                self.nameless,
                "of optimizer state has a parameter index instead of a name, so rules for parameters do not match it",
                "of optimizer state have parameter indices instead of names, so rules for parameters do not match them",
            );
        }
        notes.extend(unused);
        notes
    }
}
