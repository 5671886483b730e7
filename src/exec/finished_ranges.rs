//! Finished byte ranges of output files, which a copy reports while it runs, and the trait that receives these reports.
//!
//! All sizes and offsets are in bytes. Invariant: the checksum parts of a finished range lie within this range, are in
//! ascending order, and do not overlap.

use std::collections::BTreeMap;
use std::ops::Range;

use crc32fast::Hasher;
use serde::{Deserialize, Serialize};

use super::cast::{DtypePair, LossCounts};
use super::output::Outputs;
use super::{Extents, Stop};
use crate::catalog::{Dtype, OutputFile};
use crate::error::Result;

/// A log that provides the byte ranges that a copy has to write and records the finished byte ranges, so that a later
/// run need not write them again.
pub trait WorkLog: Sync {
    /// Returns the byte ranges that this run has to write.
    fn todo(&self) -> &Extents;

    /// Returns whether this run has to write all bytes of all files.
    fn covers_everything(&self) -> bool;

    /// Adds a range that has been written. It counts as finished after the next call of [`WorkLog::advance`].
    fn add(&self, entry: FinishedRange);

    /// Makes all added ranges count as finished, and records them now or in a later call. Before it records anything,
    /// calls `check`, which checks that the source is unchanged.
    ///
    /// # Errors
    /// `Io`, and the errors of `check`.
    fn advance(&self, outputs: &Outputs, check: &dyn Fn() -> Result<()>) -> Result<()>;

    /// Returns the checksum parts of all finished ranges, if this run writes all bytes of all files.
    fn checksum_parts(&self) -> Vec<(u32, ChecksumPart)>;

    /// Ends a successful run: syncs the written data to disk if the run syncs, closes the files and completes the
    /// records.
    ///
    /// # Errors
    /// `Io`, `Stopped`
    fn finish(&self, outputs: &Outputs, stop: &Stop) -> Result<()>;

    /// Records all ranges that can be recorded as finished when a run ends early.
    fn stop(&self, outputs: &Outputs);

    /// Returns the numbers of overflows and NaNs in the casts of this run.
    fn cast_losses(&self) -> CastLosses;
}

/// A finished range of an output file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "EntryFields", into = "EntryFields")]
pub struct FinishedRange {
    /// The number of the output file.
    pub file: u32,
    /// The range, in bytes.
    pub range: Range<u64>,
    /// The digest of the bytes; see [`Digest`](super::digest::Digest).
    pub digest: u32,
    /// The CRC-32 values of byte ranges within this range, from which checksums of the file are computed later. They
    /// are in ascending order. Checksums that are already in the file need no entry.
    pub checksum_parts: Vec<ChecksumPart>,
    /// The numbers of overflows and NaNs in the casts of the range. If a tile has several replicas, only the first
    /// replica counts.
    pub cast_losses: CastLosses,
}

/// The numbers of overflows and NaNs in casts, by source dtype and target dtype.
pub type CastLosses = BTreeMap<DtypePair, LossCounts>;

impl FinishedRange {
    /// Appends `next`, which begins at the end of this range.
    pub(crate) fn append(&mut self, next: &mut Self) {
        let hasher = |entry: &Self| Hasher::new_with_initial_len(entry.digest, entry.range.end - entry.range.start);
        let mut both = hasher(self);
        both.combine(&hasher(next));
        self.digest = both.finalize();
        self.range.end = next.range.end;
        self.checksum_parts.append(&mut next.checksum_parts);
        add_cast_losses(&mut self.cast_losses, &next.cast_losses);
    }
}

/// Adds the counts in `more` to the counts in `lost`.
pub fn add_cast_losses(lost: &mut CastLosses, more: &CastLosses) {
    more.iter().for_each(|(pair, counts)| lost.entry(*pair).or_default().add(*counts));
}

/// The CRC-32 of consecutive bytes of a span, which may be all of its bytes. A span is a byte range of an output file
/// whose checksum the file contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u64, u64, u32)", into = "(u64, u64, u32)")]
pub struct ChecksumPart {
    /// The offset in the file of the first byte that `crc` covers.
    pub offset: u64,
    /// The number of bytes that `crc` covers.
    pub len: u64,
    /// The CRC-32 of these bytes of the file.
    pub crc: u32,
}

impl ChecksumPart {
    /// Returns a CRC-32 hasher that has already hashed this part, so that it can be combined with the hashers of other
    /// parts.
    pub fn hasher(&self) -> Hasher {
        Hasher::new_with_initial_len(self.crc, self.len)
    }

    /// Joins parts that follow each other without a gap in one span of `file` (a byte range whose checksum the file
    /// contains). `parts` must be in ascending order of offsets.
    pub(crate) fn join(parts: &mut Vec<Self>, file: &OutputFile) {
        parts.dedup_by(|next, part| {
            let is_next = part.offset + part.len == next.offset
                && file.checksum_at(part.offset).is_some_and(|sum| next.offset < sum.range.end);
            if is_next {
                let mut both = part.hasher();
                both.combine(&next.hasher());
                *part = Self { offset: part.offset, len: part.len + next.len, crc: both.finalize() };
            }
            is_next
        });
    }
}

type EntryFields = (u32, u64, u64, u32, Vec<ChecksumPart>, Vec<(String, String, u64, u64)>);

impl TryFrom<EntryFields> for FinishedRange {
    type Error = &'static str;

    fn try_from((file, start, end, digest, sums, rows): EntryFields) -> Result<Self, Self::Error> {
        let dtype = |name: &str| Dtype::from_name(name).ok_or("unknown dtype");
        let mut lost = CastLosses::new();
        for (from, to, overflows, nans) in rows {
            lost.entry((dtype(&from)?, dtype(&to)?)).or_default().add(LossCounts { overflows, nans });
        }
        Ok(Self { file, range: start..end, digest, checksum_parts: sums, cast_losses: lost })
    }
}

impl From<FinishedRange> for EntryFields {
    fn from(FinishedRange { file, range, digest, checksum_parts: sums, cast_losses: lost }: FinishedRange) -> Self {
        let row = |((from, to), lost): ((Dtype, Dtype), LossCounts)| {
            (from.name().to_owned(), to.name().to_owned(), lost.overflows, lost.nans)
        };
        (file, range.start, range.end, digest, sums, lost.into_iter().map(row).collect())
    }
}

impl From<(u64, u64, u32)> for ChecksumPart {
    fn from((offset, len, crc): (u64, u64, u32)) -> Self {
        Self { offset, len, crc }
    }
}

impl From<ChecksumPart> for (u64, u64, u32) {
    fn from(ChecksumPart { offset, len, crc }: ChecksumPart) -> Self {
        (offset, len, crc)
    }
}
