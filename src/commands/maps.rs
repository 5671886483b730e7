//! `maps`: lists the weight maps, prints or checks the file of one, or shows which of them fit a checkpoint.

use std::path::Path;

use serde_json::json;

use super::progress::TerminalProgress;
use super::{Printer, Status, signals_and_limits};
use dtshard::cli::Maps;
use dtshard::options::Contents;
use dtshard::{Checkpoint, MapListing, OpenOptions, Result, Setup, is_map_file, map_file};

/// Prints a list of maps, or a map file.
///
/// # Errors
/// The errors of opening a checkpoint.
pub fn run(args: &Maps, printer: &Printer) -> Result<Status> {
    let listing = match (&args.subject, &args.src) {
        (None, _) => MapListing::all()?,
        (Some(map), Some(source)) => open(source, args, printer)?.map_fit(map)?,
        (Some(path), None) => {
            if let Some(text) = path.to_str().and_then(map_file) {
                printer.document(&json!({ "file": text }))?;
                printer.data(text)?;
                return Ok(Status::Done);
            }
            if is_map_file(path)? { MapListing::of_map(path)? } else { open(path, args, printer)?.maps()? }
        }
    };
    printer.document(listing.document())?;
    printer.data(listing.text())?;
    Ok(Status::Done)
}

fn open(path: &Path, args: &Maps, printer: &Printer) -> Result<Checkpoint> {
    let options = OpenOptions {
        source: args.source.options(),
        contents: Contents::Model,
        setup: Setup { stop: signals_and_limits::prepare()?, ..Setup::default() },
        ..OpenOptions::default()
    };
    Checkpoint::open_with(path, &options, TerminalProgress::new(printer))
}
