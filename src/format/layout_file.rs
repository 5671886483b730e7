//! Layout files on disk, and the flat layout that may be in one. The grammar is [`crate::layout::file`].

use std::io::Read;
use std::path::Path;

use crate::error::{Error, Result};
use crate::layout::file::{LayoutFile, MAX_BYTES};
use crate::storage::regular_file;

/// Read a layout file.
///
/// # Errors
/// `Layout` naming file and line, `Malformed` for what is no text, `Io`.
pub fn read(path: &Path) -> Result<LayoutFile> {
    regular_file(path)?;
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    parse(path, &bytes)
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
