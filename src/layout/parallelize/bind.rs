//! Assigns the styles of a plan to the parameters of a model.
//!
//! A pattern matches a module or a parameter. If it matches a module, it applies to the parameters of the module
//! itself, but not to the parameters of its child modules. `.` is the root module. `pairwise` matches a module and
//! alternates styles over its children, in the order of registration. PyTorch's counterpart is `parallelize_module`.

use std::collections::HashMap;

use indexmap::IndexMap;

use super::super::{DeviceMesh, Pattern};
use super::{
    Family, ParallelStyle, ParallelizePlan, ParameterPlacement, ParameterRole, PlacementSource, PlanError, StyleRule,
};

/// A parameter or buffer of the model, with the properties by which a plan chooses its placement.
#[derive(Clone, Debug)]
pub struct Parameter<'a> {
    pub name: String,
    pub shape: &'a [u64],
    pub shape_origin: ShapeOrigin,
    pub kind: ParameterKind,
}

/// The tensor whose shape is known: the global tensor, or only a local shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeOrigin {
    Global,
    /// The known shape is the shape of one rank's local shard. It does not show how often the tensor was split.
    LocalShard,
}

/// The kind of a tensor: parameter or buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    Parameter,
    /// A buffer: it stays a plain tensor, unless a style matches it.
    Buffer,
}

/// The order in which the caller lists the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterOrder {
    /// The parameters are in the order of registration, as in a state dict.
    Registered,
    Unknown,
}

/// A style rule of the user or of a built-in plan, with its origin.
pub(super) struct Candidate {
    pub rule: StyleRule,
    pub origin: RuleOrigin,
    pub note: Option<&'static str>,
}

/// The origin of a style rule: the user, or a part of a built-in plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuleOrigin {
    /// The user gave the rule. It must match a parameter.
    User,
    /// The rule is one of the attention and MLP rules of a built-in plan. At least one of these rules must match a
    /// parameter.
    Layers,
    /// The rule is another rule of a built-in plan: for an embedding, a norm or the head. It need not match a parameter.
    OutsideLayers,
}

impl Candidate {
    fn matches_module(&self, module: &str) -> bool {
        let pattern = &self.rule.pattern;
        if module.is_empty() { pattern.as_str() == "." } else { pattern.matches(module) }
    }

    /// Returns whether the rule gives its style to this parameter.
    pub fn matches(&self, parameter: &str) -> bool {
        self.rule.style != ParallelStyle::Pairwise
            && (self.matches_module(module_of(parameter)) || self.rule.pattern.matches(parameter))
    }

    /// Returns the role of a parameter that the rule matches.
    fn role(&self, parameter: &str) -> ParameterRole {
        if self.rule.pattern.matches(parameter) {
            ParameterRole::by_itself(parameter)
        } else {
            ParameterRole::of_module(parameter)
        }
    }
}

/// Returns the name of the module that contains a parameter or a child module.
fn module_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}

impl ParallelizePlan {
    /// Returns the placement of each parameter, in the order of `parameters`.
    ///
    /// # Errors
    /// `PlanError` for rules that match nothing, a plan of another family, and `pairwise` with an unknown order.
    pub fn bind(
        &self,
        mesh: &DeviceMesh,
        parameters: &[Parameter<'_>],
        order: ParameterOrder,
    ) -> Result<Vec<ParameterPlacement>, PlanError> {
        let candidates = self.candidates(mesh)?;
        let mut found: Vec<Option<(&Candidate, ParallelStyle)>> = vec![None; parameters.len()];
        let mut layers_are_there = false;
        for candidate in &candidates {
            let named = match candidate.rule.style {
                ParallelStyle::Pairwise => pairwise_styles(candidate, parameters, order)?,
                style => {
                    let names = |at: &usize| candidate.matches(&parameters[*at].name);
                    (0..parameters.len()).filter(names).map(|at| (at, style)).collect()
                }
            };
            if named.is_empty() && candidate.origin == RuleOrigin::User {
                let StyleRule { pattern, origin, .. } = &candidate.rule;
                return Err(PlanError::Unmatched { origin: origin.clone(), pattern: pattern.to_string() });
            }
            layers_are_there |= candidate.origin == RuleOrigin::Layers && !named.is_empty();
            for (at, style) in named {
                found[at].get_or_insert((candidate, style));
            }
        }
        if let Some(family) = self.family.filter(|_| !layers_are_there) {
            return Err(PlanError::OtherFamily { plan: family.name, similar: super::similar_families(parameters) });
        }
        let buffers = self.family.map(|_| Family::buffers()).unwrap_or_default();
        let place = |(parameter, found): (&Parameter<'_>, Option<(&Candidate, ParallelStyle)>)| match found {
            Some((candidate, style)) if style != ParallelStyle::None => {
                let placed = self.roles.place_styled(mesh, style, candidate.role(&parameter.name), parameter);
                ParameterPlacement { note: candidate.note, ..placed }
            }
            _ if parameter.kind == ParameterKind::Buffer || is_buffer(&buffers, parameter) => {
                ParameterPlacement { shared: None, by: PlacementSource::Buffer, uncut: None, note: None }
            }
            Some((_, style)) => ParameterPlacement {
                by: PlacementSource::Style(style),
                ..self.roles.place_unstyled(mesh, parameter.shape)
            },
            None => self.roles.place_unstyled(mesh, parameter.shape),
        };
        Ok(parameters.iter().zip(found).map(place).collect())
    }

    /// Returns the user's rules, followed by the rules of the built-in plan.
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

/// Returns the index of each parameter that a pairwise rule matches, with the style of the parameter.
fn pairwise_styles(
    candidate: &Candidate,
    parameters: &[Parameter<'_>],
    order: ParameterOrder,
) -> Result<Vec<(usize, ParallelStyle)>, PlanError> {
    const IN_TURN: [ParallelStyle; 2] = [ParallelStyle::Colwise { blocks: 1 }, ParallelStyle::Rowwise { blocks: 1 }];
    // A child module with a 2-d weight is a linear module.
    let mut modules: IndexMap<&str, Vec<&str>> = IndexMap::new();
    for parameter in parameters.iter().filter(|parameter| parameter.shape.len() == 2) {
        let Some(linear) = weight_of(&parameter.name) else { continue };
        if candidate.matches_module(module_of(linear)) {
            modules.entry(module_of(linear)).or_default().push(linear);
        }
    }
    let origin = || candidate.rule.origin.clone();
    let mut styles: HashMap<&str, ParallelStyle> = HashMap::new();
    for (module, linears) in &mut modules {
        if linears.len() > 1 && order == ParameterOrder::Unknown && !sort_by_number(linears) {
            let children = linears.iter().map(|linear| own_name(linear).to_owned()).collect();
            return Err(PlanError::UnknownOrder { origin: origin(), module: display_module(module), children });
        }
        let (pairs, _) = linears.as_chunks::<2>();
        styles.extend(pairs.iter().flat_map(|pair| pair.iter().copied().zip(IN_TURN)));
    }
    if styles.is_empty() {
        let alone = modules.first().map(|(module, linears)| (*module, linears.len()));
        let childless = || {
            let mut modules = parameters.iter().map(|parameter| module_of(&parameter.name));
            modules.find(|module| candidate.matches_module(module)).map(|module| (module, 0))
        };
        return match alone.or_else(childless) {
            Some((module, found)) => Err(PlanError::NoPair { origin: origin(), module: display_module(module), found }),
            None => Ok(Vec::new()),
        };
    }
    let style = |(at, parameter): (usize, &Parameter<'_>)| Some((at, *styles.get(module_of(&parameter.name))?));
    Ok(parameters.iter().enumerate().filter_map(style).collect())
}

/// Returns the module whose `weight` this parameter is.
fn weight_of(parameter: &str) -> Option<&str> {
    if parameter == "weight" { None } else { parameter.strip_suffix(".weight") }
}

fn own_name(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

fn display_module(module: &str) -> String {
    if module.is_empty() { String::from("the root module") } else { module.to_owned() }
}

/// Sorts the children of an `nn.Sequential` by number. Returns false, and sorts nothing, if a name is not a number.
fn sort_by_number(linears: &mut [&str]) -> bool {
    let number = |linear: &&str| own_name(linear).parse::<u64>();
    let are_numbers = linears.iter().all(|linear| number(linear).is_ok());
    if are_numbers {
        linears.sort_by_key(|linear| number(linear).unwrap_or(u64::MAX));
    }
    are_numbers
}
