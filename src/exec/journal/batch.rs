//! A record in the making: strips as they are finished, joined where they are neighbours.
//!
//! Invariant: what is added is in one record, once.

use std::ops::Range;

use super::known::is_possible;
use super::{Entry, Record, SumPart};
use crate::catalog::OutputFile;
use crate::exec::cast::Counts;
use crate::exec::copy::DtypePair;

/// Entries and parts of spans that are worth a record, however short the time since the last one: some 10 MB of text.
const MOST_ITEMS: usize = 1 << 18;

/// What was finished since the last record, in any order.
#[derive(Debug, Default)]
pub struct Batch {
    record: Record,
    items: usize,
}

impl Batch {
    /// Note that a stretch is written. `sums` are of parts of it that each lie in one span whose sum is not in the file
    /// yet, ascending.
    pub fn add(&mut self, file: u32, range: Range<u64>, sums: Vec<SumPart>) {
        self.items += 1 + sums.len();
        self.record.entries.push(Entry { file, range, sums });
    }

    /// Note what a cast met.
    pub fn lose(&mut self, pair: DtypePair, counts: Counts) {
        self.record.lost.entry(pair).or_default().add(counts);
    }

    /// Note that a carried file is complete.
    pub fn carry(&mut self, number: u32) {
        self.items += 1;
        self.record.carried.push(number);
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.record.is_empty()
    }

    /// Whether it should not wait for more.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.items >= MOST_ITEMS
    }

    /// The record of all that was added, in file order; the next one begins.
    #[must_use]
    pub fn take(&mut self, files: &[OutputFile]) -> Record {
        let mut record = std::mem::take(self).record;
        record.entries.sort_unstable_by_key(|entry| (entry.file, entry.range.start));
        record.entries.dedup_by(|next, entry| {
            let is_next = entry.file == next.file && entry.range.end == next.range.start;
            if is_next {
                entry.range.end = next.range.end;
                entry.sums.append(&mut next.sums);
            }
            is_next
        });
        for entry in &mut record.entries {
            SumPart::join(&mut entry.sums, &files[entry.file as usize]);
        }
        record.carried.sort_unstable();
        debug_assert!(is_possible(&record, files, usize::MAX), "readers would take it for damaged: {record:?}");
        record
    }
}
