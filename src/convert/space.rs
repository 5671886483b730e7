//! The error for a file system without space.

use std::path::Path;

use crate::error::Error;
use crate::quantity::human_bytes;

/// The error for a folder on a file system that has less space free than is needed.
pub fn no_space(folder: &Path, needed: u64, free: u64) -> Error {
    let (needed, free) = (human_bytes(needed), human_bytes(free));
    Error::usage(
        format!("{needed} needed on the file system of {}, {free} free", folder.display()),
        "free space there, or choose a destination on another file system",
    )
}
