//! Whether the process of a lease is alive.
//!
//! On the node where it runs, `/proc` tells at once. From elsewhere a lease is watched: one that does not change for 20
//! seconds of the watcher's own clock is dead. Clocks of two nodes are never compared, and time in which nobody looked,
//! as a file system hung, or the watcher was stopped itself, says nothing about who is watched.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::lease::{LeaseName, Record, Seen};
use crate::comm::Process;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Alive,
    Dead,
    /// Not known yet: it has to be watched.
    Unsure,
}

/// What was seen of leases, and when.
#[derive(Debug)]
pub(super) struct Watch {
    here: Process,
    dead_after: Duration,
    seen: HashMap<LeaseName, Last>,
}

#[derive(Debug)]
struct Last {
    bytes: Vec<u8>,
    looked: Instant,
    /// For how long it was watched and did not change.
    still: Duration,
    /// It was seen to change.
    has_moved: bool,
}

/// Between two looks no more than this counts as watched.
const MOST_BETWEEN_LOOKS: Duration = Duration::from_secs(3);

impl Watch {
    pub fn new(dead_after: Duration) -> Self {
        Self { here: Process::this(), dead_after, seen: HashMap::new() }
    }

    pub fn life(&mut self, seen: &Seen, now: Instant) -> Life {
        let here = &self.here;
        let fresh = || Last { bytes: seen.bytes.clone(), looked: now, still: Duration::ZERO, has_moved: false };
        let last = self.seen.entry(seen.name).or_insert_with(fresh);
        if last.bytes == seen.bytes {
            last.still += now.saturating_duration_since(last.looked).min(MOST_BETWEEN_LOOKS);
            last.looked = now;
        } else {
            *last = Last { has_moved: true, ..fresh() };
        }
        if let Some(known) = seen.record.as_ref().and_then(|record| told_at_once(record, here)) {
            return known;
        }
        match last.still < self.dead_after {
            false => Life::Dead,
            true if last.has_moved => Life::Alive,
            true => Life::Unsure,
        }
    }

    /// For how long a lease was watched and did not change.
    pub fn still(&self, name: LeaseName) -> Duration {
        self.seen.get(&name).map_or(Duration::ZERO, |last| last.still)
    }
}

fn told_at_once(record: &Record, here: &Process) -> Option<Life> {
    if record.phase.is_over() {
        return Some(Life::Dead);
    }
    record.process.is_alive(here).map(|lives| if lives { Life::Alive } else { Life::Dead })
}
