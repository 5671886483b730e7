//! The door of a process: others call, those of its run come in, and others are told why not.
//!
//! [`Door`] is the side that listens, [`knock`] the one that calls. Invariant: one caller who says nothing, or nonsense,
//! keeps nobody else waiting.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::address::Candidate;
use super::control::TICK;
use super::fate::{ENDED, Gone};
use super::hello::{HELLO_BYTES, Hello, Reply, is_wait};
use crate::error::{Error, Result, first_of, some_of};

/// For one who has connected to say who he is, and for an answer to that.
const MANNERS: Duration = Duration::from_secs(5);
const CONNECT: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);

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
}

#[derive(Debug)]
struct Guest {
    stream: TcpStream,
    caller: u64,
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
        Ok(Self { listener, mine, callers: Vec::new(), inside, wanted, refused: Vec::new() })
    }

    /// Wait until all that are wanted are in.
    ///
    /// # Errors
    /// `Comm` naming those who are not there after `limit`, or who went again; and what `going` says.
    pub fn admit(&mut self, op: &'static str, limit: Duration, going: &dyn Fn() -> Result<()>) -> Result<()> {
        let until = Instant::now() + limit;
        loop {
            self.look().map_err(|error| Error::comm(self.mine.rank, op, format!("cannot listen: {error}")))?;
            self.check(op)?;
            let missing = self.missing();
            let Some((first, others)) = missing.split_first() else { return Ok(()) };
            if Instant::now() >= until {
                return Err(Error::comm(*first, op, self.missed(others, limit)));
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
    fn missed(&self, others: &[u32], limit: Duration) -> String {
        let names: Vec<String> = others.iter().map(ToString::to_string).collect();
        let mut words = format!("did not come within {} s", limit.as_secs());
        if !names.is_empty() {
            let processes = if names.len() == 1 { "process" } else { "processes" };
            words += &format!(", nor did {processes} {}", first_of(&names, 8));
        }
        if !self.refused.is_empty() {
            words += &format!("; turned away: {}", some_of(&self.refused, 3));
        }
        words
    }

    /// Those who are in, by rank, as streams that do not block.
    pub fn close(self) -> Vec<Option<TcpStream>> {
        self.inside.into_iter().map(|guest| guest.map(|guest| guest.stream)).collect()
    }

    /// Tell those who are in that nothing comes of it, and until then those who are still to come: nobody else would.
    pub fn send_away(mut self, why: &Gone, until: Instant, going: &dyn Fn() -> Result<()>) {
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
                return;
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
                Ok(Some((rank, number))) => self.let_in(rank, number, caller),
                Ok(None) if caller.since.elapsed() < MANNERS => self.callers.push(caller),
                Ok(None) => {}
                Err(why) => self.turn_away(&caller, &why),
            }
        }
        Ok(())
    }

    fn let_in(&mut self, rank: u32, number: u64, caller: Caller) {
        let place = self.inside.get_mut(rank as usize).filter(|_| self.wanted.contains(&rank));
        let why = match place {
            Some(place @ None) => {
                let welcome = Reply::Welcome.send(&caller.stream);
                if welcome.and_then(|()| caller.stream.set_nonblocking(true)).is_ok() {
                    *place = Some(Guest { stream: caller.stream, caller: number });
                }
                return;
            }
            // By another way, at the same time. The first is enough.
            Some(Some(guest)) if guest.caller == number => return,
            Some(Some(_)) => format!("process {rank} is there already: two take themselves for it"),
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
    fn listen(&mut self, mine: &Hello) -> Result<Option<(u32, u64)>, Reply> {
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
    /// And what was tried last.
    Nobody(String),
}

/// Call all candidates at once, as some may lead nowhere, and others to somebody who never answers.
///
/// # Errors
/// What `going` says.
pub(super) fn knock(candidates: &[Candidate], hello: &Hello, going: &dyn Fn() -> Result<()>) -> Result<Answer> {
    let (sender, answers) = mpsc::channel();
    // Once nobody is to be called any more.
    let is_over = Arc::new(AtomicBool::new(false));
    for candidate in candidates {
        let (candidate, hello) = (candidate.clone(), hello.clone());
        let (sender, is_over) = (sender.clone(), Arc::clone(&is_over));
        thread::spawn(move || sender.send(call(&candidate, &hello, &is_over)));
    }
    drop(sender);
    let until = Instant::now() + CONNECT + MANNERS + Duration::from_secs(1);
    let mut last = Answer::Nobody("there is no address to try".into());
    let answer = loop {
        match answers.recv_timeout(TICK) {
            Ok(answer @ (Answer::In(_) | Answer::Not(Reply::Refused(_)))) => break Ok(answer),
            // That somebody answers says more than that others do not.
            Ok(Answer::Nobody(_)) if matches!(last, Answer::Not(_)) => {}
            Ok(answer) => last = answer,
            Err(RecvTimeoutError::Disconnected) => break Ok(last),
            // Names may take for ever.
            Err(RecvTimeoutError::Timeout) if Instant::now() >= until => break Ok(last),
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

fn call((name, port): &Candidate, hello: &Hello, is_over: &AtomicBool) -> Answer {
    let connect = || {
        let mut last = io::Error::other("the name has no address");
        for address in (name.as_str(), *port).to_socket_addrs()? {
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
