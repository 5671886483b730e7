//! Proves that the chunks of a tensor cover it exactly once.
//!
//! Shapes and offsets count elements. Replicas have equal tiles, so chunks with equal tiles are counted as one. The
//! distinct tiles must hold every element of the tensor exactly once. If ranks hold partial values, the chunks of each
//! partial value are checked separately. Invariant: the planner finds chunks through the [`Tiling`] that this check
//! returns, so it cannot plan a tensor whose coverage was not checked.
//!
//! PyTorch has the same check at save time: `_validate_global_plan` in
//! `torch/distributed/checkpoint/default_planner.py`. PyTorch has no such check at load time: elements in a gap
//! silently keep their old values.

use std::collections::HashSet;

use foldhash::fast::RandomState;
use indexmap::IndexMap;
use smallvec::SmallVec;

use super::{Fqn, TensorEntry};
use crate::error::{CatalogError, CoverageKind, Error, Result};
use crate::layout::partial::PartialReduction;
use crate::layout::{Cover, CoverError, Rank, Tile};
use crate::name_list::numbered;

/// The indices, in ascending order, of all chunks with the same tile: one chunk and its replicas.
pub type Holders = SmallVec<[u32; 4]>;

/// A list of tiles. Most tensors have one tile, which is stored without allocation.
type Tiles = SmallVec<[Tile; 1]>;

/// The distinct tiles of a tensor or of one partial value, the chunks of each tile, and the proof that the tiles cover
/// every element exactly once.
#[derive(Debug)]
pub struct Tiling {
    pub tiles: Tiles,
    /// For each tile, the chunks that hold the tile: one chunk and its replicas. A plan names the first chunk; an exchange
    /// between processes may read a replica instead.
    pub holders: SmallVec<[Holders; 1]>,
    pub cover: Cover,
}

impl TensorEntry {
    /// Groups replicas and checks that the distinct tiles cover every element of the tensor exactly once. Returns one
    /// tiling for each partial value, or a single tiling if the tensor has no partial values.
    ///
    /// # Errors
    /// `Coverage` with the first invalid region.
    pub fn tilings(&self) -> Result<Vec<Tiling>> {
        let is_partial = self.sharding.as_ref().is_some_and(|sharding| sharding.shared.is_partial());
        assert!(self.partial_values.is_some() || !is_partial, "{}: partial values without a reduction", self.fqn);
        let chunks = 0..u32::try_from(self.chunks.len()).expect("fewer than 2^32 chunks a tensor");
        let Some(partial) = self.partial_values.as_ref().filter(|_| self.numel() > 0) else {
            return Ok(vec![self.tiling(chunks, None)?]);
        };
        // The mesh in a damaged file may be much larger than the number of chunks, so the code tests membership in a
        // set.
        let present: HashSet<u64> = partial.by_chunk.iter().copied().collect();
        if let Some(missing) = (0..partial.reduction.count()).find(|number| !present.contains(number)) {
            return self.tiling(0..0, Some((&partial.reduction, missing))).map(|tiling| vec![tiling]);
        }
        let mut of_each: Vec<Vec<u32>> = vec![Vec::new(); present.len()];
        for (chunk, &number) in chunks.zip(&partial.by_chunk) {
            of_each[usize::try_from(number).expect("below the number of chunks")].push(chunk);
        }
        (0..).zip(of_each).map(|(number, chunks)| self.tiling(chunks, Some((&partial.reduction, number)))).collect()
    }

    /// Checks that `chunks` hold every element of the tensor exactly once. If `partial_value` is given, `chunks` are
    /// the chunks of that partial value.
    fn tiling(
        &self,
        chunks: impl IntoIterator<Item = u32, IntoIter: ExactSizeIterator>,
        partial_value: Option<(&PartialReduction, u64)>,
    ) -> Result<Tiling> {
        let chunks = chunks.into_iter();
        let (tiles, holders) = self.distinct(chunks);
        Cover::prove(&self.shape, &tiles)
            .map_err(|error| self.coverage_error(&error, &holders, partial_value))
            .map(|cover| Tiling { tiles, holders, cover })
    }

    /// Returns the distinct non-empty tiles of `chunks`, and for each tile the chunks that hold it.
    fn distinct(&self, chunks: impl ExactSizeIterator<Item = u32>) -> (Tiles, SmallVec<[Holders; 1]>) {
        let count = chunks.len();
        let tiles = chunks.map(|chunk| (self.chunks.tile(chunk as usize), chunk)).filter(|(tile, _)| !tile.is_empty());
        if count == 1 {
            return tiles.map(|(tile, chunk)| (tile, Holders::from_elem(chunk, 1))).unzip();
        }
        let mut known: IndexMap<Tile, Holders, RandomState> =
            IndexMap::with_capacity_and_hasher(count, RandomState::default());
        tiles.for_each(|(tile, chunk)| known.entry(tile).or_default().push(chunk));
        known.into_iter().unzip()
    }

    fn coverage_error(
        &self,
        error: &CoverError,
        holders: &[Holders],
        partial_value: Option<(&PartialReduction, u64)>,
    ) -> Error {
        let shape = format!("shape {:?}", self.shape.as_slice());
        let shape = partial_value
            .map_or(shape.clone(), |(of, number)| format!("{}, {shape}", of.describe_partial_value(number)));
        let (kind, region, detail) = match error {
            CoverError::Gap { region } => {
                let detail = format!("no chunk holds this part of the tensor ({shape})");
                (CoverageKind::Gap, region.to_string(), detail)
            }
            CoverError::Overlap { first, second, region } => {
                let (first, second) = (self.holder_name(holders, *first), self.holder_name(holders, *second));
                (
                    CoverageKind::Overlap,
                    region.to_string(),
                    format!("both {first} and {second} hold this part of the tensor"),
                )
            }
            CoverError::OutOfBounds { tile, region } => {
                let holder = self.holder_name(holders, *tile);
                (CoverageKind::OutOfBounds, region.to_string(), format!("{holder} reaches beyond {shape}"))
            }
            CoverError::Ndim { tile, expected, found } => {
                let holder = self.holder_name(holders, *tile);
                let detail = format!("{holder} has {found} dims, expected {expected} ({shape})");
                (CoverageKind::OutOfBounds, String::from("[]"), detail)
            }
        };
        let hint = match kind {
            CoverageKind::Gap => "check that the file of every rank is there and that the save finished",
            CoverageKind::Overlap | CoverageKind::OutOfBounds => {
                "check that all files come from the same save, and that the job that saved them is correct"
            }
        };
        CatalogError::Coverage { fqn: self.fqn.to_string(), kind, region, detail, hint: Some(hint.into()) }.into()
    }

    fn holder_name(&self, holders: &[Holders], tile: usize) -> String {
        self.chunk_name(holders[tile][0])
    }

    /// Returns the name of a chunk for messages: its rank, or its index if the format does not record ranks.
    pub fn chunk_name(&self, chunk: u32) -> String {
        match self.chunks.rank(chunk as usize) {
            Some(rank) => format!("rank {rank}"),
            None => format!("chunk {chunk}"),
        }
    }
}

/// Formats ranks for messages: `ranks 0, 1, 4`.
pub fn list_ranks(ranks: &[Rank]) -> String {
    numbered("rank", "ranks", ranks.iter().map(|rank| rank.0))
}

impl Fqn {
    /// Returns the error for two ranks whose files describe one tensor differently, for example with different shapes.
    pub fn disagreement(&self, what: &'static str, between: impl Into<String>, detail: impl Into<String>) -> Error {
        Error::Catalog(CatalogError::Conflict {
            fqn: self.to_string(),
            what,
            between: between.into(),
            detail: detail.into(),
            hint: Some("check that all the files come from one save of one job".into()),
        })
    }
}
