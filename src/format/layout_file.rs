//! Layout files on disk, and the flat layout that may be in one. The grammar is [`crate::layout::file`].

use std::path::Path;

use crate::error::{Error, Result};
use crate::format::json;
use crate::layout::file::{LayoutFile, MAX_BYTES};

/// Read a layout file.
///
/// # Errors
/// `Layout` naming file and line, `Malformed` for what is no text, `Io`.
pub fn read(path: &Path) -> Result<LayoutFile> {
    parse(path, &json::read_document(path, MAX_BYTES)?)
}

/// What the content of a file says.
///
/// # Errors
/// As [`read`].
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
