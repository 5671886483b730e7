//! How the processes of one run find each other: rank 0 listens, the others call it.
//!
//! Where that is, a [`Place`] says. In a folder it is a file named by the run, so that what an earlier one left behind is
//! not taken; where a run has no name, a new file replaces the old one, and who has called the old address finds nobody
//! or another token there, and looks again. Invariant: after the deadline everybody knows who did not come.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use super::address::{Address, Candidate, listen};
use super::control::{Control, Liveness};
use super::door::{Answer, Door, knock};
use super::fate::Gone;
use super::hello::{Hello, Reply, Token};
use super::{Part, Place};
use crate::error::{Error, Result};

/// Asked in every wait: what it says ends that.
pub type KeepGoing = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// All that is needed to meet.
pub struct Meeting<'a> {
    /// Which rank of how many this is.
    pub part: Part,
    /// What all processes of the run have in common and no other run has, if there is such a thing: [`super::Launch::run`].
    pub run: Option<&'a str>,
    pub place: &'a Place,
    /// A folder that all ranks see, for a token by which they know each other where `place` has none.
    pub shared: Option<&'a Path>,
    /// How long the first may wait for the last.
    pub limit: Duration,
    pub liveness: Liveness,
    pub going: KeepGoing,
}

/// How the names of sheets begin.
const SHEET: &str = "rendezvous-";

const OP: &str = "rendezvous";
const HINT: &str = "start all processes at the same time and see what those say that did not come; the folder of DST has to be \
                    on a file system that all processes share; where the network keeps them apart, --rendezvous \
                    tcp://HOST:PORT names an address of process 0 that all reach";

/// Meet the other ranks.
///
/// # Errors
/// `Comm` naming who did not come in time, or why this rank was not let in; `Io` where a place cannot be used.
pub fn meet(meeting: &Meeting<'_>) -> Result<Control> {
    if meeting.part.is_alone() {
        return Ok(Control::alone(Arc::clone(&meeting.going)));
    }
    let met = if meeting.part.index == 0 { meeting.host() } else { meeting.call() };
    met.map_err(|error| match error {
        Error::Comm { rank, op, detail, hint: None } => Error::Comm { rank, op, detail, hint: Some(HINT.into()) },
        error => error,
    })
}

impl Meeting<'_> {
    /// Where rank 0 leaves its sheet, if anywhere.
    fn folder(&self) -> Option<&Path> {
        match self.place {
            Place::Folder(folder) => Some(folder),
            Place::Tcp { .. } => self.shared,
        }
    }

    /// Where no folder is shared: it keeps other runs out, and nobody who guesses it.
    fn token_of_run(&self) -> Token {
        *blake3::hash(format!("dtshard rendezvous of run {}", self.run.unwrap_or_default()).as_bytes()).as_bytes()
    }

    /// As rank 0.
    fn host(&self) -> Result<Control> {
        let here = |error: io::Error| Error::comm(0, OP, format!("cannot listen at {}: {error}", self.place));
        let listener = match self.place {
            Place::Tcp { ports, .. } => listen(ports),
            Place::Folder(_) => listen(&[0]),
        };
        let listener = listener.map_err(here)?;
        let mut token = self.token_of_run();
        if self.folder().is_some() {
            getrandom::fill(&mut token).map_err(|error| here(error.into()))?;
        }
        let sheet = self.folder().map(|folder| Sheet::post(folder, self, &listener, token)).transpose()?;
        let mut door = Hello::new((0, self.part.of), token)
            .and_then(|mine| Door::open(listener, mine, 1..self.part.of))
            .map_err(here)?;
        let until = Instant::now() + self.limit;
        if let Err(error) = door.admit(OP, self.limit, &*self.going) {
            door.send_away(&Gone::because(&error), until, &*self.going);
            return Err(error);
        }
        // Nobody needs it any more.
        drop(sheet);
        let streams = door.close();
        for stream in streams.iter().flatten() {
            // Who is gone shows when it is listened to.
            let _ = Reply::Welcome.send(stream);
        }
        self.control(token, streams)
    }

    fn control(&self, token: Token, streams: Vec<Option<TcpStream>>) -> Result<Control> {
        Control::new((self.part.index, self.part.of), token, streams, self.liveness, Arc::clone(&self.going))
    }

    /// As one of the others.
    fn call(&self) -> Result<Control> {
        let here = |error: io::Error| Error::comm(self.part.index, OP, error.to_string());
        let mut hello = Hello::new((self.part.index, self.part.of), Token::default()).map_err(here)?;
        let until = Instant::now() + self.limit;
        let mut pause = Duration::from_millis(10);
        loop {
            let whom = self.whom_to_call().map(|(candidates, token)| {
                hello.token = token;
                candidates
            });
            let why = match whom {
                Err(why) => why,
                Ok(candidates) => match knock(&candidates, &hello, &*self.going)? {
                    Answer::In(stream) => return self.wait_inside(stream, hello.token),
                    Answer::Not(Reply::AnotherRun(words)) if self.may_be_replaced() => words,
                    Answer::Not(reply) => return Err(Error::comm(0, OP, format!("not let in: {}", reply.words()))),
                    Answer::Nobody(why) => format!("nobody answers at {}: {why}", self.place),
                },
            };
            if Instant::now() >= until {
                return Err(Error::comm(0, OP, format!("did not come within {} s: {why}", self.limit.as_secs())));
            }
            (self.going)()?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// Whether somebody else than rank 0 may answer where it is going to.
    fn may_be_replaced(&self) -> bool {
        self.folder().is_some() || !matches!(self.place, Place::Tcp { ports, .. } if ports.len() == 1)
    }

    fn whom_to_call(&self) -> Result<(Vec<Candidate>, Token), String> {
        let words = self.folder().map(|folder| Sheet::read(folder, self)).transpose()?;
        let token = words.as_ref().map_or_else(|| self.token_of_run(), |words| words.token);
        let candidates = match self.place {
            Place::Tcp { host, ports } => ports.iter().map(|port| (host.clone(), *port)).collect(),
            Place::Folder(_) => words.map_or_else(Vec::new, |words| words.address.candidates()),
        };
        Ok((candidates, token))
    }

    /// Until the last one has come.
    fn wait_inside(&self, stream: TcpStream, token: Token) -> Result<Control> {
        // Rank 0 has waited for longer, and says more when it gives up.
        let until = Instant::now() + self.limit + Duration::from_secs(10);
        match Reply::receive(&stream, until, &*self.going)? {
            Ok(Reply::Welcome) => {}
            Ok(Reply::GaveUp(gone)) if gone.rank < self.part.of => return Err(gone.error(OP)),
            Ok(reply) => return Err(Error::comm(0, OP, format!("gave up: {}", reply.words()))),
            Err(error) => return Err(Error::comm(0, OP, format!("{error}, while others were waited for"))),
        }
        let mut streams: Vec<_> = (0..self.part.of).map(|_| None).collect();
        streams[0] = Some(stream);
        self.control(token, streams)
    }
}

/// The file that says where rank 0 is. Dropping it removes it, unless another run has put its own there.
#[derive(Debug)]
struct Sheet {
    path: PathBuf,
    token: Token,
}

#[derive(Serialize, Deserialize)]
struct Words {
    address: Address,
    token: Token,
}

impl Sheet {
    fn path(folder: &Path, meeting: &Meeting<'_>) -> PathBuf {
        // What a run is called may hold anything.
        let name = blake3::hash(format!("{} {}", meeting.part.of, meeting.run.unwrap_or_default()).as_bytes());
        folder.join(format!("{SHEET}{}.json", &name.to_hex()[..16]))
    }

    /// In place of one that an earlier run has left. It appears complete, and only its owner reads it.
    fn post(folder: &Path, meeting: &Meeting<'_>, listener: &TcpListener, token: Token) -> Result<Self> {
        let path = Self::path(folder, meeting);
        let draft = path.with_extension(format!("{}.tmp", std::process::id()));
        let write = || -> io::Result<()> {
            let words = serde_json::to_vec(&Words { address: Address::of(listener)?, token })?;
            let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
            file.write_all(&words)?;
            // Another node may see the name before the bytes.
            file.sync_all()?;
            fs::rename(&draft, &path)
        };
        write().inspect_err(|_| drop(fs::remove_file(&draft))).map_err(Error::io("write", &path))?;
        Ok(Self { path, token })
    }

    /// Whom to call, or why there is nobody yet.
    fn read(folder: &Path, meeting: &Meeting<'_>) -> Result<Words, String> {
        let path = Self::path(folder, meeting);
        // A network file system looks anew for what was not there once the folder is opened.
        drop(fs::read_dir(folder));
        Words::read(&path).map_err(|error| format!("it has not written {} ({error})", path.display()))
    }
}

impl Words {
    fn read(path: &Path) -> io::Result<Self> {
        let mut bytes = Vec::new();
        fs::File::open(path)?.take(1 << 16).read_to_end(&mut bytes)?;
        Ok(serde_json::from_slice(&bytes)?)
    }
}

impl Drop for Sheet {
    fn drop(&mut self) {
        if Words::read(&self.path).is_ok_and(|words| words.token == self.token) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Take away the sheets of runs that were killed as they met: those that say nothing, and those that are older than
/// anybody waits.
pub fn sweep(folder: &Path) {
    const OLD: Duration = Duration::from_hours(1);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(SHEET) {
            continue;
        }
        let path = entry.path();
        let is_old = || entry.metadata().is_ok_and(|data| data.modified().is_ok_and(|at| is_past(at, OLD)));
        // It appears complete.
        let is_none = path.extension().is_some_and(|suffix| suffix == "json")
            && Words::read(&path).is_err_and(|error| error.kind() != io::ErrorKind::NotFound);
        if is_none || is_old() {
            let _ = fs::remove_file(path);
        }
    }
}

fn is_past(at: SystemTime, age: Duration) -> bool {
    at.elapsed().is_ok_and(|elapsed| elapsed > age)
}
