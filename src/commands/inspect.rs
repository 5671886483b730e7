//! `inspect`: shows the contents and the layout of a checkpoint.

use super::progress::TerminalProgress;
use super::{Printer, Status, html, signals_and_limits};
use dtshard::cli::Inspect;
use dtshard::{Checkpoint, Error, Result, Setup};

/// Maximum width of a drawing, in columns.
const COLUMNS: usize = 100;

/// Prints the contents of SRC.
///
/// # Errors
/// The errors of opening SRC; `Usage` for a name that no tensor has.
pub fn run(args: &Inspect, printer: &Printer) -> Result<Status> {
    if args.draw && printer.json() {
        return Err(Error::usage(
            "--draw cannot be used with --json",
            "leave one of them out; the JSON document lists the chunks that --draw draws",
        ));
    }
    let setup = Setup { stop: signals_and_limits::prepare()?, ..Setup::default() };
    let mut checkpoint = Checkpoint::open_with(&args.src, &args.open_options(setup), TerminalProgress::new(printer))?;
    checkpoint.map(&args.map.options())?;
    checkpoint.conflicts().iter().for_each(|conflict| printer.warning(&conflict.to_string()));
    if args.layout {
        let (document, text) = checkpoint.layout()?;
        printer.data(&text)?;
        printer.document(&document)?;
        return Ok(Status::Done);
    }
    let options = args.options();
    let inspection = checkpoint.inspect(&options)?;
    if let Some(file) = &args.report.html {
        html::write(file, &inspection.to_html()?)?;
    }
    if printer.json() {
        printer.document(&inspection.to_json())?;
    } else if args.tensor.is_empty() {
        printer.data(&inspection.summary()?)?;
        if !args.brief {
            printer.data(&format!("\n{}", inspection.tensor_table()))?;
        }
    } else {
        printer.data(&inspection.tensor_table())?;
        if args.draw {
            printer.picture(&inspection.drawings(Printer::columns(COLUMNS)))?;
        } else if !args.brief {
            printer.data(&inspection.chunk_tables())?;
        }
    }
    Ok(Status::Done)
}
