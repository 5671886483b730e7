//! Whether the process of a lease is alive.
//!
//! On the node where it runs, `/proc` tells at once. From elsewhere a lease is watched: one that does not change for 20
//! seconds of the watcher's own clock is dead. Clocks of two nodes are never compared.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use super::lease::{LeaseName, Process, Record, Seen, start_of};

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
    since: Instant,
    /// It was seen to change.
    has_moved: bool,
}

impl Watch {
    pub fn new(dead_after: Duration) -> Self {
        Self { here: Process::this(), dead_after, seen: HashMap::new() }
    }

    pub fn life(&mut self, seen: &Seen, now: Instant) -> Life {
        if let Some(known) = seen.record.as_ref().and_then(|record| told_at_once(record, &self.here)) {
            return known;
        }
        let fresh = || Last { bytes: seen.bytes.clone(), since: now, has_moved: false };
        let last = self.seen.entry(seen.name).or_insert_with(fresh);
        if last.bytes != seen.bytes {
            *last = Last { has_moved: true, ..fresh() };
        }
        match now.saturating_duration_since(last.since) < self.dead_after {
            false => Life::Dead,
            true if last.has_moved => Life::Alive,
            true => Life::Unsure,
        }
    }
}

fn told_at_once(record: &Record, here: &Process) -> Option<Life> {
    if record.phase.is_over() {
        return Some(Life::Dead);
    }
    let there = &record.process;
    let is_here = !there.boot.is_empty() && there.boot == here.boot && there.pid_namespace == here.pid_namespace;
    if !is_here {
        return None;
    }
    match start_of(there.pid) {
        Ok(Some(start)) if start == there.start => Some(Life::Alive),
        Ok(_) => Some(Life::Dead),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !is_hidden(there.pid) => Some(Life::Dead),
        Err(_) => None,
    }
}

/// proc(5), hidepid: processes of others may be there and not be seen.
fn is_hidden(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}
