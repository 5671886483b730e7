//! Nothing stands at the destination until it is complete, whoever works on it and whoever dies over it.
//!
//! Work goes to `.NAME.dtshard-partial` beside the destination, on the same file system. One process or many may be at
//! it, each with a lease on its part; nobody leads. Publishing is one rename of `data`, by whoever seals: the only
//! commit. Replacing an existing destination takes three steps (old aside to `.NAME.dtshard-old`, new in, old deleted);
//! a crash between them is finished or rolled back by the next run.
//!
//! ```text
//! .NAME.dtshard-partial/
//!     plan.json                what is being written
//!     about.json               the same for people, who are told what differs
//!     part-2-of-4.0.lease      who works on part 2, generation 0
//!     seal.0.lease             who seals
//!     work-1f0c96a2b7d4/       named by the plan: no other folder at this place ever has one of that name
//!         data/                    the output
//!         part-2-of-4.0.journal    what the process with that lease has done
//! ```
//!
//! Invariant: `plan.json` and `work-ID/data` come with the folder and are never made again, so that output which was there and
//! is not was published. Only links, creation with `O_EXCL` and renames decide anything, as on network file systems
//! nothing else does.

mod begin;
mod cache;
mod commit;
mod earlier;
mod foresee;
mod judge;
mod lease;
mod leaving;
mod life;
mod loss;
mod mark;
mod names;
mod place;
mod plan;
pub mod presence;
mod refuse;
mod replace;
#[cfg(test)]
mod tests;
mod wait;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

pub use commit::Seal;
pub use foresee::Foreseen;
pub use replace::ReplaceCheck;
pub use wait::{Missing, Other, OtherState, Waited};

use self::cache::Looking;
use self::earlier::Earlier;
use self::lease::Lease;
use self::life::Watch;
use self::loss::{Holding, Lost};
use self::names::Identity;
use self::place::{DRAFT, GONE, Place};
use self::plan::{Found, Partial, Planned};
use super::Stop;
use super::about::About;
use super::fingerprint::Fingerprint;
use crate::comm::{Part, WaitReporter};
use crate::error::{Error, Result};
use crate::fault;
use crate::storage::AnchoredPath;

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
    /// Tells what is waited for here.
    pub reporter: WaitReporter,
}

impl Claim {
    /// A part that does not wait for others may come when all is done, as one that has nothing to do, or is done again.
    fn takes_what_is_done(&self) -> bool {
        self.resume || !self.parts_wait && !self.part.is_alone()
    }
}

/// What is to be written.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    pub fingerprint: Fingerprint,
    pub version: &'a str,
    pub about: &'a About,
}

/// How a beginning ends.
#[derive(Debug)]
pub enum Begun {
    Work(Staging),
    /// The destination is there, from the same plan, and that is no surprise: with `--resume`, or of parts that do not wait.
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
    /// From a process's end until it is given up: whoever ends one may be about to end this one as well, or to start
    /// that one again.
    stopped_after: Duration,
    /// From the last change of a lease until nobody waits for its process, which is there.
    stuck_after: Duration,
    /// For how long a network file system may answer from a cache.
    cached_for: Duration,
    /// Between two looks at what others do: at first, and at most.
    look: (Duration, Duration),
}

/// Waiting between looks, which doubles each time: a small job ends soon, and many that wait for long do not keep a
/// metadata server busy.
struct Nap {
    next: Duration,
    most: Duration,
}

impl Pace {
    fn nap(&self) -> Nap {
        let (next, most) = self.look;
        Nap { next, most }
    }
}

impl Nap {
    fn take(&mut self) {
        sleep(self.next);
        self.next = (self.next * 2).min(self.most);
    }
}

const PACE: Pace = Pace {
    beat: Duration::from_secs(2),
    dead_after: Duration::from_secs(20),
    start_within: Duration::from_mins(5),
    seal_after: Duration::from_secs(5),
    stopped_after: Duration::from_secs(2),
    stuck_after: Duration::from_mins(10),
    // NFS: 60 seconds for folders (acdirmax), and some for what it takes.
    cached_for: Duration::from_secs(75),
    look: (Duration::from_millis(20), Duration::from_secs(1)),
};

/// For tests that kill a process before its lease says who it is, or wait for one that never starts.
const HURRIED_PACE: Pace = Pace {
    dead_after: Duration::from_millis(200),
    start_within: Duration::from_secs(10),
    cached_for: Duration::from_secs(15),
    look: (Duration::from_millis(5), Duration::from_millis(20)),
    ..PACE
};

fn pace() -> Pace {
    if fault::is_hurried() { HURRIED_PACE } else { PACE }
}

/// A destination being written. Dropped unpublished, it leaves what can be resumed, or else nothing.
#[derive(Debug)]
pub struct Staging {
    place: Place,
    shape: Shape,
    claim: Claim,
    fingerprint: Fingerprint,
    holding: Arc<Holding>,
    pace: Pace,
    partial: AnchoredPath,
    work: AnchoredPath,
    data: AnchoredPath,
    journal: AnchoredPath,
    /// `None` once dropped.
    lease: Option<Lease>,
    lost: Arc<OnceLock<Lost>>,
    watch: Mutex<Watch>,
    /// What will be at the destination, known once it is complete.
    identity: OnceLock<Identity>,
    /// The file or folder that this process moved away from the destination.
    replaced: Mutex<Option<Identity>>,
    earlier: Earlier,
    /// Parts that nobody waits for any more, by their index.
    settled: Mutex<BTreeSet<u32>>,
    /// Since when the others are waited for.
    waiting: OnceLock<Instant>,
    /// The partial folder is gone and nothing was published from it, as no cache has it any more.
    is_gone: AtomicBool,
    is_published: AtomicBool,
}

impl Staging {
    /// Claim a part of the work on `destination`. Waits where others have to be watched to be known alive or dead.
    ///
    /// # Errors
    /// `Usage` where it exists and may not be replaced, or where another run is or was at work on it; `Stopped`; `Io`.
    pub fn begin(destination: &Path, shape: Shape, claim: &Claim, plan: &Plan<'_>, stop: &Stop) -> Result<Begun> {
        begin::begin(destination, shape, claim, plan, pace(), stop)
    }

    /// What [`Staging::begin`] would come to, as far as one look can tell. Changes nothing.
    ///
    /// # Errors
    /// Those of beginning; `Usage` where others would have to be watched.
    pub fn foresee(destination: &Path, shape: Shape, claim: &Claim, plan: &Plan<'_>) -> Result<Foreseen> {
        foresee::foresee(destination, shape, claim, plan, &PACE)
    }

    /// Whether something stands at a destination that is not to be replaced, before it is known what is to be written.
    /// What an earlier run made there is left to [`Staging::begin`] by who takes that.
    ///
    /// # Errors
    /// Those of beginning.
    pub fn refuse_taken(destination: &Path, shape: Shape, claim: &Claim) -> Result<()> {
        if claim.takes_what_is_done() {
            return Ok(());
        }
        let (place, stop) = (Place::of(destination)?, Stop::default());
        place.refresh(Looking { claim, pace: &pace(), stop: &stop })?;
        begin::check_destination(&place, shape, claim)
    }

    /// The folder to write into.
    #[must_use]
    pub fn folder(&self) -> &AnchoredPath {
        &self.data
    }

    /// The folder that has the journals of all parts, `*.journal`.
    #[must_use]
    pub fn journals(&self) -> &AnchoredPath {
        &self.work
    }

    /// What is left beside the destination, where that is kept.
    #[must_use]
    pub fn partial(&self) -> &Path {
        self.partial.path()
    }

    /// The journal that only this process writes. Close it before this is dropped.
    #[must_use]
    pub fn journal(&self) -> &AnchoredPath {
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
            Some(lost) => Err(self.holding.error(*lost)),
        }
    }

    /// Say that this part is done.
    ///
    /// # Errors
    /// As [`Staging::check`], `Io`.
    pub fn finish(&self) -> Result<()> {
        self.check()?;
        if let Some(identity) = plan::output(&self.work, self.shape).ok().flatten().as_ref().and_then(Identity::of) {
            let _ = self.identity.set(identity);
        }
        self.lease().finish()
    }

    /// Tell those that wait for this part why it does not come to its end. One that a signal stops is to be started again.
    pub fn tell(&self, error: &Error) {
        if !matches!(error, Error::Stopped { .. }) {
            self.lease().fail(&error.to_string(), self.claim.run.as_deref());
        }
    }

    fn lease(&self) -> &Lease {
        self.lease.as_ref().expect("it has one until it is dropped")
    }

    /// The partial folder, if it is still the one that this process works in.
    fn find(&self) -> Result<Option<Partial>> {
        Ok(match Found::at(&self.partial, self.shape)? {
            Found::Partial(found) if found.plan.id == self.holding.plan.id => Some(found),
            _ => None,
        })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.place.spare.give_back();
        let is_published = self.is_published.load(Ordering::Relaxed);
        // Looked at anew: this process may just have been woken up, before its first beat.
        let is_ours = || self.lost.get().is_none() && matches!(self.holding.look(), Ok(None));
        if !is_published && !self.is_kept() && is_ours() {
            let _ = self.place.let_go(&self.partial);
        }
        // Held until here, so that what is let go is what it is on. Network file systems keep a deleted file for as long
        // as it is open.
        drop(self.lease.take());
        // A draft beside work is of one that was slower, and is killed if it is still there; one that lives makes another.
        // To delete what was let go may take long, and who is told to stop leaves that to the next one.
        let is_kept = self.is_kept() && !is_published;
        self.place.sweep(if is_kept { &[DRAFT] } else { &[DRAFT, GONE] });
    }
}
