//! Hop: one step of a round over the wire.
//!
//! ```text
//!     outgoing   | to rank 0 | to rank 1 | ..        exchange
//!     incoming   | from rank 0 | from rank 1 | ..    | told by rank 0 | told by rank 1 | ..
//!                                                      all-gather, in place
//! ```
//!
//! What all others need alike is told: packed once, and sent once where the network or the devices can do that. Counts
//! bytes; all offsets are within the buffers. Invariant: all ranks go through the same sendings in the same order, so what
//! is in a message or is told needs no description.

use std::ops::Range;

use super::load::{Load, Wire};
use super::strided::StridedCopy;

/// Some bytes that one rank has and others get.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    pub from: u32,
    /// Who gets them; the sender may be among them.
    pub takers: &'a [u32],
    pub len: u64,
}

/// How bytes go to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Addressing {
    /// In the message to each of them.
    Messages,
    /// To all at once.
    Told,
}

impl<'a> Message<'a> {
    fn others(&self) -> impl Iterator<Item = usize> + use<'a> {
        let Self { from, takers, .. } = *self;
        takers.iter().filter(move |taker| **taker != from).map(|taker| *taker as usize)
    }

    /// For two ranks a message is the same, and needs no room of its own at the sender's.
    fn way(&self, ranks: usize) -> Addressing {
        if ranks > 2 && self.others().count() == ranks - 1 { Addressing::Told } else { Addressing::Messages }
    }

    /// Strided copies that it takes of one process, at the most. To say who gets it takes memory as well, where those are
    /// many.
    pub fn copies(&self, ranks: usize) -> usize {
        const TAKERS_A_COPY: usize = 1 << 6;
        let packs = match self.way(ranks) {
            Addressing::Told => 1,
            Addressing::Messages => self.others().count().max(1),
        };
        packs + self.takers.len() / TAKERS_A_COPY
    }

    /// Count what it takes of everybody in a hop.
    pub fn weigh(&self, loads: &mut [Load], hop: fn(&mut Load) -> &mut Wire) {
        let way = self.way(loads.len());
        let sender = hop(&mut loads[self.from as usize]);
        let times = match way {
            Addressing::Told => {
                sender.told += self.len;
                1
            }
            Addressing::Messages => self.others().count() as u64,
        };
        sender.sent += self.len * times;
        self.others().for_each(|taker| hop(&mut loads[taker]).received += self.len);
    }
}

/// What a process does in one step.
#[derive(Debug, Default)]
pub struct TransferPhase {
    /// By rank: to the start of the message.
    pub packs: Vec<Vec<StridedCopy>>,
    /// By rank: the message to it, within what is outgoing, and the one from it, within what is incoming.
    pub to: Vec<Range<usize>>,
    pub from: Vec<Range<usize>>,
    /// To the start of what this rank tells.
    pub tells: Vec<StridedCopy>,
    /// By rank: what it tells all others, within what is incoming, this rank's own as well. The same lengths on all ranks.
    pub told: Vec<Range<usize>>,
}

impl TransferPhase {
    /// Bytes of messages that this process sends.
    #[must_use]
    pub fn outgoing_len(&self) -> usize {
        self.to.last().map_or(0, |range| range.end)
    }

    /// Bytes that it receives, and its own that it tells.
    #[must_use]
    pub fn incoming_len(&self) -> usize {
        self.told.last().map_or(0, |range| range.end)
    }

    /// Whether anybody tells anything, which all ranks know alike.
    #[must_use]
    pub fn is_told(&self) -> bool {
        self.told.iter().any(|range| !range.is_empty())
    }
}

/// A hop of which all sendings are known, and some have been dealt with.
pub struct PhaseSchedule {
    pub hop: TransferPhase,
    rank: usize,
    /// By rank: how much of the message to it, of the one from it, and of what it tells.
    to: Vec<u64>,
    from: Vec<u64>,
    told: Vec<u64>,
}

impl PhaseSchedule {
    /// That of `rank`, by which these go.
    pub fn new<'a>(sendings: impl Iterator<Item = Message<'a>>, rank: u32, ranks: usize) -> Self {
        let rank = rank as usize;
        let nothing = || vec![0; ranks];
        let (mut to, mut from, mut told) = (nothing(), nothing(), nothing());
        for sending in sendings {
            let (sender, len) = (sending.from as usize, sending.len);
            match sending.way(ranks) {
                Addressing::Told => told[sender] += len,
                Addressing::Messages if sender == rank => sending.others().for_each(|taker| to[taker] += len),
                Addressing::Messages if sending.others().any(|taker| taker == rank) => from[sender] += len,
                Addressing::Messages => {}
            }
        }
        let incoming = behind(&[&from[..], &told].concat());
        let (from, told) = incoming.split_at(ranks);
        let hop = TransferPhase {
            packs: vec![Vec::new(); ranks],
            to: behind(&to),
            from: from.to_vec(),
            tells: Vec::new(),
            told: told.to_vec(),
        };
        Self { hop, rank, to: nothing(), from: nothing(), told: nothing() }
    }

    /// Deal with the next sending, `pack` being the copy of its bytes to a place in a message. Gives where in what is
    /// incoming this rank gets them, if it does.
    pub fn go(&mut self, sending: &Message<'_>, pack: impl Fn(u64) -> StridedCopy) -> Option<u64> {
        let (rank, sender) = (self.rank, sending.from as usize);
        match sending.way(self.to.len()) {
            Addressing::Told => {
                let at = advance(&mut self.told[sender], sending.len);
                if sender == rank {
                    self.hop.tells.push(pack(at));
                    return None;
                }
                Some(self.hop.told[sender].start as u64 + at)
            }
            Addressing::Messages if sender == rank => {
                for taker in sending.others() {
                    let at = advance(&mut self.to[taker], sending.len);
                    self.hop.packs[taker].push(pack(at));
                }
                None
            }
            Addressing::Messages => {
                sending.others().find(|taker| *taker == rank)?;
                let at = advance(&mut self.from[sender], sending.len);
                Some(self.hop.from[sender].start as u64 + at)
            }
        }
    }
}

fn advance(done: &mut u64, len: u64) -> u64 {
    let at = *done;
    *done += len;
    at
}

/// Ranges of these lengths, one behind the other.
fn behind(lens: &[u64]) -> Vec<Range<usize>> {
    let place = |end: &mut u64, len: &u64| Some(range(advance(end, *len), *len));
    lens.iter().scan(0, place).collect()
}

/// So many bytes of a buffer.
pub fn range(start: u64, len: u64) -> Range<usize> {
    let at = |offset: u64| usize::try_from(offset).expect("a round fits memory");
    at(start)..at(start + len)
}
