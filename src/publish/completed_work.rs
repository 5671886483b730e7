//! The completed work of an output: combines the journals of all processes, and checks their records against the files.
//!
//! Some journals may come from processes that were killed, or whose node crashed. A truncated journal is valid up to
//! its last complete record. Recorded work that cannot be validated is repeated.
//!
//! All sizes and offsets are in bytes. Invariant: `done` is within the files, and no byte range of `done` comes from
//! two entries. Each checksum part in `sums` (the CRC-32 of some consecutive bytes of a file) is within `done`, and
//! within the byte range that one checksum in the file covers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::journal::{EXTENSION, InvalidatedEntry, JournalRecord, boot_of, of_line};
use crate::catalog::OutputFile;
use crate::error::{Error, Result};
use crate::exec::digest::{Digest, for_each_block};
use crate::exec::{CastLosses, ChecksumPart, Extents, FinishedRange, Reporter, Stop, add_cast_losses};
use crate::storage::{AnchoredPath, fresh_lookup};

/// The maximum length of a journal line. A longer line counts as damaged, because its checksum parts would not fit in
/// memory.
const MAX_LINE_BYTES: u64 = 256 << 20;

/// The work that all journals together record as finished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompletedWork {
    pub done: Extents,
    /// For each file index, the CRC-32 values of byte ranges that are not combined into a checksum in the output file
    /// yet. They are in ascending order of the byte ranges.
    pub sums: BTreeMap<u32, Vec<ChecksumPart>>,
    /// The number of values that casts lost.
    pub lost: CastLosses,
    /// The indices of sidecar files that were copied.
    pub carried: BTreeSet<u32>,
    /// The journal entries that make up `done`.
    pub taken: Vec<RecordedRange>,
    /// Journal entries that are not in `taken` because they overlap entries in `done`. Such entries exist if, for
    /// example, a process seemed dead, and another process wrote the same byte ranges again.
    spare: Vec<RecordedRange>,
}

/// A byte range that is recorded as finished, and the journal that contains it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedRange {
    journal: Arc<str>,
    pub file: u32,
    pub range: Range<u64>,
    pub digest: u32,
}

impl RecordedRange {
    /// Returns the length of the range, which is never 0.
    pub fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn invalidated_entry(&self) -> InvalidatedEntry {
        InvalidatedEntry { journal: self.journal.to_string(), file: self.file, start: self.range.start }
    }
}

impl CompletedWork {
    /// Reads all journals of `folder`. The output consists of `files`, and `carried` is the number of sidecar files.
    /// With `sync`, the completed work must be on disk, so records that are valid on one boot only are ignored.
    ///
    /// # Errors
    /// `Io` if the folder or a journal cannot be read.
    pub fn read(folder: &AnchoredPath, files: &[OutputFile], carried: usize, sync: bool) -> Result<Self> {
        let mut known = Self::default();
        let here = boot_of(sync).filter(|boot| !boot.is_empty());
        let mut records: Vec<(Arc<str>, JournalRecord)> = Vec::new();
        for path in journals(folder)? {
            let name: Arc<str> = path.file_name().to_string_lossy().into();
            let mut reader = BufReader::new(fresh_lookup::open(&path).map_err(Error::io("open", &path))?);
            let mut line = Vec::new();
            loop {
                line.clear();
                let read = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
                read.map_err(Error::io("read", &path))?;
                match of_line(&line).filter(|(record, _)| record.is_possible(files, carried)) {
                    None => break,
                    Some((record, boot)) if boot.is_none() || boot == here => records.push((Arc::clone(&name), record)),
                    Some(_) => {}
                }
            }
        }
        let invalidated: HashSet<InvalidatedEntry> =
            records.iter().flat_map(|(_, record)| record.invalidated.iter().cloned()).collect();
        for (journal, record) in records {
            known.take(&journal, record, &invalidated);
        }
        for (file, sums) in &mut known.sums {
            sums.sort_unstable_by_key(|part| part.offset);
            ChecksumPart::join(sums, &files[*file as usize]);
        }
        Ok(known)
    }

    fn take(&mut self, journal: &Arc<str>, record: JournalRecord, invalidated: &HashSet<InvalidatedEntry>) {
        for FinishedRange { file, range, digest, checksum_parts: sums, cast_losses: lost } in record.entries {
            let taken = RecordedRange { journal: Arc::clone(journal), file, range: range.clone(), digest };
            if !invalidated.is_empty() && invalidated.contains(&taken.invalidated_entry()) {
                continue;
            }
            if self.done.overlaps(file, &range) {
                // The checksums and cast counts of an entry belong to the entire entry, so a part of the entry cannot
                // be used.
                self.spare.push(taken);
                continue;
            }
            self.taken.push(taken);
            self.done.insert(file, range);
            if !sums.is_empty() {
                self.sums.entry(file).or_default().extend(sums);
            }
            add_cast_losses(&mut self.lost, &lost);
        }
        self.carried.extend(record.carried);
    }

    /// Returns, for each journal, the number of finished bytes that it records.
    pub fn len_bytes_by_journal(&self) -> HashMap<Arc<str>, u64> {
        let mut lengths = HashMap::new();
        for taken in &self.taken {
            *lengths.entry(Arc::clone(&taken.journal)).or_default() += taken.len_bytes();
        }
        lengths
    }

    /// Returns the journal entries that must be invalidated, so that the bytes of `ranges` no longer count as finished.
    /// The entries include entries of other journals that record some of these bytes.
    pub fn invalidated_entries(&self, ranges: &[&RecordedRange]) -> Vec<InvalidatedEntry> {
        let mut bytes = Extents::new();
        ranges.iter().for_each(|taken| bytes.insert(taken.file, taken.range.clone()));
        let spare = self.spare.iter().filter(|taken| bytes.overlaps(taken.file, &taken.range));
        ranges.iter().copied().chain(spare).map(RecordedRange::invalidated_entry).collect()
    }
}

/// Returns true if a folder contains no journal. This means that no work is recorded, because a process creates its
/// journal together with its first record.
///
/// # Errors
/// `Io` if the folder cannot be read.
pub fn is_empty(folder: &AnchoredPath) -> Result<bool> {
    journals(folder).map(|journals| journals.is_empty())
}

/// Returns the paths of the journals in a folder, sorted by name, so that every process reads them in the same order.
fn journals(folder: &AnchoredPath) -> Result<Vec<AnchoredPath>> {
    let mut names = folder.names().map_err(Error::io("list", folder))?;
    names.retain(|name| Path::new(name).extension().is_some_and(|extension| extension == EXTENSION));
    names.sort_unstable();
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// A recorded byte range whose bytes have changed since they were written.
#[derive(Clone, Debug)]
pub struct ChangedRange {
    pub taken: RecordedRange,
    pub found: u32,
}

/// Reads again all recorded ranges that overlap the byte ranges `own`. Returns those whose bytes in `folder` have
/// changed.
///
/// # Errors
/// `Io`, `Stopped`.
pub fn changed(
    known: &CompletedWork,
    own: &Extents,
    folder: &AnchoredPath,
    files: &[OutputFile],
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Vec<ChangedRange>> {
    let look = |taken: &RecordedRange| -> Result<Option<ChangedRange>> {
        let file = &files[taken.file as usize];
        let path = folder.join(&file.path);
        let open = path.open().map_err(Error::io("open", &path))?;
        let mut digest = Digest::new(file, &taken.range);
        for_each_block(&open, path.path(), &taken.range, |block| {
            digest.update(block);
            reporter.advance(block.len() as u64);
            stop.check()
        })?;
        let found = digest.finish();
        Ok((found != taken.digest).then(|| ChangedRange { taken: taken.clone(), found }))
    };
    let is_own = |taken: &&RecordedRange| own.overlaps(taken.file, &taken.range);
    let found: Vec<Result<Option<ChangedRange>>> = known.taken.par_iter().filter(is_own).map(look).collect();
    found.into_iter().filter_map(Result::transpose).collect()
}
