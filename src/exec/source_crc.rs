//! Checksums of source records that pass through a copy.
//!
//! A record whose every byte is read in long runs is checked against the CRC-32 its writer stored, at the cost of
//! summing bytes that are in cache. A record of which only parts are read, or only in short strided runs, is not:
//! `verify` checks those.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use super::finished::SumPart;
use crate::catalog::{ChecksummedRange, Fqn};
use crate::error::{Error, Result};
use crate::storage::{FileId, Files};

/// Records of which stretches have been seen.
#[derive(Debug, Default)]
pub struct SourceCrcs {
    records: Mutex<HashMap<(FileId, u64), SeenRanges>>,
}

/// Who notes what passes into a buffer, and the sums of it that are worth to be combined, by where it begins there.
pub struct CrcRecorder<'a> {
    pub passing: &'a SourceCrcs,
    pub sums: &'a mut Vec<SumPart>,
}

#[derive(Debug)]
struct SeenRanges {
    /// The first tensor that was seen in it.
    name: Fqn,
    summed: ChecksummedRange,
    /// By offset: length and sum of a stretch.
    stretches: BTreeMap<u64, (u64, crc32fast::Hasher)>,
}

impl SourceCrcs {
    /// Note that `bytes` were read at `offset` of the file, inside a record; gives their CRC-32.
    pub fn note(&self, name: &Fqn, file: FileId, summed: ChecksummedRange, offset: u64, bytes: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(bytes);
        // A small one passes through at once, and need not be remembered.
        let whole = offset == summed.start && bytes.len() as u64 == summed.len;
        let crc = hasher.clone().finalize();
        if whole && crc == summed.crc {
            return crc;
        }
        let mut records = self.records.lock().expect("no panic while the lock is held");
        let seen = records.entry((file, summed.start)).or_insert_with(|| SeenRanges {
            name: name.clone(),
            summed,
            stretches: BTreeMap::new(),
        });
        seen.stretches.insert(offset, (bytes.len() as u64, hasher));
        crc
    }

    /// Whether nothing has been seen that was not checked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.lock().expect("no panic while the lock is held").is_empty()
    }

    /// Check every record that has been seen whole, and forget all of them.
    ///
    /// # Errors
    /// `Malformed` naming the file and the record whose data is not what was written.
    pub fn settle(&self, files: &Files) -> Result<()> {
        let records = std::mem::take(&mut *self.records.lock().expect("no panic while the lock is held"));
        for ((file, start), seen) in records {
            let Some(crc) = seen.whole() else { continue };
            if crc != seen.summed.crc {
                return Err(Error::malformed(
                    files.path(file),
                    format!("{} (record at byte {start})", seen.name),
                    format!("data with CRC-32 {:08x}", seen.summed.crc),
                    format!("{crc:08x}: the data has changed since it was written"),
                ));
            }
        }
        Ok(())
    }
}

impl SeenRanges {
    /// The sum of the record, if its stretches follow each other from its first byte to its last.
    fn whole(&self) -> Option<u32> {
        let mut end = self.summed.start;
        let mut whole = crc32fast::Hasher::new();
        for (offset, (len, hasher)) in &self.stretches {
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
    fn only_whole_records_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, b"..abcdef").unwrap();
        let mut files = Files::new(IoMode::Read);
        let file = files.add(&path).unwrap();
        let summed = ChecksummedRange { start: 2, len: 6, crc: crc32fast::hash(b"abcdef") };
        let passing = SourceCrcs::default();
        let name = Fqn::from("w");

        passing.note(&name, file, summed, 5, b"def");
        passing.note(&name, file, summed, 2, b"abc");
        passing.settle(&files).unwrap();

        // A part is not enough to say anything.
        passing.note(&name, file, summed, 2, b"abX");
        passing.settle(&files).unwrap();

        passing.note(&name, file, summed, 2, b"abX");
        passing.note(&name, file, summed, 5, b"def");
        let error = passing.settle(&files).unwrap_err();
        assert!(error.to_string().contains("w (record at byte 2)"), "{error}");
    }
}
