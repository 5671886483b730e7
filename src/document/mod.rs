//! Reads files that users write in TOML or JSON: layout files and map files.
//!
//! [`parse`] returns a tree of values with line numbers, and [`Fields`] reads the keys of a table. Every error names the
//! file, the line and the key. Lines count from 1.

mod fields;
mod node;

pub use fields::{Fields, FilePosition, did_you_mean, list, numbers, table, text};
pub use node::{FileEntry, FileNode, FileValue, ParseFault, parse_json, parse_toml};

/// The maximum size of a file in bytes.
pub const MAX_BYTES: u64 = 16 << 20;

/// An error in a file. `position` has the file, the line and the key, such as `layout.toml line 12: rules "**.norm"`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{position}: {problem}")]
pub struct DocumentError {
    pub file: String,
    pub position: String,
    pub problem: String,
    pub hint: Option<String>,
}

/// Parses a file. The suffix of `name`, `.json` or `.toml`, selects the syntax; otherwise the text does. `what` is the
/// expected content, for messages.
///
/// # Errors
/// For a file that is empty, larger than [`MAX_BYTES`], or not TOML or JSON.
pub fn parse(name: &str, text: &str, what: &str) -> Result<FileNode, DocumentError> {
    let at = FilePosition { name, line: 1, section: "" };
    if text.len() as u64 > MAX_BYTES {
        return Err(at.error(format!("expected at most {MAX_BYTES} bytes, found {}", text.len()), None));
    }
    // Editors on Windows write a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return Err(at.error(format!("expected {what}, found an empty file"), None));
    }
    let parsed = if is_json(name, text) { parse_json(text) } else { parse_toml(text) };
    parsed.map_err(|ParseFault { line, problem }| at.at_line(line).error(problem, None))
}

/// Returns whether a file is JSON. The suffix `.json` or `.toml` decides; with any other suffix, the first character of
/// the text decides.
fn is_json(name: &str, text: &str) -> bool {
    let suffix = name.rsplit_once('.').map(|(_, suffix)| suffix.to_ascii_lowercase());
    match suffix.as_deref() {
        Some("json") => true,
        Some("toml") => false,
        _ => text.trim_start().starts_with('{'),
    }
}
