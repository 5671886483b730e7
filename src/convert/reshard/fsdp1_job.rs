//! `reshard` for a job with FSDP1 that saves its model with `SHARDED_STATE_DICT` and its optimizer with
//! `optimizer.state_dict()`, as verl does. The model is in DTensors, and the optimizer has state of flat parameters.
//!
//! If DST is for a job with FSDP1 on another number of ranks, the optimizer gets state of the flat parameters of that
//! job. If each shard group of that job has one rank, the job uses `NO_SHARD`, and the model gets plain tensors. If an
//! option asks for a layout of the model that FSDP1 does not have, DST is for a job without FSDP1: the optimizer gets
//! the state of each parameter, with parameter ids as keys, as in the files of SRC.

use std::collections::HashSet;

use super::super::flatten::{FlattenRequest, GroupSize, unknown_padding};
use super::super::source::ConversionSource;
use super::super::target_parts::{PartTarget, example_of, fsdp_version, parts};
use super::flat_selection::select_parameters;
use crate::catalog::flat::FlatLayout;
use crate::catalog::modules::{metadata, metadata_mut};
use crate::catalog::optimizer::STATE;
use crate::catalog::parameter_names::{is_named_optimizer, numbered_optimizers};
use crate::catalog::wrappers::{FSDP_WRAPPED, clean_name};
use crate::catalog::{Class, Fqn, Path, TensorId, Value, optimizer, path, state_dict};
use crate::convert::options::ReshardOptions;
use crate::error::{Error, Result};
use crate::format::{Checkpoint, Format};
use crate::layout::DeviceMesh;

/// The job with FSDP1 that will load DST.
pub struct Fsdp1Job {
    world_size: u32,
    shard_group_size: u32,
}

impl Fsdp1Job {
    /// Returns the job with FSDP1 that will load DST. Returns `None` if DST is not for such a job. Examples: the
    /// checkpoint of `--like` (without `--like`: SRC) is not from a job with FSDP1; or an option asks for a layout that
    /// FSDP1 does not have.
    ///
    /// # Errors
    /// `Unsupported` if the optimizer state in SRC has parameter ids as keys, and the flat layout of its model is
    /// unknown.
    pub fn new(
        args: &ReshardOptions,
        source: &ConversionSource,
        mesh: &DeviceMesh,
        to: Format,
    ) -> Result<Option<Self>> {
        let names = [&args.plan, &args.tp, &args.fsdp, &args.replicate, &args.ddp];
        let has_rules = !args.placements.is_empty() || args.layout.is_some() || names.iter().any(|name| name.is_some());
        let has_form = args.split.is_some() || args.tensor_class.is_some();
        let example = example_of(source);
        let shards = match *mesh.shape() {
            [ranks] => ranks,
            [_, ranks] if is_hybrid_shard(mesh, example) => ranks,
            _ => return Ok(None),
        };
        let shard_group_size = u32::try_from(shards).expect("ranks are 32-bit numbers");
        let is_kept = to == Format::TorchRanks && !has_rules && !has_form && mesh.ranks_are_row_major();
        if !is_kept || !is_of_fsdp1(example) {
            return Ok(None);
        }
        // With one rank in each shard group, state of parameters is not sharded.
        if shard_group_size > 1 && example.catalog.flat.is_none() && has_numbered_state(source) {
            return Err(Error::unsupported(
                format!(
                    "{}: the job uses FSDP1, and the flat layout of the model is unknown, so the optimizer state cannot be \
                     sharded as FSDP1 shards it",
                    source.checkpoint.root.display()
                ),
                "give options::flat_layout FILE (docs/how-to/fsdp1.md has the Python snippet that writes FILE from a live \
                 model), leave the optimizer out with options::series model, or use options::tensor_class dtensor for a job \
                 with FSDP2",
            ));
        }
        let is_kept = shard_group_size == 1 && has_numbered_state(source) || keeps_optimizer(source, to);
        Ok(is_kept.then(|| Self { world_size: mesh.job_size(), shard_group_size }))
    }

    /// Returns whether the job uses `NO_SHARD`, because each shard group has one rank.
    pub fn is_no_shard(&self) -> bool {
        self.shard_group_size == 1
    }

    /// Returns the flat layout of the optimizer in DST. Returns `None` if the checkpoint of `--like` (without `--like`:
    /// SRC) has no optimizer state of flat parameters.
    ///
    /// # Errors
    /// `Unsupported` if the layout depends on padding that the files do not show; the errors of
    /// [`FlattenRequest::layout`].
    pub fn flat_layout(&self, source: &ConversionSource) -> Result<Option<FlatLayout>> {
        let Some(own) = &example_of(source).catalog.flat else { return Ok(None) };
        let mut request = FlattenRequest::default();
        request.world_size = Some(self.world_size);
        request.group = GroupSize::Of(self.shard_group_size);
        let (mut layout, _) = request.layout(source)?;
        let is_of_source = source.like.as_ref().is_none_or(|like| like.catalog.flat.is_none());
        let lacks_parameters =
            is_of_source && select_parameters(&mut layout, &source.checkpoint.catalog, &source.selection.catalog);
        let sizes = |layout: &FlatLayout| (layout.world_size, layout.shard_group_size);
        let is_changed = lacks_parameters || sizes(&layout) != sizes(own);
        if layout.has_assumed_alignment && layout.shard_group_size > 1 && is_changed {
            return Err(unknown_padding(source));
        }
        Ok(Some(layout))
    }
}

/// Returns whether the selection has optimizer state whose keys are parameter ids (numbers).
fn has_numbered_state(source: &ConversionSource) -> bool {
    let state = &source.selection.catalog.state;
    let has_state = |path: &Path| {
        let states = path.find(state).and_then(|optimizer| optimizer.as_dict()?.get(STATE));
        states.is_some_and(Value::contains_tensor)
    };
    numbered_optimizers(state).iter().any(has_state)
}

/// Returns the paths in the state dict of all parameters that the flat layout lists. A tied parameter has a path for
/// each of its names.
pub fn parameter_paths(layout: &FlatLayout, state: &Value) -> HashSet<String> {
    let root = state_dict::model_root(state);
    let shared = layout.units.iter().flat_map(|unit| &unit.shared).map(|shared| &shared.fqn);
    let names: HashSet<&Fqn> = layout.params().map(|(_, param)| &param.fqn).chain(shared).collect();
    let model = state_dict::model(state).tensors.into_iter().map(|(name, _)| name);
    let own = model.filter(|name| names.contains(&Fqn::from(clean_name(name.as_str()))));
    own.map(|name| if root.0.is_empty() { name.to_string() } else { format!("{root}.{name}") }).collect()
}

/// Returns a note if DST loses information about padding: SRC shows the padding between the parameters of flat
/// parameters, but DST does not, because it is for a job with `NO_SHARD`. `layout` is the flat layout of the optimizer
/// in DST.
pub fn lost_padding(layout: &FlatLayout, source: &ConversionSource) -> Option<String> {
    let own = source.checkpoint.catalog.flat.as_ref().filter(|own| own.shard_group_size > 1)?;
    (layout.shard_group_size == 1 && layout.depends_on_alignment()).then(|| {
        let origin = if own.has_assumed_alignment {
            "docs/how-to/fsdp1.md has the Python snippet that writes FILE"
        } else {
            "write it with `dtshard inspect SRC --layout > FILE`"
        };
        format!(
            "DST does not show the padding of flat parameters: to reshard DST to shard groups of several ranks, you need \
             options::flat_layout FILE; {origin}"
        )
    })
}

/// Returns whether FSDP1 uses `mesh` for `HYBRID_SHARD`: the first of two dims replicates, and the last dim shards.
/// This is so if the last dim has the name that the last dim has in the mesh of `example`. Under `NO_SHARD`, `example`
/// has no mesh; the last dim must then be named `fsdp`.
pub fn is_hybrid_shard(mesh: &DeviceMesh, example: &Checkpoint) -> bool {
    let last_name = |mesh: &DeviceMesh| mesh.names().and_then(|names| names.last().cloned());
    let own = match example.catalog.meshes.first() {
        Some(own) => last_name(own),
        None => Some(String::from("fsdp")).filter(|_| !has_sharded_tensors(example)),
    };
    mesh.ndim() == 2 && own.is_some() && last_name(mesh) == own
}

/// Returns whether a job with FSDP1 saved the checkpoint as rank files with a model in DTensors, in ShardedTensors or
/// (under `NO_SHARD`) in plain tensors.
///
/// A model in DTensors needs `fsdp_config.json` as evidence. PyTorch's `_metadata` alone is not enough, because it
/// still lists FSDP1's wrappers after a conversion of flat parameters to DTensors.
pub fn is_of_fsdp1(checkpoint: &Checkpoint) -> bool {
    let Checkpoint { catalog, format, .. } = checkpoint;
    let is_dtensor = |(_, id): &(_, TensorId)| catalog.tensor(*id).class == Class::DTensor;
    let has_dtensors = || state_dict::model(&catalog.state).tensors.iter().any(is_dtensor);
    let has_model =
        || lists_wrapped_modules(&catalog.state) && (!has_dtensors() || fsdp_version(checkpoint) == Some(1));
    *format == Format::TorchRanks && (catalog.flat.is_some() || has_model())
}

/// Returns whether PyTorch's `_metadata` of the model lists a module that FSDP1 wraps.
fn lists_wrapped_modules(state: &Value) -> bool {
    let model = state_dict::model_root(state);
    let paths = model.find(state).and_then(|model| metadata(model.as_dict()?));
    let mut paths = paths.into_iter().flat_map(|paths| &paths.entries).filter_map(|(path, _)| path.as_str());
    paths.any(|path| path.ends_with(FSDP_WRAPPED))
}

/// Removes FSDP1's wrapper modules from the module paths in `_metadata` of the model, because a job without FSDP1 has
/// no such modules.
pub fn remove_wrapped_modules(state: &mut Value) {
    let model = state_dict::model_root(state);
    let Some(paths) = model.find_mut(state).and_then(metadata_mut) else { return };
    let without_wrapper = |path: &str| {
        let kept: Vec<&str> = path.split('.').filter(|component| *component != FSDP_WRAPPED).collect();
        kept.join(".")
    };
    paths.entries.retain(|(path, _)| !path.as_str().is_some_and(|path| path.ends_with(FSDP_WRAPPED)));
    for (path, _) in &mut paths.entries {
        if let Some(clean) = path.as_str().map(without_wrapper) {
            *path = Value::Str(clean.as_str().into());
        }
    }
}

/// Returns whether SRC has optimizer state of flat parameters, but a model in DTensors or (under `NO_SHARD`) in plain
/// tensors.
pub fn is_beside_dtensors(source: &ConversionSource) -> bool {
    let checkpoint = &source.checkpoint;
    checkpoint.catalog.flat.is_some() && is_of_fsdp1(checkpoint) && !has_sharded_tensors(checkpoint)
}

/// Returns whether the checkpoint has a model in ShardedTensors.
pub fn has_sharded_tensors(Checkpoint { catalog, .. }: &Checkpoint) -> bool {
    let has_model = !is_named_optimizer(&catalog.state);
    let is_sharded = |(_, id): &(_, TensorId)| catalog.tensor(*id).class == Class::ShardedTensor;
    has_model && state_dict::model(&catalog.state).tensors.iter().any(is_sharded)
}

/// Returns whether the optimizer state has its own series of rank files in DST. Also true if no optimizer state is
/// selected.
fn keeps_optimizer(source: &ConversionSource, to: Format) -> bool {
    let mut state = HashSet::new();
    path::tensors(&source.checkpoint.catalog.state, &Path::default(), &mut |path, id| {
        state.extend(optimizer::optimizer_state(path).map(|_| id));
    });
    let has_state = source.selection.catalog.state.tensor_ids().iter().any(|id| state.contains(id));
    !has_state || parts(source, to).iter().any(is_optimizer)
}

/// Returns whether only an optimizer with state of flat parameters is read, and not its model.
pub fn lacks_its_model(source: &ConversionSource) -> bool {
    let catalog = &source.checkpoint.catalog;
    catalog.flat.is_some() && is_named_optimizer(&catalog.state)
}

/// Returns whether a part of the target is an optimizer without its model.
pub fn is_optimizer(part: &PartTarget) -> bool {
    is_named_optimizer(&part.state)
}
