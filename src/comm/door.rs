//! The door of a process: others call, those of its run come in, and others are told why not.
//!
//! [`Door`] is the side that listens, [`knock`] the one that calls. Invariant: one caller who says nothing, or nonsense,
//! keeps nobody else waiting.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::address::{Candidate, resolve};
use super::fate::{ENDED, Gone};
use super::hello::{HELLO_BYTES, Hello, Reply, is_wait};
use super::patience::{TICK, Wait};
use crate::error::{Error, Result};
use crate::name_list::{name_processes, short_list_of_counted};
use crate::threads;

/// For one who has connected to say who he is, and for an answer to that.
const MANNERS: Duration = Duration::from_secs(5);
const CONNECT: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);
/// For the next to come, where two have come as one: two whole runs may have been started, of which one is complete.
/// Otherwise the one that should have come in place of one of the two never comes.
const CONTESTED: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub(super) struct Door {
    listener: TcpListener,
    mine: Hello,
    callers: Vec<Caller>,
    /// By rank.
    inside: Vec<Option<Guest>>,
    wanted: Range<u32>,
    /// Who was not let in, and why.
    refused: Vec<String>,
    contest: Option<Contest>,
    /// Why nobody may find this door, once that is known.
    doubt: Arc<OnceLock<String>>,
    /// Where the others are to come, for those who look why they do not.
    address: Option<String>,
}

/// What is said of a rank that is there twice.
pub(super) const TWO: &str = "two take themselves for it";

/// A rank that two processes take themselves for, of which the first is in.
#[derive(Debug)]
struct Contest {
    rank: u32,
    /// Which these are.
    who: String,
    /// Or since somebody who was wanted came after that.
    since: Instant,
}

#[derive(Debug)]
struct Guest {
    stream: TcpStream,
    caller: u64,
    who: String,
}

/// Who has connected and is not in yet.
#[derive(Debug)]
struct Caller {
    stream: TcpStream,
    from: SocketAddr,
    said: Vec<u8>,
    since: Instant,
}

impl Door {
    /// A door for these ranks.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn open(listener: TcpListener, mine: Hello, wanted: Range<u32>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let inside = (0..mine.size).map(|_| None).collect();
        Ok(Self {
            listener,
            mine,
            callers: Vec::new(),
            inside,
            wanted,
            refused: Vec::new(),
            contest: None,
            doubt: Arc::default(),
            address: None,
        })
    }

    /// Say where this is, of those who do not come.
    pub fn name(&mut self, address: String) {
        self.address = Some(address);
    }

    /// Find out meanwhile why nobody may find this door. Names may take for ever.
    pub fn ask(&self, doubt: impl FnOnce() -> Option<String> + Send + 'static) {
        let found = Arc::clone(&self.doubt);
        // Without a thread the question stays open.
        let _ = threads::start("name", move || doubt().map(|words| found.set(words)));
    }

    /// Whether two processes take themselves for one rank.
    pub fn is_contested(&self) -> bool {
        self.contest.is_some()
    }

    /// Wait until all that are wanted are in. What is said of it meanwhile is passed on by `pass_on`.
    ///
    /// # Errors
    /// `Comm` naming those who are not there when the wait is over, who went again, or of whom there are two; and what
    /// `going` says.
    pub fn admit(
        &mut self,
        op: &'static str,
        wait: &Wait<'_>,
        going: &dyn Fn() -> Result<()>,
        pass_on: fn(&Self, &str),
    ) -> Result<()> {
        loop {
            self.look().map_err(|error| Error::comm(self.mine.rank, op, format!("cannot listen: {error}")))?;
            self.check(op)?;
            let missing = self.missing();
            let Some((first, others)) = missing.split_first() else { return Ok(()) };
            if let Some(Contest { rank, who, .. }) =
                self.contest.as_ref().filter(|one| one.since.elapsed() >= CONTESTED)
            {
                return Err(Error::comm(*rank, op, format!("{TWO}: {who}")));
            }
            if wait.is_over() {
                return Err(Error::comm(*first, op, self.missed(others, &wait.limit())));
            }
            if wait.is_due() {
                let said = wait.say(&self.awaited(&missing), self.known().as_deref());
                pass_on(self, &said);
            }
            going()?;
            thread::sleep(LOOK);
        }
    }

    /// Who is wanted and not in.
    fn missing(&self) -> Vec<u32> {
        self.wanted.clone().filter(|rank| self.inside[*rank as usize].is_none()).collect()
    }

    /// What is said of the first who did not come.
    fn missed(&self, others: &[u32], limit: &str) -> String {
        let mut words = format!("did not come within {limit}{}", self.at());
        if !others.is_empty() {
            words += &format!(", nor did {}", name_processes(others));
        }
        self.known().map_or(words.clone(), |known| format!("{words}; {known}"))
    }

    /// What may keep those who do not come.
    fn known(&self) -> Option<String> {
        let refused = || format!("turned away: {}", short_list_of_counted(&self.refused, 3));
        let known: Vec<String> =
            (!self.refused.is_empty()).then(refused).into_iter().chain(self.doubt.get().cloned()).collect();
        (!known.is_empty()).then(|| known.join("; "))
    }

    fn awaited(&self, missing: &[u32]) -> String {
        format!("waiting for {} of {}{}", name_processes(missing), self.mine.size, self.at())
    }

    /// ` at tcp://n1:4000`, where that was said.
    fn at(&self) -> String {
        self.address.as_ref().map_or_else(String::new, |address| format!(" at {address}"))
    }

    /// What is said of the wait, for those who are in and do nothing but listen.
    pub fn tell_all(&self, said: &str) {
        for guest in self.inside.iter().flatten() {
            // Who is gone shows when it is looked for.
            let told = Reply::Waiting(said.to_owned()).send(&guest.stream);
            let _ = told.and_then(|()| guest.stream.set_nonblocking(true));
        }
    }

    /// Those who are in, by rank, as streams that do not block.
    pub fn close(self) -> Vec<Option<TcpStream>> {
        self.inside.into_iter().map(|guest| guest.map(|guest| guest.stream)).collect()
    }

    /// Tell those who are in that nothing comes of it, and until then those who are still to come: nobody else would. Who
    /// has not come even then.
    pub fn send_away(mut self, why: &Gone, until: Instant, going: &dyn Fn() -> Result<()>) -> Vec<u32> {
        let why = Reply::GaveUp(why.clone());
        let mut told = vec![false; self.inside.len()];
        loop {
            for (guest, told) in self.inside.iter().zip(&mut told) {
                if let Some(guest) = guest.as_ref().filter(|_| !*told) {
                    let _ = why.send(&guest.stream);
                    *told = true;
                }
            }
            let is_over = self.missing().is_empty() || Instant::now() >= until || going().is_err();
            if is_over || self.look().is_err() {
                return self.missing();
            }
            thread::sleep(LOOK);
        }
    }

    fn look(&mut self) -> io::Result<()> {
        loop {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    stream.set_nonblocking(true)?;
                    self.callers.push(Caller { stream, from, said: Vec::new(), since: Instant::now() });
                    // Somebody who only connects may do so for ever.
                    let most = 64 + 2 * self.inside.len();
                    self.callers.drain(..self.callers.len().saturating_sub(most));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if is_wait(&error) || error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(error),
            }
        }
        for mut caller in std::mem::take(&mut self.callers) {
            match caller.listen(&self.mine) {
                Ok(Some(hello)) => self.let_in(hello, caller),
                Ok(None) if caller.since.elapsed() < MANNERS => self.callers.push(caller),
                Ok(None) => {}
                Err(why) => self.turn_away(&caller, &why),
            }
        }
        Ok(())
    }

    fn let_in(&mut self, Hello { rank, caller: number, who, .. }: Hello, caller: Caller) {
        let place = self.inside.get_mut(rank as usize).filter(|_| self.wanted.contains(&rank));
        let why = match place {
            Some(place @ None) => {
                let welcome = Reply::Welcome.send(&caller.stream);
                if welcome.and_then(|()| caller.stream.set_nonblocking(true)).is_ok() {
                    *place = Some(Guest { stream: caller.stream, caller: number, who });
                    self.contest.iter_mut().for_each(|contest| contest.since = Instant::now());
                }
                return;
            }
            // By another way, at the same time. The first is enough.
            Some(Some(guest)) if guest.caller == number => return,
            Some(Some(guest)) => {
                let both = format!("{} and {who}", guest.who);
                let words = format!("process {rank} is there already: {TWO}: {both}");
                self.contest.get_or_insert(Contest { rank, who: both, since: Instant::now() });
                words
            }
            None => format!("process {rank} is not expected here"),
        };
        self.turn_away(&caller, &Reply::Refused(why));
    }

    fn turn_away(&mut self, caller: &Caller, why: &Reply) {
        let _ = why.send(&caller.stream);
        let words = format!("{}: {}", caller.from.ip().to_canonical(), why.words());
        if self.refused.len() < 100 && !self.refused.contains(&words) {
            self.refused.push(words);
        }
    }

    /// Whether those who are in are still there.
    fn check(&self, op: &'static str) -> Result<()> {
        for (rank, guest) in (0..).zip(&self.inside) {
            let Some(guest) = guest else { continue };
            match guest.stream.peek(&mut [0]) {
                Err(error) if is_wait(&error) => {}
                Ok(more) if more > 0 => {}
                _ => return Err(Error::comm(rank, op, format!("{ENDED}, while others were waited for"))),
            }
        }
        Ok(())
    }
}

impl Caller {
    /// Who it is, once that is said.
    fn listen(&mut self, mine: &Hello) -> Result<Option<Hello>, Reply> {
        let mut more = [0; HELLO_BYTES];
        match self.stream.read(&mut more[..HELLO_BYTES - self.said.len()]) {
            // Gone again; its time will be over.
            Ok(0) => return Ok(None),
            Ok(read) => self.said.extend_from_slice(&more[..read]),
            Err(_) => return Ok(None),
        }
        mine.judge(&self.said)
    }
}

/// What became of a call.
#[derive(Debug)]
pub(super) enum Answer {
    In(TcpStream),
    Not(Reply),
    /// And what became of each that was tried.
    Nobody(String),
}

/// Call all candidates at once, as some may lead nowhere, and others to somebody who never answers.
///
/// # Errors
/// The errors of `going`; `Usage` where no thread can be started.
pub(super) fn knock(candidates: &[Candidate], hello: &Hello, going: &dyn Fn() -> Result<()>) -> Result<Answer> {
    let (sender, answers) = mpsc::channel();
    // Once nobody is to be called any more.
    let is_over = Arc::new(AtomicBool::new(false));
    for (number, candidate) in candidates.iter().enumerate() {
        let (candidate, hello) = (candidate.clone(), hello.clone());
        let (sender, over) = (sender.clone(), Arc::clone(&is_over));
        threads::start("call", move || sender.send((number, call(&candidate, &hello, &over))))
            .inspect_err(|_| is_over.store(true, Ordering::Relaxed))?;
    }
    drop(sender);
    let until = Instant::now() + CONNECT + MANNERS + Duration::from_secs(1);
    // That somebody answers says more than that others do not.
    let mut last = None;
    let mut whys: Vec<String> = candidates.iter().map(|(name, port)| format!("{name}:{port}: no answer yet")).collect();
    let answer = loop {
        match answers.recv_timeout(TICK) {
            Ok((_, answer @ (Answer::In(_) | Answer::Not(Reply::Refused(_))))) => break Ok(answer),
            Ok((number, Answer::Nobody(why))) => whys[number] = why,
            Ok((_, answer)) => last = Some(answer),
            Err(RecvTimeoutError::Disconnected) => break Ok(last.unwrap_or_else(|| nobody(&mut whys))),
            // Names may take for ever.
            Err(RecvTimeoutError::Timeout) if Instant::now() >= until => {
                break Ok(last.unwrap_or_else(|| nobody(&mut whys)));
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Err(stopped) = going() {
                    break Err(stopped);
                }
            }
        }
    };
    is_over.store(true, Ordering::Relaxed);
    answer
}

/// Whatever was tried, as some of it may have been bound to fail.
fn nobody(whys: &mut Vec<String>) -> Answer {
    whys.dedup();
    Answer::Nobody(if whys.is_empty() { "there is no address to try".into() } else { short_list_of_counted(whys, 4) })
}

fn call((name, port): &Candidate, hello: &Hello, is_over: &AtomicBool) -> Answer {
    let connect = || {
        let mut last = io::Error::other("the name has no address");
        for address in resolve(name, *port)? {
            match TcpStream::connect_timeout(&address, CONNECT) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let shake_hands = |stream: &TcpStream| {
        stream.set_nodelay(true)?;
        let mut writer = stream;
        writer.write_all(&hello.bytes())?;
        Reply::receive(stream, Instant::now() + MANNERS, &|| Ok(()))
            .unwrap_or_else(|never| Err(io::Error::other(never)))
    };
    let nobody = |error: io::Error| Answer::Nobody(format!("{name}:{port}: {error}"));
    match connect() {
        Ok(_) if is_over.load(Ordering::Relaxed) => Answer::Nobody(String::new()),
        Ok(stream) => match shake_hands(&stream) {
            Ok(Reply::Welcome) => Answer::In(stream),
            Ok(reply) => Answer::Not(reply),
            Err(error) => nobody(error),
        },
        Err(error) => nobody(error),
    }
}
