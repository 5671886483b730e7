//! Phase: one step of a round that sends bytes over the network. Bytes that all other processes need are sent by an
//! all-gather (as in `torch.distributed.all_gather_into_tensor`). Such bytes are packed once, and also sent only once
//! if the network or the devices support an all-gather in hardware. All other bytes are sent by point-to-point
//! messages. Sizes and offsets are in bytes, and no offset counts from the start of a file. Invariant: all processes
//! handle the same messages in the same order, so messages need no headers.
//!
//! ```text
//!     outgoing   | to rank 0 | to rank 1 | ..        exchange
//!     incoming   | from rank 0 | from rank 1 | ..    | gathered from rank 0 | gathered from rank 1 | ..
//!                                                      all-gather, in place
//! ```

use std::ops::Range;

use super::load::{Load, WireBytes};
use super::strided::StridedCopy;

/// Bytes that one process sends to one or more other processes in a phase.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The process that sends the bytes.
    pub sender: u32,
    /// The processes that receive the bytes. The sender may be one of them, but sends nothing to itself.
    pub receivers: &'a [u32],
    /// The number of bytes in the message.
    pub len: u64,
}

/// The operation with which a message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Addressing {
    /// The sender sends one point-to-point message to each receiver.
    PointToPoint,
    /// An all-gather sends the bytes to all other processes.
    AllGather,
}

impl<'a> Message<'a> {
    /// Returns all receivers of the message except for the sender.
    fn other_receivers(&self) -> impl Iterator<Item = usize> + use<'a> {
        let Self { sender, receivers, .. } = *self;
        receivers.iter().filter(move |receiver| **receiver != sender).map(|receiver| *receiver as usize)
    }

    /// Chooses the operation with which this message is sent. With two processes, a point-to-point message sends as
    /// many bytes as an all-gather, and it needs no space in the sender's incoming buffer.
    fn addressing(&self, ranks: usize) -> Addressing {
        if ranks > 2 && self.other_receivers().count() == ranks - 1 {
            Addressing::AllGather
        } else {
            Addressing::PointToPoint
        }
    }

    /// Returns the maximum number of strided copies that one process makes for this message. A long list of receivers
    /// also needs memory, so it counts as additional copies.
    pub fn max_copies(&self, ranks: usize) -> usize {
        const RECEIVERS_PER_COPY: usize = 1 << 6;
        let packs = match self.addressing(ranks) {
            Addressing::AllGather => 1,
            Addressing::PointToPoint => self.other_receivers().count().max(1),
        };
        packs + self.receivers.len() / RECEIVERS_PER_COPY
    }

    /// Adds the bytes of this message to the loads of its sender and of its receivers, in the given phase.
    pub fn add_load(&self, loads: &mut [Load], phase: fn(&mut Load) -> &mut WireBytes) {
        let addressing = self.addressing(loads.len());
        let sender = phase(&mut loads[self.sender as usize]);
        let times = match addressing {
            Addressing::AllGather => {
                sender.all_gathered += self.len;
                1
            }
            Addressing::PointToPoint => self.other_receivers().count() as u64,
        };
        sender.sent += self.len * times;
        self.other_receivers().for_each(|receiver| phase(&mut loads[receiver]).received += self.len);
    }
}

/// The copies and byte ranges of one process in one phase.
#[derive(Debug, Default)]
pub struct TransferPhase {
    /// For each process, the copies that pack the message to that process. Target offsets count from the start of the
    /// message.
    pub packs: Vec<Vec<StridedCopy>>,
    /// For each process, the range of the outgoing buffer that is sent to that process.
    pub send_ranges: Vec<Range<usize>>,
    /// For each process, the range of the incoming buffer that is received from that process.
    pub receive_ranges: Vec<Range<usize>>,
    /// The copies that pack the bytes that this process sends by all-gather. Target offsets count from the start of
    /// these bytes.
    pub all_gather_packs: Vec<StridedCopy>,
    /// For each process, the range of the incoming buffer that contains the bytes that the process sends by all-gather.
    /// This includes the bytes of this process itself. All processes know the lengths of all ranges.
    pub all_gather_ranges: Vec<Range<usize>>,
}

impl TransferPhase {
    /// Returns the length in bytes of the outgoing buffer. It has the point-to-point messages of this process; a
    /// message to several receivers is packed once for each of them.
    pub fn outgoing_len(&self) -> usize {
        self.send_ranges.last().map_or(0, |range| range.end)
    }

    /// Returns the length in bytes of the incoming buffer. It has the bytes that this process receives, and the bytes
    /// that it sends itself by all-gather.
    pub fn incoming_len(&self) -> usize {
        self.all_gather_ranges.last().map_or(0, |range| range.end)
    }

    /// Returns whether the phase has an all-gather. All processes get the same result.
    pub fn has_all_gather(&self) -> bool {
        self.all_gather_ranges.iter().any(|range| !range.is_empty())
    }
}

/// Builder of a phase. The builder gets the lengths of all messages at the start; the copies are added message by
/// message.
pub struct PhaseSchedule {
    /// The phase of this process, with the messages that are already scheduled.
    pub phase: TransferPhase,
    rank: usize,
    /// For each process, the number of scheduled bytes that are sent to that process.
    sent: Vec<u64>,
    received: Vec<u64>,
    gathered: Vec<u64>,
}

impl PhaseSchedule {
    /// Starts to build the phase of process `rank`. `messages` are all messages that are sent in the phase.
    pub fn new<'a>(messages: impl Iterator<Item = Message<'a>>, rank: u32, ranks: usize) -> Self {
        let rank = rank as usize;
        let zeros = || vec![0; ranks];
        let (mut to, mut from, mut gathered) = (zeros(), zeros(), zeros());
        for message in messages {
            let (sender, len) = (message.sender as usize, message.len);
            match message.addressing(ranks) {
                Addressing::AllGather => gathered[sender] += len,
                Addressing::PointToPoint if sender == rank => {
                    message.other_receivers().for_each(|receiver| to[receiver] += len);
                }
                Addressing::PointToPoint if message.other_receivers().any(|receiver| receiver == rank) => {
                    from[sender] += len;
                }
                Addressing::PointToPoint => {}
            }
        }
        let incoming = consecutive_ranges(&[&from[..], &gathered].concat());
        let (from, gathered) = incoming.split_at(ranks);
        let phase = TransferPhase {
            packs: vec![Vec::new(); ranks],
            send_ranges: consecutive_ranges(&to),
            receive_ranges: from.to_vec(),
            all_gather_packs: Vec::new(),
            all_gather_ranges: gathered.to_vec(),
        };
        Self { phase, rank, sent: zeros(), received: zeros(), gathered: zeros() }
    }

    /// Schedules the next message. If this process sends the message, `pack` is called with an offset in the outgoing
    /// message and returns the copy that packs the bytes there. If this process receives the message, returns the
    /// offset of the message in the incoming buffer.
    pub fn schedule(&mut self, message: &Message<'_>, pack: impl Fn(u64) -> StridedCopy) -> Option<u64> {
        let (rank, sender) = (self.rank, message.sender as usize);
        match message.addressing(self.sent.len()) {
            Addressing::AllGather => {
                let at = advance(&mut self.gathered[sender], message.len);
                if sender == rank {
                    self.phase.all_gather_packs.push(pack(at));
                    return None;
                }
                Some(self.phase.all_gather_ranges[sender].start as u64 + at)
            }
            Addressing::PointToPoint if sender == rank => {
                for receiver in message.other_receivers() {
                    let at = advance(&mut self.sent[receiver], message.len);
                    self.phase.packs[receiver].push(pack(at));
                }
                None
            }
            Addressing::PointToPoint => {
                message.other_receivers().find(|receiver| *receiver == rank)?;
                let at = advance(&mut self.received[sender], message.len);
                Some(self.phase.receive_ranges[sender].start as u64 + at)
            }
        }
    }
}

/// Increases `done` by `len`, and returns the previous value of `done`.
fn advance(done: &mut u64, len: u64) -> u64 {
    let at = *done;
    *done += len;
    at
}

/// Returns consecutive ranges with these lengths. The first range starts at 0.
fn consecutive_ranges(lens: &[u64]) -> Vec<Range<usize>> {
    let next = |end: &mut u64, len: &u64| Some(buffer_range(advance(end, *len), *len));
    lens.iter().scan(0, next).collect()
}

/// Returns the range of a buffer that has this start and length.
pub fn buffer_range(start: u64, len: u64) -> Range<usize> {
    let at = |offset: u64| usize::try_from(offset).expect("a round fits memory");
    at(start)..at(start + len)
}
