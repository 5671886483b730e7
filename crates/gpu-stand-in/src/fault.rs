//! Injects a fault into one process, if `GPU_STAND_IN_FAULT=NAME` is set. Each fault happens at one point of the
//! program. With `NAME:3`, the fault happens when the program reaches this point for the third time.

use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::machine::Machine;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed when it initialises the driver.
    DiesLoading,
    /// The process is killed while NCCL connects the ranks: it has sent its rank and port, but nothing else. With
    /// `FailsMeeting`, NCCL fails at this point instead, and the process goes on.
    DiesMeeting,
    FailsMeeting,
    /// The process is killed in a group of operations, after it has sent its messages and before it reads any message.
    /// With `FailsInGroup`, NCCL fails at this point instead, and the process goes on.
    DiesInGroup,
    FailsInGroup,
    /// An allocation of device memory fails. With `RefusesPinned`, an allocation of pinned memory fails instead.
    RefusesMemory,
    RefusesPinned,
}

const NAMES: [(&str, Fault); 7] = [
    ("dies-loading", Fault::DiesLoading),
    ("dies-meeting", Fault::DiesMeeting),
    ("fails-meeting", Fault::FailsMeeting),
    ("dies-in-group", Fault::DiesInGroup),
    ("fails-in-group", Fault::FailsInGroup),
    ("refuses-memory", Fault::RefusesMemory),
    ("refuses-pinned", Fault::RefusesPinned),
];

/// A fault and a number n, counted from 1: the fault happens when the program reaches the point of the fault for the
/// nth time.
pub type PlannedFault = (Fault, usize);

/// Parses the value of `GPU_STAND_IN_FAULT`.
pub fn planned(text: &str) -> Option<PlannedFault> {
    let (name, time) = text.split_once(':').unwrap_or((text, "1"));
    let fault = NAMES.iter().find(|(known, _)| *known == name)?.1;
    Some((fault, time.parse().ok()?))
}

impl Fault {
    /// Counts that the program has reached the point of this fault. Returns true if the fault happens now.
    pub fn happens(self) -> bool {
        static COME_BY: AtomicUsize = AtomicUsize::new(0);
        match Machine::start().settings.fault {
            Some((planned, time)) if planned == self => COME_BY.fetch_add(1, Ordering::SeqCst) + 1 == time,
            _ => false,
        }
    }

    /// Counts that the program has reached the point of this fault. Kills the process if the fault happens now.
    pub fn strikes(self) {
        if self.happens() {
            // SAFETY: the call only sends a signal to this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_parsed_with_their_count() {
        assert_eq!(planned("dies-in-group"), Some((Fault::DiesInGroup, 1)));
        assert_eq!(planned("refuses-pinned:12"), Some((Fault::RefusesPinned, 12)));
        assert_eq!([planned(""), planned("dies"), planned("dies-meeting:soon")], [None; 3]);
    }
}
