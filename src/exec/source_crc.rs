//! Checks the CRC-32s of zip records of the source while they are copied. All sizes and offsets are in bytes.
//!
//! If all bytes of a zip record are read in long runs, the record is checked against the CRC-32 that its writer stored.
//! The CRC costs little, because the bytes are in cache. A zip record that is read only in part, or only in short
//! strided runs, is not checked here; `verify` checks every record.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use super::finished_ranges::ChecksumPart;
use crate::catalog::{ChecksummedRange, Fqn};
use crate::error::{Error, Result};
use crate::storage::{FileId, Files};

/// The CRCs of ranges that have been read from zip records of the source.
#[derive(Debug, Default)]
pub struct SourceCrcs {
    records: Mutex<HashMap<(FileId, u64), SeenRanges>>,
}

/// A recorder of the CRCs of data that is read into a buffer. The recorder also keeps the CRCs that are worth combining
/// for the checksums of the output.
pub struct CrcRecorder<'a> {
    /// The CRCs of the ranges that have been read, for each zip record.
    pub source_crcs: &'a SourceCrcs,
    /// The CRCs that are worth combining, by their offset in the buffer.
    pub parts: &'a mut Vec<ChecksumPart>,
}

#[derive(Debug)]
struct SeenRanges {
    /// The name of the first tensor that was read from the zip record, for messages.
    name: Fqn,
    /// True if other tensors were read from the zip record, too.
    has_others: bool,
    summed: ChecksummedRange,
    /// The length and CRC of each range that was read, by the offset of the range.
    ranges: BTreeMap<u64, (u64, crc32fast::Hasher)>,
}

impl SourceCrcs {
    /// Records that `bytes` were read at `offset` of a file, inside a zip record. Returns the CRC-32 of `bytes`.
    pub fn record(&self, name: &Fqn, file: FileId, summed: ChecksummedRange, offset: u64, bytes: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(bytes);
        // A small zip record is read by one call. If its CRC is correct, it need not be stored.
        let whole = offset == summed.start && bytes.len() as u64 == summed.len;
        let crc = hasher.clone().finalize();
        if whole && crc == summed.crc {
            return crc;
        }
        let mut records = self.records.lock().expect("no panic while the lock is held");
        let seen = records.entry((file, summed.start)).or_insert_with(|| SeenRanges {
            name: name.clone(),
            has_others: false,
            summed,
            ranges: BTreeMap::new(),
        });
        seen.has_others |= seen.name != *name;
        seen.ranges.insert(offset, (bytes.len() as u64, hasher));
        crc
    }

    /// Returns true if no ranges of zip records are recorded.
    pub fn is_empty(&self) -> bool {
        self.records.lock().expect("no panic while the lock is held").is_empty()
    }

    /// Checks every zip record that was read completely, and removes all recorded ranges.
    ///
    /// # Errors
    /// `Malformed` naming the file and the zip record whose data has changed since it was written.
    pub fn check_complete(&self, files: &Files) -> Result<()> {
        let records = std::mem::take(&mut *self.records.lock().expect("no panic while the lock is held"));
        for ((file, start), seen) in records {
            let Some(crc) = seen.whole() else { continue };
            if crc != seen.summed.crc {
                let others = if seen.has_others { " and other tensors" } else { "" };
                return Err(Error::malformed(
                    files.path(file),
                    format!("{}{others} (record at byte {start})", seen.name),
                    format!("data with CRC-32 {:08x}", seen.summed.crc),
                    format!("{crc:08x}, so the data has changed since it was written"),
                ));
            }
        }
        Ok(())
    }
}

impl SeenRanges {
    /// Returns the CRC of the zip record if the recorded ranges cover it completely, otherwise `None`.
    fn whole(&self) -> Option<u32> {
        let mut end = self.summed.start;
        let mut whole = crc32fast::Hasher::new();
        for (offset, (len, hasher)) in &self.ranges {
            if *offset != end {
                return None;
            }
            whole.combine(hasher);
            end += len;
        }
        (end == self.summed.start + self.summed.len).then(|| whole.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::IoMode;

    #[test]
    fn only_completely_read_records_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, b"..abcdef").unwrap();
        let mut files = Files::new(IoMode::Read);
        let file = files.add(&path).unwrap();
        let summed = ChecksummedRange { start: 2, len: 6, crc: crc32fast::hash(b"abcdef") };
        let source_crcs = SourceCrcs::default();
        let name = Fqn::from("w");

        source_crcs.record(&name, file, summed, 5, b"def");
        source_crcs.record(&name, file, summed, 2, b"abc");
        source_crcs.check_complete(&files).unwrap();

        // A part of a zip record is not checked.
        source_crcs.record(&name, file, summed, 2, b"abX");
        source_crcs.check_complete(&files).unwrap();

        source_crcs.record(&name, file, summed, 2, b"abX");
        source_crcs.record(&name, file, summed, 5, b"def");
        let error = source_crcs.check_complete(&files).unwrap_err();
        assert!(error.to_string().contains("w (record at byte 2)"), "{error}");
    }
}
