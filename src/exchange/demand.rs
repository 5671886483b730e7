//! Demand: which process needs what of a tensor.
//!
//! Counts elements of local tensors. Ranks are those of the processes that exchange, not those of either layout. Invariant:
//! what a process needs of a tile is listed once, in however many files it writes that.

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

/// What is to be done of the output files, and by whom: no byte is to be done by two.
#[derive(Debug)]
pub struct FileOwners {
    /// For each file the stretches of it, ascending.
    files: Vec<Vec<(Range<u64>, u32)>>,
}

impl FileOwners {
    /// Of what each rank has to do.
    #[must_use]
    pub fn new(files: &[OutputFile], todos: &[Extents]) -> Self {
        let mut owned: Vec<Vec<(Range<u64>, u32)>> = vec![Vec::new(); files.len()];
        for (rank, todo) in (0..).zip(todos) {
            todo.iter().for_each(|(file, range)| owned[file as usize].push((range, rank)));
        }
        owned.iter_mut().for_each(|stretches| stretches.sort_unstable_by_key(|(range, _)| range.start));
        Self { files: owned }
    }

    /// Who is to do what of a range of a file.
    fn of(&self, file: u32, range: Range<u64>) -> impl Iterator<Item = (u32, Range<u64>)> {
        let stretches = &self.files[file as usize];
        let first = stretches.partition_point(|(stretch, _)| stretch.end <= range.start);
        let met = stretches[first..].iter().take_while(move |(stretch, _)| stretch.start < range.end);
        met.map(move |(stretch, rank)| (*rank, stretch.start.max(range.start)..stretch.end.min(range.end)))
    }
}

/// A target tensor of which something is to be done.
pub struct Demand<'a> {
    pub tensor: &'a Reserved,
    pub source: &'a TensorEntry,
    pub tiles: Vec<Arc<WantedTile>>,
    /// The chunks of the source that hold the same, ascending by the first, which plans name.
    holders: SmallVec<[Holders; 2]>,
}

/// A tile that goes into one file or more.
#[derive(Debug)]
pub struct WantedTile {
    /// Of the source's tensor.
    pub fqn: Fqn,
    pub tile: Tile,
    /// What it gets of the source's summands; `None` where ranks hold values.
    pub share: Option<Arc<Share>>,
    /// Its chunks in the target's table.
    pub chunks: Chunks,
    /// What is needed of it, ascending and disjoint.
    pub needs: Needs,
    /// One a summand that it is made of.
    pub parts: Vec<SourceElements>,
    /// How they become one; `None` where one is taken as it is.
    pub reducer: Option<Reducer>,
}

/// Some elements of a tile, all of which the same ranks need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    pub elements: Range<u64>,
    pub ranks: Ranks,
}

/// There is one, where tensors are small.
pub type Chunks = SmallVec<[usize; 1]>;
pub type Needs = SmallVec<[Need; 1]>;

/// Ascending.
pub type Ranks = SmallVec<[u32; 4]>;

/// Where the elements of a tile are in the source, as if every chunk were contiguous.
#[derive(Debug)]
pub struct SourceElements {
    pub plan: TilePlan,
    /// One an overlap.
    pub strides: Vec<Dims>,
}

impl<'a> Demand<'a> {
    /// Prove and plan a tensor. What is to be done of it may be nothing.
    ///
    /// # Errors
    /// As [`Source::new`]; `Unsupported` where summands have no value.
    pub fn new(entry: &'a TensorEntry, tensor: &'a Reserved, owners: &FileOwners) -> Result<Self> {
        let source = SourceTensor::new(entry)?;
        let mut tiles: IndexMap<(Tile, Option<Arc<Share>>), Chunks, RandomState> = IndexMap::default();
        for index in (0..tensor.entry.chunks.len()).filter(|index| tensor.file_offset(*index).is_some()) {
            let share = tensor.shares.get(index).map(Arc::clone);
            tiles.entry((tensor.entry.chunks.tile(index), share)).or_default().push(index);
        }
        let whole = entry.partial_values.as_ref().map(|summands| Arc::new(summands.reduction.full_reduction()));
        let mut wanted = Vec::with_capacity(tiles.len());
        for ((tile, share), chunks) in tiles {
            let needs = needs(tensor, &chunks, owners);
            if needs.is_empty() {
                continue;
            }
            let share = share.or_else(|| whole.clone());
            let (parts, reducer) = match &share {
                None => (vec![SourceElements::new(entry, source.plan(&tile, 0, None))], None),
                Some(share) => {
                    let of =
                        |summand: &u64| SourceElements::new(entry, source.plan(&tile, *summand, share.within.as_ref()));
                    (share.partial_values.iter().map(of).collect(), Reducer::for_share(entry, share)?)
                }
            };
            wanted.push(Arc::new(WantedTile { fqn: entry.fqn.clone(), tile, share, chunks, needs, parts, reducer }));
        }
        let mut holders: SmallVec<[Holders; 2]> = source.holders().cloned().collect();
        holders.sort_unstable_by_key(|holders| holders[0]);
        Ok(Self { tensor, source: entry, tiles: wanted, holders })
    }

    /// The chunks that hold what this one holds, itself included.
    #[must_use]
    pub fn holders(&self, chunk: u32) -> &[u32] {
        let found = self.holders.binary_search_by_key(&chunk, |holders| holders[0]);
        &self.holders[found.expect("a chunk that plans name")]
    }

    /// Whether anybody needs anything.
    #[must_use]
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

/// Whole elements that hold what each rank has to do of chunks of one tile.
fn needs(tensor: &Reserved, chunks: &[usize], owners: &FileOwners) -> Needs {
    let itemsize = tensor.dtype().itemsize();
    let mut all: SmallVec<[(u32, Range<u64>); 4]> = SmallVec::new();
    for &chunk in chunks {
        let Some((file, offset)) = tensor.file_offset(chunk) else { continue };
        let owned = owners.of(file, offset..offset + tensor.chunk_bytes(chunk));
        all.extend(owned.map(|(rank, bytes)| {
            let elements = (bytes.start - offset) / itemsize..(bytes.end - offset).div_ceil(itemsize);
            (rank, elements)
        }));
    }
    // A small tensor is one rank's.
    if let [(rank, elements)] = &all[..] {
        return Needs::from_iter([Need { elements: elements.clone(), ranks: Ranks::from_elem(*rank, 1) }]);
    }
    let mut of_ranks: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
    all.into_iter().for_each(|(rank, elements)| of_ranks.entry(rank).or_default().push(elements));
    // Who begins or ends where.
    let mut turns: BTreeMap<u64, SmallVec<[(u32, Turn); 4]>> = BTreeMap::new();
    for (rank, mut ranges) in of_ranks {
        ranges.sort_unstable_by_key(|range| range.start);
        for range in joined(ranges) {
            turns.entry(range.start).or_default().push((rank, Turn::Begin));
            turns.entry(range.end).or_default().push((rank, Turn::End));
        }
    }
    let mut needs = Needs::new();
    let (mut ranks, mut start) = (BTreeSet::new(), 0);
    for (at, turns) in turns {
        if !ranks.is_empty() {
            needs.push(Need { elements: start..at, ranks: ranks.iter().copied().collect() });
        }
        start = at;
        for (rank, turn) in turns {
            match turn {
                Turn::Begin => ranks.insert(rank),
                Turn::End => ranks.remove(&rank),
            };
        }
    }
    needs
}

/// What happens to a rank's need at an element.
enum Turn {
    Begin,
    End,
}

/// Ascending ranges, those that touch as one.
fn joined(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::catalog::{Chunk, Dtype, FileLocation, TensorId};
    use crate::storage::FileId;

    #[test]
    fn needs_are_cut_where_ranks_begin_and_end() {
        // Replicas of 10 elements in two files, each of which two ranks do; an element is 4 bytes.
        let mut entry = TensorEntry::new("t".into(), Dtype::F32, [10].as_slice().into());
        let mut files = Vec::new();
        for file in 0..2 {
            let mut output = OutputFile::new(format!("out{file}"));
            let offset = output.push_payload(40);
            let location = FileLocation::Bytes { file: FileId(file), offset };
            let tile = Tile::new([std::iter::once(0..10).collect()]);
            entry.chunks.push(Chunk { tile, location, strides: None, rank: None });
            files.push(output);
        }
        let todo = |stretches: &[(u32, Range<u64>)]| {
            let mut todo = Extents::new();
            stretches.iter().for_each(|(file, range)| todo.insert(*file, range.clone()));
            todo
        };
        let todos = [todo(&[(0, 0..18)]), todo(&[(0, 18..40), (1, 0..8)]), todo(&[(1, 8..16), (1, 16..36)])];
        let owners = FileOwners::new(&files, &todos);
        let tensor = Reserved::new(TensorId(0), entry);
        let found = needs(&tensor, &[0, 1], &owners);
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
