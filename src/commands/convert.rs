//! `reshard`, `unshard`, `flatten` and `consolidate`: convert SRC to DST. These verbs differ only in the layout and
//! format of DST.

use std::mem;
use std::path::Path;

use super::progress::TerminalProgress;
use super::{Printer, Status, html, signals_and_limits};
use dtshard::cli::{ConvertArgs, labels};
use dtshard::options::{Launch, Target};
use dtshard::{Checkpoint, Conversion, Error, Outcome, Plan, Report, Result, Setup};

/// Converts SRC, and publishes the result at DST.
///
/// # Errors
/// The errors of planning and executing a conversion. DST is then unchanged.
pub fn run(target: Target, args: &ConvertArgs, launch: Launch, printer: &Printer) -> Result<Status> {
    if args.exchange.rendezvous.is_some() {
        return Err(Error::usage(
            "--rendezvous was removed: processes meet in a folder beside DST, or by MPI",
            "omit --rendezvous; to exchange tensors over a network, start the processes under MPI or srun",
        ));
    }
    let waits = launch.waits;
    let setup =
        Setup { launch, stop: signals_and_limits::prepare()?, labels: labels::of_arguments(std::env::args_os()) };
    let progress = TerminalProgress::new(printer);
    let source = Checkpoint::open_with(&args.src, &args.open_options(&target, setup), progress.clone())?;
    let mut plan = args.apply(Conversion::from(source)).target(target).plan()?;
    match &args.dst {
        Some(dst) if !args.destination.dry_run => {
            let report = plan.execute(dst, &args.execute_options(), progress)?;
            print_report(&report, waits, printer)?;
        }
        _ => print_preview(&mut plan, args.destination.html.as_deref(), printer)?,
    }
    // The process ends now. Freeing a million small allocations one by one would take longer.
    mem::forget(plan);
    Ok(Status::Done)
}

fn print_preview(plan: &mut Plan, report: Option<&Path>, printer: &Printer) -> Result<()> {
    let preview = plan.preview()?;
    if let Some(file) = report.filter(|_| printer.is_first()) {
        html::write(file, &preview.to_html()?)?;
    }
    printer.document(&preview.to_json())?;
    printer.data(&preview.to_string())?;
    preview.warnings().iter().for_each(|warning| printer.warning(warning));
    Ok(())
}

fn print_report(report: &Report, waits: bool, printer: &Printer) -> Result<()> {
    printer.document(&report.to_json())?;
    report.warnings.iter().for_each(|warning| printer.own_warning(warning));
    if let Some(hint) = &report.hint {
        printer.hint(hint);
    }
    match report.outcome {
        // If processes wait for each other, the first process prints the line, regardless of which process publishes.
        Outcome::Published | Outcome::PublishedByOther if waits => printer.line(&report.to_string()),
        _ => printer.outcome(&report.to_string()),
    }
    Ok(())
}
