//! Builds the target layout of `reshard`: the mesh, and the rules that give each tensor its placements on the mesh.
//! Mesh and rules come from the command line, a layout file, `--like` or the source.

use std::collections::BTreeSet;

use super::fsdp1_job::{is_hybrid_shard, is_of_fsdp1, lacks_its_model};
use super::sharded_tensor_mesh::{mesh_of_rows, rows};
use super::strided;
use crate::catalog::{Catalog, TensorEntry, TensorId};
use crate::convert::options::ReshardOptions;
use crate::convert::parallelize_plan::PlanOptions;
use crate::convert::placements;
use crate::convert::source::ConversionSource;
use crate::error::{Error, Result};
use crate::format::parallelize::PlanSide;
use crate::format::{Checkpoint, Format, TensorStorage};
use crate::layout::parallelize::RoleNames;
use crate::layout::rules::{Fallback, MeshLayout};
use crate::layout::{DeviceMesh, PlacementSpec, Rank, parse_placements};
use crate::name_list::{FEW, short_list};

/// Returns the mesh that all sharded tensors of the source share.
///
/// # Errors
/// `Usage` if the source has no mesh, or more than one.
pub fn own_mesh(source: &ConversionSource) -> Result<DeviceMesh> {
    let name = if source.filled.is_some() { "the checkpoint of options::fill_from" } else { "SRC" };
    let meshes = &source.selection.catalog.meshes;
    let of_rows = || {
        // A tensor of FILLER (the checkpoint of `--fill-from`) that SRC replaces keeps the layout that it has in
        // FILLER.
        let replaced = |id: u32| source.filled.as_ref()?.replaced.get(&TensorId(id));
        let entries = (0..).zip(&source.checkpoint.catalog.tensors);
        let entries: Vec<&TensorEntry> = entries.map(|(id, own)| replaced(id).unwrap_or(own)).collect();
        own_rows(&entries, meshes, source.checkpoint.format)
    };
    DeviceMesh::root_of(meshes).cloned().or_else(of_rows).ok_or_else(|| {
        Error::usage(
            match meshes.len() {
                0 => format!("no options::mesh is given, and {name} has no mesh"),
                many => format!("no options::mesh is given, and {name} has {many} meshes"),
            },
            "give the mesh with options::mesh, such as options::mesh fsdp=8 or options::mesh dp=4,tp=2",
        )
    })
}

/// Returns the mesh that all sharded tensors of a checkpoint share, if there is one.
pub fn shared_mesh(checkpoint: &Checkpoint) -> Option<DeviceMesh> {
    match checkpoint.catalog.meshes.as_slice() {
        [] => rows_of(checkpoint),
        meshes => DeviceMesh::root_of(meshes).cloned(),
    }
}

/// Returns the mesh that all sharded tensors of the checkpoint of `--like` share.
fn mesh_of(like: &Checkpoint) -> Result<DeviceMesh> {
    let meshes = &like.catalog.meshes;
    shared_mesh(like).ok_or_else(|| {
        if meshes.is_empty() {
            return without_mesh(like);
        }
        Error::usage(
            format!("options::like {} has {} meshes", like.root.display(), meshes.len()),
            "give options::mesh with the dimension names of that checkpoint",
        )
    })
}

/// Infers the mesh of the ShardedTensors among `entries`, which record no mesh. Returns `None` if there are no
/// ShardedTensors, if the format stores flat parameters, or if the checkpoint records `meshes`.
fn own_rows(entries: &[&TensorEntry], meshes: &[DeviceMesh], format: Format) -> Option<DeviceMesh> {
    (meshes.is_empty() && format.tensors() == TensorStorage::Ranks).then(|| mesh_of_rows(entries))?
}

/// Returns the mesh of the ShardedTensors in the checkpoint of `--like`.
fn rows_of(like: &Checkpoint) -> Option<DeviceMesh> {
    let entries: Vec<&TensorEntry> = like.catalog.tensors.iter().collect();
    own_rows(&entries, &like.catalog.meshes, like.format)
}

/// Checks that the mesh has the dimension names of `--like`, because placements are copied by dimension name.
fn check_dims(mesh: DeviceMesh, like: &Checkpoint) -> Result<DeviceMesh> {
    fn names(meshes: &[DeviceMesh]) -> BTreeSet<&String> {
        meshes.iter().filter_map(DeviceMesh::names).flatten().collect()
    }
    let theirs = &like.catalog.meshes;
    if theirs.is_empty() {
        // ShardedTensors are sharded by rows, on any mesh, so the names of its dims do not matter.
        return rows_of(like).map(|_| mesh).ok_or_else(|| without_mesh(like));
    }
    if names(theirs) == names(std::slice::from_ref(&mesh)) {
        return Ok(mesh);
    }
    let dims: Vec<&str> = names(theirs).into_iter().map(String::as_str).collect();
    let with_dims = match dims.as_slice() {
        [] => String::new(),
        dims => format!("give options::mesh with the dims {} of options::like, in any sizes; or ", dims.join(", ")),
    };
    let theirs: Vec<String> = theirs.iter().map(ToString::to_string).collect();
    Err(Error::usage(
        format!(
            "options::mesh {mesh}: expected the dim names of options::like {}, whose mesh is {}",
            like.root.display(),
            theirs.join(" and ")
        ),
        format!("{with_dims}omit options::like and give options::placements"),
    ))
}

fn without_mesh(like: &Checkpoint) -> Error {
    let root = like.root.display();
    if like.format.tensors() == TensorStorage::Boxes {
        return Error::usage(
            format!("options::like {root}: a DCP directory does not record the mesh and placements of its tensors"),
            "give options::like rank files of the same job; or give options::mesh and options::placements",
        );
    }
    let of_fsdp1 = match like.format {
        Format::TorchRanks => "; or, if these are files of FSDP1 with NO_SHARD, give options::flat_layout FILE",
        _ => "",
    };
    Error::usage(
        format!("options::like {root}: none of its tensors is on a mesh"),
        format!(
            "give options::like a checkpoint with DTensors or ShardedTensors; or give options::mesh and \
             options::placements{of_fsdp1}"
        ),
    )
}

fn plan_of(args: &ReshardOptions) -> PlanOptions<'_> {
    let ReshardOptions { plan, tp, fsdp, replicate, ddp, .. } = args;
    PlanOptions {
        plan: plan.as_deref(),
        option: "options::plan",
        layout_option: "options::layout",
        names: RoleNames {
            tp: tp.clone(),
            fsdp: fsdp.clone(),
            replicate: replicate.clone(),
            ddp: ddp.clone(),
            unused: Vec::new(),
        },
    }
}

/// Returns the mesh and the rules of the target, and notes about them.
///
/// # Errors
/// `Usage` and `Layout` for options that contradict each other or the source.
pub fn target_layout(args: &ReshardOptions, source: &ConversionSource) -> Result<(MeshLayout, Vec<String>)> {
    let catalog = &source.selection.catalog;
    let split = args.split.clone();
    let hint = "write flat parameters with options::to fsdp-flat; for tensors, give a mesh and placements: \
                docs/reference/layout-file.md";
    let file = args
        .layout
        .as_deref()
        .map(|path| placements::file("options::layout", path, split.clone(), hint))
        .transpose()?;
    let given = match args.mesh.as_slice() {
        [] => None,
        [one] => Some(DeviceMesh::parse(one)?),
        [first, second, ..] => {
            return Err(Error::usage(
                format!("options::mesh {first} and options::mesh {second} give two meshes"),
                format!("separate the dimensions of one mesh by commas: options::mesh {first},{second}"),
            ));
        }
    };
    let declared = file.as_ref().map_or(Ok(given.clone()), |file| file.mesh(given))?;
    let is_own = declared.is_none();
    let mut mesh = match (declared, &source.like) {
        (Some(mesh), None) => mesh,
        (Some(mesh), Some(like)) => check_dims(mesh, like)?,
        (None, None) => own_mesh(source)?,
        (None, Some(like)) => mesh_of(like)?,
    };
    if !args.mesh_ranks.is_empty() {
        let ranks = args.mesh_ranks.iter().map(|rank| Rank(*rank)).collect();
        mesh = mesh.with_ranks(ranks)?;
    }
    let (mut rules, fallback) = placements::read("options::placements", &args.placements)?;
    if let Some(file) = &file {
        rules.extend(file.rules(&mesh)?);
    }
    let draft = plan_of(args).draft(file.as_ref())?;
    let plan = draft.map(|draft| PlanSide::Target.plan(&draft, &mesh)).transpose()?;
    let split = file.as_ref().map_or(split, |file| file.split.clone());
    let fallback = fallback.or_else(|| file.as_ref()?.fallback(Some(&mesh)));
    let is_declared = fallback.is_some();
    let fallback = match fallback {
        Some(list) => Fallback::Placements(list),
        None if source.like.is_some() => Fallback::Source,
        None if plan.is_some() => Fallback::Placements(vec![PlacementSpec::Replicate; mesh.ndim()]),
        None if is_own && catalog.meshes.is_empty() => Fallback::Placements(row_specs(&mesh)),
        None if catalog.meshes.is_empty()
            && is_of_fsdp1(&source.checkpoint)
            && is_hybrid_shard(&mesh, &source.checkpoint) =>
        {
            Fallback::Placements(parse_placements("R,S(0)")?)
        }
        None => default_fallback(&mesh, catalog, !rules.is_empty())
            .map_err(|error| if lacks_its_model(source) { without_model(&mesh) } else { error })?,
    };
    let layout = MeshLayout { plan, ..MeshLayout::new(mesh, rules, fallback, split)? };
    let mut notes = strided::notes(&layout);
    notes.extend(unsaid(&layout).filter(|_| !is_declared && !is_own));
    Ok((layout, notes))
}

/// Returns the error for state of flat parameters without the model, on a mesh of several dims.
fn without_model(mesh: &DeviceMesh) -> Error {
    Error::usage(
        format!(
            "options::mesh {mesh}: the optimizer has state of FSDP1's flat parameters, and without the model it is unknown which \
             mesh dim shards them"
        ),
        "give options::mesh one dim, or two dims of which the last is `fsdp`, such as options::mesh ddp=2,fsdp=2",
    )
}

/// Name of a mesh dimension for tensor parallelism. A user with such a dimension probably wants a parallelize plan, but
/// a plan must always be requested.
const TP: &str = "tp";

/// Returns a note if the user gave no placements for a mesh whose only dimension is for tensor parallelism.
fn unsaid(layout: &MeshLayout) -> Option<String> {
    let is_tp = layout.mesh.names().is_some_and(|names| names == [TP]);
    let is_default = matches!(&layout.fallback, Fallback::Placements(list) if *list == [PlacementSpec::Shard(0)]);
    (is_tp && is_default && layout.plan.is_none()).then(|| {
        String::from(
            "every tensor without a rule gets S(0), because no placements are given; options::plan shards modules \
             as tensor parallelism does",
        )
    })
}

/// Returns the placements of ShardedTensors on a mesh, in the form in which a user would write them.
pub fn row_specs(mesh: &DeviceMesh) -> Vec<PlacementSpec> {
    rows(mesh).into_iter().map(PlacementSpec::from).collect()
}

/// Returns the fallback: the placements of tensors without a rule, if the user gives no list for every tensor. There
/// are three cases:
///
/// - The tensors keep the placements of SRC if `mesh` has the dims of SRC (names and sizes), or at least all dim
///   names of SRC. For a checkpoint of makani, `mesh` may also lack dims of SRC.
/// - Otherwise, on a mesh of one dim, the placement is `S(0)`.
/// - On all other meshes, every tensor needs a rule. To replicate all tensors is never a silent default.
///
/// # Errors
/// `Usage` if a rule is needed and there are no rules.
fn default_fallback(mesh: &DeviceMesh, catalog: &Catalog, has_rules: bool) -> Result<Fallback> {
    let mut own: Vec<&String> = mesh.names().map(|names| names.iter().collect()).unwrap_or_default();
    own.sort();
    // Each group of makani has a fixed meaning, so a mesh dim with the name of a group shards tensors as this group
    // does in SRC.
    if !own.is_empty() && own.iter().all(|name| catalog.model_parallel_groups.contains(name)) {
        let is_in_source = |name: &str| catalog.meshes.iter().any(|theirs| theirs.dim_by_name(name).is_some());
        return match own.iter().find(|name| !is_in_source(name)) {
            None => Ok(Fallback::Source),
            Some(_) if has_rules => Ok(Fallback::Missing),
            Some(name) => Err(unused_group(mesh, name, catalog)),
        };
    }
    let known = |entry: &&TensorEntry| entry.sharding.is_some();
    let mut sharded = catalog.tensors.iter().filter(known).peekable();
    let any = sharded.peek().is_some();
    let same_dims = any
        && sharded.all(|entry| {
            let theirs = entry.sharding.as_ref().map(|sharding| catalog.mesh(sharding));
            let is_known = |names: &[String]| names.iter().all(|name| own.contains(&name));
            theirs.is_some_and(|theirs| theirs.has_dims_of(mesh) || theirs.names().is_some_and(is_known))
        });
    if same_dims {
        return Ok(Fallback::Source);
    }
    if mesh.ndim() == 1 {
        return Ok(Fallback::Placements(parse_placements("S(0)")?));
    }
    if has_rules { Ok(Fallback::Missing) } else { Err(without_placements(mesh, None)) }
}

/// Returns the error for a mesh dim that has the name of a process group of makani, although SRC has no tensor that is
/// sharded over this group.
fn unused_group(mesh: &DeviceMesh, group: &str, catalog: &Catalog) -> Error {
    let used: Vec<&String> = catalog.meshes.iter().filter_map(DeviceMesh::names).flatten().collect();
    Error::usage(
        format!("options::mesh {mesh}: no tensor of the source is sharded over the group `{group}`"),
        format!(
            "use only these groups as mesh dims: {}; or give the placements of every tensor with options::placements",
            short_list(&used, FEW)
        ),
    )
}

/// Returns the error that a tensor has no placements on the target mesh. `fqn` is `None` if no tensor has placements.
pub fn without_placements(mesh: &DeviceMesh, fqn: Option<&String>) -> Error {
    let several: Vec<&str> = mesh.shape().iter().map(|_| "R").collect();
    let sharded_first = several.join(",").replacen('R', "S(0)", 1);
    let plan = if mesh.dim_by_name(TP).is_some() { "; or shard modules over tp with options::plan NAME" } else { "" };
    let (problem, tensors) = match fqn {
        None => (format!("options::mesh {mesh}: the source has no placements for these mesh dims"), "all tensors"),
        Some(fqn) => {
            let problem = format!(
                "{fqn}: no rule matches this tensor, and the source has no placements for the mesh dims of \
                 options::mesh {mesh}"
            );
            (problem, "all other tensors")
        }
    };
    Error::usage(
        problem,
        format!("give one list of placements for {tensors}, for example options::placements '{sharded_first}'{plan}"),
    )
}
