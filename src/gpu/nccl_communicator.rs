//! A communicator that moves tensors and small messages between the GPUs of the processes, by NCCL.
//!
//! If another process has ended, NCCL waits forever, or reports that a process has ended but not why. Therefore, while
//! a process waits for NCCL, it checks the [failure notes](FailureNotes) of the run. If the notes report that a process
//! has ended, this process aborts NCCL and returns an error with the reason in the notes. While no thread waits for
//! NCCL, [`NcclWatch`] checks the failure notes and aborts NCCL.
//!
//! Small messages are gathered through a small device buffer. All sizes and offsets are in bytes. Invariant: after an
//! error NCCL is aborted, so that no stream waits for it.

use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaEvent;
use nccl::{DataType, DeviceView, DeviceViewMut, GroupCall};

use super::device::{Device, failed};
use super::memory::DeviceBytes;
use super::stream::Stream;
use super::watch::{AbortReason, NcclState, NcclWatch, reason};
use crate::comm::{Communicator, Counter, FailureNotes, Traffic, carved};
use crate::error::{DeviceError, Error, Result};

/// The maximum time that this process waits for a stream to finish, after this process has aborted NCCL.
const GRACE: Duration = Duration::from_secs(5);
/// The first delay between two polls of a CUDA event. Each delay is twice as long as the one before, up to `LONGEST`.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// The bytes that each process contributes to the first all-gather of a gather: 8 bytes with the length of its message,
/// and the beginning of the message. If a message is longer, a second all-gather follows.
const SHORT_WORD: usize = 256;
const LEN_BYTES: usize = 8;

/// A communicator over NCCL. The tensors are in device memory.
pub struct Nccl {
    // This field is dropped first, because the thread of the watch uses the two fields below.
    watch: Option<NcclWatch>,
    met: Arc<NcclState>,
    notes: Arc<dyn FailureNotes>,
    stream: Stream,
    counter: Counter,
    place: nccl::RankPosition,
    words: Mutex<DeviceBytes>,
    /// The CUDA event that marks the end of the operation that was queued last.
    last: Mutex<Option<CudaEvent>>,
}

impl Nccl {
    /// Creates the communicator of this process. `peers` is its NCCL communicator, which is already connected.
    ///
    /// # Errors
    /// `Usage` if no thread can be started; `Device` if there is not enough memory.
    pub(super) fn new(peers: nccl::Communicator, stream: Stream, notes: Arc<dyn FailureNotes>) -> Result<Self> {
        let place = peers.place();
        let words = DeviceBytes::new(stream.device(), SHORT_WORD * place.ranks, "words")?;
        let met = NcclState::new(peers);
        let own = u32::try_from(place.rank).expect("fewer than 2^32 ranks");
        let watch = NcclWatch::start(Arc::clone(&met), Arc::clone(&notes), own)?;
        Ok(Self {
            watch: Some(watch),
            met,
            notes,
            stream,
            counter: Counter::default(),
            place,
            words: Mutex::new(words),
            last: Mutex::default(),
        })
    }

    /// Returns the device that holds the exchanged memory.
    pub fn device(&self) -> &Arc<Device> {
        self.stream.device()
    }

    /// Queues the work of [`Communicator::exchange`] on a stream.
    pub(super) fn queue_exchange(
        &self,
        stream: &Stream,
        outgoing: &DeviceBytes,
        to: &[Range<usize>],
        incoming: &mut DeviceBytes,
        from: &[Range<usize>],
    ) -> Result<()> {
        const OP: &str = "exchange";
        let (rank, size) = (self.rank() as usize, self.size() as usize);
        let mut sends = lent(OP, DeviceView::of(outgoing), DeviceView::split_at, to)?;
        let mut receives = lent(OP, DeviceViewMut::of(incoming), DeviceViewMut::split_at, from)?;
        self.queue(OP, stream, |group| {
            // Each rank begins with a different peer, so that not all ranks send to the same rank.
            for step in 1..size {
                let (next, previous) = ((rank + step) % size, (rank + size - step) % size);
                if let Some(bytes) = sends[next].take() {
                    group.send(bytes, DataType::Uint8, next)?;
                }
                if let Some(bytes) = receives[previous].take() {
                    group.recv(bytes, DataType::Uint8, previous)?;
                }
            }
            Ok(())
        })?;
        self.counter.sent(bytes_of(to));
        self.counter.received(bytes_of(from));
        Ok(())
    }

    /// Queues the work of [`Communicator::all_gather`] on a stream.
    pub(super) fn queue_all_gather(
        &self,
        stream: &Stream,
        memory: &mut DeviceBytes,
        ranges: &[Range<usize>],
    ) -> Result<()> {
        self.queue_all_gather_uncounted(stream, memory, ranges)?;
        self.counter.round(ranges, self.rank());
        Ok(())
    }

    fn queue_all_gather_uncounted(
        &self,
        stream: &Stream,
        memory: &mut DeviceBytes,
        ranges: &[Range<usize>],
    ) -> Result<()> {
        const OP: &str = "all-gather";
        if let Some(all) = all_parts(ranges) {
            let whole = lent(OP, DeviceViewMut::of(memory), DeviceViewMut::split_at, &[all])?.pop().flatten();
            self.queue(OP, stream, |group| {
                whole.map_or(Ok(()), |whole| group.all_gather_in_place(whole, DataType::Uint8))
            })?;
        } else {
            let parts = lent(OP, DeviceViewMut::of(memory), DeviceViewMut::split_at, ranges)?;
            self.queue(OP, stream, |group| {
                let mut parts = parts.into_iter().enumerate();
                parts.try_for_each(|(root, part)| {
                    part.map_or(Ok(()), |part| group.broadcast(part, DataType::Uint8, root))
                })
            })?;
        }
        Ok(())
    }

    /// Gathers one message of at most `each` bytes from every process. In the result, each process has `each` bytes, in
    /// the order of the process numbers; a shorter message is padded with zeros.
    fn gather_words(&self, memory: &mut DeviceBytes, own: &[u8], each: usize) -> Result<Vec<u8>> {
        const OP: &str = "gather";
        let nccl::RankPosition { rank, ranks } = self.place;
        let mut all = vec![0; each * ranks];
        all[rank * each..][..own.len()].copy_from_slice(own);
        memory.grow_to(all.len(), "words")?;
        let ranges: Vec<Range<usize>> = (0..ranks).map(|rank| rank * each..(rank + 1) * each).collect();
        // SAFETY: the host and device buffers live until the stream has finished. If it never finishes, they are
        // leaked.
        let queued = unsafe { self.stream.copy_in(&all, memory) }
            .and_then(|()| self.queue_all_gather_uncounted(&self.stream, memory, &ranges))
            // SAFETY: the buffers live until the stream has finished, and are leaked if it never finishes.
            .and_then(|()| unsafe { self.stream.copy_out(memory, &mut all) });
        let done = queued.and_then(|()| self.stream.record()).and_then(|point| self.wait(OP, &point));
        if let Err(error) = done {
            if !self.stream.record().is_ok_and(|point| self.has_ended(OP, &point)) {
                mem::forget(all);
            }
            return Err(error);
        }
        Ok(all)
    }

    /// Returns the counter of the bytes that this process moves.
    pub(super) fn counter(&self) -> &Counter {
        &self.counter
    }

    pub(super) fn queue<'b>(
        &self,
        op: &'static str,
        stream: &Stream,
        body: impl for<'g> FnOnce(&mut GroupCall<'g, 'b>) -> nccl::Result<()>,
    ) -> Result<()> {
        stream.device().bind()?;
        // Each operation waits for the operation that was queued before it, even if that is on another stream. So all
        // ranks run the operations in the same order.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map_or(Ok(()), |before| stream.wait(before))?;
        self.met.with(|peers| peers.group(stream, body)).map_err(|why| self.reason(op, &why))?;
        *last = Some(stream.record()?);
        Ok(())
    }

    /// Waits until a stream has reached the event `point`, and all operations before the event are complete. Fails if
    /// another process has ended or NCCL was aborted.
    pub(super) fn wait(&self, op: &'static str, point: &CudaEvent) -> Result<()> {
        let mut pause = SHORTEST;
        loop {
            self.stream.device().bind()?;
            if point
                .try_is_complete()
                .map_err(|error| self.abandon(op, AbortReason::Here(failed(op)(error).to_string())))?
            {
                // The stream also reaches the event if the watch or another thread has aborted NCCL. Then the received
                // bytes are incomplete.
                return self.met.check_not_aborted().map_err(|why| self.reason(op, &why));
            }
            // If NCCL was aborted, this returns the error immediately.
            self.met.with(|peers| peers.status()).map_err(|why| self.reason(op, &why))?;
            self.notes.check().map_err(|gone| self.abandon(op, AbortReason::Elsewhere(gone.to_string())))?;
            thread::sleep(pause);
            pause = LONGEST.min(pause * 2);
        }
    }

    /// Waits until a stream has reached the event `point`. Aborts NCCL if another process has ended or NCCL fails.
    /// Returns false if the stream does not reach the event within [`GRACE`] after NCCL was aborted.
    pub(super) fn has_ended(&self, op: &'static str, point: &CudaEvent) -> bool {
        // The device must be selected, because a query without a device fails. Any other failed query is an error of the
        // device, which then does no more work.
        let has_reached = || self.stream.device().bind().is_ok() && !matches!(point.try_is_complete(), Ok(false));
        if has_reached() || self.wait(op, point).is_ok() {
            return true;
        }
        // NCCL is aborted now.
        let until = Instant::now() + GRACE;
        while !has_reached() {
            if Instant::now() >= until {
                return false;
            }
            thread::sleep(LONGEST);
        }
        true
    }

    /// Aborts NCCL, and returns the error. If another process has ended, the error names it.
    fn abandon(&self, op: &'static str, why: AbortReason) -> Error {
        let why = self.met.give_up(why);
        self.reason(op, &why)
    }

    fn reason(&self, op: &'static str, why: &AbortReason) -> Error {
        reason(&*self.notes, self.rank(), op, why)
    }
}

impl Communicator for Nccl {
    type Memory = DeviceBytes;

    fn rank(&self) -> u32 {
        u32::try_from(self.place.rank).expect("fewer than 2^32 ranks")
    }

    fn size(&self) -> u32 {
        u32::try_from(self.place.ranks).expect("fewer than 2^32 ranks")
    }

    fn exchange(
        &self,
        outgoing: &DeviceBytes,
        to: &[Range<usize>],
        incoming: &mut DeviceBytes,
        from: &[Range<usize>],
    ) -> Result<()> {
        self.queue_exchange(&self.stream, outgoing, to, incoming, from)?;
        self.wait("exchange", &self.stream.record()?)
    }

    fn all_gather(&self, memory: &mut DeviceBytes, ranges: &[Range<usize>]) -> Result<()> {
        self.queue_all_gather(&self.stream, memory, ranges)?;
        self.wait("all-gather", &self.stream.record()?)
    }

    fn traffic(&self) -> Traffic {
        self.counter.traffic()
    }

    fn gather(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut memory = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        let short = SHORT_WORD - LEN_BYTES;
        let head = &message[..message.len().min(short)];
        let own = [&(message.len() as u64).to_le_bytes()[..], head].concat();
        let heads = self.gather_words(&mut memory, &own, SHORT_WORD)?;
        let (heads, _) = heads.as_chunks::<SHORT_WORD>();
        let len_of = |head: &[u8; SHORT_WORD]| {
            let (len, _) = head.split_first_chunk::<LEN_BYTES>().expect("a word begins with its length");
            usize::try_from(u64::from_le_bytes(*len)).expect("a word fits memory")
        };
        let lens: Vec<usize> = heads.iter().map(len_of).collect();
        let longest = lens.iter().copied().max().unwrap_or(0);
        if longest <= short {
            return Ok(heads.iter().zip(lens).map(|(head, len)| head[LEN_BYTES..][..len].to_vec()).collect());
        }
        let all = self.gather_words(&mut memory, message, longest)?;
        Ok(all.chunks(longest).zip(lens).map(|(words, len)| words[..len].to_vec()).collect())
    }

    fn check(&self) -> Result<()> {
        self.notes.check()
    }

    fn fail(&self, error: &Error) {
        self.notes.fail(error);
    }

    /// Leaves the run together with all other processes, because another process may still be reading from the device
    /// of this process.
    fn leave(mut self) -> Result<()> {
        // A rank shuts down its NCCL only after the barrier. A rank that is killed earlier never reaches the barrier.
        self.watch.iter().for_each(NcclWatch::expect_leaving);
        let done = self.barrier();
        self.watch = None;
        if done.is_ok() {
            self.notes.leave();
            if let Some(peers) = self.met.take() {
                // All bytes have arrived, so an error during the shutdown of NCCL does not matter.
                let _ = peers.finalize();
            }
        }
        done
    }
}

/// Returns the total length of `ranges` in bytes.
fn bytes_of(ranges: &[Range<usize>]) -> u64 {
    ranges.iter().map(|range| range.len() as u64).sum()
}

/// Returns views of disjoint ranges of a buffer, which messages of the operation `op` read or write. A view is `None`
/// if its range is empty. Fails if a range is outside the buffer or overlaps with another range.
pub(super) fn lent<V>(
    op: &'static str,
    whole: V,
    split_at: fn(V, usize) -> Option<(V, V)>,
    ranges: &[Range<usize>],
) -> Result<Vec<Option<V>>> {
    carved(whole, split_at, ranges).map_err(|Range { start, end }| {
        Error::Device(DeviceError {
            op,
            detail: format!("bytes {start} to {end} are outside the buffer, or overlap another message"),
            hint: None,
        })
    })
}

/// Returns the range from the first to the last byte of all ranges, for `ncclAllGather`. Returns `None` unless the
/// ranges have equal lengths and follow each other without gaps; `ncclAllGather` then cannot be used.
fn all_parts(ranges: &[Range<usize>]) -> Option<Range<usize>> {
    let (first, last) = (ranges.first()?, ranges.last()?);
    let follows = |pair: &[Range<usize>]| pair[0].end == pair[1].start && pair[0].len() == pair[1].len();
    ranges.windows(2).all(follows).then_some(first.start..last.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_are_parts_of_one_are_known() {
        assert_eq!(all_parts(&[3..5, 5..7, 7..9]), Some(3..9));
        assert_eq!(all_parts(&[4..4, 4..4]), Some(4..4));
        for others in [[0..2, 2..4, 4..5], [0..2, 3..5, 5..7], [4..6, 2..4, 0..2], [0..0, 0..0, 1..1]] {
            assert_eq!(all_parts(&others), None);
        }
    }
}
