//! `local`: the part of every tensor that each rank holds, as plain tensors, and a document that says of what they are
//! parts.
//!
//! Whoever runs a model in parallel without DTensors wants what a rank holds and no more: inference engines, custom
//! loaders. Its safetensors file is that. `document.rs` keeps what such a file cannot say: mesh, placements and class of
//! each tensor, ties, and the state dict with its objects. So DTensors become local and are put together again.
//!
//! ```text
//! rank-00000.safetensors  rank-00001.safetensors  ...  layout.json
//! ```
//!
//! Offsets are bytes, shapes elements. Invariant: what a file holds of a tensor follows from the document alone, down to
//! the shape; a file has every tensor of which its rank holds something, and those of which it holds an empty part.
//!
//! Source of the rule: `DTensor.to_local` and `DTensor.from_local` (`torch/distributed/tensor/_api.py`).

mod decode;
pub mod document;
mod encode;
pub(super) mod entry;
mod own;
mod read;
#[cfg(test)]
mod tests;
mod tree;
mod write;

use std::path::Path;

pub use document::FILE_NAME;
pub use read::read;
pub use write::{LocalLayout, LocalTarget, reserve};

use super::Format;
use super::listing::FolderListing;
use crate::error::{Error, Result};
use crate::layout::Rank;
use crate::storage::lookup;

/// The name of a rank's file.
#[must_use]
pub fn file_name(rank: Rank) -> String {
    format!("rank-{:05}.safetensors", rank.0)
}

/// The rank whose file is called like that.
#[must_use]
pub fn rank_of(path: &Path) -> Option<Rank> {
    let name = path.file_name()?.to_str()?;
    let rank = Rank(name.strip_prefix("rank-")?.strip_suffix(".safetensors")?.parse().ok()?);
    (file_name(rank) == name).then_some(rank)
}

/// Returns whether a folder is in this format. One rank file alone, with nothing that says what it is a part of, is a file
/// as any other.
pub fn is_in(listing: &FolderListing<'_>) -> bool {
    let count = listing.names.iter().filter(|name| rank_of(Path::new(name)).is_some()).count();
    let has_layout = listing.names.iter().any(|name| name == FILE_NAME);
    match listing.from {
        Some(Format::Local) => count > 0 || has_layout,
        Some(Format::Safetensors) => false,
        _ => count > 1 || count > 0 && has_layout,
    }
}

/// Whether a file is one rank's of several, beside the document that tells the whole.
///
/// # Errors
/// `Io` where the file system does not tell whether the document is there.
pub fn is_part(path: &Path) -> Result<bool> {
    Ok(rank_of(path).is_some() && lookup::is_file(path)? && lookup::exists(&path.with_file_name(FILE_NAME))?)
}

/// What rank files are parts of is told by the document where there is one.
///
/// # Errors
/// `Usage` where there is; `Io`.
pub fn refuse_told(folder: &Path) -> Result<()> {
    if !lookup::exists(&folder.join(FILE_NAME))? {
        return Ok(());
    }
    Err(Error::usage(
        format!("{}: its {FILE_NAME} says how its tensors lie", folder.display()),
        "leave out options::src_mesh, options::src_placements, options::src_split, options::src_plan, options::src_layout and options::reduce",
    ))
}
