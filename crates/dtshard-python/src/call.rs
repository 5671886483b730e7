//! One call of the library from Python: the library works on another thread, while the calling thread delivers progress,
//! messages and signals to Python. The interpreter is free for other threads of the program.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

use crate::error;
use dtshard::{Level, Progress, Result, Stop};

/// The time between two deliveries of progress, messages and signals.
const INTERVAL: Duration = Duration::from_millis(100);

/// The number of SIGINT, which stops the work if Python raises an exception, such as `KeyboardInterrupt`.
const SIGINT: i32 = 2;

/// A call of the library.
pub struct Call {
    stop: Stop,
    seen: Arc<Seen>,
    callback: Option<Py<PyAny>>,
}

/// The progress and the messages that the library has sent.
#[derive(Default)]
pub struct Seen {
    done: AtomicU64,
    total: AtomicU64,
    messages: Mutex<Vec<(Level, String)>>,
}

impl Progress for Seen {
    fn begin(&self, _task: &'static str, bytes: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(bytes, Ordering::Relaxed);
    }

    fn skip(&self, bytes: u64) {
        self.advance(bytes);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn message(&self, level: Level, text: &str) {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.push((level, error::spell(text)));
    }
}

impl Call {
    /// Makes a call with its own stop flag. `callback` receives the number of bytes that are done, and of all bytes.
    pub fn new(callback: Option<Py<PyAny>>) -> Self {
        Self::with_stop(callback, Stop::default())
    }

    /// Makes a call that `stop` stops.
    pub fn with_stop(callback: Option<Py<PyAny>>, stop: Stop) -> Self {
        stop.signal().store(0, Ordering::Relaxed);
        Self { stop, seen: Arc::default(), callback }
    }

    /// Returns the flag that stops the work.
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }

    /// Returns the receiver of progress and messages.
    pub fn progress(&self) -> Arc<Seen> {
        Arc::clone(&self.seen)
    }

    /// Adds a warning to the messages.
    pub fn warn(&self, text: &str) {
        self.seen.message(Level::Warning, text);
    }

    /// Runs `work` on another thread, and waits for its result.
    ///
    /// # Errors
    /// The error of `work`, and any exception that a signal handler or the callback raises; the work is then stopped.
    pub fn run<T: Send>(&self, py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
        let finished = py.detach(|| {
            thread::scope(|scope| {
                let (sender, receiver) = mpsc::sync_channel(1);
                scope.spawn(move || sender.send(work()));
                let mut raised = None;
                loop {
                    match receiver.recv_timeout(INTERVAL) {
                        Ok(result) => return raised.map_or(Ok(result), Err),
                        // The scope panics again when it joins the thread.
                        Err(RecvTimeoutError::Disconnected) => panic!("the thread of the library panicked"),
                        Err(RecvTimeoutError::Timeout) if raised.is_some() => {}
                        Err(RecvTimeoutError::Timeout) => {
                            raised = Python::attach(|py| self.deliver(py)).err();
                            if raised.is_some() {
                                self.stop.raise(SIGINT);
                            }
                        }
                    }
                }
            })
        })?;
        self.deliver(py)?;
        finished.map_err(|failed| error::exception(py, &failed))
    }

    /// Gives Python its signals, the new messages (to the logger `dtshard`; warnings are warnings), and the progress.
    fn deliver(&self, py: Python<'_>) -> PyResult<()> {
        py.check_signals()?;
        let messages = std::mem::take(&mut *self.seen.messages.lock().unwrap_or_else(PoisonError::into_inner));
        if !messages.is_empty() {
            let receiver = py.import("dtshard._error")?;
            for (level, text) in messages {
                let name = match level {
                    Level::Detail => "debug",
                    Level::Note | Level::Outcome => "info",
                    Level::Warning => "warning",
                };
                receiver.call_method1("message", (name, text))?;
            }
        }
        let total = self.seen.total.load(Ordering::Relaxed);
        if let Some(callback) = self.callback.as_ref().filter(|_| total > 0) {
            callback.call1(py, (self.seen.done.load(Ordering::Relaxed), total))?;
        }
        Ok(())
    }
}
