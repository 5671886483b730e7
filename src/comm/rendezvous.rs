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
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::address::{Address, Candidate, listen};
use super::control::{Control, Liveness};
use super::door::{Answer, Door, knock};
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
    /// How long the first may wait for the last.
    pub limit: Duration,
    pub liveness: Liveness,
    pub going: KeepGoing,
}

const OP: &str = "rendezvous";
const HINT: &str = "start all ranks at the same time and see what those say that did not come; where the network keeps them \
                    apart, --rendezvous tcp://HOST:PORT names an address of rank 0 that all reach";

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
    /// Of a place that tells nothing but where it is.
    fn token_of_run(&self) -> Token {
        *blake3::hash(format!("dtshard rendezvous of run {}", self.run.unwrap_or_default()).as_bytes()).as_bytes()
    }

    /// As rank 0.
    fn host(&self) -> Result<Control> {
        let here = |error: io::Error| Error::comm(0, OP, format!("cannot listen at {}: {error}", self.place));
        let (listener, token, sheet) = match self.place {
            Place::Tcp { ports, .. } => (listen(ports).map_err(here)?, self.token_of_run(), None),
            Place::Folder(folder) => {
                let listener = listen(&[0]).map_err(here)?;
                let mut token = Token::default();
                getrandom::fill(&mut token).map_err(|error| here(error.into()))?;
                let sheet = Sheet::post(folder, self, &listener, token)?;
                (listener, token, Some(sheet))
            }
        };
        let mut door = Hello::new((0, self.part.of), token)
            .and_then(|mine| Door::open(listener, mine, 1..self.part.of))
            .map_err(here)?;
        let admitted = door.admit(OP, self.limit, &*self.going);
        // Nobody needs it any more.
        drop(sheet);
        if let Err(error) = admitted {
            door.send_away(&match &error {
                Error::Comm { detail, .. } => detail.clone(),
                error => format!("rank 0 gave up: {error}"),
            });
            return Err(error);
        }
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
        !matches!(self.place, Place::Tcp { ports, .. } if ports.len() == 1)
    }

    fn whom_to_call(&self) -> Result<(Vec<Candidate>, Token), String> {
        match self.place {
            Place::Tcp { host, ports } => {
                Ok((ports.iter().map(|port| (host.clone(), *port)).collect(), self.token_of_run()))
            }
            Place::Folder(folder) => Sheet::read(folder, self),
        }
    }

    /// Until the last one has come.
    fn wait_inside(&self, stream: TcpStream, token: Token) -> Result<Control> {
        // Rank 0 has waited for longer, and says more when it gives up.
        let until = Instant::now() + self.limit + Duration::from_secs(10);
        match Reply::receive(&stream, until, &*self.going)? {
            Ok(Reply::Welcome) => {}
            Ok(reply) => return Err(Error::comm(0, OP, format!("gave up: {}", reply.words()))),
            Err(error) => return Err(Error::comm(0, OP, format!("{error}, while others were waited for"))),
        }
        let mut streams: Vec<_> = (0..self.part.of).map(|_| None).collect();
        streams[0] = Some(stream);
        self.control(token, streams)
    }
}

/// The file that says where rank 0 is. Dropping it removes it.
#[derive(Debug)]
struct Sheet(PathBuf);

#[derive(Serialize, Deserialize)]
struct Words {
    address: Address,
    token: Token,
}

impl Sheet {
    fn path(folder: &Path, meeting: &Meeting<'_>) -> PathBuf {
        // What a run is called may hold anything.
        let name = blake3::hash(format!("{} {}", meeting.part.of, meeting.run.unwrap_or_default()).as_bytes());
        folder.join(format!("rendezvous-{}.json", &name.to_hex()[..16]))
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
        Ok(Self(path))
    }

    /// Whom to call, or why there is nobody yet.
    fn read(folder: &Path, meeting: &Meeting<'_>) -> Result<(Vec<Candidate>, Token), String> {
        let path = Self::path(folder, meeting);
        // A network file system looks anew for what was not there once the folder is opened.
        drop(fs::read_dir(folder));
        let read = || -> io::Result<Words> {
            let mut bytes = Vec::new();
            fs::File::open(&path)?.take(1 << 16).read_to_end(&mut bytes)?;
            Ok(serde_json::from_slice(&bytes)?)
        };
        match read() {
            Ok(words) => Ok((words.address.candidates(), words.token)),
            Err(error) => Err(format!("it has not written {} ({error})", path.display())),
        }
    }
}

impl Drop for Sheet {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
