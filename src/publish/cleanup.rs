//! Deleting a partial folder, and leaving none if nothing was recorded.
//!
//! A process that deletes a folder takes a lease for that, in the folder that was judged dead, and looks again. A
//! process that arrives meanwhile sees that lease, or its own lease is seen by the holder: one of the two steps back,
//! so a folder that is in use is never moved. A run that fails before anything is recorded leaves nothing behind,
//! because an empty partial folder would only block later runs. Invariant: after an error, a folder is not deleted if
//! it contains records, if a process works in it, or if a process may still come to read why the others are gone.

use std::time::Instant;

use super::destination::{Destination, TRASH, is_gone};
use super::lease::{Lease, LeaseName, LeaseRole, LeaseState, LeaseWatch, SeenLease, read_leases};
use super::partial_folder::{FoundPartial, Partial};
use super::{DestinationKind, Staging, recovery};
use crate::error::{Error, Result};
use crate::fault;
use crate::launch::Part;

impl Staging {
    /// Leaves after an error. The last process deletes a folder without records.
    pub fn abandon(self) {
        let (destination, shape, id) = (self.destination.clone(), self.shape, self.id.clone());
        let (part, work, pace, stale) = (self.claim.part, self.work.clone(), self.pace, self.stale.clone());
        // Parts that do not wait do not need the reason why another part is gone.
        let awaited = if self.claim.parts_wait { part.of } else { 0 };
        // If two processes leave at once, each gives up its lease before it looks: at least one sees that both are
        // gone.
        drop(self);
        let Ok(FoundPartial::Partial(found)) = FoundPartial::at(&destination.partial(), shape) else { return };
        let mut watch = LeaseWatch::new(pace);
        let is_over = |seen: &SeenLease| watch.state(seen, Instant::now()) == LeaseState::Dead;
        let has_come =
            |index| found.lease(LeaseRole::Part(Part { index, ..part })).is_some_and(|seen| !stale.contains(seen));
        let is_unused = found.plan.id == id
            && !found.is_published
            && found.leases.iter().all(is_over)
            && (0..awaited).all(has_come)
            && recovery::is_empty(&work).unwrap_or(false);
        if is_unused && destination.throw_away(shape, Some(&found), &mut watch).unwrap_or(false) {
            destination.sweep(&[TRASH]);
        }
    }
}

impl Destination {
    /// Renames junk, or the judged folder if it is unchanged, to a trash name. Returns false if another process was
    /// faster, or came to work in the folder.
    pub fn throw_away(&self, shape: DestinationKind, judged: Option<&Partial>, watch: &mut LeaseWatch) -> Result<bool> {
        let partial = self.partial();
        let lease = if partial.metadata().is_ok_and(|found| found.is_dir()) {
            let leases = match read_leases(&partial) {
                Err(error) if is_gone(&error) => return Ok(false),
                leases => leases.map_err(Error::io("read", &partial))?,
            };
            let generation = match leases.iter().find(|seen| seen.name.role == LeaseRole::Restart) {
                None => 0,
                Some(seen) if watch.state(seen, Instant::now()) == LeaseState::Dead => {
                    seen.name.generation.saturating_add(1)
                }
                Some(_) => return Ok(false),
            };
            let lease = Lease::take(&partial, LeaseName { role: LeaseRole::Restart, generation })?;
            if lease.is_none() {
                return Ok(false);
            }
            lease
        } else {
            None
        };
        let is_judged = match (judged, FoundPartial::at(&partial, shape)) {
            (None, Ok(FoundPartial::Junk)) => true,
            (Some(judged), Ok(FoundPartial::Partial(found))) => judged.is_still(&found),
            _ => false,
        };
        if !is_judged {
            lease.into_iter().for_each(Lease::retract);
            return Ok(false);
        }
        fault::point("restart-judged");
        self.rename_away(&partial, TRASH)?;
        fault::point("restart-moved");
        Ok(true)
    }
}

impl Partial {
    /// Returns whether no process has come since.
    fn is_still(&self, now: &Self) -> bool {
        let leases = |partial: &Self| -> Vec<(LeaseName, Vec<u8>)> {
            let leases = partial.leases.iter().filter(|seen| seen.name.role != LeaseRole::Restart);
            leases.map(|seen| (seen.name, seen.bytes.clone())).collect()
        };
        self.plan == now.plan && leases(self) == leases(now)
    }
}
