//! Throwing away a partial folder, and leaving none where nothing came of it.
//!
//! Whoever throws away takes a lease on that, in the very folder that was judged dead, and looks again. Who comes meanwhile
//! sees that lease, or is seen by its holder: one of them steps back, so what lives is never moved.
//!
//! A run that fails before anything is recorded has made nothing that another one could go on with, and what it leaves
//! would only be in the way of that. Invariant: nothing that is recorded is thrown away here, nor a folder that somebody
//! works in, or is still to come (back) to and hear why the others are gone.

use std::time::Instant;

use super::destination::{GONE, Place};
use super::lease::{Lease, LeaseName, Role, Seen, read_leases};
use super::liveness::{Life, Watch};
use super::names::is_gone;
use super::partial::{Found, Partial};
use super::{Shape, Staging};
use crate::comm::Part;
use crate::error::{Error, Result};
use crate::fault;
use crate::publish::journal;
use crate::storage::AnchoredPath;

impl Staging {
    /// Leave after an error. The last one to go takes away what nothing is recorded in.
    pub fn abandon(self) {
        let (place, shape, id) = (self.place.clone(), self.shape, self.holding.plan.id.clone());
        let (part, work, pace, earlier) = (self.claim.part, self.work.clone(), self.pace, self.earlier.clone());
        // Those that do not wait need no word of why a part is gone.
        let awaited = if self.claim.parts_wait { part.of } else { 0 };
        // Of two that leave at once each says so before it looks: one of them at least sees that both are gone.
        drop(self);
        let Ok(Found::Partial(found)) = Found::at(&place.partial(), shape) else { return };
        let mut watch = Watch::new(pace.dead_after);
        let is_over = |seen: &Seen| watch.life(seen, Instant::now()) == Life::Dead;
        let has_come = |index| {
            let is_its = |seen: &&Seen| seen.name.role == Role::Part(Part { index, ..part });
            found.leases.iter().find(is_its).is_some_and(|seen| !earlier.has(seen))
        };
        let is_unused = found.plan.id == id
            && !found.is_published
            && found.leases.iter().all(is_over)
            && (0..awaited).all(has_come)
            && journal::is_empty(&work).unwrap_or(false);
        if is_unused && place.throw_away(shape, Some(&found), &mut watch).unwrap_or(false) {
            place.sweep(&[GONE]);
        }
    }
}

impl Place {
    /// Throw away junk, or what was judged, if it is still that. Nothing is deleted yet. False where somebody else is at it.
    ///
    /// # Errors
    /// `Io`
    pub fn throw_away(&self, shape: Shape, judged: Option<&Partial>, watch: &mut Watch) -> Result<bool> {
        let partial = self.partial();
        let lease = if partial.metadata().is_ok_and(|found| found.is_dir()) {
            let Some(name) = next_restart(&partial, watch)? else { return Ok(false) };
            let Some(lease) = Lease::take(&partial, name)? else { return Ok(false) };
            Some(lease)
        } else {
            None
        };
        let is_judged = match (judged, Found::at(&partial, shape)) {
            (None, Ok(Found::Junk)) => true,
            (Some(judged), Ok(Found::Partial(found))) => judged.is_still(&found),
            _ => false,
        };
        if !is_judged {
            lease.into_iter().for_each(Lease::retract);
            return Ok(false);
        }
        fault::point("restart-judged");
        self.let_go(&partial)?;
        fault::point("restart-moved");
        Ok(true)
    }
}

fn next_restart(partial: &AnchoredPath, watch: &mut Watch) -> Result<Option<LeaseName>> {
    let leases = match read_leases(partial) {
        Err(error) if is_gone(&error) => return Ok(None),
        leases => leases.map_err(Error::io("read", partial))?,
    };
    let Some(seen) = leases.iter().find(|seen| seen.name.is_restart()) else {
        return Ok(Some(LeaseName { role: Role::Restart, generation: 0 }));
    };
    let is_dead = watch.life(seen, Instant::now()) == Life::Dead;
    Ok(is_dead.then(|| LeaseName { generation: seen.name.generation.saturating_add(1), ..seen.name }))
}

impl Partial {
    /// Nobody has come since.
    fn is_still(&self, now: &Self) -> bool {
        let others = |partial: &Self| -> Vec<(LeaseName, Vec<u8>)> {
            let leases = partial.leases.iter().filter(|seen| !seen.name.is_restart());
            leases.map(|seen| (seen.name, seen.bytes.clone())).collect()
        };
        self.plan == now.plan && others(self) == others(now)
    }
}
