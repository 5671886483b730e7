//! Presence shows which processes of a run are alive. Processes show that they are alive by leases in a folder that all
//! processes see.
//!
//! Each process holds the lease of its part. A process that fails writes the reason into its lease. Process 0 watches
//! all other processes. The other processes watch process 0 only. If a process ends, process 0 writes the number of
//! that process and the reason into its own lease. Therefore the number of files that all processes read together grows
//! with the number of processes, not with the square of this number. When process 0 has finished, the processes that
//! are still connected watch each other. Invariant: the first failure is kept, because later failures are consequences
//! of the first failure.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::destination::is_gone;
use super::lease::{
    Lease, LeaseName, LeasePhase, LeaseRecord, LeaseRole, LeaseState, LeaseWatch, SeenLease, latest_leases, read_lease,
};
use super::{Pace, pace};
use crate::comm::{DROPPED, ENDED, FirstFailure, LEFT, PeerFailure, Process};
use crate::error::{Error, Result};
use crate::fault;
use crate::launch::Part;
use crate::storage::AnchoredPath;

/// The interval between two heartbeats of a lease, and between two checks of the other processes.
const BEAT: Duration = Duration::from_secs(1);
const HURRIED_BEAT: Duration = Duration::from_millis(100);

/// The time in tests after which a process that exists but does not update its lease counts as dead.
const HURRIED_STUCK: Duration = Duration::from_secs(15);

fn beat() -> Duration {
    if cfg!(test) { HURRIED_BEAT } else { fault::wait_time(BEAT, HURRIED_BEAT) }
}

/// Returns the time after which a process that exists but does not update its lease counts as dead.
pub fn stuck_after() -> Duration {
    fault::wait_time(pace().stuck_after, HURRIED_STUCK)
}

/// The lease of a part, as another process has read it.
#[derive(Clone, Debug)]
pub struct FoundLease {
    pub state: LeaseState,
    pub process: Option<Process>,
    pub(crate) failure: Option<PeerFailure>,
}

/// Reader of the leases of other processes in a folder.
#[derive(Debug)]
pub struct Observer {
    folder: AnchoredPath,
    of: u32,
    watch: LeaseWatch,
}

impl Observer {
    #[must_use]
    pub fn new(folder: &AnchoredPath, of: u32) -> Self {
        Self { folder: folder.clone(), of, watch: LeaseWatch::new(Pace { stuck_after: stuck_after(), ..pace() }) }
    }

    /// Returns, for each part, the generation of its latest lease: the number that increases each time another process
    /// acquires the lease.
    ///
    /// # Errors
    /// `Io` if the folder cannot be listed.
    pub fn generations(&self) -> Result<BTreeMap<u32, u32>> {
        let names = match latest_leases(&self.folder) {
            Ok(names) => names,
            // The last process of an earlier run may delete the folder before this process has its lease in it.
            Err(error) if is_gone(&error) => return Ok(BTreeMap::new()),
            Err(error) => return Err(Error::io("list", &self.folder)(error)),
        };
        let generation = |name: LeaseName| match name.role {
            LeaseRole::Part(part) if part.of == self.of => Some((part.index, name.generation)),
            _ => None,
        };
        Ok(names.filter_map(generation).collect())
    }

    /// Returns the state of a lease, or `None` if the lease does not exist.
    ///
    /// # Errors
    /// `Io` if the lease cannot be read.
    pub fn look(&mut self, index: u32, generation: u32) -> Result<Option<FoundLease>> {
        let name = self.name(index, generation);
        let seen = match read_lease(&self.folder, name) {
            Ok(Some(seen)) => seen,
            Ok(None) => return Ok(None),
            Err(error) => return Err(Error::io("read", &self.folder.join(name.to_string()))(error)),
        };
        let state = self.watch.state(&seen, Instant::now());
        let (process, failure) = seen.record.map(|record| (record.process, record.gone)).unzip();
        Ok(Some(FoundLease { state, process, failure: failure.flatten() }))
    }

    fn name(&self, index: u32, generation: u32) -> LeaseName {
        LeaseName { role: LeaseRole::Part(Part { index, of: self.of }), generation }
    }

    /// Returns why the holder of a lease has ended. Returns `None` if the process is present, or if it left after all
    /// work was finished.
    fn gone(&mut self, index: u32, generation: u32) -> Option<PeerFailure> {
        let name = self.name(index, generation);
        // If the lease cannot be read for a moment, as on a network file system, the next check decides.
        let seen = read_lease(&self.folder, name).ok()??;
        let state = self.watch.state(&seen, Instant::now());
        let because = |why: &str| Some(PeerFailure { rank: index, why: why.into() });
        match &seen {
            SeenLease { record: Some(LeaseRecord { gone: Some(gone), .. }), .. } => Some(gone.clone()),
            SeenLease { record: Some(LeaseRecord { phase: LeasePhase::Left, .. }), .. } => None,
            SeenLease { record: Some(LeaseRecord { phase: LeasePhase::Stopped, .. }), .. } => because(DROPPED),
            _ if self.watch.unchanged(name) >= stuck_after() => {
                because(&format!("has made no progress for {} s", stuck_after().as_secs()))
            }
            _ if state == LeaseState::Dead => because(ENDED),
            _ => None,
        }
    }

    /// Returns true if the holder of a lease has left the run in an orderly way.
    fn has_left(&self, index: u32, generation: u32) -> bool {
        matches!(self.phase(index, generation), Ok(Some(LeasePhase::Left)))
    }

    /// Returns the phase of the process that holds a lease, or `None` if the lease file does not exist. Fails if the
    /// lease cannot be read at this moment.
    fn phase(&self, index: u32, generation: u32) -> io::Result<Option<LeasePhase>> {
        let seen = read_lease(&self.folder, self.name(index, generation))?;
        seen.map(|seen| Ok(seen.record.ok_or(io::ErrorKind::InvalidData)?.phase)).transpose()
    }
}

/// Returns whether a folder contains a lease whose process may still be working.
pub fn is_in_use(folder: &AnchoredPath) -> bool {
    const DAY: Duration = Duration::from_hours(24);
    let here = Process::this();
    let is_alive = |name: LeaseName| {
        let record = read_lease(folder, name).ok().flatten().and_then(|seen| seen.record);
        let is_over = record
            .as_ref()
            .is_some_and(|record| record.phase.is_over() || record.process.is_alive(&here) == Some(false));
        // A live process on another node rewrites its lease at short intervals, so a lease that is older than a day has
        // no live process.
        let modified = folder.join(format!("{name}.lease")).metadata().and_then(|metadata| metadata.modified());
        let is_old = modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > DAY));
        !is_over && !is_old
    };
    match latest_leases(folder) {
        Ok(mut names) => names.any(is_alive),
        // If the folder cannot be listed, it may be in use.
        Err(error) => !is_gone(&error),
    }
}

/// The lease of this process. This value also watches the leases of the other processes.
#[derive(Debug)]
pub struct Presence {
    folder: AnchoredPath,
    part: Part,
    generation: u32,
    lease: Lease,
    first_failure: Arc<FirstFailure>,
    members: Arc<Mutex<Members>>,
}

/// The processes that belong to the session, identified by the generations of their leases. Empty until the session
/// exists.
#[derive(Debug)]
struct Members {
    observer: Observer,
    generations: Vec<u32>,
}

impl Presence {
    /// Acquires the lease of a part. Returns `None` if another process was faster.
    ///
    /// # Errors
    /// `Io` if the lease cannot be written.
    pub fn take(folder: &AnchoredPath, part: Part, generation: u32) -> Result<Option<Self>> {
        let name = LeaseName { role: LeaseRole::Part(part), generation };
        let Some(mut lease) = Lease::take(folder, name)? else { return Ok(None) };
        let first_failure = Arc::new(FirstFailure::default());
        let observer = Observer::new(folder, part.of);
        let members = Arc::new(Mutex::new(Members { observer, generations: Vec::new() }));
        let (watched, sealed) = (Arc::clone(&members), Arc::clone(&first_failure));
        let note = lease.note();
        lease.start(beat(), move || {
            if sealed.gone().is_none()
                && let Some(gone) = lock(&watched).first_gone(part)
                && sealed.seal(gone.clone())
            {
                note(gone);
            }
        })?;
        Ok(Some(Self { folder: folder.clone(), part, generation, lease, first_failure, members }))
    }

    pub fn folder(&self) -> &AnchoredPath {
        &self.folder
    }

    pub fn part(&self) -> Part {
        self.part
    }

    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Starts watching the other processes of the session. `generations` has the generation of each process's lease.
    pub fn watch(&self, generations: Vec<u32>) {
        lock(&self.members).generations = generations;
    }

    /// Checks that no process of the session has ended.
    ///
    /// # Errors
    /// `Comm` naming the process that has ended, `Stopped` if a signal stopped that process.
    pub fn check(&self, op: &'static str) -> Result<()> {
        self.first_failure.check(op)
    }

    /// Returns why a process has ended, or `None` if the process is present. Checks immediately, without waiting for
    /// the next heartbeat. A process that has left the run counts as ended.
    pub(crate) fn gone_now(&self, index: u32) -> Option<PeerFailure> {
        let mut members = lock(&self.members);
        let generation = members.generations.get(index as usize).copied()?;
        let left = members.observer.has_left(index, generation);
        let left = left.then(|| PeerFailure { rank: index, why: LEFT.into() });
        members.observer.gone(index, generation).or(left)
    }

    /// Returns the process that holds the lease of a part, and the time during which the lease was watched without a
    /// change. Returns `None` if the lease cannot be read.
    pub fn lease_of(&self, index: u32) -> Option<(Process, Duration)> {
        let members = lock(&self.members);
        let name = members.observer.name(index, members.generations.get(index as usize).copied()?);
        let record = read_lease(&self.folder, name).ok()??.record?;
        Some((record.process, members.observer.watch.unchanged(name)))
    }

    /// Notifies the other processes that a process of the session has ended. That process may be this process itself.
    pub(crate) fn give_up(&self, gone: PeerFailure) {
        self.first_failure.seal(gone.clone());
        let first = self.first_failure.gone().cloned().unwrap_or(gone);
        self.lease.note()(first);
    }

    /// Notifies the other processes that this process ends because of an error.
    pub fn fail(&self, error: &Error) {
        self.give_up(PeerFailure::because_of(error, self.part.index));
    }

    /// Leaves the run in an orderly way, after this process has completed its work.
    pub fn leave(&self) {
        let _ = self.lease.finish();
        lock(&self.members).generations.clear();
    }
}

impl Members {
    /// Checks the processes that the process of `part` watches, and returns one that has ended, if any. Process 0
    /// watches all other processes. Any other process watches process 0, and after process 0 has finished, all other
    /// processes. If several processes have ended, one that gave a reason is returned.
    fn first_gone(&mut self, part: Part) -> Option<PeerFailure> {
        let len = self.generations.len();
        let watched = match self.generations.first().filter(|_| part.index != 0) {
            None => 1..len,
            Some(first) => match self.observer.phase(0, *first) {
                // Process 0 removes the folder some time after it has published, so the other processes cannot detect
                // any more who has ended.
                Ok(None) => return Some(PeerFailure { rank: 0, why: LEFT.into() }),
                Ok(Some(phase)) if phase.is_done() => 0..len,
                _ => 0..1,
            },
        };
        let all: Vec<PeerFailure> = watched
            .filter(|index| *index != part.index as usize)
            .filter_map(|index| {
                let rank = u32::try_from(index).expect("fewer than 2^32 processes");
                self.observer.gone(rank, self.generations[index])
            })
            .collect();
        // A process that ended without a reason may have ended as a consequence of the failure of another process. So a
        // process that gave a reason is preferred.
        let is_dropped = |gone: &&PeerFailure| gone.why == DROPPED.into();
        all.iter().find(|gone| !is_dropped(gone)).or(all.first()).cloned()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Stopped;

    #[test]
    fn reasons_survive_a_lease() {
        let stopped = Error::Stopped(Stopped { signal: "TERM", exit: 143, rank: None, kept: None });
        let longest = Error::usage("\u{1}".repeat(5000), "");
        for (index, error) in (0..).zip([Error::usage("stopped by TERM; no signal", ""), stopped, longest]) {
            let root = tempfile::tempdir().unwrap();
            let folder = AnchoredPath::new(root.path());
            let presence = Presence::take(&folder, Part { index, of: 3 }, 0).unwrap().unwrap();
            presence.fail(&error);
            let found = Observer::new(&folder, 3).look(index, 0).unwrap().unwrap();
            let PeerFailure { rank, why } = PeerFailure::because_of(&error, index);
            assert_eq!(found.failure, Some(PeerFailure { rank, why: why.cut(400) }));
        }
    }

    /// Three processes of a session, of which process 0 has finished and left.
    fn two_of_three_left(folder: &AnchoredPath) -> [Presence; 2] {
        let [first, second, third] =
            [0, 1, 2].map(|index| Presence::take(folder, Part { index, of: 3 }, 0).unwrap().unwrap());
        [&first, &second, &third].into_iter().for_each(|presence| presence.watch(vec![0; 3]));
        first.leave();
        drop(first);
        [second, third]
    }

    /// Waits until a process has detected a failure. A process checks the leases at each heartbeat.
    fn failure_of(presence: &Presence) -> String {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(10) {
            if let Err(error) = presence.check("wait") {
                return error.to_string();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("no failure was detected");
    }

    #[test]
    fn processes_watch_each_other_after_process_0_has_left() {
        let root = tempfile::tempdir().unwrap();
        let [second, third] = two_of_three_left(&AnchoredPath::new(root.path()));
        std::thread::sleep(3 * HURRIED_BEAT);
        second.check("wait").unwrap();
        drop(third);
        let error = failure_of(&second);
        assert!(error.contains("process 2") && error.contains(DROPPED), "{error}");
    }

    #[test]
    fn process_that_is_connected_after_the_folder_was_removed_reports_that_process_0_has_left() {
        let root = tempfile::tempdir().unwrap();
        let [second, _third] = two_of_three_left(&AnchoredPath::new(root.path()));
        std::fs::remove_dir_all(root.path()).unwrap();
        let error = failure_of(&second);
        assert!(error.contains("process 0") && error.contains(LEFT), "{error}");
    }

    #[test]
    fn a_folder_is_in_use_while_a_process_holds_a_lease() {
        let root = tempfile::tempdir().unwrap();
        let folder = AnchoredPath::new(root.path());
        assert!(!is_in_use(&folder));
        let presence = Presence::take(&folder, Part { index: 0, of: 2 }, 0).unwrap().unwrap();
        assert!(is_in_use(&folder));
        assert!(Presence::take(&folder, Part { index: 0, of: 2 }, 0).unwrap().is_none());
        drop(presence);
        assert!(!is_in_use(&folder));
    }
}
