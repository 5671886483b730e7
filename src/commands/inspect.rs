//! `inspect`: shows the contents and the layout of a checkpoint.

use super::progress::TerminalProgress;
use super::{Printer, Status, html, signals_and_limits};
use crate::cli::{Inspect, SortKey};
use dtshard::options::{Contents, InspectOptions, TensorOrder};
use dtshard::{Checkpoint, Error, OpenOptions, Result, Setup};

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
    let options = OpenOptions {
        source: args.source.options(),
        contents: Contents::State,
        like: args.shapes.like.clone(),
        incomplete: true,
        raw_flat: !args.layout,
        setup: Setup { stop: signals_and_limits::prepare()?, ..Setup::default() },
        ..OpenOptions::default()
    };
    let mut checkpoint = Checkpoint::open_with(&args.src, &options, TerminalProgress::new(printer))?;
    checkpoint.map(&args.map.options())?;
    checkpoint.conflicts().iter().for_each(|conflict| printer.warning(&conflict.to_string()));
    if args.layout {
        let (document, text) = checkpoint.layout()?;
        printer.data(&text)?;
        printer.document(&document)?;
        return Ok(Status::Done);
    }
    let sort = match args.sort {
        None => TensorOrder::StateDict,
        Some(SortKey::Size) => TensorOrder::Size,
        Some(SortKey::Name) => TensorOrder::Name,
    };
    let shown =
        InspectOptions { brief: args.brief, tensor: args.tensor.clone(), digest: args.digest, all: args.all, sort };
    let inspection = checkpoint.inspect(&shown)?;
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
