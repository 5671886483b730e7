//! Finished byte ranges of output files: what a copy reports while it runs, and the trait that receives the reports.
//!
//! Counts bytes. Invariant: the checksum parts of an entry lie within its range, ascend, and do not overlap.

use std::collections::BTreeMap;
use std::ops::Range;

use crc32fast::Hasher;
use serde::{Deserialize, Serialize};

use super::cast::{DtypePair, LossCounts};
use super::output::Outputs;
use super::{Extents, Stop};
use crate::catalog::{Dtype, OutputFile};
use crate::error::Result;

/// Knows what a copy has to write and keeps a record of what is finished, so that a later run need not repeat it.
pub trait WorkLog: Sync {
    /// Returns the byte ranges that are to be written.
    fn todo(&self) -> &Extents;

    /// Returns whether all bytes of all files are to be written.
    fn is_all(&self) -> bool;

    /// Notes a range that has been written.
    fn add(&self, entry: FinishedRange);

    /// Notes that everything added so far is complete. Calls `check` on the source before it records anything.
    ///
    /// # Errors
    /// `Io`, and the errors of `check`.
    fn advance(&self, outputs: &Outputs, check: &dyn Fn() -> Result<()>) -> Result<()>;

    /// Returns the checksum parts of everything finished, where this run writes everything.
    fn sums(&self) -> Vec<(u32, SumPart)>;

    /// Makes everything durable at the end of a successful run.
    ///
    /// # Errors
    /// `Io`, `Stopped`
    fn finish(&self, outputs: &Outputs, stop: &Stop) -> Result<()>;

    /// Records what can be recorded when a run ends early.
    fn stop(&self, outputs: &Outputs);

    /// Returns the values that casts lost in this run.
    fn lost(&self) -> CastLosses;
}

/// A finished stretch of an output file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "EntryFields", into = "EntryFields")]
pub struct FinishedRange {
    pub file: u32,
    pub range: Range<u64>,
    /// See [`Digest`](super::digest::Digest).
    pub digest: u32,
    /// Within the range, ascending: the parts of spans whose sum is not in the file yet.
    pub sums: Vec<SumPart>,
    /// What casts met in it: it counts as often as its bytes do.
    pub lost: CastLosses,
}

/// What casts met.
pub type CastLosses = BTreeMap<DtypePair, LossCounts>;

impl FinishedRange {
    /// Take in one that begins where this one ends.
    pub(crate) fn append(&mut self, next: &mut Self) {
        let hasher = |entry: &Self| Hasher::new_with_initial_len(entry.digest, entry.range.end - entry.range.start);
        let mut both = hasher(self);
        both.combine(&hasher(next));
        self.digest = both.finalize();
        self.range.end = next.range.end;
        self.sums.append(&mut next.sums);
        add_lost(&mut self.lost, &next.lost);
    }
}

/// Count what casts met elsewhere, too.
pub fn add_lost(lost: &mut CastLosses, more: &CastLosses) {
    more.iter().for_each(|(pair, counts)| lost.entry(*pair).or_default().add(*counts));
}

/// The CRC-32 of a part of a span, or of all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u64, u64, u32)", into = "(u64, u64, u32)")]
pub struct SumPart {
    pub offset: u64,
    pub len: u64,
    pub crc: u32,
}

impl SumPart {
    /// To be combined with those of other parts.
    #[must_use]
    pub fn hasher(&self) -> Hasher {
        Hasher::new_with_initial_len(self.crc, self.len)
    }

    /// Join parts of one span that follow each other. They ascend.
    pub(crate) fn join(parts: &mut Vec<Self>, file: &OutputFile) {
        parts.dedup_by(|next, part| {
            let is_next = part.offset + part.len == next.offset
                && file.sum_at(part.offset).is_some_and(|sum| next.offset < sum.range.end);
            if is_next {
                let mut both = part.hasher();
                both.combine(&next.hasher());
                *part = Self { offset: part.offset, len: part.len + next.len, crc: both.finalize() };
            }
            is_next
        });
    }
}

type EntryFields = (u32, u64, u64, u32, Vec<SumPart>, Vec<(String, String, u64, u64)>);

impl TryFrom<EntryFields> for FinishedRange {
    type Error = &'static str;

    fn try_from((file, start, end, digest, sums, rows): EntryFields) -> Result<Self, Self::Error> {
        let dtype = |name: &str| Dtype::from_name(name).ok_or("no dtype");
        let mut lost = CastLosses::new();
        for (from, to, overflows, nans) in rows {
            lost.entry((dtype(&from)?, dtype(&to)?)).or_default().add(LossCounts { overflows, nans });
        }
        Ok(Self { file, range: start..end, digest, sums, lost })
    }
}

impl From<FinishedRange> for EntryFields {
    fn from(FinishedRange { file, range, digest, sums, lost }: FinishedRange) -> Self {
        let row = |((from, to), lost): ((Dtype, Dtype), LossCounts)| {
            (from.name().to_owned(), to.name().to_owned(), lost.overflows, lost.nans)
        };
        (file, range.start, range.end, digest, sums, lost.into_iter().map(row).collect())
    }
}

impl From<(u64, u64, u32)> for SumPart {
    fn from((offset, len, crc): (u64, u64, u32)) -> Self {
        Self { offset, len, crc }
    }
}

impl From<SumPart> for (u64, u64, u32) {
    fn from(SumPart { offset, len, crc }: SumPart) -> Self {
        (offset, len, crc)
    }
}
