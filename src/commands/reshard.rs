//! `reshard`: another mesh, other placements; everything is carried.

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use super::Status;
use super::convert::{Conversion, convert, open_source, target_format};
use super::printer::Printer;
use crate::catalog::{Catalog, Fqn, Path, TensorEntry, TensorId, model};
use crate::cli::Reshard;
use crate::error::{Error, Result};
use crate::exec::staging::Shape;
use crate::format::{Format, SeriesChoice, Want, dcp};
use crate::layout::target::{Fallback, Rule, SourceLayout, TargetLayout};
use crate::layout::{DeviceMesh, LayoutError, Pattern, PlacementSpec, Rank, parse_placements};
use crate::quantity::count;

pub fn run(args: &Reshard, printer: &Printer) -> Result<Status> {
    let started = Instant::now();
    let checkpoint = open_source(&args.convert, SeriesChoice::All, Want::All, printer)?;
    let catalog = &checkpoint.catalog;
    catalog.check_agreement()?;
    let destination = args.convert.dst.as_deref();
    let to = target_format(&args.convert.destination, destination, default_format(checkpoint.format));
    if to != Format::Dcp {
        return Err(match to {
            Format::TorchRanks => Error::unsupported(
                "reshard keeps the format of SRC, and files of one rank each are read but not yet written",
                "--to dcp writes a directory that torch.distributed.checkpoint loads on the new mesh",
            ),
            _ => Error::usage(
                format!("{to} holds whole tensors, which have no mesh"),
                "--to dcp writes shards; `dtshard unshard` and `dtshard consolidate` write whole tensors",
            ),
        });
    }
    let layout = target_layout(args, catalog)?;
    let mut chooser = Chooser::new(catalog, &layout);
    let reservation = dcp::reserve(catalog, &catalog.state, &mut |fqn, path, entry| chooser.shards(fqn, path, entry))?;
    let notes = chooser.finish()?;
    let conversion = Conversion {
        started,
        checkpoint: &checkpoint,
        reservation,
        destination,
        shape: Shape::Folder,
        to,
        left_out: Vec::new(),
        notes,
    };
    convert(conversion, &args.convert, printer)
}

/// The source's own format; a single file becomes a DCP directory, since it has no place for shards.
fn default_format(source: Format) -> Format {
    match source {
        Format::TorchRanks => Format::TorchRanks,
        Format::Dcp | Format::Torch | Format::Safetensors | Format::DcpHf => Format::Dcp,
    }
}

/// Mesh and rules from the command line.
fn target_layout(args: &Reshard, catalog: &Catalog) -> Result<TargetLayout> {
    let mut mesh = DeviceMesh::parse(&args.mesh)?;
    if !args.mesh_ranks.is_empty() {
        let ranks = args.mesh_ranks.iter().map(|rank| Rank(*rank)).collect();
        mesh = DeviceMesh::new(mesh.shape(), ranks, mesh.names().map(<[String]>::to_vec))?;
    }
    let mut rules = Vec::new();
    let mut fallback = None;
    for text in &args.placements {
        match text.rsplit_once('=').filter(|(_, list)| parse_placements(list).is_ok()) {
            Some((pattern, list)) if parse_placements(text).is_err() => {
                rules.push(Rule { pattern: Pattern::parse(pattern.trim())?, placements: parse_placements(list)? });
            }
            _ => {
                if fallback.replace(parse_placements(text)?).is_some() {
                    return Err(Error::usage(
                        format!("--placements {text}: a second fallback"),
                        "give one list for every tensor, and PATTERN=LIST for the exceptions",
                    ));
                }
            }
        }
    }
    let fallback = match fallback {
        Some(list) => Fallback::Placements(list),
        None => default_fallback(&mesh, catalog)?,
    };
    Ok(TargetLayout::new(mesh, rules, fallback)?)
}

/// Without a list for every tensor: the source's placements where its mesh dims have the same names, else S(0) on a
/// mesh of one dim. Never everything replicated in silence.
fn default_fallback(mesh: &DeviceMesh, catalog: &Catalog) -> Result<Fallback> {
    let mut own: Vec<&String> = mesh.names().map(|names| names.iter().collect()).unwrap_or_default();
    own.sort();
    let known = |entry: &&TensorEntry| entry.sharding.is_some();
    let mut sharded = catalog.tensors.iter().filter(known).peekable();
    let any = sharded.peek().is_some();
    let same_names = any
        && sharded.all(|entry| {
            let names = entry.sharding.as_ref().and_then(|sharding| catalog.mesh(sharding).names());
            names.is_some_and(|names| names.iter().all(|name| own.contains(&name)))
        });
    if same_names {
        return Ok(Fallback::Source);
    }
    if mesh.ndim() == 1 {
        return Ok(Fallback::Placements(parse_placements("S(0)")?));
    }
    let several: Vec<&str> = mesh.shape().iter().map(|_| "R").collect();
    let (sharded_first, replicated_first) = (several.join(",").replacen('R', "S(0)", 1), {
        let mut list = several.clone();
        list[mesh.ndim() - 1] = "S(0)";
        list.join(",")
    });
    Err(Error::usage(
        format!("--mesh {mesh}: the source does not say how tensors lie on these mesh dims"),
        format!("say it for every tensor: --placements '{sharded_first}' or --placements '{replicated_first}'"),
    ))
}

/// Chooses the placements of each tensor, and remembers what to tell the user.
struct Chooser<'a> {
    catalog: &'a Catalog,
    layout: &'a TargetLayout,
    model_root: Path,
    /// Tensors of the model by name, for the state that follows them.
    parameters: HashMap<Fqn, TensorId>,
    used: Vec<bool>,
    misfits: usize,
    /// Those of them that have no dims at all.
    scalar_misfits: usize,
    /// Numbers of dims of the tensors that got the fallback.
    fallback_ndims: BTreeSet<usize>,
    /// State of parameters that are known by number only.
    numbered: usize,
    /// Names seen, for saying what a pattern came near to.
    names: Vec<String>,
}

impl<'a> Chooser<'a> {
    fn new(catalog: &'a Catalog, layout: &'a TargetLayout) -> Self {
        let found = model::model(&catalog.state);
        Self {
            catalog,
            layout,
            model_root: found.root,
            parameters: found.tensors.into_iter().collect(),
            used: vec![false; layout.rules.len()],
            misfits: 0,
            scalar_misfits: 0,
            fallback_ndims: BTreeSet::new(),
            numbered: 0,
            names: Vec::new(),
        }
    }

    fn shards(&mut self, fqn: &Fqn, path: &Path, entry: &TensorEntry) -> Result<dcp::Shards> {
        let mut names = model::rule_names(path, &self.model_root);
        let state_of = model::optimizer_parameter(path);
        let parameter = state_of.as_ref().and_then(|name| self.parameters.get(name).copied());
        let follows = parameter.filter(|id| self.catalog.tensor(*id).shape == entry.shape);
        // State of another shape than its parameter (a step, a factored moment) does not follow it, nor does state
        // whose parameter is known by a number, which is no name.
        let stray = state_of.is_some() && follows.is_none();
        if stray && !self.parameters.is_empty() {
            names.truncate(1);
        }
        let by_number = state_of.as_ref().is_some_and(|name| name.as_str().parse::<u64>().is_ok());
        self.numbered += usize::from(by_number && !entry.shape.is_empty());
        let inherited = follows.and_then(|id| self.catalog.tensor(id).sharding.as_ref());
        let source = (entry.sharding.as_ref())
            .or(inherited)
            .map(|sharding| SourceLayout { mesh: self.catalog.mesh(sharding), placements: &sharding.placements });
        let borrowed: Vec<&str> = names.iter().map(String::as_str).collect();
        for (used, rule) in self.used.iter_mut().zip(&self.layout.rules) {
            *used |= borrowed.iter().any(|name| rule.pattern.covers(name));
        }
        let chosen = match self.layout.choose(&borrowed, &entry.shape, source) {
            // `**.w1.weight` is meant for the parameter, not for the step that has its name in its own.
            Err(LayoutError::RuleMisfit { .. }) if stray => self.layout.choose(&[], &entry.shape, source)?,
            chosen => chosen?,
        };
        self.misfits += usize::from(chosen.misfit);
        self.scalar_misfits += usize::from(chosen.misfit && entry.shape.is_empty());
        if chosen.rule.is_none() {
            self.fallback_ndims.insert(entry.shape.len());
        }
        self.names.push(fqn.to_string());
        Ok(self.layout.shards(&entry.shape, &chosen.placements)?)
    }

    /// A placement that fits no tensor at all would leave its mesh dim unused.
    fn check_fallback(&self) -> Result<()> {
        let Fallback::Placements(specs) = &self.layout.fallback else { return Ok(()) };
        let fits_any = |spec: &&PlacementSpec| self.fallback_ndims.iter().any(|ndim| spec.resolve(*ndim).is_some());
        match specs.iter().find(|spec| !self.fallback_ndims.is_empty() && !fits_any(spec)) {
            None => Ok(()),
            Some(spec) => Err(Error::usage(
                format!("--placements: {spec} fits none of the tensors"),
                "tensors of n dims have the dims 0 to n-1; `dtshard inspect` shows their shapes",
            )),
        }
    }

    /// What to tell, or the error for a rule that nothing matched.
    fn finish(self) -> Result<Vec<String>> {
        if let Some(unused) = self.used.iter().position(|used| !used) {
            let pattern = self.layout.rules[unused].pattern.as_str();
            let nearest = super::nearest(pattern, &self.names);
            return Err(Error::usage(
                format!("--placements {pattern}=...: no tensor has a name like that"),
                format!("the nearest names are {}", nearest.join(", ")),
            ));
        }
        self.check_fallback()?;
        let mut notes = Vec::new();
        if self.misfits > 0 {
            let number = count(self.misfits, "tensor");
            let scalars = match self.scalar_misfits {
                0 => String::new(),
                scalars => format!(" ({scalars} of them 0-d)"),
            };
            notes.push(format!("{number}{scalars} kept whole on a mesh dim where the placement does not fit"));
        }
        if self.numbered > 0 && !self.layout.rules.is_empty() {
            let number = count(self.numbered, "tensor");
            notes.push(format!(
                "{number} of optimizer state have numbers for names: rules for parameters did not reach them"
            ));
        }
        Ok(notes)
    }
}
