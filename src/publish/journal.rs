//! Journals record the finished byte ranges on disk, so that a later run can continue if the process is killed.
//!
//! Each process has its own journal and only appends to it. A journal record is one line: the ranges finished since the
//! previous record, as JSON, and the CRC-32 of the JSON. The data is on disk before its record is written. With
//! `--no-sync`, the data may not be on disk, and a node that crashes would lose it. In this case, the record contains
//! the boot id of the node, and is valid only until the node boots again. If files contradict an entry, a record in
//! another journal invalidates the entry. [`completed_work`](super::completed_work) reads all journals.
//!
//! ```text
//!     {"r":{"e":[[0,4096,12288,3735928559,[[4096,512,305419896]],[["f32","f16",7,0]]]],"c":[2]}} 9ae0daaf
//!                |  range      |           |    |    |             |                              CRC-32
//!                file          |           |    |    |             values lost by casts
//!                              |           |    len  CRC-32 of a checksum part
//!                              digest      offset
//! ```
//!
//! All sizes and offsets are in bytes. Invariant: a record is either read completely or ignored, and nothing after a
//! damaged record is read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::destination::unique;
use crate::catalog::OutputFile;
use crate::comm::node::this_boot;
use crate::error::{Error, Result};
use crate::exec::{ChecksumPart, FinishedRange};
use crate::storage::AnchoredPath;

/// The extension of the file name of a journal.
pub(super) const EXTENSION: &str = "journal";

/// The number of entries and checksum parts after which a record is written without further delay. The text of so many
/// entries has about 10 MB.
const MAX_ITEMS: usize = 1 << 18;

/// The maximum length in bytes of an entry that is joined from adjacent ranges. If one byte of an entry is wrong, the
/// entire entry is written again.
const MAX_JOINED_BYTES: u64 = 64 << 20;

/// A journal record: the work that was finished since the previous record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JournalRecord {
    #[serde(rename = "e", default, skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<FinishedRange>,
    /// The indices of sidecar files that were copied.
    #[serde(rename = "c", default, skip_serializing_if = "Vec::is_empty")]
    pub carried: Vec<u32>,
    #[serde(rename = "d", default, skip_serializing_if = "Vec::is_empty")]
    pub invalidated: Vec<InvalidatedEntry>,
}

impl JournalRecord {
    pub fn append(&mut self, later: Self) {
        self.entries.extend(later.entries);
        self.carried.extend(later.carried);
        self.invalidated.extend(later.invalidated);
    }

    /// The CRC-32 values in this record of byte ranges that are not combined into complete checksums yet, each with the
    /// index of its file.
    pub fn sums(&self) -> impl Iterator<Item = (u32, ChecksumPart)> + '_ {
        self.entries.iter().flat_map(|entry| entry.checksum_parts.iter().map(|part| (entry.file, *part)))
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.carried.is_empty() && self.invalidated.is_empty()
    }

    /// Sorts the entries by file and offset, and joins adjacent entries.
    pub fn compact(&mut self, files: &[OutputFile]) {
        self.entries.sort_unstable_by_key(|entry| (entry.file, entry.range.start));
        self.entries.dedup_by(|next, entry| {
            let is_next = entry.file == next.file
                && entry.range.end == next.range.start
                && next.range.end - entry.range.start <= MAX_JOINED_BYTES;
            if is_next {
                entry.append(next);
            }
            is_next
        });
        for entry in &mut self.entries {
            ChecksumPart::join(&mut entry.checksum_parts, &files[entry.file as usize]);
        }
        self.carried.sort_unstable();
        debug_assert!(self.is_possible(files, usize::MAX), "readers would take it for damaged: {self:?}");
    }

    /// Returns whether the record is so large that it should be written immediately.
    pub fn is_full(&self) -> bool {
        self.entries.len() >= MAX_ITEMS
            || self.entries.iter().map(|entry| 1 + entry.checksum_parts.len()).sum::<usize>() >= MAX_ITEMS
    }

    /// Returns true if the record is valid for these output files and this number of sidecar files (`carried`): all
    /// file numbers exist, and all byte ranges are within their files.
    pub fn is_possible(&self, files: &[OutputFile], carried: usize) -> bool {
        let is_entry_possible = |entry: &FinishedRange| {
            let Some(file) = files.get(entry.file as usize) else { return false };
            let mut at = entry.range.start;
            let are_sums_within = entry.checksum_parts.iter().all(|part| {
                let end = part.offset.checked_add(part.len).filter(|end| part.len > 0 && *end <= entry.range.end);
                let is_free = part.offset >= at;
                at = end.unwrap_or(at);
                let span = file.checksum_at(part.offset);
                is_free && end.is_some_and(|end| span.is_some_and(|sum| end <= sum.range.end))
            });
            !entry.range.is_empty() && entry.range.end <= file.len && are_sums_within
        };
        self.entries.iter().all(is_entry_possible)
            && self.carried.iter().all(|number| (*number as usize) < carried)
            && self.invalidated.iter().all(|entry| (entry.file as usize) < files.len())
    }
}

/// A journal entry that is ignored because the content of the file contradicts it. If the work is repeated, the new
/// entry is in another journal, so the new entry is not ignored.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "(String, u32, u64)", into = "(String, u32, u64)")]
pub struct InvalidatedEntry {
    /// The name of the journal that contains the entry.
    pub journal: String,
    pub file: u32,
    pub start: u64,
}

impl From<(String, u32, u64)> for InvalidatedEntry {
    fn from((journal, file, start): (String, u32, u64)) -> Self {
        Self { journal, file, start }
    }
}

impl From<InvalidatedEntry> for (String, u32, u64) {
    fn from(InvalidatedEntry { journal, file, start }: InvalidatedEntry) -> Self {
        (journal, file, start)
    }
}

/// Records in a new journal that these entries are invalid. The new journal is in the same folder as `journal`.
///
/// # Errors
/// `Io` if the journal cannot be written.
pub fn invalidate(journal: &AnchoredPath, invalidated: Vec<InvalidatedEntry>, sync: bool) -> Result<()> {
    if invalidated.is_empty() {
        return Ok(());
    }
    let name = Path::new(journal.file_name()).with_extension(format!("invalidated-{}.{EXTENSION}", unique()));
    let mut made = Journal::create(&journal.with_file_name(name))?;
    made.append(&JournalRecord { invalidated, ..JournalRecord::default() }, boot_of(sync))?;
    crate::fault::point("invalidated");
    Ok(())
}

/// Returns the boot id for a journal record. If the data is not synced, this is the id of the current boot, and the
/// record is valid only until the node boots again. If the data is synced, the result is `None`, and the record stays
/// valid. If the system gives no boot id, the result is an empty id, which matches no boot.
pub(super) fn boot_of(sync: bool) -> Option<String> {
    (!sync).then(|| this_boot().unwrap_or_default())
}

/// The journal that this process writes.
#[derive(Debug)]
pub(super) struct Journal {
    path: AnchoredPath,
    file: File,
    /// The total length of all complete records, in bytes.
    len: u64,
}

impl Journal {
    /// Creates a journal file. Fails with `Io` if the file exists.
    pub fn create(path: &AnchoredPath) -> Result<Self> {
        let file = path.create_new(0o666).map_err(Error::io("create", path))?;
        // The next run finds the journal only if the folder entry of the journal is on disk.
        let folder = path.folder();
        folder.sync().map_err(Error::io("sync", &folder))?;
        Ok(Self { path: path.clone(), file, len: 0 })
    }

    /// Appends a record, in one write. If the write fails, the next record overwrites the incomplete record. The data
    /// that the record describes must be written already. Unless `boot` is given, the data must also be on disk.
    pub fn append(&mut self, record: &JournalRecord, boot: Option<String>) -> Result<()> {
        let is_synced = boot.is_none();
        let line = to_line(record, boot);
        self.file.write_all_at(&line, self.len).map_err(Error::io("write", &self.path))?;
        if is_synced {
            self.file.sync_data().map_err(Error::io("sync", &self.path))?;
        }
        self.len += line.len() as u64;
        Ok(())
    }
}

#[derive(Serialize, Deserialize)]
struct Line<R> {
    #[serde(rename = "r")]
    record: R,
    #[serde(rename = "b", default, skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
}

fn to_line(record: &JournalRecord, boot: Option<String>) -> Vec<u8> {
    let mut line = serde_json::to_vec(&Line { record, boot }).expect("a record is plain data");
    let crc = crc32fast::hash(&line);
    line.extend_from_slice(format!(" {crc:08x}\n").as_bytes());
    line
}

/// Parses a line of a journal. Returns the record, and the id of the boot in which the record is valid; without an id,
/// the record is valid in every boot. Returns `None` if the line is damaged.
pub(super) fn of_line(line: &[u8]) -> Option<(JournalRecord, Option<String>)> {
    let (json, crc) = line.strip_suffix(b"\n")?.split_last_chunk::<9>()?;
    let crc = u32::from_str_radix(std::str::from_utf8(crc.strip_prefix(b" ")?).ok()?, 16).ok()?;
    if crc32fast::hash(json) != crc {
        return None;
    }
    let Line { record, boot } = serde_json::from_slice(json).ok()?;
    Some((record, boot))
}

#[cfg(test)]
mod tests;
