//! The error of a run that a signal stops, and its exit codes.

use std::path::{Path, PathBuf};

use crate::comm::error::Peer;

/// The exit code that a shell gives to a command that INT ended.
const INTERRUPTED: u8 = 130;

/// `EX_TEMPFAIL` of sysexits.h.
const TRY_AGAIN: u8 = 75;

/// Signals that stop a run, and the exit code of a run that keeps nothing, which is the one that a shell gives to a command
/// that the signal ended.
pub const STOPPING: [(&str, u8); 4] = [("INT", INTERRUPTED), ("TERM", 143), ("USR1", 138), ("USR2", 140)];

/// An error of a run that a signal stopped, at this process or another one; nothing was published.
#[derive(Debug, thiserror::Error)]
#[error("stopped by {signal}{}; {}", at_peer(rank.as_ref()), what_is_left(kept.as_ref()))]
#[non_exhaustive]
pub struct Stopped {
    /// The name of the signal: `TERM`.
    pub signal: &'static str,
    /// The exit code of a program that ends with this error.
    pub exit: u8,
    /// The process that got the signal, if it is another one.
    pub rank: Option<Peer>,
    /// The folder with the finished work that another run can resume, and a text with its amount.
    pub kept: Option<(PathBuf, String)>,
}

impl Stopped {
    /// Returns the error for one of [`STOPPING`].
    pub(crate) fn by(which: usize, rank: Option<Peer>) -> Self {
        let (signal, exit) = STOPPING[which];
        Self { signal, exit, rank, kept: None }
    }

    /// Adds the folder with the finished work and its amount. The exit code then becomes 75, so that a scheduler runs the
    /// same command again, except after INT: a person reads the message.
    #[must_use]
    pub(crate) fn keeping(self, path: &Path, much: String) -> Self {
        let exit = if self.exit == INTERRUPTED { self.exit } else { TRY_AGAIN };
        Self { exit, kept: Some((path.to_path_buf(), much)), ..self }
    }
}

fn at_peer(peer: Option<&Peer>) -> String {
    peer.map_or_else(String::new, |peer| format!(" at {peer}"))
}

fn what_is_left(kept: Option<&(PathBuf, String)>) -> String {
    kept.map_or_else(
        || String::from("nothing was written at the destination"),
        |(path, much)| format!("{} keeps {much}; use options::resume to continue", path.display()),
    )
}
