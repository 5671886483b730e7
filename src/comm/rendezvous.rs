//! How the processes of one run find each other: process 0 listens, the others call it.
//!
//! Where that is, a [`Place`] says. In a folder it is a [sheet](super::sheet) named by the run; where a run has no name, who
//! has called an old address finds nobody or another token there, and looks again. Invariant: after the deadline
//! everybody knows who did not come.
//!
//! Who comes when all was called off is told so by a notice. Where this process has called that very meeting, or the run
//! has a name and the notice is no older than anybody waits, it ends there. Otherwise it may as well be the first of the
//! next run, or of the next attempt under one name, so that it says what it has heard, and waits.

use std::io;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::address::{Candidate, doubt, listen};
use super::control::Control;
use super::door::{Answer, Door, TWO, knock};
use super::fate::Gone;
use super::hello::{Hello, Reply, Token};
use super::links::Liveness;
use super::patience::{KeepGoing, Note, Patience, Wait};
use super::sheet::{Name, Notice, Sheet};
use super::{Part, Place, Process};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

/// All that is needed to meet.
pub struct Meeting<'a> {
    /// Which rank of how many this is.
    pub part: Part,
    /// What all processes of the run have in common and no other run has, if there is such a thing: [`super::Launch::run`].
    pub run: Option<&'a str>,
    pub place: &'a Place,
    /// A folder that all ranks see, for a token by which they know each other where `place` has none.
    pub shared: Option<&'a AnchoredPath>,
    /// How long the first may wait for the last.
    pub patience: Patience<'a>,
    /// Whether who comes late is to hear that process 0 has called it off. What it leaves for that is in the folder.
    pub calls_off: bool,
    pub liveness: Liveness,
    pub going: KeepGoing,
}

const OP: &str = "rendezvous";

/// Meet the other ranks.
///
/// # Errors
/// `Comm` naming who did not come in time, or why this rank was not let in; `Io` where a place cannot be used.
pub fn meet(meeting: &Meeting<'_>) -> Result<Control> {
    if meeting.part.is_alone() {
        return Ok(Control::alone(Arc::clone(&meeting.going)));
    }
    let met = match meeting.refuse_folder() {
        Err(error) => Err(error),
        Ok(()) if meeting.part.index == 0 => meeting.host(),
        Ok(()) => meeting.call(),
    };
    met.map_err(|error| match error {
        Error::Comm { rank, op, detail, hint: None } => {
            let hint = Some(meeting.hint(&detail));
            Error::Comm { rank, op, detail, hint }
        }
        error => error,
    })
}

impl Meeting<'_> {
    /// Where process 0 leaves its sheet, if anywhere.
    fn folder(&self) -> Option<&Path> {
        match self.place {
            Place::Folder(folder) => Some(folder),
            Place::Tcp { .. } => self.shared.map(AnchoredPath::path),
        }
    }

    /// Returns [`folder`](Self::folder) for operations on files in it.
    fn anchored(&self) -> Option<AnchoredPath> {
        let shared = self.shared.filter(|shared| self.folder() == Some(shared.path()));
        shared.cloned().or_else(|| self.folder().map(AnchoredPath::new))
    }

    /// What all of the run call its sheet, if it has one.
    fn name(&self) -> Option<Name> {
        self.anchored().map(|folder| Name::new(folder, self.run, self.part.of))
    }

    /// # Errors
    /// Where nobody can meet, now or later; at process 0 that the folder is not there.
    fn refuse_folder(&self) -> Result<()> {
        let Some(folder) = self.anchored() else { return Ok(()) };
        let refused = |error: Errno| Err(Error::io("meet in", &folder)(error.into()));
        match folder.own_metadata().map_err(Error::io("meet in", &folder))? {
            Some(found) if !found.is_dir() => refused(Errno::NOTDIR),
            None if self.part.index == 0 => refused(Errno::NOENT),
            _ => Ok(()),
        }
    }

    /// What to do about a meeting of which this is said.
    fn hint(&self, detail: &str) -> String {
        const ONCE: &str = "start all processes at the same time, each once";
        if detail.contains(TWO) {
            return ONCE.to_owned();
        }
        let host = Process::this().host;
        let shared = match (self.place, self.folder()) {
            (Place::Folder(told), _) if self.shared.map(AnchoredPath::path) != Some(told) => {
                format!("{} has", told.display())
            }
            _ => String::from("the folder of DST has"),
        };
        let doubt = self.folder().map_or_else(String::new, |folder| {
            let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
            format!(" (is {} on {host} the same as on the other hosts?)", folder.display())
        });
        let address = match self.place {
            Place::Folder(_) => {
                "where the network keeps them apart, --rendezvous tcp://HOST:PORT names an address of process 0 that all reach"
                    .to_owned()
            }
            Place::Tcp { .. } => format!("{} has to be an address of process 0 that all reach", self.place),
        };
        format!(
            "{ONCE}, and see what those say that did not come; {shared} to be on a file system that all processes \
             share{doubt}; {address}"
        )
    }

    /// Where no folder is shared: it keeps other runs out, and nobody who guesses it.
    fn token_of_run(&self) -> Token {
        *blake3::hash(format!("dtshard rendezvous of run {}", self.run.unwrap_or_default()).as_bytes()).as_bytes()
    }

    /// As process 0.
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
        let port = listener.local_addr().map_err(here)?.port();
        let sheet = self.name().map(|name| Sheet::post(name, &listener, token)).transpose()?;
        let mut door = Hello::new((0, self.part.of), token)
            .and_then(|mine| Door::open(listener, mine, 1..self.part.of))
            .map_err(here)?;
        if let Place::Tcp { host, .. } = self.place {
            let host = host.clone();
            door.name(Place::Tcp { host: host.clone(), ports: vec![port] }.to_string());
            door.ask(move || doubt(&host));
        }
        let wait = Wait::begin(self.patience);
        let going = || {
            (self.going)()?;
            sheet.as_ref().map_or(Ok(()), |sheet| sheet.check(OP))
        };
        if let Err(error) = door.admit(OP, &wait, &going, Door::tell_all) {
            // Where there are two of one, one that is missing will never come.
            let is_in_vain = door.is_contested() || sheet.as_ref().is_some_and(|sheet| sheet.rival().is_some());
            let until = if is_in_vain { Instant::now() } else { wait.until() };
            let missing = door.send_away(&Gone::because(&error), until, &*self.going);
            if let (Some(sheet), Error::Comm { rank, detail, .. }, true) = (&sheet, &error, self.calls_off) {
                sheet.call_off(&missing, (rank.index, detail));
            }
            // It may have been told to stop while it stayed for those.
            (self.going)()?;
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
        let wait = Wait::begin(self.patience);
        let (name, mut heard) = (self.name(), Heard::default());
        let whom = format!("waiting for process 0 at {}", self.place);
        let mut pause = Duration::from_millis(10);
        loop {
            match self.whom_to_call(name.as_ref(), &mut hello.token) {
                Err(why) => {
                    heard.absent(why);
                    if let Some(notice) = name.as_ref().and_then(|name| name.take_notice(self.part)) {
                        self.hear_of(&notice, hello.token, &mut heard)?;
                    }
                }
                Ok((candidates, owner)) => {
                    let why = heard.why();
                    let going = || {
                        if wait.is_due() {
                            wait.say(&whom, why.as_deref());
                        }
                        (self.going)()
                    };
                    match knock(&candidates, &hello, &going)? {
                        Answer::In(stream) => return self.wait_inside(stream, hello.token),
                        Answer::Not(Reply::AnotherRun(words)) if self.may_be_replaced() => heard.called(words),
                        Answer::Not(reply) => {
                            return Err(Error::comm(0, OP, format!("does not let this process in: {}", reply.words())));
                        }
                        Answer::Nobody(why) => {
                            heard.called(format!("nobody answers at {}: {why}", self.place));
                            self.look_after(owner.as_ref(), &mut heard);
                        }
                    }
                }
            }
            if wait.is_over() {
                let why = heard.why().unwrap_or_default();
                return Err(Error::comm(0, OP, format!("did not come within {}: {why}", wait.limit())));
            }
            if wait.is_due() {
                wait.say(&whom, heard.why().as_deref());
            }
            (self.going)()?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// What to do about a meeting that was called off: nothing, where it need not have been this one.
    fn hear_of(&self, notice: &Notice, called: Token, heard: &mut Heard) -> Result<()> {
        let (why, origin) = (&notice.why, notice.origin());
        let is_of_run = self.run.is_some() && notice.age() <= self.patience.limit;
        if is_of_run || called == notice.token {
            let called = heard.called.as_ref().map_or_else(String::new, |why| format!("; before that {why}"));
            return Err(Error::comm(notice.rank, OP, format!("{why}; {origin}{called}")));
        }
        self.remember(format!("an earlier meeting here has failed: process {}: {why}; {origin}", notice.rank), heard);
        Ok(())
    }

    /// Whether the one whose address it is, and where nobody answers, is known to be gone.
    fn look_after(&self, owner: Option<&Process>, heard: &mut Heard) {
        let Some(owner) = owner.filter(|owner| heard.gone.as_ref() != Some(owner) && owner.has_ended()) else { return };
        heard.gone = Some(owner.clone());
        self.remember(format!("process 0 that others were to meet here, {owner}, has ended"), heard);
    }

    /// Say at once what becomes of those who have been here before, and then that this one waits for another.
    fn remember(&self, words: String, heard: &mut Heard) {
        (self.patience.tell)(Note::Own(&format!("{words}; waiting for process 0 of another run")));
        heard.earlier = Some(words);
    }

    /// Whether somebody else than process 0 may answer where it is going to.
    fn may_be_replaced(&self) -> bool {
        self.folder().is_some() || !matches!(self.place, Place::Tcp { ports, .. } if ports.len() == 1)
    }

    /// And who has said that it is there. `token` becomes that by which it is known.
    fn whom_to_call(
        &self,
        name: Option<&Name>,
        token: &mut Token,
    ) -> Result<(Vec<Candidate>, Option<Process>), String> {
        let words = name.map(Name::words).transpose()?;
        *token = words.as_ref().map_or_else(|| self.token_of_run(), |words| words.token);
        let candidates = match (self.place, &words) {
            (Place::Tcp { host, ports }, _) => ports.iter().map(|port| (host.clone(), *port)).collect(),
            (Place::Folder(_), Some(words)) => words.address.candidates(),
            (Place::Folder(_), None) => Vec::new(),
        };
        Ok((candidates, words.map(|words| words.process)))
    }

    /// Until the last one has come.
    fn wait_inside(&self, stream: TcpStream, token: Token) -> Result<Control> {
        // Process 0 has waited for longer, and says more when it gives up.
        let until = Instant::now() + self.patience.limit + Duration::from_secs(10);
        loop {
            match Reply::receive(&stream, until, &*self.going)? {
                Ok(Reply::Welcome) => break,
                Ok(Reply::Waiting(words)) => (self.patience.tell)(Note::OfFirst(&words)),
                Ok(Reply::GaveUp(gone)) if gone.rank < self.part.of => return Err(gone.error(OP)),
                Ok(reply) => return Err(Error::comm(0, OP, format!("gave up: {}", reply.words()))),
                Err(error) => return Err(Error::comm(0, OP, format!("{error}, while others were waited for"))),
            }
        }
        let mut streams: Vec<_> = (0..self.part.of).map(|_| None).collect();
        streams[0] = Some(stream);
        self.control(token, streams)
    }
}

/// Why a process has not met process 0 so far. What it heard when it called says more than that there is nobody to call.
#[derive(Debug, Default)]
struct Heard {
    called: Option<String>,
    absent: Option<String>,
    /// Of those who were here before.
    earlier: Option<String>,
    /// Who is known to have ended.
    gone: Option<Process>,
}

impl Heard {
    fn absent(&mut self, why: String) {
        self.absent = Some(why);
    }

    fn called(&mut self, why: String) {
        self.called = Some(why);
        self.absent = None;
    }

    fn why(&self) -> Option<String> {
        let called = match (&self.absent, &self.called) {
            (Some(absent), Some(called)) => Some(format!("{absent}; before that {called}")),
            (absent, called) => absent.clone().or_else(|| called.clone()),
        };
        let all: Vec<String> = called.into_iter().chain(self.earlier.clone()).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}
