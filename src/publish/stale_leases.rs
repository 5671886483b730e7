//! Which leases say something of this run, and which are left of one that is gone on with.
//!
//! Whoever begins notes the leases that it finds, but those of processes that live. One that changes is of this run,
//! whatever was thought of its process: on another node it takes a beat until that shows. One that stays as it was is of
//! an earlier run, whose part is about to be started again, unless it says that it failed in this launch.

use super::Claim;
use super::lease::Seen;

#[derive(Clone, Debug)]
pub(super) struct Earlier {
    leases: Vec<Seen>,
    resume: bool,
    run: Option<String>,
}

impl Earlier {
    /// `leases` were there when that of this process was taken, and are of processes that were dead or in doubt.
    pub fn new(leases: Vec<Seen>, claim: &Claim) -> Self {
        Self { leases, resume: claim.resume, run: claim.run.clone() }
    }

    pub fn has(&self, seen: &Seen) -> bool {
        let is_as_it_was = |lease: &Seen| (lease.name, &lease.bytes) == (seen.name, &seen.bytes);
        self.leases.iter().any(is_as_it_was) && !self.has_failed_now(seen)
    }

    /// Whether a part failed in this run, and not in one that is gone on with: then its process will not be back.
    fn has_failed_now(&self, seen: &Seen) -> bool {
        let failure = seen.record.as_ref().and_then(|record| record.failure.as_ref());
        failure.is_some_and(|failure| !self.resume || self.run.as_deref().is_some_and(|run| failure.is_of(run)))
    }
}
