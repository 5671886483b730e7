//! Publishing: the destination appears only when the output is complete, even if many processes write the output and
//! some of them die. PyTorch's counterpart is the rename of `.metadata.tmp` at the end of `FileSystemWriter`.
//!
//! The output is written to `.NAME.dtshard-partial`, in the folder of the destination and therefore on the same file
//! system. One or many processes write it. Each process holds a `lease` on its part, and no process is the leader.
//! `acquire` decides whether a process may work. Each process records its finished byte ranges in its own [`journal`],
//! so that later runs do not repeat them. A process that has finished its part `wait`s for the others. The process that
//! seals the output renames it to the destination; this rename is the only `commit`.
//!
//! ```text
//! .NAME.dtshard-partial/
//!     plan.json                the plan: which output is written
//!     about.json               the plan, readable for users: options and source files
//!     part-2-of-4.0.lease      which process works on part 2, generation 0
//!     seal.0.lease             which process seals
//!     work-1f0c96a2b7d4/       its name contains the id of the plan, which no other folder ever has
//!         data/                    the output
//!         part-2-of-4.0.journal    the byte ranges that the process with that lease has finished
//! ```
//!
//! ```text
//! absent - create -> partial -- all parts finished --> sealed -- rename --> published -- clean up --> absent
//!    ^                  |  ^                             |
//!    |                  |  +--- another process takes over, with the next generation of the lease
//!    +--- delete (--restart, or nothing recorded) -------+
//! ```
//!
//! Invariant: all decisions are made by hard links, creation with `O_EXCL`, and renames, because only these operations
//! are atomic on a network file system.

mod acquire;
mod cleanup;
mod commit;
mod destination;
pub mod journal;
mod lease;
pub mod log;
mod partial_folder;
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
use self::partial_folder::{FoundPartial, Partial};
use crate::comm::WaitReporter;
use crate::error::{Error, Result};
use crate::exec::Stop;
use crate::exec::fingerprint::Fingerprint;
use crate::exec::plan_description::PlanDescription;
use crate::fault;
use crate::launch::Part;
use crate::storage::AnchoredPath;

/// The kind of output: a folder or a single file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationKind {
    /// The data folder becomes the destination.
    Folder,
    /// The only file in the data folder becomes the destination.
    File,
}

/// The intention of a process at a destination, and its options for existing files.
#[derive(Clone, Debug)]
pub struct Claim {
    /// True if an existing destination is to be replaced; `replace_check` has to accept the replacement.
    pub overwrite: bool,
    pub replace_check: ReplaceCheck,
    /// True if the output of an earlier run is to be deleted.
    pub restart: bool,
    /// True if the output of an earlier run is to be continued.
    pub resume: bool,
    pub part: Part,
    /// The name of the launch: the launcher gives the same name to all processes that it starts together.
    pub run: Option<String>,
    /// True if the output is synced, so that it survives the loss of the node.
    pub sync: bool,
    /// True if the other parts run at the same time, so that this process can wait for them.
    pub parts_wait: bool,
    /// Reports which process or event this process waits for.
    pub reporter: WaitReporter,
}

impl Claim {
    /// Returns whether an existing, finished destination is accepted. A part that does not wait for others may start
    /// when all work is finished already, because its share is empty or because it is restarted.
    fn takes_what_is_done(&self) -> bool {
        self.resume || !self.parts_wait && !self.part.is_alone()
    }

    /// Returns whether this process, or the first process of its launch, may delete existing output.
    fn can_restart(&self) -> bool {
        self.part.is_alone() || self.run.is_some() && self.parts_wait
    }
}

/// The output to write.
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
    /// The destination exists, was made from the same plan, and the claim accepts that.
    Done,
}

/// The way in which a run would begin.
#[derive(Debug)]
pub enum Preflight {
    Fresh,
    /// The run would continue the work of other processes, which may be running.
    Resumes,
    /// The run would do nothing: the destination exists and was made from the same plan.
    Done,
    /// Unknown, because only a run that watches the leases can decide. The run would most likely fail with this error.
    Unsure(Error),
}

/// The time limits and intervals of publishing.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// The interval between two heartbeats of a lease.
    beat: Duration,
    /// The time after which an unchanged lease counts as dead for a process on another node.
    dead_after: Duration,
    /// The time after which an unchanged lease counts as dead even if its process exists.
    stuck_after: Duration,
    /// The time after which this process stops waiting for a part that has not started.
    start_within: Duration,
    /// The time from the end of a process until other processes stop waiting for its part. Within this time the same
    /// cause may end the other processes as well, or the process may be restarted.
    stopped_after: Duration,
    /// The time after which a process other than the first one seals, measured from the moment at which all parts are
    /// finished.
    seal_after: Duration,
    /// The time for which a network file system may return cached names.
    cached_for: Duration,
    /// The delay between two checks of the other processes: the initial delay, and the maximum.
    look: (Duration, Duration),
}

const PACE: Pace = Pace {
    beat: Duration::from_secs(2),
    dead_after: Duration::from_secs(20),
    stuck_after: Duration::from_mins(10),
    start_within: Duration::from_mins(5),
    stopped_after: Duration::from_secs(2),
    seal_after: Duration::from_secs(5),
    // NFS caches folders for 60 seconds (acdirmax); the rest is a margin.
    cached_for: Duration::from_secs(75),
    look: (Duration::from_millis(20), Duration::from_secs(1)),
};

/// Limits for tests that kill a process before it has written its lease, or that wait for a process that never starts.
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

/// A delay between two checks that doubles each time. A small job ends soon, so the delay is short at first; many
/// processes that wait for a long time must not overload a metadata server.
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

/// A destination that is being written. If it is dropped before it is published, the output is kept for a resumed run,
/// or deleted if nothing was recorded.
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
    /// The lease; `None` only while this value is dropped.
    lease: Option<Lease>,
    lost: Arc<OnceLock<LeaseLost>>,
    watch: Mutex<LeaseWatch>,
    /// The identity of the output; empty until the output is complete.
    identity: OnceLock<FileIdentity>,
    /// The file or folder that this process moved away from the destination.
    replaced: Mutex<Option<FileIdentity>>,
    stale: StaleLeases,
    /// The indices of the parts that this process no longer waits for.
    finished: Mutex<BTreeSet<u32>>,
    /// The time at which this process began to wait for the others.
    waiting: OnceLock<Instant>,
    /// True once the partial folder has been missing for longer than any cache lasts, although the output was not
    /// published.
    is_gone: AtomicBool,
    is_published: AtomicBool,
}

impl Staging {
    /// Claims a part of the work on `path`. If it is not known whether other processes are alive, waits and watches
    /// their leases.
    ///
    /// # Errors
    /// `Usage` if the destination exists and may not be replaced, or if another run works or worked on it; `Stopped`;
    /// `Io`.
    pub fn begin(
        path: &Path,
        shape: DestinationKind,
        claim: &Claim,
        plan: &WorkPlan<'_>,
        stop: &Stop,
    ) -> Result<Beginning> {
        acquire::acquire(path, shape, claim, plan, pace(), stop)
    }

    /// Returns what [`Staging::begin`] would do, as far as a single check shows. Changes nothing.
    ///
    /// # Errors
    /// The errors of [`Staging::begin`]; `Usage` if other processes would have to be watched.
    pub fn preflight(path: &Path, shape: DestinationKind, claim: &Claim, plan: &WorkPlan<'_>) -> Result<Preflight> {
        acquire::preflight(path, shape, claim, plan, PACE)
    }

    /// Returns the folder to write the output to.
    #[must_use]
    pub fn folder(&self) -> &AnchoredPath {
        &self.data
    }

    /// Returns the folder that contains the journals of all parts, `*.journal`.
    #[must_use]
    pub fn journals(&self) -> &AnchoredPath {
        &self.work
    }

    /// Returns the partial folder, which stays in the folder of the destination until a resumed run.
    #[must_use]
    pub fn partial(&self) -> &Path {
        self.partial.path()
    }

    /// Returns the path of this process's own journal. Close the journal before this value is dropped.
    #[must_use]
    pub fn journal(&self) -> &AnchoredPath {
        &self.journal
    }

    /// Returns whether the finished work is kept for `--resume` after an error or a signal.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.claim.resume || !self.claim.part.is_alone()
    }

    /// Returns the counter of the bytes that this process has finished. The next heartbeat shows its value to other
    /// processes.
    #[must_use]
    pub fn done_bytes(&self) -> &AtomicU64 {
        self.lease().done_bytes()
    }

    /// Checks that this process still holds its part.
    ///
    /// # Errors
    /// `Usage` if another process has taken over this part, or the partial folder no longer exists.
    pub fn check(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |lost| Err(self.holding.error(*lost)))
    }

    /// Records that this part is finished.
    ///
    /// # Errors
    /// The errors of [`Staging::check`], `Io`.
    pub fn finish(&self) -> Result<()> {
        self.check()?;
        if let Some(identity) =
            partial_folder::output(&self.work, self.shape).ok().flatten().as_ref().and_then(FileIdentity::of)
        {
            let _ = self.identity.set(identity);
        }
        self.lease().finish()
    }

    /// Records why this part will not finish, for the processes that wait for it. A part that was stopped by a signal
    /// records nothing, because it may be restarted.
    pub fn announce_failure(&self, error: &Error) {
        if !matches!(error, Error::Stopped(_)) {
            self.lease().fail(&error.to_string(), self.claim.run.as_deref());
        }
    }

    fn lease(&self) -> &Lease {
        self.lease.as_ref().expect("it is there until this is dropped")
    }

    /// Returns the partial folder if it is still the folder in which this process works.
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
        // Checked again, because a suspended process may have been resumed just now, before its next heartbeat.
        let is_ours = || self.lost.get().is_none() && matches!(self.holding.look(), Ok(None));
        if !is_published && !self.is_kept() && is_ours() {
            let _ = self.destination.rename_away(&self.partial, TRASH);
        }
        // The lease is released only here, so that its file is in the trash folder. Network file systems keep a deleted
        // file for as long as it is open.
        drop(self.lease.take());
        // If a temporary folder exists next to a partial folder, a slower process created it; that process creates
        // another one if it is alive. Deleting the trash may take long, so a process that is to be resumed leaves this
        // to the next run.
        let is_kept = self.is_kept() && !is_published;
        self.destination.sweep(if is_kept { &[TMP] } else { &[TMP, TRASH] });
    }
}
