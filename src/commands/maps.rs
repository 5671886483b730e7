//! `maps`: lists the weight maps, prints the file of one, or shows which of them fit a checkpoint.

use serde_json::json;

use super::progress::TerminalProgress;
use super::{Printer, Status, signals_and_limits};
use crate::cli::Maps;
use dtshard::options::Contents;
use dtshard::{Checkpoint, MapListing, OpenOptions, Result, Setup, map_file};

/// Prints a list of maps, or a map file.
///
/// # Errors
/// The errors of opening a checkpoint.
pub fn run(args: &Maps, printer: &Printer) -> Result<Status> {
    let listing = match &args.subject {
        None => MapListing::all()?,
        Some(path) => {
            if let Some(text) = path.to_str().and_then(map_file) {
                printer.document(&json!({ "file": text }))?;
                printer.data(text)?;
                return Ok(Status::Done);
            }
            let options = OpenOptions {
                source: args.source.options(),
                contents: Contents::Model,
                setup: Setup { stop: signals_and_limits::prepare()?, ..Setup::default() },
                ..OpenOptions::default()
            };
            Checkpoint::open_with(path, &options, TerminalProgress::new(printer))?.maps()?
        }
    };
    printer.document(listing.document())?;
    printer.data(listing.text())?;
    Ok(Status::Done)
}
