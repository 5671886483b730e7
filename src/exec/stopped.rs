//! The error of a run that a signal stops, and its exit codes.

use std::path::{Path, PathBuf};

use crate::comm::error::Peer;

/// The exit code that a shell reports for a command that SIGINT has ended.
const INTERRUPTED: u8 = 130;

/// The exit code `EX_TEMPFAIL` of sysexits.h: the command can succeed if it is run again later.
const TRY_AGAIN: u8 = 75;

/// Signals that stop a run, each with the exit code of a run that leaves nothing that `--resume` could continue: 128
/// plus the number of the signal, as a shell reports for a command that the signal has ended.
pub const STOPPING: [(&str, u8); 4] = [("INT", INTERRUPTED), ("TERM", 143), ("USR1", 138), ("USR2", 140)];

/// The error of a run that a signal stopped, in this process or another process. Nothing was published.
#[derive(Debug, thiserror::Error)]
#[error("stopped by {signal}{}; {}", at_peer(rank.as_ref()), kept_output(kept.as_ref()))]
#[non_exhaustive]
pub struct Stopped {
    /// The name of the signal: `TERM`.
    pub signal: &'static str,
    /// The exit code that a program uses if it ends with this error.
    pub exit: u8,
    /// The process that received the signal; `None` if it was this process.
    pub rank: Option<Peer>,
    /// The folder with the finished work that another run can resume, and a text with the amount of that work.
    pub kept: Option<(PathBuf, String)>,
}

impl Stopped {
    /// Returns the error for the signal with the index `which` in [`STOPPING`].
    pub(crate) fn by(which: usize, rank: Option<Peer>) -> Self {
        let (signal, exit) = STOPPING[which];
        Self { signal, exit, rank, kept: None }
    }

    /// Adds the folder `path` with the finished work, and the text `much` with the amount of that work. Sets the exit
    /// code to 75, so that a scheduler runs the same command again. If the signal was INT, the exit code stays 130,
    /// because a user interrupted the command.
    #[must_use]
    pub(crate) fn keeping(self, path: &Path, much: String) -> Self {
        let exit = if self.exit == INTERRUPTED { self.exit } else { TRY_AGAIN };
        Self { exit, kept: Some((path.to_path_buf(), much)), ..self }
    }
}

fn at_peer(peer: Option<&Peer>) -> String {
    peer.map_or_else(String::new, |peer| format!(" at {peer}"))
}

fn kept_output(kept: Option<&(PathBuf, String)>) -> String {
    kept.map_or_else(
        || String::from("nothing was written at the destination"),
        |(path, much)| format!("{} keeps {much}; use options::resume to continue", path.display()),
    )
}
