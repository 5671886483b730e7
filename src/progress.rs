//! Reports of a long operation while it runs: bytes done, phases and messages.
//!
//! The library prints nothing. It passes byte counts and messages to a [`Progress`], which the caller implements, for
//! example for a terminal, a log or a test. Progress is counted in bytes.

use std::sync::Arc;

pub use crate::exec::Phase;
use crate::exec::Reporter;

/// Receives progress and messages. Every method has a default that ignores its arguments.
///
/// Worker threads call the methods. They call [`advance`](Self::advance) once for each block of some megabytes.
pub trait Progress: Send + Sync {
    /// Begins a task, such as `writing`, over `bytes` bytes. A task ends before the next task begins.
    fn begin(&self, _task: &'static str, _bytes: u64) {}

    /// Counts `bytes` bytes of the task as completed by an earlier run of the program, which this run resumes.
    fn skip(&self, _bytes: u64) {}

    /// Counts `bytes` more bytes of the task as completed by this run.
    fn advance(&self, _bytes: u64) {}

    /// Records that the task enters another phase.
    fn enter(&self, _phase: Phase) {}

    /// Ends the task.
    fn end(&self) {}

    /// Receives one message, without a line break at its end.
    fn message(&self, _level: Level, _text: &str) {}

    /// Returns true if messages about waiting for other processes are sent immediately, and false if they are sent only
    /// after some seconds.
    fn is_verbose(&self) -> bool {
        false
    }
}

impl<P: Progress + ?Sized> Progress for Arc<P> {
    fn begin(&self, task: &'static str, bytes: u64) {
        (**self).begin(task, bytes);
    }

    fn skip(&self, bytes: u64) {
        (**self).skip(bytes);
    }

    fn advance(&self, bytes: u64) {
        (**self).advance(bytes);
    }

    fn enter(&self, phase: Phase) {
        (**self).enter(phase);
    }

    fn end(&self) {
        (**self).end();
    }

    fn message(&self, level: Level, text: &str) {
        (**self).message(level, text);
    }

    fn is_verbose(&self) -> bool {
        (**self).is_verbose()
    }
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The message is a detail, for verbose output.
    Detail,
    /// The message is a fact about the result, and all processes of a run report the same fact.
    Note,
    /// The message describes the result of this process. Other processes of the run may report another result.
    Outcome,
    /// The message is about a result that may differ from what the user wanted.
    Warning,
}

/// A [`Progress`] that ignores all progress and messages.
#[derive(Clone, Copy, Debug)]
pub struct NoProgress;

impl Progress for NoProgress {}

impl dyn Progress + '_ {
    /// Sends a note.
    pub(crate) fn note(&self, text: &str) {
        self.message(Level::Note, text);
    }

    /// Sends a detail.
    pub(crate) fn detail(&self, text: &str) {
        self.message(Level::Detail, text);
    }

    /// Sends the result of this process.
    pub(crate) fn outcome(&self, text: &str) {
        self.message(Level::Outcome, text);
    }

    /// Sends a warning.
    pub(crate) fn warning(&self, text: &str) {
        self.message(Level::Warning, text);
    }
}

/// One task of a [`Progress`]. When this value is dropped, the task ends.
pub(crate) struct Task<'a>(&'a dyn Progress);

impl<'a> Task<'a> {
    /// Begins a task over `bytes` bytes.
    pub fn start(progress: &'a dyn Progress, task: &'static str, bytes: u64) -> Self {
        progress.begin(task, bytes);
        Self(progress)
    }

    /// Counts `bytes` bytes of the task as completed by an earlier run of the program, which this run resumes.
    pub fn skip(&self, bytes: u64) {
        self.0.skip(bytes);
    }
}

impl Reporter for Task<'_> {
    fn advance(&self, bytes: u64) {
        self.0.advance(bytes);
    }

    fn phase(&self, phase: Phase) {
        self.0.enter(phase);
    }
}

impl Drop for Task<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
