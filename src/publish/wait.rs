//! Waiting for the other parts, and for the process that publishes.
//!
//! A process that has finished its part reads the leases of the others repeatedly. The process stops waiting when the
//! checkpoint is published, when all parts are finished and no process seals, or when some parts will not finish. Every
//! wait is bounded. A process waits at most five minutes for a part to start. If the process of a part is dead, other
//! processes wait two more seconds, because it may be restarted.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::destination::FileIdentity;
use super::lease::{LeaseLost, LeaseRole, LeaseState, SeenLease};
use super::partial_folder::Partial;
use super::{Staging, published_xattr};
use crate::comm::Process;
use crate::error::{Error, Result};
use crate::exec::Stop;
use crate::launch::Part;
use crate::name_list::numbered;

/// The progress of another part, as its lease shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherState {
    NotStarted,
    Working,
    /// The work of the part is finished. Its process may have left the run.
    Finished,
    /// The work of the part is not finished, and its process has ended or makes no progress any more.
    Stopped,
}

/// The part of the work that another process does, with its progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherPart {
    pub part: Part,
    pub state: OtherState,
    /// The number of bytes that the process of the part has finished in this run.
    pub done_bytes: u64,
    /// The name of the part's journal; `None` if no process of this run has worked on the part.
    pub journal: Option<String>,
    /// The error that ended the last process of the part; `None` if the lease of the part records no error.
    pub failure: Option<String>,
}

/// The reason why a wait ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The wait ended because the destination is published.
    Published,
    /// The wait ended because all parts are finished, but no live process seals.
    NobodySeals,
    /// The wait ended because these parts will not finish.
    Without(MissingParts),
}

/// The parts that will not finish. The journals may record all of their work nevertheless.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingParts {
    pub parts: Vec<u32>,
    has_started: bool,
}

/// The maximum time that publishing takes, from its first step to its last step, as other processes observe it.
const PUBLISHING: Duration = Duration::from_secs(1);

/// The action of a waiting process after a check of the other parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Wait,
    Seal,
    GiveUp(MissingParts),
}

/// Returns what to do, depending on the states of the other parts. `is_sealing` is true if a live process is sealing.
pub(super) fn decide(is_sealing: bool, others: &[OtherPart]) -> Decision {
    let of_state = |state: OtherState| -> Vec<u32> {
        others.iter().filter(|other| other.state == state).map(|other| other.part.index).collect()
    };
    let (stopped, not_started) = (of_state(OtherState::Stopped), of_state(OtherState::NotStarted));
    if is_sealing {
        Decision::Wait
    } else if !stopped.is_empty() {
        Decision::GiveUp(MissingParts { parts: stopped, has_started: true })
    } else if !not_started.is_empty() {
        Decision::GiveUp(MissingParts { parts: not_started, has_started: false })
    } else if others.iter().all(|other| other.state == OtherState::Finished) {
        Decision::Seal
    } else {
        Decision::Wait
    }
}

/// Measures the time during which every check has found a condition to be true.
#[derive(Default)]
struct UnchangedSince(Option<Instant>);

impl UnchangedSince {
    /// Records the result of one more check. Returns the time during which the condition has been true in every check.
    fn note(&mut self, is_so: bool) -> Duration {
        if !is_so {
            self.0 = None;
            return Duration::ZERO;
        }
        self.0.get_or_insert_with(Instant::now).elapsed()
    }
}

impl Staging {
    /// Returns the state of each other part, as its lease shows it.
    ///
    /// # Errors
    /// `Io` if the leases cannot be read.
    pub fn others(&self) -> Result<Vec<OtherPart>> {
        Ok(self.find()?.map_or_else(Vec::new, |found| self.others_of(&found)))
    }

    /// Waits until another process has published, or until this process should try to publish. Call it after this part
    /// is finished.
    ///
    /// # Errors
    /// `Usage` if the partial folder no longer exists; `Stopped`; `Io`.
    pub fn wait_published(&self, stop: &Stop, notify: &mut dyn FnMut(&[OtherPart])) -> Result<Waited> {
        let begun = *self.waiting.get_or_init(Instant::now);
        let [mut gone, mut done, mut stopped] = [(); 3].map(|()| UnchangedSince::default());
        let mut nap = self.pace.nap();
        loop {
            // A missing partial folder does not end the wait, because publishing removes the folder.
            stop.check_signal()?;
            self.destination.refresh(stop)?;
            let found = self.find()?;
            let sealer = found.as_ref().and_then(|found| self.sealer(found));
            let is_left = found.is_none();
            if let Some(found) = found.filter(|found| !found.is_published) {
                gone.note(false);
                let others = self.others_of(&found);
                notify(&others);
                let decision = decide(sealer.is_some_and(|state| state != LeaseState::Dead), &others);
                let stopped_for = stopped.note(matches!(&decision, Decision::GiveUp(missing) if missing.has_started));
                match decision {
                    Decision::Wait => {}
                    // If the process of the first part is alive, it seals, because it reports the totals.
                    Decision::Seal => {
                        if self.claim.part.index == 0 || done.note(true) >= self.pace.seal_after {
                            return Ok(Waited::NobodySeals);
                        }
                    }
                    Decision::GiveUp(missing) => {
                        let is_over = if missing.has_started {
                            stopped_for >= self.pace.stopped_after
                        } else {
                            begun.elapsed() >= self.pace.start_within
                        };
                        if is_over {
                            return Ok(Waited::Without(missing));
                        }
                    }
                }
            } else if !self.has_landed() {
                // Network file systems may show the second of two renames before they show the first.
                if gone.note(true) >= self.pace.dead_after && self.is_gone_for_good(stop, || self.has_landed())? {
                    return Err(self.holding.error(LeaseLost::Gone));
                }
            } else if is_left || sealer == Some(LeaseState::Dead) {
                if !is_left {
                    self.tidy(self.claim.sync)?;
                }
                self.see_published();
                return Ok(Waited::Published);
            }
            nap.take();
        }
    }

    /// Counts these parts as finished, because the journals record all of their work.
    pub fn mark_finished(&self, missing: MissingParts) {
        self.finished().extend(missing.parts);
    }

    /// Returns the error for an output that cannot be completed because these parts are missing.
    pub fn without(&self, missing: &MissingParts) -> Error {
        let (parts, destination) = (&missing.parts, self.destination.path.display());
        let named = |parts: &[u32]| {
            // The text is, for example, `part 1 of 4` or `parts 1, 3 of 4`.
            format!("{} of {}", numbered("part", "parts", parts.iter().copied()), self.claim.part.of)
        };
        let (has, its) = if parts.len() == 1 { ("has", "its process is") } else { ("have", "their processes are") };
        // If a launcher chose the number of parts, the user may not know the options for this number, so the hint names
        // them.
        let alone = if self.claim.run.is_some() {
            "; use options::part 0 options::parts 1 to do all of the work in one process"
        } else {
            ""
        };
        let how_to_go_on = format!(
            "the completed work is kept in {}: run the same command with options::resume to continue{alone}",
            self.partial.display()
        );
        if !missing.has_started {
            let message = format!("{} {has} not started to write {destination}", named(parts));
            return Error::usage(message, format!("start the missing parts; {how_to_go_on}"));
        }
        let found = self.find().ok().flatten();
        let others = found.as_ref().map_or_else(Vec::new, |found| self.others_of(found));
        let mut failed = others.iter().filter(|other| parts.contains(&other.part.index));
        if let Some((index, reason)) = failed.find_map(|other| Some((other.part.index, other.failure.as_ref()?))) {
            let message = format!("{} failed: {reason}; {destination} is not complete", named(&[index]));
            return Error::usage(message, how_to_go_on);
        }
        let here = Process::this();
        let leases = parts.iter().filter_map(|index| {
            found.as_ref()?.lease(LeaseRole::Part(Part { index: *index, ..self.claim.part }))?.record.as_ref()
        });
        let stuck: Vec<String> = leases
            .filter(|record| !record.phase.is_over() && record.process.is_alive(&here) == Some(true))
            .map(|record| record.process.to_string())
            .collect();
        if stuck.is_empty() {
            let message = format!("{} stopped: {its} gone; {destination} is not complete", named(parts));
            return Error::usage(message, how_to_go_on);
        }
        let minutes = self.pace.stuck_after.as_secs() / 60;
        Error::usage(
            format!("{} {has} made no progress for {minutes} minutes ({})", named(parts), stuck.join("; ")),
            format!("first end each process that is suspended or blocked by its file system; {how_to_go_on}"),
        )
    }

    /// Returns true if another process has published the output at the destination. That process normally removes the
    /// partial folder. If the publishing process has died, this process removes the folder.
    pub fn was_published(&self, stop: &Stop) -> bool {
        let is_marked = || published_xattr::is(&self.destination.path, self.fingerprint);
        let (begun, mut nap) = (Instant::now(), self.pace.nap());
        loop {
            let is_stopped = self.destination.refresh(stop).is_err();
            let found = self.find();
            let sealer = found.iter().flatten().find_map(|found| self.sealer(found));
            let is_sealer_dead = sealer == Some(LeaseState::Dead);
            let (is_out, is_left) = match found {
                Ok(None) => (true, true),
                Ok(Some(found)) if !found.is_published && sealer.is_none() => return false,
                found => (found.is_ok_and(|found| found.is_some_and(|found| found.is_published)), false),
            };
            // The sealing process may be between two steps, or this node may not see all of its steps yet.
            let is_late = is_stopped || begun.elapsed() >= PUBLISHING;
            if is_out && (is_left || is_late || is_sealer_dead) && is_marked() {
                if is_sealer_dead {
                    // If this cleanup fails, the next run cleans up.
                    let _ = self.tidy(self.claim.sync);
                }
                self.see_published();
                return true;
            }
            if is_stopped || is_late && (!is_left || self.is_gone_for_good(stop, is_marked).unwrap_or(true)) {
                return false;
            }
            nap.take();
        }
    }

    /// Records that another process has published. This process then removes the files that are left.
    pub fn see_published(&self) {
        self.is_published.store(true, Ordering::Relaxed);
    }

    /// Repeats `look`, which checks files that other processes have written, until it returns true or until the file
    /// system can no longer return cached names.
    ///
    /// # Errors
    /// `Stopped`, and the errors of `look`.
    pub fn confirm(&self, stop: &Stop, what: &str, look: impl FnMut() -> Result<bool>) -> Result<bool> {
        let what = format!("waiting for the file system to show {what} in {}", self.partial.display());
        self.destination.confirm(stop, &what, look)
    }

    /// Waits until names in the cache of the file system are no longer old. Returns true if the partial folder and the
    /// output are still missing; another program must then have removed them.
    fn is_gone_for_good(&self, stop: &Stop, has_landed: impl Fn() -> bool) -> Result<bool> {
        if self.is_gone.load(Ordering::Relaxed) || self.destination.cached_for().is_zero() {
            return Ok(true);
        }
        let what = format!("waiting for the file system to show what became of {}", self.partial.display());
        let is_there = self.destination.confirm(stop, &what, || {
            self.destination.look_up();
            Ok(self.find()?.is_some() || has_landed())
        })?;
        self.is_gone.store(!is_there, Ordering::Relaxed);
        Ok(!is_there)
    }

    /// Returns true if the output of this plan is at the destination. If this process does not know the identity of the
    /// output, any file or folder at the destination counts.
    pub(super) fn has_landed(&self) -> bool {
        let Some(there) = FileIdentity::of(&self.destination.target()) else { return false };
        let is_known = self.identity.get().is_none_or(|identity| *identity == there);
        is_known || published_xattr::is(&self.destination.path, self.fingerprint)
    }

    fn sealer(&self, found: &Partial) -> Option<LeaseState> {
        found.lease(LeaseRole::Seal).map(|seen| self.lease_state(seen))
    }

    pub(super) fn lease_state(&self, seen: &SeenLease) -> LeaseState {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner).state(seen, Instant::now())
    }

    fn finished(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn others_of(&self, found: &Partial) -> Vec<OtherPart> {
        let own = self.claim.part;
        let leases: HashMap<LeaseRole, &SeenLease> = found.leases.iter().map(|seen| (seen.name.role, seen)).collect();
        let finished = self.finished();
        let other = |index: u32| {
            let part = Part { index, of: own.of };
            let seen = leases.get(&LeaseRole::Part(part)).copied();
            let record = seen.and_then(|seen| seen.record.as_ref());
            let mut state = seen.map_or(OtherState::NotStarted, |seen| self.state_of(seen));
            // A stale lease is from an earlier run, and its journal contains only work of that run.
            let now = seen.filter(|seen| !self.stale.contains(seen));
            if state != OtherState::Working && finished.contains(&index) {
                state = OtherState::Finished;
            }
            OtherPart {
                part,
                state,
                done_bytes: now.and(record).map_or(0, |record| record.done_bytes),
                journal: now.map(|seen| seen.name.journal()),
                failure: record.and_then(|record| Some(record.failure.as_ref()?.reason.clone())),
            }
        };
        (0..own.of).filter(|index| *index != own.index).map(other).collect()
    }

    fn state_of(&self, seen: &SeenLease) -> OtherState {
        let is_done = seen.record.as_ref().is_some_and(|record| record.phase.is_done());
        match self.lease_state(seen) {
            LeaseState::Dead if self.stale.contains(seen) => OtherState::NotStarted,
            LeaseState::Unsure if self.stale.contains(seen) => OtherState::Working,
            _ if is_done => OtherState::Finished,
            LeaseState::Dead => OtherState::Stopped,
            LeaseState::Alive | LeaseState::Unsure => OtherState::Working,
        }
    }
}
