//! Demand: which process needs what of a tensor.
//!
//! Counts elements of local tensors. Ranks are those of the processes that exchange, not those of either layout. Invariant:
//! what a process needs of a tile is listed once, in however many files it writes that.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use indexmap::IndexMap;

use crate::catalog::{Holders, OutputFile, Reserved, TensorEntry, contiguous_strides};
use crate::error::Result;
use crate::exec::Extents;
use crate::layout::partial::Share;
use crate::layout::{Dims, Tile};
use crate::plan::{Source, TilePlan};

/// What is to be done of the output files, and by whom: no byte is to be done by two.
#[derive(Debug)]
pub struct Owners {
    /// For each file the stretches of it, ascending.
    files: Vec<Vec<(Range<u64>, u32)>>,
}

impl Owners {
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
    pub source: Source<'a>,
    pub tiles: Vec<Arc<Wanted>>,
    /// The chunks of the source that hold the same, by the one that plans name.
    holders: HashMap<u32, Holders>,
}

/// A tile that goes into one file or more.
#[derive(Debug)]
pub struct Wanted {
    pub tile: Tile,
    /// What it gets of the source's summands; `None` where ranks hold values.
    pub share: Option<Arc<Share>>,
    /// Its chunks in the target's table.
    pub chunks: Vec<usize>,
    /// What ranks need of it, in the order of ranks.
    pub needs: Vec<(u32, Range<u64>)>,
    /// One a summand that it is made of.
    pub parts: Vec<Planned>,
}

/// Where the elements of a tile are in the source, as if every chunk were contiguous.
#[derive(Debug)]
pub struct Planned {
    pub plan: TilePlan,
    /// One an overlap.
    pub strides: Vec<Dims>,
}

impl<'a> Demand<'a> {
    /// Prove and plan a tensor. What is to be done of it may be nothing.
    ///
    /// # Errors
    /// As [`Source::new`].
    pub fn new(entry: &'a TensorEntry, tensor: &'a Reserved, owners: &Owners) -> Result<Self> {
        let source = Source::new(entry)?;
        let mut tiles: IndexMap<(Tile, Option<Arc<Share>>), Vec<usize>> = IndexMap::new();
        for index in (0..tensor.entry.chunks.len()).filter(|index| tensor.place(*index).is_some()) {
            let share = tensor.shares.get(index).map(Arc::clone);
            tiles.entry((tensor.entry.chunks.tile(index), share)).or_default().push(index);
        }
        let whole = entry.summands.as_ref().map(|summands| Arc::new(summands.reduction.whole()));
        let wanted = tiles.into_iter().filter_map(|((tile, share), chunks)| {
            let needs = needs(tensor, &chunks, owners);
            if needs.is_empty() {
                return None;
            }
            let share = share.or_else(|| whole.clone());
            let parts = match &share {
                None => vec![Planned::new(source.plan(&tile, 0, None))],
                Some(share) => {
                    let of = |summand: &u64| Planned::new(source.plan(&tile, *summand, share.within.as_ref()));
                    share.summands.iter().map(of).collect()
                }
            };
            Some(Arc::new(Wanted { tile, share, chunks, needs, parts }))
        });
        let tiles = wanted.collect();
        let holders = source.holders().map(|holders| (holders[0], holders.clone())).collect();
        Ok(Self { tensor, source, tiles, holders })
    }

    /// The chunks that hold what this one holds, itself included.
    #[must_use]
    pub fn holders(&self, chunk: u32) -> &[u32] {
        &self.holders[&chunk]
    }

    /// Whether anybody needs anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tiles.is_empty()
    }
}

impl Planned {
    fn new(plan: TilePlan) -> Self {
        let strides = plan.overlaps.iter().map(|overlap| contiguous_strides(&overlap.source_sizes)).collect();
        Self { plan, strides }
    }
}

/// Whole elements that hold what each rank has to do of chunks of one tile.
fn needs(tensor: &Reserved, chunks: &[usize], owners: &Owners) -> Vec<(u32, Range<u64>)> {
    let itemsize = tensor.dtype().itemsize();
    let mut of_ranks: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
    for &chunk in chunks {
        let Some((file, offset)) = tensor.place(chunk) else { continue };
        for (rank, bytes) in owners.of(file, offset..offset + tensor.chunk_bytes(chunk)) {
            let elements = (bytes.start - offset) / itemsize..(bytes.end - offset).div_ceil(itemsize);
            of_ranks.entry(rank).or_default().push(elements);
        }
    }
    let joined = of_ranks.into_iter().flat_map(|(rank, mut ranges)| {
        ranges.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<(u32, Range<u64>)> = Vec::new();
        for range in ranges {
            match joined.last_mut() {
                Some((_, last)) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => joined.push((rank, range)),
            }
        }
        joined
    });
    joined.collect()
}
