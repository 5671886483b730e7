//! A connection of each rank to rank 0, by which all know of all: gatherings, and who is gone.
//!
//! A thread reads each connection. One that ends, or has nothing to say for too long though every process beats, is a
//! death; rank 0 tells all others. The first death is what every operation answers from then on, in progress or later.
//! Between hosts that is what tells: a host that is switched off closes nothing, and a process that hangs neither.
//!
//! Rank 0 goes last: it looks after the others until each has left. Invariant: no wait here outlives the connections,
//! and `going` is asked in each.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::fate::{DROPPED, Fate, Gone, Why};
use super::frame::{Frame, MOST};
use super::hello::Token;
use super::links::{Link, Links, Liveness, State};
use super::operation::Operation;
use super::patience::{KeepGoing, TICK};
use crate::error::{Error, Result};
use crate::threads;

/// For rank 0 to say who is gone, before who has noticed says it himself; and for last words to be read.
const GRACE: Duration = Duration::from_secs(2);

/// The connections of one rank. Dropped without [`Control::leave`] it tells the others that this rank has failed.
pub struct Control {
    links: Arc<Links>,
    threads: Vec<JoinHandle<()>>,
}

impl Control {
    /// Of a rank that has met the others, by connections to those that [`Links::by_rank`] names.
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
        let links = Arc::new(Links {
            rank,
            size,
            token,
            by_rank: streams.into_iter().map(|stream| stream.map(link)).collect(),
            liveness,
            going,
            fate: Fate::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            closing: Condvar::new(),
            answering: Mutex::default(),
        });
        let mut control = Self { links, threads: Vec::new() };
        for peer in &peers {
            let (links, peer) = (Arc::clone(&control.links), *peer);
            control.threads.push(threads::start("control", move || links.listen(peer))?);
        }
        if !peers.is_empty() {
            let links = Arc::clone(&control.links);
            control.threads.push(threads::start("liveness", move || links.beat())?);
        }
        Ok(control)
    }

    /// Of one process that is all.
    #[must_use]
    pub fn alone(going: KeepGoing) -> Self {
        Self::new((0, 1), [0; 32], vec![None], Liveness::default(), going).expect("no stream that could fail")
    }

    #[must_use]
    pub fn rank(&self) -> u32 {
        self.links.rank
    }

    #[must_use]
    pub fn size(&self) -> u32 {
        self.links.size
    }

    pub(super) fn token(&self) -> Token {
        self.links.token
    }

    /// The connection to that rank, if this one has one.
    pub(super) fn stream(&self, rank: u32) -> Option<&TcpStream> {
        self.links.by_rank[rank as usize].as_ref().map(|link| &link.stream)
    }

    /// As [`super::Communicator::gather`].
    ///
    /// # Errors
    /// `Comm` naming who is gone, or has left.
    pub fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>> {
        const OP: &str = "gather";
        let links = &self.links;
        links.fate.check(OP)?;
        if said.len() > MOST {
            let detail = format!("{} bytes are more than the {MOST} that one process may say", said.len());
            return Err(Error::comm(links.rank, OP, detail));
        }
        let operation = self.enter(OP);
        let number = operation.number;
        let is_hub = links.rank == 0;
        if is_hub {
            links.state().said[0] = Some((number, said.to_vec()));
        } else {
            links.tell(0, &[Frame::Said { number, rank: links.rank, bytes: said.to_vec() }]);
        }
        let all = links.wait(OP, |state| state.all_said(operation))?;
        if is_hub {
            let frames: Vec<Frame> =
                (0..).zip(&all).map(|(rank, bytes)| Frame::Said { number, rank, bytes: bytes.clone() }).collect();
            links.answer(&frames);
        }
        Ok(all)
    }

    /// Come to the next operation: all that is collective is counted, however its bytes go.
    pub(super) fn enter(&self, name: &'static str) -> Operation {
        let mut state = self.links.state();
        state.at = Operation { name, number: state.at.number + 1 };
        state.at
    }

    /// Whether to go on in this operation: all ranks are there, and nothing stops this one.
    ///
    /// # Errors
    /// `Comm` naming who is gone; what stops this process.
    pub fn check(&self, op: &'static str) -> Result<()> {
        self.links.fate.check(op)?;
        (self.links.going)()
    }

    /// As [`super::Communicator::fail`].
    pub fn fail(&self, why: &str) {
        self.links.end(Why::Failed(format!("failed: {why}")));
    }

    /// That another connection with that rank has ended, as an error: of who was gone before that, if somebody was.
    pub(super) fn lost(&self, rank: u32, op: &'static str, why: &str) -> Error {
        let until = Instant::now() + GRACE;
        while self.links.fate.check(op).is_ok() && Instant::now() < until {
            let state = self.links.state();
            let is_over = state.left[rank as usize];
            drop(self.links.changed.wait_timeout(state, TICK));
            if is_over {
                break;
            }
        }
        self.links.gone(Gone { rank, why: why.into() });
        self.links.fate.check(op).expect_err("it was sealed")
    }

    /// As [`super::Communicator::leave`].
    ///
    /// # Errors
    /// At rank 0: `Comm` naming who has not left but died.
    pub fn leave(self) -> Result<()> {
        let links = &self.links;
        (0..links.size).for_each(|peer| links.tell(peer, &[Frame::Left]));
        let left = if links.rank == 0 {
            links.wait("leave", |state| Ok(state.left.iter().skip(1).all(|left| *left).then_some(())))
        } else {
            links.fate.check("leave")
        };
        if left.is_ok() {
            links.state().is_over = true;
        }
        left
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let links = &self.links;
        if !links.state().is_over {
            links.end(DROPPED.into());
            // The thread that found somebody gone may not have told all yet, and this end must not be what they see.
            links.spread();
        }
        let streams = || links.by_rank.iter().flatten().map(|link| &link.stream);
        // Who closes a connection with something unread in it takes back what was said last.
        streams().for_each(|stream| drop(stream.shutdown(Shutdown::Write)));
        let until = Instant::now() + GRACE;
        let mut state = links.state();
        state.is_over = true;
        links.closing.notify_all();
        while state.open > 0 && Instant::now() < until {
            state = links.changed.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        streams().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
