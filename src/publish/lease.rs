//! Leases show which process works on a part, whether this process is alive, and whether another process has taken over
//! the part.
//!
//! A lease is a file. A process creates it by a hard link or with `O_EXCL`, so the file system decides which process
//! holds the lease. The holder rewrites a record of fixed length every two seconds. The holder keeps the file handle
//! with which it created the file and writes only through this handle, so it never creates a deleted lease again. If
//! the holder is dead, another process creates the next generation of the lease. On the holder's node, `/proc` shows
//! whether the holder is alive. On other nodes, a lease is dead if it does not change for 20 seconds of the watcher's
//! own clock. Clocks of two nodes are never compared. File locks and file times are not used either, because network
//! file systems do not implement them reliably.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::destination::{is_gone, is_hidden, read_at_most, unique};
use super::{Claim, Pace};
use crate::comm::{PeerFailure, Process};
use crate::error::{Error, Result};
use crate::fault;
use crate::launch::Part;
use crate::storage::AnchoredPath;
use crate::threads;

/// The purpose of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum LeaseRole {
    Part(Part),
    Seal,
    /// The right to delete the partial folder for `--restart`.
    Restart,
}

/// The name of a lease, for example `part-2-of-4.0` or `seal.0`. The lease file has this name with the extension
/// `.lease`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LeaseName {
    pub role: LeaseRole,
    pub generation: u32,
}

impl LeaseName {
    pub fn journal(&self) -> String {
        format!("{self}.journal")
    }

    fn file(&self) -> String {
        format!("{self}.lease")
    }
}

impl fmt::Display for LeaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            LeaseRole::Part(Part { index, of }) => write!(f, "part-{index}-of-{of}.{}", self.generation),
            LeaseRole::Seal => write!(f, "seal.{}", self.generation),
            LeaseRole::Restart => write!(f, "restart.{}", self.generation),
        }
    }
}

impl FromStr for LeaseName {
    type Err = ();

    /// Parses the file name of a lease.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (role, generation) = text.strip_suffix(".lease").and_then(|text| text.rsplit_once('.')).ok_or(())?;
        let number = |text: &str| text.parse().map_err(drop);
        let role = match role.strip_prefix("part-").and_then(|part| part.split_once("-of-")) {
            Some((index, of)) => LeaseRole::Part(Part { index: number(index)?, of: number(of)? }),
            None if role == "seal" => LeaseRole::Seal,
            None if role == "restart" => LeaseRole::Restart,
            None => return Err(()),
        };
        let name = Self { role, generation: number(generation)? };
        // The largest generation number is invalid, because no process could create the next generation. Numbers such
        // as `+1` and `01` are rejected, too.
        if name.generation < u32::MAX && name.file() == text { Ok(name) } else { Err(()) }
    }
}

/// The progress of the process that holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LeasePhase {
    Working,
    /// The process has finished its work and waits for other processes.
    Finished,
    /// The process released the lease before it finished its work.
    Stopped,
    /// The process released the lease after it finished its work.
    Left,
}

impl LeasePhase {
    pub fn is_over(self) -> bool {
        matches!(self, Self::Stopped | Self::Left)
    }

    pub fn is_done(self) -> bool {
        matches!(self, Self::Finished | Self::Left)
    }
}

/// The content of a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaseRecord {
    #[serde(flatten)]
    pub process: Process,
    /// A counter that increases as long as the process is alive.
    pub beat: u64,
    pub phase: LeasePhase,
    pub done_bytes: u64,
    /// The error that ended the process. Only the lease of a part has this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
    /// The first process of the session that ended. A record has this field or `failure`, but not both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone: Option<PeerFailure>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    pub reason: String,
    /// A digest of the name of the launch; `None` if the launcher sets no name.
    run: Option<String>,
}

impl Failure {
    fn new(reason: &str, run: Option<&str>) -> Self {
        let reason = reason[..reason.floor_char_boundary(MAX_REASON_BYTES)].to_owned();
        Self { reason, run: run.map(digest) }
    }
}

fn digest(run: &str) -> String {
    blake3::hash(run.as_bytes()).to_hex()[..32].to_owned()
}

/// The maximum length in bytes of the reason of a failure. A longer reason is cut, so that the record fits into
/// [`RECORD_BYTES`] even if JSON needs six bytes for one byte.
const MAX_REASON_BYTES: usize = 400;

/// The length of every record in bytes. The length is fixed, so that a short record overwrites a longer record
/// completely.
pub(super) const RECORD_BYTES: usize = 4096;

impl LeaseRecord {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("strings and numbers are JSON");
        bytes.resize(RECORD_BYTES, b' ');
        bytes[RECORD_BYTES - 1] = b'\n';
        bytes
    }
}

/// A lease file with the content that this process has read.
#[derive(Clone, Debug)]
pub(super) struct SeenLease {
    pub name: LeaseName,
    pub bytes: Vec<u8>,
    /// The parsed record; `None` if the lease file has no valid record, for example because it is incomplete.
    pub record: Option<LeaseRecord>,
}

/// Returns the names of the leases in a folder: for each role, the lease with the highest generation.
pub(super) fn latest_leases(folder: &AnchoredPath) -> io::Result<impl Iterator<Item = LeaseName>> {
    let mut latest: BTreeMap<LeaseRole, LeaseName> = BTreeMap::new();
    for name in folder.names()? {
        let Some(name) = name.to_str().and_then(|name| name.parse::<LeaseName>().ok()) else { continue };
        let known = latest.entry(name.role).or_insert(name);
        known.generation = known.generation.max(name.generation);
    }
    Ok(latest.into_values())
}

/// Reads the leases in a folder: for each role, the lease with the highest generation.
pub(super) fn read_leases(folder: &AnchoredPath) -> io::Result<Vec<SeenLease>> {
    let mut found = Vec::new();
    for name in latest_leases(folder)? {
        found.extend(match read_lease(folder, name)? {
            // A lease that is listed but cannot be found has a holder, so it must be watched. A lease that is no longer
            // listed was removed by its holder.
            None if is_hidden(folder, &name.file())? => {
                let hidden = SeenLease { name, bytes: Vec::new(), record: None };
                Some(read_lease(folder, name)?.unwrap_or(hidden))
            }
            None => read_lease(folder, name)?,
            seen => seen,
        });
    }
    Ok(found)
}

/// Reads a lease file. Returns `None` if the file does not exist.
pub(super) fn read_lease(folder: &AnchoredPath, name: LeaseName) -> io::Result<Option<SeenLease>> {
    match read_at_most(&folder.join(name.file()), RECORD_BYTES as u64) {
        Err(error) if is_gone(&error) => Ok(None),
        bytes => bytes.map(|bytes| Some(SeenLease { name, record: serde_json::from_slice(&bytes).ok(), bytes })),
    }
}

/// A lease that this process holds. When this value is dropped, the lease file records that the process has released
/// the lease.
#[derive(Debug)]
pub(super) struct Lease {
    path: AnchoredPath,
    shared: Arc<SharedLease>,
    heart: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct SharedLease {
    file: File,
    record: Mutex<LeaseRecord>,
    given_up: Condvar,
    done_bytes: AtomicU64,
}

impl Lease {
    /// Acquires a lease. Returns `None` if another process was faster or the folder no longer exists.
    pub fn take(folder: &AnchoredPath, name: LeaseName) -> Result<Option<Self>> {
        let path = folder.join(name.file());
        let record = LeaseRecord {
            process: Process::this(),
            beat: 0,
            phase: LeasePhase::Working,
            done_bytes: 0,
            failure: None,
            gone: None,
        };
        let file = match create(&path, &record, name.role) {
            Ok(file) => file,
            Err(error) if is_lost(&error) => return Ok(None),
            Err(error) => return Err(Error::io("create", &path)(error)),
        };
        let (record, given_up, done_bytes) = (Mutex::new(record), Condvar::new(), AtomicU64::default());
        Ok(Some(Self { path, shared: Arc::new(SharedLease { file, record, given_up, done_bytes }), heart: None }))
    }

    /// Rewrites the lease file, so that other processes see that this process is alive.
    pub fn beat(&self) -> Result<()> {
        self.shared.beat().map_err(Error::io("write", &self.path))
    }

    /// Starts a heartbeat thread, which rewrites the lease and calls `look` at each interval.
    pub fn start(&mut self, every: Duration, look: impl Fn() + Send + 'static) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let beat = move || {
            while shared.sleep(every) {
                // If this process cannot write its lease, other processes consider it dead. This is intended.
                let _ = shared.beat();
                look();
            }
        };
        self.heart = Some(threads::start("lease", beat)?);
        Ok(())
    }

    pub fn done_bytes(&self) -> &AtomicU64 {
        &self.shared.done_bytes
    }

    /// Records in the lease that the process has finished its work.
    pub fn finish(&self) -> Result<()> {
        self.shared.write(|record| record.phase = LeasePhase::Finished).map_err(Error::io("write", &self.path))
    }

    /// Records the reason why this process is about to release the lease. Does nothing if the file cannot be written.
    pub fn fail(&self, reason: &str, run: Option<&str>) {
        let _ = self.shared.write(|record| record.failure = Some(Failure::new(reason, run)));
    }

    /// Returns a function that records which process of the session has ended. The function does nothing if the file
    /// cannot be written.
    pub fn note(&self) -> impl Fn(PeerFailure) + Send + 'static + use<> {
        let shared = Arc::clone(&self.shared);
        move |PeerFailure { rank, why }| {
            let gone = PeerFailure { rank, why: why.cut(MAX_REASON_BYTES) };
            let _ = shared.write(|record| record.gone = Some(gone));
        }
    }

    /// Removes the lease file, as if this process had never acquired the lease.
    pub fn retract(self) {
        let _ = self.path.remove_file();
    }
}

/// Returns true if an error means that this process cannot get the lease: another process has created it, or the folder
/// no longer exists.
fn is_lost(error: &io::Error) -> bool {
    is_gone(error) || error.kind() == io::ErrorKind::AlreadyExists
}

/// Creates a lease file that contains a record from the start. If a process were killed while its lease file is empty,
/// other processes would have to watch the empty file. On a file system without hard links, the file is empty for a
/// short moment.
fn create(path: &AnchoredPath, record: &LeaseRecord, role: LeaseRole) -> io::Result<File> {
    let tmp = path.with_file_name(format!(".lease-{}", unique()));
    // Other nodes see the record only after the server has received it.
    let write = |file: &File| file.write_all_at(&record.to_bytes(), 0).and_then(|()| file.sync_data());
    let file = tmp.create_new(0o666)?;
    let linked = write(&file).and_then(|()| {
        fault::point(match role {
            LeaseRole::Part(_) => "begin-created-lease",
            LeaseRole::Seal => "seal-created-lease",
            LeaseRole::Restart => "restart-created-lease",
        });
        tmp.hard_link(path)
    });
    let _ = tmp.remove_file();
    match linked {
        Ok(()) => Ok(file),
        Err(error) if is_lost(&error) => Err(error),
        Err(_) => {
            let file = path.create_new(0o666)?;
            write(&file).inspect_err(|_| drop(path.remove_file()))?;
            Ok(file)
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let _ = self.shared.write(|record| {
            record.phase = if record.phase.is_done() { LeasePhase::Left } else { LeasePhase::Stopped };
        });
        self.shared.given_up.notify_all();
        if let Some(heart) = self.heart.take() {
            let _ = heart.join();
        }
    }
}

impl SharedLease {
    fn beat(&self) -> io::Result<()> {
        self.write(|record| record.beat = record.beat.wrapping_add(1))
    }

    fn write(&self, change: impl FnOnce(&mut LeaseRecord)) -> io::Result<()> {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        if record.phase.is_over() {
            return Ok(());
        }
        change(&mut record);
        record.done_bytes = self.done_bytes.load(Ordering::Relaxed);
        self.file.write_all_at(&record.to_bytes(), 0)?;
        // Other nodes see the record only after the server has received it.
        self.file.sync_data()
    }

    /// Sleeps for this time. Returns true after this time, and false as soon as the lease is released.
    fn sleep(&self, time: Duration) -> bool {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.given_up.wait_timeout_while(record, time, |record| !record.phase.is_over());
        !waited.unwrap_or_else(PoisonError::into_inner).0.phase.is_over()
    }
}

/// The state of the process that holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    Alive,
    Dead,
    /// It is unknown whether the process is alive, so its lease must be watched.
    Unsure,
}

/// Finds out whether the processes of leases are alive.
#[derive(Debug)]
pub(super) struct LeaseWatch {
    here: Process,
    pace: Pace,
    watched: HashMap<LeaseName, Watched>,
}

#[derive(Debug)]
struct Watched {
    bytes: Vec<u8>,
    looked: Instant,
    /// The time during which this process has watched the lease without seeing a change.
    unchanged: Duration,
    has_changed: bool,
}

/// The maximum time between two checks that counts as time in which the lease was watched. If the file system hangs or
/// the watching process is suspended, more time passes, but the additional time does not count.
const MAX_BETWEEN_LOOKS: Duration = Duration::from_secs(3);

impl LeaseWatch {
    pub fn new(pace: Pace) -> Self {
        Self { here: Process::this(), pace, watched: HashMap::new() }
    }

    /// Returns the time during which this process has watched a lease without seeing a change.
    pub fn unchanged(&self, name: LeaseName) -> Duration {
        self.watched.get(&name).map_or(Duration::ZERO, |last| last.unchanged)
    }

    pub fn state(&mut self, seen: &SeenLease, now: Instant) -> LeaseState {
        let first =
            || Watched { bytes: seen.bytes.clone(), looked: now, unchanged: Duration::ZERO, has_changed: false };
        let last = self.watched.entry(seen.name).or_insert_with(first);
        if last.bytes == seen.bytes {
            last.unchanged += now.saturating_duration_since(last.looked).min(MAX_BETWEEN_LOOKS);
            last.looked = now;
        } else {
            *last = Watched { has_changed: true, ..first() };
        }
        let is_over = seen.record.as_ref().is_some_and(|record| record.phase.is_over());
        match seen.record.as_ref().and_then(|record| record.process.is_alive(&self.here)) {
            _ if is_over => LeaseState::Dead,
            Some(false) => LeaseState::Dead,
            // The lease holder exists, but it is suspended or blocked by its file system.
            Some(true) if last.unchanged >= self.pace.stuck_after => LeaseState::Dead,
            Some(true) => LeaseState::Alive,
            None if last.unchanged >= self.pace.dead_after => LeaseState::Dead,
            None if last.has_changed => LeaseState::Alive,
            None => LeaseState::Unsure,
        }
    }
}

/// Leases that existed when this process acquired its own lease, and whose processes were not known to be alive. If
/// such a lease changes later, its process belongs to this run. As long as the lease does not change, it counts as a
/// lease of an earlier run: this process waits until a new process starts this part. Exception: if the lease records
/// that the part failed in this launch, this process does not wait for the part. Without `--resume`, every recorded
/// failure counts as a failure in this launch.
#[derive(Clone, Debug)]
pub(super) struct StaleLeases {
    leases: Vec<SeenLease>,
    resume: bool,
    run: Option<String>,
}

impl StaleLeases {
    pub fn new(leases: Vec<SeenLease>, claim: &Claim) -> Self {
        Self { leases, resume: claim.resume, run: claim.run.as_deref().map(digest) }
    }

    pub fn contains(&self, seen: &SeenLease) -> bool {
        let failure = seen.record.as_ref().and_then(|record| record.failure.as_ref());
        let has_failed_now =
            failure.is_some_and(|failure| !self.resume || self.run.is_some() && failure.run == self.run);
        let is_unchanged = |lease: &SeenLease| (lease.name, &lease.bytes) == (seen.name, &seen.bytes);
        !has_failed_now && self.leases.iter().any(is_unchanged)
    }
}

/// The reason why a process has lost its lease and must stop its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseLost {
    TakenOver,
    Gone,
}

/// The lease of this process on its part of the work. A process that was suspended or cut off from the file system must
/// check whether another process has taken over its part.
#[derive(Debug)]
pub(super) struct WorkLease {
    pub destination: PathBuf,
    pub partial: AnchoredPath,
    /// The folder `work-ID` of the partial folder, which contains the output and the journals.
    pub work: AnchoredPath,
    pub part: Part,
    pub lease: LeaseName,
    /// The names of the leases that existed when this lease was acquired.
    pub known: Vec<LeaseName>,
    pub dead_after: Duration,
}

impl WorkLease {
    /// Returns the reason if this process has lost its lease: another process has taken over the part, or the folder no
    /// longer exists. Reads only file names, because every process calls this function every two seconds.
    pub fn look(&self) -> Result<Option<LeaseLost>> {
        let is_taken_over = || -> io::Result<bool> {
            // When the folder is opened, network file systems ask the server for its current state.
            self.work.as_anchor()?;
            for name in latest_leases(&self.partial)? {
                let is_later = name.role == self.lease.role && name.generation > self.lease.generation;
                if is_later || self.is_conflicting_run_alive(name)? {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        match is_taken_over() {
            Err(error) if is_gone(&error) => Ok(Some(LeaseLost::Gone)),
            taken => Ok(taken.map_err(Error::io("look into", &self.partial))?.then_some(LeaseLost::TakenOver)),
        }
    }

    /// Returns true if a lease belongs to a process that started later and divides this output into another number of
    /// parts.
    pub fn is_of_conflicting_run(&self, name: LeaseName) -> bool {
        matches!(name.role, LeaseRole::Part(theirs) if theirs.of != self.part.of) && !self.known.contains(&name)
    }

    fn is_conflicting_run_alive(&self, name: LeaseName) -> io::Result<bool> {
        if !self.is_of_conflicting_run(name) {
            return Ok(false);
        }
        let record = read_lease(&self.partial, name)?.and_then(|seen| seen.record);
        // A process whose lease still has its first record may yet find out that it must give up, so it does not count.
        Ok(record.is_some_and(|record| record.beat > 0))
    }

    pub fn error(&self, lost: LeaseLost) -> Error {
        let (message, hint) = self.message(lost);
        Error::usage(message, hint)
    }

    /// Returns the message and the hint of the error for a lost lease.
    pub fn message(&self, lost: LeaseLost) -> (String, String) {
        let Part { index, of } = self.part;
        let (destination, partial) = (self.destination.display(), self.partial.display());
        match lost {
            LeaseLost::TakenOver => (
                format!("another run has taken over part {index} of {of} of {destination}"),
                format!(
                    "this process did not update its lease for {} s, or another process was started for its part; the \
                     other processes continue in {partial}",
                    self.dead_after.as_secs(),
                ),
            ),
            LeaseLost::Gone => (
                format!("{partial} was removed before {destination} was published"),
                "another program removed it during the run; start again".into(),
            ),
        }
    }
}
