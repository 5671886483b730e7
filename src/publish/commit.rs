//! Sealing and publishing.
//!
//! One process seals, whoever has the lease on it. Should a second one come to (the first was thought dead), both write
//! the same bytes, and of both renames of the output to the destination one finds it gone: that one was beaten, which is
//! as good. Replacing goes by identity (device and inode): neither of two processes that replace moves aside or deletes
//! what the other one has published.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::destination::Place;
use super::lease::{Lease, LeaseName, Role};
use super::lease_monitor::Lost;
use super::liveness::Life;
use super::names::{Identity, is_gone};
use super::partial::output;
use super::{Shape, Staging, plan_xattr};
use crate::error::{Error, Result};
use crate::exec::Stop;
use crate::fault;
use crate::storage::AnchoredPath;

/// The right to seal, as long as it is held.
#[derive(Debug)]
pub struct Seal<'a> {
    pub(super) staging: &'a Staging,
    pub(super) lease: Lease,
}

/// How often others may come between before it is called an error.
const TRIES: usize = 16;

impl Staging {
    /// The right to seal what all have done; `None` where another process that lives has it, or has published. Waits
    /// until that is known: whoever goes away in doubt may leave it undone.
    ///
    /// # Errors
    /// `Io`, `Stopped`
    pub fn try_seal(&self, stop: &Stop) -> Result<Option<Seal<'_>>> {
        let mut nap = self.pace.nap();
        let generation = loop {
            stop.check_signal()?;
            let Some(found) = self.find()?.filter(|found| !found.is_published) else { return Ok(None) };
            match (self.sealer(&found), found.leases.iter().find(|seen| seen.name.is_seal())) {
                (Some(Life::Dead), Some(seen)) => break seen.name.generation.saturating_add(1),
                (Some(Life::Unsure), _) => nap.take(),
                (Some(_), _) => return Ok(None),
                (None, _) => break 0,
            }
        };
        let name = LeaseName { role: Role::Seal, generation };
        let Some(mut lease) = Lease::take(&self.partial, name)? else { return Ok(None) };
        lease.start(self.pace.beat, || ())?;
        fault::point("seal-leased");
        Ok(Some(Seal { staging: self, lease }))
    }

    /// What is left to do once the output is at the destination; done twice, it is as if done once.
    pub(super) fn tidy(&self, sync: bool) -> Result<()> {
        if sync {
            self.place.folder.sync().map_err(Error::io("sync", &self.place.folder))?;
        }
        fault::point("commit-synced-parent");
        // Without the folder, another run may be in the middle of a swap by now.
        if self.find()?.is_none() {
            return Ok(());
        }
        let cleared = match self.identity.get() {
            Some(mine) => self.clear_old(*mine),
            None => Ok(()),
        };
        fault::point("commit-removed-old");
        self.place.let_go(&self.partial)?;
        fault::point("commit-left");
        cleared
    }

    /// The renames that replace what is at the destination, or put the output where nothing is.
    fn move_in(&self) -> Result<()> {
        let (destination, target) = (&self.place.destination, self.place.target());
        for _ in 0..TRIES {
            let source = output(&self.work, self.shape).map_err(Error::io("find", &self.data))?;
            let Some((source, mine)) = source.and_then(|path| Identity::of(&path).map(|mine| (path, mine))) else {
                return if self.has_landed() { Ok(()) } else { Err(self.holding.error(Lost::Gone)) };
            };
            let _ = self.identity.set(mine);
            if self.claim.overwrite && target.exists() {
                self.make_way(mine)?;
            }
            match source.rename_new(&target) {
                Ok(()) => return Ok(()),
                // Published by another one; or the way is not free any more.
                Err(error) if is_gone(&error) && !source.exists() => {}
                Err(error) if self.claim.overwrite && is_taken(&error) => {}
                Err(error) => {
                    // Best effort: the next run would roll back as well.
                    let _ = self.place.old().rename_new(&target);
                    return Err(if is_taken(&error) {
                        Error::usage(
                            format!("{} appeared while it was being written", destination.display()),
                            "something else writes there; choose another destination",
                        )
                    } else {
                        Error::io("publish", destination)(error)
                    });
                }
            }
        }
        Err(Error::usage(
            format!("{} is replaced again and again by something else", destination.display()),
            "choose another destination",
        ))
    }

    /// Move aside what is to be replaced.
    fn make_way(&self, mine: Identity) -> Result<()> {
        let (destination, old) = (self.place.target(), self.place.old());
        self.clear_old(mine)?;
        fault::point("commit-cleared");
        if Identity::of(&destination) == Some(mine) {
            return Ok(());
        }
        self.claim.replace_check.run(destination.path())?;
        match destination.rename(&old) {
            // Nothing to replace any more, or another one is at it.
            Err(error) if is_gone(&error) || is_taken(&error) => return Ok(()),
            done => done.map_err(Error::io("rename", &destination))?,
        }
        let moved = Identity::of(&old);
        if moved == Some(mine) {
            // Another one has published since the look.
            let _ = old.rename_new(&destination);
        }
        *self.replaced.lock().unwrap_or_else(PoisonError::into_inner) = moved;
        fault::point("commit-moved-old");
        Ok(())
    }

    /// Delete what was replaced, unless it is what was published.
    fn clear_old(&self, mine: Identity) -> Result<()> {
        let old = self.place.old();
        let Some(found) = Identity::of(&old).filter(|found| *found != mine) else { return Ok(()) };
        // A destination that this process moved there is replaced, whoever owns it.
        if *self.replaced.lock().unwrap_or_else(PoisonError::into_inner) != Some(found) {
            old.own_entry().map_err(Error::io("look at", &old))?;
        }
        let Some(aside) = self.place.move_aside(&old)? else { return Ok(()) };
        if Identity::of(&aside) == Some(mine) {
            return aside.rename_new(&self.place.target()).map_err(Error::io("put back", &aside));
        }
        self.place.discard(&aside)
    }
}

impl Seal<'_> {
    /// Put the finished work at the destination. That another process has done so is success, too.
    ///
    /// # Errors
    /// `Io` where a rename fails; the destination is then as it was.
    pub fn publish(self, sync: bool) -> Result<()> {
        let staging = self.staging;
        if let Some(output) =
            output(&staging.work, staging.shape).map_err(Error::io("find what was written in", &staging.work))?
        {
            let opened = match staging.shape {
                Shape::Folder => output.open_folder(),
                Shape::File => output.open().map(OwnedFd::from),
            };
            match opened {
                Err(error) if is_gone(&error) => {}
                opened => {
                    let opened = opened.map_err(Error::io("open", &output))?;
                    plan_xattr::set(&opened, staging.fingerprint);
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
        // It is there: whatever comes now, this is not undone.
        staging.is_published.store(true, Ordering::Relaxed);
        let _ = self.lease.finish();
        staging.tidy(sync)
    }
}

fn sync_output(output: &AnchoredPath, opened: OwnedFd, shape: Shape) -> Result<()> {
    let synced = match shape {
        Shape::Folder => output.sync_all(),
        // Its bytes are there already, not so its mark.
        Shape::File => File::from(opened).sync_all(),
    };
    match synced {
        Err(error) if is_gone(&error) => Ok(()),
        synced => synced.map_err(Error::io("sync", output)),
    }
}

fn is_taken(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty)
}

/// Finish or roll back a swap that an earlier run did not finish.
pub(super) fn recover(place: &Place) -> Result<()> {
    let (destination, old) = (place.target(), place.old());
    let found = old.own_entry().map_err(Error::io("look at", &old))?;
    let Some(replaced) = found.map(|metadata| Identity::new(&metadata)) else { return Ok(()) };
    if destination.exists() {
        let Some(aside) = place.move_aside(&old)? else { return Ok(()) };
        if Identity::of(&aside) == Some(replaced) {
            return place.discard(&aside);
        }
        // A swap that has begun since: the only one of its kind.
        return aside.rename_new(&old).map_err(Error::io("put back", &old));
    }
    match old.rename_new(&destination) {
        // Another one was faster.
        Err(_) if !old.exists() || destination.exists() => Ok(()),
        done => done.map_err(Error::io("rename", &old)),
    }
}
