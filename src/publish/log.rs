//! The log of a run: what it has to write, what of it is finished, and how that gets into its journal.
//!
//! Strips are finished one by one, and their sources are checked a window at a time. A finished strip waits here until its
//! window has been checked, then for the next record. A record is written every ten seconds, when the run stops, and at
//! its end where others need it. A record that says too little costs work that is done again; none says too much.
//!
//! Counts bytes. Invariant: what is recorded as synced has been synced.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::journal::{Journal, JournalRecord, boot_of};
use crate::catalog::OutputFile;
use crate::error::Result;
use crate::exec::{CastLosses, ChecksumPart, Extents, FinishedRange, Outputs, Stop, WorkLog, add_cast_losses};
use crate::storage::AnchoredPath;

/// Time between records: work that a killed run has to do again.
const RECORD_EVERY: Duration = Duration::from_secs(10);

/// Whether the end of a run is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtEnd {
    /// What comes next is publishing, which takes no time.
    Nothing,
    /// Other processes have to know, or much is to be done before the result is published.
    Record,
}

pub struct Log<'a> {
    files: &'a [OutputFile],
    todo: &'a Extents,
    is_all: bool,
    path: AnchoredPath,
    sync: bool,
    at_end: AtEnd,
    /// What was finished in the current window.
    window: Mutex<JournalRecord>,
    state: Mutex<LogState>,
}

struct LogState {
    /// What the next record will say.
    next: JournalRecord,
    /// The parts of spans in all records, where this run writes everything.
    sums: Vec<(u32, ChecksumPart)>,
    /// The values that casts lost in all of this run.
    lost: CastLosses,
    journal: Option<Journal>,
    recorded: Instant,
}

impl<'a> Log<'a> {
    /// Creates the log of a run that has `todo` of these files to write. Its first record makes the journal at `path`.
    #[must_use]
    pub fn new(files: &'a [OutputFile], todo: &'a Extents, path: AnchoredPath, sync: bool, at_end: AtEnd) -> Self {
        let (next, sums, lost) = Default::default();
        let state = LogState { next, sums, lost, journal: None, recorded: Instant::now() };
        let is_all = *todo == Extents::of_files(files);
        Self { files, todo, is_all, path, sync, at_end, window: Mutex::default(), state: Mutex::new(state) }
    }

    /// Notes that a carried file has been copied.
    pub fn carried(&self, number: u32) {
        self.window().carried.push(number);
    }

    fn window(&self) -> MutexGuard<'_, JournalRecord> {
        self.window.lock().expect("no panic while the lock is held")
    }

    fn state(&self) -> MutexGuard<'_, LogState> {
        self.state.lock().expect("no panic while the lock is held")
    }

    /// What is in the window goes into the next record.
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

    /// Write what the next record says, whose data lasts.
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

    /// Records what has been checked. What cannot be recorded is done again by the next run.
    fn stop(&self, outputs: &Outputs) {
        let mut state = self.state();
        let _ = self.record(&mut state, outputs);
    }

    fn cast_losses(&self) -> CastLosses {
        self.state().lost.clone()
    }
}
