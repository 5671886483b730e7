//! The facts about a tensor of SRC that decide its layout: its names, the parameter to which it belongs, and whether it
//! is sharded in SRC.
//!
//! Optimizer state and gradients follow their parameter: a rule that matches the parameter's name matches its state and
//! gradient. State of the parameter's shape gets the parameter's placements. State of another shape (a step, a factored
//! moment) is a stray: rules for parameters do not apply to it.

use std::collections::HashSet;

use crate::catalog::owner::{Owner, Owners};
use crate::catalog::wrappers::ModelWrappers;
use crate::catalog::{Catalog, Class, Fqn, Path, Sharding, TensorEntry, TensorId, path};
use crate::layout::distinct_tiles::MeshPlacement;
use crate::layout::parallelize::{Parameter, ParameterKind, ShapeOrigin};
use crate::select::Wrappers;

/// The tensors of a checkpoint, with the names and owning parameters that placement rules need.
pub struct TensorContexts<'a> {
    /// The catalog of the source.
    pub catalog: &'a Catalog,
    /// The treatment of wrapper prefixes in names.
    pub wrappers: Wrappers,
    /// The wrapper prefixes in the names of the model.
    model_wrappers: ModelWrappers,
    /// The information with which parameters are distinguished from buffers.
    pub evidence: ParameterEvidence,
    owners: Owners<'a>,
    /// Names of parameters that have optimizer state or a gradient of their own shape. Such a tensor is a parameter,
    /// not a buffer, even if it is not a DTensor.
    trained: HashSet<Fqn>,
    /// True if some tensor of the model is a ShardedTensor in the source. Optimizer state does not count, because under
    /// `NO_SHARD` only optimizer state is sharded.
    pub has_sharded_tensors: bool,
}

/// The information with which parameters, which are sharded, are distinguished from buffers, which are replicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterEvidence {
    /// The Python class of each tensor in the source's rank files shows whether it is a parameter.
    Class,
    /// A tensor with optimizer state is a parameter. The classes do not help, because no tensor is known to be sharded;
    /// a DCP directory, for example, records no classes.
    Optimizer,
    /// Nothing distinguishes parameters from buffers.
    Nothing,
}

/// The facts about one tensor of the source that decide its layout.
pub struct TensorContext<'a> {
    /// The path of the tensor in the state dict.
    pub path: &'a Path,
    /// The tensor's entry in the source's catalog.
    pub entry: &'a TensorEntry,
    /// The names of the tensor that a rule may match.
    pub names: Vec<String>,
    /// The tensor's name inside the model, if the tensor is part of the model.
    pub in_model: Option<Fqn>,
    /// The parameter to which the tensor belongs, if the tensor is optimizer state or a gradient.
    pub owner: Option<Owner>,
    /// The catalog entry of the owning parameter, if it has the same shape as this tensor.
    pub follows: Option<&'a TensorEntry>,
}

impl<'a> TensorContexts<'a> {
    /// Indexes the tensors of a catalog. `class` is the class that all sharded tensors get; `None` if the user did not
    /// choose a class.
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
        let evidence = if catalog.tensors.iter().any(TensorEntry::is_shared) {
            ParameterEvidence::Class
        } else if class == Some(Class::ShardedTensor) && !trained.is_empty() {
            // FSDP1 loads buffers from plain tensors only, so parameters must be distinguished from buffers.
            ParameterEvidence::Optimizer
        } else {
            ParameterEvidence::Nothing
        };
        let names = owners.parameters.keys().map(Fqn::as_str);
        let model_wrappers = ModelWrappers::new(&owners.model_root, names);
        let is_sharded_tensor = |id: &TensorId| catalog.tensor(*id).class == Class::ShardedTensor;
        let has_sharded_tensors = owners.parameters.values().any(is_sharded_tensor);
        Self { catalog, wrappers, model_wrappers, evidence, owners, trained, has_sharded_tensors }
    }

    /// Returns the facts about one tensor that decide its layout.
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
            self.model_wrappers.with_clean(&mut names);
        }
        let inner = path.0.strip_prefix(self.owners.model_root.0.as_slice()).unwrap_or(&path.0);
        let in_model = Some(Path(inner.to_vec()).fqn()).filter(|name| self.owners.parameters.contains_key(name));
        TensorContext { path, entry, names, in_model, owner, follows }
    }

    /// Returns the mesh and placements that a tensor has in the source. Optimizer state or a gradient without
    /// placements gets the placements of its parameter if the shapes are equal.
    pub fn source<'t>(&self, subject: &TensorContext<'t>) -> Option<MeshPlacement<'t>>
    where
        'a: 't,
    {
        let catalog: &'a Catalog = self.catalog;
        subject.sharding().map(|sharding| catalog.on_mesh(sharding))
    }

    /// Returns true if it is certain that the tensor is trained: it is a parameter that has optimizer state or a
    /// gradient of its shape, or it is optimizer state or a gradient that has the shape of its parameter.
    pub fn is_trained(&self, subject: &TensorContext<'_>) -> bool {
        self.trained.contains(&subject.entry.fqn) || subject.follows.is_some()
    }

    /// Returns true if the tensor is a plain tensor in a source in which other tensors can be sharded: `is_shared` is
    /// false, and the source has some [`ParameterEvidence`]. In a source without such evidence, all tensors are plain,
    /// so the class of a tensor says nothing, and the result is false.
    pub fn is_plain(&self, is_shared: bool) -> bool {
        self.evidence != ParameterEvidence::Nothing && !is_shared
    }

    /// Returns the parameter or buffer `fqn` of the model as an input for a parallelize plan.
    pub fn parameter(&self, fqn: &Fqn, id: TensorId) -> Parameter<'a> {
        let entry = self.catalog.tensor(id);
        let name = match self.wrappers {
            Wrappers::Keep => fqn.to_string(),
            Wrappers::Cut | Wrappers::Match => self.model_wrappers.clean(fqn.as_str()),
        };
        Parameter { name, shape: &entry.shape, shape_origin: ShapeOrigin::Global, kind: self.kind(entry) }
    }

    /// Returns whether a tensor of the model is a parameter or a buffer, for tensors that no style of the plan names.
    fn kind(&self, entry: &TensorEntry) -> ParameterKind {
        let is_float = entry.dtype.is_float() && !self.is_plain(entry.is_shared());
        // Buffers are never sharded, so a sharded integer tensor is a quantized weight.
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
    /// Returns the sharding of the tensor, or of the parameter that it follows.
    pub fn sharding(&self) -> Option<&'a Sharding> {
        let inherited = || self.follows.and_then(|parameter| parameter.sharding.as_deref());
        self.entry.sharding.as_deref().or_else(inherited)
    }

    /// Returns true if the tensor, or the parameter that it follows, is sharded.
    pub fn is_shared(&self) -> bool {
        self.entry.is_shared() || self.sharding().is_some()
    }

    /// Returns true if the tensor is a plain tensor that is not part of the model, its optimizer state or its gradients.
    pub fn is_outside_model(&self) -> bool {
        self.in_model.is_none() && self.owner.is_none() && !self.is_shared()
    }

    /// Returns true if the tensor is optimizer state or a gradient to which rules for its parameter do not apply: the
    /// parameter has another shape, or is not in the checkpoint.
    pub fn is_stray(&self) -> bool {
        self.owner.is_some() && self.follows.is_none()
    }

    /// Returns true if the tensor is optimizer state or a gradient, and its parameter in the checkpoint has another
    /// shape.
    pub fn is_misshapen(&self) -> bool {
        self.is_stray() && self.owner.as_ref().is_some_and(|owner| owner.id.is_some())
    }

    /// Returns true if the tensor is optimizer state whose parameter is known by its parameter id (a number) only, not
    /// by name.
    pub fn is_nameless(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.name.is_none())
    }
}
