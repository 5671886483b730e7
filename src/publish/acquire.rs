//! Acquires a part of the work. A process checks what exists at the destination. It then creates the partial folder,
//! joins the run in the existing partial folder, deletes that folder, waits, or fails.
//!
//! A process retries until it holds a lease: it reads the state of the folder, acts on the state, and reads the state
//! again. The file system decides every action (create the partial folder, acquire a lease, delete the folder). If two
//! processes act on one state of the folder, only one of them succeeds, and the other process notices that it was too
//! late.
//!
//! ```text
//! nothing ------ create -----> partial folder -- acquire lease, check again --> Work
//!    ^  \                        |    |   |
//!    |   published before: Done  |    |   another run is alive, or --resume is missing: error
//!    +--------- delete ----------+    not known whether another run is alive: watch
//! ```

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use super::commit::finish_replacement;
use super::destination::{BACKUP, Destination, TMP, TRASH, is_gone};
use super::lease::{Lease, LeaseName, LeaseRole, LeaseState, LeaseWatch, SeenLease, StaleLeases, WorkLease};
use super::partial_folder::{DATA, FoundPartial, Partial, PlanFile};
use super::{Beginning, Claim, DestinationKind, Pace, Preflight, Staging, WorkPlan, published_xattr};
use crate::comm::WaitReporter;
use crate::error::{Error, Result, StorageError};
use crate::exec::Stop;
use crate::fault;
use crate::launch::Part;
use crate::storage::lookup;

/// Decision whether a process may work in a partial folder. The decision depends on the leases in the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// The process may join the run by acquiring the lease with the number `generation`.
    Join { generation: u32 },
    /// An earlier run ended in this folder. The process may continue the work of that run by acquiring the lease with
    /// the number `generation`, but only with `--resume`.
    Resume { generation: u32 },
    /// The process must not work, because another live process works in the folder. One of these holds: both processes
    /// have the same part; they divide the work into different numbers of parts; they write different outputs; the
    /// folder must be deleted first. The value is the name of the lease of the other process.
    Conflict(LeaseName),
    /// The process must watch the leases first, because it is not known yet whether all lease holders are alive.
    Watch,
    /// The folder may be deleted or replaced: no process works in it, and it has the plan of another conversion or must
    /// be deleted.
    Replace,
}

/// Decides whether a process may work on `part`. `joins` is true if the folder has the plan of this process and must
/// not be deleted.
pub(super) fn admission(leases: &[(LeaseName, LeaseState)], part: Part, joins: bool) -> Admission {
    let part_of = |name: &LeaseName| if let LeaseRole::Part(part) = name.role { Some(part) } else { None };
    let is_conflicting = |name: &LeaseName| part_of(name).is_some_and(|other| other.of != part.of || other == part);
    let conflicting = || leases.iter().filter(|(name, _)| !joins || is_conflicting(name));
    if let Some((name, _)) = conflicting().find(|(_, state)| *state == LeaseState::Alive) {
        return Admission::Conflict(*name);
    }
    if conflicting().any(|(_, state)| *state == LeaseState::Unsure) {
        return Admission::Watch;
    }
    if !joins {
        return Admission::Replace;
    }
    let own = leases.iter().find(|(name, _)| part_of(name) == Some(part));
    let generation = own.map_or(0, |(name, _)| name.generation.saturating_add(1));
    let is_sibling = |(name, state): &(LeaseName, LeaseState)| {
        part_of(name).is_some_and(|other| other.of == part.of) && *state != LeaseState::Dead
    };
    let is_of_others = conflicting().any(|(name, _)| part_of(name) != Some(part)) && !leases.iter().any(is_sibling);
    if own.is_some() || is_of_others { Admission::Resume { generation } } else { Admission::Join { generation } }
}

fn states(found: &Partial, watch: &mut LeaseWatch) -> Vec<(LeaseName, LeaseState)> {
    let now = Instant::now();
    found.leases.iter().map(|seen| (seen.name, watch.state(seen, now))).collect()
}

/// Returns how a run would begin. Reads the state of the destination once and changes nothing.
pub(super) fn preflight(
    path: &Path,
    shape: DestinationKind,
    claim: &Claim,
    plan: &WorkPlan<'_>,
    pace: Pace,
) -> Result<Preflight> {
    refuse_folder(path, shape)?;
    let destination = Destination::new(path, pace, WaitReporter::silent())?.for_a_look();
    let outcome = match FoundPartial::at(&destination.partial(), shape)? {
        FoundPartial::Junk if !claim.restart => return Err(destination.junk(claim)),
        FoundPartial::Unclear => return Ok(Preflight::Unsure(destination.junk(claim))),
        FoundPartial::Partial(found) if !found.is_published => {
            let leases = states(&found, &mut LeaseWatch::new(pace));
            match admission(&leases, claim.part, found.plan.is_of(plan) && !claim.restart) {
                Admission::Conflict(name) => return Err(destination.another_run(&found, name)),
                Admission::Watch => return Ok(Preflight::Unsure(destination.may_be_in_use())),
                Admission::Resume { .. } if !claim.resume => return Err(destination.unfinished(claim)),
                Admission::Resume { .. } | Admission::Join { .. } => Preflight::Resumes,
                Admission::Replace if claim.restart => Preflight::Fresh,
                Admission::Replace => return Err(destination.of_another(&found, plan, claim)),
            }
        }
        // A process that was killed right after publishing may have left the partial folder, so this folder does not
        // matter here.
        FoundPartial::Nothing | FoundPartial::Partial(_)
            if claim.accepts_finished_output() && published_xattr::is(path, plan.fingerprint) =>
        {
            return Ok(Preflight::Done);
        }
        _ => Preflight::Fresh,
    };
    check_destination(&destination, shape, claim)?;
    Ok(outcome)
}

pub(super) fn acquire(
    path: &Path,
    shape: DestinationKind,
    claim: &Claim,
    plan: &WorkPlan<'_>,
    pace: Pace,
    stop: &Stop,
) -> Result<Beginning> {
    refuse_folder(path, shape)?;
    let destination = Destination::new(path, pace, claim.reporter.clone())?;
    fs::create_dir_all(&destination.parent).map_err(Error::io("create", &destination.parent))?;
    destination.reserve()?;
    let (watch, since) = (LeaseWatch::new(pace), Instant::now());
    let mut acquiring = Acquiring { destination, shape, claim, plan, pace, stop, watch, since, made: None };
    acquiring.refuse_restart_of_strangers()?;
    acquiring.destination.sweep(&[TRASH]);
    if !acquiring.destination.cached_for().is_zero() {
        // An earlier run used the same file names, so the file system may have cached them.
        acquiring.destination.look_up();
    }
    let begun = acquiring.run();
    match &begun {
        Ok(Beginning::Work(_)) => {}
        // A killed process may have left a temporary folder that it had not renamed yet.
        Ok(Beginning::Done) => acquiring.destination.sweep(&[TMP]),
        Err(_) => acquiring.leave(),
    }
    begun
}

struct Acquiring<'a> {
    destination: Destination,
    shape: DestinationKind,
    claim: &'a Claim,
    plan: &'a WorkPlan<'a>,
    pace: Pace,
    stop: &'a Stop,
    watch: LeaseWatch,
    since: Instant,
    /// The id of the partial folder that this process created; `None` if it created no partial folder.
    made: Option<String>,
}

enum NextStep {
    Begun(Beginning),
    /// This process has changed the state, or another process was faster: read the state again without delay.
    Again,
    /// Another process has to act first: read the state again after a delay.
    Later,
}

impl Acquiring<'_> {
    fn run(&mut self) -> Result<Beginning> {
        let mut nap = self.pace.nap();
        loop {
            match self.step()? {
                NextStep::Begun(begun) => return Ok(begun),
                NextStep::Again => nap = self.pace.nap(),
                NextStep::Later => nap.take(),
            }
            self.stop.check()?;
        }
    }

    /// Deletes the partial folder if this process created it and no other process works in it.
    fn leave(&mut self) {
        self.destination.release();
        let Ok(FoundPartial::Partial(found)) = FoundPartial::at(&self.destination.partial(), self.shape) else {
            return;
        };
        if self.made.as_ref() == Some(&found.plan.id) && found.leases.is_empty() {
            let _ = self.discard(Some(&found));
        }
    }

    fn step(&mut self) -> Result<NextStep> {
        self.destination.refresh(self.stop)?;
        let (partial, mut found) = (self.destination.partial(), FoundPartial::Unclear);
        let what = format!("waiting for the file system to show what is in {}", partial.display());
        self.destination.confirm(self.stop, &what, || {
            found = FoundPartial::at(&partial, self.shape)?;
            Ok(!matches!(found, FoundPartial::Unclear))
        })?;
        match found {
            FoundPartial::Nothing => self.start(),
            FoundPartial::Partial(partial) => self.meet(partial),
            FoundPartial::Unclear => Err(self.destination.junk(self.claim)),
            FoundPartial::Junk => {
                finish_replacement(&self.destination)?;
                if self.claim.restart { self.throw_away(None) } else { Err(self.destination.junk(self.claim)) }
            }
        }
    }

    /// Handles the state in which no partial folder exists. Returns `Done` if the destination already has the finished
    /// output and this run accepts it. Otherwise creates the partial folder; if the run has `--restart`, only the
    /// process of part 0 creates it.
    fn start(&mut self) -> Result<NextStep> {
        finish_replacement(&self.destination)?;
        let free = check_destination(&self.destination, self.shape, self.claim);
        if self.claim.accepts_finished_output() && published_xattr::is(&self.destination.path, self.plan.fingerprint) {
            return Ok(NextStep::Begun(Beginning::Done));
        }
        free?;
        if self.claim.restart && self.claim.part.index != 0 {
            return self.wait_for_first();
        }
        let plan = PlanFile::new(self.plan, self.claim);
        // The id is recorded before the folder is created. So a folder that was created but could not be synced is
        // deleted as well.
        self.made = Some(plan.id.clone());
        let is_made = self.destination.make(&plan, self.plan.about, self.claim.sync)?;
        Ok(if is_made { NextStep::Again } else { NextStep::Later })
    }

    fn meet(&mut self, found: Partial) -> Result<NextStep> {
        let leases = states(&found, &mut self.watch);
        let is_quiet = leases.iter().all(|(_, state)| *state == LeaseState::Dead);
        if leases.iter().any(|(name, state)| name.role == LeaseRole::Restart && *state != LeaseState::Dead) {
            // Another process is about to delete the folder.
            return Ok(NextStep::Later);
        }
        if found.is_published {
            // The process that published the output deletes the folder, unless that process died first.
            return if is_quiet { self.throw_away(Some(&found)) } else { Ok(NextStep::Later) };
        }
        let is_of_launch = self.claim.run.is_some() && self.claim.run == found.plan.run && !self.claim.part.is_alone();
        let is_ours = is_of_launch || self.made.as_ref() == Some(&found.plan.id);
        let joins = found.plan.is_of(self.plan) && (!self.claim.restart || is_ours);
        // The process that created the folder is about to acquire its lease. If processes start with two different
        // numbers of parts, the number of the creator applies.
        let is_new = found.leases.is_empty() && found.plan.parts != self.claim.part.of;
        if joins && is_new && self.since.elapsed() < self.pace.dead_after {
            return Ok(NextStep::Later);
        }
        let admission = admission(&leases, self.claim.part, joins);
        match admission {
            Admission::Conflict(name) => return Err(self.destination.another_run(&found, name)),
            Admission::Watch => return Ok(NextStep::Later),
            // If another process is alive, it may be replacing the destination at this moment.
            _ if is_quiet => finish_replacement(&self.destination)?,
            _ => {}
        }
        match admission {
            Admission::Replace if self.claim.restart => self.throw_away(Some(&found)),
            Admission::Replace => Err(self.destination.of_another(&found, self.plan, self.claim)),
            Admission::Resume { .. } if !self.claim.resume => Err(self.destination.unfinished(self.claim)),
            Admission::Join { generation } | Admission::Resume { generation } if self.is_free(&found)? => {
                // A live process belongs to this run. Other processes may be from an earlier run; this is not known
                // yet.
                let is_alive = |seen: &&SeenLease| leases.contains(&(seen.name, LeaseState::Alive));
                let stale = found.leases.iter().filter(|seen| !is_alive(seen)).cloned().collect();
                self.join(found, generation, StaleLeases::new(stale, self.claim))
            }
            _ => Ok(NextStep::Later),
        }
    }

    fn join(&self, examined: Partial, generation: u32, stale: StaleLeases) -> Result<NextStep> {
        let partial = self.destination.partial();
        let name = LeaseName { role: LeaseRole::Part(self.claim.part), generation };
        let Some(mut lease) = Lease::take(&partial, name)? else { return Ok(NextStep::Later) };
        let work = partial.join(examined.plan.work());
        let holding = Arc::new(WorkLease {
            destination: self.destination.path.clone(),
            partial: partial.clone(),
            known: examined.leases.iter().map(|seen| seen.name).collect(),
            work: work.clone(),
            part: self.claim.part,
            lease: name,
            dead_after: self.pace.dead_after,
        });
        let lost = Arc::new(OnceLock::new());
        let (held, note, stop) = (Arc::clone(&holding), Arc::clone(&lost), self.stop.clone());
        let look = move || {
            if let Ok(Some(loss)) = held.look() {
                let _ = note.set(loss);
                stop.cancel(held.message(loss));
            }
        };
        match self.may_stay(&lease, &examined, &holding) {
            Ok(true) => {
                if let Err(error) = lease.start(self.pace.beat, look) {
                    lease.retract();
                    return Err(error);
                }
            }
            other => {
                // Once this lease is removed, the process that created the folder can delete it.
                lease.retract();
                return other.map(|_| NextStep::Again);
            }
        }
        Ok(NextStep::Begun(Beginning::Work(Staging {
            destination: self.destination.clone(),
            shape: self.shape,
            claim: self.claim.clone(),
            fingerprint: self.plan.fingerprint,
            id: examined.plan.id,
            holding,
            pace: self.pace,
            data: work.join(DATA),
            journal: work.join(name.journal()),
            work,
            partial,
            lease: Some(lease),
            lost,
            watch: Mutex::new(LeaseWatch::new(self.pace)),
            stale,
            finished: Mutex::default(),
            waiting: OnceLock::new(),
            is_gone: false.into(),
            identity: OnceLock::new(),
            replaced: Mutex::default(),
            is_published: false.into(),
        })))
    }

    /// Returns whether this process may keep its new lease. The process may keep the lease if the partial folder is
    /// still the folder `examined`, and if no conflicting process has started since the folder was examined.
    fn may_stay(&self, lease: &Lease, examined: &Partial, holding: &WorkLease) -> Result<bool> {
        let partial = self.destination.partial();
        let restart_of = |partial: &Partial| partial.lease(LeaseRole::Restart).map(|seen| seen.name);
        let found = match FoundPartial::at(&partial, self.shape)? {
            FoundPartial::Partial(found)
                if found.plan.id == examined.plan.id
                    && !found.is_published
                    && restart_of(&found) == restart_of(examined) =>
            {
                found
            }
            _ => return Ok(false),
        };
        if let Some(other) = found.leases.iter().find(|seen| holding.is_of_conflicting_run(seen.name)) {
            return Err(self.destination.another_run(&found, other.name));
        }
        let sync = || if self.claim.sync { partial.sync().map_err(Error::io("sync", &partial)) } else { Ok(()) };
        match lease.beat().and_then(|()| sync()) {
            // All work was finished, and another process has published it.
            Err(Error::Storage(StorageError::Io { source, .. })) if is_gone(&source) => return Ok(false),
            beaten => beaten?,
        }
        fault::point("begin-leased");
        // Another run may have published between the first check and the creation of the lease.
        self.is_free(&found)
    }

    /// Deletes a partial folder in which no process works. If its output was not published, only the process of part 0
    /// deletes the folder, and the processes of other parts wait for that.
    fn throw_away(&mut self, examined: Option<&Partial>) -> Result<NextStep> {
        let is_published = examined.is_some_and(|partial| partial.is_published);
        if self.claim.part.index != 0 && !is_published { self.wait_for_first() } else { self.discard(examined) }
    }

    fn discard(&mut self, examined: Option<&Partial>) -> Result<NextStep> {
        if !self.destination.throw_away(self.shape, examined, &mut self.watch)? {
            return Ok(NextStep::Later);
        }
        self.destination.sweep(if self.claim.restart { &[TRASH, BACKUP] } else { &[TRASH] });
        Ok(NextStep::Again)
    }

    fn wait_for_first(&self) -> Result<NextStep> {
        if self.since.elapsed() < self.pace.start_within {
            return Ok(NextStep::Later);
        }
        Err(Error::usage(
            format!("part 0 of {} has not started to write {}", self.claim.part.of, self.destination.path.display()),
            "start part 0, because with options::restart the other parts wait until part 0 has deleted the earlier output",
        ))
    }

    /// Rejects `--restart` for parts that the user started one by one, without a launcher. The process of such a part
    /// cannot know whether the existing output is from this run (created by another part) or from an earlier run.
    fn refuse_restart_of_strangers(&self) -> Result<()> {
        if !self.claim.restart || self.claim.can_restart() {
            return Ok(());
        }
        Err(Error::usage(
            "options::restart cannot be used with options::parts, unless a launcher starts all processes together",
            format!(
                "remove {} first, then start the parts without options::restart",
                self.destination.partial().display()
            ),
        ))
    }

    /// Returns true if this process can work in the partial folder `found`. Returns false if the output of the folder
    /// has been published. Fails if the destination exists and may not be replaced.
    fn is_free(&self, found: &Partial) -> Result<bool> {
        let Err(error) = check_destination(&self.destination, self.shape, self.claim) else { return Ok(true) };
        match FoundPartial::at(&self.destination.partial(), self.shape)? {
            FoundPartial::Partial(now) if now.plan.id == found.plan.id && !now.is_published => Err(error),
            _ => Ok(false),
        }
    }
}

/// Checks that the existing destination, if any, may be replaced.
pub(super) fn check_destination(destination: &Destination, shape: DestinationKind, claim: &Claim) -> Result<()> {
    let Ok(metadata) = destination.path.symlink_metadata() else { return Ok(()) };
    // [`finish_replacement`] may have restored a folder at the destination.
    refuse_folder(&destination.path, shape)?;
    let is_empty_folder = metadata.is_dir() && lookup::list(&destination.path)?.is_empty();
    if is_empty_folder || claim.overwrite { Ok(()) } else { Err(destination.is_taken(claim)) }
}

/// Rejects writing a single file over a folder, or to a path that ends in a slash.
fn refuse_folder(path: &Path, shape: DestinationKind) -> Result<()> {
    let (is, remedy) = match shape {
        DestinationKind::File if path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) => ("is", ""),
        DestinationKind::File if path.as_os_str().as_encoded_bytes().ends_with(b"/") => {
            ("ends with /, so it names", "remove the / at the end, or ")
        }
        DestinationKind::File | DestinationKind::Folder => return Ok(()),
    };
    Err(Error::usage(
        format!("{} {is} a folder, but the output is one file", path.display()),
        format!("{remedy}give a file in this folder as DST, such as {}", path.join("model.pt").display()),
    ))
}

/// Constructors of the errors of a run that cannot begin.
impl Destination {
    fn another_run(&self, found: &Partial, name: LeaseName) -> Error {
        let record = found.leases.iter().find(|seen| seen.name == name).and_then(|seen| seen.record.as_ref());
        let who = record.map_or(String::new(), |record| match name.role {
            LeaseRole::Part(Part { of: 1, .. }) => format!(" ({})", record.process),
            LeaseRole::Part(Part { index, of }) => format!(" ({}, part {index} of {of})", record.process),
            LeaseRole::Seal | LeaseRole::Restart => String::new(),
        });
        Error::usage(
            format!("another run is writing {}{who}", self.path.display()),
            format!("wait until that run ends, or stop it; that run works in {}", self.partial().display()),
        )
    }

    fn may_be_in_use(&self) -> Error {
        Error::usage(
            format!("{} exists, and a run on another node may be working in it", self.partial().display()),
            "a real run watches it for about 20 seconds first; use options::resume to continue it if no process works \
             in it",
        )
    }

    fn in_the_way(&self, why: &str, hint: String) -> Error {
        let partial = self.partial();
        Error::usage(format!("an earlier run did not finish: {} exists{why}", partial.display()), hint)
    }

    fn unfinished(&self, claim: &Claim) -> Error {
        self.in_the_way("", format!("use options::resume to continue it, or {}", self.start_again(claim)))
    }

    fn of_another(&self, found: &Partial, plan: &WorkPlan<'_>, claim: &Claim) -> Error {
        let difference = found.plan.difference(plan, &self.partial());
        let hint = format!("{}; options::resume needs the same dtshard, SRC and options", self.start_again(claim));
        self.in_the_way(&format!(", and cannot be resumed: {difference}"), hint)
    }

    fn junk(&self, claim: &Claim) -> Error {
        let hint =
            format!("{}; options::resume can only continue a run of this dtshard version", self.start_again(claim));
        self.in_the_way(", and cannot be resumed: it has no valid plan", hint)
    }

    fn start_again(&self, claim: &Claim) -> String {
        if claim.can_restart() {
            String::from("use options::restart to delete it and start again")
        } else {
            format!("remove {} to start all parts again", self.partial().display())
        }
    }

    /// Returns the error for an existing destination. If the run accepts a destination with the finished output of its
    /// own plan, the error also states why this destination was not accepted.
    fn is_taken(&self, claim: &Claim) -> Error {
        let destination = self.path.display();
        let (message, hint) = match published_xattr::read(&self.path) {
            Some(_) if claim.accepts_finished_output() => (
                format!("{destination} exists and is complete, but was made from another source or with other options"),
                "choose another destination, or replace it with options::overwrite",
            ),
            None if claim.accepts_finished_output() => (
                format!("{destination} exists, but does not record what it was made from"),
                "if DST may be complete, check it with `dtshard verify`, also against SRC if one process sees all SRC: \
                 some file systems do not store the attribute that records the plan. Use options::overwrite to \
                 replace it",
            ),
            _ => (format!("{destination} exists"), "choose another destination, or replace it with options::overwrite"),
        };
        Error::usage(message, hint)
    }
}
