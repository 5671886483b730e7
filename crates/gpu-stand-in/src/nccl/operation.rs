//! The operations of a group. First all operations send, then all receive, and then this rank waits until its peers
//! have taken its messages.

use std::ffi::c_int;
use std::slice;

use super::communicator::{Broken, Communicator};
use super::{Answer, Code, reduce, refused};
use crate::fault::Fault;
use crate::machine::Machine;
use crate::wire::{Head, Kind};

/// The arguments of an NCCL call: addresses, counts and codes.
#[derive(Clone, Copy)]
pub struct Collected {
    pub from: u64,
    pub into: u64,
    pub count: usize,
    pub dtype: u32,
    pub op: u32,
    pub stream: usize,
}

#[derive(Clone, Copy)]
pub enum What {
    Send { to: c_int },
    Recv { from: c_int },
    Broadcast { root: c_int },
    Reduce { root: c_int },
    AllGather,
    AllReduce,
    ReduceScatter,
}

/// An NCCL call whose arguments have been checked.
pub struct Operation {
    kind: Kind,
    /// The peer of a send or receive, or the root of a collective; 0 for a collective without a root.
    rank: usize,
    receives: bool,
    from: u64,
    into: u64,
    /// The number of bytes that the operation sends to, or receives from, one rank.
    bytes: usize,
    head: Head,
}

impl Operation {
    pub fn new(communicator: &Communicator, what: What, call: Collected) -> Answer<Self> {
        let place = communicator.place();
        let (kind, rank, receives) = match what {
            What::Send { to } => (Kind::Send, to, false),
            What::Recv { from } => (Kind::Send, from, true),
            What::Broadcast { root } => (Kind::Broadcast, root, true),
            What::Reduce { root } => (Kind::Reduce, root, true),
            What::AllGather => (Kind::AllGather, 0, true),
            What::AllReduce => (Kind::AllReduce, 0, true),
            What::ReduceScatter => (Kind::ReduceScatter, 0, true),
        };
        let wrong = |why: &str| refused(Code::INVALID_ARGUMENT, why);
        let rank = usize::try_from(rank).ok().filter(|rank| *rank < place.ranks);
        let rank = rank.ok_or_else(|| wrong("there is no such rank"))?;
        let size = reduce::size(call.dtype).ok_or_else(|| wrong("there is no such type"))?;
        let bytes = call.count.checked_mul(size).ok_or_else(|| wrong("the number of bytes overflows"))?;
        let reduces = matches!(kind, Kind::Reduce | Kind::AllReduce | Kind::ReduceScatter);
        if reduces && !reduce::can(call.dtype, call.op) {
            return Err(wrong("these elements cannot be reduced so by a device of compute capability 8.0"));
        }
        let is_collective = kind != Kind::Send;
        let collective = if is_collective { communicator.next_collective() } else { 0 };
        let head = Head { kind, dtype: call.dtype, op: call.op, collective, bytes: bytes as u64 };
        let new = Self { kind, rank, receives, from: call.from, into: call.into, bytes, head };
        new.check(communicator)?;
        Ok(new)
    }

    /// Returns the number of bytes that the call reads, and the number of bytes that it writes. If a buffer has a part
    /// for each rank, all its parts are counted.
    fn sizes(&self, communicator: &Communicator) -> (usize, usize) {
        let all = self.bytes.saturating_mul(communicator.place().ranks);
        match self.kind {
            Kind::Taken => (0, 0),
            Kind::Send if self.receives => (0, self.bytes),
            Kind::Send => (self.bytes, 0),
            Kind::Broadcast if self.rank != communicator.place().rank => (0, self.bytes),
            Kind::Reduce if self.rank != communicator.place().rank => (self.bytes, 0),
            Kind::Broadcast | Kind::Reduce | Kind::AllReduce => (self.bytes, self.bytes),
            Kind::AllGather => (self.bytes, all),
            Kind::ReduceScatter => (all, self.bytes),
        }
    }

    fn check(&self, communicator: &Communicator) -> Answer {
        let heap = &Machine::start().devices[communicator.place().device].heap;
        let (read, written) = self.sizes(communicator);
        for (address, bytes) in [(self.from, read), (self.into, written)] {
            if bytes > 0 && heap.locate(address, bytes).is_err() {
                return Err(refused(Code::INVALID_ARGUMENT, "a buffer is not memory of the device"));
            }
        }
        Ok(())
    }
}

/// Runs the operations of a group. After an error, blocks the stream until the communicator is aborted.
pub fn run(communicator: &Communicator, operations: &[Operation]) {
    let done = || {
        operations.iter().try_for_each(|operation| operation.send(communicator))?;
        Fault::DiesInGroup.strikes();
        if Fault::FailsInGroup.happens() {
            communicator.fail(refused(Code::SYSTEM_ERROR, "injected network failure"));
            return Err(Broken);
        }
        operations.iter().try_for_each(|operation| operation.receive(communicator))?;
        (0..communicator.place().ranks).try_for_each(|peer| communicator.wait_taken(peer))
    };
    if done().is_err() {
        communicator.stand_still();
    }
}

impl Operation {
    fn send(&self, communicator: &Communicator) -> Result<(), Broken> {
        let place = communicator.place();
        let all = 0..place.ranks;
        match self.kind {
            Kind::Taken => Ok(()),
            Kind::Send if self.receives => Ok(()),
            Kind::Send => communicator.put(self.rank, self.head, &self.read(communicator, 0)?),
            Kind::Broadcast if self.rank != place.rank => Ok(()),
            Kind::Reduce => communicator.put(self.rank, self.head, &self.read(communicator, 0)?),
            Kind::Broadcast | Kind::AllGather | Kind::AllReduce => {
                let data = self.read(communicator, 0)?;
                all.into_iter().try_for_each(|peer| communicator.put(peer, self.head, &data))
            }
            Kind::ReduceScatter => {
                all.into_iter().try_for_each(|peer| communicator.put(peer, self.head, &self.read(communicator, peer)?))
            }
        }
    }

    fn receive(&self, communicator: &Communicator) -> Result<(), Broken> {
        let ranks = communicator.place().ranks;
        match self.kind {
            Kind::Taken => Ok(()),
            Kind::Send if !self.receives => Ok(()),
            Kind::Send | Kind::Broadcast => self.write(communicator, 0, &communicator.take(self.rank, self.head)?),
            Kind::AllGather => {
                (0..ranks).try_for_each(|peer| self.write(communicator, peer, &communicator.take(peer, self.head)?))
            }
            Kind::Reduce if self.rank != communicator.place().rank => Ok(()),
            Kind::Reduce | Kind::AllReduce | Kind::ReduceScatter => {
                // The order of the additions differs from the order of the ranks, and each addition is rounded, so that
                // tests cannot depend on the order or on the rounding.
                let mut total = communicator.take(ranks - 1, self.head)?;
                for peer in (0..ranks - 1).rev() {
                    reduce::add(self.head.dtype, self.head.op, &mut total, &communicator.take(peer, self.head)?);
                }
                reduce::finish(self.head.dtype, self.head.op, ranks, &mut total);
                self.write(communicator, 0, &total)
            }
        }
    }

    /// Reads one part of the send buffer. Part n is for rank n.
    fn read(&self, communicator: &Communicator, part: usize) -> Result<Vec<u8>, Broken> {
        let from = self.locate(communicator, self.from, part)?;
        // SAFETY: the range was checked just now.
        Ok(from.map_or_else(Vec::new, |from| unsafe { slice::from_raw_parts(from, self.bytes) }.to_vec()))
    }

    fn write(&self, communicator: &Communicator, part: usize, data: &[u8]) -> Result<(), Broken> {
        if let Some(into) = self.locate(communicator, self.into, part)? {
            // SAFETY: the range was checked just now, and the header guarantees that `data` has its length.
            unsafe { data.as_ptr().copy_to_nonoverlapping(into, self.bytes) };
        }
        Ok(())
    }

    fn locate(&self, communicator: &Communicator, base: u64, part: usize) -> Result<Option<*mut u8>, Broken> {
        if self.bytes == 0 {
            return Ok(None);
        }
        let device = &Machine::start().devices[communicator.place().device];
        let found = device.heap.locate(base + (part * self.bytes) as u64, self.bytes);
        found.map(Some).map_err(|_| {
            device.fault();
            communicator.fail(Code::CUDA_ERROR);
            Broken
        })
    }
}
