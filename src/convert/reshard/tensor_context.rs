//! What SRC tells of a tensor that is to be laid out: its names, whose state it is, and whether ranks shared it there.
//!
//! Optimizer state and gradients follow their parameter: a rule matches the name of that, and state of its shape gets its
//! placements. State of another shape (a step, a factored moment) is a stray, which what is said of parameters does not
//! mean.

use std::collections::HashSet;

use crate::catalog::owner::{Owner, Owners};
use crate::catalog::wrappers::{clean_name, with_clean};
use crate::catalog::{Catalog, Class, Fqn, Path, Sharding, TensorEntry, TensorId, path};
use crate::layout::parallelize::{Parameter, ParameterKind, ShapeOrigin};
use crate::layout::shards::MeshPlacement;
use crate::select::Wrappers;

/// The tensors of a checkpoint.
pub struct TensorContexts<'a> {
    pub catalog: &'a Catalog,
    pub wrappers: Wrappers,
    pub told_by: ParameterEvidence,
    owners: Owners<'a>,
    /// Tensors that an optimizer has state of: parameters, whether they are DTensors or not.
    trained: HashSet<Fqn>,
}

/// How tensors that ranks share are told from those that every rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterEvidence {
    /// The source's rank files tell.
    Class,
    /// A DCP directory does not; parameters have state of an optimizer.
    Optimizer,
    Nothing,
}

/// One of them.
pub struct TensorContext<'a> {
    pub path: &'a Path,
    pub entry: &'a TensorEntry,
    /// By which a rule may know it.
    pub names: Vec<String>,
    /// Its name within the model, where it is of that.
    pub in_model: Option<Fqn>,
    /// The parameter it is state or gradient of.
    pub owner: Option<Owner>,
    /// That parameter, where it has this shape.
    pub follows: Option<&'a TensorEntry>,
}

impl<'a> TensorContexts<'a> {
    /// `class` is the one that tensors are to get, where that was asked for.
    pub fn new(catalog: &'a Catalog, wrappers: Wrappers, class: Option<Class>) -> Self {
        let mut owners = Owners::new(catalog);
        let mut trained = HashSet::new();
        path::tensors(&catalog.state, &Path::default(), &mut |path, id| {
            if let Some(parameter) = owners.owner_of(path).and_then(|owner| owner.id)
                && catalog.tensor(parameter).shape == catalog.tensor(id).shape
            {
                trained.insert(catalog.tensor(parameter).fqn.clone());
            }
        });
        let told_by = if catalog.tensors.iter().any(TensorEntry::is_shared) {
            ParameterEvidence::Class
        } else if class == Some(Class::ShardedTensor) && !trained.is_empty() {
            // FSDP1 takes buffers from plain tensors only.
            ParameterEvidence::Optimizer
        } else {
            ParameterEvidence::Nothing
        };
        Self { catalog, wrappers, told_by, owners, trained }
    }

    pub fn subject<'t>(&mut self, path: &'t Path, entry: &'t TensorEntry) -> TensorContext<'t>
    where
        'a: 't,
    {
        let catalog: &'a Catalog = self.catalog;
        let owner = self.owners.owner_of(path);
        let parameter = owner.as_ref().and_then(|owner| owner.id).map(|id| catalog.tensor(id));
        let follows = parameter.filter(|parameter| parameter.shape == entry.shape);
        let is_stray = owner.is_some() && follows.is_none();
        let mut names = self.owners.rule_names(path, owner.as_ref(), is_stray);
        if self.wrappers == Wrappers::Match {
            with_clean(&mut names);
        }
        let inner = path.0.strip_prefix(self.owners.model_root.0.as_slice()).unwrap_or(&path.0);
        let in_model = Some(Path(inner.to_vec()).fqn()).filter(|name| self.owners.parameters.contains_key(name));
        TensorContext { path, entry, names, in_model, owner, follows }
    }

    /// How it, or the parameter that it follows, lies.
    pub fn source<'t>(&self, subject: &TensorContext<'t>) -> Option<MeshPlacement<'t>>
    where
        'a: 't,
    {
        let catalog: &'a Catalog = self.catalog;
        subject.sharding().map(|sharding| catalog.on_mesh(sharding))
    }

    /// Whether it is trained, or state of what is.
    pub fn is_trained(&self, subject: &TensorContext<'_>) -> bool {
        self.trained.contains(&subject.entry.fqn) || subject.follows.is_some()
    }

    /// Whether it is plain beside tensors that ranks share.
    pub fn is_plain(&self, is_shared: bool) -> bool {
        self.told_by != ParameterEvidence::Nothing && !is_shared
    }

    /// A tensor of the model, as a plan knows it.
    pub fn parameter(&self, fqn: &Fqn, id: TensorId) -> Parameter<'a> {
        let entry = self.catalog.tensor(id);
        let name = match self.wrappers {
            Wrappers::Keep => fqn.to_string(),
            Wrappers::Cut | Wrappers::Match => clean_name(fqn.as_str()),
        };
        Parameter { name, shape: &entry.shape, shape_origin: ShapeOrigin::Global, kind: self.kind(entry) }
    }

    /// What a tensor of the model is where no style names it.
    fn kind(&self, entry: &TensorEntry) -> ParameterKind {
        let is_float = entry.dtype.is_float() && !self.is_plain(entry.is_shared());
        // No job cuts a buffer; whole numbers that it does cut are quantised weights.
        let is_cut = |sharding: &Sharding| sharding.shared.placements.iter().any(|own| own.sharded_dim().is_some());
        let is_cut = entry.sharding.as_deref().is_some_and(is_cut);
        if self.trained.contains(&entry.fqn) || is_cut || is_float {
            ParameterKind::Parameter
        } else {
            ParameterKind::Buffer
        }
    }
}

impl<'a> TensorContext<'a> {
    /// Its own, or that of the parameter that it follows.
    pub fn sharding(&self) -> Option<&'a Sharding> {
        let inherited = || self.follows.and_then(|parameter| parameter.sharding.as_deref());
        self.entry.sharding.as_deref().or_else(inherited)
    }

    pub fn is_shared(&self) -> bool {
        self.entry.is_shared() || self.sharding().is_some()
    }

    /// Whether what is said of its parameter is not said of it.
    pub fn is_stray(&self) -> bool {
        self.owner.is_some() && self.follows.is_none()
    }

    /// Whether its parameter is there, in another shape.
    pub fn is_misshapen(&self) -> bool {
        self.is_stray() && self.owner.as_ref().is_some_and(|owner| owner.id.is_some())
    }

    /// Whether its parameter is known by a number only, of which nobody knows what it stands for.
    pub fn is_nameless(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.name.is_none())
    }
}
