//! Assigns the styles of a plan to the parameters of a model.
//!
//! A pattern matches a module or a parameter. If it matches a module, it applies to the parameters of the module
//! itself, but not to the parameters of its child modules. `.` is the root module. `pairwise` matches a module and
//! alternates styles over its children, in the order of registration. PyTorch's counterpart is `parallelize_module`.

use super::super::{DeviceMesh, Pattern};
use super::candidate::{Candidate, RuleOrigin, StyledParameter};
use super::pairwise::PairwiseRule;
use super::{
    Family, ParallelStyle, ParallelizePlan, Parameter, ParameterKind, ParameterOrder, ParameterPlacement,
    PlacementSource, PlanError, RuleStyle, StyleRule,
};

impl ParallelizePlan {
    /// Returns the placement of each parameter, in the order of `parameters`.
    ///
    /// # Errors
    /// `PlanError` if one of these holds: a rule of the user matches no parameter; no attention or MLP rule of the
    /// built-in plan matches a parameter; `pairwise` finds no pairs or cannot order them; the plan has styles, and the
    /// mesh has no mesh dim of tensor parallelism; the mesh has a mesh dim of tensor parallelism, and the plan has no
    /// styles.
    pub fn bind(
        &self,
        mesh: &DeviceMesh,
        parameters: &[Parameter<'_>],
        order: ParameterOrder,
    ) -> Result<Vec<ParameterPlacement>, PlanError> {
        let candidates = self.candidates(mesh)?;
        let is_linear = |parameter: &Parameter<'_>| {
            let excludes =
                |candidate: &Candidate| candidate.rule.style.is_not_linear() && candidate.matches(&parameter.name);
            !candidates.iter().any(excludes)
        };
        let mut found: Vec<Option<(&Candidate, StyledParameter)>> = vec![None; parameters.len()];
        let mut layers_are_there = false;
        for candidate in &candidates {
            let named: Vec<StyledParameter> = match &candidate.rule.style {
                RuleStyle::Pairwise { children } => {
                    let has_fsdp = self.roles.fsdp.is_some();
                    PairwiseRule { candidate, children, order, has_fsdp }.bind(parameters, is_linear)?
                }
                RuleStyle::Single(style) => {
                    let names = |at: &usize| candidate.matches(&parameters[*at].name);
                    (0..parameters.len()).filter(names).map(|at| (at, *style, candidate.note)).collect()
                }
            };
            if named.is_empty() && candidate.origin == RuleOrigin::User {
                let StyleRule { pattern, origin, .. } = &candidate.rule;
                return Err(PlanError::Unmatched { origin: origin.clone(), pattern: pattern.to_string() });
            }
            layers_are_there |= candidate.origin == RuleOrigin::Layers && !named.is_empty();
            for styled in named {
                found[styled.0].get_or_insert((candidate, styled));
            }
        }
        if let Some(family) = self.family.filter(|_| !layers_are_there) {
            return Err(PlanError::OtherFamily { plan: family.name, similar: super::similar_families(parameters) });
        }
        let buffers = self.family.map(|_| Family::buffers()).unwrap_or_default();
        let place = |(parameter, found): (&Parameter<'_>, Option<(&Candidate, StyledParameter)>)| match found {
            Some((candidate, (_, style, note))) if style != ParallelStyle::None => {
                let placed = self.roles.place_styled(mesh, style, candidate.role(&parameter.name), parameter);
                ParameterPlacement { note, ..placed }
            }
            _ if parameter.kind == ParameterKind::Buffer || is_buffer(&buffers, parameter) => {
                ParameterPlacement { shared: None, by: PlacementSource::Buffer, uncut: None, note: None }
            }
            Some((_, (_, style, _))) => ParameterPlacement {
                by: PlacementSource::Style(style),
                ..self.roles.place_unstyled(mesh, parameter.shape)
            },
            None => self.roles.place_unstyled(mesh, parameter.shape),
        };
        Ok(parameters.iter().zip(found).map(place).collect())
    }

    /// Returns the user's style rules, followed by the style rules of the built-in plan. It is an error if the plan has
    /// rules and the mesh has no mesh dim of tensor parallelism. It is also an error if the mesh has a mesh dim of
    /// tensor parallelism and the plan has no rules.
    fn candidates(&self, mesh: &DeviceMesh) -> Result<Vec<Candidate>, PlanError> {
        let of_user = |rule: &StyleRule| Candidate { rule: rule.clone(), origin: RuleOrigin::User, note: None };
        let mut candidates: Vec<Candidate> = self.styles.iter().map(of_user).collect();
        if let Some(family) = self.family {
            candidates.extend(family.candidates());
        }
        let dim_name = |names: &[String]| self.roles.tp.map(|tp| names[tp.0].clone());
        match (candidates.first(), mesh.names().and_then(dim_name)) {
            (Some(first), None) => {
                let plan = || self.family.map(|family| format!("plan {}", family.name));
                let origin =
                    Some(first).filter(|first| first.origin == RuleOrigin::User).map(|first| first.rule.origin.clone());
                let origin = origin.or_else(plan).unwrap_or_default();
                Err(PlanError::NoTensorDim { origin, mesh: mesh.to_string() })
            }
            (None, Some(name)) => Err(PlanError::NoStyles { name }),
            _ => Ok(candidates),
        }
    }
}

fn is_buffer(buffers: &[Pattern], parameter: &Parameter<'_>) -> bool {
    buffers.iter().any(|pattern| pattern.matches(&parameter.name))
}
