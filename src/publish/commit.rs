//! Sealing and publishing: the rename of the output to the destination is the only commit.
//!
//! The process that holds the seal lease publishes. A second process may take over because the first one seems dead.
//! The two processes then write the same bytes. The rename by the second process fails because the output is no longer
//! in the partial folder, and counts as success because the result is identical. A process that replaces a checkpoint
//! compares identities (device, inode, birth time), so it never moves or deletes a checkpoint that another process has
//! published. The next run finishes or rolls back an interrupted replacement.
//!
//! ```text
//! --overwrite:  DST -> .DST.dtshard-old    data -> DST    .DST.dtshard-old -> backup, then trash
//! ```

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::destination::{BACKUP, Destination, FileIdentity, TRASH, is_gone};
use super::lease::{Lease, LeaseLost, LeaseName, LeaseRole, LeaseState};
use super::partial_folder::output;
use super::{DestinationKind, Staging, published_xattr};
use crate::error::{Error, Result};
use crate::exec::Stop;
use crate::fault;
use crate::storage::AnchoredPath;

type Check = dyn Fn(&Path) -> Result<()> + Send + Sync;

/// A check that rejects a destination which must not be replaced. The check runs right before the destination is moved
/// aside, because any user may have put a file there during the run. The caller provides the check, because this module
/// does not know checkpoint formats.
#[derive(Clone)]
pub struct ReplaceCheck(Arc<Check>);

impl ReplaceCheck {
    pub fn new(check: impl Fn(&Path) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(check))
    }
}

impl fmt::Debug for ReplaceCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplaceCheck")
    }
}

/// The right to seal the output (to complete its checksums) and to publish it. This process has the right as long as
/// this value exists.
#[derive(Debug)]
pub struct Seal<'a> {
    pub(super) staging: &'a Staging,
    pub(super) lease: Lease,
}

/// The maximum number of times that this process tries to publish, if other processes replace the destination each
/// time.
const MAX_TRIES: usize = 16;

impl Staging {
    /// Tries to acquire the right to seal. Returns `None` if another live process holds the right or has published the
    /// output. Waits until the state of the other process is known, because a process that left too early could leave
    /// the output unpublished.
    ///
    /// # Errors
    /// `Io` if a lease cannot be written; `Stopped`.
    pub fn try_seal(&self, stop: &Stop) -> Result<Option<Seal<'_>>> {
        let mut nap = self.pace.nap();
        let generation = loop {
            stop.check_signal()?;
            let Some(found) = self.find()?.filter(|found| !found.is_published) else { return Ok(None) };
            match found.lease(LeaseRole::Seal).map(|seen| (self.lease_state(seen), seen)) {
                None => break 0,
                Some((LeaseState::Dead, seen)) => break seen.name.generation.saturating_add(1),
                Some((LeaseState::Alive, _)) => return Ok(None),
                Some((LeaseState::Unsure, _)) => nap.take(),
            }
        };
        let name = LeaseName { role: LeaseRole::Seal, generation };
        let Some(mut lease) = Lease::take(&self.partial, name)? else { return Ok(None) };
        lease.beat()?;
        lease.start(self.pace.beat, || ())?;
        fault::point("seal-leased");
        Ok(Some(Seal { staging: self, lease }))
    }

    /// Cleans up after the output was renamed to the destination. A second call has no effect.
    pub(super) fn tidy(&self, sync: bool) -> Result<()> {
        let folder = &self.destination.folder;
        if sync {
            folder.sync().map_err(Error::io("sync", folder))?;
        }
        fault::point("commit-synced-parent");
        // If the partial folder no longer exists, another run may be replacing the destination at this moment, so this
        // process deletes nothing.
        if self.find()?.is_none() {
            return Ok(());
        }
        let cleared = self.identity.get().map_or(Ok(()), |mine| self.clear_old(*mine));
        fault::point("commit-removed-old");
        self.destination.rename_away(&self.partial, TRASH)?;
        fault::point("commit-left");
        cleared
    }

    /// Renames the output to the destination. An existing checkpoint is first renamed to another name.
    fn move_in(&self) -> Result<()> {
        let (destination, target) = (self.destination.path.display(), self.destination.target());
        for _ in 0..MAX_TRIES {
            let source = output(&self.work, self.shape).map_err(Error::io("find", &self.data))?;
            let Some((source, mine)) = source.and_then(|path| FileIdentity::of(&path).map(|mine| (path, mine))) else {
                return if self.has_landed() { Ok(()) } else { Err(self.holding.error(LeaseLost::Gone)) };
            };
            let _ = self.identity.set(mine);
            if self.claim.overwrite && target.exists() {
                self.make_way(mine)?;
            }
            match source.rename_new(&target) {
                Ok(()) => return Ok(()),
                // Another process has published, or another program created a file with the name of the destination.
                Err(error) if is_gone(&error) && !source.exists() => {}
                Err(error) if self.claim.overwrite && is_taken(&error) => {}
                Err(error) => {
                    // If this rename fails, the next run restores the old checkpoint.
                    let _ = self.destination.old().rename_new(&target);
                    return Err(if is_taken(&error) {
                        Error::usage(
                            format!("{destination} appeared while it was being written"),
                            "another program writes there; choose another destination",
                        )
                    } else {
                        Error::io("publish", &self.destination.path)(error)
                    });
                }
            }
        }
        Err(Error::usage(
            format!("{destination} was replaced repeatedly by another program"),
            "choose another destination",
        ))
    }

    /// Renames the checkpoint at the destination to the name `.NAME.dtshard-old`, so that the output can take its
    /// place.
    fn make_way(&self, mine: FileIdentity) -> Result<()> {
        let (target, old) = (self.destination.target(), self.destination.old());
        self.clear_old(mine)?;
        fault::point("commit-cleared");
        if FileIdentity::of(&target) == Some(mine) {
            return Ok(());
        }
        (self.claim.replace_check.0)(target.path())?;
        match target.rename(&old) {
            // The destination no longer exists, or another process is replacing it.
            Err(error) if is_gone(&error) || is_taken(&error) => return Ok(()),
            done => done.map_err(Error::io("rename", &target))?,
        }
        let moved = FileIdentity::of(&old);
        if moved == Some(mine) {
            // Another process has published since the check, so its output is moved back.
            let _ = old.rename_new(&target);
        }
        *self.replaced.lock().unwrap_or_else(PoisonError::into_inner) = moved;
        fault::point("commit-moved-old");
        Ok(())
    }

    /// Deletes the replaced checkpoint at `.NAME.dtshard-old`. If the checkpoint with this name is the output of this
    /// run, the function does not delete it.
    fn clear_old(&self, mine: FileIdentity) -> Result<()> {
        let old = self.destination.old();
        let Some(found) = FileIdentity::of(&old).filter(|found| *found != mine) else { return Ok(()) };
        // This process moved the checkpoint to this name. So it may be deleted, even if another user owns it.
        if *self.replaced.lock().unwrap_or_else(PoisonError::into_inner) != Some(found) {
            old.own_entry().map_err(Error::io("stat", &old))?;
        }
        let Some(backup) = self.destination.rename_away(&old, BACKUP)? else { return Ok(()) };
        if FileIdentity::of(&backup) == Some(mine) {
            return backup.rename_new(&self.destination.target()).map_err(Error::io("put back", &backup));
        }
        self.destination.discard(&backup)
    }
}

impl Seal<'_> {
    /// Publishes the finished output at the destination. Also succeeds if another process has already published the
    /// output.
    ///
    /// # Errors
    /// `Io`, `Usage` and the errors of the [`ReplaceCheck`]. If the rename to the destination fails, a checkpoint that
    /// was there before remains or is restored. If an error occurs after this rename, the output is published
    /// nevertheless.
    pub fn publish(self, sync: bool) -> Result<()> {
        let staging = self.staging;
        let found = output(&staging.work, staging.shape);
        if let Some(output) = found.map_err(Error::io("find what was written in", &staging.work))? {
            let opened = match staging.shape {
                DestinationKind::Folder => output.open_folder(),
                DestinationKind::File => output.open().map(OwnedFd::from),
            };
            match opened {
                Err(error) if is_gone(&error) => {}
                opened => {
                    let opened = opened.map_err(Error::io("open", &output))?;
                    published_xattr::write(&opened, staging.fingerprint);
                    fault::point("commit-marked");
                    if sync {
                        sync_output(&output, opened, staging.shape)?;
                    }
                }
            }
        }
        fault::point("commit-synced");
        staging.move_in()?;
        fault::point("commit-renamed");
        // From here on the commit is final.
        staging.is_published.store(true, Ordering::Relaxed);
        let _ = self.lease.finish();
        staging.tidy(sync)
    }
}

fn sync_output(output: &AnchoredPath, opened: OwnedFd, shape: DestinationKind) -> Result<()> {
    let synced = match shape {
        DestinationKind::Folder => output.sync_all(),
        // The bytes of the file are already synced, but its extended attribute is not.
        DestinationKind::File => File::from(opened).sync_all(),
    };
    match synced {
        Err(error) if is_gone(&error) => Ok(()),
        synced => synced.map_err(Error::io("sync", output)),
    }
}

fn is_taken(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty)
}

/// Finishes or rolls back a replacement that an earlier run did not finish.
pub(super) fn finish_replacement(destination: &Destination) -> Result<()> {
    let (target, old) = (destination.target(), destination.old());
    let found = old.own_entry().map_err(Error::io("stat", &old))?;
    let Some(replaced) = found.map(|metadata| FileIdentity::new(&metadata)) else { return Ok(()) };
    if target.exists() {
        let Some(backup) = destination.rename_away(&old, BACKUP)? else { return Ok(()) };
        if FileIdentity::of(&backup) == Some(replaced) {
            return destination.discard(&backup);
        }
        // Another run has begun a replacement since the check, so this process has renamed the old checkpoint of that
        // run. It is renamed back; the name is free, because only one replacement runs at a time.
        return backup.rename_new(&old).map_err(Error::io("put back", &old));
    }
    match old.rename_new(&target) {
        // Another process was faster: it has moved the old checkpoint, or the destination exists again.
        Err(_) if !old.exists() || target.exists() => Ok(()),
        done => done.map_err(Error::io("rename", &old)),
    }
}
