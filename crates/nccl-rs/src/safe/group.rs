//! Groups of operations that are queued together.
//!
//! All operations are collected and checked before the first call of NCCL. If a group failed in the middle, peers would
//! wait for the missing operations. Operations without elements are not passed to NCCL. All ranks omit the same
//! operations, because sender and receiver have the same count.

use std::ffi::c_int;
use std::marker::PhantomData;

use super::RankPosition;
use super::device::{DeviceView, DeviceViewMut, Extent};
use crate::raw::{cudaStream_t, ncclComm_t};
use crate::result::{Nccl, Progress};
use crate::{DataType, Error, RedOp, Result};

/// Operations of one communicator on one stream, which run at the same time.
///
/// Sends and receives between the same two ranks are matched in the order in which each of the two ranks adds them. A
/// rank that sends to itself must also receive from itself.
///
/// The first lifetime is the lifetime of the call that created the group. This lifetime prevents swapping the group
/// with the group of another communicator, which may have other ranks. The second lifetime is the lifetime of the
/// buffers.
#[derive(Debug)]
pub struct GroupCall<'g, 'b> {
    place: RankPosition,
    operations: Vec<Operation>,
    call: PhantomData<fn(&'g ()) -> &'g ()>,
    lent: PhantomData<&'b mut ()>,
}

#[derive(Debug)]
struct Operation {
    kind: Kind,
    /// The number of elements for one rank, which the NCCL function takes as its argument `count`.
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

impl<'b> GroupCall<'_, 'b> {
    pub(super) fn new(place: RankPosition) -> Self {
        Self { place, operations: Vec::new(), call: PhantomData, lent: PhantomData }
    }

    /// Sends all elements of a view to a rank, which must receive the same number of elements of the same type
    /// (`ncclSend`).
    pub fn send(&mut self, from: DeviceView<'b>, dtype: DataType, peer: usize) -> Result<()> {
        let (from, to) = (from.extent(), self.rank("ncclSend", peer)?);
        let count = from.elements(dtype, "ncclSend")?;
        self.add(Kind::Send { from, to }, count, dtype);
        Ok(())
    }

    /// Fills a view with elements from a rank, which must send the same number of elements of the same type
    /// (`ncclRecv`).
    pub fn recv(&mut self, into: DeviceViewMut<'b>, dtype: DataType, peer: usize) -> Result<()> {
        let (into, from) = (into.extent(), self.rank("ncclRecv", peer)?);
        let count = into.elements(dtype, "ncclRecv")?;
        self.add(Kind::Recv { into, from }, count, dtype);
        Ok(())
    }

    /// Copies the buffer of `root` to the buffers of all ranks, in place (`ncclBroadcast`). All buffers have the same
    /// size.
    pub fn broadcast(&mut self, buffer: DeviceViewMut<'b>, dtype: DataType, root: usize) -> Result<()> {
        let (buffer, root) = (buffer.extent(), self.rank("ncclBroadcast", root)?);
        let count = buffer.elements(dtype, "ncclBroadcast")?;
        self.add(Kind::Broadcast { send: buffer, recv: buffer, root }, count, dtype);
        Ok(())
    }

    /// Reduces the elements of `send` over all ranks, and writes the result to the view `recv` of rank `root`
    /// (`ncclReduce`). The root passes a view with the size of `send`; other ranks pass `None`.
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
            let why = format!("only the root, rank {root}, must pass a receive buffer");
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

    /// Gathers `send` of all ranks, in rank order, to `recv` of all ranks (`ncclAllGather`). `recv` is `ranks` times as
    /// long as `send`.
    pub fn all_gather(&mut self, send: DeviceView<'b>, recv: DeviceViewMut<'b>, dtype: DataType) -> Result<()> {
        let (send, recv) = (send.extent(), recv.extent());
        let count = send.elements(dtype, "ncclAllGather")?;
        self.one_for_each(count, recv.elements(dtype, "ncclAllGather")?, "ncclAllGather")?;
        self.add(Kind::AllGather { send, recv }, count, dtype);
        Ok(())
    }

    /// Gathers in place (`ncclAllGather`). `buffer` has one part for each rank, in rank order and of equal length; each
    /// rank sends its own part and receives all other parts.
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

    /// Reduces the elements of `send` over all ranks, and writes the result to `recv` of all ranks (`ncclAllReduce`).
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

    /// Reduces a buffer over all ranks, in place (`ncclAllReduce`).
    pub fn all_reduce_in_place(&mut self, buffer: DeviceViewMut<'b>, dtype: DataType, op: RedOp) -> Result<()> {
        let buffer = buffer.extent();
        let count = buffer.elements(dtype, "ncclAllReduce")?;
        self.add(Kind::AllReduce { send: buffer, recv: buffer, op }, count, dtype);
        Ok(())
    }

    /// Reduces the elements of `send` over all ranks, and writes to `recv` of each rank its part of the result
    /// (`ncclReduceScatter`). `send` is `ranks` times as long as `recv`.
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

    /// Checks that a rank exists, and converts it to NCCL's type.
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
        Err(uneven(
            function,
            "as many elements as all ranks have together",
            count.saturating_mul(self.place.ranks),
            all,
        ))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Queues all operations as one NCCL group.
    ///
    /// # Safety
    ///
    /// `comm` is a communicator of this library with the group's number of ranks. No other thread uses this
    /// communicator at the same time. `stream` is a stream of the communicator's device. The device can access the
    /// memory of all views until the work on the stream is done.
    pub(super) unsafe fn queue(&self, nccl: &Nccl, comm: ncclComm_t, stream: cudaStream_t) -> Result<Progress> {
        let _ = nccl.group_start()?;
        // SAFETY: guaranteed by the caller.
        let queued = self.operations.iter().try_for_each(|each| unsafe { each.queue(nccl, comm, stream) }.map(drop));
        // A group that was started must be ended, even if a call returned an error.
        let ended = nccl.group_end();
        queued.and(ended)
    }
}

fn uneven(function: &'static str, what: &str, expected: usize, found: usize) -> Error {
    Error::Argument { function, why: format!("expected {what}, {expected}, found {found}") }
}

impl Operation {
    /// Queues this operation by calling the NCCL function.
    ///
    /// # Safety
    ///
    /// The conditions of [`GroupCall::queue`] hold.
    unsafe fn queue(&self, nccl: &Nccl, comm: ncclComm_t, stream: cudaStream_t) -> Result<Progress> {
        let (count, dtype) = (self.count, self.dtype.code());
        // SAFETY: the caller guarantees the memory, the stream and the communicator. Each view is long enough for the
        // function, because this was checked when the operation was added.
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

    /// A buffer with an address and a size but without memory. The tests never access it.
    struct Nothing(u64, usize);

    // SAFETY: no test passes this buffer to NCCL.
    unsafe impl DeviceBuffer for Nothing {
        fn address(&self) -> u64 {
            self.0
        }

        fn bytes(&self) -> usize {
            self.1
        }
    }

    fn group<'b>() -> GroupCall<'static, 'b> {
        GroupCall::new(RankPosition { rank: 1, ranks: 3 })
    }

    fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn lengths_in_bytes_are_converted_to_elements() {
        let mut into = Nothing(0x1000, 24);
        let mut group = group();
        group.recv(DeviceViewMut::of(&mut into), DataType::Float32, 2).unwrap();
        assert_eq!(group.operations[0].count, 6);
    }

    #[test]
    fn invalid_rank_is_an_error() {
        let from = Nothing(0x1000, 8);
        let refused = group().send(DeviceView::of(&from), DataType::Uint8, 3);
        assert_eq!(message(refused), "ncclSend: there is no rank 3 of 3");
        assert!(group().send(DeviceView::of(&from), DataType::Uint8, usize::MAX).is_err());
    }

    #[test]
    fn partial_or_misaligned_elements_are_an_error() {
        let (short, odd) = (Nothing(0x1000, 7), Nothing(0x1002, 8));
        let refused = group().send(DeviceView::of(&short), DataType::Bfloat16, 0);
        assert_eq!(message(refused), "ncclSend: 7 B are not a whole number of Bfloat16 elements (2 B each)");
        let refused = group().send(DeviceView::of(&odd), DataType::Float32, 0);
        assert_eq!(message(refused), "ncclSend: Float32 elements cannot start at 0x1002, which is not a multiple of 4");
        assert!(group().send(DeviceView::of(&odd), DataType::Float16, 0).is_ok());
    }

    #[test]
    fn mismatched_buffer_lengths_are_an_error() {
        let (one, mut all) = (Nothing(0x1000, 8), Nothing(0x2000, 23));
        let refused = group().all_gather(DeviceView::of(&one), DeviceViewMut::of(&mut all), DataType::Uint8);
        let why = "ncclAllGather: expected as many elements as all ranks have together, 24, found 23";
        assert_eq!(message(refused), why);
        all.1 = 24;
        group().all_gather(DeviceView::of(&one), DeviceViewMut::of(&mut all), DataType::Uint8).unwrap();

        let refused = group().all_gather_in_place(DeviceViewMut::of(&mut Nothing(0x2000, 25)), DataType::Uint8);
        let why = "ncclAllGather: expected as many elements as all ranks have together, 24, found 25";
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
    fn only_the_root_passes_a_receive_buffer() {
        let (send, mut recv) = (Nothing(0x1000, 24), Nothing(0x2000, 20));
        let from = DeviceView::of(&send);
        let sum = |root| (RedOp::Sum, root);
        let refused = group().reduce(from, None, DataType::Float32, sum(1));
        assert_eq!(message(refused), "ncclReduce: only the root, rank 1, must pass a receive buffer");
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
    fn empty_operations_are_omitted() {
        let none = Nothing(0x1001, 0);
        let mut group = group();
        group.send(DeviceView::of(&none), DataType::Float64, 0).unwrap();
        assert!(group.is_empty());
    }

    #[test]
    fn views_are_split_within_their_length() {
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
