//! NCCL between the devices of ranks, watched over a control connection.
//!
//! NCCL moves bytes, but waits for ever for a peer that is gone, or knows that one is and not why. So few words go by
//! another communicator, the control, which is asked while NCCL is waited for: where it says that a rank is gone, NCCL is
//! aborted and the error has what the control knows. A [`Watch`] does so where nobody waits for it.
//!
//! Counts bytes. Invariant: after an error NCCL is aborted, so no stream waits for it.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaEvent;
use nccl::{DataType, DeviceView, DeviceViewMut, Group};

use super::device::{Device, failed};
use super::memory::DeviceBytes;
use super::stream::Stream;
use super::watch::{Met, Watch, Why, reason};
use crate::comm::{Communicator, Counter, Traffic, carved};
use crate::error::{Error, Result};

/// How long a stream may take to end after NCCL was aborted.
const GRACE: Duration = Duration::from_secs(5);
/// Pauses between two looks at an event; each is twice as long as the one before.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// A rank whose memory is a device's. Words, votes and news of the others go by `C`.
pub struct Nccl<C> {
    // Ended first: it has both of the others.
    watch: Watch,
    met: Arc<Met>,
    control: Arc<C>,
    stream: Stream,
    counter: Counter,
}

impl<C: Communicator + Send + 'static> Nccl<C> {
    /// Makes the communicator of ranks that have met.
    ///
    /// # Errors
    /// `Usage` where no thread can be started.
    pub(super) fn new(peers: nccl::Communicator, stream: Stream, control: Arc<C>) -> Result<Self> {
        let met = Met::new(peers);
        let watch = Watch::start(Arc::clone(&met), Arc::clone(&control))?;
        Ok(Self { watch, met, control, stream, counter: Counter::default() })
    }
}

impl<C: Communicator + Send> Nccl<C> {
    /// The device whose memory is exchanged.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        self.stream.device()
    }

    /// Who looks after the ranks.
    #[must_use]
    pub fn control(&self) -> &C {
        &self.control
    }

    /// Queue [`Communicator::exchange`] on a stream.
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
            // Each rank begins with another one.
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

    /// Queue [`Communicator::all_gather`] on a stream.
    pub(super) fn queue_all_gather(
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
        self.counter.round(ranges, self.rank());
        Ok(())
    }

    /// Where what goes by this rank is counted.
    pub(super) fn counter(&self) -> &Counter {
        &self.counter
    }

    pub(super) fn queue<'b>(
        &self,
        op: &'static str,
        stream: &Stream,
        body: impl for<'g> FnOnce(&mut Group<'g, 'b>) -> nccl::Result<()>,
    ) -> Result<()> {
        stream.device().bind()?;
        self.met.with(|peers| peers.group(stream, body)).map_err(|why| self.reason(op, &why))
    }

    /// Wait until a stream has come to a point, as long as all ranks are there.
    pub(super) fn wait(&self, op: &'static str, point: &CudaEvent) -> Result<()> {
        let mut pause = SHORTEST;
        loop {
            self.stream.device().bind()?;
            if point.try_is_complete().map_err(|error| self.abandon(op, Why::Here(failed(op)(error).to_string())))? {
                return Ok(());
            }
            // After an abort there is nothing to wait for but the stream.
            self.met.with(|peers| peers.status()).map_err(|why| self.reason(op, &why))?;
            self.control.check().map_err(|gone| self.abandon(op, Why::Elsewhere(gone.to_string())))?;
            thread::sleep(pause);
            pause = LONGEST.min(pause * 2);
        }
    }

    /// Whether a stream has come to a point, if need be after NCCL was aborted.
    pub(super) fn has_ended(&self, op: &'static str, point: &CudaEvent) -> bool {
        let until = Instant::now() + GRACE;
        let is_ended = || self.wait(op, point).is_ok() || !matches!(point.try_is_complete(), Ok(false));
        while !is_ended() {
            if Instant::now() >= until {
                return false;
            }
            thread::sleep(LONGEST);
        }
        true
    }

    /// Abort NCCL; the error says who is gone, if somebody is.
    fn abandon(&self, op: &'static str, why: Why) -> Error {
        let why = self.met.give_up(why);
        self.reason(op, &why)
    }

    fn reason(&self, op: &'static str, why: &Why) -> Error {
        reason(&*self.control, op, why)
    }
}

impl<C: Communicator + Send> Communicator for Nccl<C> {
    type Memory = DeviceBytes;

    fn rank(&self) -> u32 {
        self.control.rank()
    }

    fn size(&self) -> u32 {
        self.control.size()
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

    fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.control.gather(said)
    }

    fn vote(&self, mine: Result<(), &str>) -> Result<()> {
        self.control.vote(mine)
    }

    fn check(&self) -> Result<()> {
        self.control.check()
    }

    fn fail(&self, why: &str) {
        self.control.fail(why);
    }

    /// All together: a peer may still be reading what this rank's device has for it.
    fn leave(self) -> Result<()> {
        let Self { watch, met, control, .. } = self;
        // Whoever is behind the barrier first ends his side.
        drop(watch);
        let done = control.barrier();
        if let (Ok(()), Some(peers)) = (&done, met.take()) {
            // All bytes have arrived; how NCCL itself ends makes no difference.
            let _ = peers.finalize();
        }
        // What NCCL waits by had the only other one.
        let left = Arc::into_inner(control).map_or(Ok(()), Communicator::leave);
        done.and(left)
    }
}

/// How long these are together.
fn bytes_of(ranges: &[Range<usize>]) -> u64 {
    ranges.iter().map(|range| range.len() as u64).sum()
}

/// What messages are of, as views.
pub(super) fn lent<V>(
    op: &'static str,
    whole: V,
    split_at: fn(V, usize) -> Option<(V, V)>,
    ranges: &[Range<usize>],
) -> Result<Vec<Option<V>>> {
    carved(whole, split_at, ranges).map_err(|Range { start, end }| Error::Device {
        op,
        detail: format!("bytes {start} to {end} are not in the buffer, or in another message as well"),
        hint: None,
    })
}

/// From the first to the last of ranges that are equally long, and each begins where the one before ends.
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
