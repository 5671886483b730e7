//! Builds the catalog entries of tensors from the entries of all ranks.

use std::collections::HashSet;

use super::data::DataFiles;
use super::manifest::{DTensorLayout, StoredShard};
use crate::catalog::{Chunk, Fqn, TensorEntry, checked_len_bytes, list_ranks};
use crate::error::{CatalogError, Error, Result};
use crate::layout::{Dims, Rank, Region, Tile};

/// Adds chunks to a tensor. `rank` is the rank that stores the chunks, if other ranks store further copies of the
/// tensor.
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
        entry.chunks.push(Chunk { tile: Tile::from_region(region), location, strides: None, rank });
    }
    Ok(())
}

/// The shards of one rank, and the layout of the tensor if it is a DTensor.
pub type RankShards<'a> = (Rank, &'a [StoredShard], Option<&'a DTensorLayout>);

/// Builds the entry of a ShardedTensor or DTensor. The manifest does not have its shape: the shape is the smallest one
/// that contains all shards.
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
    check_ranks(ranks).map_err(|(expected, found)| wrong(expected, found))?;
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

/// Checks that every shard of a DTensor is listed by at least one of the ranks that have this shard. The shape of the
/// tensor follows from its shards, so the loss of the last shard would not show otherwise.
fn check_ranks(ranks: &[RankShards<'_>]) -> Result<(), (String, String)> {
    let layouts = || ranks.iter().filter_map(|(_, _, layout)| *layout);
    let Some(layout) = layouts().next() else { return Ok(()) };
    let same = |other: &DTensorLayout| other.mesh == layout.mesh && other.sharded_dims == layout.sharded_dims;
    if layouts().count() != ranks.len() || !layouts().all(same) {
        return Err((String::from("one mesh and dim_map on all ranks"), String::from("different ones")));
    }
    let of_dims = |rank: Rank| {
        let at = layout.mesh.coordinate(rank)?;
        Some(layout.sharded_dims.iter().map(|dim| at[*dim]).collect::<Vec<u64>>())
    };
    let mut present = HashSet::new();
    for (rank, ..) in ranks {
        let Some(at) = of_dims(*rank) else {
            return Err((String::from("shards of the ranks of the mesh"), format!("a shard of rank {rank}")));
        };
        present.insert(at);
    }
    let is_missing = |rank: &&Rank| of_dims(**rank).is_some_and(|at| !present.contains(&at));
    let missing: Vec<Rank> = layout.mesh.ranks().iter().filter(is_missing).copied().collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err((String::from("every shard of the mesh"), format!("no shard of {}", list_ranks(&missing))))
}
