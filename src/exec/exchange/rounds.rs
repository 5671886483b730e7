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
use std::sync::Arc;

use super::demand::{Demand, Owners};
use super::draft::{Draft, Load, Unit};
use super::readers::Parties;
use crate::catalog::{Catalog, Reserved};
use crate::error::Result;

/// Strided copies of a round: they take memory, too, where runs are of a few elements.
const MOST_TRANSFERS: usize = 1 << 18;

/// What is moved in one go.
pub struct Round<'a> {
    pub drafts: Vec<Draft<'a>>,
    /// Whether every tensor that was begun is through with this round.
    pub ends_whole: bool,
}

/// An iterator over the rounds of a conversion.
pub struct Rounds<'a> {
    catalog: &'a Catalog,
    tensors: std::iter::Enumerate<std::slice::Iter<'a, Reserved>>,
    owners: &'a Owners,
    parties: &'a Parties,
    bucket_bytes: u64,
    /// Units of the tensor that was begun, the next one last.
    rest: Vec<Unit<'a>>,
    /// What did not fit the round before.
    left: Option<Draft<'a>>,
}

impl<'a> Rounds<'a> {
    /// `bucket_bytes` is how much each process reads, sends, receives and unpacks at most in a round.
    #[must_use]
    pub fn new(
        catalog: &'a Catalog,
        tensors: &'a [Reserved],
        owners: &'a Owners,
        parties: &'a Parties,
        bucket_bytes: u64,
    ) -> Self {
        let tensors = tensors.iter().enumerate();
        Self { catalog, tensors, owners, parties, bucket_bytes, rest: Vec::new(), left: None }
    }

    /// The moves of the next unit that fits a round of its own.
    fn draft(&mut self) -> Result<Option<Draft<'a>>> {
        if let Some(left) = self.left.take() {
            return Ok(Some(left));
        }
        loop {
            let Some(unit) = self.rest.pop() else {
                let Some((number, tensor)) = self.tensors.next() else { return Ok(None) };
                let demand = Demand::new(self.catalog.tensor(tensor.source), tensor, self.owners)?;
                if !demand.is_empty() {
                    let numel = demand.source.entry.numel();
                    self.rest.push(Unit {
                        demand: Arc::new(demand),
                        number,
                        ranges: std::iter::once(0..numel).collect(),
                    });
                }
                continue;
            };
            let draft = Draft::new(unit, self.parties)?;
            if self.fits(&draft.loads, draft.transfers.len()) {
                return Ok(Some(draft));
            }
            match halves(&draft.unit, u64::from(self.parties.size())) {
                Some((first, second)) => self.rest.extend([second, first]),
                None => return Ok(Some(draft)),
            }
        }
    }

    fn fits(&self, loads: &[Load], transfers: usize) -> bool {
        transfers <= MOST_TRANSFERS && loads.iter().all(|load| load.largest() <= self.bucket_bytes)
    }

    fn next_round(&mut self) -> Result<Option<Round<'a>>> {
        let mut drafts: Vec<Draft<'_>> = Vec::new();
        let mut loads = vec![Load::default(); self.parties.nodes.len()];
        let mut transfers = 0;
        while let Some(draft) = self.draft()? {
            loads.iter_mut().zip(&draft.loads).for_each(|(sum, load)| *sum = sum.plus(*load));
            transfers += draft.transfers.len();
            if !drafts.is_empty() && !self.fits(&loads, transfers) {
                self.left = Some(draft);
                break;
            }
            drafts.push(draft);
        }
        let is_begun = |left: &Draft<'_>| drafts.last().is_some_and(|last| last.unit.number == left.unit.number);
        let ends_whole = self.rest.is_empty() && !self.left.as_ref().is_some_and(is_begun);
        Ok((!drafts.is_empty()).then_some(Round { drafts, ends_whole }))
    }
}

impl<'a> Iterator for Rounds<'a> {
    type Item = Result<Round<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_round().transpose()
    }
}

/// A unit in two: the first half of each of its ranges, and the rest. One that is a whole tensor is cut into a range a
/// rank before. `None` where there is nothing to cut.
fn halves<'a>(unit: &Unit<'a>, ranks: u64) -> Option<(Unit<'a>, Unit<'a>)> {
    let entry = unit.demand.source.entry;
    let numel = entry.numel();
    let ranges = match unit.ranges.as_slice() {
        [range] if *range == (0..numel) => {
            let at = |index: u64| {
                let even = u128::from(numel) * u128::from(index) / u128::from(ranks);
                u64::try_from(even).expect("at most all elements")
            };
            (0..ranks).map(|index| at(index)..at(index + 1)).filter(|range| !range.is_empty()).collect()
        }
        ranges => ranges.to_vec(),
    };
    let cut = |range: &Range<u64>| {
        let middle = middle(range, &entry.shape);
        (range.start..middle, middle..range.end)
    };
    let (first, second): (Vec<_>, Vec<_>) = ranges.iter().map(cut).unzip();
    let half = |mut ranges: Vec<Range<u64>>| {
        ranges.retain(|range| !range.is_empty());
        (!ranges.is_empty()).then(|| Unit { demand: Arc::clone(&unit.demand), number: unit.number, ranges })
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
