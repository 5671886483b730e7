//! What the other parts do, and waiting for the one that seals.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::lease::{Role, Seen};
use super::life::Life;
use super::loss::Lost;
use super::place::Identity;
use super::plan::Partial;
use super::{Pace, Staging, mark};
use crate::comm::Part;
use crate::error::{Error, Result};
use crate::exec::Stop;

/// How far another part is, by its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherState {
    NotStarted,
    Working,
    /// Its process is done with it, and may have left.
    Finished,
    /// Its process is gone, and was not done.
    Stopped,
}

/// Another part of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Other {
    pub part: Part,
    pub state: OtherState,
    pub done_bytes: u64,
}

/// How waiting ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The destination is there.
    Published,
    /// All parts are done, and nobody who lives seals.
    NobodySeals,
}

/// What to do with one look at the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Wait,
    Seal,
    /// Parts of which nothing was seen in time.
    NeverStarted(Vec<u32>),
    Died(Vec<u32>),
}

pub(super) fn decide(sealer: Option<Life>, others: &[Other], waited: Duration, start_within: Duration) -> Decision {
    let of_state = |state: OtherState| -> Vec<u32> {
        others.iter().filter(|other| other.state == state).map(|other| other.part.index).collect()
    };
    let (died, missing) = (of_state(OtherState::Stopped), of_state(OtherState::NotStarted));
    if sealer.is_some_and(|life| life != Life::Dead) {
        Decision::Wait
    } else if !died.is_empty() {
        Decision::Died(died)
    } else if others.iter().all(|other| other.state == OtherState::Finished) {
        Decision::Seal
    } else if !missing.is_empty() && waited >= start_within {
        Decision::NeverStarted(missing)
    } else {
        Decision::Wait
    }
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
    /// `Usage` where a part does not start in time, or its process is gone; `Stopped`; `Io`.
    pub fn wait_published(&self, stop: &Stop, notify: &mut dyn FnMut(&[Other])) -> Result<Waited> {
        let begun = Instant::now();
        let (mut gone_since, mut done_since) = (None, None);
        loop {
            // A partial folder that is gone is what is waited for.
            stop.check_signal()?;
            self.place.refresh();
            let found = self.find()?;
            let sealer = found.as_ref().and_then(|found| self.sealer(found));
            let is_left = found.is_none();
            if let Some(found) = found.filter(|found| !found.is_published) {
                gone_since = None;
                let others = self.others_of(&found);
                notify(&others);
                let Pace { start_within, .. } = self.pace;
                match decide(sealer, &others, begun.elapsed(), start_within) {
                    Decision::Wait => {}
                    // The first part does where it lives: it tells the user what all have met.
                    Decision::Seal => {
                        let since = *done_since.get_or_insert_with(Instant::now);
                        if self.claim.part.index == 0 || since.elapsed() >= self.pace.seal_after {
                            return Ok(Waited::NobodySeals);
                        }
                    }
                    Decision::NeverStarted(parts) => return Err(self.never_started(&parts)),
                    Decision::Died(parts) => return Err(self.died(&parts)),
                }
            } else if !self.has_landed() {
                // Network file systems may show the one rename before the other.
                let since = *gone_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= self.pace.dead_after {
                    return Err(self.holding.error(Lost::Gone));
                }
            } else if is_left || sealer == Some(Life::Dead) {
                if !is_left {
                    self.tidy(self.claim.sync)?;
                }
                self.is_published.store(true, Ordering::Relaxed);
                return Ok(Waited::Published);
            }
            sleep(self.pace.look);
        }
    }

    /// Whether another process has put the output at the destination, and taken the partial folder away or is at it.
    #[must_use]
    pub fn was_published(&self) -> bool {
        self.place.refresh();
        let is_gone = self.find().is_ok_and(|found| found.is_none_or(|found| found.is_published));
        is_gone && mark::is(&self.place.destination, self.fingerprint)
    }

    /// Whether what was written is at the destination.
    pub(super) fn has_landed(&self) -> bool {
        let Some(there) = Identity::of(&self.place.destination) else { return false };
        let is_known = self.identity.get().is_none_or(|identity| *identity == there);
        is_known || mark::is(&self.place.destination, self.fingerprint)
    }

    pub(super) fn sealer(&self, found: &Partial) -> Option<Life> {
        found.leases.iter().find(|seen| seen.name.is_seal()).map(|seen| self.life(seen))
    }

    fn life(&self, seen: &Seen) -> Life {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner).life(seen, Instant::now())
    }

    fn others_of(&self, found: &Partial) -> Vec<Other> {
        let part = self.claim.part;
        let leases: HashMap<Role, &Seen> = found.leases.iter().map(|seen| (seen.name.role, seen)).collect();
        let other = |index: u32| {
            let part = Part { index, of: part.of };
            let Some(seen) = leases.get(&Role::Part(part)) else {
                return Other { part, state: OtherState::NotStarted, done_bytes: 0 };
            };
            let is_done = seen.record.as_ref().is_some_and(|record| record.phase.is_done());
            let state = match self.life(seen) {
                _ if is_done => OtherState::Finished,
                Life::Dead => OtherState::Stopped,
                Life::Alive | Life::Unsure => OtherState::Working,
            };
            Other { part, state, done_bytes: seen.record.as_ref().map_or(0, |record| record.done_bytes) }
        };
        (0..part.of).filter(|index| *index != part.index).map(other).collect()
    }

    fn never_started(&self, parts: &[u32]) -> Error {
        let (named, verb) = (self.named(parts), if parts.len() == 1 { "has" } else { "have" });
        Error::usage(
            format!("{named} {verb} not started to write {}", self.place.destination.display()),
            format!(
                "start what is missing: what the others did is kept in {}, and the same command with --resume goes on \
                 with it{}",
                self.partial.display(),
                self.alone()
            ),
        )
    }

    fn died(&self, parts: &[u32]) -> Error {
        let whose = if parts.len() == 1 { "its process is" } else { "their processes are" };
        Error::usage(
            format!(
                "{} stopped: {whose} gone; {} is not complete",
                self.named(parts),
                self.place.destination.display()
            ),
            format!(
                "what was done is kept in {}: the same command with --resume goes on with it{}",
                self.partial.display(),
                self.alone()
            ),
        )
    }

    /// `part 1 of 4`, `parts 1, 3 of 4`
    fn named(&self, parts: &[u32]) -> String {
        let list: Vec<String> = parts.iter().map(u32::to_string).collect();
        let plural = if parts.len() == 1 { "" } else { "s" };
        format!("part{plural} {} of {}", list.join(", "), self.claim.part.of)
    }

    /// Where the number of parts is a launcher's idea, it may not be the user's.
    fn alone(&self) -> &'static str {
        if self.claim.run.is_some() { "; --part 0 --parts 1 does all of the work in one process" } else { "" }
    }
}
