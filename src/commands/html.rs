//! Writes the report of a verb to the file that `--html` names.

use std::path::Path;

use super::printer::spelled;
use dtshard::Result;

/// Writes a report. An existing report is replaced.
///
/// # Errors
/// The errors of [`dtshard::write_html`].
pub fn write(file: &Path, page: &str) -> Result<()> {
    dtshard::write_html(file, &spelled(page))
}
