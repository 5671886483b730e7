//! Executes a planned conversion. The work is done by one process or by several processes, which can continue the work
//! of an earlier run.
//!
//! All processes with the same command compute the same plan, so each process knows its share of the output without
//! communication. A process writes the byte ranges of its part that no journal records as done, and records them. If
//! the processes wait for each other, process 0 seals and publishes the destination when everything is recorded, and
//! the others wait for this. Otherwise, the process that finishes last does it, and the others exit.

use std::path::Path;
use std::time::{Duration, Instant};

use super::byte_meter::{EarlierWork, Meter};
use super::check_journals::JournalSet;
use super::peers::Peers;
use super::peers::waiting::wait_reporter;
use super::peers::work_folder::clear_beside;
use super::prepared::Prepared;
use super::read_back::read_back;
use super::replaceable::check_replaceable;
use super::report::Outcome;
use super::run::Run;
use super::source::ConversionSource;
use super::source_options::input;
use super::space::check_space;
use crate::catalog::OutputFile;
use crate::convert::options::ConvertOptions;
use crate::error::{Error, Result};
use crate::exchange::ReductionMethod;
use crate::exec::copy::{Stats, WriteContext, copy};
use crate::exec::fingerprint::fingerprint;
use crate::exec::plan_description::PlanDescription;
use crate::exec::sidecar_files::{SidecarFile, copy_file};
use crate::exec::{Extents, Options, source_tensors};
use crate::launch::{Launch, Part};
use crate::name_list::{FEW_NUMBERS, short_list};
use crate::progress::Task;
use crate::publish::completed_work::{self, CompletedWork};
use crate::publish::seal::{check_output, has_all, is_complete, seal};
use crate::publish::work_log::{AtEnd, Log};
use crate::publish::{
    Beginning, Claim, MissingParts, OtherPart, OtherState, ReplaceCheck, Seal, Staging, Waited, WorkPlan,
};
use crate::quantity::human_bytes;

/// Writes `conversion` to `destination`. If several processes divide the work, writes only the share of this process. Returns
/// what this process wrote, and the outcome.
///
/// # Errors
/// Any error; the destination is then unchanged.
pub fn write_destination(
    conversion: &Prepared,
    args: &ConvertOptions,
    destination: &Path,
    options: &Options,
    run: &Run<'_>,
) -> Result<(Stats, Outcome)> {
    let claim = claim(conversion, args, options, run);
    let reducing = conversion.source.reducing();
    let about = about(conversion, args, reducing, run);
    let plan = plan(conversion, reducing, &about);
    // Processes that do not exchange have compared their plans before they copied files of SRC.
    let peers = conversion.source.peers.as_ref();
    if let Some(peers) = peers.filter(|peers| peers.exchange_bytes()) {
        peers.compare(plan.fingerprint)?;
    }
    let begun = Staging::begin(destination, conversion.shape, &claim, &plan, &run.stop);
    // The processes later wait for each other's parts. A process that cannot begin informs the other processes now.
    let begun = match peers.filter(|peers| !peers.exchange_bytes()) {
        Some(peers) => peers.all_ok(begun)?,
        None => begun?,
    };
    match begun {
        Beginning::Done => Ok((Stats::default(), Outcome::UpToDate)),
        Beginning::Work(staging) => {
            let records = JournalSet { conversion, staging: &staging, run, sync: options.sync };
            let producer = DestinationWriter { conversion, staging: &staging, records, args, options, run };
            let written = producer.write().inspect_err(|error| staging.announce_failure(error));
            let produced = written.and_then(|(stats, before)| producer.publish_together(stats, &before));
            // Connected processes remove the work folder when they disconnect.
            if matches!((&produced, &conversion.source.peers), (Ok((_, Outcome::Published)), None)) {
                clear_beside(destination);
            }
            match produced {
                // Another process has published the destination, after all parts were recorded or because it assumed
                // that this process was dead. Publishing moved the files that this process misses.
                Err(_) if staging.was_published(&run.stop) => Ok((Stats::default(), Outcome::UpToDate)),
                Err(Error::Stopped(stopped)) if staging.is_kept() => {
                    Err(stopped.keeping(staging.partial(), producer.kept()).into())
                }
                Err(error) if staging.is_kept() => {
                    // The hints of usage errors already mention --resume, so these errors need no note.
                    if error.kind() != "usage" && producer.has_recorded() {
                        let (place, much) = (staging.partial().display(), producer.kept());
                        run.progress.note(&format!(
                            "{place} keeps {much}; run the same command with options::resume to continue"
                        ));
                    }
                    staging.abandon();
                    Err(error)
                }
                produced => produced,
            }
        }
    }
}

/// Returns the claim of this process to work on a destination. The claim says whether the run may replace an existing
/// checkpoint, and whether it may resume or discard earlier work.
pub fn claim(conversion: &Prepared, args: &ConvertOptions, options: &Options, run: &Run<'_>) -> Claim {
    let (shape, carried) = (conversion.shape, conversion.carried.clone());
    Claim {
        overwrite: args.execute.overwrite,
        replace_check: ReplaceCheck::new(move |destination| check_replaceable(destination, shape, &carried)),
        restart: args.execute.restart,
        resume: args.execute.resume,
        part: run.launch.part,
        run: run.launch.run.clone(),
        sync: options.sync,
        parts_wait: run.launch.waits,
        reporter: wait_reporter(run),
    }
}

/// Returns the human-readable description of a plan: its options and source files.
pub fn about(
    conversion: &Prepared,
    args: &ConvertOptions,
    reducing: ReductionMethod,
    run: &Run<'_>,
) -> PlanDescription {
    let Prepared { source, carried, .. } = conversion;
    let mut options = run.labels.clone();
    if args.exchange.fast_reduce {
        options.insert(String::from("options::fast_reduce"), reducing.to_string());
    }
    PlanDescription::new(options, &source.checkpoint.files, carried, &roots(source))
}

/// Returns the plan by which other processes and later runs recognise this conversion.
pub fn plan<'a>(conversion: &Prepared, reducing: ReductionMethod, about: &'a PlanDescription) -> WorkPlan<'a> {
    let Prepared { source, reservation, carried, .. } = conversion;
    let version = env!("CARGO_PKG_VERSION");
    let fingerprint = fingerprint(version, input(&source.checkpoint), reservation, carried, &roots(source), reducing);
    WorkPlan { fingerprint, version, about }
}

fn roots(source: &ConversionSource) -> Vec<&Path> {
    source.paths_read().into_iter().map(|(_, path)| path).collect()
}

struct DestinationWriter<'a> {
    conversion: &'a Prepared,
    staging: &'a Staging,
    records: JournalSet<'a>,
    args: &'a ConvertOptions,
    options: &'a Options,
    run: &'a Run<'a>,
}

impl DestinationWriter<'_> {
    fn files(&self) -> &[OutputFile] {
        &self.conversion.reservation.files
    }

    fn part(&self) -> Part {
        self.run.launch.part
    }

    /// Returns the sidecar files that the process of `part` copies, each with its index among all sidecar files.
    fn carried_by(&self, part: Part) -> impl Iterator<Item = (u32, &SidecarFile)> {
        let is_own = move |(number, file): &(u32, &SidecarFile)| file.assigned_process(*number, part.of) == part.index;
        (0..).zip(&self.conversion.carried).filter(is_own)
    }

    /// Writes the byte ranges and sidecar files of this part that are not written yet. Also returns the work that was
    /// recorded before, because the journals of other processes may later show that some of it belongs to this run.
    fn write(&self) -> Result<(Stats, EarlierWork)> {
        let Self { conversion, staging, options, run, .. } = *self;
        let (files, part) = (self.files(), self.part());
        let verify = self.args.execute.verify;
        let own = conversion.division(part);
        let mut known = self.records.validated(&own, verify)?;
        let peers = conversion.source.peers.as_ref();
        if let Some(peers) = peers.filter(|peers| peers.reducing() == ReductionMethod::Nccl) {
            known = self.without_partial_replicas(peers)?;
        }
        let todo = own.without(&known.done);
        let before = EarlierWork::of(&known);
        let to_carry = self.carried_by(part).filter(|(number, _)| !known.carried.contains(number));
        check_space(staging.folder(), files, &todo, to_carry.map(|(_, file)| file))?;
        // An earlier run may have used fewer checks. So this run checks its complete part, including ranges that are
        // already written.
        let see_apart = peers.is_some_and(Peers::see_apart);
        let checked = if see_apart { Extents::of_files(files) } else { own };
        conversion.source.check(&source_tensors(&conversion.reservation.tensors, &checked), self.args.checks, run)?;

        // A single process that reads nothing back publishes immediately after writing, so it need not record its last
        // bytes.
        let is_brief = !staging.is_kept() && !verify;
        let at_end = if is_brief { AtEnd::Nothing } else { AtEnd::Record };
        let log = Log::new(files, &todo, staging.journal().clone(), options.sync, at_end);
        let progress = Task::start(run.progress, "writing", conversion.len_bytes());
        let meter = Meter::start(&progress, staging, &before, part)?;

        for (number, file) in self.carried_by(part) {
            if self.records.has_carried(&known, number, file, verify)? {
                meter.skip(file.len);
            } else {
                copy_file(file, staging.folder(), options.sync, &meter, &run.stop)?;
                log.carried(number);
            }
        }
        let writing = WriteContext {
            reservation: &conversion.reservation,
            folder: staging.folder(),
            log: &log,
            options,
            reporter: &meter,
            stop: &run.stop,
        };
        let stats = match peers {
            Some(peers) if peers.exchange_bytes() => {
                peers.fill(&conversion.source.checkpoint, &conversion.reservation, writing, run.progress)?
            }
            _ => copy(input(&conversion.source.checkpoint), writing)?,
        };
        if conversion.source.reducing() == ReductionMethod::Nccl {
            let bytes = human_bytes(stats.nccl_reduced_bytes);
            run.progress.detail(&format!("options::fast_reduce: {bytes} were reduced by NCCL for this process"));
        }
        staging.finish()?;
        let bytes_before = before.bytes(&staging.others()?);
        Ok((Stats { bytes_already_written: bytes_before, ..stats }, before))
    }

    /// Invalidates journal entries of reduced tensors whose elements are written in only some replicas, and returns the
    /// completed work. NCCL must reduce all replicas of a value in one operation, because otherwise the replicas may
    /// differ in their last bits. Collective.
    fn without_partial_replicas(&self, peers: &Peers) -> Result<CompletedWork> {
        // The first barrier waits until no process invalidates entries any more. The second barrier prevents that a
        // process writes before process 0 has invalidated entries.
        peers.barrier()?;
        if self.part().index == 0 {
            self.records.invalidate_partial_replicas()?;
        }
        peers.barrier()?;
        self.records.known()
    }

    /// Publishes the destination. If processes exchange data, process 0 publishes it and informs the other processes of
    /// the result; the call is then collective.
    fn publish_together(&self, stats: Stats, before: &EarlierWork) -> Result<(Stats, Outcome)> {
        let peers = self.conversion.source.peers.as_ref().filter(|peers| peers.exchange_bytes());
        let Some(peers) = peers else { return self.publish(stats, before) };
        if self.part().index > 0 {
            peers.barrier()?;
            self.staging.see_published();
            return Ok((stats, Outcome::PublishedByOther));
        }
        let published = self.publish(stats, before);
        // From here on, a process that ends cannot change the result, so an error of the barrier is ignored.
        published.as_ref().map_or_else(|error| peers.fail(error), |_| drop(peers.barrier()));
        published
    }

    /// Publishes the destination if all work is recorded. Otherwise, if the processes wait for each other, waits until
    /// process 0 has published it; if they do not wait, returns, because the process that finishes last publishes it.
    fn publish(&self, mut stats: Stats, before: &EarlierWork) -> Result<(Stats, Outcome)> {
        let (waits, part) = (self.run.launch.waits, self.part());
        // If processes wait for each other, process 0 seals and reports.
        let mut is_sealer = !waits || part.index == 0;
        loop {
            if is_sealer && self.try_publish(&mut stats)? {
                return Ok((stats, Outcome::Published));
            }
            if !waits && !part.is_alone() {
                self.check(|known| self.is_done(known, part.index))?;
                return Ok((stats, Outcome::PartDone));
            }
            match self.wait(&mut stats, before)? {
                Waited::Published => return Ok((stats, Outcome::PublishedByOther)),
                Waited::Without(missing) => self.do_without(missing)?,
                Waited::NobodySeals => {
                    is_sealer = true;
                    self.check(|known| self.is_complete(known))?;
                }
            }
        }
    }

    /// Publishes the destination, and returns true. Returns false if work is missing, if another process may still be
    /// working or has not started, or if another process is publishing.
    fn try_publish(&self, stats: &mut Stats) -> Result<bool> {
        let Self { staging, run, .. } = *self;
        // If no journal is kept, this process has written everything.
        let known = if staging.is_kept() { self.records.known_yet()? } else { None };
        let is_all_there = known.as_ref().map_or(!staging.is_kept(), |known| self.is_complete(known));
        if !is_all_there || !self.are_others_finished()? {
            return Ok(false);
        }
        let Some(right) = staging.try_seal(&run.stop)? else { return Ok(false) };
        self.seal(right, known, stats)?;
        Ok(true)
    }

    /// Continues although some processes did not start or did not report that they finished. This is allowed only if
    /// the journals record all work of these processes, so that nothing is missing in the output.
    ///
    /// # Errors
    /// An error with the missing parts if their work is not recorded.
    fn do_without(&self, missing: MissingParts) -> Result<()> {
        let is_done = |known: &CompletedWork| missing.parts.iter().all(|index| self.is_done(known, *index));
        if self.records.known_yet()?.is_some_and(|known| !is_done(&known)) {
            return Err(self.staging.without(&missing));
        }
        self.staging.mark_finished(missing);
        Ok(())
    }

    /// Checks with `is_recorded` that the journals record the work that is finished. Also succeeds if another process
    /// has already published the destination, because the journals are then removed.
    fn check(&self, is_recorded: impl Fn(&CompletedWork) -> bool) -> Result<()> {
        let mut incomplete = None;
        let is_shown = self.staging.confirm(&self.run.stop, "what is recorded", || {
            incomplete = self.records.known_yet()?.filter(|known| !is_recorded(known));
            Ok(incomplete.is_none())
        })?;
        incomplete.filter(|_| !is_shown).map_or(Ok(()), |known| Err(self.incomplete(&known)))
    }

    /// Completes the checksums of the output, reads the output back with `--verify`, and publishes it. All parts of the
    /// output are already written.
    fn seal(&self, right: Seal<'_>, known: Option<CompletedWork>, stats: &mut Stats) -> Result<()> {
        let Self { conversion, staging, run, options, .. } = *self;
        if let Some(known) = &known {
            let carried = &conversion.carried;
            staging.confirm(&run.stop, "what was written", || has_all(staging.folder(), self.files(), carried))?;
            seal(staging.folder(), self.files(), carried, known, staging.journals(), options.sync)?;
            stats.set_cast_losses(&known.lost);
        }
        if self.args.execute.verify {
            let hint = if known.is_some() { WRONG_AND_KEPT } else { WRONG };
            if let Some(wrong) = read_back(conversion, staging.folder(), hint, run)? {
                known.map_or(Ok(()), |known| self.records.invalidate(&known, &wrong.bytes))?;
                return Err(wrong.error);
            }
            run.progress.note("verified: DST was read back, and all its bytes are as expected");
        }
        run.stop.check()?;
        staging.check()?;
        check_output(staging.folder(), self.files(), &conversion.carried)?;
        right.publish(options.sync)
    }

    fn wait(&self, stats: &mut Stats, before: &EarlierWork) -> Result<Waited> {
        let Self { staging, run, .. } = *self;
        let mut said = Instant::now();
        let mut every = SAY_AFTER;
        let mut notify = |others: &[OtherPart]| {
            stats.bytes_already_written = before.bytes(others);
            if said.elapsed() >= every
                && let Some(text) = waiting_for(others)
            {
                let Launch { part, launcher, .. } = &run.launch;
                run.progress.note(&format!("{text}; the run has {} parts according to {}", part.of, launcher.name()));
                (said, every) = (Instant::now(), SAY_EVERY);
            }
        };
        staging.wait_published(&run.stop, &mut notify)
    }

    fn is_complete(&self, known: &CompletedWork) -> bool {
        is_complete(known, self.files(), self.conversion.carried.len())
    }

    /// Returns true if the journals record all work of the part with number `index`.
    fn is_done(&self, known: &CompletedWork, index: u32) -> bool {
        let part = Part { index, ..self.part() };
        self.conversion.division(part).without(&known.done).is_empty()
            && self.carried_by(part).all(|(number, _)| known.carried.contains(&number))
    }

    /// Returns true if every other process has finished its work or has ended, so that no process will start or write
    /// any more. A process without work may start late; if the destination were already published, that process would
    /// fail. Always true if processes do not wait for each other.
    fn are_others_finished(&self) -> Result<bool> {
        let is_active = |other: &OtherPart| matches!(other.state, OtherState::NotStarted | OtherState::Working);
        Ok(!self.run.launch.waits || !self.staging.others()?.iter().any(is_active))
    }

    /// Describes the work that this process has finished and that the next run can skip, for example `12.30 GB of 40.00
    /// GB`. The work of other processes does not count, because they may still be writing.
    fn kept(&self) -> String {
        let part = self.part();
        let own = self.conversion.division(part);
        let whole = human_bytes(own.len_bytes());
        let whole = if part.is_alone() { whole } else { format!("the {whole} of part {} of {}", part.index, part.of) };
        match self.records.known() {
            Ok(known) => {
                let left = own.without(&known.done).len_bytes();
                format!("{} of {whole}", human_bytes(own.len_bytes() - left))
            }
            Err(_) => String::from("the finished work"),
        }
    }

    /// Returns true if the journals record any work, so that another run can continue from it.
    fn has_recorded(&self) -> bool {
        !completed_work::is_empty(self.staging.journals()).unwrap_or(false)
    }

    fn incomplete(&self, known: &CompletedWork) -> Error {
        let missing = Extents::of_files(self.files()).without(&known.done);
        Error::usage(
            format!(
                "all parts report that they are done, but {} of {} are not recorded in {}",
                human_bytes(missing.len_bytes()),
                human_bytes(self.conversion.reservation.len_bytes()),
                self.staging.partial().display()
            ),
            "run the same command with options::resume to write what is missing",
        )
    }
}

/// Hint if the written files differ from the source and no journal is kept.
const WRONG: &str = "memory or disk is faulty; nothing was published or kept; run the command again";
/// Hint if the written files differ from the source and journals are kept, so that `--resume` can continue.
const WRONG_AND_KEPT: &str = "memory or disk is faulty; nothing was published. Run the same command with \
                              options::resume to write these bytes again and keep all other finished work";

/// Time after which this process first reports which parts it waits for.
const SAY_AFTER: Duration = Duration::from_secs(5);
/// Time between further reports.
const SAY_EVERY: Duration = Duration::from_mins(1);

/// Returns the parts that this process waits for, for example `waiting for parts 1, 2 (not started), 3 (1.20 GB done)`.
/// Returns `None` if it waits for no part.
fn waiting_for(others: &[OtherPart]) -> Option<String> {
    let of_state = |state: OtherState| others.iter().filter(move |other| other.state == state);
    let awaited = of_state(OtherState::NotStarted).chain(of_state(OtherState::Working)).count();
    let index = |other: &OtherPart| other.part.index.to_string();
    let missing: Vec<String> =
        of_state(OtherState::NotStarted).filter(|other| other.failure.is_none()).map(index).collect();
    let failed: Vec<String> = of_state(OtherState::NotStarted)
        .filter_map(|other| {
            Some(format!("{} (not started since it failed: {})", index(other), other.failure.as_ref()?))
        })
        .collect();
    let working: Vec<String> = of_state(OtherState::Working)
        .map(|other| format!("{} ({} done)", other.part.index, human_bytes(other.done_bytes)))
        .collect();
    let missing = (!missing.is_empty()).then(|| format!("{} (not started)", short_list(&missing, FEW_NUMBERS)));
    let [failed, working] = [(failed, 2), (working, FEW_NUMBERS)]
        .map(|(names, most)| (!names.is_empty()).then(|| short_list(&names, most)));
    let all: Vec<String> = missing.into_iter().chain(failed).chain(working).collect();
    (!all.is_empty()).then(|| format!("waiting for {} {}", if awaited > 1 { "parts" } else { "part" }, all.join(", ")))
}
