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
//!     work-1f0c96a2b7d4/       the name contains the id of the plan; no other folder ever has this id
//!         data/                    the output
//!         part-2-of-4.0.journal    the byte ranges that the process with that lease has finished
//! ```
//!
//! ```text
//! absent - create -> partial -- all parts finished --> sealed -- rename --> published -- clean up --> absent
//!    ^                  |  ^                             |
//!    |                  |  +--- another process takes over, with the next generation of the lease
//!    +--- delete (--restart, or no work is kept) --------+
//! ```
//!
//! Invariant: all decisions are made by hard links, creation with `O_EXCL`, and renames, because only these operations
//! are atomic on a network file system.

mod abandon;
mod acquire;
mod commit;
pub mod completed_work;
mod destination;
pub mod journal;
mod lease;
mod partial_folder;
pub mod presence;
mod published_xattr;
pub mod seal;
#[cfg(test)]
mod tests;
mod wait;
pub mod work_log;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

pub use commit::{ReplaceCheck, Seal};
pub use lease::LeaseState;
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

/// The kind of the output: a folder or a single file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationKind {
    /// The output is the data folder, which is renamed to the destination.
    Folder,
    /// The output is the only file in the data folder; this file is renamed to the destination.
    File,
}

/// Request of a process to work on a destination: its part of the work, and the options for existing files.
#[derive(Clone, Debug)]
pub struct Claim {
    /// True if an existing destination may be replaced. `replace_check` must also accept the replacement.
    pub overwrite: bool,
    pub replace_check: ReplaceCheck,
    /// True if the unfinished output of an earlier run is deleted (`--restart`).
    pub restart: bool,
    /// True if the unfinished output of an earlier run is continued (`--resume`).
    pub resume: bool,
    pub part: Part,
    /// The name of the launch, which a launcher gives to all processes that it starts together; `None` if no launcher
    /// gives a name.
    pub run: Option<String>,
    /// True if the output is synced to disk, so that it survives a crash of the node.
    pub sync: bool,
    /// True if the other parts run at the same time, so that processes can wait for each other.
    pub parts_wait: bool,
    /// Reporter that prints which process or event this process waits for.
    pub reporter: WaitReporter,
}

impl Claim {
    /// Returns true if the run succeeds when the destination already has the finished output of its plan. For example,
    /// a part that does not wait for the others may start after all work is finished, because it has no bytes to write
    /// or because it is restarted.
    fn accepts_finished_output(&self) -> bool {
        self.resume || !self.parts_wait && !self.part.is_alone()
    }

    /// Returns true if this process, or the first process of its launch, may delete the unfinished output of an earlier
    /// run (`--restart`).
    fn can_restart(&self) -> bool {
        self.part.is_alone() || self.run.is_some() && self.parts_wait
    }
}

/// Identity and description of the output to write.
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
    /// Nothing has to be done: the destination exists, was made from the plan of this run, and the options accept this.
    Done,
}

/// The way in which a run would begin.
#[derive(Debug)]
pub enum Preflight {
    Fresh,
    /// The run would continue the work of other processes, which may be running.
    Resumes,
    /// The run would have nothing to do: the destination exists and was made from the plan of this run.
    Done,
    /// The answer is unknown, because only a run that watches the leases can decide. The run would most likely fail
    /// with this error.
    Unsure(Error),
}

/// The time limits and intervals of publishing.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// The interval between two heartbeats of a lease.
    beat: Duration,
    /// The time after which an unchanged lease counts as dead, if its process is on another node.
    dead_after: Duration,
    /// The time after which an unchanged lease counts as dead, even if its process exists on this node.
    stuck_after: Duration,
    /// The time for which this process waits for a part that has not started.
    start_within: Duration,
    /// The time for which other processes wait for the part of a process that ended. Within this time the process may
    /// be restarted, or the same cause may end the other processes as well.
    stopped_after: Duration,
    /// The time after which any process may seal, counted from the moment at which all parts are finished. Before this
    /// time has passed, only the process of part 0 seals.
    seal_after: Duration,
    /// The time for which a network file system may return cached names.
    cached_for: Duration,
    /// The shortest and the longest delay between two checks of the other processes.
    look: (Duration, Duration),
}

const PACE: Pace = Pace {
    beat: Duration::from_secs(2),
    dead_after: Duration::from_secs(20),
    stuck_after: Duration::from_mins(10),
    start_within: Duration::from_mins(5),
    stopped_after: Duration::from_secs(2),
    seal_after: Duration::from_secs(5),
    // NFS caches folders for 60 seconds (acdirmax); 15 seconds are added for safety.
    cached_for: Duration::from_secs(75),
    look: (Duration::from_millis(20), Duration::from_secs(1)),
};

/// Time limits for tests in which a process is killed before it has written its lease, or in which a process never
/// starts.
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

/// A delay between two checks that becomes twice as long after each check, up to a maximum. The delay is short at
/// first, because a small job ends soon. The delay becomes long, because many waiting processes must not overload a
/// metadata server.
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

/// A destination that is being written. If this value is dropped before the output is published, the output is kept for
/// a later run with `--resume` if [`Staging::is_kept`] returns true; otherwise it is deleted.
#[derive(Debug)]
pub struct Staging {
    destination: Destination,
    shape: DestinationKind,
    claim: Claim,
    fingerprint: Fingerprint,
    /// The id of the partial folder, as recorded in its plan.
    id: String,
    holding: Arc<WorkLease>,
    pace: Pace,
    partial: AnchoredPath,
    work: AnchoredPath,
    data: AnchoredPath,
    journal: AnchoredPath,
    /// The lease on the part of this process; `None` only while this value is dropped.
    lease: Option<Lease>,
    lost: Arc<OnceLock<LeaseLost>>,
    watch: Mutex<LeaseWatch>,
    /// The identity of the output file or folder. The cell is empty until the output is complete.
    identity: OnceLock<FileIdentity>,
    /// The identity of the checkpoint that this process moved away from the destination.
    replaced: Mutex<Option<FileIdentity>>,
    stale: StaleLeases,
    /// The indices of parts that count as finished, so that this process does not wait for them.
    finished: Mutex<BTreeSet<u32>>,
    /// The time at which this process began to wait for the other parts.
    waiting: OnceLock<Instant>,
    /// True if the partial folder has been missing for longer than a file system caches names, although the output was
    /// not published.
    is_gone: AtomicBool,
    is_published: AtomicBool,
}

impl Staging {
    /// Acquires a part of the work on the destination `path`. If it is not known whether other processes are alive,
    /// this function watches their leases and waits.
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

    /// Returns how [`Staging::begin`] would begin, as far as a single check can find out. Returns `Unsure` if other
    /// processes would have to be watched first. Changes nothing.
    ///
    /// # Errors
    /// The errors of [`Staging::begin`].
    pub fn preflight(path: &Path, shape: DestinationKind, claim: &Claim, plan: &WorkPlan<'_>) -> Result<Preflight> {
        acquire::preflight(path, shape, claim, plan, PACE)
    }

    /// Returns the folder into which the output is written.
    pub fn folder(&self) -> &AnchoredPath {
        &self.data
    }

    /// Returns the folder that contains the journals of all parts, `*.journal`.
    pub fn journals(&self) -> &AnchoredPath {
        &self.work
    }

    /// Returns the path of the partial folder beside the destination. After an interrupted run, this folder is kept for
    /// a run with `--resume` if [`Staging::is_kept`] returns true.
    pub fn partial(&self) -> &Path {
        self.partial.path()
    }

    /// Returns the path of this process's own journal. Close the journal before this value is dropped.
    pub fn journal(&self) -> &AnchoredPath {
        &self.journal
    }

    /// Returns true if finished work is kept for `--resume` after an error or a signal. This is so if the run was
    /// started with `--resume`, or has several parts.
    pub fn is_kept(&self) -> bool {
        self.claim.resume || !self.claim.part.is_alone()
    }

    /// Returns the counter of the bytes that this process has finished. Other processes see its value in the next
    /// heartbeat of the lease.
    pub fn done_bytes(&self) -> &AtomicU64 {
        self.lease().done_bytes()
    }

    /// Checks that no other process has taken over the part of this process.
    ///
    /// # Errors
    /// `Usage` if another process has taken over this part, or the partial folder no longer exists.
    pub fn check(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |lost| Err(self.holding.error(*lost)))
    }

    /// Records that this process has finished its part of the work.
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
        // The lease is checked again, because this process may have been suspended until now, and has not sent a
        // heartbeat since.
        let is_ours = || self.lost.get().is_none() && matches!(self.holding.look(), Ok(None));
        if !is_published && !self.is_kept() && is_ours() {
            let _ = self.destination.rename_away(&self.partial, TRASH);
        }
        // The lease is released after the folder was renamed, so that the lease file is in the trash folder, and before
        // the trash is deleted: a network file system keeps a deleted file for as long as it is open.
        drop(self.lease.take());
        // If a temporary folder exists next to a partial folder, a slower process created it; that process creates
        // another one if it is alive. Deleting the trash may take long, so a process that is to be resumed leaves this
        // to the next run.
        let is_kept = self.is_kept() && !is_published;
        self.destination.sweep(if is_kept { &[TMP] } else { &[TMP, TRASH] });
    }
}
