//! How far all are with what is written: bytes are told to who shows progress, and to the other processes.
//!
//! What others did before this run, and what they do in it, are told apart by whose journal it is in, as far as that has
//! shown: a process on another node is seen to live when it moves. Counts bytes of output. Invariant: what is shown never
//! goes back.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::exec::{Phase, Reporter};
use crate::launch::Part;
use crate::progress::Task;
use crate::publish::recovery::CompletedWork;
use crate::publish::{OtherPart, OtherState, Staging};

/// What was recorded when this process began, by this run or by earlier ones.
pub struct EarlierWork {
    by_journal: HashMap<Arc<str>, u64>,
}

impl EarlierWork {
    pub fn of(known: &CompletedWork) -> Self {
        Self { by_journal: known.len_bytes_by_journal() }
    }

    /// What earlier runs have recorded of it, as far as the others are known to be of this one.
    pub fn bytes(&self, others: &[OtherPart]) -> u64 {
        let is_earlier = |journal: &str| others.iter().all(|other| other.journal.as_deref() != Some(journal));
        self.by_journal.iter().filter(|(journal, _)| is_earlier(journal)).map(|(_, bytes)| bytes).sum()
    }

    /// With what those have done that may be at it.
    fn bytes_with(&self, others: &[OtherPart]) -> u64 {
        let at_it = others.iter().filter(|other| other.state != OtherState::Stopped);
        at_it.map(|other| other.done_bytes).fold(self.bytes(others), u64::saturating_add)
    }
}

/// Tells bytes as they are written.
pub struct Meter<'a> {
    progress: &'a Task<'a>,
    staging: &'a Staging,
    before: &'a EarlierWork,
    /// Where this one shows what all do: when it looked at the others, and what was shown of them.
    others: Option<Mutex<(Instant, u64)>>,
}

/// Time between two looks at the others.
const LOOK_EVERY: Duration = Duration::from_secs(2);

impl<'a> Meter<'a> {
    /// # Errors
    /// `Io`
    pub fn start(progress: &'a Task<'a>, staging: &'a Staging, before: &'a EarlierWork, part: Part) -> Result<Self> {
        let (others, shows_all) = (staging.others()?, part.index == 0);
        let shown = if shows_all { before.bytes_with(&others) } else { before.bytes(&others) };
        progress.skip(shown);
        let others = shows_all.then(|| Mutex::new((Instant::now(), shown)));
        Ok(Self { progress, staging, before, others })
    }

    /// Count bytes that an earlier run has done.
    pub fn skip(&self, bytes: u64) {
        self.progress.skip(bytes);
    }
}

impl Reporter for Meter<'_> {
    fn advance(&self, bytes: u64) {
        self.staging.done_bytes().fetch_add(bytes, Ordering::Relaxed);
        self.progress.advance(bytes);
        // Whoever does not get the lock at once leaves the look to the one who has it.
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

    /// What a process has recorded that is known only later to be of this run is not counted twice.
    #[test]
    fn what_is_of_this_run_was_not_before() {
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
