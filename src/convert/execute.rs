//! Steps that all conversions share after planning: the preview and the execution.

use std::path::Path;

use super::dry_run_destination::describe_destination;
use super::estimate::within_memory;
use super::options::ConvertOptions;
use super::prepared::{Prepared, check_destination};
use super::report::{Forecast, Outcome, Preview, Report, ReportSource, left_out, notes};
use super::run::Run;
use super::source_options::input;
use super::threads_and_blocks::Workers;
use super::unused_exchange_options::{unused_after_run, unused_options};
use super::write::{about, claim, plan, write_destination};
use crate::error::{Error, Result};
use crate::exchange::ReductionMethod;
use crate::exec::{Input, Options, copy};
use crate::format::resolve_unseen;
use crate::publish::{Claim, Preflight, Staging, WorkPlan};
use crate::quantity::{count, human_bytes};
use crate::storage::IoMode;

/// Computes the preview of a run, and writes nothing.
///
/// # Errors
/// The errors of planning.
pub fn preview<'a>(
    prepared: &'a mut Prepared,
    args: &ConvertOptions,
    workers: &'a Workers,
    run: &Run<'_>,
) -> Result<Preview<'a>> {
    refuse_parted(prepared)?;
    let forecast = look_ahead(prepared, args, run).map_err(|error| prepared.failed(error));
    part(prepared, false);
    Ok(Preview::new(prepared, workers, forecast?))
}

fn look_ahead(prepared: &Prepared, args: &ConvertOptions, run: &Run<'_>) -> Result<Forecast> {
    let options = &begin(prepared, args, run)?;
    let mut account = ReportSource::new(prepared, args, options, unused_options(prepared, args, run));
    let source = &prepared.source.checkpoint;
    let stats = match &prepared.source.peers {
        Some(peers) if peers.exchange_bytes() => {
            let stats;
            (stats, account.loads) = peers.dry_run(source, &prepared.reservation, run)?;
            stats
        }
        // A preview copies no files of SRC, so this process may not see all of them.
        Some(_) => {
            let input = Input { resolve: &resolve_unseen, ..input(source) };
            copy::dry_run(input, &prepared.reservation, &run.stop)?
        }
        None => copy::dry_run(input(source), &prepared.reservation, &run.stop)?,
    };
    let destination_state =
        args.dst.as_deref().and_then(|destination| describe_destination(prepared, args, destination, options, run));
    Ok(account.forecast(&stats, destination_state))
}

/// Executes the plan. If several processes divide the work, executes only the share of this process.
///
/// # Errors
/// Any error; the destination is then unchanged.
pub fn execute(prepared: &mut Prepared, args: &ConvertOptions, destination: &Path, run: &Run<'_>) -> Result<Report> {
    refuse_parted(prepared)?;
    let options = begin(prepared, args, run);
    let report = options.and_then(|options| {
        copy_source(prepared, args, destination, &options, run)?;
        perform(prepared, args, destination, &options, run)
    });
    let report = report.map_err(|error| prepared.failed(error));
    part(prepared, true);
    report
}

/// Disconnects this process from the other processes, if it is connected. `is_published` is true if this run published
/// DST.
fn part(prepared: &mut Prepared, is_published: bool) {
    if let Some(peers) = prepared.source.peers.take() {
        prepared.source.has_parted = true;
        peers.leave(is_published);
    }
}

/// Refuses to use a plan again after its processes have disconnected, because the rounds of the plan need all
/// processes.
///
/// # Errors
/// `Usage`.
fn refuse_parted(prepared: &Prepared) -> Result<()> {
    if !prepared.source.has_parted {
        return Ok(());
    }
    Err(Error::usage(
        "the processes of this plan disconnected after its preview or execution",
        "open the source and plan again in all processes",
    ))
}

/// Copies the files of the source that only some processes see to a folder that all processes see. Before that, checks
/// whether the run would be refused.
///
/// Does nothing if this process has no connection to other processes, or if the processes exchange tensor data;
/// otherwise collective.
fn copy_source(
    prepared: &mut Prepared,
    args: &ConvertOptions,
    destination: &Path,
    options: &Options,
    run: &Run<'_>,
) -> Result<()> {
    let Some(mut peers) = prepared.source.peers.take_if(|peers| !peers.exchange_bytes()) else { return Ok(()) };
    let mut copy = || {
        let reducing = ReductionMethod::InRankOrder;
        let about = about(prepared, args, reducing, run);
        let plan = plan(prepared, reducing, &about);
        peers.compare(plan.fingerprint)?;
        let claim = claim(prepared, args, options, run);
        let Some(beside) = peers.decide(|| bytes_to_write(prepared, args, destination, &claim, &plan))? else {
            return Ok(());
        };
        peers.copy_source(&mut prepared.source.checkpoint, &prepared.reservation, beside, args.execute.resume, run)
    };
    let copied = copy();
    prepared.source.peers = Some(peers);
    copied
}

/// Returns an estimate of the space in bytes that the run will need on the file system of the destination, in addition
/// to existing files. It is 0 if there is an unfinished destination, because its files already occupy the space.
/// Returns `None` if DST is already complete, so that nothing is written.
///
/// # Errors
/// The error with which a run would be refused.
fn bytes_to_write(
    prepared: &Prepared,
    args: &ConvertOptions,
    destination: &Path,
    claim: &Claim,
    plan: &WorkPlan<'_>,
) -> Result<Option<u64>> {
    check_destination(prepared, args, destination)?;
    match Staging::preflight(destination, prepared.shape, claim, plan)? {
        Preflight::Done => Ok(None),
        Preflight::Fresh if !claim.restart => Ok(Some(prepared.len_bytes())),
        Preflight::Fresh | Preflight::Resumes => Ok(Some(0)),
        // With --resume or --restart, the run can work on DST, whatever the leases of the earlier run show.
        Preflight::Unsure(_) if claim.resume || claim.restart => Ok(Some(0)),
        Preflight::Unsure(error) => Err(error),
    }
}

fn perform(
    prepared: &Prepared,
    args: &ConvertOptions,
    destination: &Path,
    options: &Options,
    run: &Run<'_>,
) -> Result<Report> {
    let mut account = ReportSource::new(prepared, args, options, unused_options(prepared, args, run));
    check_destination(prepared, args, destination)?;
    let (stats, outcome) = write_destination(prepared, args, destination, options, run)?;
    let warning = unused_after_run(prepared, args, &stats).filter(|_| outcome != Outcome::UpToDate);
    if let Some(warning) = warning {
        run.progress.warning(&warning);
        account.unused_options.push(warning);
    }
    Ok(account.report(&stats, outcome, run))
}

/// Prints notes and warnings before the work begins, and returns the options with write blocks that fit into the memory
/// limit.
fn begin(prepared: &Prepared, args: &ConvertOptions, run: &Run<'_>) -> Result<Options> {
    for note in notes(prepared) {
        run.progress.note(&note);
    }
    for name in left_out(prepared).1 {
        run.progress.detail(&format!("left out: {name}"));
    }
    unused_options(prepared, args, run).iter().for_each(|warning| run.progress.warning(warning));
    let options = within_memory(prepared, run.options, args.source.max_memory)?;
    // Another node may seal the output, so all data of this node must be on disk.
    let options = Options { sync: options.sync || !run.launch.part.is_alone(), ..options };
    run.progress.detail(&how(prepared.source.checkpoint.files.io(), &options));
    Ok(options)
}

/// Describes how data is copied, for example `reading with mmap, 2 threads, write blocks of 4.19 MB`.
fn how(io: IoMode, options: &Options) -> String {
    let io = match io {
        IoMode::Mmap => "with mmap",
        IoMode::Read => "with read calls",
        IoMode::Direct => "with O_DIRECT",
    };
    format!(
        "reading {io}, {}, write blocks of {}",
        count(options.threads, "thread"),
        human_bytes(options.write_block_bytes)
    )
}
