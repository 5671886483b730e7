//! The connections of a [`super::Control`], and what goes on at their other ends.
//!
//! A thread listens to each, another one says that this process is alive. Invariant: what is found at one of them is
//! sealed before anybody else hears of it, so that the first who is gone stays the first.

use std::io::{self, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::fate::{ENDED, Fate, Gone, LEFT, Why};
use super::frame::Frame;
use super::hello::{Token, is_wait};
use super::operation::Operation;
use super::patience::{KeepGoing, TICK};
use crate::error::Result;

/// The time between two signs of life of a process, and the silence after which it counts as dead.
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

/// All of one rank.
pub(super) struct Links {
    pub rank: u32,
    pub size: u32,
    pub token: Token,
    /// By rank: to all others at rank 0, to rank 0 at all others.
    pub by_rank: Vec<Option<Link>>,
    pub liveness: Liveness,
    pub going: KeepGoing,
    pub fate: Fate,
    pub state: Mutex<State>,
    pub changed: Condvar,
    pub closing: Condvar,
    /// Held for an answer to all: who goes because of it is told of behind it.
    pub answering: Mutex<()>,
}

pub(super) struct Link {
    pub stream: TcpStream,
    /// Held for a frame.
    pub writing: Mutex<()>,
}

pub(super) struct State {
    /// The last that this rank has come to.
    pub at: Operation,
    /// What has come of a gathering, by rank, and of which operation.
    pub said: Vec<Option<(u64, Vec<u8>)>>,
    pub left: Vec<bool>,
    /// Connections that are still read.
    pub open: usize,
    pub is_over: bool,
}

impl State {
    /// All of a gathering, or who will never say his.
    pub fn all_said(&mut self, operation: Operation) -> Result<Option<Vec<Vec<u8>>>, Gone> {
        for (rank, (said, left)) in (0..).zip(self.said.iter().zip(&self.left)) {
            match said {
                None if *left => return Err(Gone { rank, why: LEFT.into() }),
                Some((number, _)) if *number != operation.number => {
                    let other = Operation { number: *number, ..operation };
                    return Err(Gone { rank, why: operation.differs(Some(other)).into() });
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

impl Links {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait until `ready`, for as long as nobody is gone.
    pub fn wait<T>(&self, op: &'static str, mut ready: impl FnMut(&mut State) -> Result<Option<T>, Gone>) -> Result<T> {
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
    pub fn tell(&self, rank: u32, frames: &[Frame]) {
        self.check_written(rank, self.write(rank, frames));
    }

    /// As [`Links::tell`], to all: before anybody hears who goes because of it.
    pub fn answer(&self, frames: &[Frame]) {
        let answering = self.answering.lock().unwrap_or_else(PoisonError::into_inner);
        let written: Vec<io::Result<()>> = (0..self.size).map(|rank| self.write(rank, frames)).collect();
        drop(answering);
        (0..).zip(written).for_each(|(rank, written)| self.check_written(rank, written));
    }

    fn write(&self, rank: u32, frames: &[Frame]) -> io::Result<()> {
        let Some(link) = &self.by_rank[rank as usize] else { return Ok(()) };
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes));
        let _writing = link.writing.lock().unwrap_or_else(PoisonError::into_inner);
        (&link.stream).write_all(&bytes)
    }

    /// Where a connection has ended, who reads it knows better.
    fn check_written(&self, rank: u32, written: io::Result<()>) {
        if written.is_err_and(|error| is_wait(&error)) {
            self.gone(Gone { rank, why: format!("took nothing for {}", Seconds(self.liveness.dead_after)).into() });
        }
    }

    /// Seal that one is gone, and tell all, if it is the first.
    pub fn gone(&self, gone: Gone) {
        if self.fate.seal(gone.clone()) {
            drop(self.state());
            self.changed.notify_all();
            self.spread();
        }
    }

    /// Seal that this rank goes: because something stops it, or else because of `why`.
    pub fn end(&self, why: Why) {
        let why = (self.going)().err().map_or(why, |error| Why::of(&error));
        self.gone(Gone { rank: self.rank, why });
    }

    /// Tell all who is gone.
    pub fn spread(&self) {
        if let Some(gone) = self.fate.gone() {
            let _answered = self.answering.lock().unwrap_or_else(PoisonError::into_inner);
            (0..self.size).for_each(|peer| self.tell(peer, &[Frame::Gone(gone.clone())]));
        }
    }

    /// Read what one rank says, until it says no more.
    pub fn listen(&self, peer: u32) {
        let stream = &self.by_rank[peer as usize].as_ref().expect("a thread for each link").stream;
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
            self.gone(Gone { rank: peer, why: why.into() });
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
                    self.gone(Gone { rank: peer, why: here.differs(Some(there)).into() });
                }
                return Ok(());
            }
            Frame::Said { number, rank, bytes } => {
                if rank >= self.size || self.rank == 0 && rank != peer {
                    return Err("speaks for another process");
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
    pub fn beat(&self) {
        let mut state = self.state();
        while !state.is_over {
            let waited = self.closing.wait_timeout(state, self.liveness.beat).unwrap_or_else(PoisonError::into_inner);
            let mut bytes = Vec::new();
            Frame::Beat(waited.0.at).write(&mut bytes);
            drop(waited);
            for (rank, link) in (0..).zip(&self.by_rank) {
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

struct Seconds(Duration);

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} s", self.0.as_secs_f64())
    }
}
