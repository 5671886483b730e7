//! A connection of each rank to rank 0, by which all know of all: gatherings, and who is gone.
//!
//! A thread reads each connection. One that ends, or has nothing to say for too long though every process beats, is a
//! death; rank 0 tells all others. The first death is what every operation answers from then on, in progress or later.
//! Between hosts that is what tells: a host that is switched off closes nothing, and a process that hangs neither.
//!
//! Rank 0 goes last: it looks after the others until each has left. Invariant: no wait here outlives the connections,
//! and `going` is asked in each.

use std::io::{self, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::fate::{DROPPED, ENDED, Fate, Gone, LEFT};
use super::frame::{Frame, MOST};
use super::hello::{Token, is_wait};
use super::operation::Operation;
use super::rendezvous::KeepGoing;
use crate::error::{Error, Result};

/// How often a process says that it is alive, and when one is dead that does not.
#[derive(Clone, Copy, Debug)]
pub struct Liveness {
    pub beat: Duration,
    pub dead_after: Duration,
}

impl Default for Liveness {
    fn default() -> Self {
        Self { beat: Duration::from_secs(2), dead_after: Duration::from_secs(20) }
    }
}

/// How often who waits asks whether to go on.
pub(super) const TICK: Duration = Duration::from_millis(50);
/// For rank 0 to say who is gone, before who has noticed says it himself; and for last words to be read.
const GRACE: Duration = Duration::from_secs(2);

/// The connections of one rank. Dropped without [`Control::leave`] it tells the others that this rank has failed.
pub struct Control {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    rank: u32,
    size: u32,
    token: Token,
    /// By rank: to all others at rank 0, to rank 0 at all others.
    links: Vec<Option<Link>>,
    liveness: Liveness,
    going: KeepGoing,
    fate: Fate,
    state: Mutex<State>,
    changed: Condvar,
    closing: Condvar,
}

struct Link {
    stream: TcpStream,
    /// Held for a frame.
    writing: Mutex<()>,
}

struct State {
    /// The last that this rank has come to.
    at: Operation,
    /// What has come of a gathering, by rank, and of which operation.
    said: Vec<Option<(u64, Vec<u8>)>>,
    left: Vec<bool>,
    /// Connections that are still read.
    open: usize,
    is_over: bool,
}

impl Control {
    /// Of a rank that has met the others, by connections to those that [`Shared::links`] names.
    pub(super) fn new(
        (rank, size): (u32, u32),
        token: Token,
        streams: Vec<Option<TcpStream>>,
        liveness: Liveness,
        going: KeepGoing,
    ) -> Result<Self> {
        let failed = |error: io::Error| Error::comm(rank, "rendezvous", error.to_string());
        for stream in streams.iter().flatten() {
            stream.set_nonblocking(false).map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            stream.set_read_timeout(Some(liveness.dead_after)).map_err(failed)?;
            stream.set_write_timeout(Some(liveness.dead_after)).map_err(failed)?;
        }
        let peers: Vec<u32> =
            (0..size).zip(&streams).filter(|(_, stream)| stream.is_some()).map(|(peer, _)| peer).collect();
        let state = State {
            at: Operation::START,
            said: vec![None; size as usize],
            left: vec![false; size as usize],
            open: peers.len(),
            is_over: false,
        };
        let link = |stream: TcpStream| Link { stream, writing: Mutex::new(()) };
        let shared = Arc::new(Shared {
            rank,
            size,
            token,
            links: streams.into_iter().map(|stream| stream.map(link)).collect(),
            liveness,
            going,
            fate: Fate::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            closing: Condvar::new(),
        });
        let mut threads = Vec::new();
        for peer in &peers {
            let (shared, peer) = (Arc::clone(&shared), *peer);
            threads.push(thread::spawn(move || shared.listen(peer)));
        }
        if !peers.is_empty() {
            let shared = Arc::clone(&shared);
            threads.push(thread::spawn(move || shared.beat()));
        }
        Ok(Self { shared, threads })
    }

    /// Of one process that is all.
    #[must_use]
    pub fn alone(going: KeepGoing) -> Self {
        Self::new((0, 1), [0; 32], vec![None], Liveness::default(), going).expect("no stream that could fail")
    }

    #[must_use]
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    #[must_use]
    pub fn size(&self) -> u32 {
        self.shared.size
    }

    pub(super) fn token(&self) -> Token {
        self.shared.token
    }

    /// The connection to that rank, if this one has one.
    pub(super) fn stream(&self, rank: u32) -> Option<&TcpStream> {
        self.shared.links[rank as usize].as_ref().map(|link| &link.stream)
    }

    /// As [`super::Communicator::gather`].
    ///
    /// # Errors
    /// `Comm` naming who is gone, or has left.
    pub fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>> {
        const OP: &str = "gather";
        let shared = &self.shared;
        shared.fate.check(OP)?;
        if said.len() > MOST {
            let detail = format!("{} bytes are more than the {MOST} that one rank may say", said.len());
            return Err(Error::comm(shared.rank, OP, detail));
        }
        let operation = self.enter(OP);
        let number = operation.number;
        let is_hub = shared.rank == 0;
        if is_hub {
            shared.state().said[0] = Some((number, said.to_vec()));
        } else {
            shared.tell(0, &[Frame::Said { number, rank: shared.rank, bytes: said.to_vec() }]);
        }
        let all = shared.wait(OP, |state| state.all_said(operation))?;
        if is_hub {
            let frames: Vec<Frame> =
                (0..).zip(&all).map(|(rank, bytes)| Frame::Said { number, rank, bytes: bytes.clone() }).collect();
            (1..shared.size).for_each(|rank| shared.tell(rank, &frames));
        }
        Ok(all)
    }

    /// Come to the next operation: all that is collective is counted, however its bytes go.
    pub(super) fn enter(&self, name: &'static str) -> Operation {
        let mut state = self.shared.state();
        state.at = Operation { name, number: state.at.number + 1 };
        state.at
    }

    /// Whether to go on in this operation: all ranks are there, and nothing stops this one.
    ///
    /// # Errors
    /// `Comm` naming who is gone; what stops this process.
    pub fn check(&self, op: &'static str) -> Result<()> {
        self.shared.fate.check(op)?;
        (self.shared.going)()
    }

    /// As [`super::Communicator::fail`].
    pub fn fail(&self, why: &str) {
        self.shared.gone(Gone { rank: self.shared.rank, why: format!("failed: {why}") });
    }

    /// That another connection with that rank has ended, as an error: of who was gone before that, if somebody was.
    pub(super) fn lost(&self, rank: u32, op: &'static str, why: &str) -> Error {
        let until = Instant::now() + GRACE;
        while self.shared.fate.check(op).is_ok() && Instant::now() < until {
            let state = self.shared.state();
            let is_over = state.left[rank as usize];
            drop(self.shared.changed.wait_timeout(state, TICK));
            if is_over {
                break;
            }
        }
        self.shared.gone(Gone { rank, why: why.into() });
        self.shared.fate.check(op).expect_err("it was sealed")
    }

    /// As [`super::Communicator::leave`].
    ///
    /// # Errors
    /// At rank 0: `Comm` naming who has not left but died.
    pub fn leave(self) -> Result<()> {
        let shared = &self.shared;
        (0..shared.size).for_each(|peer| shared.tell(peer, &[Frame::Left]));
        let left = if shared.rank == 0 {
            shared.wait("leave", |state| Ok(state.left.iter().skip(1).all(|left| *left).then_some(())))
        } else {
            shared.fate.check("leave")
        };
        if left.is_ok() {
            shared.state().is_over = true;
        }
        left
    }
}

impl State {
    /// All of a gathering, or who will never say his.
    fn all_said(&mut self, operation: Operation) -> Result<Option<Vec<Vec<u8>>>, Gone> {
        for (rank, (said, left)) in (0..).zip(self.said.iter().zip(&self.left)) {
            match said {
                None if *left => return Err(Gone { rank, why: LEFT.into() }),
                Some((number, _)) if *number != operation.number => {
                    let other = Operation { number: *number, ..operation };
                    return Err(Gone { rank, why: operation.differs(Some(other)) });
                }
                _ => {}
            }
        }
        if self.said.iter().any(Option::is_none) {
            return Ok(None);
        }
        Ok(Some(self.said.iter_mut().filter_map(Option::take).map(|(_, bytes)| bytes).collect()))
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait until `ready`, for as long as nobody is gone.
    fn wait<T>(&self, op: &'static str, mut ready: impl FnMut(&mut State) -> Result<Option<T>, Gone>) -> Result<T> {
        loop {
            let mut state = self.state();
            match ready(&mut state) {
                Ok(Some(what)) => return Ok(what),
                Ok(None) => {}
                Err(gone) => {
                    drop(state);
                    self.gone(gone);
                    state = self.state();
                }
            }
            self.fate.check(op)?;
            drop(self.changed.wait_timeout(state, TICK));
            (self.going)()?;
        }
    }

    /// To a rank with which there is a connection. Whether it is read shows where this is listened to.
    fn tell(&self, rank: u32, frames: &[Frame]) {
        let Some(link) = &self.links[rank as usize] else { return };
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes));
        let writing = link.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let written = (&link.stream).write_all(&bytes);
        drop(writing);
        self.check_written(rank, written);
    }

    /// Where a connection has ended, who reads it knows better.
    fn check_written(&self, rank: u32, written: io::Result<()>) {
        if written.is_err_and(|error| is_wait(&error)) {
            self.gone(Gone { rank, why: format!("took nothing for {}", Seconds(self.liveness.dead_after)) });
        }
    }

    /// Seal that one is gone, and tell all, if it is the first.
    fn gone(&self, gone: Gone) {
        if self.fate.seal(gone.clone()) {
            drop(self.state());
            self.changed.notify_all();
            self.spread();
        }
    }

    /// Tell all who is gone.
    fn spread(&self) {
        if let Some(gone) = self.fate.gone() {
            (0..self.size).for_each(|peer| self.tell(peer, &[Frame::Gone(gone.clone())]));
        }
    }

    /// Read what one rank says, until it says no more.
    fn listen(&self, peer: u32) {
        let stream = &self.links[peer as usize].as_ref().expect("a thread for each link").stream;
        let mut reader = BufReader::with_capacity(1 << 16, stream);
        let why = loop {
            match Frame::read(&mut reader) {
                Ok(frame) => {
                    if let Err(why) = self.hear(peer, frame) {
                        break why.to_owned();
                    }
                }
                Err(error) if is_wait(&error) => {
                    break format!("was silent for {}", Seconds(self.liveness.dead_after));
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => break "does not speak as it should".into(),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break ENDED.into(),
                Err(error) => break format!("{ENDED}: {error}"),
            }
        };
        let is_over = {
            let state = self.state();
            state.is_over || state.left[peer as usize]
        };
        if !is_over {
            self.gone(Gone { rank: peer, why });
        }
        let _ = stream.shutdown(Shutdown::Both);
        self.state().open -= 1;
        self.changed.notify_all();
    }

    fn hear(&self, peer: u32, frame: Frame) -> Result<(), &'static str> {
        match frame {
            Frame::Beat(there) => {
                let here = self.state().at;
                if there.number == here.number && there != here {
                    self.gone(Gone { rank: peer, why: here.differs(Some(there)) });
                }
                return Ok(());
            }
            Frame::Said { number, rank, bytes } => {
                if rank >= self.size || self.rank == 0 && rank != peer {
                    return Err("speaks for another rank");
                }
                if self.state().said[rank as usize].replace((number, bytes)).is_some() {
                    return Err("spoke twice in one gathering");
                }
            }
            Frame::Gone(gone) => {
                if gone.rank < self.size {
                    self.gone(gone);
                }
            }
            Frame::Left => self.state().left[peer as usize] = true,
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Say that this process is alive, until it is over.
    fn beat(&self) {
        let mut state = self.state();
        while !state.is_over {
            let waited = self.closing.wait_timeout(state, self.liveness.beat).unwrap_or_else(PoisonError::into_inner);
            let mut bytes = Vec::new();
            Frame::Beat(waited.0.at).write(&mut bytes);
            drop(waited);
            for (rank, link) in (0..).zip(&self.links) {
                // Who is writing to it says so, too.
                let Some((link, writing)) = link.as_ref().and_then(|link| Some((link, link.writing.try_lock().ok()?)))
                else {
                    continue;
                };
                let written = (&link.stream).write_all(&bytes);
                drop(writing);
                self.check_written(rank, written);
            }
            state = self.state();
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let shared = &self.shared;
        if !shared.state().is_over {
            shared.gone(Gone { rank: shared.rank, why: DROPPED.into() });
            // The thread that found somebody gone may not have told all yet, and this end must not be what they see.
            shared.spread();
        }
        let streams = || shared.links.iter().flatten().map(|link| &link.stream);
        // Who closes a connection with something unread in it takes back what was said last.
        streams().for_each(|stream| drop(stream.shutdown(Shutdown::Write)));
        let until = Instant::now() + GRACE;
        let mut state = shared.state();
        state.is_over = true;
        shared.closing.notify_all();
        while state.open > 0 && Instant::now() < until {
            state = shared.changed.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        streams().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

struct Seconds(Duration);

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} s", self.0.as_secs_f64())
    }
}
