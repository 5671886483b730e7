//! What stands where work is to begin, and whether to join it, to throw it away, to wait or to refuse.
//!
//! Looks, acts and looks again until there is nothing left to act on: every act (make, take a lease, throw away) is
//! decided by the file system, so of two processes that act on the same look one finds that it was beaten.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use super::admission::{Verdict, judge};
use super::cache::{Doubt, Looking};
use super::commit::recover;
use super::destination::{ASIDE, DRAFT, GONE, Place};
use super::lease::{Lease, LeaseName, Role, Seen};
use super::lease_monitor::Holding;
use super::liveness::{Life, Watch};
use super::names::{is_gone, unique};
use super::partial::{DATA, Found, Partial, Planned};
use super::stale_leases::Earlier;
use super::{Begun, Claim, Pace, Plan, Shape, Staging, plan_xattr};
use crate::error::{Error, Result};
use crate::exec::Stop;
use crate::fault;
use crate::storage::lookup;

pub(super) fn begin(
    destination: &Path,
    shape: Shape,
    claim: &Claim,
    plan: &Plan<'_>,
    pace: Pace,
    stop: &Stop,
) -> Result<Begun> {
    refuse_folder(destination, shape)?;
    let place = Place::of(destination)?;
    fs::create_dir_all(&place.parent).map_err(Error::io("create", &place.parent))?;
    place.spare.hold(&place.folder)?;
    let watch = Watch::new(pace.dead_after);
    let (since, unclear) = (Instant::now(), Doubt::default());
    let mut beginning = Beginning { place, shape, claim, plan, pace, stop, watch, since, unclear, made: None };
    beginning.refuse_restart_of_strangers()?;
    beginning.place.sweep(&[GONE]);
    if !beginning.place.cached_for(&pace).is_zero() {
        // An earlier run has used the same names.
        beginning.place.look_up();
    }
    let begun = beginning.run();
    match &begun {
        Ok(Begun::Work(_)) => {}
        // One that was killed as others were at it, or after them, has left a draft that nobody makes anything of.
        Ok(Begun::Done) => beginning.place.sweep(&[DRAFT]),
        Err(_) => beginning.leave(),
    }
    begun
}

struct Beginning<'a> {
    place: Place,
    shape: Shape,
    claim: &'a Claim,
    plan: &'a Plan<'a>,
    pace: Pace,
    stop: &'a Stop,
    watch: Watch,
    since: Instant,
    unclear: Doubt,
    /// The partial folder that this process has made.
    made: Option<String>,
}

enum Next {
    Begun(Begun),
    /// Something was done, or beaten: look at once.
    Again,
    /// Somebody else has to do something.
    Later,
}

impl Beginning<'_> {
    fn run(&mut self) -> Result<Begun> {
        let mut nap = self.pace.nap();
        loop {
            match self.step()? {
                Next::Begun(begun) => return Ok(begun),
                Next::Again => nap = self.pace.nap(),
                Next::Later => nap.take(),
            }
            self.stop.check()?;
        }
    }

    /// Where nothing comes of it, a folder that this process made, and that nobody has come to, is litter.
    fn leave(&mut self) {
        self.place.spare.give_back();
        let Ok(Found::Partial(found)) = Found::at(&self.place.partial(), self.shape) else { return };
        if self.made.as_ref() == Some(&found.plan.id) && found.leases.is_empty() {
            let _ = self.discard(Some(&found));
        }
    }

    fn step(&mut self) -> Result<Next> {
        self.place.refresh(Looking { claim: self.claim, pace: &self.pace, stop: self.stop })?;
        let found = Found::at(&self.place.partial(), self.shape)?;
        if !matches!(found, Found::Unclear) {
            self.unclear.clear();
        }
        match found {
            Found::Nothing => self.start(),
            Found::Unclear if self.unclear.note() < self.place.cached_for(&self.pace) => Ok(Next::Later),
            Found::Unclear => Err(self.place.junk(self.claim)),
            Found::Junk => {
                recover(&self.place)?;
                if self.claim.restart { self.throw_away(None) } else { Err(self.place.junk(self.claim)) }
            }
            Found::Partial(partial) => self.meet(partial),
        }
    }

    /// Nobody is there.
    fn start(&mut self) -> Result<Next> {
        recover(&self.place)?;
        let is_done =
            || self.claim.takes_what_is_done() && plan_xattr::is(&self.place.destination, self.plan.fingerprint);
        match check_destination(&self.place, self.shape, self.claim) {
            _ if is_done() => return Ok(Next::Begun(Begun::Done)),
            free => free?,
        }
        if self.claim.restart && self.claim.part.index != 0 {
            return self.wait_for_first();
        }
        let plan = Planned::new(self.plan, self.claim, unique());
        // Known before, as a folder that was made and cannot be synced is to go, too.
        self.made = Some(plan.id.clone());
        let is_made = self.place.make(&plan, self.plan.about, self.claim.sync)?;
        Ok(if is_made { Next::Again } else { Next::Later })
    }

    fn meet(&mut self, found: Partial) -> Result<Next> {
        let now = Instant::now();
        let lives: Vec<(LeaseName, Life)> =
            found.leases.iter().map(|seen| (seen.name, self.watch.life(seen, now))).collect();
        let is_alive = |life: Life| move |(_, other): &&(LeaseName, Life)| *other == life;
        let alive = lives.iter().find(is_alive(Life::Alive)).map(|(name, _)| *name);
        let is_unsure = lives.iter().any(|(_, life)| *life == Life::Unsure);
        if lives.iter().any(|(name, life)| name.is_restart() && *life != Life::Dead) {
            // It is about to go.
            return Ok(Next::Later);
        }
        if found.is_published {
            // Whoever published it takes it away, or died before.
            return if alive.is_some() || is_unsure { Ok(Next::Later) } else { self.throw_away(Some(&found)) };
        }
        let is_same = found.plan.is_of(self.plan);
        let is_of_launch = self.claim.run.is_some() && self.claim.run == found.plan.run && !self.claim.part.is_alone();
        let is_ours = is_of_launch || self.made.as_ref() == Some(&found.plan.id);
        if is_same && (!self.claim.restart || is_ours) {
            // Whoever made it is about to take its lease: of two numbers of parts that start at once, that one is in force.
            let is_new = found.leases.is_empty() && found.plan.parts != self.claim.part.of;
            if is_new && self.since.elapsed() < self.pace.dead_after {
                return Ok(Next::Later);
            }
            return match judge(&lives, self.claim.part) {
                Verdict::Rival(name) => Err(self.place.another_run(&found, name)),
                Verdict::Watch => Ok(Next::Later),
                Verdict::Resume { .. } if !self.claim.resume => {
                    self.recover_unless(alive.is_some() || is_unsure)?;
                    Err(self.place.unfinished(self.claim))
                }
                Verdict::Join { generation } | Verdict::Resume { generation } => {
                    self.recover_unless(alive.is_some() || is_unsure)?;
                    if !self.is_free(&found)? {
                        return Ok(Next::Later);
                    }
                    // A live one is of this run. Of the others that will show.
                    let is_alive = |seen: &&Seen| lives.contains(&(seen.name, Life::Alive));
                    let earlier = found.leases.iter().filter(|seen| !is_alive(seen)).cloned().collect();
                    self.join(found, generation, Earlier::new(earlier, self.claim))
                }
            };
        }
        if let Some(name) = alive {
            return Err(self.place.another_run(&found, name));
        }
        if is_unsure {
            return Ok(Next::Later);
        }
        // It may have died within a swap, and what it was to replace is not to stay away until --restart.
        recover(&self.place)?;
        if self.claim.restart {
            return self.throw_away(Some(&found));
        }
        if is_same {
            return Err(self.place.unfinished(self.claim));
        }
        let difference = found.plan.difference(self.plan, &self.place.partial());
        Err(self.place.of_another(&difference, self.claim))
    }

    /// Take the lease, and look whether it is one on what was judged.
    fn join(&self, judged: Partial, generation: u32, earlier: Earlier) -> Result<Next> {
        let partial = self.place.partial();
        let name = LeaseName { role: Role::Part(self.claim.part), generation };
        let Some(mut lease) = Lease::take(&partial, name)? else { return Ok(Next::Later) };
        let restart_of = |partial: &Partial| partial.leases.iter().map(|seen| seen.name).find(LeaseName::is_restart);
        let is_same = |found: &Partial| {
            found.plan.id == judged.plan.id && !found.is_published && restart_of(found) == restart_of(&judged)
        };
        let found = match Found::at(&partial, self.shape) {
            Ok(Found::Partial(found)) if is_same(&found) => found,
            other => {
                lease.retract();
                return other.map(|_| Next::Again);
            }
        };
        let known: Vec<LeaseName> = judged.leases.iter().map(|seen| seen.name).collect();
        let of_others = |seen: &&Seen| matches!(seen.name.role, Role::Part(part) if part.of != self.claim.part.of);
        let rival = found.leases.iter().filter(of_others).find(|seen| !known.contains(&seen.name));
        if let Some(rival) = rival {
            let error = self.place.another_run(&found, rival.name);
            lease.retract();
            return Err(error);
        }
        let holding = Arc::new(Holding {
            destination: self.place.destination.clone(),
            partial: partial.clone(),
            plan: judged.plan,
            part: self.claim.part,
            lease: name,
            known,
            dead_after: self.pace.dead_after,
            is_begun: false.into(),
        });
        let lost = Arc::new(OnceLock::new());
        let (held, tell, stop) = (Arc::clone(&holding), Arc::clone(&lost), self.stop.clone());
        let look = move || {
            // Until work begins, this one looks for itself.
            if held.is_begun.load(Ordering::Relaxed)
                && let Ok(Some(loss)) = held.look()
            {
                let _ = tell.set(loss);
                stop.lose(held.words(loss));
            }
        };
        let started = lease.start(self.pace.beat, look);
        let sync = || if self.claim.sync { partial.sync().map_err(Error::io("sync", &partial)) } else { Ok(()) };
        match started.and_then(|()| sync()) {
            // All was done, and whoever seals was faster.
            Err(Error::Io { source, .. }) if is_gone(&source) => return Ok(Next::Again),
            Err(error) => {
                // Without its lease, the folder is removed by the process that made it.
                lease.retract();
                return Err(error);
            }
            Ok(()) => {}
        }
        let work = partial.join(holding.plan.work());
        let staging = Staging {
            place: self.place.clone(),
            shape: self.shape,
            claim: self.claim.clone(),
            fingerprint: self.plan.fingerprint,
            holding,
            pace: self.pace,
            data: work.join(DATA),
            journal: work.join(name.journal()),
            work,
            partial,
            lease: Some(lease),
            lost,
            watch: Mutex::new(Watch::new(self.pace.dead_after)),
            earlier,
            settled: Mutex::default(),
            waiting: OnceLock::new(),
            is_gone: false.into(),
            identity: OnceLock::new(),
            replaced: Mutex::default(),
            is_published: false.into(),
        };
        fault::point("begin-leased");
        // Another run may have been done between the first look and the lease.
        if !self.is_free(&found)? {
            return Ok(Next::Again);
        }
        staging.holding.is_begun.store(true, Ordering::Relaxed);
        Ok(Next::Begun(Begun::Work(staging)))
    }

    /// Throw away what is dead: junk, or what was judged so.
    fn throw_away(&mut self, judged: Option<&Partial>) -> Result<Next> {
        let is_published = judged.is_some_and(|partial| partial.is_published);
        if self.claim.part.index != 0 && !is_published { self.wait_for_first() } else { self.discard(judged) }
    }

    fn discard(&mut self, judged: Option<&Partial>) -> Result<Next> {
        if !self.place.throw_away(self.shape, judged, &mut self.watch)? {
            return Ok(Next::Later);
        }
        self.place.sweep(if self.claim.restart { &[GONE, ASIDE] } else { &[GONE] });
        Ok(Next::Again)
    }

    fn wait_for_first(&self) -> Result<Next> {
        if self.since.elapsed() < self.pace.start_within {
            return Ok(Next::Later);
        }
        Err(Error::usage(
            format!("part 0 of {} has not started to write {}", self.claim.part.of, self.place.destination.display()),
            "with --restart the others wait for part 0, which throws away what is there: start it",
        ))
    }

    fn recover_unless(&self, somebody_is_alive: bool) -> Result<()> {
        // A live process can be in the middle of a swap.
        if somebody_is_alive { Ok(()) } else { recover(&self.place) }
    }

    /// Parts cannot tell whether what they find was made by a sibling or is what they are to throw away.
    fn refuse_restart_of_strangers(&self) -> Result<()> {
        if !self.claim.restart || self.claim.can_restart() {
            return Ok(());
        }
        Err(Error::usage(
            "--restart is for one process, or for several that a launcher starts together, not for --parts",
            format!("remove {} first, then start the parts without --restart", self.place.partial().display()),
        ))
    }

    /// Whether `found` can be worked on; not if it has been published since, which is what stands at the destination.
    fn is_free(&self, found: &Partial) -> Result<bool> {
        let Err(error) = check_destination(&self.place, self.shape, self.claim) else { return Ok(true) };
        match Found::at(&self.place.partial(), self.shape)? {
            Found::Partial(now) if now.plan.id == found.plan.id && !now.is_published => Err(error),
            _ => Ok(false),
        }
    }
}

/// What stands at the destination may be replaced.
pub(super) fn check_destination(place: &Place, shape: Shape, claim: &Claim) -> Result<()> {
    let destination = &place.destination;
    let Ok(metadata) = destination.symlink_metadata() else { return Ok(()) };
    // Rolling back may have brought a folder.
    refuse_folder(destination, shape)?;
    let empty_folder = metadata.is_dir() && lookup::list(destination)?.is_empty();
    if empty_folder || claim.overwrite {
        return Ok(());
    }
    Err(place.is_taken(claim, &plan_xattr::of(destination)))
}

/// One file does not take the place of a folder, nor that of a name that is said to be one by a slash at its end.
pub(super) fn refuse_folder(destination: &Path, shape: Shape) -> Result<()> {
    let is = match shape {
        Shape::File if destination.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) => "is",
        Shape::File if destination.as_os_str().as_encoded_bytes().ends_with(b"/") => "is to be",
        Shape::File | Shape::Folder => return Ok(()),
    };
    Err(Error::usage(
        format!("{} {is} a folder, and one file is to be written", destination.display()),
        format!("give it a name there, such as {}", destination.join("model.pt").display()),
    ))
}
