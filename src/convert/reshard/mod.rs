//! `reshard` writes a checkpoint for another mesh or with other placements. The output keeps every tensor and object
//! of the source. This module chooses the target format, lays out every output file, and collects the notes for the
//! user.

mod attention_heads;
mod class;
mod flat;
mod flat_selection;
mod fsdp1_job;
mod like;
mod mesh_and_rules;
mod placement_report;
mod placement_resolver;
mod sharded_tensor_mesh;
mod strided;
mod tensor_context;
mod whole_state;

use std::collections::HashSet;

use super::differing_values::TargetFiles;
use super::fill::with_others;
use super::optimizer_names::{name_for_dcp, number_flat_optimizers};
use super::prepared::Prepared;
use super::run::Run;
use super::source::ConversionSource;
use super::source_options::check_flat;
use super::target_format::target_format;
use super::target_parts::{self, NewJob, PartTarget, carry_along, example_of, parts, warn_of_carried};
use super::whole::check_tied;
use super::{flatten, partial_values, tied};
use crate::catalog::flat::FlatLayout;
use crate::catalog::{Catalog, Class, Path, Reservation, TensorEntry};
use crate::convert::options::{ConvertOptions, ReshardOptions};
use crate::error::{Error, Result};
use crate::format::{Checkpoint, Format, Layouts, ShardedTarget, TensorStorage, local, torch};
use crate::layout::DeviceMesh;
use crate::layout::distinct_tiles::HeldTile;
use crate::layout::rules::MeshLayout;
use crate::publish::DestinationKind;
use crate::select::Wrappers;
use attention_heads::AttentionHeads;
use class::tensor_class;
use fsdp1_job::{
    Fsdp1Job, has_sharded_tensors, is_beside_dtensors, is_of_fsdp1, is_optimizer, lost_padding, parameter_paths,
    remove_wrapped_modules,
};
use like::LikeLayout;
use mesh_and_rules::target_layout;
pub use mesh_and_rules::{own_mesh, row_specs, shared_mesh};
pub use placement_resolver::PlacementResolver;
pub use sharded_tensor_mesh::rows;

/// Lays out the destination of `reshard`.
///
/// # Errors
/// `Usage` and `Layout` if a mesh, placements or a format do not fit the source. Errors of reading the checkpoints of
/// `--like` and `--fill-from`.
pub fn prepare(
    args: &ReshardOptions,
    convert: &ConvertOptions,
    source: ConversionSource,
    run: &Run<'_>,
) -> Result<Prepared> {
    let mut source = with_others(source, (args.fill_from.as_deref(), args.like.as_deref()), convert, run)?;
    if gives_shapes_only(&source) {
        source.like = None;
    }
    let destination = convert.dst.as_deref();
    let to = target_format(&convert.destination, destination, default_format(example_of(&source).format))?;
    let to = if to == Format::TorchRanks && keeps_no_shard(args, &source) { Format::FsdpFlat } else { to };
    let ranks = match to.tensors() {
        TensorStorage::Boxes => TargetFiles::Together,
        TensorStorage::Ranks => TargetFiles::Apart,
        TensorStorage::Flat => return flat::prepare(args, convert, source, to, run),
        TensorStorage::Whole => return whole_state::prepare(args, convert, source, to, run),
    };
    check_flat(&convert.source, None, &[&source.checkpoint])?;
    check_tied(convert.tied, to)?;
    let stores_names =
        to.tensors() == TensorStorage::Boxes && source.checkpoint.format.tensors() != TensorStorage::Boxes;
    let notes_of_names = if stores_names { name_for_dcp(&mut source) } else { Vec::new() };
    let has_flat_params = source.checkpoint.format.tensors() == TensorStorage::Flat;
    let of_flat = (has_flat_params || is_beside_dtensors(&source)).then_some(Class::DTensor);
    let class = tensor_class(args.tensor_class, to)?.or(of_flat);
    source.resolve_conflicts(convert.checks, ranks, run)?;
    let (layout, notes_of_layout) = target_layout(args, &source)?;
    let fsdp1 = Fsdp1Job::new(args, &source, &layout.mesh, to)?;
    let no_shard = fsdp1.as_ref().is_some_and(Fsdp1Job::is_no_shard);
    let own_ranks = args.mesh.is_empty() && args.mesh_ranks.is_empty();
    let saved = Some(example_of(&source)).filter(|_| own_ranks);
    let job = LoadingJob::new(&layout.mesh, saved, &source, convert.destination.torch_version.as_deref())?;
    let mut notes = source.notes_of_ranks((ranks == TargetFiles::Apart).then_some(job.world_size));
    notes.extend(notes_of_names);
    // A job with NO_SHARD gets no DTensors.
    if !no_shard {
        let renamed = renamed_dims(&source.selection.catalog, &layout.mesh);
        notes.extend(renamed.filter(|_| ranks == TargetFiles::Apart && source.like.is_none()));
        notes.extend(notes_of_layout);
    }
    if to.tensors() == TensorStorage::Boxes {
        notes.extend(tied::note_for_dcp(&source.checkpoint, &source.selection.catalog.state)?);
    }
    let wrappers = if convert.select.keep_names { Wrappers::Keep } else { Wrappers::Match };
    let max_memory = convert.source.max_memory;
    if to.entry().names_tensors_by_rank {
        check_room(&source, &layout.mesh, job.world_size, class, (to, max_memory))?;
    }
    let flat_optimizer = fsdp1.as_ref().map(|job| job.flat_layout(&source)).transpose()?.flatten();
    notes.extend(flat_optimizer.as_ref().and_then(|layout| lost_padding(layout, &source)));
    // Flat parameters in ShardedTensors become tensors of `class`.
    let has_sharded_tensors =
        class == Some(Class::ShardedTensor) || !has_flat_params && has_sharded_tensors(&source.checkpoint);
    let is_from_fsdp1 = has_flat_params || is_of_fsdp1(&source.checkpoint);
    let changes_to_fsdp2 = fsdp1.is_none() && to == Format::TorchRanks && is_from_fsdp1 && !has_sharded_tensors;
    if changes_to_fsdp2 && is_beside_dtensors(&source) {
        remove_wrapped_modules(&mut source.selection.catalog.state);
        number_flat_optimizers(&mut source);
        notes.push(String::from(
            "SRC has the optimizer state of a job with FSDP1; DST gets the state of each original parameter, for a job \
             with FSDP2",
        ));
    }
    let flat_optimizer = flat_optimizer.as_ref();
    let form = TargetForm { to, class, wrappers, flat_optimizer, no_shard };
    let (mut reservation, more) = reserve(&source, &layout, &job, &form, run)?;
    notes.extend(more);
    let fsdp_version = fsdp1.map(|_| 1).or(changes_to_fsdp2.then_some(2));
    let new_job = NewJob { world_size: job.world_size, fsdp_version };
    let carried = carry_along(&source, to, new_job, &mut reservation)?;
    warn_of_carried(&carried, &mut source, run.progress);
    Ok(Prepared { source, reservation, carried, shape: DestinationKind::Folder, to, tied: Vec::new(), notes })
}

/// Returns true if `--like` gives DST no layout, because its checkpoint has no sharded tensors. It only provides the
/// shapes of the parameters in the flat parameters of SRC.
fn gives_shapes_only(source: &ConversionSource) -> bool {
    let is_whole = |like: &Checkpoint| {
        let catalog = &like.catalog;
        let shared = |entry: &TensorEntry| entry.class != Class::Tensor;
        // A DCP directory records no layout. The user probably selected its layout, so it is refused later.
        like.format != Format::Dcp && catalog.flat.is_none() && !catalog.tensors.iter().any(shared)
    };
    source.given().1.tensors() == TensorStorage::Flat && source.like.as_ref().is_some_and(is_whole)
}

/// Returns true if DST is for a job with `NO_SHARD`: the checkpoint of `--like` (without `--like`: SRC) consists of
/// rank files of such a job, and no option asks for another layout. The tensors in these files are plain, but the
/// optimizer state depends on the flat layout, as in files with flat parameters.
fn keeps_no_shard(args: &ReshardOptions, source: &ConversionSource) -> bool {
    let names = [&args.plan, &args.tp, &args.fsdp, &args.replicate, &args.ddp];
    let has_mesh = !args.mesh.is_empty() || !args.mesh_ranks.is_empty() || !args.placements.is_empty();
    let has_plan = args.layout.is_some() || names.iter().any(|name| name.is_some());
    let has_form = args.split.is_some() || args.tensor_class.is_some();
    let flat = example_of(source).catalog.flat.as_ref();
    flat.is_some_and(|flat| flat.shard_group_size == 1) && !has_mesh && !has_plan && !has_form
}

/// The form in which tensors are written.
struct TargetForm<'a> {
    to: Format,
    class: Option<Class>,
    wrappers: Wrappers,
    /// The flat layout of an optimizer with state of FSDP1's flat parameters.
    flat_optimizer: Option<&'a FlatLayout>,
    /// Whether the loading job uses FSDP1 with `NO_SHARD`. Such a job loads plain tensors only.
    no_shard: bool,
}

/// Lays out each part of the source separately (a part is a series of rank files or a folder). Returns the reservation
/// and the notes about the layout.
fn reserve(
    source: &ConversionSource,
    layout: &MeshLayout,
    job: &LoadingJob,
    &TargetForm { to, class, wrappers, flat_optimizer, no_shard }: &TargetForm<'_>,
    run: &Run<'_>,
) -> Result<(Reservation, Vec<String>)> {
    let selected = &source.selection.catalog;
    let like = source.like.as_ref().map(|like| LikeLayout::new(like, wrappers));
    let resolver = PlacementResolver::new(selected, layout, wrappers, class)
        .like(like)
        .left_out(&source.selection.left_out.tensors);
    let mut resolver = resolver.plan(source.checkpoint.format.order())?;
    for detail in resolver.details() {
        run.progress.detail(&detail);
    }
    let parameters = flat_optimizer.map(|layout| parameter_paths(layout, &selected.state));
    let mut whole = Reservation::default();
    let mut notes = Vec::new();
    for part in parts(source, to) {
        if let Some(flat) = flat_optimizer.filter(|_| is_optimizer(&part)) {
            whole.append(&part.folder, flatten::reserve_optimizer(source, &part, flat, run)?);
            let name = if part.at.0.is_empty() { String::new() } else { format!(" `{}`", part.at) };
            notes.push(format!(
                "the optimizer state{name} of DST is for a job with FSDP1, as in SRC; for a job with FSDP2, use \
                 options::tensor_class dtensor"
            ));
            continue;
        }
        let writer = to.entry().writers.shards.expect("a format of shards that is not flat has a writer");
        let reservation = writer.reserve(ShardedTarget {
            source: selected,
            state: &part.state,
            mesh: &layout.mesh,
            world_size: job.world_size,
            style: &job.style,
            names: part.names.as_ref(),
            layouts: &mut PartLayouts {
                part: &part,
                resolver: &mut resolver,
                no_shard,
                parameters: parameters.as_ref(),
            },
        })?;
        whole.append(&part.folder, reservation);
    }
    partial_values::share(&source.checkpoint.catalog, &layout.mesh, &mut whole)?;
    notes.extend(resolver.finish(AttentionHeads::of(&source.checkpoint)?)?);
    Ok((whole, notes))
}

/// Chooses the layout of each tensor in one part of the checkpoint. A part is a series of rank files, or a folder.
struct PartLayouts<'a, 'c> {
    part: &'a PartTarget,
    resolver: &'a mut PlacementResolver<'c>,
    /// Whether rank files contain no DTensors and no ShardedTensors.
    no_shard: bool,
    /// The paths of the parameters, if the loading job uses FSDP1. FSDP1 loads other tensors of the model, which are
    /// buffers, from plain tensors only.
    parameters: Option<&'a HashSet<String>>,
}

impl Layouts for PartLayouts<'_, '_> {
    fn shards(&mut self, path: &Path, entry: &TensorEntry) -> Result<Vec<HeldTile>> {
        self.resolver.shards(&self.part.whole_path(path), entry)
    }

    fn rank_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<torch::RankLayout> {
        let path = self.part.whole_path(path);
        let layout = self.resolver.rank_layout(&path, entry)?;
        let is_buffer = |names: &HashSet<String>| !entry.is_shared() && !names.contains(&path.to_string());
        Ok(if self.no_shard || self.parameters.is_some_and(is_buffer) { torch::RankLayout::Plain } else { layout })
    }

    fn local_layout(&mut self, path: &Path, entry: &TensorEntry) -> Result<local::LocalLayout> {
        self.resolver.local_layout(&self.part.whole_path(path), entry)
    }
}

/// The job that will load the rank files.
pub struct LoadingJob {
    /// The number of ranks of the job.
    pub world_size: u32,
    /// The form of DTensors that the job's PyTorch version and device expect.
    pub style: torch::DTensorStyle,
}

impl LoadingJob {
    /// Determines the job's world size, PyTorch version and device. The world size covers the ranks of the mesh, and
    /// all ranks of the job that wrote `saved`, because ranks of that job may be outside the mesh. The PyTorch version
    /// is `version` if given, otherwise the version of the source's rank files. The device is the device of the
    /// source's rank files.
    ///
    /// # Errors
    /// `Usage` if `version` is not a PyTorch version, or is a version whose DTensors cannot be written.
    pub fn new(
        mesh: &DeviceMesh,
        saved: Option<&Checkpoint>,
        source: &ConversionSource,
        version: Option<&str>,
    ) -> Result<Self> {
        let ranks = saved.into_iter().flat_map(|saved| &saved.parts).map(|part| part.world_size);
        let world_size = ranks.chain([mesh.job_size()]).max().unwrap_or(0);
        let Checkpoint { files, format, .. } = example_of(source);
        let own = format.entry().read.style(files)?.unwrap_or_default();
        let Some(version) = version else { return Ok(Self { world_size, style: own }) };
        let release = torch::Release::from_version(version).ok_or_else(|| {
            Error::usage(
                format!("options::torch_version {version}: expected a version from 2.5 on"),
                "give a version such as 2.9 or 2.15.0; for earlier PyTorch versions, whose DTensors differ, use \
                 options::to dcp",
            )
        })?;
        Ok(Self { world_size, style: torch::DTensorStyle { release, ..own } })
    }
}

/// Returns a note if no mesh dimension keeps its name. PyTorch loads a DTensor only if the job's mesh has the dimension
/// names of the DTensor's mesh.
fn renamed_dims(source: &Catalog, mesh: &DeviceMesh) -> Option<String> {
    let (own, new) = (source.meshes.first()?.names()?, mesh.names()?);
    let none_in_common = source.model_parallel_groups.is_empty() && !own.iter().any(|name| new.contains(name));
    none_in_common.then(|| {
        let (own, new) = (own.join(","), new.join(","));
        format!(
            "the mesh of DST has the dims `{new}`, the mesh of SRC has `{own}`; PyTorch loads the DTensors of DST only in \
             a job whose mesh has the dims `{new}`"
        )
    })
}

/// Checks that the lists of ranks in the output files fit into memory.
///
/// # Errors
/// `Usage` if the lists of ranks alone take more than `max_memory` bytes.
fn check_room(
    source: &ConversionSource,
    mesh: &DeviceMesh,
    world_size: u32,
    class: Option<Class>,
    (to, max_memory): (Format, u64),
) -> Result<()> {
    /// Bytes for the metadata of one shard of a ShardedTensor. The metadata is counted twice: in memory, and in the
    /// pickle that is being written.
    const BOX_BYTES: u64 = 2 * 40;
    /// Bytes for one rank in the list of ranks of a file. Every file lists the ranks of the mesh twice, as a tensor and
    /// as a tuple.
    const RANK_BYTES: u64 = 16;
    let (ranks, named) = (mesh.world_size() as u64, source.tensors());
    if !to.has_rank_files() {
        let files = if to.is_by_rank() { world_size.into() } else { ranks };
        return target_parts::check_room(files, named.len(), 0, max_memory);
    }
    let files = u64::from(world_size);
    let boxes = named.iter().map(|(_, id)| {
        let entry = source.selection.catalog.tensor(*id);
        let is_sharded = class.unwrap_or(entry.class) == Class::ShardedTensor;
        entry.shape.first().filter(|_| is_sharded).map_or(0, |rows| ranks.min(*rows))
    });
    let boxes = boxes.fold(0, u64::saturating_add).saturating_mul(BOX_BYTES);
    let lists = files.saturating_mul(ranks).saturating_mul(RANK_BYTES);
    target_parts::check_room(files, named.len(), lists.saturating_add(boxes), max_memory)
}

/// Returns the default format of the result: the format of the source, or DCP if that format does not hold shards.
fn default_format(source: Format) -> Format {
    let holds_shards = source.entry().writers.shards.is_some() || source.tensors() == TensorStorage::Flat;
    if holds_shards { source } else { Format::Dcp }
}
