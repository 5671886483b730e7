//! What the other parts do, and waiting for the one that seals.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::lease::{Role, Seen};
use super::lease_monitor::Lost;
use super::liveness::Life;
use super::names::Identity;
use super::partial::Partial;
use super::{Pace, Staging, plan_xattr};
use crate::comm::Part;
use crate::error::{Error, Result};
use crate::exec::Stop;
use crate::name_list::numbered;

/// How far another part is, by its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherState {
    NotStarted,
    Working,
    /// Its process is done with it, and may have left.
    Finished,
    /// Its process is gone, and was not done.
    Stopped,
    /// Its process is there, and has not moved for so long that nobody waits for it.
    Stuck,
}

/// Another part of the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Other {
    pub part: Part,
    pub state: OtherState,
    /// In this run.
    pub done_bytes: u64,
    /// Where that is recorded; `None` where no process of this run was seen at it.
    pub journal: Option<String>,
    /// Why the last one that had it ended, where that was an error.
    pub failure: Option<String>,
}

/// How waiting ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The destination is there.
    Published,
    /// All parts are done, and nobody who lives seals.
    NobodySeals,
    /// These parts will not say that they are done.
    Without(Missing),
}

/// Parts that are waited for in vain. What they recorded may be all that they had to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    pub parts: Vec<u32>,
    /// Any but `Working` and `Finished`.
    why: OtherState,
}

/// From the first to the last step of publishing, as others see them.
const LANDING: Duration = Duration::from_secs(1);

/// What to do with one look at the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Wait,
    Seal,
    /// Without these; but not before this much time has passed.
    Without(Missing, Duration),
}

/// `sealer` lives, or may.
pub(super) fn decide(sealer: bool, others: &[Other], pace: &Pace) -> Decision {
    let of_state = |state: OtherState| -> Vec<u32> {
        others.iter().filter(|other| other.state == state).map(|other| other.part.index).collect()
    };
    if sealer {
        return Decision::Wait;
    }
    let patience = [
        (OtherState::Stopped, pace.stopped_after),
        (OtherState::Stuck, Duration::ZERO),
        (OtherState::NotStarted, pace.start_within),
    ];
    for (why, after) in patience {
        let parts = of_state(why);
        if !parts.is_empty() {
            return Decision::Without(Missing { parts, why }, after);
        }
    }
    let is_done = others.iter().all(|other| other.state == OtherState::Finished);
    if is_done { Decision::Seal } else { Decision::Wait }
}

impl Staging {
    /// The other parts, as their leases have them.
    ///
    /// # Errors
    /// `Io`
    pub fn others(&self) -> Result<Vec<Other>> {
        Ok(self.find()?.map_or_else(Vec::new, |found| self.others_of(&found)))
    }

    /// Wait until another process has published, or until this one should try to. Call it when this part is finished.
    ///
    /// # Errors
    /// `Usage` where who seals does not move; `Stopped`; `Io`.
    pub fn wait_published(&self, stop: &Stop, notify: &mut dyn FnMut(&[Other])) -> Result<Waited> {
        let begun = *self.waiting.get_or_init(Instant::now);
        let (mut gone_since, mut done_since, mut stopped_since) = (None, None, None);
        let mut nap = self.pace.nap();
        loop {
            // A partial folder that is gone is what is waited for.
            stop.check_signal()?;
            self.place.refresh(self.looking(stop))?;
            let found = self.find()?;
            let sealer = found.as_ref().and_then(|found| self.sealer(found));
            let is_left = found.is_none();
            if let Some(found) = found.filter(|found| !found.is_published) {
                gone_since = None;
                let others = self.others_of(&found);
                notify(&others);
                let seals = sealer.is_some_and(|life| life != Life::Dead);
                if seals {
                    self.check_sealer(&found)?;
                }
                let decision = decide(seals, &others, &self.pace);
                if !matches!(&decision, Decision::Without(missing, _) if missing.why == OtherState::Stopped) {
                    stopped_since = None;
                }
                match decision {
                    Decision::Wait => {}
                    // The first part does where it lives: it tells the user what all have met.
                    Decision::Seal => {
                        let since = *done_since.get_or_insert_with(Instant::now);
                        if self.claim.part.index == 0 || since.elapsed() >= self.pace.seal_after {
                            return Ok(Waited::NobodySeals);
                        }
                    }
                    Decision::Without(missing, after) => {
                        let since = match missing.why {
                            OtherState::Stopped => *stopped_since.get_or_insert_with(Instant::now),
                            _ => begun,
                        };
                        if since.elapsed() >= after {
                            return Ok(Waited::Without(missing));
                        }
                    }
                }
            } else if !self.has_landed() {
                // Network file systems may show the one rename before the other.
                let since = *gone_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= self.pace.dead_after && self.is_gone_for_good(stop, || self.has_landed())? {
                    return Err(self.holding.error(Lost::Gone));
                }
            } else if is_left || sealer == Some(Life::Dead) {
                if !is_left {
                    self.tidy(self.claim.sync)?;
                }
                self.see_published();
                return Ok(Waited::Published);
            }
            nap.take();
        }
    }

    /// All that these parts had to do is recorded: they need not come back to say so.
    pub fn settle(&self, missing: Missing) {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner).extend(missing.parts);
    }

    /// Why there is no result without them.
    #[must_use]
    pub fn without(&self, missing: &Missing) -> Error {
        match missing.why {
            OtherState::NotStarted => self.never_started(&missing.parts),
            OtherState::Stuck => self.stuck(&missing.parts),
            _ => self.died(&missing.parts),
        }
    }

    /// Whether another process has put the output at the destination. The partial folder is gone then, or whoever
    /// published is at it; where that one has died, it is taken away here.
    #[must_use]
    pub fn was_published(&self, stop: &Stop) -> bool {
        let (begun, mut nap) = (Instant::now(), self.pace.nap());
        loop {
            let is_stopped = self.place.refresh(self.looking(stop)).is_err();
            let found = self.find();
            let sealer = found.iter().flatten().find_map(|found| self.sealer(found));
            let (is_out, is_left) = match found {
                Ok(None) => (true, true),
                Ok(Some(found)) if !found.is_published && sealer.is_none() => return false,
                found => (found.is_ok_and(|found| found.is_some_and(|found| found.is_published)), false),
            };
            let is_published = is_out && plan_xattr::is(&self.place.destination, self.fingerprint);
            // Whoever seals is between its steps, or this node has not seen all of them.
            let is_late = is_stopped || begun.elapsed() >= LANDING;
            if is_published && (is_left || is_late || sealer == Some(Life::Dead)) {
                if sealer == Some(Life::Dead) {
                    // As far as that goes: the next run would do it as well.
                    let _ = self.tidy(self.claim.sync);
                }
                self.see_published();
                return true;
            }
            let is_marked = || plan_xattr::is(&self.place.destination, self.fingerprint);
            if is_stopped || is_late && (!is_left || self.is_gone_for_good(stop, is_marked).unwrap_or(true)) {
                return false;
            }
            nap.take();
        }
    }

    /// Another process has published: whatever that one does not come to take away, this one does as it goes.
    pub fn see_published(&self) {
        self.is_published.store(true, Ordering::Relaxed);
    }

    /// Whether what was written is at the destination.
    pub(super) fn has_landed(&self) -> bool {
        let Some(there) = Identity::of(&self.place.target()) else { return false };
        let is_known = self.identity.get().is_none_or(|identity| *identity == there);
        is_known || plan_xattr::is(&self.place.destination, self.fingerprint)
    }

    pub(super) fn sealer(&self, found: &Partial) -> Option<Life> {
        found.leases.iter().find(|seen| seen.name.is_seal()).map(|seen| self.life(seen))
    }

    fn life(&self, seen: &Seen) -> Life {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner).life(seen, Instant::now())
    }

    fn is_stuck(&self, seen: &Seen) -> bool {
        let still = self.watch.lock().unwrap_or_else(PoisonError::into_inner).still(seen.name);
        still >= self.pace.stuck_after
    }

    fn others_of(&self, found: &Partial) -> Vec<Other> {
        let part = self.claim.part;
        let leases: HashMap<Role, &Seen> = found.leases.iter().map(|seen| (seen.name.role, seen)).collect();
        let settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        let other = |index: u32| {
            let part = Part { index, of: part.of };
            let seen = leases.get(&Role::Part(part));
            let record = seen.and_then(|seen| seen.record.as_ref());
            let mut state = seen.map_or(OtherState::NotStarted, |seen| self.state_of(seen));
            // What an earlier run did is known from its journal.
            let now = seen.filter(|seen| !self.earlier.has(seen));
            let done_bytes = now.and(record).map_or(0, |record| record.done_bytes);
            let journal = now.map(|seen| seen.name.journal());
            let failure = record.and_then(|record| record.failure.as_ref()).map(|failure| failure.reason.clone());
            if state != OtherState::Working && settled.contains(&index) {
                state = OtherState::Finished;
            }
            Other { part, state, done_bytes, journal, failure }
        };
        (0..part.of).filter(|index| *index != part.index).map(other).collect()
    }

    fn state_of(&self, seen: &Seen) -> OtherState {
        let is_done = seen.record.as_ref().is_some_and(|record| record.phase.is_done());
        let is_earlier = self.earlier.has(seen);
        match self.life(seen) {
            Life::Dead if is_earlier => OtherState::NotStarted,
            Life::Unsure if is_earlier => OtherState::Working,
            _ if is_done => OtherState::Finished,
            Life::Dead => OtherState::Stopped,
            Life::Alive | Life::Unsure if self.is_stuck(seen) => OtherState::Stuck,
            Life::Alive | Life::Unsure => OtherState::Working,
        }
    }

    /// Who seals writes its lease anew every other second, whatever it is at.
    fn check_sealer(&self, found: &Partial) -> Result<()> {
        let Some(seen) = found.leases.iter().find(|seen| seen.name.is_seal() && self.is_stuck(seen)) else {
            return Ok(());
        };
        let who = seen.record.as_ref().map_or_else(String::new, |record| record.process.to_string());
        Err(Error::usage(
            format!("{who}, which completes {}, does not move", self.place.destination.display()),
            format!("end it; {}", self.how_to_go_on()),
        ))
    }

    fn never_started(&self, parts: &[u32]) -> Error {
        let (named, verb) = (self.named(parts), if parts.len() == 1 { "has" } else { "have" });
        Error::usage(
            format!("{named} {verb} not started to write {}", self.place.destination.display()),
            format!("start what is missing; {}", self.how_to_go_on()),
        )
    }

    fn died(&self, parts: &[u32]) -> Error {
        let destination = self.place.destination.display();
        let others = self.others().unwrap_or_default();
        let mut failed = others.iter().filter(|other| parts.contains(&other.part.index));
        let Some((index, reason)) = failed.find_map(|other| Some((other.part.index, other.failure.as_ref()?))) else {
            let whose = if parts.len() == 1 { "its process is" } else { "their processes are" };
            return Error::usage(
                format!("{} stopped: {whose} gone; {destination} is not complete", self.named(parts)),
                self.how_to_go_on(),
            );
        };
        Error::usage(
            format!("{} failed: {reason}; {destination} is not complete", self.named(&[index])),
            self.how_to_go_on(),
        )
    }

    fn stuck(&self, parts: &[u32]) -> Error {
        let is = |seen: &&Seen| matches!(seen.name.role, Role::Part(part) if part.of == self.claim.part.of && parts.contains(&part.index));
        let leases = self.find().ok().flatten().map_or_else(Vec::new, |found| found.leases);
        let records = leases.iter().filter(is).filter_map(|seen| seen.record.as_ref());
        let who: Vec<String> = records.map(|record| record.process.to_string()).collect();
        let (verb, minutes) = (if parts.len() == 1 { "has" } else { "have" }, self.pace.stuck_after.as_secs() / 60);
        Error::usage(
            format!("{} {verb} not moved for {minutes} minutes ({})", self.named(parts), who.join("; ")),
            format!(
                "a process that is stopped, or that its file system holds, has to be ended first; {}",
                self.how_to_go_on()
            ),
        )
    }

    fn how_to_go_on(&self) -> String {
        // Where the number of parts is a launcher's idea, it may not be the user's.
        let alone =
            if self.claim.run.is_some() { "; --part 0 --parts 1 does all of the work in one process" } else { "" };
        format!(
            "what was done is kept in {}: the same command with --resume goes on with it{alone}",
            self.partial.display()
        )
    }

    /// `part 1 of 4`, `parts 1, 3 of 4`
    fn named(&self, parts: &[u32]) -> String {
        format!("{} of {}", numbered("part", "parts", parts.iter().copied()), self.claim.part.of)
    }
}
