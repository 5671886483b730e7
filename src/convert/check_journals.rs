//! Validation of the journals: checks that the files contain the byte ranges that the journals record as written.
//!
//! An entry is valid if its file has the expected length and, with `--verify`, if the bytes in the file have the
//! recorded digest. For an invalid entry, this process prints a warning and [invalidates](crate::publish::journal) the
//! entry, so the bytes of the entry are written again. All other entries stay valid.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use super::prepared::Prepared;
use super::run::Run;
use crate::catalog::OutputFile;
use crate::error::{Error, Result, StorageError};
use crate::exchange::partial_replicas;
use crate::exec::Extents;
use crate::exec::sidecar_files::{SidecarFile, is_copied};
use crate::progress::Task;
use crate::publish::Staging;
use crate::publish::completed_work::{ChangedRange, CompletedWork, RecordedRange, changed};
use crate::publish::journal::invalidate;
use crate::publish::seal::misfits;
use crate::quantity::human_bytes;

/// Maximum number of warnings that are printed one by one; the remaining warnings are only counted.
const MOST_WARNINGS: usize = 8;

/// The journals of an unfinished destination, with the conversion that writes this destination.
#[derive(Clone, Copy)]
pub struct JournalSet<'a> {
    pub conversion: &'a Prepared,
    pub staging: &'a Staging,
    pub run: &'a Run<'a>,
    pub sync: bool,
}

impl JournalSet<'_> {
    fn files(&self) -> &[OutputFile] {
        &self.conversion.reservation.files
    }

    /// Returns the work that the journals of all processes and runs record.
    ///
    /// # Errors
    /// `Io`.
    pub fn known(&self) -> Result<CompletedWork> {
        CompletedWork::read(self.staging.journals(), self.files(), self.conversion.carried.len(), self.sync)
    }

    /// Returns the recorded work. Returns `None` if another process has published the destination and removed the
    /// journals.
    ///
    /// # Errors
    /// `Io`.
    pub fn known_yet(&self) -> Result<Option<CompletedWork>> {
        match self.known() {
            Err(Error::Storage(StorageError::Io { source, .. })) if source.kind() == ErrorKind::NotFound => Ok(None),
            known => known.map(Some),
        }
    }

    /// Validates the journal entries of the files in which this process writes; `own` has the byte ranges that it
    /// writes. Prints warnings about invalid entries, invalidates them, and returns the work that the valid entries
    /// record. With `verify`, the bytes of `own` that are recorded as done are read and compared with their recorded
    /// digests.
    ///
    /// # Errors
    /// `Io`, `Stopped`.
    pub fn validated(&self, own: &Extents, verify: bool) -> Result<CompletedWork> {
        let (folder, files) = (self.staging.folder(), self.files());
        let (mut known, mut misfits) = self.known_and_misfits(own)?;
        let contradicts = |known: &CompletedWork, misfits: &BTreeMap<u32, String>| {
            known.taken.iter().any(|taken| misfits.contains_key(&taken.file))
        };
        if contradicts(&known, &misfits) {
            // An invalidation applies to all processes. So this process first makes sure that the mismatch does not
            // come from a stale file-system cache.
            self.staging.confirm(&self.run.stop, "what is recorded as written", || {
                (known, misfits) = self.known_and_misfits(own)?;
                Ok(!contradicts(&known, &misfits))
            })?;
        }
        let of_misfits = |taken: &&RecordedRange| misfits.contains_key(&taken.file);
        let mut invalid: Vec<&RecordedRange> = known.taken.iter().filter(of_misfits).collect();
        let mut warnings: Vec<String> = Vec::new();
        for (index, found) in &misfits {
            let bytes: u64 = invalid.iter().filter(|taken| taken.file == *index).map(|taken| taken.len_bytes()).sum();
            if bytes > 0 {
                let file = &files[*index as usize];
                let (path, len) = (folder.join(&file.path), file.len);
                warnings.push(format!(
                    "{}: expected {len} bytes, found {found}; {} that the journal records as finished are written again",
                    path.display(),
                    human_bytes(bytes)
                ));
            }
        }
        let whole = own.without_files(|file| misfits.contains_key(&file));
        let found = if verify && !known.taken.is_empty() {
            let own_bytes = known.taken.iter().filter(|taken| whole.overlaps(taken.file, &taken.range));
            let progress = Task::start(self.run.progress, "checking", own_bytes.map(RecordedRange::len_bytes).sum());
            changed(&known, &whole, folder, files, &progress, &self.run.stop)?
        } else {
            Vec::new()
        };
        for ChangedRange { taken, found } in &found {
            warnings.push(format!(
                "{}: bytes {} to {} are recorded as done, but have another CRC-32 (expected {:08x}, found {found:08x}), so they \
                 are written again",
                folder.join(&files[taken.file as usize].path).display(),
                taken.range.start,
                taken.range.end,
                taken.digest
            ));
            invalid.push(taken);
        }
        if invalid.is_empty() {
            return Ok(known);
        }
        let more = warnings.len().saturating_sub(MOST_WARNINGS);
        warnings.iter().take(MOST_WARNINGS).for_each(|warning| self.run.progress.warning(warning));
        if more > 0 {
            self.run.progress.warning(&format!("{more} more ranges that are recorded as done are written again"));
        }
        invalidate(self.staging.journal(), known.invalidated_entries(&invalid), self.sync)?;
        self.known()
    }

    /// Returns the recorded work, and the files of `own` that had the same wrong length before and after the journals
    /// were read: the index of each file, and its length as text.
    ///
    /// The lengths are read twice, because another process may create or extend a file at the same time. That process
    /// first invalidates the old entries of the file, and records new entries afterwards. If the old length were
    /// compared with the new entries, valid entries would be invalidated.
    fn known_and_misfits(&self, own: &Extents) -> Result<(CompletedWork, BTreeMap<u32, String>)> {
        let these: Vec<u32> = own.files().collect();
        let mut before = misfits(self.staging.folder(), self.files(), &these)?;
        loop {
            let known = self.known()?;
            if known.taken.is_empty() || before.is_empty() {
                return Ok((known, before));
            }
            let after = misfits(self.staging.folder(), self.files(), &these)?;
            if before == after {
                return Ok((known, before));
            }
            before = after;
        }
    }

    /// Returns true if a journal records that sidecar file `number` was copied, and the copy is correct: it has the
    /// expected length and, with `verify`, the bytes of the original. Prints a warning if the copy is wrong.
    ///
    /// # Errors
    /// `Io`.
    pub fn has_carried(&self, known: &CompletedWork, number: u32, file: &SidecarFile, verify: bool) -> Result<bool> {
        if !known.carried.contains(&number) {
            return Ok(false);
        }
        let (folder, stop) = (self.staging.folder(), &self.run.stop);
        let is_there = self.staging.confirm(stop, "what is recorded as copied", || is_copied(file, folder, false))?;
        let is_whole = is_there && (!verify || is_copied(file, folder, true)?);
        if !is_whole {
            let path = self.staging.folder().join(&file.to);
            self.run
                .progress
                .warning(&format!("{} differs from the file that was copied; it is copied again", path.display()));
        }
        Ok(is_whole)
    }

    /// Invalidates journal entries of reduced tensors (sums of partial values), so that each element is recorded as
    /// written in all replicas or in none. Reason: NCCL must reduce all replicas of an element in one operation, or
    /// their last bits may differ.
    ///
    /// An entry can only be invalidated as a whole, so other elements may then be missing in one replica. Therefore the
    /// function repeats the check until no element is missing in only some of its replicas.
    ///
    /// # Errors
    /// `Io`.
    pub fn invalidate_partial_replicas(&self) -> Result<()> {
        let Prepared { source, reservation, .. } = self.conversion;
        loop {
            let known = self.known()?;
            let partial = partial_replicas(&source.checkpoint.catalog, reservation, &known.done);
            if !known.taken.iter().any(|taken| partial.overlaps(taken.file, &taken.range)) {
                return Ok(());
            }
            self.invalidate(&known, &partial)?;
        }
    }

    /// Invalidates the journal entries of all processes that overlap with `bytes`. `known` is the work that the
    /// journals record.
    ///
    /// # Errors
    /// `Io`.
    pub fn invalidate(&self, known: &CompletedWork, bytes: &Extents) -> Result<()> {
        let is_meant = |taken: &&RecordedRange| bytes.overlaps(taken.file, &taken.range);
        let invalid: Vec<&RecordedRange> = known.taken.iter().filter(is_meant).collect();
        invalidate(self.staging.journal(), known.invalidated_entries(&invalid), self.sync)
    }
}
