//! Names that a network file system answers for from its cache.
//!
//! A process may be told for up to a minute that a name does not exist, or still does, after another node has changed
//! that. A state that can be concludes a look at once, wherever it is. One that cannot be is looked at again for as long
//! as such caches last, and the file system is made to look the names up in between. Invariant: on a local file system
//! nothing here takes time.

use std::ffi::OsStr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::destination::{GONE, Place};
use super::{Claim, Pace, Staging};
use crate::comm::Wait;
use crate::error::Result;
use crate::exec::Stop;
use crate::storage::{AnchoredPath, afresh, filesystem};

/// The context of a look at the file system that may be repeated.
#[derive(Clone, Copy)]
pub(super) struct Looking<'a> {
    pub claim: &'a Claim,
    pub pace: &'a Pace,
    pub stop: &'a Stop,
}

impl Place {
    /// Returns how long the file system may answer from a cache.
    pub fn cached_for(&self, pace: &Pace) -> Duration {
        let caches = *self.caches.get_or_init(|| filesystem::caches_names(&self.parent));
        if caches { pace.cached_for } else { Duration::ZERO }
    }

    /// Makes the names beside the destination those that the folder lists. Waits where the file system takes time for
    /// that, and does without in the end.
    ///
    /// # Errors
    /// `Stopped`
    pub fn refresh(&self, looking: Looking<'_>) -> Result<()> {
        // NFS asks the server for the names in a folder that is opened.
        let _ = self.folder.open_folder();
        if self.cached_for(looking.pace).is_zero() {
            return Ok(());
        }
        let what = format!("waiting for the file system to show what is at {}", self.destination.display());
        self.confirm(looking, &what, || Ok(self.are_names_as_listed().then_some(()))).map(drop)
    }

    fn are_names_as_listed(&self) -> bool {
        let are_as_listed = || {
            // A folder that cannot be listed contradicts nothing.
            let Ok(listed) = self.folder.names() else { return true };
            let is_listed = |path: &AnchoredPath| listed.iter().any(|name| name == path.file_name());
            self.paths().iter().all(|path| path.exists() == is_listed(path))
        };
        are_as_listed() || {
            self.look_up();
            are_as_listed()
        }
    }

    fn paths(&self) -> [AnchoredPath; 3] {
        [self.target(), self.partial(), self.old()]
    }

    /// Makes the file system look up the names beside the destination.
    pub fn look_up(&self) {
        let paths = self.paths();
        let names: Vec<&OsStr> = paths.iter().map(AnchoredPath::file_name).collect();
        // Whoever finds one that a killed process has left deletes it.
        let _ = afresh::look_up(&self.folder, &names, self.unique(GONE).file_name());
    }

    /// Repeats `look` until it finds something, for as long as the file system may answer from a cache. `what` is
    /// `waiting for WHAT`.
    ///
    /// # Errors
    /// `Stopped`, those of `look`.
    pub fn confirm<T>(
        &self,
        looking: Looking<'_>,
        what: &str,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut nap = looking.pace.nap();
        let wait = Wait::begin(looking.claim.reporter.patience(self.cached_for(looking.pace)));
        loop {
            if let Some(found) = look()? {
                return Ok(Some(found));
            }
            if wait.is_over() {
                return Ok(None);
            }
            looking.stop.check_signal()?;
            if wait.is_due() {
                wait.say(what, Some("network file systems cache names"));
            }
            nap.take();
        }
    }
}

impl Staging {
    pub(super) fn looking<'a>(&'a self, stop: &'a Stop) -> Looking<'a> {
        Looking { claim: &self.claim, pace: &self.pace, stop }
    }

    /// Returns whether the partial folder and the output are gone for longer than caches last, so that another program has
    /// removed them.
    ///
    /// # Errors
    /// `Stopped`, `Io`
    pub(super) fn is_gone_for_good(&self, stop: &Stop, has_landed: impl Fn() -> bool) -> Result<bool> {
        if self.is_gone.load(Ordering::Relaxed) || self.place.cached_for(&self.pace).is_zero() {
            return Ok(true);
        }
        let what = format!("waiting for the file system to show what became of {}", self.partial.display());
        let found = self.place.confirm(self.looking(stop), &what, || {
            self.place.look_up();
            Ok((self.find()?.is_some() || has_landed()).then_some(()))
        })?;
        self.is_gone.store(found.is_none(), Ordering::Relaxed);
        Ok(found.is_none())
    }

    /// Repeats a look at what other processes have written until it finds that complete, for as long as the file system
    /// may answer from a cache. Gives whether it did.
    ///
    /// # Errors
    /// `Stopped`, those of `look`.
    pub fn confirm(&self, stop: &Stop, what: &str, mut look: impl FnMut() -> Result<bool>) -> Result<bool> {
        let what = format!("waiting for the file system to show {what} in {}", self.partial.display());
        let found = self.place.confirm(self.looking(stop), &what, || Ok(look()?.then_some(())))?;
        Ok(found.is_some())
    }
}

/// The time since which every look has found an impossible state.
#[derive(Debug, Default)]
pub(super) struct Doubt(Option<Instant>);

impl Doubt {
    /// Notes one more such look. Gives for how long it has been so.
    pub fn note(&mut self) -> Duration {
        self.0.get_or_insert_with(Instant::now).elapsed()
    }

    /// Notes a look that has found something possible.
    pub fn clear(&mut self) {
        self.0 = None;
    }
}
