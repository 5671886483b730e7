//! Rules for waiting for other processes: a time limit, checks that end a wait early, and messages that report a wait.
//!
//! If the terminal stays silent, the user does not know which process is missing until the time limit. Therefore a
//! process reports which processes it waits for: the first time after a short delay, and later less often.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Copy)]
pub struct WaitNotices<'a> {
    pub limit: Duration,
    /// The delay before the first report. Later reports follow after each interval of `again`.
    pub first: Duration,
    pub again: Duration,
    pub print: &'a (dyn Fn(&str) + Sync),
}

impl WaitNotices<'_> {
    /// Returns rules with this time limit and without any report.
    #[must_use]
    pub fn silent(limit: Duration) -> Self {
        Self { limit, first: limit, again: limit, print: &|_| {} }
    }
}

/// A reporter that tells the user which process or event this process waits for. The fields are those of
/// [`WaitNotices`].
#[derive(Clone)]
pub struct WaitReporter {
    /// The delay before the first report; see [`WaitNotices::first`].
    pub first: Duration,
    /// The interval between two later reports.
    pub again: Duration,
    pub print: Arc<dyn Fn(&str) + Send + Sync>,
}

impl WaitReporter {
    #[must_use]
    pub fn silent() -> Self {
        Self { first: Duration::MAX, again: Duration::MAX, print: Arc::new(|_| {}) }
    }

    pub fn notices(&self, limit: Duration) -> WaitNotices<'_> {
        WaitNotices { limit, first: self.first, again: self.again, print: &*self.print }
    }
}

impl fmt::Debug for WaitReporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitReporter").field("first", &self.first).field("again", &self.again).finish_non_exhaustive()
    }
}

/// One wait of a process for other processes, with its time limit.
pub struct Wait<'a> {
    notices: WaitNotices<'a>,
    begun: Instant,
    next: Cell<Duration>,
}

impl<'a> Wait<'a> {
    #[must_use]
    pub fn begin(notices: WaitNotices<'a>) -> Self {
        Self { notices, begun: Instant::now(), next: Cell::new(notices.first) }
    }

    pub fn until(&self) -> Instant {
        self.begun + self.notices.limit
    }

    pub fn is_over(&self) -> bool {
        Instant::now() >= self.until()
    }

    /// Formats the time limit, for example as `120 s`.
    pub fn limit(&self) -> String {
        format!("{} s", self.notices.limit.as_secs())
    }

    /// Returns true if a report is due now, and then schedules the next report.
    pub fn is_due(&self) -> bool {
        let elapsed = self.begun.elapsed();
        let is_due = elapsed >= self.next.get() && elapsed < self.notices.limit;
        if is_due {
            self.next.set(elapsed + self.notices.again);
        }
        is_due
    }

    /// Reports the wait, and returns the text of the report. `what` is a text such as `waiting for ...`. `why` is the
    /// cause of the delay, if it is known.
    pub fn say(&self, what: &str, why: Option<&str>) -> String {
        let why = why.map(|why| format!(": {why}")).unwrap_or_default();
        let words = format!("{what} ({} of at most {}){why}", self.begun.elapsed().as_secs(), self.limit());
        (self.notices.print)(&words);
        words
    }
}
