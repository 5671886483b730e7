//! Builds the catalog entries of tensors from the entries of all ranks.

use std::collections::HashSet;

use super::data::DataFiles;
use super::manifest::{DTensorLayout, StoredShard};
use crate::catalog::{Chunk, Fqn, TensorEntry, checked_len_bytes, list_ranks};
use crate::error::{CatalogError, Error, Result};
use crate::layout::{Dims, Rank, Region, Tile, local_shard};

/// Adds chunks to a tensor. `rank` is the rank that stores the chunks, if each rank stores its own copy of the tensor;
/// otherwise `None`.
///
/// # Errors
/// `Malformed` if the data of a chunk is not in its file, `Coverage` if a chunk is outside the tensor.
pub fn push_chunks(
    data: &DataFiles<'_>,
    entry: &mut TensorEntry,
    chunks: &[StoredShard],
    rank: Option<Rank>,
) -> Result<()> {
    for shard in chunks {
        let region = &shard.region;
        if region.ndim() != entry.shape.len() {
            let expected = format!("chunks of {} dims", entry.shape.len());
            return Err(Error::malformed(data.manifest, entry.fqn.as_str(), expected, format!("{}", region.ndim())));
        }
        if !region.fits(&entry.shape) {
            return Err(CatalogError::chunk_out_of_bounds(entry, region, "snapshot", data.manifest).into());
        }
        let location = data.location(&entry.fqn, shard)?;
        entry.chunks.push(Chunk { tile: Tile::from_region(region), location, strides: None, rank, view: None });
    }
    Ok(())
}

/// The shards of one rank, and the layout of the tensor if it is a DTensor.
pub type RankShards<'a> = (Rank, &'a [StoredShard], Option<&'a DTensorLayout>);

/// Builds the entry of a ShardedTensor or DTensor. The manifest does not record the shape of the tensor: the shape is
/// the smallest one that contains all shards.
///
/// # Errors
/// `Malformed` if shards contradict each other or shards of a DTensor are missing; the errors of [`push_chunks`].
pub fn sharded(data: &DataFiles<'_>, fqn: Fqn, ranks: &[RankShards<'_>]) -> Result<TensorEntry> {
    let wrong = |expected: String, found: String| Error::malformed(data.manifest, fqn.as_str(), expected, found);
    let shards = || ranks.iter().flat_map(|(_, shards, _)| *shards);
    let Some(first) = shards().next() else {
        return Err(wrong(String::from("at least one shard"), String::from("none")));
    };
    let (dtype, ndim) = (first.dtype, first.region.ndim());
    let mut shape = Dims::from_elem(0, ndim);
    for StoredShard { region, dtype: own, .. } in shards() {
        if *own != dtype || region.ndim() != ndim {
            let expected = format!("shards of dtype {dtype} with {ndim} dims");
            return Err(wrong(expected, format!("dtype {own} with {} dims", region.ndim())));
        }
        for (size, (at, len)) in shape.iter_mut().zip(region.offsets.iter().zip(&region.sizes)) {
            let end = at.checked_add(*len);
            let end = end.ok_or_else(|| wrong(String::from("a shard that fits memory"), region.to_string()))?;
            *size = (*size).max(end);
        }
    }
    if checked_len_bytes(&shape, dtype).is_none() {
        return Err(wrong(String::from("a shape that fits memory"), format!("{:?}", shape.as_slice())));
    }
    check_ranks(ranks, &shape).map_err(|(expected, found)| wrong(expected, found))?;
    let mut entry = TensorEntry::new(fqn.clone(), dtype, shape);
    let mut known: HashSet<(&Region, super::manifest::StoredData)> = HashSet::new();
    for (_, shards, _) in ranks {
        for shard in *shards {
            // Several ranks may list the same data of a replicated shard.
            if known.insert((&shard.region, shard.data)) {
                push_chunks(data, &mut entry, std::slice::from_ref(shard), None)?;
            }
        }
    }
    Ok(entry)
}

/// Checks that each rank of a DTensor lists the shards that it has according to the mesh, and that some rank lists each
/// shard. The shape of the tensor follows from its shards, so the loss of the last shard would not show otherwise.
fn check_ranks(ranks: &[RankShards<'_>], shape: &[u64]) -> Result<(), (String, String)> {
    let layouts = || ranks.iter().filter_map(|(_, _, layout)| *layout);
    let Some(layout) = layouts().next() else { return Ok(()) };
    let same = |other: &DTensorLayout| other.mesh == layout.mesh && other.placements == layout.placements;
    if layouts().count() != ranks.len() || !layouts().all(same) {
        return Err((String::from("one mesh and dim_map on all ranks"), String::from("different ones")));
    }
    let mut listed = HashSet::new();
    for (rank, shards, _) in ranks {
        let Some(coordinate) = layout.mesh.coordinate(*rank) else {
            return Err((String::from("shards of the ranks of the mesh"), format!("a shard of rank {rank}")));
        };
        let part = part_of(layout, shape, &coordinate)?;
        let numel = shards.iter().map(|shard| shard.region.numel()).fold(0, u64::saturating_add);
        let is_outside = |shard: &&StoredShard| {
            !shard.region.is_empty() && part.intersect(&shard.region).as_ref() != Some(&shard.region)
        };
        if let Some(shard) = shards.iter().find(is_outside) {
            return Err((format!("shards of rank {rank} within {part}"), shard.region.to_string()));
        }
        if numel == part.numel() {
            listed.insert(part);
        } else if numel > 0 {
            return Err((
                format!("{} elements from rank {rank}, whose shard is {part}", part.numel()),
                numel.to_string(),
            ));
        }
    }
    let mut missing = Vec::new();
    for (rank, coordinate) in layout.mesh.coordinates() {
        let part = part_of(layout, shape, &coordinate)?;
        if !part.is_empty() && !listed.contains(&part) {
            missing.push(rank);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err((String::from("every shard of the mesh"), format!("no shard of {}", list_ranks(&missing))))
}

/// Returns the part of a DTensor that the rank at a coordinate has.
fn part_of(layout: &DTensorLayout, shape: &[u64], coordinate: &[u64]) -> Result<Region, (String, String)> {
    let part = local_shard(shape, layout.mesh.shape(), &layout.placements, coordinate);
    part.map(|part| part.bounds()).map_err(|error| (String::from("a dim_map that fits the shards"), error.to_string()))
}
