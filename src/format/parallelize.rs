//! A parallelize plan meets the model of a checkpoint, to say how a target is to lie or how a source lies; and what there
//! is to tell of it.

use std::collections::{BTreeSet, HashSet};

use indexmap::IndexMap;

use crate::catalog::Fqn;
use crate::error::Error;
use crate::layout::parallelize::{
    ParallelizePlan, Parameter, ParameterOrder, ParameterPlacement, PlacementSource, PlanError, UnboundPlan,
    UncutReason, similar_families,
};
use crate::layout::{DeviceMesh, MeshDim};
use crate::name_list::short_list;
use crate::nearest;
use crate::quantity::count;

/// Which checkpoint a plan is said of: by which options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanSide {
    Source,
    Target,
}

impl PlanSide {
    /// Names an option of this side: `options::plan`, `options::src_plan`.
    fn option(self, name: &str) -> String {
        let prefix = match self {
            Self::Source => "src_",
            Self::Target => "",
        };
        format!("options::{prefix}{name}")
    }

    /// The plan on a mesh.
    ///
    /// # Errors
    /// `Usage` where it does not know what to do with the dims of the mesh.
    pub fn plan(self, draft: &UnboundPlan, mesh: &DeviceMesh) -> Result<ParallelizePlan, Error> {
        draft.on_mesh(mesh).map_err(|error| self.error(error, &[]))
    }

    /// With what to do about it.
    fn error(self, error: PlanError, parameters: &[Parameter<'_>]) -> Error {
        let (mesh, plan, placements) = (self.option("mesh"), self.option("plan"), self.option("placements"));
        let hint = match (&error, self) {
            (PlanError::UnnamedMesh { .. }, _) => format!("give one with {mesh}, such as {mesh} dp=4,tp=2"),
            (PlanError::NoSuchDim { name, dims, .. }, _) => nearest::name_hint(name, dims),
            (PlanError::DimTwice { .. }, _) => {
                String::from("tensor parallelism, FSDP and its copies have a dim of their own each")
            }
            (PlanError::UnusedDim { name, .. }, Self::Target) => {
                format!(
                    "say it with options::tp {name}, options::fsdp {name} or options::replicate {name}, or leave the dim out of options::mesh"
                )
            }
            (PlanError::UnusedDim { name, .. }, Self::Source) => format!(
                "a layout file (options::src_layout) says it: tp = \"{name}\", fsdp = \"{name}\" or replicate = \"{name}\""
            ),
            (PlanError::NoTensorDim { .. }, Self::Target) => String::from(
                "say it with options::tp DIM; for FSDP alone leave options::plan out: options::mesh dp=4 options::fsdp dp",
            ),
            (PlanError::NoTensorDim { .. }, Self::Source) => String::from(
                "call it tp in options::src_mesh, or say in a layout file (options::src_layout) which it is: tp = \"DIM\"",
            ),
            (PlanError::NoStyles { name }, _) => format!("say it with {plan} NAME, or leave {name} out of {mesh}"),
            (PlanError::Unmatched { pattern, .. }, _) => nearest::name_hint(pattern, &modules(parameters)),
            (PlanError::OtherFamily { similar, .. }, _) if similar.is_empty() => {
                format!("no built-in plan knows these names; {placements} 'PATTERN=LIST' says how tensors lie")
            }
            (PlanError::OtherFamily { similar, .. }, _) => {
                format!("these names look like {}: {plan} {}", any_of(similar), similar[0])
            }
            (PlanError::UnknownOrder { .. }, _) => String::from(
                "name the style of each child, colwise and rowwise; torch files keep the order of a state dict",
            ),
            (PlanError::NoPair { .. }, _) => {
                String::from("a pattern of pairwise is of the module that has the linear modules")
            }
            (PlanError::Layout(error), _) => return Error::Layout(error.clone()),
        };
        Error::usage(error.to_string(), hint)
    }
}

/// How a plan has the parameters of a model.
#[derive(Debug)]
pub struct PlannedModel {
    side: PlanSide,
    plan: ParallelizePlan,
    mesh: DeviceMesh,
    /// In the order of the state dict.
    laid: IndexMap<Fqn, ParameterPlacement>,
    /// Plans that name more.
    alike: Vec<&'static str>,
    /// What a rule lays out instead.
    ruled: HashSet<Fqn>,
}

impl PlannedModel {
    /// `names` are those of the parameters in their state dict.
    ///
    /// # Errors
    /// `Usage` where the plan does not fit.
    pub fn new(
        side: PlanSide,
        (plan, mesh): (&ParallelizePlan, &DeviceMesh),
        names: Vec<Fqn>,
        parameters: &[Parameter<'_>],
        order: ParameterOrder,
    ) -> Result<Self, Error> {
        let laid = plan.bind(mesh, parameters, order).map_err(|error| side.error(error, parameters))?;
        let is_left = |laid: &ParameterPlacement| laid.by == PlacementSource::NoStyle;
        let alike =
            if plan.family.is_some() && laid.iter().any(is_left) { similar_families(parameters) } else { Vec::new() };
        let laid = names.into_iter().zip(laid).collect();
        Ok(Self { side, plan: plan.clone(), mesh: mesh.clone(), laid, alike, ruled: HashSet::new() })
    }

    /// How a tensor of the model lies.
    pub fn laid(&self, name: &Fqn) -> Option<&ParameterPlacement> {
        self.laid.get(name)
    }

    /// A rule lays out this parameter, and there is nothing to tell of it.
    pub fn leave(&mut self, name: &Fqn) {
        self.ruled.insert(name.clone());
    }

    /// What nobody but the plan lays out.
    pub fn left(&self) -> impl Iterator<Item = (&str, &ParameterPlacement)> {
        self.laid.iter().filter(|(name, _)| !self.ruled.contains(*name)).map(|(name, laid)| (name.as_str(), laid))
    }

    fn names(&self, of: impl Fn(&ParameterPlacement) -> bool) -> Vec<&str> {
        self.left().filter(|(_, laid)| of(laid)).map(|(name, _)| name).collect()
    }

    /// The mesh dim of tensor parallelism, and its size.
    #[must_use]
    pub fn tensor_dim(&self) -> Option<(&str, u64)> {
        let dim = self.plan.roles.tp?;
        Some((self.dim(Some(dim)), self.mesh.shape()[dim.0]))
    }

    #[must_use]
    pub fn has_fsdp(&self) -> bool {
        self.plan.roles.fsdp.is_some()
    }

    fn dim(&self, dim: Option<MeshDim>) -> &str {
        dim.zip(self.mesh.names()).map_or("", |(dim, names)| &names[dim.0])
    }

    /// What is not as somebody may think; `of_unstyled` is said of what no style names.
    #[must_use]
    pub fn notes(&self, of_unstyled: &str) -> Vec<String> {
        let mut notes = Vec::new();
        let mut note = |names: Vec<&str>, what: &str| {
            if !names.is_empty() {
                notes.push(format!("{} ({}): {what}", count(names.len(), "tensor"), short_list(&names, 2)));
            }
        };
        let (tp, fsdp) = (self.dim(self.plan.roles.tp), self.dim(self.plan.roles.fsdp));
        let mut odd: IndexMap<(u64, u64), Vec<&str>> = IndexMap::new();
        for (name, laid) in self.left() {
            if let Some(UncutReason::OddBlocks { blocks, size }) = laid.uncut {
                odd.entry((blocks, size)).or_default().push(name);
            }
        }
        for ((blocks, size), names) in odd {
            note(names, &format!("whole on {tp}, because {size} does not divide into {blocks} weights of one size"));
        }
        let is = match self.side {
            PlanSide::Source => "taken for whole",
            PlanSide::Target => "whole",
        };
        note(
            self.names(|laid| laid.uncut == Some(UncutReason::BlocksWithinFsdp)),
            &format!("{is} on {fsdp}: no placement says that it is cut there after {tp} took a part of each block"),
        );
        let mut assumed: IndexMap<&str, Vec<&str>> = IndexMap::new();
        for (name, laid) in self.left() {
            if let Some(said) = laid.note {
                assumed.entry(said).or_default().push(name);
            }
        }
        for (said, names) in assumed {
            note(names, said);
        }
        if self.plan.roles.tp.is_some() {
            let lie = match self.plan.roles.fsdp {
                Some(_) => format!("no style names them: on {fsdp} alone"),
                None => String::from("no style names them: plain on every rank"),
            };
            let own = self.plan.family.map(|family| family.name);
            let other =
                Some(&self.alike).filter(|alike| !alike.is_empty() && !alike.iter().any(|name| Some(*name) == own));
            let other = other
                .map(|alike| format!("; {} {} names more", self.side.option("plan"), any_of(alike)))
                .unwrap_or_default();
            note(self.names(|laid| laid.by == PlacementSource::NoStyle), &(lie + &other + of_unstyled));
        }
        note(self.names(|laid| laid.by == PlacementSource::Buffer), "taken for buffers: plain on every rank");
        if self.side == PlanSide::Source && self.plan.roles.fsdp.is_some() {
            // Copies that are taken for parts make up a larger tensor, and nothing else would show it.
            notes.push(format!(
                "parts are cut along dim 0 over {fsdp}, as FSDP does; where its ranks have copies, a layout file says \
                 replicate = \"{fsdp}\""
            ));
        }
        notes
    }

    /// How many parameters have each style.
    pub fn details(&self) -> Vec<String> {
        let mut counts: IndexMap<String, usize> = IndexMap::new();
        for laid in self.laid.values() {
            *counts.entry(laid.by.to_string()).or_default() += 1;
        }
        counts.into_iter().map(|(by, number)| format!("{by}: {}", count(number, "tensor"))).collect()
    }
}

/// `llama, mistral or qwen2`
fn any_of(names: &[&str]) -> String {
    match names {
        [first @ .., before, last] => [first, &[&format!("{before} or {last}")]].concat().join(", "),
        few => few.concat(),
    }
}

/// The names of parameters, and of the modules that have them.
fn modules(parameters: &[Parameter<'_>]) -> Vec<String> {
    let name = |parameter: &Parameter<'_>| parameter.name.clone();
    let module = |parameter: &Parameter<'_>| parameter.name.rsplit_once('.').map(|(module, _)| module.to_owned());
    let names: BTreeSet<String> = parameters.iter().map(name).chain(parameters.iter().filter_map(module)).collect();
    names.into_iter().collect()
}
