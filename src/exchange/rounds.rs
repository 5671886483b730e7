//! Rounds: the order in which tensors go through the processes, in steps that fit memory.
//!
//! Every process makes the same rounds from the same catalogs, so nobody has to be asked. A round takes as many elements
//! as fit the bound of every process: many small tensors, or a few ranges of a large one. Those begin at equal distances,
//! one a process, so that all have something to do whether rows or columns are whose: of
//!
//! ```text
//!     S(0) to S(0)     each range is one reader's and one writer's, which are another pair for each
//!     S(0) to S(1)     each range is one reader's, and all writers take some of it
//!     S(1) to S(0)     all readers have some of each range, which is one writer's
//! ```
//!
//! Counts elements, and bytes where a name says so. Invariant: the ranges of all rounds together are all elements, once.

use std::ops::Range;

use super::demand::FileOwners;
use super::load::{Load, Loads};
use super::prefetch::{PlannedUnit, Prefetch};
use super::readers::Topology;
use super::transfer_plan::{MOST_COPIES, SizedPlan, TransferPlan};
use super::transfers::Unit;
use crate::catalog::{Catalog, Reserved};
use crate::error::Result;

/// Memory of the plans of tensors that are looked at and of rounds that are being made, staged, moved and written. A strided
/// copy is one as a transfer, in the maps that choose its reader, as a move and as a slot with its payload, in lists that
/// have grown to hold it, and a draft is a proof, a plan of each tile and its targets.
pub const PLAN_BYTES: u64 = 4 * MOST_COPIES as u64 * 1024;

/// What is moved in one go: whole tensors, or ranges of one.
pub struct Round<'a> {
    pub drafts: Vec<TransferPlan<'a>>,
    /// By rank.
    pub loads: Vec<Load>,
    /// Whether the next round is of other tensors.
    pub ends_whole: bool,
}

/// An iterator over the rounds of a conversion.
pub struct Rounds<'a> {
    tensors: Prefetch<'a>,
    parties: &'a Topology,
    bucket_bytes: u64,
    /// Units of the tensor that was begun, the next one last.
    rest: Vec<Unit<'a>>,
    /// What did not fit the round before.
    left: Option<SizedPlan<'a>>,
}

impl<'a> Rounds<'a> {
    /// `bucket_bytes` is how much each process reads, sends, receives and unpacks at most in a round, both of its hops
    /// together; what it tells others lies with what it receives, and summands with what is unpacked.
    #[must_use]
    pub fn new(
        catalog: &'a Catalog,
        tensors: &'a [Reserved],
        owners: &'a FileOwners,
        parties: &'a Topology,
        bucket_bytes: u64,
    ) -> Self {
        let tensors = Prefetch::new(catalog, tensors, owners, parties);
        Self { tensors, parties, bucket_bytes, rest: Vec::new(), left: None }
    }

    /// The moves of the next unit that fits a round of its own.
    fn draft(&mut self) -> Result<Option<SizedPlan<'a>>> {
        if let Some(left) = self.left.take() {
            return Ok(Some(left));
        }
        loop {
            let PlannedUnit { unit, draft } = match self.rest.pop() {
                Some(unit) => PlannedUnit::new(unit, self.parties)?,
                None => match self.tensors.next() {
                    Some(drafted) => drafted?,
                    None => return Ok(None),
                },
            };
            let ranks = u64::from(self.parties.size());
            let halves = match draft {
                Some(weighed) if self.fits(weighed.loads.longest(), weighed.draft.copies) => return Ok(Some(weighed)),
                Some(weighed) => less(weighed.draft.unit, ranks),
                None => fewer(&unit).or_else(|| less(unit.clone(), ranks)),
            };
            match halves {
                Some((first, second)) => self.rest.extend([second, first]),
                // As small as it can be.
                None => return TransferPlan::weighed(unit, self.parties, usize::MAX),
            }
        }
    }

    fn fits(&self, longest: u64, copies: usize) -> bool {
        copies <= MOST_COPIES && longest <= self.bucket_bytes
    }

    fn next_round(&mut self) -> Result<Option<Round<'a>>> {
        let mut drafts: Vec<TransferPlan<'_>> = Vec::new();
        let mut sum = Loads::none(self.parties.nodes.len());
        let mut copies = 0;
        while let Some(SizedPlan { draft, loads }) = self.draft()? {
            let goes_along = |last: &TransferPlan<'_>| {
                let is_same = last.unit.number == draft.unit.number;
                is_same || last.unit.is_whole() && draft.unit.is_whole()
            };
            sum.add(&loads);
            copies += draft.copies;
            if drafts.last().is_some_and(|last| !goes_along(last) || !self.fits(sum.longest(), copies)) {
                sum.take_away(&loads);
                self.left = Some(SizedPlan { draft, loads });
                break;
            }
            drafts.push(draft);
        }
        let left = self.left.as_ref().map(|left| left.draft.unit.number);
        let next = left.or(self.rest.last().map(|unit| unit.number));
        let Some(last) = drafts.last().map(|last| last.unit.number) else { return Ok(None) };
        Ok(Some(Round { drafts, loads: sum.into_ranks(), ends_whole: next != Some(last) }))
    }
}

impl<'a> Iterator for Rounds<'a> {
    type Item = Result<Round<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_round().transpose()
    }
}

/// A unit in two, with half of its ranges each. `None` where there is only one.
fn fewer<'a>(unit: &Unit<'a>) -> Option<(Unit<'a>, Unit<'a>)> {
    let (first, second) = unit.ranges.split_at(unit.ranges.len() / 2);
    let half = |ranges: &[Range<u64>]| Unit { ranges: ranges.to_vec(), ..unit.clone() };
    (!first.is_empty()).then(|| (half(first), half(second)))
}

/// A unit in two, of shorter ranges, or of fewer where they are of an element each. `None` where it is one element.
fn less(unit: Unit<'_>, ranks: u64) -> Option<(Unit<'_>, Unit<'_>)> {
    let unit = spread(unit, ranks);
    shorter(&unit).or_else(|| fewer(&unit))
}

/// A whole tensor as a range a rank; any other unit is as it was.
fn spread(unit: Unit<'_>, ranks: u64) -> Unit<'_> {
    if !unit.is_whole() {
        return unit;
    }
    let numel = unit.demand.source.numel();
    let at = |index: u64| {
        let even = u128::from(numel) * u128::from(index) / u128::from(ranks);
        u64::try_from(even).expect("at most all elements")
    };
    let ranges = (0..ranks).map(|index| at(index)..at(index + 1)).filter(|range| !range.is_empty()).collect();
    Unit { ranges, ..unit }
}

/// A unit in two: the first half of each of its ranges, and the rest. `None` where there is nothing to cut.
fn shorter<'a>(unit: &Unit<'a>) -> Option<(Unit<'a>, Unit<'a>)> {
    let shape = &unit.demand.source.shape;
    let cut = |range: &Range<u64>| {
        let middle = middle(range, shape);
        (range.start..middle, middle..range.end)
    };
    let (first, second): (Vec<_>, Vec<_>) = unit.ranges.iter().map(cut).unzip();
    let half = |mut ranges: Vec<Range<u64>>| {
        ranges.retain(|range| !range.is_empty());
        (!ranges.is_empty()).then(|| Unit { ranges, ..unit.clone() })
    };
    Some((half(first)?, half(second)?))
}

/// About the middle of a range, between rows where they are not too long: pieces of rows make more boxes.
fn middle(range: &Range<u64>, shape: &[u64]) -> u64 {
    let len = range.end - range.start;
    let even = range.start + len.div_ceil(2);
    let mut row = 1_u64;
    for size in shape.iter().rev() {
        let longer = row.saturating_mul(*size);
        if longer > len / 4 {
            break;
        }
        row = longer;
    }
    // As near as it can be; a row is at most a quarter.
    even - even % row
}
