//! Streams and events. A stream is a thread that runs queued work in order, after a delay.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

type Work = Box<dyn FnOnce() + Send>;

pub struct Stream {
    device: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Work>,
    /// True while the stream runs a work item that it has taken from its queue.
    working: bool,
    closed: bool,
}

impl Stream {
    pub fn new(device: usize, delay: Duration) -> Arc<Self> {
        let stream = Arc::new(Self { device, queue: Mutex::default(), changed: Condvar::new() });
        let worker = Arc::clone(&stream);
        thread::spawn(move || {
            while let Some(work) = worker.next() {
                thread::sleep(delay);
                work();
                worker.queue().working = false;
                worker.changed.notify_all();
            }
        });
        stream
    }

    pub fn device(&self) -> usize {
        self.device
    }

    pub fn push(&self, work: impl FnOnce() + Send + 'static) {
        self.queue().waiting.push_back(Box::new(work));
        self.changed.notify_all();
    }

    pub fn is_idle(&self) -> bool {
        self.queue().is_idle()
    }

    pub fn synchronize(&self) {
        let idle = self.changed.wait_while(self.queue(), |queue| !queue.is_idle());
        drop(idle.unwrap_or_else(PoisonError::into_inner));
    }

    /// Lets the thread of the stream end after all queued work is done.
    pub fn close(&self) {
        self.queue().closed = true;
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Work> {
        let queue = self.changed.wait_while(self.queue(), |queue| queue.waiting.is_empty() && !queue.closed);
        let mut queue = queue.unwrap_or_else(PoisonError::into_inner);
        let work = queue.waiting.pop_front()?;
        queue.working = true;
        Some(work)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && !self.working
    }
}

/// An event of CUDA. The event counts how many times it was recorded, and how many of these records the streams have
/// reached.
#[derive(Default)]
pub struct Event {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    recorded: u64,
    passed: u64,
}

impl Event {
    pub fn record(self: &Arc<Self>, stream: &Stream) {
        let number = {
            let mut counts = self.counts();
            counts.recorded += 1;
            counts.recorded
        };
        let event = Arc::clone(self);
        stream.push(move || {
            let mut counts = event.counts();
            counts.passed = counts.passed.max(number);
            event.changed.notify_all();
        });
    }

    /// Makes the later work of a stream wait until the latest record of this event is reached.
    pub fn hold(self: &Arc<Self>, stream: &Stream) {
        let (event, number) = (Arc::clone(self), self.counts().recorded);
        stream.push(move || event.wait_for(number));
    }

    pub fn is_passed(&self) -> bool {
        let counts = self.counts();
        counts.passed >= counts.recorded
    }

    pub fn synchronize(&self) {
        let number = self.counts().recorded;
        self.wait_for(number);
    }

    fn wait_for(&self, number: u64) {
        let passed = self.changed.wait_while(self.counts(), |counts| counts.passed < number);
        drop(passed.unwrap_or_else(PoisonError::into_inner));
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
