//! What is recorded as done, as far as it can be believed.
//!
//! An entry counts where its file is as long as it should be and, with `--verify`, where what is there has the digest
//! that it tells. One that does not is [doubted](crate::publish::journal), with a warning, and is work to be done; what else
//! was done stays done.

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
use crate::publish::journal::doubt;
use crate::publish::recovery::{ChangedRange, CompletedWork, RecordedRange, changed};
use crate::publish::seal::misfits;
use crate::quantity::human_bytes;

/// Warnings that are told one by one.
const MOST_WARNINGS: usize = 8;

/// The journals of what is being written, and what they are about.
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

    /// What all runs have recorded.
    ///
    /// # Errors
    /// `Io`
    pub fn known(&self) -> Result<CompletedWork> {
        CompletedWork::read(self.staging.journals(), self.files(), self.conversion.carried.len(), self.sync)
    }

    /// The same, as long as nobody has published and taken it away.
    ///
    /// # Errors
    /// `Io`
    pub fn known_yet(&self) -> Result<Option<CompletedWork>> {
        match self.known() {
            Err(Error::Storage(StorageError::Io { source, .. })) if source.kind() == ErrorKind::NotFound => Ok(None),
            known => known.map(Some),
        }
    }

    /// What is recorded and can be believed, of what reaches into `own`.
    ///
    /// # Errors
    /// `Io`, `Stopped`.
    pub fn believed(&self, own: &Extents, verify: bool) -> Result<CompletedWork> {
        let (folder, files) = (self.staging.folder(), self.files());
        let (mut known, mut misfits) = self.known_and_misfits(own)?;
        let contradicts = |known: &CompletedWork, misfits: &BTreeMap<u32, String>| {
            known.taken.iter().any(|taken| misfits.contains_key(&taken.file))
        };
        if contradicts(&known, &misfits) {
            // Doubt is for all processes, so a file must not be missing from a cache alone.
            self.staging.confirm(&self.run.stop, "what is recorded as written", || {
                (known, misfits) = self.known_and_misfits(own)?;
                Ok(!contradicts(&known, &misfits))
            })?;
        }
        let of_misfits = |taken: &&RecordedRange| misfits.contains_key(&taken.file);
        let mut doubted: Vec<&RecordedRange> = known.taken.iter().filter(of_misfits).collect();
        let mut warnings: Vec<String> = Vec::new();
        for (index, found) in &misfits {
            let bytes: u64 = doubted.iter().filter(|taken| taken.file == *index).map(|taken| taken.len_bytes()).sum();
            if bytes > 0 {
                let file = &files[*index as usize];
                let (path, len) = (folder.join(&file.path), file.len);
                warnings.push(format!(
                    "{}: expected {len} bytes, found {found}; {} of it that are recorded as done are written again",
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
                "{}: bytes {} to {}, which are recorded as done: expected CRC-32 {:08x}, found {found:08x}; they are \
                 written again",
                folder.join(&files[taken.file as usize].path).display(),
                taken.range.start,
                taken.range.end,
                taken.digest
            ));
            doubted.push(taken);
        }
        if doubted.is_empty() {
            return Ok(known);
        }
        let more = warnings.len().saturating_sub(MOST_WARNINGS);
        warnings.iter().take(MOST_WARNINGS).for_each(|warning| self.run.progress.warning(warning));
        if more > 0 {
            self.run.progress.warning(&format!("{more} more that are recorded as done are written again"));
        }
        doubt(self.staging.journal(), known.doubts(&doubted), self.sync)?;
        self.known()
    }

    /// What is recorded, and the files that were not as long as they should be before and after that was read: whoever
    /// makes a file, or makes it whole, records nothing of it before and doubts what was recorded first.
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

    /// Whether a carried file is recorded and there as it should be; its bytes are compared with `--verify`.
    ///
    /// # Errors
    /// `Io`
    pub fn has_carried(&self, known: &CompletedWork, number: u32, file: &SidecarFile, verify: bool) -> Result<bool> {
        if !known.carried.contains(&number) {
            return Ok(false);
        }
        let (folder, stop) = (self.staging.folder(), &self.run.stop);
        let is_there = self.staging.confirm(stop, "what is recorded as copied", || is_copied(file, folder, false))?;
        let is_whole = is_there && (!verify || is_copied(file, folder, true)?);
        if !is_whole {
            let path = self.staging.folder().join(&file.to);
            self.run.progress.warning(&format!("{} is not what was copied; it is copied again", path.display()));
        }
        Ok(is_whole)
    }

    /// Doubt copies of what is missing of reduced tensors, until none is left: an entry is doubted as a whole.
    ///
    /// # Errors
    /// `Io`
    pub fn doubt_torn(&self) -> Result<()> {
        let Prepared { source, reservation, .. } = self.conversion;
        loop {
            let known = self.known()?;
            let partial = partial_replicas(&source.checkpoint.catalog, reservation, &known.done);
            if !known.taken.iter().any(|taken| partial.overlaps(taken.file, &taken.range)) {
                return Ok(());
            }
            self.doubt(&known, &partial)?;
        }
    }

    /// Record that these bytes are not what they should be, whoever wrote them.
    ///
    /// # Errors
    /// `Io`
    pub fn doubt(&self, known: &CompletedWork, bytes: &Extents) -> Result<()> {
        let is_meant = |taken: &&RecordedRange| bytes.overlaps(taken.file, &taken.range);
        let doubted: Vec<&RecordedRange> = known.taken.iter().filter(is_meant).collect();
        doubt(self.staging.journal(), known.doubts(&doubted), self.sync)
    }
}
