//! Computes the CRC-32 checksums that output files contain, and writes the checksums into the files.
//!
//! A span is a byte range that has a checksum. A site is the position in the file at which a checksum is stored. Most
//! spans are tensors within one write block, and the site of such a span follows the tensor in this write block: the
//! checksum is put into the write block before the block is written. If several write blocks share a span, each write
//! block logs the checksum of its own bytes of the span (a part). A run that writes all data combines these parts when
//! all data is written, then fills the blocks that have only header bytes (such as the directory of a torch file), and
//! then writes the checksums that are still missing. If several runs write a checkpoint, the process that seals the
//! checkpoint combines the parts of all runs ([`write_combined`]).
//!
//! All sizes and offsets are in bytes. Invariant: spans are in ascending order. A span may have two sites (see
//! [`ChecksumSpan`]): the first sites of all spans are in ascending order, and the second sites of all spans are in
//! ascending order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use crc32fast::Hasher;
use rayon::prelude::*;

use super::Stop;
use super::cut_blocks::WriteBlock;
use super::digest::{Digest, for_each_block};
use super::finished_ranges::ChecksumPart;
use super::output::Outputs;
use crate::catalog::{CRC_BYTES, ChecksumSpan, OutputFile, Reservation};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

/// The checksums of all output files of a run.
pub struct Checksums<'a> {
    files: &'a [OutputFile],
    /// True if this run writes all data, so that it can compute all checksums.
    covers_all_data: bool,
    /// For each file, its checksums, in the order of the byte ranges that they cover. The field is set when all data is
    /// written.
    values: OnceLock<Vec<Vec<u32>>>,
    /// The positions of checksums that were unknown when the write block that contains the position was written. These
    /// checksums are written later.
    unwritten: Mutex<Vec<OpenChecksum>>,
}

struct OpenChecksum {
    file: u32,
    sum: usize,
    site: u64,
}

/// The checksum work that remains after all known checksums were put into a write block.
#[derive(Default)]
pub struct DeferredChecksums {
    /// The checksums of the bytes in the write block that belong to byte ranges with a checksum. Only byte ranges that
    /// reach beyond the write block, or whose checksum is stored outside it, have an entry.
    pub parts: Vec<ChecksumPart>,
    /// The offsets in the file at which checksums are written later, in ascending order: the checksum is not known yet,
    /// or its four bytes are not all in the write block. The write block must leave these bytes out. Reason: a process
    /// that others believe dead may still write the block after another process has sealed the checkpoint, and must not
    /// overwrite the sealed checksums.
    pub sites: Vec<u64>,
}

/// The checksums of bytes in one write block, in ascending order of offsets. Each is the checksum of a span (a byte
/// range of the file that has a checksum), or of some bytes of a span.
#[derive(Default)]
pub struct BlockChecksums(Vec<ChecksumPart>);

impl BlockChecksums {
    /// Adds the checksum of `bytes`, which are at the byte range `place` of the file. `known` lists the checksums of
    /// some ranges inside `place`, in ascending order, so that they need not be computed again.
    pub fn add(&mut self, place: &Range<u64>, bytes: &[u8], known: &[ChecksumPart]) {
        let crc = Digest::without_sites(place, bytes, known);
        self.0.push(ChecksumPart { offset: place.start, len: place.end - place.start, crc });
    }

    /// Returns the checksums, in order.
    pub fn parts(&self) -> &[ChecksumPart] {
        &self.0
    }

    /// Returns the checksum of a span (a checksummed byte range), or `None` if the span reaches beyond the write block.
    fn of_span(&self, sum: &ChecksumSpan, block: &Range<u64>) -> Option<u32> {
        if sum.range.start < block.start || block.end < sum.range.end {
            return None;
        }
        let first = self.0.partition_point(|part| part.offset < sum.range.start);
        Some(combine(self.0[first..].iter().take_while(|part| part.offset < sum.range.end)))
    }
}

/// Returns the checksum of the bytes of consecutive parts.
fn combine<'p>(parts: impl IntoIterator<Item = &'p ChecksumPart>) -> u32 {
    let mut whole = Hasher::new();
    parts.into_iter().for_each(|part| whole.combine(&Hasher::new_with_initial_len(part.crc, part.len)));
    whole.finalize()
}

impl<'a> Checksums<'a> {
    /// Prepares to compute the checksums that the output files contain. `covers_all_data` is true if this run writes
    /// all data.
    pub fn new(reservation: &'a Reservation, covers_all_data: bool) -> Self {
        let files = &reservation.files;
        let site = |sum: &ChecksumSpan, nth: usize| sum.crc_offsets.get(nth).copied();
        debug_assert!(files.iter().all(|file| (0..2).all(|nth| file.checksums.is_sorted_by_key(|sum| site(sum, nth)))));
        Self { files, covers_all_data, values: OnceLock::new(), unwritten: Mutex::default() }
    }

    /// Returns whether the file contains checksums.
    pub fn has_checksums(&self, file: u32) -> bool {
        !self.files[file as usize].checksums.is_empty()
    }

    /// Returns whether a checksum of the file covers at least one segment of the write block.
    pub fn is_checksummed(&self, block: &WriteBlock) -> bool {
        block.segments.iter().any(|segment| self.files[block.file as usize].is_checksummed(segment.offset))
    }

    /// Puts the checksums that are already known into `bytes`, which are the byte range `range` of the file and are
    /// otherwise complete. `parts` are the checksums of those bytes in `range` that a checksum of the file covers.
    /// Returns the work that remains for later.
    pub fn fill_sites(
        &self,
        file: u32,
        range: &Range<u64>,
        bytes: &mut [u8],
        parts: BlockChecksums,
    ) -> DeferredChecksums {
        let mut deferred = DeferredChecksums::default();
        let sums = self.files[file as usize].checksums.as_slice();
        let most_sites = sums.first().map_or(0, |sum| sum.crc_offsets.len());
        for nth in 0..most_sites {
            let first = sums.partition_point(|sum| sum.crc_offsets[nth] + CRC_BYTES <= range.start);
            let here = (first..).zip(&sums[first..]).take_while(|(_, sum)| sum.crc_offsets[nth] < range.end);
            for (index, sum) in here {
                let site = sum.crc_offsets[nth];
                let value = self.value(file, index).or_else(|| parts.of_span(sum, range));
                match value.filter(|_| range.start <= site && site + CRC_BYTES <= range.end) {
                    Some(value) => {
                        let value = value.to_le_bytes();
                        let at = usize::try_from(site - range.start).expect("a write block fits memory");
                        bytes[at..at + value.len()].copy_from_slice(&value);
                    }
                    None => {
                        deferred.sites.push(site);
                        // If the site begins in the previous block, that block has already recorded it.
                        if self.covers_all_data && range.start <= site {
                            let open = OpenChecksum { file, sum: index, site };
                            self.unwritten.lock().expect("no panic while the lock is held").push(open);
                        }
                    }
                }
            }
        }
        deferred.sites.sort_unstable();
        deferred.parts = parts.0;
        deferred.parts.retain(|part| !is_within_block(sums, part.offset, range));
        deferred
    }

    fn value(&self, file: u32, sum: usize) -> Option<u32> {
        self.values.get().map(|values| values[file as usize][sum])
    }

    /// Combines the checksums of some bytes into checksums of complete spans (the byte ranges that have a checksum in
    /// the file). All data must be written.
    pub fn combine_all(&self, mut parts: Vec<(u32, ChecksumPart)>) {
        parts.sort_unstable_by_key(|(file, part)| (*file, part.offset));
        let mut parts = parts.iter().peekable();
        let file_values = |(index, file): (u32, &OutputFile)| {
            let mut value = |sum: &ChecksumSpan| {
                let is_part = |(file, part): &&(u32, ChecksumPart)| (*file, part.offset) < (index, sum.range.end);
                combine(std::iter::from_fn(|| parts.next_if(is_part)).map(|(_, part)| part))
            };
            file.checksums.iter().map(&mut value).collect()
        };
        let values = (0_u32..).zip(self.files).map(file_values).collect();
        // The value is set only here, so `set` cannot fail.
        let _ = self.values.set(values);
    }

    /// Writes the checksums that were not known when the write block that contains their position was written.
    ///
    /// # Errors
    /// `Io`.
    pub fn write_deferred(&self, outputs: &Outputs) -> Result<()> {
        let open = self.unwritten.lock().expect("no panic while the lock is held");
        open.iter().try_for_each(|OpenChecksum { file, sum, site }| {
            let value = self.value(*file, *sum).expect("combine_all was called");
            outputs.write(*file, *site, &value.to_le_bytes())
        })
    }
}

/// Combines CRC-32 values of byte ranges (`parts`, from journals, in ascending order) into the checksums that the files
/// contain, and writes these checksums. If the byte range of a checksum has no parts, the checksum was already written
/// together with its write block.
///
/// # Errors
/// `Io`; `Malformed` if the parts do not cover the byte range of a checksum completely.
pub fn write_combined(
    outputs: &Outputs,
    files: &[OutputFile],
    parts: &BTreeMap<u32, Vec<ChecksumPart>>,
    journals: &Path,
) -> Result<()> {
    for (file, parts) in parts {
        for sum in &files[*file as usize].checksums {
            let first = parts.partition_point(|part| part.offset < sum.range.start);
            let parts = &parts[first..];
            let parts = &parts[..parts.partition_point(|part| part.offset < sum.range.end)];
            if parts.is_empty() {
                continue;
            }
            let mut end = sum.range.start;
            if !parts.iter().all(|part| std::mem::replace(&mut end, part.offset + part.len) == part.offset)
                || end != sum.range.end
            {
                return Err(Error::malformed(
                    journals,
                    files[*file as usize].path.display().to_string(),
                    format!("checksum parts for all of bytes {} to {}", sum.range.start, sum.range.end),
                    String::from("a missing or duplicate part"),
                ));
            }
            let value = combine(parts).to_le_bytes();
            sum.crc_offsets.iter().try_for_each(|site| outputs.write(*file, *site, &value))?;
        }
    }
    Ok(())
}

/// A checksum in a file that differs from the checksum of the data that it covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChecksumMismatch {
    /// The byte range that the checksum covers.
    pub range: Range<u64>,
    /// The offset at which the checksum is stored in the file.
    pub site: u64,
    /// The CRC-32 of the data.
    pub expected: u32,
    /// The CRC-32 that is stored in the file.
    pub found: u32,
}

/// Returns the first checksum in the complete file at `path` that differs from its data.
///
/// # Errors
/// `Io`, `Stopped`.
pub fn first_mismatch(file: &OutputFile, path: &AnchoredPath, stop: &Stop) -> Result<Option<ChecksumMismatch>> {
    if file.checksums.is_empty() {
        return Ok(None);
    }
    let open = path.open().map_err(Error::io("open", path))?;
    let check = |sum: &ChecksumSpan| -> Result<Option<ChecksumMismatch>> {
        let mut hasher = Hasher::new();
        for_each_block(&open, path.path(), &sum.range, |bytes| {
            hasher.update(bytes);
            stop.check()
        })?;
        let expected = hasher.finalize();
        for site in &sum.crc_offsets {
            let mut value = [0; size_of::<u32>()];
            open.read_exact_at(&mut value, *site).map_err(Error::io("read", path))?;
            let found = u32::from_le_bytes(value);
            if found != expected {
                return Ok(Some(ChecksumMismatch { range: sum.range.clone(), site: *site, expected, found }));
            }
        }
        Ok(None)
    };
    let found: Vec<Result<Option<ChecksumMismatch>>> = file.checksums.par_iter().map(check).collect();
    found.into_iter().find_map(Result::transpose).transpose()
}

/// Returns whether the checksummed byte range at `offset`, and all positions at which its checksum is stored, are
/// within the write block.
fn is_within_block(sums: &[ChecksumSpan], offset: u64, block: &Range<u64>) -> bool {
    let within = |range: Range<u64>| block.start <= range.start && range.end <= block.end;
    let sum = sums.get(sums.partition_point(|sum| sum.range.end <= offset));
    sum.is_some_and(|sum| {
        within(sum.range.clone()) && sum.crc_offsets.iter().all(|site| within(*site..*site + CRC_BYTES))
    })
}
