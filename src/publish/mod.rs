//! Publishing: nothing stands at the destination until it is complete, however many processes write it and whichever of
//! them die.
//!
//! Work goes to `.NAME.dtshard-partial` beside the destination, on the same file system. One process or many may write it,
//! each with a `lease` on its part; no process leads. `acquire` decides whether a process may work. Finished byte
//! ranges go to a [`journal`] per process, so that later runs do not repeat them. A process that has finished its part
//! `wait`s for the others; the one that seals renames the output to the destination, which is the only `commit`.
//!
//! ```text
//! .NAME.dtshard-partial/
//!     plan.json                what is being written
//!     about.json               the same for people: options and source files
//!     part-2-of-4.0.lease      which process works on part 2, generation 0
//!     seal.0.lease             which process seals
//!     work-1f0c96a2b7d4/       has the id of the plan in its name, which no other folder ever has
//!         data/                    the output
//!         part-2-of-4.0.journal    what the process with that lease has finished
//! ```
//!
//! ```text
//! absent -- make --> partial -- all parts finished --> sealed -- rename --> published -- tidy --> absent
//!    ^                  |  ^                             |
//!    |                  |  +--- a dead holder's next generation takes over
//!    +---- throw away (--restart; nothing recorded) ----+
//! ```
//!
//! Invariant: only links, creation with `O_EXCL` and renames decide anything, as nothing else does on a network file
//! system.

mod acquire;
mod cleanup;
mod commit;
mod destination;
pub mod journal;
mod lease;
pub mod log;
mod partial;
mod plan_xattr;
pub mod presence;
pub mod recovery;
pub mod seal;
#[cfg(test)]
mod tests;
mod wait;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

pub use commit::{ReplaceCheck, Seal};
pub use wait::{MissingParts, OtherPart, OtherState, Waited};

use self::destination::{Destination, FileIdentity, TMP, TRASH};
use self::lease::{Lease, LeaseLost, LeaseWatch, StaleLeases, WorkLease};
use self::partial::{FoundPartial, Partial};
use crate::comm::WaitReporter;
use crate::error::{Error, Result};
use crate::exec::Stop;
use crate::exec::fingerprint::Fingerprint;
use crate::exec::plan_description::PlanDescription;
use crate::fault;
use crate::launch::Part;
use crate::storage::AnchoredPath;

/// What is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationKind {
    /// The data folder becomes the destination.
    Folder,
    /// The one file in the data folder becomes the destination.
    File,
}

/// What a process wants to do at a destination, and what it does about things in its way.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Replace an existing destination, which `replace_check` has to pass.
    pub overwrite: bool,
    pub replace_check: ReplaceCheck,
    /// Throw away what an earlier run left behind.
    pub restart: bool,
    /// Go on with what an earlier run left behind.
    pub resume: bool,
    pub part: Part,
    /// The name that a launcher gave to all processes of one launch.
    pub run: Option<String>,
    /// What is written lasts through the loss of the node.
    pub sync: bool,
    /// The other parts run at the same time, so that they can be waited for.
    pub parts_wait: bool,
    /// Reports what is waited for.
    pub reporter: WaitReporter,
}

impl Claim {
    /// A part that does not wait for others may come when all is done, since it had nothing to do, or is started again.
    fn takes_what_is_done(&self) -> bool {
        self.resume || !self.parts_wait && !self.part.is_alone()
    }

    /// Returns whether this process, or the first one of its launch, may throw away what is there.
    fn can_restart(&self) -> bool {
        self.part.is_alone() || self.run.is_some() && self.parts_wait
    }
}

/// What is to be written.
#[derive(Clone, Copy, Debug)]
pub struct WorkPlan<'a> {
    pub fingerprint: Fingerprint,
    pub version: &'a str,
    pub about: &'a PlanDescription,
}

/// The result of [`Staging::begin`].
#[derive(Debug)]
pub enum Beginning {
    Work(Staging),
    /// The destination is there, from the same plan, and the claim accepts that.
    Done,
}

/// How a run would begin.
#[derive(Debug)]
pub enum Preflight {
    Fresh,
    /// With what other processes do at this moment, or did.
    Resumes,
    /// Not at all: the destination is there, from the same plan.
    Done,
    /// A run has to watch what is there before it knows. Most probably it is refused with this error.
    Unsure(Error),
}

/// How long things take.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Between two beats of a lease.
    beat: Duration,
    /// From the last change of a lease until it is dead, seen from another node.
    dead_after: Duration,
    /// From the last change of a lease until it is dead though its process is there.
    stuck_after: Duration,
    /// Until a part that has not started is given up.
    start_within: Duration,
    /// From the end of a process until its part is given up: whatever ended it may be about to end this one as well, or to
    /// start it again.
    stopped_after: Duration,
    /// From when all parts are done until another than the first one seals.
    seal_after: Duration,
    /// How long a network file system may answer from a cache.
    cached_for: Duration,
    /// Between two looks at what others do: at first, and at most.
    look: (Duration, Duration),
}

const PACE: Pace = Pace {
    beat: Duration::from_secs(2),
    dead_after: Duration::from_secs(20),
    stuck_after: Duration::from_mins(10),
    start_within: Duration::from_mins(5),
    stopped_after: Duration::from_secs(2),
    seal_after: Duration::from_secs(5),
    // NFS: 60 seconds for folders (acdirmax), and some for what it takes.
    cached_for: Duration::from_secs(75),
    look: (Duration::from_millis(20), Duration::from_secs(1)),
};

/// For tests that kill a process before its lease names it, or wait for one that never starts.
const HURRIED_PACE: Pace = Pace {
    dead_after: Duration::from_millis(200),
    start_within: Duration::from_secs(10),
    cached_for: Duration::from_secs(15),
    look: (Duration::from_millis(5), Duration::from_millis(20)),
    ..PACE
};

fn pace() -> Pace {
    if fault::is_testing_faults() { HURRIED_PACE } else { PACE }
}

/// A wait between looks that doubles each time: a small job ends soon, and many processes that wait for long do not keep
/// a metadata server busy.
struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Pace {
    fn nap(&self) -> Backoff {
        let (next, longest) = self.look;
        Backoff { next, longest }
    }
}

impl Backoff {
    fn take(&mut self) {
        sleep(self.next);
        self.next = (self.next * 2).min(self.longest);
    }
}

/// A destination that is being written. Dropped unpublished, it leaves what can be resumed, or else nothing.
#[derive(Debug)]
pub struct Staging {
    destination: Destination,
    shape: DestinationKind,
    claim: Claim,
    fingerprint: Fingerprint,
    /// The id of the partial folder.
    id: String,
    holding: Arc<WorkLease>,
    pace: Pace,
    partial: AnchoredPath,
    work: AnchoredPath,
    data: AnchoredPath,
    journal: AnchoredPath,
    /// `None` once dropped.
    lease: Option<Lease>,
    lost: Arc<OnceLock<LeaseLost>>,
    watch: Mutex<LeaseWatch>,
    /// The identity of the output, known once it is complete.
    identity: OnceLock<FileIdentity>,
    /// The file or folder that this process moved away from the destination.
    replaced: Mutex<Option<FileIdentity>>,
    stale: StaleLeases,
    /// Parts that are not waited for any more, by their index.
    settled: Mutex<BTreeSet<u32>>,
    /// Since when the others are waited for.
    waiting: OnceLock<Instant>,
    /// The partial folder is gone and nothing was published from it, longer than any cache lasts.
    is_gone: AtomicBool,
    is_published: AtomicBool,
}

impl Staging {
    /// Claims a part of the work on `path`. Waits where others have to be watched to know whether they live.
    ///
    /// # Errors
    /// `Usage` where it exists and may not be replaced, or where another run works or worked on it; `Stopped`; `Io`.
    pub fn begin(
        path: &Path,
        shape: DestinationKind,
        claim: &Claim,
        plan: &WorkPlan<'_>,
        stop: &Stop,
    ) -> Result<Beginning> {
        acquire::acquire(path, shape, claim, plan, pace(), stop)
    }

    /// Returns what [`Staging::begin`] would do, as far as one look can tell. Changes nothing.
    ///
    /// # Errors
    /// As [`Staging::begin`]; `Usage` where others would have to be watched.
    pub fn preflight(path: &Path, shape: DestinationKind, claim: &Claim, plan: &WorkPlan<'_>) -> Result<Preflight> {
        acquire::preflight(path, shape, claim, plan, PACE)
    }

    /// Refuses a destination that exists and is not to be replaced, before it is known what is to be written. A claim that
    /// accepts what an earlier run made leaves that to [`Staging::begin`].
    ///
    /// # Errors
    /// As [`Staging::begin`].
    pub fn refuse_taken(path: &Path, shape: DestinationKind, claim: &Claim) -> Result<()> {
        if claim.takes_what_is_done() {
            return Ok(());
        }
        let destination = Destination::new(path, pace(), claim.reporter.clone())?;
        destination.refresh(&Stop::default())?;
        acquire::check_destination(&destination, shape, claim)
    }

    /// The folder to write into.
    #[must_use]
    pub fn folder(&self) -> &AnchoredPath {
        &self.data
    }

    /// The folder with the journals of all parts, `*.journal`.
    #[must_use]
    pub fn journals(&self) -> &AnchoredPath {
        &self.work
    }

    /// The folder that is left beside the destination, where one is kept.
    #[must_use]
    pub fn partial(&self) -> &Path {
        self.partial.path()
    }

    /// The journal that only this process writes. Close it before this is dropped.
    #[must_use]
    pub fn journal(&self) -> &AnchoredPath {
        &self.journal
    }

    /// Returns whether an error or a signal leaves what was done, for `--resume`.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.claim.resume || !self.claim.part.is_alone()
    }

    /// The bytes that this process has done; others see them with the next beat.
    #[must_use]
    pub fn done_bytes(&self) -> &AtomicU64 {
        self.lease().done_bytes()
    }

    /// # Errors
    /// `Usage` where another process has taken this part over, or the partial folder is gone.
    pub fn check(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |lost| Err(self.holding.error(*lost)))
    }

    /// Records that this part is done.
    ///
    /// # Errors
    /// As [`Staging::check`], `Io`.
    pub fn finish(&self) -> Result<()> {
        self.check()?;
        if let Some(identity) =
            partial::output(&self.work, self.shape).ok().flatten().as_ref().and_then(FileIdentity::of)
        {
            let _ = self.identity.set(identity);
        }
        self.lease().finish()
    }

    /// Leaves the reason why this part will not finish, for those that wait for it. A part that a signal stops is to be
    /// started again.
    pub fn tell(&self, error: &Error) {
        if !matches!(error, Error::Stopped(_)) {
            self.lease().fail(&error.to_string(), self.claim.run.as_deref());
        }
    }

    fn lease(&self) -> &Lease {
        self.lease.as_ref().expect("it is there until this is dropped")
    }

    /// Returns the partial folder, if it is still the one that this process works in.
    fn find(&self) -> Result<Option<Partial>> {
        Ok(match FoundPartial::at(&self.partial, self.shape)? {
            FoundPartial::Partial(found) if found.plan.id == self.id => Some(found),
            _ => None,
        })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.destination.release();
        let is_published = self.is_published.load(Ordering::Relaxed);
        // Looked at again: this process may just have been woken up, before its first beat.
        let is_ours = || self.lost.get().is_none() && matches!(self.holding.look(), Ok(None));
        if !is_published && !self.is_kept() && is_ours() {
            let _ = self.destination.rename_away(&self.partial, TRASH);
        }
        // Held until here, so that it is one on the folder that is thrown away. Network file systems keep a deleted file
        // for as long as it is open.
        drop(self.lease.take());
        // A temporary folder beside a partial one is of a process that was slower. If it lives, it makes another. Deleting
        // trash may take long, and a process that is stopped leaves that to the next one.
        let is_kept = self.is_kept() && !is_published;
        self.destination.sweep(if is_kept { &[TMP] } else { &[TMP, TRASH] });
    }
}
