//! The identity of a process: a name that is valid on every node, and a check whether the process is alive.
//!
//! `/proc` shows whether a process on the same node is alive. For processes on other nodes, or in other containers,
//! this is unknown.

use std::fmt;
use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

use super::node::{this_boot, this_host};

/// The identity of a process. With it, another process on the same node can check whether the process is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub host: String,
    /// The id of the current boot of the node. This field, `host` and `pid_namespace` are empty if the system does not
    /// provide them.
    pub boot: String,
    pub pid_namespace: String,
    pub pid: u32,
    /// The start time of the process, in clock ticks since the node started.
    pub start: u64,
}

/// Formats the process for messages, for example as `n1, pid 4711`.
impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, pid {}", self.host, self.pid)
    }
}

impl Process {
    #[must_use]
    pub fn this() -> Self {
        let pid = std::process::id();
        Self {
            host: this_host().unwrap_or_default(),
            boot: this_boot().unwrap_or_default(),
            pid_namespace: fs::read_link("/proc/self/ns/pid")
                .map(|link| link.to_string_lossy().into_owned())
                .unwrap_or_default(),
            pid,
            start: start_of(pid).ok().flatten().unwrap_or_default(),
        }
    }

    /// Returns whether this process is alive. `here` is the calling process. Returns `None` if the answer is unknown,
    /// for example because the process is on another node.
    pub fn is_alive(&self, here: &Self) -> Option<bool> {
        let is_here = !self.boot.is_empty() && self.boot == here.boot && self.pid_namespace == here.pid_namespace;
        if !is_here {
            return None;
        }
        match start_of(self.pid) {
            Ok(Some(start)) if start == self.start => Some(true),
            Ok(_) => Some(false),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_hidden(self.pid) => Some(false),
            Err(_) => None,
        }
    }
}

/// Returns the start time of a process, in clock ticks since the node started. Returns `None` if the process has ended
/// but is still listed (a zombie), and an error if it is not listed.
fn start_of(pid: u32) -> io::Result<Option<u64>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // proc(5) describes the fields. The name in parentheses may contain any characters. The state follows after the
    // name, and the start time is field 22.
    let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace();
    let ended = matches!(fields.next(), Some("Z" | "X" | "x"));
    let start = fields.nth(18).and_then(|field| field.parse().ok());
    if ended { Ok(None) } else { start.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into()) }
}

/// Returns true if a process with this id exists although `/proc` may not show it, because it belongs to another user:
/// proc(5), `hidepid`.
fn is_hidden(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}
