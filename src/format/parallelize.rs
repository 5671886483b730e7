//! Applies a parallelize plan (styles that shard modules for tensor parallelism) to the model of a checkpoint, and
//! reports the result. The plan gives the layout of the target, or declares the layout of the source. PyTorch's
//! counterparts are `parallelize_module` and `fully_shard`. Unit of shapes: elements.

use std::collections::{BTreeSet, HashSet};

use indexmap::IndexMap;

use crate::catalog::Fqn;
use crate::error::Error;
use crate::layout::parallelize::{
    ParallelizePlan, Parameter, ParameterOrder, ParameterPlacement, PlacementSource, PlanError, UnboundPlan,
    UncutReason, similar_families,
};
use crate::layout::{DeviceMesh, MeshDim};
use crate::name_list::quoted_list;
use crate::nearest;
use crate::quantity::count;

/// The checkpoint (SRC or DST) to which a parallelize plan gives a layout. It determines the names of options in
/// messages: `--src-plan` or `--plan`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanSide {
    Source,
    Target,
}

impl PlanSide {
    /// Returns the name of an option for this checkpoint: `options::plan`, `options::src_plan`.
    fn option(self, name: &str) -> String {
        let prefix = match self {
            Self::Source => "src_",
            Self::Target => "",
        };
        format!("options::{prefix}{name}")
    }

    /// Assigns a role (tensor parallelism, FSDP, replication) to each dim of the mesh, as the plan `draft` says.
    ///
    /// # Errors
    /// `Usage` if the plan does not determine the role of every mesh dim.
    pub fn plan(self, draft: &UnboundPlan, mesh: &DeviceMesh) -> Result<ParallelizePlan, Error> {
        draft.on_mesh(mesh).map_err(|error| self.error(error, &[]))
    }

    /// Converts an error of a plan to an error with a hint for the user.
    fn error(self, error: PlanError, parameters: &[Parameter<'_>]) -> Error {
        let (mesh, plan, placements) = (self.option("mesh"), self.option("plan"), self.option("placements"));
        let hint = match (&error, self) {
            (PlanError::UnnamedMesh { .. }, _) => format!("give one with {mesh}, such as {mesh} dp=4,tp=2"),
            (PlanError::NoSuchDim { name, dims, .. }, _) => nearest::name_hint(name, dims),
            (PlanError::DimTwice { .. }, _) => {
                String::from("use different mesh dims for tensor parallelism, FSDP and replication")
            }
            (PlanError::UnusedDim { name, .. }, Self::Target) => {
                format!(
                    "give the role of this dim with options::tp {name}, options::fsdp {name}, options::replicate {name} or \
                     options::ddp {name}, or remove the dim from options::mesh"
                )
            }
            (PlanError::UnusedDim { name, .. }, Self::Source) => format!(
                "give the role of this dim in a layout file (options::src_layout): tp = \"{name}\", fsdp = \"{name}\", \
                 replicate = \"{name}\" or ddp = \"{name}\""
            ),
            (PlanError::NoTensorDim { .. }, Self::Target) => String::from(
                "name a dim for tensor parallelism with options::tp DIM; for FSDP alone, remove the plan and its \
                 styles, and name the dim with options::fsdp DIM",
            ),
            (PlanError::NoTensorDim { .. }, Self::Source) => String::from(
                "give the dim for tensor parallelism the name tp in options::src_mesh, or name the dim in a layout file \
                 (options::src_layout): tp = \"DIM\"",
            ),
            (PlanError::NoStyles { name }, _) => format!("give a plan with {plan} NAME, or remove {name} from {mesh}"),
            (PlanError::Unmatched { pattern, .. }, _) => {
                nearest::name_hint(pattern, &parameter_and_module_names(parameters))
            }
            (PlanError::OtherFamily { similar, .. }, _) if similar.is_empty() => {
                format!("no built-in plan has these names; declare placements with {placements} 'PATTERN=LIST'")
            }
            (PlanError::OtherFamily { similar, .. }, _) => {
                format!("use {plan} {1}, because these names look like {0}", or_list(similar), similar[0])
            }
            (PlanError::UnknownOrder { .. }, _) => String::from(
                "name the children in their order, as in pairwise(fc1,fc2), or use torch files, which keep the order of a \
                 state dict",
            ),
            (PlanError::NoPair { .. }, _) => {
                String::from("name the module that contains the linear modules in a pairwise pattern")
            }
            (PlanError::SizesOfPair { .. }, _) => String::from(
                "name the modules to pair, as in pairwise(fc1,fc2); if one of the modules is an nn.Embedding, give it the \
                 style `none`, so that pairwise skips it",
            ),
            (PlanError::NoSuchChild { child, children, .. }, _) => nearest::name_hint(child, children),
            (PlanError::Layout(error), _) => return Error::Layout(error.clone()),
        };
        Error::usage(error.to_string(), hint)
    }
}

/// The parameters of a model, with the placements that a parallelize plan gives them.
#[derive(Debug)]
pub struct PlannedModel {
    side: PlanSide,
    plan: ParallelizePlan,
    mesh: DeviceMesh,
    /// The placement of each parameter, in the order of the state dict.
    placements: IndexMap<Fqn, ParameterPlacement>,
    /// The names of the built-in plans that match the most parameter names. A note suggests these plans, unless the
    /// list contains the chosen plan. The list is empty if the user chose no built-in plan, or if the styles of the
    /// chosen plan match all parameters.
    matching_families: Vec<&'static str>,
    /// The names of parameters whose placements come from a rule instead of the plan.
    covered_by_rule: HashSet<Fqn>,
}

impl PlannedModel {
    /// Applies a plan to the parameters of a model. `names` are the names of `parameters` in the state dict.
    ///
    /// # Errors
    /// `Usage` if the plan does not fit the model.
    pub fn new(
        side: PlanSide,
        (plan, mesh): (&ParallelizePlan, &DeviceMesh),
        names: Vec<Fqn>,
        parameters: &[Parameter<'_>],
        order: ParameterOrder,
    ) -> Result<Self, Error> {
        let placements = plan.bind(mesh, parameters, order).map_err(|error| side.error(error, parameters))?;
        let is_left = |placement: &ParameterPlacement| placement.by == PlacementSource::NoStyle;
        let matching_families = if plan.family.is_some() && placements.iter().any(is_left) {
            similar_families(parameters)
        } else {
            Vec::new()
        };
        let placements = names.into_iter().zip(placements).collect();
        Ok(Self {
            side,
            plan: plan.clone(),
            mesh: mesh.clone(),
            placements,
            matching_families,
            covered_by_rule: HashSet::new(),
        })
    }

    /// Returns the placement of a parameter; `None` if the model has no parameter of this name.
    pub fn placement(&self, name: &Fqn) -> Option<&ParameterPlacement> {
        self.placements.get(name)
    }

    /// Records that a rule instead of the plan gives the placements of a parameter. No note will mention this
    /// parameter.
    pub fn mark_covered_by_rule(&mut self, name: &Fqn) {
        self.covered_by_rule.insert(name.clone());
    }

    /// Returns the parameters without a rule, each with the placements that the plan gives it.
    pub fn planned(&self) -> impl Iterator<Item = (&str, &ParameterPlacement)> {
        self.placements
            .iter()
            .filter(|(name, _)| !self.covered_by_rule.contains(*name))
            .map(|(name, placement)| (name.as_str(), placement))
    }

    fn names(&self, of: impl Fn(&ParameterPlacement) -> bool) -> Vec<&str> {
        self.planned().filter(|(_, placement)| of(placement)).map(|(name, _)| name).collect()
    }

    /// Returns the name and the size of the mesh dim for tensor parallelism; `None` if there is no such dim.
    pub fn tensor_dim(&self) -> Option<(&str, u64)> {
        let dim = self.plan.roles.tp?;
        Some((self.dim(Some(dim)), self.mesh.shape()[dim.0]))
    }

    /// Returns whether the plan has a mesh dim for FSDP.
    pub fn has_fsdp(&self) -> bool {
        self.plan.roles.fsdp.is_some()
    }

    fn dim(&self, dim: Option<MeshDim>) -> &str {
        dim.zip(self.mesh.names()).map_or("", |(dim, names)| &names[dim.0])
    }

    /// Returns notes about results that users may not expect. The text `of_unstyled` is added to the note about tensors
    /// that no style of the plan matches.
    pub fn notes(&self, of_unstyled: &str) -> Vec<String> {
        let mut notes = Vec::new();
        let mut note = |names: Vec<&str>, of_one: &str, of_many: &str| {
            let what = if names.len() == 1 { of_one } else { of_many };
            if !names.is_empty() {
                notes.push(format!("{} ({}){what}", count(names.len(), "tensor"), quoted_list(&names, 2)));
            }
        };
        let (tp, fsdp) = (self.dim(self.plan.roles.tp), self.dim(self.plan.roles.fsdp));
        let mut odd: IndexMap<(u64, u64), Vec<&str>> = IndexMap::new();
        for (name, placement) in self.planned() {
            if let Some(UncutReason::OddBlocks { blocks, size }) = placement.uncut {
                odd.entry((blocks, size)).or_default().push(name);
            }
        }
        for ((blocks, size), names) in odd {
            let what = format!(
                "replicated on {tp}, because the fused dim of size {size} does not divide into {blocks} weights of \
                     equal size"
            );
            note(names, &format!(" is {what}"), &format!(" are {what}"));
        }
        let replicated = match self.side {
            PlanSide::Source => "treated as replicated",
            PlanSide::Target => "replicated",
        };
        let what = format!(
            "{replicated} on {fsdp}, because {tp} shards each block of a fused weight, and no placement can express a \
             further shard on {fsdp}"
        );
        note(
            self.names(|placement| placement.uncut == Some(UncutReason::BlocksWithinFsdp)),
            &format!(" is {what}"),
            &format!(" are {what}"),
        );
        let mut assumed: IndexMap<&str, Vec<&str>> = IndexMap::new();
        for (name, placement) in self.planned() {
            if let Some(note) = placement.note {
                assumed.entry(note).or_default().push(name);
            }
        }
        for (assumption, names) in assumed {
            let what = format!(": {assumption}");
            note(names, &what, &what);
        }
        if self.plan.roles.tp.is_some() {
            let (of_one, of_many) = match self.plan.roles.fsdp {
                Some(_) => (format!("it is sharded on {fsdp} only"), format!("they are sharded on {fsdp} only")),
                None => (
                    String::from("every rank stores it whole, as a plain tensor"),
                    String::from("every rank stores them whole, as plain tensors"),
                ),
            };
            let own = self.plan.family.map(|family| family.name);
            let other = Some(&self.matching_families).filter(|matching_families| {
                !matching_families.is_empty() && !matching_families.iter().any(|name| Some(*name) == own)
            });
            let other = other
                .map(|matching_families| {
                    format!("; {} {} matches more names", self.side.option("plan"), or_list(matching_families))
                })
                .unwrap_or_default();
            note(
                self.names(|placement| placement.by == PlacementSource::NoStyle),
                &format!(" matches no style of the plan, so {of_one}{other}{of_unstyled}"),
                &format!(" match no style of the plan, so {of_many}{other}{of_unstyled}"),
            );
        }
        note(
            self.names(|placement| placement.by == PlacementSource::Buffer),
            " is treated as a buffer, so every rank stores it whole, as a plain tensor",
            " are treated as buffers, so every rank stores them whole, as plain tensors",
        );
        if self.side == PlanSide::Source && self.plan.roles.fsdp.is_some() {
            // If copies are treated as parts, the result is a larger tensor, without any error.
            notes.push(format!(
                "shards are assumed to be cut along dim 0 over {fsdp}, as FSDP does; if the ranks of {fsdp} hold \
                 copies, declare replicate = \"{fsdp}\" in a layout file"
            ));
        }
        notes
    }

    /// Returns one line for each style of the plan, with the number of parameters that have the style.
    pub fn details(&self) -> Vec<String> {
        let mut counts: IndexMap<String, usize> = IndexMap::new();
        for placement in self.placements.values() {
            *counts.entry(placement.by.to_string()).or_default() += 1;
        }
        counts.into_iter().map(|(by, number)| format!("{by}: {}", count(number, "tensor"))).collect()
    }
}

/// Returns a list such as `llama, mistral or qwen2`.
fn or_list(names: &[&str]) -> String {
    match names {
        [first @ .., before, last] => [first, &[&format!("{before} or {last}")]].concat().join(", "),
        few => few.concat(),
    }
}

/// Returns the names of parameters, and the names of the modules that directly contain parameters.
fn parameter_and_module_names(parameters: &[Parameter<'_>]) -> Vec<String> {
    let name = |parameter: &Parameter<'_>| parameter.name.clone();
    let module = |parameter: &Parameter<'_>| parameter.name.rsplit_once('.').map(|(module, _)| module.to_owned());
    let names: BTreeSet<String> = parameters.iter().map(name).chain(parameters.iter().filter_map(module)).collect();
    names.into_iter().collect()
}
