//! `reshard` of an FSDP1 job that saves its model with `SHARDED_STATE_DICT` and its optimizer with
//! `optimizer.state_dict()`, as verl does. The model is in DTensors, and the optimizer has state of flat parameters.
//!
//! For a job on another number of ranks, the optimizer gets state of the flat parameters of that job. If an option asks
//! for another layout of the model, the job is not an FSDP1 job: the optimizer gets state of parameters, with numbers as
//! keys, as in the files of SRC.

use super::super::flatten::{FlattenRequest, GroupSize};
use super::super::source::ConversionSource;
use super::super::target_parts::{PartTarget, example_of};
use crate::catalog::flat::FlatLayout;
use crate::catalog::parameter_names::named_optimizers;
use crate::catalog::{Class, Path, TensorId, state_dict};
use crate::convert::options::ReshardOptions;
use crate::error::Result;
use crate::format::{Checkpoint, Format};
use crate::layout::DeviceMesh;

/// Returns the flat layout of the optimizer in the target. Returns `None` if the checkpoint of `--like`, otherwise SRC, has
/// no state of flat parameters beside a sharded model, or if the target has no such state.
///
/// # Errors
/// The errors of [`FlattenRequest::layout`].
pub fn target_layout(
    args: &ReshardOptions,
    source: &ConversionSource,
    mesh: &DeviceMesh,
    to: Format,
) -> Result<Option<FlatLayout>> {
    let names = [&args.plan, &args.tp, &args.fsdp, &args.replicate, &args.ddp];
    let has_rules = !args.placements.is_empty() || args.layout.is_some() || names.iter().any(|name| name.is_some());
    let has_form = args.split.is_some() || args.tensor_class.is_some();
    let example = example_of(source);
    // Under `NO_SHARD`, each of several ranks has the whole model, so the model is not sharded.
    let is_beside_sharded = |flat: &FlatLayout| flat.shard_group_size > 1 || flat.world_size == 1;
    let is_kept = to == Format::TorchRanks
        && example.format == Format::TorchRanks
        && example.catalog.flat.as_ref().is_some_and(is_beside_sharded);
    let last_name = |mesh: &DeviceMesh| mesh.names().and_then(|names| names.last().cloned());
    let group = match *mesh.shape() {
        [_] => GroupSize::All,
        // In a mesh of two dims, the last dim shards the model if it has the name of the last dim of the example's mesh.
        [_, shard] if example.catalog.meshes.first().and_then(last_name) == last_name(mesh) => {
            GroupSize::Of(u32::try_from(shard).expect("ranks are 32-bit numbers"))
        }
        _ => return Ok(None),
    };
    if !is_kept || has_rules || has_form || !mesh.ranks_are_row_major() {
        return Ok(None);
    }
    let mut request = FlattenRequest::default();
    request.world_size = u32::try_from(mesh.world_size()).ok();
    request.group = group;
    Ok(Some(request.layout(source)?.0))
}

/// Returns whether SRC has state of flat parameters beside a model in DTensors. If the job has one rank, its model is in
/// plain tensors.
pub fn is_beside_dtensors(source: &ConversionSource) -> bool {
    let Checkpoint { catalog, format, .. } = &source.checkpoint;
    let is_dtensor = |(_, id): &(_, TensorId)| catalog.tensor(*id).class == Class::DTensor;
    let has_dtensors = || state_dict::model(&catalog.state).tensors.iter().any(is_dtensor);
    *format == Format::TorchRanks && catalog.flat.as_ref().is_some_and(|flat| flat.world_size == 1 || has_dtensors())
}

/// Returns whether a part of the target is an optimizer without its model.
pub fn is_optimizer(part: &PartTarget) -> bool {
    named_optimizers(&part.state) == [Path::default()]
}
