//! Gives optimizer state the layout of its parameter, if only the parameter has a recorded layout.
//!
//! In some jobs, parameters are plain tensors that carry their layout as an attribute, and `optimizer.state_dict()` has
//! plain tensors without attributes. On each rank, the moments of a parameter have the local shape of the parameter,
//! and are the moments of its local part. Invariant: optimizer state gets a layout only if its local shape is that of
//! the parameter on every rank. Optimizer state that may be a shard, and gets no layout, is marked as [`Unreadable`].
//! Unit of shapes: elements.

use std::collections::{HashMap, HashSet};
use std::path::Path as FilePath;

use super::declared_layout::unknown_number;
use crate::catalog::owner::{Owner, Owners};
use crate::catalog::path::tensors;
use crate::catalog::unreadable::UnreadableKind;
use crate::catalog::{
    Catalog, Chunk, ChunkTable, Path, TensorEntry, TensorId, Unreadable, checked_len_bytes, state_dict,
};
use crate::layout::{Placement, Rank, Tile};

/// Gives each plain tensor of an optimizer the layout of its parameter, if both have the same local shape on every
/// rank.
pub fn follow_parameters(catalog: &mut Catalog) {
    let followed: Vec<(TensorId, TensorEntry)> = plain_tensors(catalog)
        .into_iter()
        .filter_map(|plain| Some((plain.id, following(catalog.tensor(plain.id), catalog.tensor(plain.owner?.id?))?)))
        .collect();
    for (id, entry) in followed {
        catalog.tensors[id.0 as usize] = entry;
    }
}

/// Marks plain tensors without a layout as [`Unreadable`] if they are shards, or may be shards, of larger tensors.
/// `root` is the path of the checkpoint, for messages.
pub fn mark_unknown(catalog: &mut Catalog, root: &FilePath) {
    let plain = plain_tensors(catalog);
    let unknown: Vec<(TensorId, UnreadableKind)> =
        plain.iter().filter_map(|plain| Some((plain.id, unknown_layout(catalog, plain)?))).collect();
    for (id, kind) in unknown {
        let why = Unreadable { file: root.to_path_buf(), kind };
        catalog.tensors[id.0 as usize].unreadable = Some(Box::new(why));
    }
}

/// A plain tensor that has no layout.
struct PlainTensor {
    id: TensorId,
    path: Path,
    owner: Option<Owner>,
}

fn plain_tensors(catalog: &Catalog) -> Vec<PlainTensor> {
    let (mut owners, mut seen, mut found) = (Owners::by_local_shape(catalog), HashSet::new(), Vec::new());
    tensors(&catalog.state, &Path::default(), &mut |path, id| {
        let is_plain = !catalog.tensor(id).is_shared()
            && catalog.tensor(id).unreadable.is_none()
            && !state_dict::is_random_state(path.fqn().as_str());
        if is_plain && seen.insert(id) {
            found.push(PlainTensor { id, path: path.clone(), owner: owners.owner_of(path) });
        }
    });
    found
}

/// Returns the plain tensor `entry` with the layout of its parameter. Returns `None` if the local shapes differ, or if
/// the parameter has no layout or has partial values.
fn following(entry: &TensorEntry, parameter: &TensorEntry) -> Option<TensorEntry> {
    let (own, parts) = (entry.local_shapes(), parameter.local_shapes());
    let is_alike = parameter.is_shared() && parameter.partial_values.is_none() && !own.is_empty() && own == parts;
    if !is_alike || checked_len_bytes(&parameter.shape, entry.dtype).is_none() {
        return None;
    }
    let tiles: HashMap<Rank, Tile> =
        parameter.chunks.iter().filter_map(|chunk| Some((chunk.rank?, chunk.tile))).collect();
    let mut chunks = ChunkTable::new(parameter.shape.len());
    for chunk in entry.chunks.iter() {
        chunks.push(Chunk { tile: tiles.get(&chunk.rank?)?.clone(), ..chunk });
    }
    let TensorEntry { shape, class, sharding, .. } = parameter;
    let stride = entry.stride.clone().filter(|_| *shape == entry.shape);
    Some(TensorEntry {
        shape: shape.clone(),
        class: *class,
        sharding: sharding.clone(),
        stride,
        chunks,
        ..entry.clone()
    })
}

fn unknown_layout(catalog: &Catalog, plain: &PlainTensor) -> Option<UnreadableKind> {
    let PlainTensor { id, path, owner } = plain;
    let entry = catalog.tensor(*id);
    let unknown = |what: String| {
        let hint = format!("declare its layout with options::src_mesh and options::src_placements '{path}=LIST'");
        Some(UnreadableKind::UnknownLayout {
            what: format!("{path}: the files do not record the layout of {what}"),
            hint,
        })
    };
    if let (true, Some(Owner { by_number: true, name: None, .. })) = (entry.numel() > 1, owner) {
        return Some(unknown_number(&entry.fqn));
    }
    if let Some(other) = entry.chunks.iter().find(|chunk| chunk.tile.sizes() != entry.shape) {
        let part = |rank: Option<Rank>, sizes: &[u64]| match rank {
            Some(rank) => format!("rank {rank} has {sizes:?}"),
            None => format!("one file has {sizes:?}"),
        };
        let shapes = [part(entry.chunks.rank(0), &entry.shape), part(other.rank, &other.tile.sizes())];
        return unknown(format!("this tensor, whose shape differs between ranks: {}", shapes.join(", ")));
    }
    let owner = owner.as_ref().filter(|_| entry.numel() > 1)?;
    let Some(parameter) = owner.id.map(|id| catalog.tensor(id)) else {
        return unknown(String::from("this optimizer state, whose parameter is not in the checkpoint"));
    };
    is_sharded(catalog, parameter).then(|| {
        unknown(String::from("this optimizer state, whose shape differs from the local shape of its parameter"))
    })?
}

fn is_sharded(catalog: &Catalog, entry: &TensorEntry) -> bool {
    entry.sharding.as_ref().is_some_and(|sharding| {
        let sizes = catalog.mesh(sharding).shape();
        let placements = &sharding.shared.placements;
        placements.iter().zip(sizes).any(|(placement, size)| *placement != Placement::Replicate && *size > 1)
    })
}
