//! The placements of each tensor on the target mesh, and the Python class it has in rank files.
//!
//! Optimizer state and gradients follow their parameter: a rule matches the name of that, and state of its shape gets its
//! placements. What the source stores plain beside DTensors (buffers, steps) is replicated unless a rule says otherwise.

use std::collections::{BTreeSet, HashSet};

use crate::catalog::owner::{Owner, Owners};
use crate::catalog::{Catalog, Class, Fqn, Path, Sharding, TensorEntry, model, path};
use crate::cli::TensorClass;
use crate::error::{Error, Result};
use crate::format::local::LocalLayout;
use crate::format::torch::RankLayout;
use crate::format::{Format, dcp};
use crate::layout::parallelize::{Kind, Laid, Order};
use crate::layout::rules::{Fallback, Layout, Shared, SourceLayout};
use crate::layout::{LayoutError, MeshDim, Placement, PlacementSpec};
use crate::quantity::count;
use crate::select::{Wrappers, with_clean};

use super::like::{Like, is_whole_anyway};
use super::plan::Planned;
use super::sharded::rows;

/// The Python class of tensors that ranks share; `None` for that of each in the source.
///
/// # Errors
/// `Usage` where the target does not keep it.
pub fn tensor_class(given: Option<TensorClass>, to: Format) -> Result<Option<Class>> {
    match given {
        Some(_) if !matches!(to, Format::TorchRanks | Format::Local) => Err(Error::usage(
            format!("--tensor-class is for rank files, and DST is to be {to}"),
            "leave it out, or write rank files with --to torch-ranks",
        )),
        None | Some(TensorClass::Auto) => Ok(None),
        Some(TensorClass::DTensor) => Ok(Some(Class::DTensor)),
        Some(TensorClass::ShardedTensor) => Ok(Some(Class::ShardedTensor)),
        Some(TensorClass::Local) => Ok(Some(Class::Tensor)),
    }
}

/// Chooses the placements of each tensor, and remembers what to tell the user.
pub struct Chooser<'a> {
    catalog: &'a Catalog,
    layout: &'a Layout,
    wrappers: Wrappers,
    /// A checkpoint whose tensors say how those without a rule lie.
    like: Option<Like<'a>>,
    /// How the layout's plan has the parameters of this model.
    planned: Option<Planned>,
    /// The class of tensors that ranks share; `None` for that of each in the source.
    class: Option<Class>,
    /// The same for those that have none there.
    usual_class: Class,
    /// How tensors that ranks share are told from those that every rank has.
    told_by: ToldBy,
    /// For the state that follows its parameter.
    owners: Owners<'a>,
    /// Tensors that an optimizer has state of: parameters, whether they are DTensors or not.
    trained: HashSet<Fqn>,
    used: Vec<bool>,
    misfits: usize,
    /// Those of them that have no dims at all.
    scalar_misfits: usize,
    /// Tensors with dims that stay plain because the source has them plain beside DTensors.
    plain: usize,
    /// Numbers of dims of the tensors that got the fallback.
    fallback_ndims: BTreeSet<usize>,
    /// State of parameters that are known by number only.
    nameless: usize,
    /// Tensors of summands, of which only the value can be written.
    reduced: usize,
    /// Names seen, for saying what a pattern came near to.
    names: Vec<String>,
}

/// How tensors that ranks share are told from those that every rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToldBy {
    /// The source's rank files tell.
    Class,
    /// A DCP directory does not; parameters have state of an optimizer.
    Optimizer,
    Nothing,
}

/// How a tensor is to lie.
struct Choice {
    shared: Shared,
    /// The class it has in --like.
    class: Option<Class>,
    /// Whether the placements were asked for; else they come from SRC or --like.
    by: By,
}

/// Who says how a tensor is to lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    CommandLine,
    Example,
}

/// How a plan, or --like, has a tensor.
enum Alike {
    /// The fallback is to say it.
    Untold,
    Plain,
    Shared(Choice),
}

fn source_layout<'c>(catalog: &'c Catalog, sharding: &'c Sharding) -> SourceLayout<'c> {
    let Sharding { placements, splits, .. } = sharding;
    SourceLayout { mesh: catalog.mesh(sharding), placements, splits }
}

impl<'a> Chooser<'a> {
    pub fn new(catalog: &'a Catalog, layout: &'a Layout, wrappers: Wrappers, class: Option<Class>) -> Self {
        let has = |class| catalog.tensors.iter().any(|entry| entry.class == class);
        let (has_dtensors, has_sharded) = (has(Class::DTensor), has(Class::ShardedTensor));
        // Plain tensors that are parts: the source says, or was told, which are and which are not.
        let has_parts = catalog.tensors.iter().any(|entry| entry.class == Class::Tensor && entry.sharding.is_some());
        let usual_class = match (has_dtensors, has_sharded, has_parts) {
            (false, true, _) => Class::ShardedTensor,
            (false, false, true) => Class::Tensor,
            _ => Class::DTensor,
        };
        let mut chooser = Self {
            catalog,
            layout,
            wrappers,
            like: None,
            planned: None,
            class,
            usual_class,
            told_by: if has_dtensors || has_sharded || has_parts { ToldBy::Class } else { ToldBy::Nothing },
            owners: Owners::new(catalog),
            trained: HashSet::new(),
            used: vec![false; layout.rules.len()],
            misfits: 0,
            scalar_misfits: 0,
            plain: 0,
            fallback_ndims: BTreeSet::new(),
            nameless: 0,
            reduced: 0,
            names: Vec::new(),
        };
        let mut trained = HashSet::new();
        path::tensors(&catalog.state, &Path::default(), &mut |path, id| {
            if let Some(parameter) = chooser.owners.of(path).and_then(|owner| owner.id)
                && catalog.tensor(parameter).shape == catalog.tensor(id).shape
            {
                trained.insert(catalog.tensor(parameter).fqn.clone());
            }
        });
        // FSDP1 takes buffers from plain tensors only.
        if class == Some(Class::ShardedTensor) && chooser.told_by == ToldBy::Nothing && !trained.is_empty() {
            chooser.told_by = ToldBy::Optimizer;
        }
        chooser.trained = trained;
        chooser
    }

    pub fn like(self, like: Option<Like<'a>>) -> Self {
        Self { like, ..self }
    }

    /// Let the plan of the layout, where it has one, meet the parameters of the model.
    ///
    /// # Errors
    /// `Usage` where it does not fit.
    pub fn plan(mut self, order: Order) -> Result<Self> {
        if let Some(plan) = &self.layout.plan {
            let tensors = model::model(&self.catalog.state).tensors.into_iter();
            let model = tensors.map(|(name, id)| (name, self.catalog.tensor(id)));
            let kind = |entry: &TensorEntry| self.kind(entry);
            self.planned = Some(Planned::new(plan, &self.layout.mesh, model.collect(), &kind, self.wrappers, order)?);
        }
        Ok(self)
    }

    /// What it is where no style names it.
    fn kind(&self, entry: &TensorEntry) -> Kind {
        let is_shared = entry.class != Class::Tensor || entry.sharding.is_some();
        let is_plain_there = self.told_by != ToldBy::Nothing && !is_shared;
        // No job cuts a buffer; whole numbers that it does cut are quantised weights.
        let is_cut = |sharding: &Sharding| sharding.placements.iter().any(|own| own.sharded_dim().is_some());
        let is_parameter = self.trained.contains(&entry.fqn)
            || entry.sharding.as_ref().is_some_and(is_cut)
            || entry.dtype.is_float() && !is_plain_there;
        if is_parameter { Kind::Parameter } else { Kind::Buffer }
    }

    /// What there is to tell of the plan to who wants to know more.
    pub fn details(&self) -> Vec<String> {
        self.planned.as_ref().map(Planned::details).unwrap_or_default()
    }

    /// The distinct tiles of a tensor, for a format that stores those.
    pub fn shards(&mut self, path: &Path, entry: &TensorEntry) -> Result<dcp::Shards> {
        let replicated = || Shared::from(vec![Placement::Replicate; self.layout.mesh.ndim()]);
        let shared = match self.choose(path, entry)? {
            Some(Choice { shared, by, .. }) => self.without_summands(path, shared, by)?,
            None => replicated(),
        };
        Ok(self.layout.shards(&entry.shape, &shared).map_err(LayoutError::of(&entry.fqn))?)
    }

    /// A DCP directory has no place for summands, and a plain tensor does not say that it is one: their value goes there.
    fn without_summands(&mut self, path: &Path, mut shared: Shared, by: By) -> Result<Shared> {
        let is_partial = |placement: &&mut Placement| matches!(placement, Placement::Partial(_));
        let mut partial = shared.placements.iter_mut().filter(is_partial).peekable();
        let Some(first) = partial.peek() else { return Ok(shared) };
        if by == By::CommandLine {
            return Err(Error::unsupported(
                format!("{path}: {first} in a DCP directory, which holds values, not summands"),
                "write rank files (--to torch-ranks), or give it S or R placements, for which it is reduced",
            ));
        }
        partial.for_each(|placement| *placement = Placement::Replicate);
        self.reduced += 1;
        Ok(shared)
    }

    /// How rank files of torch.save have it.
    pub fn rank_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<RankLayout> {
        let mesh = &self.layout.mesh;
        match self.with_class(path, entry)? {
            None => Ok(RankLayout::Plain),
            Some((Class::ShardedTensor, shared, _)) => RankLayout::of_fsdp1(&path.fqn(), entry, mesh, &shared),
            Some((Class::DTensor, shared, _)) => RankLayout::of_dtensor(&path.fqn(), entry, mesh, shared),
            // Nothing in the file would say that it is a summand.
            Some((Class::Tensor, shared, By::Example)) => {
                Ok(RankLayout::Local(self.without_summands(path, shared, By::Example)?))
            }
            Some((Class::Tensor, shared, By::CommandLine)) => Ok(RankLayout::Local(shared)),
        }
    }

    /// The class of a tensor that ranks share, and how; `None` for a plain tensor on every rank.
    pub fn local_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<LocalLayout> {
        Ok(self.with_class(path, entry)?.map(|(class, shared, _)| (class, shared)))
    }

    fn with_class(&mut self, path: &Path, entry: &TensorEntry) -> Result<Option<(Class, Shared, By)>> {
        let own = (entry.class != Class::Tensor || entry.sharding.is_some()).then_some(entry.class);
        let Some(Choice { shared, class: like, by }) = self.choose(path, entry)? else { return Ok(None) };
        Ok(Some((self.class.or(like).or(own).unwrap_or(self.usual_class), shared, by)))
    }

    /// `None` for a plain tensor on every rank.
    fn choose(&mut self, path: &Path, entry: &TensorEntry) -> Result<Option<Choice>> {
        let owner = self.owners.of(path);
        let parameter = owner.as_ref().and_then(|owner| owner.id);
        let follows = parameter.filter(|id| self.catalog.tensor(*id).shape == entry.shape);
        // State of another shape than its parameter (a step, a factored moment) does not follow it.
        let stray = owner.is_some() && follows.is_none();
        let mut names = self.owners.rule_names(path, owner.as_ref(), stray);
        if let Some(Owner { name: None, .. }) = &owner {
            self.nameless += usize::from(!entry.shape.is_empty());
        }
        if self.wrappers == Wrappers::Match {
            with_clean(&mut names);
        }
        let inherited = follows.and_then(|id| self.catalog.tensor(id).sharding.as_ref());
        let sharding = entry.sharding.as_ref().or(inherited);
        let source = sharding.map(|sharding| source_layout(self.catalog, sharding));
        let borrowed: Vec<&str> = names.iter().map(String::as_str).collect();
        for (used, rule) in self.used.iter_mut().zip(&self.layout.rules) {
            *used |= borrowed.iter().any(|name| rule.pattern.covers(name));
        }
        let chosen = match self.layout.choose(&borrowed, &entry.shape, source) {
            // `**.w1.weight` is meant for the parameter, not for the step that has its name in its own.
            Err(LayoutError::RuleMisfit { .. }) if stray => self.layout.choose(&[], &entry.shape, source)?,
            chosen => chosen?,
        };
        self.names.push(path.to_string());
        if chosen.rule.is_none() {
            match self.as_planned(path, entry, owner.as_ref()) {
                Alike::Untold => {}
                Alike::Plain => return Ok(None),
                Alike::Shared(shared) => return Ok(Some(shared)),
            }
            match self.as_like(path, entry, owner.as_ref())? {
                Alike::Untold => {}
                Alike::Plain => return Ok(None),
                Alike::Shared(shared) => return Ok(Some(shared)),
            }
        }
        if chosen.rule.is_none() {
            let shared = entry.class != Class::Tensor || sharding.is_some();
            let as_it_is = matches!(self.layout.fallback, Fallback::Source);
            let is_parameter = self.trained.contains(&entry.fqn) || follows.is_some();
            if self.told_by != ToldBy::Nothing && !shared && (as_it_is || !is_parameter) {
                let of_model = self.owners.parameters.contains_key(&self.in_model(path));
                self.plain += usize::from(!entry.shape.is_empty() && of_model && !as_it_is);
                return Ok(None);
            }
            self.fallback_ndims.insert(entry.shape.len());
            self.misfits += usize::from(chosen.misfit);
            self.scalar_misfits += usize::from(chosen.misfit && entry.shape.is_empty());
            if entry.shape.is_empty() && sharding.is_none() {
                return Ok(None);
            }
        }
        let Some(mut shared) = chosen.shared else { return Ok(None) };
        if shared.slice.is_none() {
            shared.slice = sharding.and_then(|sharding| self.slice(self.catalog, sharding, &shared.placements));
        }
        let asked = chosen.rule.is_some() || matches!(self.layout.fallback, Fallback::Placements(_));
        Ok(Some(Choice { shared, class: None, by: if asked { By::CommandLine } else { By::Example } }))
    }

    /// How the plan has it: a parameter, or what has the shape of the one that it is of.
    fn as_planned(&self, path: &Path, entry: &TensorEntry, owner: Option<&Owner>) -> Alike {
        let Some(planned) = &self.planned else { return Alike::Untold };
        let name = match owner {
            None => Some(self.in_model(path)),
            Some(Owner { id: Some(id), .. }) if self.catalog.tensor(*id).shape != entry.shape => None,
            Some(owner) => owner.name.clone(),
        };
        match name.and_then(|name| planned.laid(&name)) {
            Some(Laid { shared: Some(shared), .. }) => {
                let shared = self.layout.split_as_said(shared.clone());
                Alike::Shared(Choice { shared, class: None, by: By::CommandLine })
            }
            Some(Laid { shared: None, .. }) => Alike::Plain,
            // What is no part of the model.
            None if self.like.is_some() || !self.layout.fallback.is_replicate() => Alike::Untold,
            None => Alike::Plain,
        }
    }

    /// How --like has it.
    fn as_like(&mut self, path: &Path, entry: &TensorEntry, owner: Option<&Owner>) -> Result<Alike> {
        let in_model = Some(self.in_model(path)).filter(|name| self.owners.parameters.contains_key(name));
        let Some(like) = &mut self.like else { return Ok(Alike::Untold) };
        let parameter = owner.and_then(|owner| owner.name.as_ref());
        let Some(found) = like.find(path, in_model.as_ref(), parameter, entry)? else {
            // State of another shape than its parameter has nothing to follow.
            let parameter = owner.and_then(|owner| owner.id).map(|id| self.catalog.tensor(id));
            if parameter.is_some_and(|known| known.shape != entry.shape) || is_whole_anyway(path, entry) {
                return Ok(Alike::Plain);
            }
            if matches!(self.layout.fallback, Fallback::Source) {
                like.miss(path, in_model.as_ref());
                return Ok(Alike::Plain);
            }
            return Ok(Alike::Untold);
        };
        let class = Some(found.class);
        if found.class == Class::ShardedTensor {
            return Ok(Alike::Shared(Choice { shared: rows(&self.layout.mesh).into(), class, by: By::Example }));
        }
        let (catalog, Some(sharding)) = (like.catalog, &found.sharding) else { return Ok(Alike::Plain) };
        let shared = self.layout.as_in(source_layout(catalog, sharding));
        let slice = self.slice(catalog, sharding, &shared.placements);
        Ok(Alike::Shared(Choice { shared: Shared { slice, ..shared }, class, by: By::Example }))
    }

    /// A tensor on a slice of its mesh (norms under FSDP over TP) stays on the dims of the same names, where it is
    /// replicated on the others.
    fn slice(&self, of: &Catalog, sharding: &Sharding, placements: &[Placement]) -> Option<Vec<MeshDim>> {
        let names = of.mesh(sharding).names()?;
        let dims = sharding.slice.as_ref()?.iter().map(|dim| self.layout.mesh.dim_by_name(&names[dim.0]));
        let dims: Vec<MeshDim> = dims.collect::<Option<_>>()?;
        let outside = |dim: &usize| !dims.contains(&MeshDim(*dim));
        let replicated = (0..placements.len()).filter(outside).all(|dim| placements[dim] == Placement::Replicate);
        (replicated && dims.is_sorted() && dims.len() < placements.len()).then_some(dims)
    }

    /// The name a tensor of the model has within it; for others the whole name.
    fn in_model(&self, path: &Path) -> Fqn {
        let inner = path.0.strip_prefix(self.owners.model_root.0.as_slice()).unwrap_or(&path.0);
        Path(inner.to_vec()).fqn()
    }

    /// A placement that fits no tensor at all would leave its mesh dim unused.
    fn check_fallback(&self) -> Result<()> {
        let Fallback::Placements(specs) = &self.layout.fallback else { return Ok(()) };
        let fits_any = |spec: &&PlacementSpec| self.fallback_ndims.iter().any(|ndim| spec.resolve(*ndim).is_some());
        match specs.iter().find(|spec| !self.fallback_ndims.is_empty() && !fits_any(spec)) {
            None => Ok(()),
            Some(spec) => Err(Error::usage(
                format!("placements {spec} for every tensor: they fit none"),
                "tensors of n dims have the dims 0 to n-1; `dtshard inspect` shows their shapes",
            )),
        }
    }

    /// What to tell, or the error for a rule that nothing matched.
    pub fn finish(self) -> Result<Vec<String>> {
        if let Some(unused) = self.used.iter().position(|used| !used) {
            let rule = &self.layout.rules[unused];
            let nearest = crate::commands::nearest(rule.pattern.as_str(), &self.names);
            return Err(Error::usage(
                format!("{}: no tensor has a name like that", rule.said),
                format!("the nearest names are {}", nearest.join(", ")),
            ));
        }
        self.check_fallback()?;
        self.like.map_or(Ok(()), Like::finish)?;
        let mut notes = self.planned.as_ref().map(Planned::notes).unwrap_or_default();
        if self.misfits > 0 {
            let number = count(self.misfits, "tensor");
            let scalars = match self.scalar_misfits {
                0 => String::new(),
                scalars => format!(" ({scalars} of them 0-d)"),
            };
            notes.push(format!("{number}{scalars} kept whole on a mesh dim where the placement does not fit"));
        }
        if self.plain > 0 {
            let number = count(self.plain, "tensor");
            let why = match self.told_by {
                ToldBy::Class => "plain in the source (buffers)",
                ToldBy::Optimizer | ToldBy::Nothing => "taken for buffers",
            };
            notes.push(format!("{number} without state of an optimizer, {why}: whole on every rank"));
        }
        if self.reduced > 0 {
            let number = count(self.reduced, "tensor");
            notes.push(format!("{number} R where Partial in SRC or --like: values are written, not summands"));
        }
        if self.nameless > 0 && (!self.layout.rules.is_empty() || self.planned.is_some()) {
            let number = count(self.nameless, "tensor");
            notes.push(format!(
                "{number} of optimizer state have numbers for names: rules for parameters did not reach them"
            ));
        }
        Ok(notes)
    }
}
