//! Message files: small messages between the processes of a run, as files in a folder that all processes see.
//!
//! The messages contain, for example, the list of files that a process has, the work to do, success or failure. Tensor
//! bytes are never sent this way.
//!
//! ```text
//! run-1f0c96a2b7d4/            the processes of one launch
//!     part-2-of-4.0.lease          process 2 is present, or the reason why it ended
//!     session-4.0.json             written by process 0: the generations of all leases
//!     session-4.0/                 the message files of the session
//!         7-2                          the message of process 2 in the 7th operation
//! ```
//!
//! Process 0 decides which processes form a session. It lists each lease that no earlier session contains and whose
//! process it has seen alive. Therefore the lease of a killed process does not block a new run. Invariant: a message
//! file appears by a rename, so no process reads an incomplete message.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::comm::{Communicator, ENDED, FailureNotes, PeerFailure, Traffic, Wait, WaitNotices, WaitReporter};
use crate::error::{CommError, Error, FormatError, Peer, Result};
use crate::exec::Stop;
use crate::launch::Part;
use crate::name_list::name_processes;
use crate::publish::LeaseState;
use crate::publish::presence::{FoundLease, Observer, Presence, stuck_after};
use crate::storage::AnchoredPath;
use crate::storage::filesystem::close;

const OP: &str = "meet";

const TOGETHER: &str = "start all processes at the same time, with the same DST on a shared file system";

/// The shortest delay between two checks for message files. Each delay is twice as long as the previous one, up to
/// `LONGEST`.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(200);

/// The interval between two checks of the lease of a process for which this process waits.
const LOOK_EVERY: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 1000 });

/// The time after which an unchanged lease is reported as silent. Normally the process that holds the lease rewrites it
/// every second.
const SILENT_AFTER: Duration = Duration::from_secs(10);

/// The communicator of a process that has joined a session. It exchanges message files, but no tensor bytes.
#[derive(Debug)]
pub struct Records {
    presence: Presence,
    folder: AnchoredPath,
    stop: Stop,
    reporter: WaitReporter,
    /// A description of the current work of this process, for reports about waiting. The description is valid until the
    /// next operation.
    doing: Mutex<&'static str>,
    /// The number of collective operations that this process has begun.
    number: Mutex<u64>,
}

/// The processes of a session. A process is identified by the generation of its lease: the number that increases each
/// time another process acquires this lease.
#[derive(Debug, Serialize, Deserialize)]
struct Session {
    members: Vec<u32>,
}

impl Session {
    /// Parses the session file of a session with `of` processes. `generation` is the generation of the lease that
    /// process 0 held when it wrote the file.
    ///
    /// # Errors
    /// `Malformed` if the file does not have one generation for each process, or contains an impossible generation.
    fn parse(text: &[u8], path: &AnchoredPath, of: u32, generation: u32) -> Result<Self> {
        let malformed = |at: String, expected: String, found: String| {
            Error::Format(FormatError::Malformed {
                path: path.path().to_path_buf(),
                at,
                expected,
                found,
                hint: Some(
                    format!("end all processes of the run, remove {}, and start again", path.folder().display()).into(),
                ),
            })
        };
        let whole = || (String::from("session"), format!("JSON of the generations of {of} leases"));
        if text.len() as u64 > Self::max_len(of) {
            let (at, expected) = whole();
            return Err(malformed(at, expected, format!("more than {} bytes", Self::max_len(of))));
        }
        let session: Self = serde_json::from_slice(text).map_err(|error| {
            let (at, expected) = whole();
            malformed(at, expected, error.to_string())
        })?;
        if session.members.len() != of as usize {
            let expected = format!("{of} generations, one for each process");
            return Err(malformed(String::from("members"), expected, session.members.len().to_string()));
        }
        for (index, found) in session.members.iter().enumerate() {
            let expected = match index {
                0 if *found != generation => format!("{generation}, as the name of the file has it"),
                _ if *found == u32::MAX => format!("a generation below {}", u32::MAX),
                _ => continue,
            };
            return Err(malformed(format!("members[{index}]"), expected, found.to_string()));
        }
        Ok(session)
    }

    /// Returns the maximum length in bytes of a session file for `of` processes: ten digits and a comma for each
    /// process, and the key.
    fn max_len(of: u32) -> u64 {
        64 + 11 * u64::from(of)
    }
}

impl Records {
    /// Connects this process, which has the number `part.index`, to the other `part.of - 1` processes, through files in
    /// `folder`. Process 0 creates the folder if necessary.
    ///
    /// # Errors
    /// `Comm` naming a process that did not come in time or has failed in the meantime; `Stopped`; `Io`.
    pub fn meet(folder: &AnchoredPath, part: Part, notices: WaitNotices<'_>, stop: &Stop) -> Result<Self> {
        let mut meeting = Meeting {
            folder: folder.clone(),
            part,
            observer: Observer::new(folder, part.of),
            seen_alive: BTreeSet::new(),
            is_blocked: false,
            sees_first: false,
        };
        let wait = Wait::begin(notices);
        let (mut own, mut pause) = (None, SHORTEST);
        loop {
            let step = stop.check().and_then(|()| meeting.step(&mut own));
            let missing = match step {
                Ok(MeetingStep::Met(members)) => {
                    let presence: Presence = own.take().expect("it is in the session");
                    let folder = presence.folder().join(session(part.of, members[0]));
                    presence.watch(members);
                    return Ok(Self {
                        presence,
                        folder,
                        stop: stop.clone(),
                        reporter: WaitReporter::silent(),
                        doing: Mutex::new("starting"),
                        number: Mutex::new(0),
                    });
                }
                Ok(MeetingStep::Missing(missing)) => missing,
                Err(error) => return Err(report_failure(own.as_ref(), error)),
            };
            let whom = name_processes(&missing);
            // A process that sees process 0 waits longer, because process 0 should be the first to report missing
            // processes. This longer wait is also limited.
            let until = wait.until() + if meeting.sees_first { notices.limit } else { Duration::ZERO };
            if Instant::now() >= until {
                return Err(report_failure(own.as_ref(), meeting.late(&missing, &wait)));
            }
            if wait.is_due() {
                let why = meeting.is_blocked.then_some("a process of another run still has this part");
                wait.say(&format!("waiting for {whom}"), why);
            }
            sleep(pause);
            pause = LONGEST.min(pause * 2);
        }
    }

    /// Sets the reporter of long waits. For each long wait, it prints the number of the process for which this process
    /// waits, the node of that process, and whether it is alive.
    #[must_use]
    pub fn reporting(self, reporter: WaitReporter) -> Self {
        Self { reporter, ..self }
    }

    /// Sets the description of the work that is done until the next operation, such as `copying files of SRC`.
    pub fn begin(&self, doing: &'static str) {
        *self.doing.lock().expect("no panic while the lock is held") = doing;
    }

    /// Reports that this process waits for the processes `missing`, and describes the first of them. `waited` is the
    /// time since the wait began.
    fn report(&self, missing: &[u32], waited: Duration) {
        let [first, others @ ..] = missing else { return };
        let lease = self.presence.lease_of(*first);
        let place = lease.as_ref().map(|(process, _)| process.to_string());
        let whom = Peer { index: *first, of: Some(self.size()), place };
        let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
        let why = match lease {
            Some((_, unchanged)) if unchanged >= SILENT_AFTER => {
                let (silent, most) = (unchanged.as_secs(), stuck_after().as_secs());
                format!("its lease has not changed for {silent} s, and the run ends when that is {most} s")
            }
            Some(_) => String::from("it is alive; its disk or network may be slow"),
            None => String::from("its lease cannot be read"),
        };
        let doing = self.doing.lock().expect("no panic while the lock is held");
        (self.reporter.print)(&format!("waiting for {whom}{more} while {doing} ({} s): {why}", waited.as_secs()));
    }

    fn hear(&self, rank: u32, name: &str, names: &BTreeSet<String>) -> Result<Option<Vec<u8>>> {
        if !names.contains(name) {
            return Ok(None);
        }
        let path = self.folder.join(name);
        let mut bytes = Vec::new();
        match path.open().and_then(|mut file| file.read_to_end(&mut bytes)) {
            Ok(_) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::comm(rank, "gather", format!("its record cannot be read: {error}"))),
        }
    }
}

/// Writes the reason into the lease of this process (`own`), so that the other processes learn why this process does
/// not join the session. Returns the error, with a hint if it is a `Comm` error without one.
fn report_failure(own: Option<&Presence>, mut error: Error) -> Error {
    if let Error::Comm(CommError { hint, .. }) = &mut error {
        hint.get_or_insert_with(|| String::from(TOGETHER));
    }
    match (own, &error) {
        (Some(own), Error::Comm(CommError { rank, detail, .. })) => {
            own.give_up(PeerFailure { rank: rank.index, why: detail.as_str().into() });
        }
        (Some(own), error) => own.fail(error),
        (None, _) => {}
    }
    error
}

/// The result of one attempt to find the other processes.
enum MeetingStep {
    Met(Vec<u32>),
    Missing(Vec<u32>),
}

struct Meeting {
    folder: AnchoredPath,
    part: Part,
    observer: Observer,
    /// The leases whose processes were alive in an earlier check, as pairs of part and generation.
    seen_alive: BTreeSet<(u32, u32)>,
    is_blocked: bool,
    /// True if process 0 is present. Process 0 itself does not use this field.
    sees_first: bool,
}

impl Meeting {
    fn step(&mut self, own: &mut Option<Presence>) -> Result<MeetingStep> {
        if !self.finds_folder()? {
            // Process 0 creates the folder. The last process of an earlier run may have deleted it and its parent
            // folders.
            *own = None;
            self.folder = self.folder.reopened();
            self.observer = Observer::new(&self.folder, self.part.of);
            return Ok(MeetingStep::Missing(vec![0]));
        }
        let generations = self.observer.generations()?;
        if own.as_ref().is_some_and(|own| generations.get(&self.part.index) != Some(&own.generation())) {
            *own = None;
        }
        if own.is_none() {
            *own = self.take(&generations)?;
        }
        let Some(own) = own else { return Ok(MeetingStep::Missing(vec![self.part.index])) };
        if self.part.index == 0 { self.lead(own, &generations) } else { self.follow(own, &generations) }
    }

    /// Returns whether the folder exists. Process 0 creates it if necessary.
    fn finds_folder(&self) -> Result<bool> {
        let (action, found) = match self.part.index {
            0 => ("create", self.folder.create_with_parents()),
            _ => ("open", self.folder.open_folder().map(drop)),
        };
        match found {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::StaleNetworkFileHandle) => Ok(false),
            found => found.map(|()| true).map_err(Error::io(action, &self.folder)),
        }
    }

    /// Acquires the lease of this process. Returns `None` if another process that may be alive holds the lease.
    fn take(&mut self, generations: &BTreeMap<u32, u32>) -> Result<Option<Presence>> {
        let index = self.part.index;
        let next = match generations.get(&index) {
            None => 0,
            Some(generation) => match self.observer.look(index, *generation)? {
                Some(FoundLease { state: LeaseState::Alive | LeaseState::Unsure, .. }) => {
                    self.is_blocked = true;
                    return Ok(None);
                }
                _ => generation + 1,
            },
        };
        self.is_blocked = false;
        Presence::take(&self.folder.reopened(), self.part, next)
    }

    /// Looks for the other processes. Process 0 calls this, and creates the session as soon as all processes are
    /// present.
    fn lead(&mut self, own: &Presence, generations: &BTreeMap<u32, u32>) -> Result<MeetingStep> {
        let earlier = self.members_of_earlier_sessions(own.generation())?;
        let (mut members, mut missing) = (vec![own.generation()], Vec::new());
        for index in 1..self.part.of {
            let generation = generations.get(&index).copied();
            let new = generation.filter(|generation| !earlier.contains(&(index, *generation)));
            match new.map(|generation| self.is_there(index, generation)).transpose()? {
                Some(Some(generation)) => members.push(generation),
                _ => missing.push(index),
            }
        }
        if !missing.is_empty() {
            return Ok(MeetingStep::Missing(missing));
        }
        let session = session(self.part.of, own.generation());
        self.folder.join(&session).create_folder().map_err(Error::io("create", &self.folder.join(&session)))?;
        let text = serde_json::to_vec(&Session { members: members.clone() }).expect("numbers serialise");
        write(&self.folder, &format!("{session}.json"), &text)?;
        Ok(MeetingStep::Met(members))
    }

    /// Looks for a session that process 0 has created and that contains this process. The other processes call this.
    fn follow(&mut self, own: &Presence, generations: &BTreeMap<u32, u32>) -> Result<MeetingStep> {
        let missing = Ok(MeetingStep::Missing(vec![0]));
        let Some(first) = generations.get(&0).copied() else { return missing };
        match self.session(first)? {
            Some(Session { members }) if members.get(self.part.index as usize) == Some(&own.generation()) => {
                Ok(MeetingStep::Met(members))
            }
            // The session belongs to an earlier run.
            Some(_) => missing,
            None => {
                self.sees_first = self.is_there(0, first)?.is_some();
                missing
            }
        }
    }

    /// Returns `generation` if process `index`, which holds the lease of this generation, is alive. Fails if that
    /// process has reported a failure, or was alive in an earlier check and has ended.
    fn is_there(&mut self, index: u32, generation: u32) -> Result<Option<u32>> {
        let Some(found) = self.observer.look(index, generation)? else { return Ok(None) };
        let was_alive = self.seen_alive.contains(&(index, generation));
        match found.state {
            LeaseState::Alive => {
                self.seen_alive.insert((index, generation));
                found.failure.map_or(Ok(Some(generation)), |gone| Err(gone.error(OP)))
            }
            LeaseState::Dead if was_alive => {
                let ended = || PeerFailure {
                    rank: index,
                    why: format!("{ENDED}, while this process waited for others").into(),
                };
                Err(found.failure.unwrap_or_else(ended).error(OP))
            }
            LeaseState::Dead | LeaseState::Unsure => Ok(None),
        }
    }

    fn session(&self, generation: u32) -> Result<Option<Session>> {
        let of = self.part.of;
        let path = self.folder.join(format!("{}.json", session(of, generation)));
        let mut text = Vec::new();
        match path.open().and_then(|file| file.take(Session::max_len(of) + 1).read_to_end(&mut text)) {
            Ok(_) => Session::parse(&text, &path, of, generation).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("read", &path)(error)),
        }
    }

    fn members_of_earlier_sessions(&self, before: u32) -> Result<BTreeSet<(u32, u32)>> {
        let (mut found, prefix) = (BTreeSet::new(), format!("session-{}.", self.part.of));
        for name in self.folder.names().map_err(Error::io("list", &self.folder))? {
            let number = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.strip_suffix(".json"));
            let Some(generation) = number.and_then(|number| number.parse().ok()).filter(|number| *number < before)
            else {
                continue;
            };
            let members = self.session(generation)?.map_or_else(Vec::new, |session| session.members);
            found.extend((0..).zip(members));
        }
        Ok(found)
    }

    fn late(&self, missing: &[u32], wait: &Wait<'_>) -> Error {
        let others = match missing {
            [_] => String::new(),
            [_, rest @ ..] => format!(", nor did {}", name_processes(rest)),
            [] => String::new(),
        };
        let detail = if self.is_blocked {
            format!("a process of another run still has this part after {}", wait.limit())
        } else {
            format!("did not connect within {}{others}", wait.limit())
        };
        Error::Comm(CommError {
            rank: missing.first().copied().unwrap_or(0).into(),
            op: OP,
            detail,
            hint: Some(String::from(TOGETHER)),
        })
    }
}

/// Returns the name of the session of `of` processes in which process 0 holds the lease of this generation.
fn session(of: u32, generation: u32) -> String {
    format!("session-{of}.{generation}")
}

/// Writes a file into a folder. Other processes never see it incomplete.
fn write(folder: &AnchoredPath, name: &str, bytes: &[u8]) -> Result<()> {
    let path = folder.join(name);
    let tmp = folder.join(format!(".{name}.tmp"));
    // A network file system may report a full disk only at close.
    let write = |mut file: File| file.write_all(bytes).and_then(|()| close(file));
    let written = tmp.replace_with_new(0o666).and_then(write);
    written.and_then(|()| tmp.rename(&path)).map_err(Error::io("write", &path))
}

impl Communicator for Records {
    type Memory = Infallible;

    fn rank(&self) -> u32 {
        self.presence.part().index
    }

    fn size(&self) -> u32 {
        self.presence.part().of
    }

    fn exchange(&self, none: &Infallible, _: &[Range<usize>], _: &mut Infallible, _: &[Range<usize>]) -> Result<()> {
        match *none {}
    }

    fn all_gather(&self, none: &mut Infallible, _: &[Range<usize>]) -> Result<()> {
        match *none {}
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn gather(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        const GATHER: &str = "gather";
        let mut number = self.number.lock().expect("no panic while the lock is held");
        self.presence.check(GATHER)?;
        *number += 1;
        let name = |number: u64, rank: u32| format!("{number}-{rank}");
        write(&self.folder, &name(*number, self.rank()), message)?;
        let mut replies: Vec<Option<Vec<u8>>> = vec![None; self.size() as usize];
        replies[self.rank() as usize] = Some(message.to_vec());
        let begun = Instant::now();
        let (mut pause, mut looked, mut report_after) = (SHORTEST, begun, self.reporter.first);
        loop {
            // A process writes its message file before it leaves. Therefore its lease is checked before the folder is
            // listed.
            let missing = replies.iter().position(Option::is_none);
            let is_due = looked.elapsed() >= LOOK_EVERY;
            let rank_of = |index: usize| u32::try_from(index).expect("a rank");
            let left = missing.filter(|_| is_due).and_then(|index| self.presence.gone_now(rank_of(index)));
            // Listing the folder makes a network file system look for new files.
            let names = self.folder.names().map_err(Error::io("list", &self.folder))?;
            let names: BTreeSet<String> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
            for (rank, place) in (0..).zip(&mut replies) {
                if place.is_none() {
                    *place = self.hear(rank, &name(*number, rank), &names)?;
                }
            }
            let Some(missing) = replies.iter().position(Option::is_none) else { break };
            self.stop.check_signal().inspect_err(|error| self.presence.fail(error))?;
            self.presence.check(GATHER)?;
            if let Some(gone) = left.filter(|gone| gone.rank == rank_of(missing)) {
                self.presence.give_up(gone);
                self.presence.check(GATHER)?;
            }
            if is_due {
                looked = Instant::now();
            }
            if begun.elapsed() >= report_after {
                let missing = (0..).zip(&replies).filter(|(_, replies)| replies.is_none()).map(|(rank, _)| rank);
                self.report(&missing.collect::<Vec<u32>>(), begun.elapsed());
                report_after = begun.elapsed() + self.reporter.again;
            }
            sleep(pause);
            pause = LONGEST.min(pause * 2);
        }
        // Each process has taken part in the previous operation, so all processes have read the message files of the
        // operation before it.
        if *number > 1 {
            let _ = self.folder.join(name(*number - 1, self.rank())).remove_file();
        }
        Ok(replies.into_iter().flatten().collect())
    }

    fn check(&self) -> Result<()> {
        self.presence.check("check")
    }

    fn fail(&self, error: &Error) {
        self.presence.fail(error);
    }

    fn leave(self) -> Result<()> {
        self.presence.leave();
        Ok(())
    }
}

impl FailureNotes for Records {
    fn check(&self) -> Result<()> {
        Communicator::check(self)
    }

    fn fail(&self, error: &Error) {
        Communicator::fail(self, error);
    }

    fn leave(&self) {
        self.presence.leave();
    }
}
