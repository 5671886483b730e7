//! Demand: which process needs which elements of a tensor. Ranges count elements of local tensors (`DTensor.to_local()`
//! in PyTorch). A `rank` in this file is the number of a dtshard process, not a rank of the source or target layout.
//! Invariant: if a process writes a tile to several files, the elements of the tile are listed once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use foldhash::fast::RandomState;
use indexmap::IndexMap;
use smallvec::SmallVec;

use crate::catalog::{Fqn, Holders, OutputFile, Reserved, TensorEntry, contiguous_strides};
use crate::error::Result;
use crate::exec::Extents;
use crate::exec::reduce::Reducer;
use crate::layout::partial::Share;
use crate::layout::{Dims, Tile};
use crate::plan::{SourceTensor, TilePlan};

/// For each byte range of the output files, the process that writes it (its owner). No byte has two owners.
#[derive(Debug)]
pub struct FileOwners {
    /// For each output file, its byte ranges in ascending order, each with the process that writes it.
    files: Vec<Vec<(Range<u64>, u32)>>,
}

impl FileOwners {
    /// Collects, for each byte range, the process that writes it. `todos` has the byte ranges that each process writes.
    #[must_use]
    pub fn new(files: &[OutputFile], todos: &[Extents]) -> Self {
        let mut owned: Vec<Vec<(Range<u64>, u32)>> = vec![Vec::new(); files.len()];
        for (rank, todo) in (0..).zip(todos) {
            todo.iter().for_each(|(file, range)| owned[file as usize].push((range, rank)));
        }
        owned.iter_mut().for_each(|ranges| ranges.sort_unstable_by_key(|(range, _)| range.start));
        Self { files: owned }
    }

    /// Splits a byte range of a file into subranges with one owner each: the process that writes the subrange. Returns
    /// each subrange with its owner. Subranges that no process writes are left out.
    fn owners_of(&self, file: u32, range: Range<u64>) -> impl Iterator<Item = (u32, Range<u64>)> {
        let ranges = &self.files[file as usize];
        let first = ranges.partition_point(|(owned, _)| owned.end <= range.start);
        let overlapping = ranges[first..].iter().take_while(move |(owned, _)| owned.start < range.end);
        overlapping.map(move |(owned, rank)| (*rank, owned.start.max(range.start)..owned.end.min(range.end)))
    }
}

/// A target tensor with the elements that each process needs.
pub struct Demand<'a> {
    /// The target tensor, laid out in the output files.
    pub tensor: &'a Reserved,
    /// The entry of the source tensor in the catalog.
    pub source: &'a TensorEntry,
    /// The tiles from which at least one process needs elements.
    pub tiles: Vec<Arc<NeededTile>>,
    /// Groups of source chunks that hold the same elements (replicas), in ascending order of the first chunk. A tile
    /// plan names only the first chunk of each group.
    holders: SmallVec<[Holders; 2]>,
}

/// A target tile that is written to one or more files, with the processes that need its elements.
#[derive(Debug)]
pub struct NeededTile {
    /// The name of the source tensor.
    pub fqn: Fqn,
    /// The position of the tile in the tensor.
    pub tile: Tile,
    /// The partial values from which the tile is computed, and the divisor; `None` if the source values are copied.
    pub share: Option<Arc<Share>>,
    /// The indices of the target chunks that have this tile.
    pub chunks: Chunks,
    /// The ranges of elements that processes need, in ascending order and without overlaps.
    pub needs: Needs,
    /// For each partial value in `share`, the source chunks that contain it. If `share` is `None`, the list has one
    /// entry: the source chunks that contain the values.
    pub sources: Vec<SourceElements>,
    /// The reduction of the partial values; `None` if nothing is reduced or divided.
    pub reducer: Option<Reducer>,
}

/// A range of a tile's elements, and the processes that need these elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The elements, as a range of indices in the tile's local tensor.
    pub elements: Range<u64>,
    /// The processes that need all of these elements.
    pub ranks: Ranks,
}

/// Indices of target chunks with equal elements (replicas). A small tensor usually has one target chunk.
pub type Chunks = SmallVec<[usize; 1]>;
/// The ranges of a tile's elements that processes need. A small tensor usually has one range.
pub type Needs = SmallVec<[Need; 1]>;

/// Numbers of dtshard processes, in ascending order.
pub type Ranks = SmallVec<[u32; 4]>;

/// The source chunks that contain the elements of a tile, and the strides with which these chunks are read.
#[derive(Debug)]
pub struct SourceElements {
    /// The overlaps of the tile with source chunks.
    pub plan: TilePlan,
    /// For each overlap in `plan`, the strides of its source chunk as a contiguous tensor.
    pub strides: Vec<Dims>,
}

impl<'a> Demand<'a> {
    /// Checks that the source chunks cover the tensor, and plans the tiles of the tensor. If no process needs any
    /// element of the tensor, [`Self::is_empty`] of the result returns true.
    ///
    /// # Errors
    /// Returns the errors of [`SourceTensor::new`], and `Unsupported` if the partial values cannot be reduced.
    pub fn new(entry: &'a TensorEntry, tensor: &'a Reserved, owners: &FileOwners) -> Result<Self> {
        let source = SourceTensor::new(entry)?;
        let mut tiles: IndexMap<(Tile, Option<Arc<Share>>), Chunks, RandomState> = IndexMap::default();
        for index in (0..tensor.entry.chunks.len()).filter(|index| tensor.file_offset(*index).is_some()) {
            let share = tensor.shares.get(index).map(Arc::clone);
            tiles.entry((tensor.entry.chunks.tile(index), share)).or_default().push(index);
        }
        let whole =
            entry.partial_values.as_ref().map(|partial_values| Arc::new(partial_values.reduction.full_reduction()));
        let mut needed_tiles = Vec::with_capacity(tiles.len());
        for ((tile, share), chunks) in tiles {
            let needs = find_needs(tensor, &chunks, owners);
            if needs.is_empty() {
                continue;
            }
            let share = share.or_else(|| whole.clone());
            let (sources, reducer) = match &share {
                None => (vec![SourceElements::new(entry, source.plan(&tile, 0, None))], None),
                Some(share) => {
                    let of =
                        |partial: &u64| SourceElements::new(entry, source.plan(&tile, *partial, share.within.as_ref()));
                    (share.partial_values.iter().map(of).collect(), Reducer::for_share(entry, share)?)
                }
            };
            needed_tiles.push(Arc::new(NeededTile {
                fqn: entry.fqn.clone(),
                tile,
                share,
                chunks,
                needs,
                sources,
                reducer,
            }));
        }
        let mut holders: SmallVec<[Holders; 2]> = source.holders().cloned().collect();
        holders.sort_unstable_by_key(|holders| holders[0]);
        Ok(Self { tensor, source: entry, tiles: needed_tiles, holders })
    }

    /// Returns all source chunks that hold the same elements as `chunk` (its replicas), including `chunk`. `chunk` must
    /// be the first of them.
    pub fn holders(&self, chunk: u32) -> &[u32] {
        let found = self.holders.binary_search_by_key(&chunk, |holders| holders[0]);
        &self.holders[found.expect("tile plans name the first chunk of a group")]
    }

    /// Returns true if no process needs any element of the tensor.
    pub fn is_empty(&self) -> bool {
        self.tiles.is_empty()
    }
}

impl SourceElements {
    fn new(entry: &TensorEntry, plan: TilePlan) -> Self {
        let sizes = |chunk: u32| entry.chunks.sizes(chunk as usize);
        let strides = plan.overlaps.iter().map(|overlap| contiguous_strides(&sizes(overlap.chunk))).collect();
        Self { plan, strides }
    }
}

/// Finds the elements of a tile that each process needs: the elements whose bytes the process writes. `chunks` are the
/// target chunks that have this tile. If a process writes only some bytes of an element, it needs the entire element.
fn find_needs(tensor: &Reserved, chunks: &[usize], owners: &FileOwners) -> Needs {
    let itemsize = tensor.dtype().itemsize();
    let mut all: SmallVec<[(u32, Range<u64>); 4]> = SmallVec::new();
    for &chunk in chunks {
        let Some((file, offset)) = tensor.file_offset(chunk) else { continue };
        let owned = owners.owners_of(file, offset..offset + tensor.chunk_bytes(chunk));
        all.extend(owned.map(|(rank, bytes)| {
            let elements = (bytes.start - offset) / itemsize..(bytes.end - offset).div_ceil(itemsize);
            (rank, elements)
        }));
    }
    // Most small tensors are written by one rank, so there is only one range.
    if let [(rank, elements)] = &all[..] {
        return Needs::from_iter([Need { elements: elements.clone(), ranks: Ranks::from_elem(*rank, 1) }]);
    }
    let mut rank_ranges: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
    all.into_iter().for_each(|(rank, elements)| rank_ranges.entry(rank).or_default().push(elements));
    // For each element index, the ranks whose ranges begin or end at that element.
    let mut boundaries: BTreeMap<u64, SmallVec<[(u32, Boundary); 4]>> = BTreeMap::new();
    for (rank, mut ranges) in rank_ranges {
        ranges.sort_unstable_by_key(|range| range.start);
        for range in merge_adjacent(ranges) {
            boundaries.entry(range.start).or_default().push((rank, Boundary::Begin));
            boundaries.entry(range.end).or_default().push((rank, Boundary::End));
        }
    }
    let mut needs = Needs::new();
    let (mut ranks, mut start) = (BTreeSet::new(), 0);
    for (at, boundaries) in boundaries {
        if !ranks.is_empty() {
            needs.push(Need { elements: start..at, ranks: ranks.iter().copied().collect() });
        }
        start = at;
        for (rank, boundary) in boundaries {
            match boundary {
                Boundary::Begin => ranks.insert(rank),
                Boundary::End => ranks.remove(&rank),
            };
        }
    }
    needs
}

/// The start or the end of a range of elements that a process needs.
enum Boundary {
    Begin,
    End,
}

/// Merges adjacent and overlapping ranges in a list that is sorted by start.
fn merge_adjacent(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::catalog::{Chunk, Dtype, FileLocation, TensorId};
    use crate::storage::FileId;

    #[test]
    fn overlapping_ranks_split_needs() {
        // Replicas of 10 elements of 4 bytes in two files; two ranks write each file.
        let mut entry = TensorEntry::new("t".into(), Dtype::F32, [10].as_slice().into());
        let mut files = Vec::new();
        for file in 0..2 {
            let mut output = OutputFile::new(format!("out{file}"));
            let offset = output.push_payload(40);
            let location = FileLocation::Bytes { file: FileId(file), offset };
            let tile = Tile::new([std::iter::once(0..10).collect()]);
            entry.chunks.push(Chunk { tile, location, strides: None, rank: None, view: None });
            files.push(output);
        }
        let todo = |ranges: &[(u32, Range<u64>)]| {
            let mut todo = Extents::new();
            ranges.iter().for_each(|(file, range)| todo.insert(*file, range.clone()));
            todo
        };
        let todos = [todo(&[(0, 0..18)]), todo(&[(0, 18..40), (1, 0..8)]), todo(&[(1, 8..16), (1, 16..36)])];
        let owners = FileOwners::new(&files, &todos);
        let tensor = Reserved::new(TensorId(0), entry);
        let found = find_needs(&tensor, &[0, 1], &owners);
        let need = |elements, ranks| Need { elements, ranks };
        assert_eq!(
            found[..],
            [
                need(0..2, smallvec![0, 1]),
                need(2..4, smallvec![0, 2]),
                need(4..5, smallvec![0, 1, 2]),
                need(5..9, smallvec![1, 2]),
                need(9..10, smallvec![1]),
            ]
        );
    }
}
