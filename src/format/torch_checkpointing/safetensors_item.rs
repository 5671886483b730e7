//! Reads a checkpoint item whose files are safetensors. A file has the local tensors of one rank; only `metadata.pkl`
//! records how the tensors are sharded. The name of a tensor is its path in the item, joined with dots.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use super::item_files::CheckpointItem;
use super::metadata::{LocalBox, RankGroup, TensorMetadata, TensorSharding, name_of};
use crate::catalog::path::Unflatten;
use crate::catalog::{Catalog, Chunk, Class, FileLocation, Fqn, Sharding, TensorEntry, Value, contiguous_strides};
use crate::error::{Error, Result};
use crate::format::safetensors::{StoredTensor, read_header};
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::{DeviceMesh, Placement, Rank, Region, Tile, comma_list, local_shard};
use crate::storage::{FileId, Files};

/// The tensors in the file of one rank.
struct RankTensors<'a> {
    path: &'a Path,
    file: FileId,
    tensors: HashMap<Arc<str>, StoredTensor>,
}

/// Reads a checkpoint item from the safetensors files of all ranks.
///
/// # Errors
/// `Malformed` if a file lacks a tensor, has a tensor that the metadata does not list, or has a tensor of another dtype
/// or shape than the metadata says; the errors of reading headers.
pub fn read(files: &mut Files, metadata_path: &Path, item: &CheckpointItem<'_>) -> Result<Catalog> {
    let mut ranks: BTreeMap<Rank, RankTensors<'_>> = BTreeMap::new();
    for (rank, path) in &item.files {
        let file = files.add(path)?;
        let tensors = read_header(files, file)?.tensors.into_iter().collect();
        ranks.insert(Rank(*rank), RankTensors { path, file, tensors });
    }
    let mut catalog = Catalog::empty();
    let mut state = Unflatten::default();
    for tensor in item.metadata.iter().flat_map(|metadata| &metadata.tensors) {
        let entry = entry(metadata_path, &item.name, tensor, &mut ranks, &mut catalog)?;
        let id = catalog.push_tensor(entry);
        state.insert(&tensor.path, Value::Tensor(id)).map_err(|found| {
            let name = name_of(&item.name, &tensor.path);
            Error::malformed(metadata_path, name.as_str(), "a state dict path that fits the other paths", found)
        })?;
    }
    for (rank, RankTensors { path, tensors, .. }) in &ranks {
        // The error reports the smallest name, so that it is the same in every run.
        if let Some(name) = tensors.keys().min() {
            let expected = format!("no tensor of this name, because metadata.pkl does not list it for rank {rank}");
            return Err(Error::malformed(path, &**name, expected, "one"));
        }
    }
    catalog.state = state
        .finish()
        .map_err(|found| Error::malformed(metadata_path, item.name.as_str(), "lists without large gaps", found))?;
    Ok(catalog)
}

/// Returns the entry of a tensor. Removes the tensor from `ranks`, so that in the end `ranks` has only tensors that the
/// metadata does not list.
fn entry(
    metadata_path: &Path,
    item: &str,
    tensor: &TensorMetadata,
    ranks: &mut BTreeMap<Rank, RankTensors<'_>>,
    catalog: &mut Catalog,
) -> Result<TensorEntry> {
    let fqn = tensor.path.fqn();
    let first = &tensor.groups[0];
    let mut entry = TensorEntry::new(fqn, first.dtype, first.shape.clone());
    for group in &tensor.groups {
        if let Some((mesh, placements)) = sharded_layout(group) {
            let known = entry.sharding.as_ref().map(|sharding| &sharding.shared.placements);
            if let Some(known) = known.filter(|known| *known != placements) {
                let name = name_of(item, &tensor.path);
                let found = comma_list(placements);
                return Err(Error::malformed(metadata_path, name.as_str(), comma_list(known), found));
            }
            if known.is_none() {
                let mesh = catalog.intern_mesh(mesh.clone());
                entry.class = Class::DTensor;
                entry.sharding = Some(Box::new(Sharding { mesh, shared: SharedTensor::from(placements.to_vec()) }));
            }
        }
    }
    let mut has_mixed_kinds = false;
    for group in &tensor.groups {
        has_mixed_kinds |= sharded_layout(group).is_some() != (entry.class == Class::DTensor);
        for rank in &*group.ranks {
            // The caller has reported missing files.
            let Some(own) = ranks.get_mut(rank) else { continue };
            let Some(stored) = own.tensors.remove(entry.fqn.as_str()) else {
                let expected = format!("a tensor of this name, because metadata.pkl lists it for rank {rank}");
                return Err(Error::malformed(own.path, entry.fqn.as_str(), expected, "none"));
            };
            push_chunks(&mut entry, group, *rank, (own.path, own.file), &stored)?;
        }
    }
    if has_mixed_kinds {
        let name = name_of(item, &tensor.path);
        let expected = "a tensor that is sharded on all ranks, or replicated on all ranks";
        return Err(Error::malformed(metadata_path, name.as_str(), expected, "both"));
    }
    Ok(entry)
}

/// Returns the mesh and the placements of a DTensor that is sharded; `None` for a DTensor with only replicas, which is
/// read as a plain tensor, and for a tensor whose metadata lists boxes.
fn sharded_layout(group: &RankGroup) -> Option<(&DeviceMesh, &[Placement])> {
    match &group.sharding {
        TensorSharding::Mesh { mesh, placements }
            if placements.iter().any(|placement| *placement != Placement::Replicate) =>
        {
            Some((mesh, placements))
        }
        _ => None,
    }
}

/// Adds the chunks of one rank to a tensor.
fn push_chunks(
    entry: &mut TensorEntry,
    group: &RankGroup,
    rank: Rank,
    (path, file): (&Path, FileId),
    stored: &StoredTensor,
) -> Result<()> {
    let wrong = |fqn: &Fqn, expected: String| {
        let found = format!("{} {:?}", stored.dtype, stored.shape.as_slice());
        Error::malformed(path, fqn.as_str(), expected, found)
    };
    let location = |tile: &Tile, offset| {
        if tile.is_empty() { FileLocation::Empty } else { FileLocation::Bytes { file, offset } }
    };
    match &group.sharding {
        TensorSharding::Mesh { mesh, placements } => {
            let at = mesh.coordinate(rank).expect("the metadata reader has checked the ranks of a mesh");
            let tile = local_shard(&entry.shape, mesh.shape(), placements, &at).map_err(|error| {
                let expected = "placements that fit the tensor";
                Error::malformed(path, entry.fqn.as_str(), expected, format!("placements that do not fit ({error})"))
            })?;
            let sizes = tile.sizes();
            if (stored.dtype, &stored.shape) != (entry.dtype, &sizes) {
                let expected = format!("{} {:?}, as metadata.pkl says for rank {rank}", entry.dtype, sizes.as_slice());
                return Err(wrong(&entry.fqn, expected));
            }
            let location = location(&tile, stored.offset);
            entry.chunks.push(Chunk { tile, location, strides: None, rank: Some(rank), view: None });
        }
        TensorSharding::Boxes(boxes) => {
            if stored.dtype != entry.dtype || stored.shape.len() != entry.shape.len() {
                let expected = format!("{} with {} dims, as metadata.pkl says", entry.dtype, entry.shape.len());
                return Err(wrong(&entry.fqn, expected));
            }
            let strides = contiguous_strides(&stored.shape);
            for LocalBox { region, local_offsets } in boxes {
                if !Region::new(local_offsets.clone(), region.sizes.clone()).fits(&stored.shape) {
                    let expected = format!(
                        "a local tensor that contains a shard of shape {:?} at offsets {:?}",
                        region.sizes, local_offsets
                    );
                    return Err(wrong(&entry.fqn, expected));
                }
                let elements: u64 = local_offsets.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
                let tile = Tile::from_region(region);
                let location = location(&tile, stored.offset + elements * entry.dtype.itemsize());
                let own = (strides != contiguous_strides(&region.sizes)).then(|| strides.clone());
                entry.chunks.push(Chunk { tile, location, strides: own, rank: None, view: None });
            }
        }
    }
    Ok(())
}
