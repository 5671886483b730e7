//! Progress of writing, in bytes of output. Each process reports its own bytes to the progress display and to the other
//! processes; process 0 displays the bytes of all processes.
//!
//! In each run, each process writes a journal of its own. So the journal that records a range shows who wrote the
//! range: an earlier run, or another process of this run. The bytes of a process on another node count once its lease
//! has changed, because an unchanged lease may be from an earlier run. Invariant: the displayed progress never
//! decreases.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::exec::{Phase, Reporter};
use crate::launch::Part;
use crate::progress::Task;
use crate::publish::completed_work::CompletedWork;
use crate::publish::{OtherPart, OtherState, Staging};

/// The number of bytes that each journal recorded when this process started. A journal is from an earlier run, or from
/// another process of this run.
pub struct EarlierWork {
    by_journal: HashMap<Arc<str>, u64>,
}

impl EarlierWork {
    /// Returns the number of bytes that each journal in `known` records.
    pub fn of(known: &CompletedWork) -> Self {
        Self { by_journal: known.len_bytes_by_journal() }
    }

    /// Returns the number of bytes that earlier runs recorded. The journals of `others`, the other processes of this
    /// run, do not count.
    pub fn bytes(&self, others: &[OtherPart]) -> u64 {
        let is_earlier = |journal: &str| others.iter().all(|other| other.journal.as_deref() != Some(journal));
        self.by_journal.iter().filter(|(journal, _)| is_earlier(journal)).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the number of bytes that earlier runs recorded, plus the number of bytes that `others` have written in
    /// this run. The bytes of a process that has stopped before its work was finished do not count.
    fn bytes_with(&self, others: &[OtherPart]) -> u64 {
        let at_it = others.iter().filter(|other| other.state != OtherState::Stopped);
        at_it.map(|other| other.done_bytes).fold(self.bytes(others), u64::saturating_add)
    }
}

/// Displays the number of written bytes, and reports the bytes of this process to the other processes.
pub struct Meter<'a> {
    progress: &'a Task<'a>,
    staging: &'a Staging,
    before: &'a EarlierWork,
    /// For process 0: the time of the last check of the other processes, and the displayed bytes of earlier runs and
    /// other processes at that time. `None` for every other process, which displays only earlier runs and its own
    /// bytes.
    others: Option<Mutex<(Instant, u64)>>,
}

/// Minimum time between two checks of how many bytes the other processes have written.
const LOOK_EVERY: Duration = Duration::from_secs(2);

impl<'a> Meter<'a> {
    /// Starts the progress display with the bytes that earlier runs wrote. Process 0 adds the bytes that the other
    /// processes of this run have written, except processes that have stopped.
    ///
    /// # Errors
    /// `Io`.
    pub fn start(progress: &'a Task<'a>, staging: &'a Staging, before: &'a EarlierWork, part: Part) -> Result<Self> {
        let (others, shows_all) = (staging.others()?, part.index == 0);
        let shown = if shows_all { before.bytes_with(&others) } else { before.bytes(&others) };
        progress.skip(shown);
        let others = shows_all.then(|| Mutex::new((Instant::now(), shown)));
        Ok(Self { progress, staging, before, others })
    }

    /// Adds `bytes` to the displayed progress as work of an earlier run.
    pub fn skip(&self, bytes: u64) {
        self.progress.skip(bytes);
    }
}

impl Reporter for Meter<'_> {
    fn advance(&self, bytes: u64) {
        self.staging.done_bytes().fetch_add(bytes, Ordering::Relaxed);
        self.progress.advance(bytes);
        // If another thread holds the lock, that thread already checks the other processes.
        let Some(Ok(mut last)) = self.others.as_ref().map(Mutex::try_lock) else { return };
        let (looked, shown) = *last;
        if looked.elapsed() < LOOK_EVERY {
            return;
        }
        let others = self.staging.others().unwrap_or_default();
        let done = self.before.bytes_with(&others).max(shown);
        self.progress.advance(done - shown);
        *last = (Instant::now(), done);
    }

    fn phase(&self, phase: Phase) {
        self.progress.phase(phase);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets up three journals that were found at the start. Then process 1 turns out to be the writer of one of them.
    /// The bytes of this journal must then count once, as bytes of process 1, and no longer as earlier work.
    #[test]
    fn journal_of_this_run_does_not_count_as_earlier_work() {
        let recorded = [("part-1-of-3.0.journal", 5), ("part-1-of-3.1.journal", 30), ("part-2-of-3.0.journal", 200)];
        let before = EarlierWork { by_journal: recorded.map(|(name, bytes)| (name.into(), bytes)).into() };
        let other = |index, journal: Option<&str>, done_bytes| OtherPart {
            part: Part { index, of: 3 },
            state: OtherState::Working,
            done_bytes,
            journal: journal.map(String::from),
            failure: None,
        };
        let unseen = [other(1, None, 0), other(2, None, 0)];
        assert_eq!((before.bytes(&unseen), before.bytes_with(&unseen)), (235, 235));
        let seen = [other(1, Some(recorded[1].0), 31), other(2, None, 0)];
        assert_eq!((before.bytes(&seen), before.bytes_with(&seen)), (205, 236));
        assert_eq!(before.bytes(&[]), 235);
    }
}
