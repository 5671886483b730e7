//! A communicator whose ranks are threads of one process. It needs no network. Tests use it, and compare the other
//! communicators with it.
//!
//! A message is copied twice: out of the sender's memory, and into the receiver's memory. Messages between the same two
//! ranks keep their order. All sizes and offsets are in bytes. Invariant: a rank that waits for a message from an ended
//! rank gets an error.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::failure::{DROPPED, FirstFailure, LEFT, PeerFailure, other_length};
use super::traffic::{Counter, Traffic};
use super::{Communicator, FailureNotes};
use crate::error::{Error, Result};

/// The communicator of one rank, where each rank is a thread of this process. It moves bytes of host memory.
#[derive(Debug)]
pub struct Local {
    rank: u32,
    office: Arc<Mailboxes>,
    counter: Counter,
}

#[derive(Debug)]
struct Mailboxes {
    size: u32,
    first_failure: FirstFailure,
    letters: Mutex<MessageQueue>,
    changed: Condvar,
}

#[derive(Debug)]
struct MessageQueue {
    /// Messages that are sent but not received yet: `waiting[receiver][sender]`.
    waiting: Vec<Vec<VecDeque<Message>>>,
    /// For each rank, the reason why it will send no more messages; `None` if it is still running.
    silent: Vec<Option<&'static str>>,
}

#[derive(Debug)]
struct Message {
    op: &'static str,
    bytes: Vec<u8>,
}

impl Local {
    /// Returns `size` connected communicators, one for each thread, in rank order.
    pub fn fleet(size: u32) -> Vec<Self> {
        let letters = MessageQueue {
            waiting: (0..size).map(|_| (0..size).map(|_| VecDeque::new()).collect()).collect(),
            silent: vec![None; size as usize],
        };
        let office = Mailboxes {
            size,
            first_failure: FirstFailure::default(),
            letters: Mutex::new(letters),
            changed: Condvar::default(),
        };
        let office = Arc::new(office);
        (0..size).map(|rank| Self { rank, office: Arc::clone(&office), counter: Counter::default() }).collect()
    }

    fn letters(&self) -> MutexGuard<'_, MessageQueue> {
        self.office.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let this = self.rank;
        (0..self.office.size).filter(move |rank| *rank != this)
    }

    fn send(&self, op: &'static str, to: u32, bytes: &[u8]) {
        self.post(op, to, bytes);
        self.counter.sent(bytes.len() as u64);
    }

    fn post(&self, op: &'static str, to: u32, bytes: &[u8]) {
        let letter = Message { op, bytes: bytes.to_vec() };
        self.letters().waiting[to as usize][self.rank as usize].push_back(letter);
        self.office.changed.notify_all();
    }

    fn take(&self, op: &'static str, from: u32) -> Result<Vec<u8>> {
        let mut letters = self.letters();
        loop {
            if let Some(letter) = letters.waiting[self.rank as usize][from as usize].pop_front() {
                if letter.op != op {
                    return Err(Error::comm(from, op, format!("it is in another operation: {}", letter.op)));
                }
                return Ok(letter.bytes);
            }
            if let Some(why) = letters.silent[from as usize] {
                self.office.first_failure.seal(PeerFailure { rank: from, why: why.into() });
                self.office.changed.notify_all();
            }
            self.office.first_failure.check(op)?;
            letters = self.office.changed.wait(letters).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn receive(&self, op: &'static str, from: u32, into: &mut [u8]) -> Result<()> {
        let bytes = self.take(op, from)?;
        if bytes.len() != into.len() {
            return Err(other_length(from, op, into.len() as u64, bytes.len() as u64));
        }
        into.copy_from_slice(&bytes);
        self.counter.received(bytes.len() as u64);
        Ok(())
    }

    fn fall_silent(&self, why: &'static str) {
        self.letters().silent[self.rank as usize].get_or_insert(why);
        self.office.changed.notify_all();
    }
}

impl Communicator for Local {
    type Memory = Vec<u8>;

    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.office.size
    }

    fn exchange(
        &self,
        outgoing: &Vec<u8>,
        to: &[Range<usize>],
        incoming: &mut Vec<u8>,
        from: &[Range<usize>],
    ) -> Result<()> {
        const OP: &str = "exchange";
        self.office.first_failure.check(OP)?;
        for rank in self.others() {
            self.send(OP, rank, &outgoing[to[rank as usize].clone()]);
        }
        self.others().try_for_each(|rank| self.receive(OP, rank, &mut incoming[from[rank as usize].clone()]))
    }

    fn all_gather(&self, memory: &mut Vec<u8>, ranges: &[Range<usize>]) -> Result<()> {
        const OP: &str = "all-gather";
        self.office.first_failure.check(OP)?;
        let own = &memory[ranges[self.rank as usize].clone()];
        self.others().for_each(|rank| self.send(OP, rank, own));
        self.others().try_for_each(|rank| self.receive(OP, rank, &mut memory[ranges[rank as usize].clone()]))
    }

    fn traffic(&self) -> Traffic {
        self.counter.traffic()
    }

    fn gather(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        const OP: &str = "gather";
        self.office.first_failure.check(OP)?;
        self.others().for_each(|rank| self.post(OP, rank, message));
        let reply = |rank| if rank == self.rank { Ok(message.to_vec()) } else { self.take(OP, rank) };
        (0..self.office.size).map(reply).collect()
    }

    fn check(&self) -> Result<()> {
        let dropped = self.letters().silent.iter().position(|why| *why == Some(DROPPED));
        if let Some(rank) = dropped.and_then(|rank| u32::try_from(rank).ok()) {
            self.office.first_failure.seal(PeerFailure { rank, why: DROPPED.into() });
            self.office.changed.notify_all();
        }
        self.office.first_failure.check("check")
    }

    fn fail(&self, error: &Error) {
        // While this thread holds the lock, no other thread can be between its check and its wait. So no thread misses
        // the wake-up.
        let _letters = self.letters();
        self.office.first_failure.seal(PeerFailure::because_of(error, self.rank));
        self.office.changed.notify_all();
    }

    fn leave(self) -> Result<()> {
        self.fall_silent(LEFT);
        Ok(())
    }
}

impl FailureNotes for Local {
    fn check(&self) -> Result<()> {
        Communicator::check(self)
    }

    fn fail(&self, error: &Error) {
        Communicator::fail(self, error);
    }

    fn leave(&self) {
        self.fall_silent(LEFT);
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.fall_silent(DROPPED);
    }
}
