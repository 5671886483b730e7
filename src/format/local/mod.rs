//! The format `local`: one safetensors file per rank with the rank's local part of every tensor, and `layout.json`,
//! which describes how the parts form the tensors.
//!
//! Inference engines and custom loaders that run a model in parallel without DTensors need exactly the local part of
//! each rank. The document `layout.json` stores the information that safetensors files lack: the mesh, placements and
//! class of each tensor, tied names, and the state dict with its objects. So DTensors can be written as local tensors
//! and restored later.
//!
//! ```text
//! rank-00000.safetensors  rank-00001.safetensors  ...  layout.json
//! ```
//!
//! Offsets are in bytes; shapes count elements. Invariant: the document alone determines the tensors in each file and
//! their shapes. The file of a rank contains every tensor of which the rank has a local part, even if this local part
//! is empty.
//!
//! The local part of a rank is the tensor that `DTensor.to_local` returns and `DTensor.from_local` accepts
//! (`torch/distributed/tensor/_api.py`).

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

/// Returns the name of a rank's file.
pub fn file_name(rank: Rank) -> String {
    format!("rank-{:05}.safetensors", rank.0)
}

/// Returns the rank in the name of a rank file; `None` if the name does not have the form of [`file_name`].
pub fn rank_of(path: &Path) -> Option<Rank> {
    let name = path.file_name()?.to_str()?;
    let rank = Rank(name.strip_prefix("rank-")?.strip_suffix(".safetensors")?.parse().ok()?);
    (file_name(rank) == name).then_some(rank)
}

/// Returns whether a folder is in this format: the folder has several rank files, or a rank file and `layout.json`. A
/// single rank file without `layout.json` is an ordinary safetensors file. If `options::from` is `local`, one rank file
/// or `layout.json` is enough. If `options::from` is `safetensors`, the result is false.
pub fn matches_listing(listing: &FolderListing<'_>) -> bool {
    let count = listing.names.iter().filter(|name| rank_of(Path::new(name)).is_some()).count();
    let has_layout = listing.names.iter().any(|name| name == FILE_NAME);
    match listing.from {
        Some(Format::Local) => count > 0 || has_layout,
        Some(Format::Safetensors) => false,
        _ => count > 1 || count > 0 && has_layout,
    }
}

/// Returns whether a file is one rank file of this format, with `layout.json` in the same folder.
///
/// # Errors
/// `Io` if the file system cannot check whether the document exists.
pub fn is_rank_file(path: &Path) -> Result<bool> {
    Ok(rank_of(path).is_some() && lookup::is_file(path)? && lookup::exists(&path.with_file_name(FILE_NAME))?)
}

/// Refuses a layout that the user declares for a folder with `layout.json`, because this file already describes the
/// layout.
///
/// # Errors
/// `Usage` if `layout.json` exists; `Io`.
pub fn refuse_declared_layout(folder: &Path) -> Result<()> {
    if !lookup::exists(&folder.join(FILE_NAME))? {
        return Ok(());
    }
    Err(Error::usage(
        format!("{}: its {FILE_NAME} already describes the layout of its tensors", folder.display()),
        "remove options::src_mesh, options::src_placements, options::src_split, options::src_plan, \
         options::src_layout and options::reduce",
    ))
}
