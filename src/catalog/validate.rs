//! The proof that the chunks of a tensor tile it.
//!
//! Replicas overlap by intent: chunks of equal tiles are grouped and one holder of each is picked. The picks must then
//! cover every element exactly once. The proof is the look-up structure of the planner, so a tensor that was not
//! proven cannot be planned. Where ranks hold summands, those of one summand must do that, and so for every one.
//!
//! Source of the rule: `torch/distributed/checkpoint/default_planner.py` (`_validate_global_plan`) checks the same at
//! save time; nothing checks it at load time, where holes keep old values in silence.

use std::collections::HashSet;

use foldhash::fast::RandomState;
use indexmap::IndexMap;
use smallvec::SmallVec;

use super::{Fqn, TensorEntry};
use crate::error::{CatalogError, CoverageKind, Error, Result};
use crate::layout::partial::PartialReduction;
use crate::layout::{Cover, CoverError, Rank, Tile};
use crate::name_list::numbered;

/// Chunks of one tile, in the order of the table.
pub type Holders = SmallVec<[u32; 4]>;

/// Most tensors have one, which needs no allocation.
type Tiles = SmallVec<[Tile; 1]>;

/// The distinct tiles of a tensor, or of one of its summands, who holds each, and the proof that they tile it.
#[derive(Debug)]
pub struct Tiling {
    pub tiles: Tiles,
    /// For each tile its chunks; the first is the one to read.
    pub holders: SmallVec<[Holders; 1]>,
    pub cover: Cover,
}

impl TensorEntry {
    /// Group replicas and prove that the rest tiles the tensor: one tiling a summand, in their order, and one where
    /// ranks hold values.
    ///
    /// # Errors
    /// `Coverage` naming the first bad region.
    pub fn tilings(&self) -> Result<Vec<Tiling>> {
        let is_partial = self.sharding.as_ref().is_some_and(|sharding| sharding.shared.is_partial());
        assert!(self.summands.is_some() || !is_partial, "{}: summands that pass for replicas", self.fqn);
        let chunks = 0..u32::try_from(self.chunks.len()).expect("fewer than 2^32 chunks a tensor");
        let Some(summands) = self.summands.as_ref().filter(|_| self.numel() > 0) else {
            return Ok(vec![self.tile(chunks, None)?]);
        };
        // Of a mesh that a file makes up, few ranks are there.
        let held: HashSet<u64> = summands.of_chunk.iter().copied().collect();
        if let Some(missing) = (0..summands.reduction.count()).find(|number| !held.contains(number)) {
            return self.tile(0..0, Some((&summands.reduction, missing))).map(|tiling| vec![tiling]);
        }
        let mut of_each: Vec<Vec<u32>> = vec![Vec::new(); held.len()];
        for (chunk, &summand) in chunks.zip(&summands.of_chunk) {
            of_each[usize::try_from(summand).expect("below the number of chunks")].push(chunk);
        }
        (0..).zip(of_each).map(|(number, chunks)| self.tile(chunks, Some((&summands.reduction, number)))).collect()
    }

    /// The proof for some of the chunks, which are those of a summand where it is named.
    fn tile(
        &self,
        chunks: impl IntoIterator<Item = u32, IntoIter: ExactSizeIterator>,
        summand: Option<(&PartialReduction, u64)>,
    ) -> Result<Tiling> {
        let chunks = chunks.into_iter();
        let (tiles, holders) = self.distinct(chunks);
        Cover::prove(&self.shape, &tiles)
            .map_err(|error| self.coverage_error(&error, &holders, summand))
            .map(|cover| Tiling { tiles, holders, cover })
    }

    /// The distinct tiles of some of the chunks that are not empty, and who holds each.
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
        summand: Option<(&PartialReduction, u64)>,
    ) -> Error {
        let shape = format!("shape {:?}", self.shape.as_slice());
        let shape = summand.map_or(shape.clone(), |(of, number)| format!("{}, {shape}", of.name(number)));
        let (kind, region, detail) = match error {
            CoverError::Gap { region } => {
                let detail = format!("no chunk holds this part of {shape}");
                (CoverageKind::Gap, region.to_string(), detail)
            }
            CoverError::Overlap { first, second, region } => {
                let (first, second) = (self.holder_name(holders, *first), self.holder_name(holders, *second));
                (CoverageKind::Overlap, region.to_string(), format!("held by both {first} and {second}"))
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
            CoverageKind::Gap => "a rank's file or a chunk of it is missing, or the save did not finish",
            CoverageKind::Overlap | CoverageKind::OutOfBounds => {
                "the files belong to different saves, or the checkpoint was written by a job with a bug"
            }
        };
        CatalogError::Coverage { fqn: self.fqn.to_string(), kind, region, detail, hint: Some(hint.into()) }.into()
    }

    fn holder_name(&self, holders: &[Holders], tile: usize) -> String {
        self.chunk_name(holders[tile][0])
    }

    /// Who holds a chunk, for messages: its rank, or its number where the format does not tell.
    #[must_use]
    pub fn chunk_name(&self, chunk: u32) -> String {
        match self.chunks.rank(chunk as usize) {
            Some(rank) => format!("rank {rank}"),
            None => format!("chunk {chunk}"),
        }
    }
}

/// The ranks of a list of chunks, for messages: `ranks 0, 1, 4`.
#[must_use]
pub fn list_ranks(ranks: &[Rank]) -> String {
    numbered("rank", "ranks", ranks.iter().map(|rank| rank.0))
}

impl Fqn {
    /// The error for two ranks that describe one tensor differently.
    #[must_use]
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
