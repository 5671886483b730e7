//! Writes the report of a verb to the file that `--html` names.

use std::fs;
use std::path::Path;

use super::printer::spelled;
use dtshard::{Error, Result};

/// Writes a report. An existing file is replaced.
///
/// # Errors
/// `Io` with the file.
pub fn write(file: &Path, page: &str) -> Result<()> {
    fs::write(file, spelled(page).as_bytes()).map_err(Error::io("write", file))
}
