//! The log of a run keeps the remaining work and the finished work, and writes the records of this process's journal.
//!
//! Write blocks are finished one by one, but their sources are checked one window (a group of tensors that are planned
//! together) at a time. The log keeps a finished write block until the sources of its window have been checked, and
//! then until the next journal record. A journal record is written every ten seconds, when the run is stopped, and at
//! the end of the run if other processes need it. If a record is missing, work is repeated; no record contains work
//! that was not done.
//!
//! All sizes and offsets are in bytes. Invariant: data that is recorded as synced has been synced.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::journal::{Journal, JournalRecord, boot_of};
use crate::catalog::OutputFile;
use crate::error::Result;
use crate::exec::{CastLosses, ChecksumPart, Extents, FinishedRange, Outputs, Stop, WorkLog, add_cast_losses};
use crate::storage::AnchoredPath;

/// The time between two journal records. A killed run has to repeat at most the work of this time.
const RECORD_EVERY: Duration = Duration::from_secs(10);

/// The choice whether the journal records the work that is finished at the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtEnd {
    /// The work is not recorded, because publishing follows immediately.
    Nothing,
    /// The work is recorded, because other processes need the record, or because publishing needs much more time.
    Record,
}

pub struct Log<'a> {
    files: &'a [OutputFile],
    todo: &'a Extents,
    is_all: bool,
    path: AnchoredPath,
    sync: bool,
    at_end: AtEnd,
    /// The work finished in the current window (a group of tensors that are planned together).
    window: Mutex<JournalRecord>,
    state: Mutex<LogState>,
}

struct LogState {
    /// The work that the next journal record will contain.
    next: JournalRecord,
    /// The checksum parts of all written records. Collected only if this run writes the entire output, because only
    /// such a run computes complete checksums without the journals of other runs.
    sums: Vec<(u32, ChecksumPart)>,
    /// The number of values that casts lost in this entire run.
    lost: CastLosses,
    journal: Option<Journal>,
    recorded: Instant,
}

impl<'a> Log<'a> {
    /// Creates the log of a run that still has to write the ranges `todo` of `files`. The journal at `path` is created
    /// together with its first record.
    #[must_use]
    pub fn new(files: &'a [OutputFile], todo: &'a Extents, path: AnchoredPath, sync: bool, at_end: AtEnd) -> Self {
        let (next, sums, lost) = Default::default();
        let state = LogState { next, sums, lost, journal: None, recorded: Instant::now() };
        let is_all = *todo == Extents::of_files(files);
        Self { files, todo, is_all, path, sync, at_end, window: Mutex::default(), state: Mutex::new(state) }
    }

    /// Records that a sidecar file has been copied.
    pub fn carried(&self, number: u32) {
        self.window().carried.push(number);
    }

    fn window(&self) -> MutexGuard<'_, JournalRecord> {
        self.window.lock().expect("no panic while the lock is held")
    }

    fn state(&self) -> MutexGuard<'_, LogState> {
        self.state.lock().expect("no panic while the lock is held")
    }

    /// Moves the finished work of the current window into the next record.
    fn close_window(&self) -> MutexGuard<'_, LogState> {
        let mut record = std::mem::take(&mut *self.window());
        record.compact(self.files);
        let mut state = self.state();
        record.entries.iter().for_each(|entry| add_cast_losses(&mut state.lost, &entry.cast_losses));
        state.next.append(record);
        state
    }

    fn record(&self, state: &mut LogState, outputs: &Outputs) -> Result<()> {
        if self.sync {
            let mut files: Vec<u32> = state.next.entries.iter().map(|entry| entry.file).collect();
            files.sort_unstable();
            files.dedup();
            files.into_par_iter().try_for_each(|file| outputs.sync(file, &Stop::default()))?;
        } else {
            outputs.close()?;
        }
        self.write(state, outputs)
    }

    /// Writes the next record. If the run syncs, the caller has already synced the data of the record.
    fn write(&self, state: &mut LogState, outputs: &Outputs) -> Result<()> {
        state.recorded = Instant::now();
        if state.next.is_empty() {
            return Ok(());
        }
        crate::fault::point("record-before");
        let journal = match &mut state.journal {
            Some(journal) => journal,
            None => {
                if self.sync {
                    outputs.sync_folders()?;
                }
                state.journal.insert(Journal::create(&self.path)?)
            }
        };
        crate::fault::point("record-created");
        journal.append(&state.next, boot_of(self.sync))?;
        crate::fault::point("record-after");
        let written = std::mem::take(&mut state.next);
        if self.is_all {
            state.sums.extend(written.sums());
        }
        Ok(())
    }
}

impl WorkLog for Log<'_> {
    fn todo(&self) -> &Extents {
        self.todo
    }

    fn covers_everything(&self) -> bool {
        self.is_all
    }

    fn add(&self, entry: FinishedRange) {
        self.window().entries.push(entry);
    }

    fn advance(&self, outputs: &Outputs, check: &dyn Fn() -> Result<()>) -> Result<()> {
        let is_full = self.window().is_full();
        let mut state = self.close_window();
        if is_full || state.recorded.elapsed() >= RECORD_EVERY || crate::fault::is_testing_faults() {
            check()?;
            self.record(&mut state, outputs)?;
        }
        Ok(())
    }

    fn checksum_parts(&self) -> Vec<(u32, ChecksumPart)> {
        let mut state = self.close_window();
        let mut sums = std::mem::take(&mut state.sums);
        sums.extend(state.next.sums());
        sums
    }

    fn finish(&self, outputs: &Outputs, stop: &Stop) -> Result<()> {
        if self.sync {
            let files: Vec<u32> = self.todo.files().collect();
            files.into_par_iter().try_for_each(|file| outputs.sync(file, stop))?;
        }
        outputs.close()?;
        let mut state = self.close_window();
        if self.at_end == AtEnd::Nothing { Ok(()) } else { self.write(&mut state, outputs) }
    }

    /// Records the work whose sources have been checked. If recording fails, the next run repeats the work.
    fn stop(&self, outputs: &Outputs) {
        let mut state = self.state();
        let _ = self.record(&mut state, outputs);
    }

    fn cast_losses(&self) -> CastLosses {
        self.state().lost.clone()
    }
}
