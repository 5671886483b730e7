//! Reads layout files from disk. A layout file may also describe the units of flat parameters. The module
//! [`crate::layout::file`] defines the grammar.

use std::path::Path;

use crate::document::MAX_BYTES;
use crate::error::{Error, Result};
use crate::format::json;
use crate::layout::file::LayoutFile;

/// Reads a layout file.
///
/// # Errors
/// `Layout` with file and line, `Malformed` if the file is not text, `Io`.
pub fn read(path: &Path) -> Result<LayoutFile> {
    parse(path, &json::read_document(path, MAX_BYTES)?)
}

/// Parses the content of a layout file.
///
/// # Errors
/// The errors of [`read`].
pub fn parse(path: &Path, bytes: &[u8]) -> Result<LayoutFile> {
    let name = path.display().to_string();
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Error::malformed(path, "content", format!("a layout file of at most {MAX_BYTES} bytes"), "more"));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        Error::malformed(path, format!("offset {}", error.valid_up_to()), "a layout file in UTF-8", "other bytes")
    })?;
    Ok(LayoutFile::parse(&name, text)?)
}
