//! Who works on what: a file that one process made, and rewrites while it lives.
//!
//! A lease is linked to its name, or created with `O_EXCL`, which decides who has it; a dead one is taken over by the next
//! generation. Its process rewrites one record of fixed length, through the handle that created it: that cannot create
//! it anew, wherever the folder has gone. Readers open it anew each time, and take a torn record for one that says
//! nothing. No locks and no times of files, which network file systems have in name only.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::names::{is_gone, is_hidden, read_at_most, unique};
use crate::comm::{Part, Process};
use crate::error::{Error, Result};
use crate::fault;
use crate::storage::AnchoredPath;
use crate::threads;

/// What a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Role {
    Part(Part),
    Seal,
    /// To throw the folder away.
    Restart,
}

/// `part-2-of-4.0.lease`, `seal.0.lease`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LeaseName {
    pub role: Role,
    pub generation: u32,
}

impl LeaseName {
    pub fn is_seal(&self) -> bool {
        self.role == Role::Seal
    }

    pub fn is_restart(&self) -> bool {
        self.role == Role::Restart
    }

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
            Role::Part(Part { index, of }) => write!(f, "part-{index}-of-{of}.{}", self.generation),
            Role::Seal => write!(f, "seal.{}", self.generation),
            Role::Restart => write!(f, "restart.{}", self.generation),
        }
    }
}

impl FromStr for LeaseName {
    type Err = ();

    /// The name of a file.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (role, generation) = text.strip_suffix(".lease").and_then(|text| text.rsplit_once('.')).ok_or(())?;
        let number = |text: &str| text.parse().map_err(drop);
        let role = match role.strip_prefix("part-").and_then(|part| part.split_once("-of-")) {
            Some((index, of)) => Role::Part(Part { index: number(index)?, of: number(of)? }),
            None if role == "seal" => Role::Seal,
            None if role == "restart" => Role::Restart,
            None => return Err(()),
        };
        let name = Self { role, generation: number(generation)? };
        if name.generation == u32::MAX {
            // Nobody could take it over.
            return Err(());
        }
        // `+1` and `01` are numbers, too.
        if name.file() == text { Ok(name) } else { Err(()) }
    }
}

/// How far the process is with what the lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    Working,
    /// Done, and waiting for the others.
    Finished,
    /// It let go of it before it was done.
    Stopped,
    /// It let go of it when it was done.
    Left,
}

impl Phase {
    pub fn is_over(self) -> bool {
        matches!(self, Self::Stopped | Self::Left)
    }

    pub fn is_done(self) -> bool {
        matches!(self, Self::Finished | Self::Left)
    }
}

/// What a lease says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    #[serde(flatten)]
    pub process: Process,
    /// Counts on for as long as the process lives.
    pub beat: u64,
    pub phase: Phase,
    pub done_bytes: u64,
    /// Why it stopped, where that was an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

/// Word for those that wait for a part which does not come back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    pub reason: String,
    /// A digest of the launch that it was part of, where a launcher named that: names may be long.
    run: Option<String>,
}

impl Failure {
    fn of(reason: &str, run: Option<&str>) -> Self {
        let reason = reason[..reason.floor_char_boundary(MOST_REASON)].to_owned();
        Self { reason, run: run.map(digest) }
    }

    pub fn is_of(&self, run: &str) -> bool {
        self.run.as_ref().is_some_and(|own| *own == digest(run))
    }

    /// The same with so many bytes of JSON less, or nearly; `None` where nothing is left to cut.
    fn cut(mut self, excess: usize) -> Option<Self> {
        /// Of one byte, as in `\u0001`.
        const LONGEST_ESCAPE: usize = 6;
        let left = self.reason.len().checked_sub(excess.div_ceil(LONGEST_ESCAPE))?;
        self.reason.truncate(self.reason.floor_char_boundary(left));
        Some(self)
    }
}

fn digest(run: &str) -> String {
    blake3::hash(run.as_bytes()).to_hex()[..32].to_owned()
}

/// Longer is not told.
const MOST_REASON: usize = 400;

/// All records have one length, so that a shorter one never leaves the end of a longer one behind.
const RECORD_LEN: usize = 1024;

impl Record {
    pub fn to_bytes(&self) -> Vec<u8> {
        let to_vec = |record: &Self| serde_json::to_vec(record).expect("strings and numbers are JSON");
        let mut record = self.clone();
        let mut bytes = to_vec(&record);
        // Escapes may make much of few characters.
        while bytes.len() >= RECORD_LEN
            && let Some(failure) = record.failure.take()
        {
            record.failure = failure.cut(bytes.len() - RECORD_LEN + 1);
            bytes = to_vec(&record);
        }
        bytes.resize(RECORD_LEN, b' ');
        bytes[RECORD_LEN - 1] = b'\n';
        bytes
    }
}

/// A lease that was read.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub name: LeaseName,
    pub bytes: Vec<u8>,
    /// `None` where it is not written yet, or is being written.
    pub record: Option<Record>,
}

/// The latest lease of each role, by name.
pub(super) fn latest_leases(folder: &AnchoredPath) -> io::Result<impl Iterator<Item = LeaseName>> {
    let mut latest: BTreeMap<Role, LeaseName> = BTreeMap::new();
    for name in folder.names()? {
        let Some(name) = name.to_str().and_then(|name| name.parse::<LeaseName>().ok()) else { continue };
        let known = latest.entry(name.role).or_insert(name);
        known.generation = known.generation.max(name.generation);
    }
    Ok(latest.into_values())
}

/// The latest lease of each role. One that is retracted meanwhile is none.
pub(super) fn read_leases(folder: &AnchoredPath) -> io::Result<Vec<Seen>> {
    let mut found = Vec::new();
    for name in latest_leases(folder)? {
        found.extend(read_listed(folder, name)?);
    }
    Ok(found)
}

/// A lease that was listed; `None` where it is gone since. One that stays hidden has to be watched: somebody has it.
fn read_listed(folder: &AnchoredPath, name: LeaseName) -> io::Result<Option<Seen>> {
    match read_lease(folder, name) {
        Err(error) if is_gone(&error) => {}
        seen => return seen.map(Some),
    }
    let is_hidden = is_hidden(folder, &name.file())?;
    match read_lease(folder, name) {
        Err(error) if is_gone(&error) => Ok(is_hidden.then(|| Seen { name, bytes: Vec::new(), record: None })),
        seen => seen.map(Some),
    }
}

pub(super) fn read_lease(folder: &AnchoredPath, name: LeaseName) -> io::Result<Seen> {
    let bytes = read_at_most(&folder.join(name.file()), RECORD_LEN as u64)?;
    let record = serde_json::from_slice(&bytes).ok();
    Ok(Seen { name, bytes, record })
}

/// A lease that this process has. Dropped, it says so.
#[derive(Debug)]
pub(super) struct Lease {
    path: AnchoredPath,
    shared: Arc<Shared>,
    heart: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    file: File,
    record: Mutex<Record>,
    bell: Condvar,
    done_bytes: AtomicU64,
}

impl Lease {
    /// Take a lease. `None` where another process was faster, or the folder is gone.
    ///
    /// # Errors
    /// `Io`
    pub fn take(folder: &AnchoredPath, name: LeaseName) -> Result<Option<Self>> {
        let path = folder.join(name.file());
        let record = Record { process: Process::this(), beat: 0, phase: Phase::Working, done_bytes: 0, failure: None };
        let file = match create(&path, &record, name.role) {
            Ok(file) => file,
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(Error::io("create", &path)(error)),
        };
        let shared =
            Shared { file, record: Mutex::new(record), bell: Condvar::new(), done_bytes: AtomicU64::default() };
        Ok(Some(Self { path, shared: Arc::new(shared), heart: None }))
    }

    /// Write it anew every so often from now on, and call `look` each time.
    ///
    /// # Errors
    /// `Io` where it cannot be written, `Usage` where no thread can be started.
    pub fn start(&mut self, every: Duration, look: impl Fn() + Send + 'static) -> Result<()> {
        self.beat().map_err(Error::io("write", &self.path))?;
        let shared = Arc::clone(&self.shared);
        let beat = move || {
            while shared.sleep(every) {
                // One that cannot be written looks dead to others, which is the best that can be said.
                let _ = shared.write(|record| record.beat = record.beat.wrapping_add(1));
                look();
            }
        };
        self.heart = Some(threads::start("lease", beat)?);
        Ok(())
    }

    pub fn done_bytes(&self) -> &AtomicU64 {
        &self.shared.done_bytes
    }

    /// Say that what it is for is done.
    pub fn finish(&self) -> Result<()> {
        self.shared.write(|record| record.phase = Phase::Finished).map_err(Error::io("write", &self.path))
    }

    /// Say why it is about to be let go of. Others do without that, if they must.
    pub fn fail(&self, reason: &str, run: Option<&str>) {
        let _ = self.shared.write(|record| record.failure = Some(Failure::of(reason, run)));
    }

    /// Returns a function that does what [`Lease::fail`] does, for the thread of its beat.
    pub fn note(&self) -> impl Fn(&str) + Send + 'static + use<> {
        let shared = Arc::clone(&self.shared);
        move |reason| drop(shared.write(|record| record.failure = Some(Failure::of(reason, None))))
    }

    /// Give it up as if it had never been taken.
    pub fn retract(self) {
        let _ = self.path.remove_file();
    }

    fn beat(&self) -> io::Result<()> {
        self.shared.write(|record| record.beat = record.beat.wrapping_add(1))
    }
}

/// Create a lease that says whose it is from its first moment on: others would have to watch one that does not, should its
/// process be killed. Where a file system has no links, that moment is short.
fn create(path: &AnchoredPath, record: &Record, role: Role) -> io::Result<File> {
    let draft = path.with_file_name(format!(".lease-{}", unique()));
    // Others see nothing of it before the server does.
    let write = |file: &File| file.write_all_at(&record.to_bytes(), 0).and_then(|()| file.sync_data());
    let file = draft.create_new(0o666)?;
    let linked = write(&file).and_then(|()| {
        fault::point(match role {
            Role::Part(_) => "begin-created-lease",
            Role::Seal => "seal-created-lease",
            Role::Restart => "restart-created-lease",
        });
        draft.hard_link(path)
    });
    let _ = draft.remove_file();
    match linked {
        Ok(()) => Ok(file),
        Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::AlreadyExists => Err(error),
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
            record.phase = if record.phase.is_done() { Phase::Left } else { Phase::Stopped };
        });
        self.shared.bell.notify_all();
        if let Some(heart) = self.heart.take() {
            let _ = heart.join();
        }
    }
}

impl Shared {
    fn write(&self, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        if record.phase.is_over() {
            return Ok(());
        }
        change(&mut record);
        record.done_bytes = self.done_bytes.load(Ordering::Relaxed);
        self.file.write_all_at(&record.to_bytes(), 0)?;
        // Others see nothing of it before the server does.
        self.file.sync_data()
    }

    /// False where the lease was given up meanwhile.
    fn sleep(&self, time: Duration) -> bool {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let is_held = |record: &mut Record| !record.phase.is_over();
        let waited = self.bell.wait_timeout_while(record, time, is_held);
        let (record, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !record.phase.is_over()
    }
}
