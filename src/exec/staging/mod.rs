//! Nothing stands at the destination until it is complete, whoever works on it and whoever dies over it.
//!
//! Work goes to `.NAME.dtshard-partial` beside the destination, on the same file system. One process or many may be at
//! it, each with a [lease] on its part; nobody leads. Publishing is one rename of `data`, by whoever seals: the only
//! commit. Replacing an existing destination takes three steps (old aside to `.NAME.dtshard-old`, new in, old deleted);
//! a crash between them is finished or rolled back by the next run.
//!
//! ```text
//! .NAME.dtshard-partial/
//!     plan.json                what is being written
//!     data/                    the output
//!     part-2-of-4.0.lease      who works on part 2, generation 0
//!     part-2-of-4.0.journal    what that process has done
//!     seal.0.lease             who seals
//! ```
//!
//! Invariant: `plan.json` and `data` come with the folder and are never made again, so that output which was there and
//! is not was published. Only creation with `O_EXCL` and renames decide anything, as on network file systems nothing
//! else does.

mod begin;
mod commit;
mod judge;
mod lease;
mod life;
mod mark;
mod place;
mod plan;
#[cfg(test)]
mod tests;
mod wait;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub use commit::Seal;
pub use wait::{Other, OtherState, Waited};

use self::lease::{Lease, LeaseName, Role};
use self::life::Watch;
use self::place::{GONE, Identity, Place};
use self::plan::{Found, Partial, Planned};
use super::Stop;
use super::fingerprint::Fingerprint;
use crate::comm::Part;
use crate::error::{Error, Result};
use crate::fault;

/// What is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// The data folder becomes the destination.
    Folder,
    /// The one file in the data folder becomes the destination.
    File,
}

/// Who wants to work, and what to do about things in the way.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Replace an existing destination.
    pub overwrite: bool,
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
}

/// What is to be written.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    pub fingerprint: Fingerprint,
    pub version: &'a str,
}

/// How a beginning ends.
#[derive(Debug)]
pub enum Begun {
    Work(Staging),
    /// The destination is there, from the same plan, and `--resume` was given.
    Done,
}

/// How long things take.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Between two beats of a lease.
    beat: Duration,
    /// From the last change of a lease to its being dead, seen from another node.
    dead_after: Duration,
    /// A part that did not start by then is given up.
    start_within: Duration,
    /// From when all parts are done until another than the first one seals.
    seal_after: Duration,
    /// Between two looks at what others do.
    look: Duration,
}

const PACE: Pace = Pace {
    beat: Duration::from_secs(2),
    dead_after: Duration::from_secs(20),
    start_within: Duration::from_mins(5),
    seal_after: Duration::from_secs(5),
    look: Duration::from_millis(50),
};

/// For tests that kill a process before its lease says who it is.
const HURRIED_PACE: Pace = Pace { dead_after: Duration::from_millis(200), look: Duration::from_millis(5), ..PACE };

/// A destination being written. Dropped unpublished, it leaves what can be resumed, or else nothing.
#[derive(Debug)]
pub struct Staging {
    place: Place,
    shape: Shape,
    claim: Claim,
    fingerprint: Fingerprint,
    plan: Planned,
    pace: Pace,
    partial: PathBuf,
    data: PathBuf,
    journal: PathBuf,
    /// `None` once dropped.
    lease: Option<Lease>,
    lost: Arc<OnceLock<Lost>>,
    watch: Mutex<Watch>,
    /// What will be at the destination, known once it is complete.
    identity: OnceLock<Identity>,
    is_published: AtomicBool,
}

/// Why a process that works must not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    TakenOver,
    Gone,
}

impl Staging {
    /// Claim a part of the work on `destination`. Waits where others have to be watched to be known alive or dead.
    ///
    /// # Errors
    /// `Usage` where it exists and may not be replaced, or where another run is or was at work on it; `Stopped`; `Io`.
    pub fn begin(destination: &Path, shape: Shape, claim: &Claim, plan: &Plan<'_>, stop: &Stop) -> Result<Begun> {
        let pace = if fault::is_hurried() { HURRIED_PACE } else { PACE };
        begin::begin(destination, shape, claim, plan, pace, stop)
    }

    /// The folder to write into.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.data
    }

    /// The folder that has the journals of all parts, `*.journal`.
    #[must_use]
    pub fn journals(&self) -> &Path {
        &self.partial
    }

    /// The journal that only this process writes. Close it before this is dropped.
    #[must_use]
    pub fn journal(&self) -> &Path {
        &self.journal
    }

    /// True where an error or a signal leaves what was done, for `--resume`.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.claim.resume || !self.claim.part.is_alone()
    }

    /// What this process has done; others see it with the next beat.
    #[must_use]
    pub fn done_bytes(&self) -> &AtomicU64 {
        self.lease().done_bytes()
    }

    /// # Errors
    /// `Usage` where another process has taken this part over, or the partial folder is gone.
    pub fn check(&self) -> Result<()> {
        match self.lost.get() {
            None => Ok(()),
            Some(lost) => Err(self.lost_error(*lost)),
        }
    }

    /// Say that this part is done.
    ///
    /// # Errors
    /// As [`Staging::check`], `Io`.
    pub fn finish(&self) -> Result<()> {
        self.check()?;
        if let Some(identity) = plan::output(&self.partial, self.shape).ok().flatten().as_deref().and_then(Identity::of)
        {
            let _ = self.identity.set(identity);
        }
        self.lease().finish()
    }

    fn lease(&self) -> &Lease {
        self.lease.as_ref().expect("it has one until it is dropped")
    }

    fn lost_error(&self, lost: Lost) -> Error {
        let Part { index, of } = self.claim.part;
        let destination = self.place.destination.display();
        match lost {
            Lost::TakenOver => Error::usage(
                format!("another run has taken over part {index} of {of} of {destination}"),
                format!(
                    "this process was not seen alive for {} s, or another one was started for its part; the others go \
                     on in {}",
                    self.pace.dead_after.as_secs(),
                    self.partial.display()
                ),
            ),
            Lost::Gone => Error::usage(
                format!("{} is gone, and {destination} was not published from it", self.partial.display()),
                "something else removed it while it was being written; start again",
            ),
        }
    }

    /// Whether somebody else has what is ours.
    fn look_for_loss(partial: &Path, shape: Shape, id: &str, lease: LeaseName, known: &[LeaseName]) -> Option<Lost> {
        let found = match Found::at(partial, shape).ok()? {
            Found::Partial(found) if found.plan.id == id => found,
            _ => return Some(Lost::Gone),
        };
        let is_other =
            |role: Role| matches!((role, lease.role), (Role::Part(theirs), Role::Part(ours)) if theirs.of != ours.of);
        let has_taken_over = found.leases.iter().any(|seen| {
            let is_later = seen.name.role == lease.role && seen.name.generation > lease.generation;
            // Without a beat it may yet find out that it must not stay.
            let has_begun = seen.record.as_ref().is_some_and(|record| record.beat > 0);
            let is_rival = is_other(seen.name.role) && !known.contains(&seen.name) && has_begun;
            is_later || is_rival
        });
        has_taken_over.then_some(Lost::TakenOver)
    }

    /// The partial folder, if it is still the one that this process works in.
    fn find(&self) -> Result<Option<Partial>> {
        Ok(match Found::at(&self.partial, self.shape)? {
            Found::Partial(found) if found.plan.id == self.plan.id => Some(found),
            _ => None,
        })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let is_published = self.is_published.load(Ordering::Relaxed);
        let is_ours = !is_published && self.lost.get().is_none();
        if is_ours && !self.is_kept() && self.find().is_ok_and(|found| found.is_some()) {
            let _ = self.place.let_go(&self.partial);
        }
        // Held until here, so that what is let go is what it is on. Network file systems keep a deleted file for as long
        // as it is open.
        drop(self.lease.take());
        if is_published || !self.is_kept() {
            self.place.sweep(&[GONE]);
        }
    }
}
