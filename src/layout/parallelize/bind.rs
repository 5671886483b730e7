//! A plan meets the parameters of a model: which style each has.
//!
//! A pattern is of a module, and names the module's own parameters, not what is below it; or of a parameter. `.` is the
//! root module. `pairwise` is of a module, too, and goes by the order of its children.

use std::collections::HashMap;

use indexmap::IndexMap;

use super::super::{DeviceMesh, Pattern};
use super::{
    Family, ParallelStyle, ParallelizePlan, ParameterPlacement, ParameterRole, PlacementSource, PlanError, StyleRule,
};

/// A tensor of the model.
#[derive(Clone, Debug)]
pub struct Parameter<'a> {
    pub name: String,
    pub shape: &'a [u64],
    pub sizes: ShapeOrigin,
    pub kind: ParameterKind,
}

/// Of what a shape is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeOrigin {
    OfWhole,
    /// Of what some rank has: how far it is cut cannot be told from it.
    OfPart,
}

/// Whether it is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    Parameter,
    /// A plain tensor, unless a style names it.
    Buffer,
}

/// What the order of parameters is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterOrder {
    /// That of registration, as in a state dict.
    Registered,
    Unknown,
}

/// A rule, and what it may do.
pub(super) struct Candidate {
    pub rule: StyleRule,
    pub origin: RuleOrigin,
    pub note: Option<&'static str>,
}

/// Where a rule is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuleOrigin {
    /// Somebody said it: it has to name something.
    Told,
    /// Attention and MLPs of a built-in plan: some of them have to.
    Layers,
    /// The rest of one.
    Around,
}

impl Candidate {
    fn names_module(&self, module: &str) -> bool {
        let pattern = &self.rule.pattern;
        if module.is_empty() { pattern.as_str() == "." } else { pattern.matches(module) }
    }

    /// Whether it gives its own style to this parameter.
    pub fn names(&self, parameter: &str) -> bool {
        self.rule.style != ParallelStyle::Pairwise
            && (self.names_module(module_of(parameter)) || self.rule.pattern.matches(parameter))
    }

    /// What a parameter is that it names.
    fn part(&self, parameter: &str) -> ParameterRole {
        if self.rule.pattern.matches(parameter) {
            ParameterRole::by_itself(parameter)
        } else {
            ParameterRole::of_module(parameter)
        }
    }
}

/// The module that has a parameter, or a module as its child.
fn module_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}

impl ParallelizePlan {
    /// How each of these lies, in their order.
    ///
    /// # Errors
    /// `PlanError` for rules that name nothing, a plan of another family, and pairs in an order that is not known.
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
                ParallelStyle::Pairwise => pairs(candidate, parameters, order)?,
                style => {
                    let names = |at: &usize| candidate.names(&parameters[*at].name);
                    (0..parameters.len()).filter(names).map(|at| (at, style)).collect()
                }
            };
            if named.is_empty() && candidate.origin == RuleOrigin::Told {
                let StyleRule { pattern, said, .. } = &candidate.rule;
                return Err(PlanError::Unmatched { said: said.clone(), pattern: pattern.to_string() });
            }
            layers_are_there |= candidate.origin == RuleOrigin::Layers && !named.is_empty();
            for (at, style) in named {
                found[at].get_or_insert((candidate, style));
            }
        }
        if let Some(family) = self.family.filter(|_| !layers_are_there) {
            return Err(PlanError::OtherFamily { plan: family.name, alike: super::alike(parameters) });
        }
        let buffers = self.family.map(|_| Family::buffers()).unwrap_or_default();
        let lay = |(parameter, found): (&Parameter<'_>, Option<(&Candidate, ParallelStyle)>)| match found {
            Some((candidate, style)) if style != ParallelStyle::None => {
                let laid = self.roles.styled(mesh, style, candidate.part(&parameter.name), parameter);
                ParameterPlacement { note: candidate.note, ..laid }
            }
            _ if parameter.kind == ParameterKind::Buffer || is_buffer(&buffers, parameter) => {
                ParameterPlacement { shared: None, by: PlacementSource::Buffer, uncut: None, note: None }
            }
            Some((_, style)) => {
                ParameterPlacement { by: PlacementSource::Style(style), ..self.roles.unstyled(mesh, parameter.shape) }
            }
            None => self.roles.unstyled(mesh, parameter.shape),
        };
        Ok(parameters.iter().zip(found).map(lay).collect())
    }

    /// What was told, then what is built in.
    fn candidates(&self, mesh: &DeviceMesh) -> Result<Vec<Candidate>, PlanError> {
        let told = |rule: &StyleRule| Candidate { rule: rule.clone(), origin: RuleOrigin::Told, note: None };
        let mut candidates: Vec<Candidate> = self.styles.iter().map(told).collect();
        if let Some(family) = self.family {
            candidates.extend(family.candidates());
        }
        let dim_name = |names: &[String]| self.roles.tp.map(|tp| names[tp.0].clone());
        match (candidates.first(), mesh.names().and_then(dim_name)) {
            (Some(first), None) => {
                let plan = || self.family.map(|family| format!("plan {}", family.name));
                let said =
                    Some(first).filter(|first| first.origin == RuleOrigin::Told).map(|first| first.rule.said.clone());
                let said = said.or_else(plan).unwrap_or_default();
                Err(PlanError::NoTensorDim { said, mesh: mesh.to_string() })
            }
            (None, Some(name)) => Err(PlanError::NoStyles { name }),
            _ => Ok(candidates),
        }
    }
}

fn is_buffer(buffers: &[Pattern], parameter: &Parameter<'_>) -> bool {
    buffers.iter().any(|pattern| pattern.matches(&parameter.name))
}

/// What a pairwise rule gives to whom.
fn pairs(
    candidate: &Candidate,
    parameters: &[Parameter<'_>],
    order: ParameterOrder,
) -> Result<Vec<(usize, ParallelStyle)>, PlanError> {
    const IN_TURN: [ParallelStyle; 2] = [ParallelStyle::Colwise { blocks: 1 }, ParallelStyle::Rowwise { blocks: 1 }];
    // Children that have a 2-d weight.
    let mut modules: IndexMap<&str, Vec<&str>> = IndexMap::new();
    for parameter in parameters.iter().filter(|parameter| parameter.shape.len() == 2) {
        let Some(linear) = weight_of(&parameter.name) else { continue };
        if candidate.names_module(module_of(linear)) {
            modules.entry(module_of(linear)).or_default().push(linear);
        }
    }
    let said = || candidate.rule.said.clone();
    let mut styles: HashMap<&str, ParallelStyle> = HashMap::new();
    for (module, linears) in &mut modules {
        if linears.len() > 1 && order == ParameterOrder::Unknown && !sort_by_number(linears) {
            let children = linears.iter().map(|linear| own_name(linear).to_owned()).collect();
            return Err(PlanError::UnknownOrder { said: said(), module: shown(module), children });
        }
        let (pairs, _) = linears.as_chunks::<2>();
        styles.extend(pairs.iter().flat_map(|pair| pair.iter().copied().zip(IN_TURN)));
    }
    if styles.is_empty() {
        let alone = modules.first().map(|(module, linears)| (*module, linears.len()));
        let childless = || {
            let mut modules = parameters.iter().map(|parameter| module_of(&parameter.name));
            modules.find(|module| candidate.names_module(module)).map(|module| (module, 0))
        };
        return match alone.or_else(childless) {
            Some((module, found)) => Err(PlanError::NoPair { said: said(), module: shown(module), found }),
            None => Ok(Vec::new()),
        };
    }
    let style = |(at, parameter): (usize, &Parameter<'_>)| Some((at, *styles.get(module_of(&parameter.name))?));
    Ok(parameters.iter().enumerate().filter_map(style).collect())
}

/// The module whose `weight` it is.
fn weight_of(parameter: &str) -> Option<&str> {
    if parameter == "weight" { None } else { parameter.strip_suffix(".weight") }
}

fn own_name(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

fn shown(module: &str) -> String {
    if module.is_empty() { String::from("the root module") } else { module.to_owned() }
}

/// Children of `nn.Sequential`, whose names are numbers; whether they are.
fn sort_by_number(linears: &mut [&str]) -> bool {
    let number = |linear: &&str| own_name(linear).parse::<u64>();
    let are_numbers = linears.iter().all(|linear| number(linear).is_ok());
    if are_numbers {
        linears.sort_by_key(|linear| number(linear).unwrap_or(u64::MAX));
    }
    are_numbers
}
