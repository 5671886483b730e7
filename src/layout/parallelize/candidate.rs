//! The parameters of a model, and the style rules that may match them.

use super::{ParallelStyle, ParameterRole, RuleStyle, StyleRule};

/// A parameter or buffer of the model, with the properties by which a plan chooses its placement.
#[derive(Clone, Debug)]
pub struct Parameter<'a> {
    pub name: String,
    pub shape: &'a [u64],
    pub shape_origin: ShapeOrigin,
    pub kind: ParameterKind,
}

/// The tensor from which the shape of a parameter is known: the global tensor, or only a local shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeOrigin {
    Global,
    /// The known shape is the shape of one rank's local shard. The number of shards is unknown.
    LocalShard,
}

/// The kind of a tensor: parameter or buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    Parameter,
    /// A buffer, which stays a plain tensor unless a style matches the buffer.
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
    /// The user gave the rule. A rule of the user that matches no parameter is an error.
    User,
    /// The rule is one of the attention and MLP rules of a built-in plan. At least one of these rules must match a
    /// parameter.
    Layers,
    /// The rule is one of the rules of a built-in plan for embeddings, norms and the head. Such a rule may match no
    /// parameter.
    OutsideLayers,
}

impl Candidate {
    pub fn matches_module(&self, module: &str) -> bool {
        let pattern = &self.rule.pattern;
        if module.is_empty() { pattern.as_str() == "." } else { pattern.matches(module) }
    }

    /// Returns whether the pattern matches the parameter or the module of the parameter. Returns false for every
    /// `pairwise` rule, which matches modules only.
    pub fn matches(&self, parameter: &str) -> bool {
        matches!(self.rule.style, RuleStyle::Single(_))
            && (self.matches_module(module_of(parameter)) || self.rule.pattern.matches(parameter))
    }

    /// Returns the role (weight, bias or other) of a parameter that the rule matches.
    pub fn role(&self, parameter: &str) -> ParameterRole {
        if self.rule.pattern.matches(parameter) {
            ParameterRole::by_itself(parameter)
        } else {
            ParameterRole::of_module(parameter)
        }
    }
}

/// A parameter that a rule matches: the index in the list of parameters, the style, and a note for the user.
pub(super) type StyledParameter = (usize, ParallelStyle, Option<&'static str>);

/// Returns the name of the module that contains a parameter or a child module; empty for the root module.
pub fn module_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}
