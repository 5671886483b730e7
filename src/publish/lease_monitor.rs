//! Finding out that somebody else has what this process works on.
//!
//! A process that was stopped, or cut off from the file system, is thought dead after a while and its part is taken over.
//! It cannot know until it looks, so it looks with every beat, and before it gives up anything that may not be its own.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::Planned;
use super::lease::{LeaseName, Role, latest_leases, read_lease};
use super::names::is_gone;
use crate::comm::Part;
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

/// Why a process that works must not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    TakenOver,
    Gone,
}

/// What a process holds, for as long as nobody else does.
#[derive(Debug)]
pub(super) struct Holding {
    pub destination: PathBuf,
    pub partial: AnchoredPath,
    pub plan: Planned,
    pub part: Part,
    pub lease: LeaseName,
    /// Leases that were there when this one was taken.
    pub known: Vec<LeaseName>,
    pub dead_after: Duration,
    /// What is lost before is no loss: whoever begins looks again.
    pub is_begun: AtomicBool,
}

impl Holding {
    /// Whether somebody else has what is ours. Asks for names alone, as every process looks every other second.
    ///
    /// # Errors
    /// `Io` where that cannot be known.
    pub fn look(&self) -> Result<Option<Lost>> {
        let read = || {
            // Opening it makes network file systems ask the server.
            self.partial.join(self.plan.work()).hold()?;
            for name in latest_leases(&self.partial)? {
                let is_later = name.role == self.lease.role && name.generation > self.lease.generation;
                if is_later || self.is_rival(name)? {
                    return Ok(Some(Lost::TakenOver));
                }
            }
            Ok(None)
        };
        match read() {
            Err(error) if is_gone(&error) => Ok(Some(Lost::Gone)),
            found => found.map_err(Error::io("look into", &self.partial)),
        }
    }

    /// Whether somebody works on another division of the same output, and came later.
    fn is_rival(&self, name: LeaseName) -> std::io::Result<bool> {
        if !matches!(name.role, Role::Part(theirs) if theirs.of != self.part.of) || self.known.contains(&name) {
            return Ok(false);
        }
        // Without a beat it may yet find out that it must not stay.
        match read_lease(&self.partial, name) {
            Err(error) if is_gone(&error) => Ok(false),
            seen => Ok(seen?.record.is_some_and(|record| record.beat > 0)),
        }
    }

    pub fn error(&self, lost: Lost) -> Error {
        let (message, hint) = self.words(lost);
        Error::usage(message, hint)
    }

    /// The message and the hint.
    pub fn words(&self, lost: Lost) -> (String, String) {
        let Part { index, of } = self.part;
        let (destination, partial) = (self.destination.display(), self.partial.display());
        match lost {
            Lost::TakenOver => (
                format!("another run has taken over part {index} of {of} of {destination}"),
                format!(
                    "this process was not seen alive for {} s, or another one was started for its part; the others go \
                     on in {partial}",
                    self.dead_after.as_secs(),
                ),
            ),
            Lost::Gone => (
                format!("{partial} is gone, and {destination} was not published from it"),
                "something else removed it while it was being written; start again".into(),
            ),
        }
    }
}
