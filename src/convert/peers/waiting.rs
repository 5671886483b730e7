//! Time limits for processes that wait for each other, and reports about long waits.

use std::sync::Arc;
use std::time::Duration;

use super::super::run::Run;
use crate::comm::{WaitNotices, WaitReporter};
use crate::fault;

/// Maximum time that a process waits for all other processes to connect.
const MEET_WITHIN: Duration = Duration::from_mins(2);
const HURRIED: Duration = Duration::from_secs(10);

/// Time after which a process first reports that it is waiting.
const FIRST_SAID: Duration = Duration::from_secs(5);
const SAID_SOON: Duration = Duration::from_secs(2);
const SAID_AGAIN: Duration = Duration::from_secs(30);

/// Returns the time limit for connecting the processes.
pub fn meet_within() -> Duration {
    fault::wait_time(MEET_WITHIN, HURRIED)
}

/// Returns a function that prints a report about a wait.
pub fn wait_printer(run: &Run<'_>) -> impl Fn(&str) + Send + Sync + use<> {
    let progress = Arc::clone(run.progress);
    move |words| progress.outcome(words)
}

/// Returns a reporter that prints which files or parts this process waits for. The first report comes after a delay, or
/// immediately with `-v`.
pub fn wait_reporter(run: &Run<'_>) -> WaitReporter {
    let WaitNotices { first, again, .. } = wait_notices(Duration::ZERO, &|_| {});
    let first = if run.progress.is_verbose() { Duration::ZERO } else { first };
    WaitReporter { first, again, print: Arc::new(wait_printer(run)) }
}

/// Returns a reporter that prints a message every 30 seconds while this process waits for connected processes.
pub fn slow_reporter(run: &Run<'_>) -> WaitReporter {
    WaitReporter { first: SAID_AGAIN, again: SAID_AGAIN, print: Arc::new(wait_printer(run)) }
}

/// Returns the time limit of a wait, and the times after which `print` reports the wait for the first time and again.
pub fn wait_notices(limit: Duration, print: &(dyn Fn(&str) + Sync)) -> WaitNotices<'_> {
    let [first, again] = [FIRST_SAID, SAID_AGAIN].map(|usual| fault::wait_time(usual, SAID_SOON));
    WaitNotices { limit, first, again, print }
}
