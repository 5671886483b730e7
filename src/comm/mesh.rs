//! A connection between every two ranks, for bytes of tensors in host memory.
//!
//! Every rank sends every other one a header in each exchange, also where nothing follows: ranks that disagree about what
//! is sent are found out in the operation where they do. Counts bytes. Invariant: a transfer never waits for one half of
//! it, and a rank that is gone ends it, as the [`Control`] connections tell.

use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use super::address::{Address, listen};
use super::communicator::Communicator;
use super::control::Control;
use super::door::{Answer, Door, knock};
use super::fate::ENDED;
use super::hello::Hello;
use super::patience::{Patience, Wait};
use super::ranges::carved;
use super::ring;
use super::traffic::{Counter, Traffic};
use super::transfer::{Fault, Stretch, receive, send};
use crate::error::{Error, Result};
use crate::threads;

/// Ranks in processes, on hosts that reach each other by TCP.
pub struct Mesh {
    // Dropped first: others hear why before they see connections end.
    control: Control,
    /// By rank.
    peers: Vec<Option<TcpStream>>,
    /// Held by the one operation that connections are in.
    moving: Mutex<()>,
    counter: Counter,
}

const CONNECT: &str = "connect";

impl Mesh {
    /// Connect to all ranks that `control` knows, which do the same.
    ///
    /// # Errors
    /// `Comm` naming who cannot be reached in time, or is gone.
    pub fn connect(control: Control, patience: Patience<'_>) -> Result<Self> {
        match connect(&control, patience) {
            Ok(peers) => Ok(Self { control, peers, moving: Mutex::new(()), counter: Counter::default() }),
            Err(error) => {
                control.fail(&error.to_string());
                Err(error)
            }
        }
    }

    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    fn others(&self) -> impl Iterator<Item = (u32, &TcpStream)> {
        (0..).zip(&self.peers).filter_map(|(rank, stream)| Some((rank, stream.as_ref()?)))
    }

    /// The rank so many places behind this one, round the ring of all.
    fn beside(&self, places: u32) -> Option<(u32, &TcpStream)> {
        let rank = (self.rank() + places) % self.size();
        Some((rank, self.peers[rank as usize].as_ref()?))
    }

    /// What a transfer answers. After one that fails connections are in the middle of something: nothing follows it.
    fn settle(&self, op: &'static str, done: Result<u64, Fault>) -> Result<u64> {
        done.map_err(|fault| match fault {
            Fault::Link(rank, error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                self.control.lost(rank, op, ENDED)
            }
            Fault::Link(rank, error) => self.control.lost(rank, op, &format!("{ENDED}: {error}")),
            Fault::Other(error) => error,
        })
        .inspect_err(|error| self.control.fail(&error.to_string()))
    }

    /// Whether these ranges are a rank's, each within its memory.
    fn check_ranges(&self, op: &'static str, ranges: &[Range<usize>], memory: &[u8]) -> Result<()> {
        let wrong = |detail: String| Err(Error::comm(self.rank(), op, detail));
        if ranges.len() != self.peers.len() {
            return wrong(format!("{} ranges for {} processes", ranges.len(), self.peers.len()));
        }
        match ranges.iter().find(|range| memory.get((*range).clone()).is_none()) {
            Some(range) => wrong(format!("bytes {range:?} of {}", memory.len())),
            None => Ok(()),
        }
    }
}

fn connect(control: &Control, patience: Patience<'_>) -> Result<Vec<Option<TcpStream>>> {
    let (rank, size) = (control.rank(), control.size());
    if size == 1 {
        return Ok(vec![None]);
    }
    let here = |error: std::io::Error| Error::comm(rank, CONNECT, error.to_string());
    let listener = listen(&[0]).map_err(here)?;
    let address = Address::of(&listener).map_err(here)?;
    let mine = Hello::new((rank, size), control.token()).map_err(here)?;
    let mut door = Door::open(listener, mine.clone(), rank + 1..size).map_err(here)?;
    let said = control.gather(&serde_json::to_vec(&address).map_err(|error| here(error.into()))?)?;
    let going = || control.check(CONNECT);
    let (admitted, called) = thread::scope(|scope| -> Result<_> {
        let admitted = threads::start_within(scope, "door", || {
            door.admit(CONNECT, &Wait::begin(patience), &going, |_, _| {}).map_err(|error| match error {
                Error::Comm { rank: peer, detail, .. } if peer.index != rank => {
                    control.lost(peer.index, CONNECT, &detail)
                }
                error => error,
            })
        })
        .inspect_err(|error| control.fail(&error.to_string()))?;
        let called: Result<Vec<TcpStream>> = (0..rank)
            .zip(&said)
            .map(|(peer, said)| {
                let address: Address = serde_json::from_slice(said)
                    .map_err(|error| Error::comm(peer, CONNECT, format!("no address: {error}")))?;
                call(control, peer, &address, &mine, patience)
            })
            .collect();
        // So that who waits at the door does not do so for nothing.
        let called = called.inspect_err(|error| control.fail(&error.to_string()));
        Ok((admitted.join(), called))
    })?;
    let called = called?;
    admitted.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    // Nobody goes on, and maybe leaves, while others are still at their doors.
    control.gather(&[])?;
    let mut peers = door.close();
    peers.iter_mut().zip(called).for_each(|(place, stream)| *place = Some(stream));
    for stream in peers.iter().flatten() {
        stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true)).map_err(here)?;
        // What lies between forgets connections that are quiet for hours.
        let keep = rustix::net::sockopt::set_socket_keepalive(stream, true)
            .and_then(|()| rustix::net::sockopt::set_tcp_keepidle(stream, Duration::from_mins(1)));
        keep.map_err(|error| here(error.into()))?;
    }
    Ok(peers)
}

fn call(control: &Control, peer: u32, address: &Address, mine: &Hello, patience: Patience<'_>) -> Result<TcpStream> {
    let known = control.stream(peer).and_then(|stream| stream.peer_addr().ok());
    let candidates = address.candidates_beside(known);
    let wait = Wait::begin(patience);
    loop {
        let why = match knock(&candidates, mine, &|| control.check(CONNECT))? {
            Answer::In(stream) => return Ok(stream),
            Answer::Not(reply) => reply.words(),
            Answer::Nobody(why) => why,
        };
        if wait.is_over() {
            let detail = format!("cannot be reached at {} within {}: {why}", address.host, wait.limit());
            let hint = "all hosts of the run must reach each other by TCP, on any port";
            return Err(Error::Comm { rank: peer.into(), op: CONNECT, detail, hint: Some(hint.into()) });
        }
        if wait.is_due() {
            wait.say(&format!("waiting for a connection to process {peer} at {}", address.host), Some(&why));
        }
        // Who refuses a call does so at once, and then nobody has asked.
        control.check(CONNECT)?;
        thread::sleep(Duration::from_millis(100));
    }
}

impl Communicator for Mesh {
    type Memory = Vec<u8>;

    fn rank(&self) -> u32 {
        self.control.rank()
    }

    fn size(&self) -> u32 {
        self.control.size()
    }

    fn exchange(
        &self,
        outgoing: &Vec<u8>,
        to: &[Range<usize>],
        incoming: &mut Vec<u8>,
        from: &[Range<usize>],
    ) -> Result<()> {
        const OP: &str = "exchange";
        self.check_ranges(OP, to, outgoing)?;
        self.check_ranges(OP, from, incoming)?;
        let _moving = self.moving.lock().unwrap_or_else(PoisonError::into_inner);
        let operation = self.control.enter(OP);
        let going = || self.control.check(OP);
        going()?;
        let send = || {
            let messages = self.others().map(|(rank, stream)| {
                let body = &outgoing[to[rank as usize].clone()];
                Stretch { rank, stream, of: Some(body.len()), body }
            });
            self.settle(OP, send(operation, messages, &going)).map(|bytes| self.counter.sent(bytes))
        };
        let receive = |incoming: &mut [u8]| {
            let messages = self.others().map(|(rank, stream)| {
                let body = from[rank as usize].clone();
                Stretch { rank, stream, of: Some(body.len()), body }
            });
            let received = receive(operation, messages, incoming, &going);
            self.settle(OP, received).map(|bytes| self.counter.received(bytes))
        };
        if self.peers.len() == 1 {
            return Ok(());
        }
        thread::scope(|scope| {
            let sent = threads::start_within(scope, "send", send)?;
            let received = receive(incoming);
            received.and(sent.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    fn all_gather(&self, memory: &mut Vec<u8>, ranges: &[Range<usize>]) -> Result<()> {
        const OP: &str = "all-gather";
        self.check_ranges(OP, ranges, memory)?;
        let mut carved = carved(memory.as_mut_slice(), <[u8]>::split_at_mut_checked, ranges)
            .map_err(|range| Error::comm(self.rank(), OP, format!("bytes {range:?} are another process's as well")))?;
        let _moving = self.moving.lock().unwrap_or_else(PoisonError::into_inner);
        let operation = self.control.enter(OP);
        let going = || self.control.check(OP);
        going()?;
        // As they come round: its own first, then that of the rank before.
        carved.rotate_left(self.rank() as usize + 1);
        let mut ranges = carved.into_iter().rev().map(Option::unwrap_or_default);
        let own: &[u8] = ranges.next().unwrap_or_default();
        let (Some(next), Some(before)) = (self.beside(1), self.beside(self.size() - 1)) else { return Ok(()) };
        let (passed, pieces) = mpsc::channel();
        thread::scope(|scope| {
            let sent = threads::start_within(scope, "send", move || {
                let passed_on = ring::pass_on(operation, next, &pieces, &going);
                self.settle(OP, passed_on).map(|bytes| self.counter.sent(bytes))
            })?;
            ring::begin(own, &passed);
            let taken = ring::take(operation, before, ranges, &passed, &going);
            let received = self.settle(OP, taken).map(|bytes| self.counter.received(bytes));
            drop(passed);
            received.and(sent.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    fn traffic(&self) -> Traffic {
        self.counter.traffic()
    }

    fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.control.gather(said)
    }

    fn check(&self) -> Result<()> {
        self.control.check("check")
    }

    fn fail(&self, why: &str) {
        self.control.fail(why);
    }

    fn leave(self) -> Result<()> {
        // Who still waits for bytes of this rank need not find out by waiting.
        self.others().for_each(|(_, stream)| drop(stream.shutdown(Shutdown::Write)));
        self.control.leave()
    }
}
