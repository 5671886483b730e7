//! Operations that are queued as one.
//!
//! They are collected and checked here before NCCL hears of the first: a group that fails half way would leave peers
//! waiting for the other half. Of operations without elements NCCL never hears; that is the same on all ranks, since
//! sender and receiver have the same count.

use std::ffi::c_int;
use std::marker::PhantomData;

use super::Place;
use super::device::{DeviceView, DeviceViewMut, Extent};
use crate::raw::{cudaStream_t, ncclComm_t};
use crate::result::{Nccl, Progress};
use crate::{DataType, Error, RedOp, Result};

/// Operations of one communicator on one stream, which all progress together.
///
/// Sends and receives between the same two ranks pair up in the order in which each side adds them. With a send to
/// itself a rank receives from itself.
///
/// Its first lifetime is the call that made it, so that it cannot be exchanged for the group of another communicator,
/// with other ranks; the second is that of the buffers.
#[derive(Debug)]
pub struct Group<'g, 'b> {
    place: Place,
    operations: Vec<Operation>,
    call: PhantomData<fn(&'g ()) -> &'g ()>,
    lent: PhantomData<&'b mut ()>,
}

#[derive(Debug)]
struct Operation {
    kind: Kind,
    /// As the function of `nccl.h` counts: elements of one rank.
    count: usize,
    dtype: DataType,
}

#[derive(Debug)]
enum Kind {
    Send { from: Extent, to: c_int },
    Recv { into: Extent, from: c_int },
    Broadcast { send: Extent, recv: Extent, root: c_int },
    Reduce { send: Extent, recv: Option<Extent>, op: RedOp, root: c_int },
    AllGather { send: Extent, recv: Extent },
    AllReduce { send: Extent, recv: Extent, op: RedOp },
    ReduceScatter { send: Extent, recv: Extent, op: RedOp },
}

impl<'b> Group<'_, 'b> {
    pub(super) fn new(place: Place) -> Self {
        Self { place, operations: Vec::new(), call: PhantomData, lent: PhantomData }
    }

    /// Sends all elements of a view to a rank, which receives as many of the same type (`ncclSend`).
    pub fn send(&mut self, from: DeviceView<'b>, dtype: DataType, peer: usize) -> Result<()> {
        let (from, to) = (from.extent(), self.rank("ncclSend", peer)?);
        let count = from.elements(dtype, "ncclSend")?;
        self.add(Kind::Send { from, to }, count, dtype);
        Ok(())
    }

    /// Fills a view with elements from a rank, which sends as many of the same type (`ncclRecv`).
    pub fn recv(&mut self, into: DeviceViewMut<'b>, dtype: DataType, peer: usize) -> Result<()> {
        let (into, from) = (into.extent(), self.rank("ncclRecv", peer)?);
        let count = into.elements(dtype, "ncclRecv")?;
        self.add(Kind::Recv { into, from }, count, dtype);
        Ok(())
    }

    /// All ranks get what `root` has in a view of the same size (`ncclBroadcast`, in place).
    pub fn broadcast(&mut self, buffer: DeviceViewMut<'b>, dtype: DataType, root: usize) -> Result<()> {
        let (buffer, root) = (buffer.extent(), self.rank("ncclBroadcast", root)?);
        let count = buffer.elements(dtype, "ncclBroadcast")?;
        self.add(Kind::Broadcast { send: buffer, recv: buffer, root }, count, dtype);
        Ok(())
    }

    /// Rank `root` gets the elements of `send`, each reduced over all ranks, in a view of the same size that it alone gives
    /// (`ncclReduce`).
    pub fn reduce(
        &mut self,
        send: DeviceView<'b>,
        recv: Option<DeviceViewMut<'b>>,
        dtype: DataType,
        (op, root): (RedOp, usize),
    ) -> Result<()> {
        let function = "ncclReduce";
        let (send, recv) = (send.extent(), recv.map(|recv| recv.extent()));
        if recv.is_some() != (root == self.place.rank) {
            let why = format!("rank {root}, and no other, gets what is reduced");
            return Err(Error::Argument { function, why });
        }
        let (count, root) = (send.elements(dtype, function)?, self.rank(function, root)?);
        let received = recv.map_or(Ok(count), |recv| recv.elements(dtype, function))?;
        if count != received {
            return Err(uneven(function, "as many elements as are sent", count, received));
        }
        self.add(Kind::Reduce { send, recv, op, root }, count, dtype);
        Ok(())
    }

    /// All ranks get what each has in `send`, in the order of ranks: `recv` is as many times as large as there are
    /// ranks (`ncclAllGather`).
    pub fn all_gather(&mut self, send: DeviceView<'b>, recv: DeviceViewMut<'b>, dtype: DataType) -> Result<()> {
        let (send, recv) = (send.extent(), recv.extent());
        let count = send.elements(dtype, "ncclAllGather")?;
        self.one_for_each(count, recv.elements(dtype, "ncclAllGather")?, "ncclAllGather")?;
        self.add(Kind::AllGather { send, recv }, count, dtype);
        Ok(())
    }

    /// The same in place: what a rank sends is its part of `buffer`, in the order of ranks (`ncclAllGather`).
    pub fn all_gather_in_place(&mut self, buffer: DeviceViewMut<'b>, dtype: DataType) -> Result<()> {
        let recv = buffer.extent();
        let all = recv.elements(dtype, "ncclAllGather")?;
        let count = all / self.place.ranks;
        self.one_for_each(count, all, "ncclAllGather")?;
        let bytes = count * dtype.size();
        let send = Extent { address: recv.address + (self.place.rank * bytes) as u64, bytes };
        self.add(Kind::AllGather { send, recv }, count, dtype);
        Ok(())
    }

    /// All ranks get the elements of `send`, each reduced over all ranks (`ncclAllReduce`).
    pub fn all_reduce(
        &mut self,
        send: DeviceView<'b>,
        recv: DeviceViewMut<'b>,
        dtype: DataType,
        op: RedOp,
    ) -> Result<()> {
        let (send, recv) = (send.extent(), recv.extent());
        let count = send.elements(dtype, "ncclAllReduce")?;
        let received = recv.elements(dtype, "ncclAllReduce")?;
        if count != received {
            return Err(uneven("ncclAllReduce", "as many elements as are sent", count, received));
        }
        self.add(Kind::AllReduce { send, recv, op }, count, dtype);
        Ok(())
    }

    /// The same in place (`ncclAllReduce`).
    pub fn all_reduce_in_place(&mut self, buffer: DeviceViewMut<'b>, dtype: DataType, op: RedOp) -> Result<()> {
        let buffer = buffer.extent();
        let count = buffer.elements(dtype, "ncclAllReduce")?;
        self.add(Kind::AllReduce { send: buffer, recv: buffer, op }, count, dtype);
        Ok(())
    }

    /// Of the elements of `send`, reduced over all ranks, each rank gets its part: `send` is as many times as large as
    /// there are ranks (`ncclReduceScatter`).
    pub fn reduce_scatter(
        &mut self,
        send: DeviceView<'b>,
        recv: DeviceViewMut<'b>,
        dtype: DataType,
        op: RedOp,
    ) -> Result<()> {
        let (send, recv) = (send.extent(), recv.extent());
        let count = recv.elements(dtype, "ncclReduceScatter")?;
        self.one_for_each(count, send.elements(dtype, "ncclReduceScatter")?, "ncclReduceScatter")?;
        self.add(Kind::ReduceScatter { send, recv, op }, count, dtype);
        Ok(())
    }

    fn add(&mut self, kind: Kind, count: usize, dtype: DataType) {
        if count > 0 {
            self.operations.push(Operation { kind, count, dtype });
        }
    }

    /// A rank of the communicator as NCCL counts.
    fn rank(&self, function: &'static str, rank: usize) -> Result<c_int> {
        let known = c_int::try_from(rank).ok().filter(|_| rank < self.place.ranks);
        known.ok_or_else(|| Error::Argument {
            function,
            why: format!("there is no rank {rank} of {}", self.place.ranks),
        })
    }

    fn one_for_each(&self, count: usize, all: usize, function: &'static str) -> Result<()> {
        let expected = count.checked_mul(self.place.ranks);
        if expected == Some(all) {
            return Ok(());
        }
        Err(uneven(function, "the elements of one rank for each rank", count.saturating_mul(self.place.ranks), all))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Hands them to NCCL, as one.
    ///
    /// # Safety
    ///
    /// `comm` is a communicator of this library with the group's number of ranks, not used by another thread meanwhile;
    /// `stream` is one of its device. All views are of memory that its device can access until the work on the stream
    /// is done.
    pub(super) unsafe fn queue(&self, nccl: &Nccl, comm: ncclComm_t, stream: cudaStream_t) -> Result<Progress> {
        let _ = nccl.group_start()?;
        // SAFETY: promised by the caller.
        let queued = self.operations.iter().try_for_each(|each| unsafe { each.queue(nccl, comm, stream) }.map(drop));
        // What was started has to be ended, also in vain.
        let ended = nccl.group_end();
        queued.and(ended)
    }
}

fn uneven(function: &'static str, what: &str, expected: usize, found: usize) -> Error {
    Error::Argument { function, why: format!("expected {what}, {expected}, found {found}") }
}

impl Operation {
    /// # Safety
    ///
    /// As for [`Group::queue`].
    unsafe fn queue(&self, nccl: &Nccl, comm: ncclComm_t, stream: cudaStream_t) -> Result<Progress> {
        let (count, dtype) = (self.count, self.dtype.code());
        // SAFETY: the memory, the stream and the communicator are promised by the caller. Each view holds the elements
        // that the function takes of it: that was checked when the operation was added.
        unsafe {
            match self.kind {
                Kind::Send { from, to } => nccl.send(from.pointer(), count, dtype, to, comm, stream),
                Kind::Recv { into, from } => nccl.recv(into.pointer_mut(), count, dtype, from, comm, stream),
                Kind::Broadcast { send, recv, root } => {
                    nccl.broadcast(send.pointer(), recv.pointer_mut(), count, dtype, root, comm, stream)
                }
                Kind::Reduce { send, recv, op, root } => {
                    let recv = recv.map_or(std::ptr::null_mut(), Extent::pointer_mut);
                    nccl.reduce(send.pointer(), recv, count, dtype, op.code(), root, comm, stream)
                }
                Kind::AllGather { send, recv } => {
                    nccl.all_gather(send.pointer(), recv.pointer_mut(), count, dtype, comm, stream)
                }
                Kind::AllReduce { send, recv, op } => {
                    nccl.all_reduce(send.pointer(), recv.pointer_mut(), count, dtype, op.code(), comm, stream)
                }
                Kind::ReduceScatter { send, recv, op } => {
                    nccl.reduce_scatter(send.pointer(), recv.pointer_mut(), count, dtype, op.code(), comm, stream)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::device::DeviceBuffer;
    use super::*;

    /// An address and a size; nothing is there, and nothing looks.
    struct Nothing(u64, usize);

    // SAFETY: no test hands it to NCCL.
    unsafe impl DeviceBuffer for Nothing {
        fn address(&self) -> u64 {
            self.0
        }

        fn bytes(&self) -> usize {
            self.1
        }
    }

    fn group<'b>() -> Group<'static, 'b> {
        Group::new(Place { rank: 1, ranks: 3 })
    }

    fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn bytes_become_elements() {
        let mut into = Nothing(0x1000, 24);
        let mut group = group();
        group.recv(DeviceViewMut::of(&mut into), DataType::Float32, 2).unwrap();
        assert_eq!(group.operations[0].count, 6);
    }

    #[test]
    fn ranks_that_are_not_there_are_refused() {
        let from = Nothing(0x1000, 8);
        let refused = group().send(DeviceView::of(&from), DataType::Uint8, 3);
        assert_eq!(message(refused), "ncclSend: there is no rank 3 of 3");
        assert!(group().send(DeviceView::of(&from), DataType::Uint8, usize::MAX).is_err());
    }

    #[test]
    fn parts_of_elements_and_odd_addresses_are_refused() {
        let (short, odd) = (Nothing(0x1000, 7), Nothing(0x1002, 8));
        let refused = group().send(DeviceView::of(&short), DataType::Bfloat16, 0);
        assert_eq!(message(refused), "ncclSend: 7 B are no whole number of Bfloat16 (2 B each)");
        let refused = group().send(DeviceView::of(&odd), DataType::Float32, 0);
        assert_eq!(message(refused), "ncclSend: Float32 cannot lie at 0x1002, which is not a multiple of 4");
        assert!(group().send(DeviceView::of(&odd), DataType::Float16, 0).is_ok());
    }

    #[test]
    fn collectives_want_buffers_that_fit_each_other() {
        let (one, mut all) = (Nothing(0x1000, 8), Nothing(0x2000, 23));
        let refused = group().all_gather(DeviceView::of(&one), DeviceViewMut::of(&mut all), DataType::Uint8);
        let why = "ncclAllGather: expected the elements of one rank for each rank, 24, found 23";
        assert_eq!(message(refused), why);
        all.1 = 24;
        group().all_gather(DeviceView::of(&one), DeviceViewMut::of(&mut all), DataType::Uint8).unwrap();

        let refused = group().all_gather_in_place(DeviceViewMut::of(&mut Nothing(0x2000, 25)), DataType::Uint8);
        let why = "ncclAllGather: expected the elements of one rank for each rank, 24, found 25";
        assert_eq!(message(refused), why);
        let mut group_of_one = group();
        group_of_one.all_gather_in_place(DeviceViewMut::of(&mut all), DataType::Float32).unwrap();
        let Kind::AllGather { send, .. } = group_of_one.operations[0].kind else { panic!("another kind") };
        assert_eq!(send, Extent { address: 0x2008, bytes: 8 });

        let (send, mut recv) = (Nothing(0x1000, 24), Nothing(0x2000, 8));
        let (from, into) = (DeviceView::of(&send), DeviceViewMut::of(&mut recv));
        group().reduce_scatter(from, into, DataType::Bfloat16, RedOp::Sum).unwrap();
        let refused = group().all_reduce(from, DeviceViewMut::of(&mut recv), DataType::Bfloat16, RedOp::Max);
        assert_eq!(message(refused), "ncclAllReduce: expected as many elements as are sent, 12, found 4");
    }

    #[test]
    fn what_is_reduced_goes_to_the_root_alone() {
        let (send, mut recv) = (Nothing(0x1000, 24), Nothing(0x2000, 20));
        let from = DeviceView::of(&send);
        let sum = |root| (RedOp::Sum, root);
        let refused = group().reduce(from, None, DataType::Float32, sum(1));
        assert_eq!(message(refused), "ncclReduce: rank 1, and no other, gets what is reduced");
        assert!(group().reduce(from, Some(DeviceViewMut::of(&mut recv)), DataType::Float32, sum(2)).is_err());
        let refused = group().reduce(from, Some(DeviceViewMut::of(&mut recv)), DataType::Float32, sum(1));
        assert_eq!(message(refused), "ncclReduce: expected as many elements as are sent, 6, found 5");
        assert_eq!(
            message(group().reduce(from, None, DataType::Float32, sum(3))),
            "ncclReduce: there is no rank 3 of 3"
        );
        group().reduce(from, None, DataType::Float32, sum(2)).unwrap();
    }

    #[test]
    fn of_nothing_nccl_does_not_hear() {
        let none = Nothing(0x1001, 0);
        let mut group = group();
        group.send(DeviceView::of(&none), DataType::Float64, 0).unwrap();
        assert!(group.is_empty());
    }

    #[test]
    fn views_are_split_where_they_have_bytes() {
        let mut buffer = Nothing(0x1000, 10);
        let (front, back) = DeviceViewMut::of(&mut buffer).split_at(4).unwrap();
        assert_eq!(
            (front.extent(), back.extent()),
            (Extent { address: 0x1000, bytes: 4 }, Extent { address: 0x1004, bytes: 6 })
        );
        assert!(back.split_at(7).is_none());
        assert!(DeviceView::of(&Nothing(u64::MAX, 2)).split_at(1).is_none());
    }
}
