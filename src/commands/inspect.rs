//! `inspect`: what a checkpoint holds and how it is laid out.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json, json};

use super::printer::Printer;
use super::progress::Progress;
use super::{Status, check_series, input, read_options, work_options};
use crate::catalog::{Catalog, Sharding, TensorEntry, TensorId, Value, model, path};
use crate::cli::Inspect;
use crate::error::Result;
use crate::exec::{Stop, compare};
use crate::format::{Checkpoint, SeriesChoice};
use crate::layout::DeviceMesh;
use crate::quantity::{count, human_bytes};

pub fn run(args: &Inspect, printer: &Printer) -> Result<Status> {
    let checkpoint = Checkpoint::open(&args.src, &read_options(&args.source, SeriesChoice::All))?;
    check_series(&args.source, &[&checkpoint])?;
    let names = tensor_names(&checkpoint.catalog);
    let digests = if args.digest { digests(args, &checkpoint, &names, printer)? } else { BTreeMap::new() };
    for warning in &checkpoint.catalog.warnings {
        printer.detail(warning);
    }
    for conflict in checkpoint.catalog.conflicts() {
        printer.warning(&conflict.to_string());
    }
    if let Some(what) = &checkpoint.fragment {
        printer.warning(&format!("{} is {what}: its tensors are not whole", args.src.display()));
    }
    if printer.json() {
        printer.document(&document(args, &checkpoint, &names, &digests))?;
    } else {
        printer.data(&summary(&checkpoint, &names))?;
        printer.data(&table(&checkpoint.catalog, &names, &digests))?;
    }
    Ok(Status::Done)
}

/// Every tensor under every name it has, in the order of the state dict.
fn tensor_names(catalog: &Catalog) -> Vec<(String, TensorId)> {
    let all = model::all_tensors(&catalog.state);
    all.into_iter().map(|(fqn, id)| (fqn.to_string(), id)).collect()
}

fn digests(
    args: &Inspect,
    checkpoint: &Checkpoint,
    names: &[(String, TensorId)],
    printer: &Printer,
) -> Result<BTreeMap<TensorId, String>> {
    let options = work_options(&args.source, false)?;
    let stop = Stop::on_signals()?;
    let catalog = &checkpoint.catalog;
    let distinct: BTreeSet<TensorId> = names.iter().map(|(_, id)| *id).collect();
    let (partial, entries): (Vec<_>, Vec<_>) = (distinct.into_iter().map(|id| (id, catalog.tensor(id))))
        .partition(|(_, entry)| entry.sharding.as_ref().is_some_and(Sharding::is_partial));
    for (_, entry) in partial {
        printer.warning(&format!("{}: no digest, its Partial values have not been reduced", entry.fqn));
    }
    let progress = Progress::start(printer, "hashing", entries.iter().map(|(_, entry)| entry.len_bytes()).sum());
    compare::digests(input(checkpoint), &entries, &options, &progress, &stop)
}

/// What somebody wants to know first.
fn summary(checkpoint: &Checkpoint, names: &[(String, TensorId)]) -> String {
    let catalog = &checkpoint.catalog;
    let distinct: BTreeMap<TensorId, &TensorEntry> = names.iter().map(|(_, id)| (*id, catalog.tensor(*id))).collect();
    let bytes: u64 = distinct.values().map(|entry| entry.len_bytes()).sum();
    let model = model::model(&catalog.state);
    let parameters: u64 = model.tensors.iter().map(|(_, id)| catalog.tensor(*id).numel()).sum();
    let mut dtypes: BTreeMap<&str, usize> = BTreeMap::new();
    for entry in distinct.values() {
        *dtypes.entry(entry.dtype.name()).or_default() += 1;
    }
    let dtypes: Vec<String> = dtypes.iter().map(|(name, number)| format!("{name} ({number})")).collect();
    let mut lines = vec![
        format!("format      {}", checkpoint.format),
        format!("tensors     {} ({})", distinct.len(), human_bytes(bytes)),
        format!("model       {}, {parameters} elements", count(model.tensors.len(), "tensor")),
        format!("dtypes      {}", dtypes.join(", ")),
    ];
    for mesh in &catalog.meshes {
        lines.push(format!("mesh        {mesh}"));
    }
    if !checkpoint.series.is_empty() {
        lines.push(format!("series      {}", checkpoint.series.join(", ")));
    }
    if let Some(step) = step(&catalog.state) {
        lines.push(format!("step        {step}"));
    }
    lines.push(format!("objects     {}", path::objects(&catalog.state).len()));
    lines.join("\n") + "\n"
}

/// The training step, under the names trainers give it.
fn step(state: &Value) -> Option<i64> {
    let dict = state.as_dict()?;
    ["step", "global_step", "iteration"].iter().find_map(|key| dict.get(key)?.as_i64())
}

fn table(catalog: &Catalog, names: &[(String, TensorId)], digests: &BTreeMap<TensorId, String>) -> String {
    let rows: Vec<[String; 5]> = names
        .iter()
        .map(|(name, id)| {
            let entry = catalog.tensor(*id);
            let dims: Vec<String> = entry.shape.iter().map(ToString::to_string).collect();
            let placements = entry
                .sharding
                .as_ref()
                .map_or_else(|| String::from("-"), super::super::catalog::Sharding::display_placements);
            let last = digests.get(id).cloned().unwrap_or_else(|| entry.chunks.len().to_string());
            [name.clone(), entry.dtype.to_string(), format!("[{}]", dims.join(", ")), placements, last]
        })
        .collect();
    let last = if digests.is_empty() { "chunks" } else { "digest" };
    let header = ["tensor", "dtype", "shape", "placements", last].map(String::from);
    let mut widths = [0; 5];
    for row in rows.iter().chain(std::iter::once(&header)) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::from("\n");
    for row in std::iter::once(&header).chain(&rows) {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn document(
    args: &Inspect,
    checkpoint: &Checkpoint,
    names: &[(String, TensorId)],
    digests: &BTreeMap<TensorId, String>,
) -> Json {
    let catalog = &checkpoint.catalog;
    let meshes: Vec<Json> = catalog.meshes.iter().map(mesh_document).collect();
    let mut tensors = Map::new();
    let mut bytes = 0;
    for (name, id) in names {
        let entry = catalog.tensor(*id);
        bytes += entry.len_bytes();
        let mut document = tensor_document(checkpoint, entry, args.brief);
        if let Some(digest) = digests.get(id) {
            document["digest"] = json!(digest);
        }
        tensors.insert(name.clone(), document);
    }
    let objects: Map<String, Json> = path::objects(&catalog.state)
        .into_iter()
        .map(|(path, value)| (path.to_string(), json!({ "type": value.type_name(), "value": object_value(value) })))
        .collect();
    json!({
        "format": checkpoint.format.name(),
        "mesh": meshes.first(),
        "meshes": meshes,
        "series": checkpoint.series,
        "tensors": tensors,
        "objects": objects,
        "bytes": bytes,
    })
}

/// `[["dp", 4], ["tp", 2]]`; dims without a name have null.
fn mesh_document(mesh: &DeviceMesh) -> Json {
    let name = |dim: usize| mesh.names().map(|names| names[dim].clone());
    (0..mesh.ndim()).map(|dim| json!([name(dim), mesh.shape()[dim]])).collect()
}

fn tensor_document(checkpoint: &Checkpoint, entry: &TensorEntry, brief: bool) -> Json {
    let mut document = json!({
        "dtype": entry.dtype.name(),
        "shape": entry.shape.as_slice(),
        "placements": entry.sharding.as_ref().map(super::super::catalog::Sharding::display_placements),
        "mesh": entry.sharding.as_ref().map(|sharding| sharding.mesh.0),
    });
    if !brief {
        let chunks = entry.chunks.iter().flat_map(|chunk| {
            let file = chunk.place.file().map(|file| {
                let path = checkpoint.files.path(file);
                path.strip_prefix(&checkpoint.root)
                    .ok()
                    .filter(|rest| !rest.as_os_str().is_empty())
                    .unwrap_or(path)
                    .display()
                    .to_string()
            });
            // A local tensor may be several boxes of the whole; an empty one is shown as PyTorch reports it.
            let regions: Vec<_> = if chunk.tile.is_empty() {
                vec![(chunk.tile.global_offsets(&entry.shape), chunk.tile.sizes())]
            } else {
                chunk.tile.regions().map(|(region, _)| (region.offsets, region.sizes)).collect()
            };
            let rank = chunk.rank.map(|rank| rank.0);
            regions.into_iter().map(move |(offsets, sizes)| {
                json!({ "offsets": offsets.as_slice(), "sizes": sizes.as_slice(), "rank": rank, "file": file })
            })
        });
        document["chunks"] = chunks.collect();
    }
    document
}

/// Plain values as they are; others as Python would print them.
fn object_value(value: &Value) -> Json {
    match value {
        Value::None => Json::Null,
        Value::Bool(value) => json!(value),
        Value::Int(value) => json!(value),
        Value::Float(value) if value.is_finite() => json!(value),
        Value::Str(text) => json!(text),
        Value::List(items) => items.iter().map(object_value).collect(),
        other => json!(other.to_string()),
    }
}
