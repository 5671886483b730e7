//! Reads a checkpoint item whose files torch.save wrote. The files contain DTensors, which record their sharding
//! themselves; the metadata must agree with the DTensors.

use std::path::Path;

use super::item_files::CheckpointItem;
use super::metadata::{RankGroup, TensorMetadata, TensorSharding, name_of};
use crate::catalog::path::key_text;
use crate::catalog::{Catalog, Class, Key, Path as StatePath, Value};
use crate::error::{Error, Result};
use crate::format::torch::dropped_objects;
use crate::format::torch::load::load;
use crate::format::torch::ranks::{PlainKind, merge};
use crate::layout::{Placement, comma_list};
use crate::storage::Files;
use torch_pickle::pickle::Unknown;

/// Reads a checkpoint item from the torch.save files of all ranks.
///
/// # Errors
/// The errors of reading and merging rank files; `Malformed` if a tensor is not as the metadata says.
pub fn read(files: &mut Files, metadata_path: &Path, item: &CheckpointItem<'_>, unknown: Unknown) -> Result<Catalog> {
    let loaded = load(files, &item.files, unknown)?;
    let mut catalog = merge(&loaded, PlainKind::Replicas)?;
    catalog.dropped = dropped_objects(&loaded);
    for tensor in item.metadata.iter().flat_map(|metadata| &metadata.tensors) {
        check(&catalog, tensor).map_err(|(expected, found)| {
            Error::malformed(metadata_path, name_of(&item.name, &tensor.path).as_str(), expected, found)
        })?;
    }
    Ok(catalog)
}

/// Checks that a tensor in the files is the tensor that the metadata describes. If not, returns two texts: the expected
/// and the found tensor.
fn check(catalog: &Catalog, tensor: &TensorMetadata) -> Result<(), (String, String)> {
    let RankGroup { dtype, shape, sharding, .. } = &tensor.groups[0];
    let expected = format!("{dtype} {:?}", shape.as_slice());
    let id = match find(&catalog.state, &tensor.path) {
        Some(Value::Tensor(id)) => *id,
        // Ranks have different values here, which is an error of its own.
        Some(Value::Other(_)) => return Ok(()),
        Some(other) => return Err((format!("a tensor {expected} in the files"), other.type_name().into_owned())),
        None => return Err((format!("a tensor {expected} in the files"), String::from("none"))),
    };
    let entry = catalog.tensor(id);
    if (entry.dtype, &entry.shape) != (*dtype, shape) {
        return Err((format!("{expected}, as in the files"), format!("{} {:?}", entry.dtype, entry.shape.as_slice())));
    }
    let TensorSharding::Mesh { placements, .. } = sharding else { return Ok(()) };
    let is_replicated = placements.iter().all(|placement| *placement == Placement::Replicate);
    match (&entry.sharding, entry.class) {
        // If the tensor is on a slice, the catalog has placements on the larger mesh, so these are not compared.
        (Some(own), Class::DTensor) if own.shared.slice.is_none() && own.shared.placements != *placements => {
            Err((format!("the placements of the files, {}", own.display_placements()), comma_list(placements)))
        }
        (None, Class::Tensor) if !is_replicated => {
            Err((String::from("a replicated tensor, because the files have a plain tensor"), comma_list(placements)))
        }
        _ => Ok(()),
    }
}

/// Returns the value at a path. In contrast to [`StatePath::find`], a number in the path may also be a position in a
/// tuple or a key of a dict.
fn find<'v>(state: &'v Value, path: &StatePath) -> Option<&'v Value> {
    path.0.iter().try_fold(state, |value, key| match (value, key) {
        (Value::Dict(dict), key) => {
            let text = key.to_string();
            dict.entries.iter().find(|(own, _)| *key_text(own) == *text).map(|(_, value)| value)
        }
        (Value::List(items) | Value::Tuple(items), Key::Index(index)) => items.get(usize::try_from(*index).ok()?),
        _ => None,
    })
}
