//! A record in the making: strips as they are finished, joined where they are neighbours.
//!
//! Invariant: what is added is in one record, once.

use super::Record;
use super::known::is_possible;
use crate::catalog::OutputFile;
use crate::exec::{Entry, SumPart};

/// Entries and parts of spans that are worth a record, however short the time since the last one: some 10 MB of text.
const MOST_ITEMS: usize = 1 << 18;

/// Neighbours are joined up to this: so much is done again where a byte of it is not what was written.
const MOST_BYTES: u64 = 64 << 20;

/// What was finished since the last record, in any order.
#[derive(Debug, Default)]
pub struct Batch {
    record: Record,
    items: usize,
}

impl Batch {
    /// Note that a stretch is written. Its sums are of parts of it that each lie in one span whose sum is not in the file
    /// yet, ascending.
    pub fn add(&mut self, entry: Entry) {
        self.items += 1 + entry.sums.len();
        self.record.entries.push(entry);
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
            let is_next = entry.file == next.file
                && entry.range.end == next.range.start
                && next.range.end - entry.range.start <= MOST_BYTES;
            if is_next {
                entry.append(next);
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
