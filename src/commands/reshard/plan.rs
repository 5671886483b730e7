//! `--plan`, `--tp`, `--fsdp`, `--replicate`: a parallelize plan, how it has the parameters of this model, and what there
//! is to tell of it.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use indexmap::IndexMap;

use super::heads::Heads;
use super::subject::{Subjects, ToldBy};
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Fqn, TensorId, model};
use crate::cli::Reshard;
use crate::error::{Error, Result, first_of};
use crate::format::layout_file;
use crate::layout::file::{LayoutFile, PlanSaid, Said};
use crate::layout::parallelize::{By, Family, Laid, Order, Parameter, Plan, PlanError, RoleNames, Roles, Whole, alike};
use crate::layout::{DeviceMesh, MeshDim};
use crate::nearest;
use crate::quantity::count;
use crate::select::Wrappers;

/// The plan of the command line, and of the layout file: what the first says goes before what the other does.
///
/// # Errors
/// `Usage` for plans and mesh dims that there are not, and as reading the file of `--plan`.
pub fn wanted(args: &Reshard, layout: Option<&LayoutFile>, mesh: &DeviceMesh) -> Result<Option<Plan>> {
    let Reshard { plan, tp, fsdp, replicate, .. } = args;
    let built_in = plan.as_deref().and_then(Family::named);
    let file = match plan {
        Some(name) if built_in.is_none() => Some(file_of(name)?),
        _ => None,
    };
    let said: Vec<&PlanSaid> = file.iter().chain(layout).map(|file| &file.plan).collect();
    if [plan, tp, fsdp, replicate].iter().all(|given| given.is_none()) && said.iter().all(|said| said.is_empty()) {
        return Ok(None);
    }
    let dim = |given: &Option<String>, of: fn(&PlanSaid) -> &Option<Said<String>>| {
        given.clone().or_else(|| said.iter().find_map(|said| of(said).as_ref()).map(|said| said.value.clone()))
    };
    let names = RoleNames {
        tp: dim(tp, |said| &said.tp),
        fsdp: dim(fsdp, |said| &said.fsdp),
        replicate: dim(replicate, |said| &said.replicate),
    };
    let styles = said.iter().flat_map(|said| said.styles.iter().cloned()).collect();
    let family = match (built_in, said.iter().find_map(|said| said.name.as_ref())) {
        (Some(family), _) => Some(family),
        (None, Some(name)) => {
            let unknown = || name.wrong(format!("no built-in plan is called {}", name.value), hint(&name.value));
            Some(Family::named(&name.value).ok_or_else(unknown)?)
        }
        (None, None) => None,
    };
    let roles = Roles::of(mesh, &names).map_err(|error| with_hint(error, &[]))?;
    Ok(Some(Plan { styles, family, roles }))
}

/// The layout file that `--plan` names.
fn file_of(name: &str) -> Result<LayoutFile> {
    let path = Path::new(name);
    if !path.exists() && path.extension().is_none() {
        return Err(Error::usage(format!("--plan {name}: no built-in plan has this name"), hint(name)));
    }
    let file = layout_file::read(path)?;
    if !file.is_plan_alone() {
        return Err(Error::usage(
            format!("--plan {name}: it says more than a plan, or none"),
            "--layout takes mesh, placements and rules of a file as well as its plan and styles",
        ));
    }
    Ok(file)
}

fn hint(name: &str) -> String {
    let known: Vec<String> = Family::all().iter().map(|family| family.name.to_owned()).collect();
    format!("{}; there are {}, and layout files with styles", nearest::listed(name, &known), known.join(", "))
}

/// How a plan has the parameters of a model.
pub struct Planned {
    plan: Plan,
    mesh: DeviceMesh,
    /// In the order of the state dict.
    laid: IndexMap<Fqn, Laid>,
    /// Plans that name more.
    alike: Vec<&'static str>,
    heads: Heads,
    told_by: ToldBy,
    /// What a rule lays out instead.
    ruled: HashSet<Fqn>,
}

impl Planned {
    /// # Errors
    /// `Usage` where the plan does not fit.
    pub fn new(plan: &Plan, mesh: &DeviceMesh, subjects: &Subjects<'_>, order: Order, heads: Heads) -> Result<Self> {
        let Subjects { catalog, wrappers, .. } = subjects;
        let name = |fqn: &Fqn| match wrappers {
            Wrappers::Keep => fqn.to_string(),
            Wrappers::Cut | Wrappers::Match => clean_name(fqn.as_str()),
        };
        let model = model::model(&catalog.state).tensors;
        let parameter = |(fqn, id): &(Fqn, TensorId)| {
            let entry = catalog.tensor(*id);
            Parameter { name: name(fqn), kind: subjects.kind(entry), shape: &entry.shape }
        };
        let parameters: Vec<Parameter<'_>> = model.iter().map(parameter).collect();
        let laid = plan.bind(mesh, &parameters, order).map_err(|error| with_hint(error, &parameters))?;
        let is_left = |laid: &Laid| laid.by == By::Nobody;
        let alike = if plan.family.is_some() && laid.iter().any(is_left) { alike(&parameters) } else { Vec::new() };
        let laid = model.into_iter().map(|(fqn, _)| fqn).zip(laid).collect();
        let told_by = subjects.told_by;
        Ok(Self { plan: plan.clone(), mesh: mesh.clone(), laid, alike, heads, told_by, ruled: HashSet::new() })
    }

    /// How a tensor of the model lies.
    pub fn laid(&self, name: &Fqn) -> Option<&Laid> {
        self.laid.get(name)
    }

    /// A rule lays out this parameter, and there is nothing to tell of it.
    pub fn leave(&mut self, name: &Fqn) {
        self.ruled.insert(name.clone());
    }

    /// What nobody but the plan lays out.
    fn left(&self) -> impl Iterator<Item = (&str, &Laid)> {
        self.laid.iter().filter(|(name, _)| !self.ruled.contains(*name)).map(|(name, laid)| (name.as_str(), laid))
    }

    fn names(&self, of: impl Fn(&Laid) -> bool) -> Vec<&str> {
        self.left().filter(|(_, laid)| of(laid)).map(|(name, _)| name).collect()
    }

    fn dim(&self, dim: Option<MeshDim>) -> &str {
        dim.zip(self.mesh.names()).map_or("", |(dim, names)| &names[dim.0])
    }

    /// What is not as somebody may think.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let mut note = |names: Vec<&str>, what: &str| {
            if !names.is_empty() {
                notes.push(format!("{} ({}): {what}", count(names.len(), "tensor"), first_of(&names, 2)));
            }
        };
        let (tp, fsdp) = (self.dim(self.plan.roles.tp), self.dim(self.plan.roles.fsdp));
        let mut odd: IndexMap<(u64, u64), Vec<&str>> = IndexMap::new();
        for (name, laid) in self.left() {
            if let Some(Whole::OddBlocks { blocks, size }) = laid.whole {
                odd.entry((blocks, size)).or_default().push(name);
            }
        }
        for ((blocks, size), names) in odd {
            note(names, &format!("whole on {tp}, because {size} does not divide into {blocks} weights of one size"));
        }
        note(
            self.names(|laid| laid.whole == Some(Whole::BlocksWithinFsdp)),
            &format!("whole on {fsdp}: no placement says that it is cut there after {tp} took a part of each block"),
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
        if let Some(dim) = self.plan.roles.tp {
            let parts = self.mesh.shape()[dim.0];
            let mut within: IndexMap<(&str, u64), Vec<&str>> = IndexMap::new();
            let styled = self.left().filter(|(_, laid)| matches!(laid.by, By::Style(style) if style.cuts()));
            for (name, _) in styled {
                if let Some(heads) = self.heads.cut_within(name, parts) {
                    within.entry(heads).or_default().push(name);
                }
            }
            for ((what, heads), names) in within {
                note(names, &format!("cut within heads: {what} is {heads}, {tp} is {parts}"));
            }
            let lie = match self.plan.roles.fsdp {
                Some(_) => format!("no style names them: on {fsdp} alone"),
                None => String::from("no style names them: plain on every rank"),
            };
            // Nothing tells which of them are trained.
            let buffers = self.plan.roles.fsdp.filter(|_| self.told_by == ToldBy::Nothing);
            let buffers = buffers.map_or("", |_| "; --placements 'NAME=plain' says which are buffers");
            let own = self.plan.family.map(|family| family.name);
            let other =
                Some(&self.alike).filter(|alike| !alike.is_empty() && !alike.iter().any(|name| Some(*name) == own));
            let other = other.map(|alike| format!("; --plan {} names more", any_of(alike))).unwrap_or_default();
            note(self.names(|laid| laid.by == By::Nobody), &(lie + &other + buffers));
        }
        note(self.names(|laid| laid.by == By::Buffer), "taken for buffers: plain on every rank");
        notes
    }

    /// How many parameters have each style.
    pub fn details(&self) -> Vec<String> {
        let mut counts: IndexMap<String, usize> = IndexMap::new();
        for laid in self.laid.values() {
            let by = match laid.by {
                By::Style(style) => style.to_string(),
                By::Nobody => String::from("no style"),
                By::Buffer => String::from("buffers"),
            };
            *counts.entry(by).or_default() += 1;
        }
        counts.into_iter().map(|(by, number)| format!("{by}: {}", count(number, "tensor"))).collect()
    }
}

/// With what to do about it.
fn with_hint(error: PlanError, parameters: &[Parameter<'_>]) -> Error {
    let hint = match &error {
        PlanError::UnnamedMesh { .. } => String::from("give one with --mesh, such as --mesh dp=4,tp=2"),
        PlanError::NoSuchDim { name, dims, .. } => nearest::listed(name, dims),
        PlanError::DimTwice { .. } => {
            String::from("tensor parallelism, FSDP and its copies have a dim of their own each")
        }
        PlanError::LeftOver { name, .. } => {
            format!("say it with --tp {name}, --fsdp {name} or --replicate {name}, or leave the dim out of --mesh")
        }
        PlanError::NoTensorDim { .. } => {
            String::from("say it with --tp DIM; for FSDP alone leave --plan out: --mesh dp=4 --fsdp dp")
        }
        PlanError::NoStyles { name } => {
            format!("say it with --plan NAME, or leave {name} out of --mesh")
        }
        PlanError::Unmatched { pattern, .. } => nearest::listed(pattern, &modules(parameters)),
        PlanError::OtherFamily { alike, .. } if alike.is_empty() => {
            String::from("no built-in plan knows these names; --placements 'PATTERN=LIST' says how tensors lie")
        }
        PlanError::OtherFamily { alike, .. } => {
            format!("these names look like {}: --plan {}", any_of(alike), alike[0])
        }
        PlanError::UnknownOrder { .. } => String::from(
            "name the style of each child, colwise and rowwise; torch files keep the order of a state dict",
        ),
        PlanError::NoPair { .. } => String::from("a pattern of pairwise is of the module that has the linear modules"),
        PlanError::Layout(error) => return Error::Layout(error.clone()),
    };
    Error::usage(error.to_string(), hint)
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
