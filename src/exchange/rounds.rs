//! Rounds: divide the exchange into steps that fit the memory limit of every process. Each process computes the same
//! rounds from the same catalogs, without communication. A round consists of many small tensors, or of a few ranges of
//! one large tensor. Ranges count elements; sizes whose name contains `bytes` are in bytes. Invariant: the ranges of
//! all rounds together contain each element once.
//!
//! The ranges of a large tensor start at equal distances, one range for each process. Therefore all processes have
//! work, however the tensor is sharded:
//!
//! ```text
//!     Shard(0) to Shard(0)     each range has one reader and one writer, which differ from range to range
//!     Shard(0) to Shard(1)     each range has one reader, and all ranks write a part of it
//!     Shard(1) to Shard(0)     all ranks read a part of each range, and one rank writes it
//! ```

use std::ops::Range;

use super::demand::FileOwners;
use super::load::{Load, Loads};
use super::prefetch::{PlannedUnit, Prefetch};
use super::readers::Topology;
use super::transfer_plan::{MAX_COPIES, SizedPlan, TransferPlan};
use super::transfers::Unit;
use crate::catalog::{Catalog, Reserved};
use crate::error::Result;

/// The maximum memory for transfer plans, in bytes. The limit covers the plans of tensors that are planned in advance,
/// and of the rounds that are being built, read, sent and written. The description of each strided copy is stored
/// several times: as a transfer, in the maps that choose its reader, as a move, and as a planned tile with its output
/// range. A transfer plan also contains the check of the source chunks, and a plan of each tile with its targets.
pub const PLAN_BYTES: u64 = 4 * MAX_COPIES as u64 * 1024;

/// One round of the exchange. It transfers whole tensors, or ranges of one tensor.
pub struct Round<'a> {
    /// The transfer plans of the round.
    pub plans: Vec<TransferPlan<'a>>,
    /// The memory that each process needs for the round.
    pub loads: Vec<Load>,
    /// True if this round transfers the last elements of its tensors, so that the next round has other tensors.
    pub completes_tensors: bool,
}

/// An iterator over the rounds of a conversion.
pub struct Rounds<'a> {
    tensors: Prefetch<'a>,
    topology: &'a Topology,
    bucket_bytes: u64,
    /// The remaining exchange units of the current tensor, if the tensor does not fit into one round. The last exchange
    /// unit in the list is planned next.
    pending_units: Vec<Unit<'a>>,
    /// A plan that did not fit into the previous round, and that becomes the first plan of the next round.
    deferred: Option<SizedPlan<'a>>,
}

impl<'a> Rounds<'a> {
    /// Returns the rounds of all `tensors`. `bucket_bytes` is the limit of a round, for both phases together: a process
    /// reads at most this number of bytes, and the same limit applies to the bytes that it sends, that it receives and
    /// that it unpacks. Bytes that a process contributes to an all-gather also count as received, and partial values
    /// that it reduces count as unpacked. A round with only one element may be larger.
    #[must_use]
    pub fn new(
        catalog: &'a Catalog,
        tensors: &'a [Reserved],
        owners: &'a FileOwners,
        topology: &'a Topology,
        bucket_bytes: u64,
    ) -> Self {
        let tensors = Prefetch::new(catalog, tensors, owners, topology);
        Self { tensors, topology, bucket_bytes, pending_units: Vec::new(), deferred: None }
    }

    /// Plans the next exchange unit: a whole tensor, or element ranges of a tensor. An exchange unit that does not fit
    /// into one round is split until it fits.
    fn next_plan(&mut self) -> Result<Option<SizedPlan<'a>>> {
        if let Some(deferred) = self.deferred.take() {
            return Ok(Some(deferred));
        }
        loop {
            let PlannedUnit { unit, plan } = match self.pending_units.pop() {
                Some(unit) => PlannedUnit::new(unit, self.topology)?,
                None => match self.tensors.next() {
                    Some(planned) => planned?,
                    None => return Ok(None),
                },
            };
            let ranks = u64::from(self.topology.size());
            let halves = match plan {
                Some(sized) if self.fits(sized.loads.largest_buffer(), sized.plan.copies) => return Ok(Some(sized)),
                Some(sized) => split_unit(sized.plan.unit, ranks),
                None => split_range_list(&unit).or_else(|| split_unit(unit.clone(), ranks)),
            };
            match halves {
                Some((first, second)) => self.pending_units.extend([second, first]),
                // The exchange unit is one element and cannot be split.
                None => return TransferPlan::build(unit, self.topology, usize::MAX),
            }
        }
    }

    /// Returns true if a round may have `copies` copies, and if its largest buffer may have `largest_buffer` bytes.
    fn fits(&self, largest_buffer: u64, copies: usize) -> bool {
        copies <= MAX_COPIES && largest_buffer <= self.bucket_bytes
    }

    /// Plans the next round: adds plans as long as all of them fit into one round.
    fn next_round(&mut self) -> Result<Option<Round<'a>>> {
        let mut plans: Vec<TransferPlan<'_>> = Vec::new();
        let mut sum = Loads::zero(self.topology.nodes.len());
        let mut copies = 0;
        while let Some(SizedPlan { plan, loads }) = self.next_plan()? {
            let fits_beside = |last: &TransferPlan<'_>| {
                let is_same = last.unit.number == plan.unit.number;
                is_same || last.unit.is_whole() && plan.unit.is_whole()
            };
            sum.add(&loads);
            copies += plan.copies;
            if plans.last().is_some_and(|last| !fits_beside(last) || !self.fits(sum.largest_buffer(), copies)) {
                sum.subtract(&loads);
                self.deferred = Some(SizedPlan { plan, loads });
                break;
            }
            plans.push(plan);
        }
        let deferred = self.deferred.as_ref().map(|deferred| deferred.plan.unit.number);
        let next = deferred.or(self.pending_units.last().map(|unit| unit.number));
        let Some(last) = plans.last().map(|last| last.unit.number) else { return Ok(None) };
        Ok(Some(Round { plans, loads: sum.into_ranks(), completes_tensors: next != Some(last) }))
    }
}

impl<'a> Iterator for Rounds<'a> {
    type Item = Result<Round<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_round().transpose()
    }
}

/// Splits an exchange unit into the first half and the second half of its list of element ranges. Returns `None` if the
/// list has only one range.
fn split_range_list<'a>(unit: &Unit<'a>) -> Option<(Unit<'a>, Unit<'a>)> {
    let (first, second) = unit.ranges.split_at(unit.ranges.len() / 2);
    let half = |ranges: &[Range<u64>]| Unit { ranges: ranges.to_vec(), ..unit.clone() };
    (!first.is_empty()).then(|| (half(first), half(second)))
}

/// Splits an exchange unit into two. Normally each element range in its list is halved; if no range can be halved, the
/// list is halved. Returns `None` if the exchange unit is one element.
fn split_unit(unit: Unit<'_>, ranks: u64) -> Option<(Unit<'_>, Unit<'_>)> {
    let unit = spread_over_ranks(unit, ranks);
    halve_ranges(&unit).or_else(|| split_range_list(&unit))
}

/// If an exchange unit is a whole tensor, splits its only element range into ranges of about equal length, one for each
/// process. Returns any other exchange unit unchanged.
fn spread_over_ranks(unit: Unit<'_>, ranks: u64) -> Unit<'_> {
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

/// Splits each element range of an exchange unit into two halves: one new exchange unit gets the first halves, the
/// other gets the second halves. Returns `None` if no range can be split.
fn halve_ranges<'a>(unit: &Unit<'a>) -> Option<(Unit<'a>, Unit<'a>)> {
    let shape = &unit.demand.source.shape;
    let split = |range: &Range<u64>| {
        let middle = split_point(range, shape);
        (range.start..middle, middle..range.end)
    };
    let (first, second): (Vec<_>, Vec<_>) = unit.ranges.iter().map(split).unzip();
    let half = |mut ranges: Vec<Range<u64>>| {
        ranges.retain(|range| !range.is_empty());
        (!ranges.is_empty()).then(|| Unit { ranges, ..unit.clone() })
    };
    Some((half(first)?, half(second)?))
}

/// Returns the element index at which a range is split. The index is near the middle of the range. If rows are short,
/// the index is also at the start of a row, because parts of rows need more copies than whole rows.
fn split_point(range: &Range<u64>, shape: &[u64]) -> u64 {
    let len = range.end - range.start;
    let even = range.start + len.div_ceil(2);
    let mut row = 1_u64;
    for size in shape.iter().rev() {
        let larger = row.saturating_mul(*size);
        if larger > len / 4 {
            break;
        }
        row = larger;
    }
    // A row has at most a quarter of the range's elements, so the result is still near the middle.
    even - even % row
}
