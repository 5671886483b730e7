//! Whether the process of a lease is alive.
//!
//! On the node where it runs, `/proc` tells at once. From elsewhere a lease is watched: one that does not change for 20
//! seconds of the watcher's own clock is dead. Clocks of two nodes are never compared, and time in which nobody looked,
//! as a file system hung, or the watcher was stopped itself, says nothing about who is watched.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::lease::{LeaseName, Record, Seen};
use crate::storage::node::this_boot;

/// A process, as others on its node can find it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub host: String,
    /// Empty where the system does not tell, as are the others.
    pub boot: String,
    pub pid_namespace: String,
    pub pid: u32,
    /// In clock ticks since the node started.
    pub start: u64,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} on {}", self.pid, self.host)
    }
}

impl Process {
    #[must_use]
    pub fn this() -> Self {
        let line = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
        let pid = std::process::id();
        Self {
            host: line("/proc/sys/kernel/hostname"),
            boot: this_boot().unwrap_or_default(),
            pid_namespace: fs::read_link("/proc/self/ns/pid")
                .map(|link| link.to_string_lossy().into_owned())
                .unwrap_or_default(),
            pid,
            start: start_of(pid).ok().flatten().unwrap_or_default(),
        }
    }

    /// Whether it is known to have ended: of those of other nodes that is never known.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.life(&Self::this()) == Some(Life::Dead)
    }

    /// `None` where that cannot be told from here.
    fn life(&self, here: &Self) -> Option<Life> {
        let is_here = !self.boot.is_empty() && self.boot == here.boot && self.pid_namespace == here.pid_namespace;
        if !is_here {
            return None;
        }
        match start_of(self.pid) {
            Ok(Some(start)) if start == self.start => Some(Life::Alive),
            Ok(_) => Some(Life::Dead),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_hidden(self.pid) => Some(Life::Dead),
            Err(_) => None,
        }
    }
}

/// When a process started, `None` for one that has ended and only waits for its parent to notice.
fn start_of(pid: u32) -> io::Result<Option<u64>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // proc(5): the name in parentheses may hold anything; behind it the state, and the start as field 22.
    let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace();
    let ended = matches!(fields.next(), Some("Z" | "X" | "x"));
    let start = fields.nth(18).and_then(|field| field.parse().ok());
    if ended { Ok(None) } else { start.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into()) }
}

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
    if record.phase.is_over() { Some(Life::Dead) } else { record.process.life(here) }
}

/// proc(5), hidepid: processes of others may be there and not be seen.
fn is_hidden(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}
