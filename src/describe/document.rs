//! The JSON document that `inspect --json` prints. Shapes, offsets and sizes are in elements.

use serde_json::{Map, Value as Json, json};

use super::{Inspection, parts};
use crate::catalog::{Sharding, TensorEntry, Value, path};
use crate::layout::DeviceMesh;

/// Returns the JSON document of `inspect`. The fields `tensors`, `bytes` and `digest` describe the tensors that
/// `--tensor` selects; all other fields describe the complete checkpoint.
pub fn document(view: &Inspection<'_>) -> Json {
    let (checkpoint, catalog) = (view.checkpoint, &view.checkpoint.catalog);
    let meshes: Vec<Json> = catalog.meshes.iter().map(mesh_document).collect();
    let mut tensors = Map::new();
    let mut bytes = 0;
    for (name, id) in &view.names {
        let entry = catalog.tensor(*id);
        bytes += entry.len_bytes();
        let mut document = tensor_document(view, entry, view.args.brief);
        if let Some(digest) = view.digests.get(id) {
            document["digest"] = json!(digest);
        }
        tensors.insert(name.to_string(), document);
    }
    let mut objects: Map<String, Json> = path::objects(&catalog.state)
        .into_iter()
        .map(|(path, value)| (path.to_string(), object_document(value)))
        .collect();
    objects.extend(view.unreadable_objects.iter().filter_map(|(name, id)| {
        let why = catalog.tensor(*id).unreadable.as_ref()?;
        Some((name.to_string(), json!({ "type": null, "value": null, "unreadable": why.kind.to_string() })))
    }));
    let mut document = json!({
        "format": checkpoint.format.name(),
        "mesh": meshes.first(),
        "meshes": meshes,
        "series": checkpoint.series,
        "tensors": tensors,
        "objects": objects,
        "bytes": bytes,
        "missing": checkpoint.missing,
    });
    if let Some(map) = view.map {
        document["map"] = map.clone();
    }
    if let Some(digest) = view.digest() {
        document["digest"] = json!(digest);
    }
    document
}

/// Returns the JSON document of an object (a value that is not a tensor): `{"type": "int", "value": 1000}`.
pub fn object_document(value: &Value) -> Json {
    json!({ "type": value.type_name(), "value": object_value(value) })
}

/// Returns the names and sizes of mesh dimensions: `[["dp", 4], ["tp", 2]]`; the name is null if a dimension has no
/// name.
fn mesh_document(mesh: &DeviceMesh) -> Json {
    let name = |dim: usize| mesh.names().map(|names| names[dim].clone());
    (0..mesh.ndim()).map(|dim| json!([name(dim), mesh.shape()[dim]])).collect()
}

fn tensor_document(view: &Inspection<'_>, entry: &TensorEntry, brief: bool) -> Json {
    let mut document = json!({
        "dtype": entry.dtype.name(),
        "shape": entry.shape.as_slice(),
        "placements": entry.sharding.as_deref().map(Sharding::display_placements),
        "mesh": entry.sharding.as_ref().map(|sharding| sharding.mesh.0),
    });
    if let Some(why) = &entry.unreadable {
        document["unreadable"] = json!(why.kind.to_string());
        if !why.has_parts() {
            (document["dtype"], document["shape"]) = (Json::Null, Json::Null);
        }
    }
    if !brief {
        let chunks = parts(view, entry)
            .map(|part| json!({ "offsets": part.offsets, "sizes": part.sizes, "rank": part.rank, "file": part.file }));
        document["chunks"] = chunks.collect();
    }
    document
}

/// Returns a value as JSON if JSON can express it, otherwise as the text that Python would print.
fn object_value(value: &Value) -> Json {
    match value {
        Value::None => Json::Null,
        Value::Bool(value) => json!(value),
        Value::Int(value) => json!(value),
        Value::Float(value) if value.is_finite() => json!(value),
        Value::Str(text) => json!(**text),
        Value::List(items) => items.iter().map(object_value).collect(),
        Value::Ints(ints) => json!(**ints),
        other => json!(other.to_string()),
    }
}
