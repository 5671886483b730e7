//! Deletes a partial folder after an error, so that no folder stays behind if nothing was recorded in it.
//!
//! Before a process deletes a folder, it acquires a lease for the deletion and examines the folder again. If another
//! process arrives in the meantime, either that process sees the deletion lease, or this process sees the lease of that
//! process. One of the two processes gives up, so a folder in use is never moved. A run that fails before it records
//! any work deletes its folder, because an empty partial folder would only block later runs. Invariant: after an error,
//! a folder is kept if it contains journal records, if a process works in it, or if a process may still come to read
//! why other processes ended.

use std::time::Instant;

use super::destination::{Destination, TRASH, is_gone};
use super::lease::{Lease, LeaseName, LeaseRole, LeaseState, LeaseWatch, SeenLease, read_leases};
use super::partial_folder::{FoundPartial, Partial};
use super::{DestinationKind, Staging, completed_work};
use crate::error::{Error, Result};
use crate::fault;
use crate::launch::Part;

impl Staging {
    /// Leaves the run after an error. If all processes have left, deletes the partial folder. The folder is kept if it
    /// contains journals, or if a part has not started yet and its process must still be able to read why the other
    /// processes ended.
    pub fn abandon(self) {
        let (destination, shape, id) = (self.destination.clone(), self.shape, self.id.clone());
        let (part, work, pace, stale) = (self.claim.part, self.work.clone(), self.pace, self.stale.clone());
        // If parts do not wait for each other, the reason why one part ended need not be kept for the other parts.
        let awaited = if self.claim.parts_wait { part.of } else { 0 };
        // If two processes leave at the same time, each gives up its lease before it checks. Therefore at least one of
        // them sees that both have left.
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
            && completed_work::is_empty(&work).unwrap_or(false);
        if is_unused && destination.throw_away(shape, Some(&found), &mut watch).unwrap_or(false) {
            destination.sweep(&[TRASH]);
        }
    }
}

impl Destination {
    /// Renames the partial folder to a trash name. `examined` is the state of the folder in which the caller decided to
    /// delete the folder; `None` means that the folder has no valid plan. Returns false, and renames nothing, if the
    /// folder has changed since then, or if another process is deleting the folder.
    pub fn throw_away(
        &self,
        shape: DestinationKind,
        examined: Option<&Partial>,
        watch: &mut LeaseWatch,
    ) -> Result<bool> {
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
        let is_unchanged = match (examined, FoundPartial::at(&partial, shape)) {
            (None, Ok(FoundPartial::Junk)) => true,
            (Some(examined), Ok(FoundPartial::Partial(found))) => examined.is_still(&found),
            _ => false,
        };
        if !is_unchanged {
            lease.into_iter().for_each(Lease::retract);
            return Ok(false);
        }
        fault::point("restart-examined");
        self.rename_away(&partial, TRASH)?;
        fault::point("restart-moved");
        Ok(true)
    }
}

impl Partial {
    /// Returns true if `now`, a later state of the folder, has the same plan and the same leases as `self`. In this
    /// case, no process has started to work in the folder in between.
    fn is_still(&self, now: &Self) -> bool {
        let leases = |partial: &Self| -> Vec<(LeaseName, Vec<u8>)> {
            let leases = partial.leases.iter().filter(|seen| seen.name.role != LeaseRole::Restart);
            leases.map(|seen| (seen.name, seen.bytes.clone())).collect()
        };
        self.plan == now.plan && leases(self) == leases(now)
    }
}
