//! How long processes that meet wait for each other, and what they say of it.

use std::sync::Arc;
use std::time::Duration;

use super::run::Run;
use crate::comm::{WaitNotices, WaitReporter};
use crate::fault;

/// How long the first waits for the last.
const MEET_WITHIN: Duration = Duration::from_mins(2);
const HURRIED: Duration = Duration::from_secs(10);

/// Waits that last so long say whom they are for.
const FIRST_SAID: Duration = Duration::from_secs(5);
const SAID_SOON: Duration = Duration::from_secs(2);
const SAID_AGAIN: Duration = Duration::from_secs(30);

#[must_use]
pub fn meet_within() -> Duration {
    fault::wait_time(MEET_WITHIN, HURRIED)
}

/// Says what this process waits for.
pub fn teller(run: &Run<'_>) -> impl Fn(&str) + Send + Sync + use<> {
    let progress = Arc::clone(run.progress);
    move |words| progress.outcome(words)
}

/// Says what this process waits for by itself: after a while, or with `-v` at once.
pub fn wait_reporter(run: &Run<'_>) -> WaitReporter {
    let WaitNotices { first, again, .. } = patience(Duration::ZERO, &|_| {});
    let first = if run.progress.is_verbose() { Duration::ZERO } else { first };
    WaitReporter { first, again, tell: Arc::new(teller(run)) }
}

/// Reports a long wait for a process that this one has met.
pub fn slow_reporter(run: &Run<'_>) -> WaitReporter {
    WaitReporter { first: SAID_AGAIN, again: SAID_AGAIN, tell: Arc::new(teller(run)) }
}

pub fn patience(limit: Duration, tell: &(dyn Fn(&str) + Sync)) -> WaitNotices<'_> {
    let [first, again] = [FIRST_SAID, SAID_AGAIN].map(|usual| fault::wait_time(usual, SAID_SOON));
    WaitNotices { limit, first, again, tell }
}
