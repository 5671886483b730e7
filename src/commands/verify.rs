//! `verify`: checks one checkpoint, or compares the values of two checkpoints.

use super::progress::TerminalProgress;
use super::{Printer, Status, html, signals_and_limits};
use dtshard::cli::Verify;
use dtshard::{Result, Setup, verify};

/// Verifies SRC, or compares it with OTHER.
///
/// # Errors
/// `Usage` and `Io`. Damage and differences are not errors: the report lists them as findings.
pub fn run(args: &Verify, printer: &Printer) -> Result<Status> {
    let setup = Setup { stop: signals_and_limits::prepare()?, ..Setup::default() };
    let verification = verify(&args.options(), &setup, TerminalProgress::new(printer))?;
    if let Some(file) = &args.report.html {
        html::write(file, &verification.to_html()?)?;
    }
    printer.document(&verification.to_json())?;
    verification.hints().iter().for_each(|hint| printer.hint(hint));
    printer.data(&verification.lines(printer.verbose()))?;
    printer.line(&verification.to_string());
    Ok(if verification.is_same() { Status::Done } else { Status::Different })
}
