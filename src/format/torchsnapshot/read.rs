//! Reads a snapshot into a catalog.

use std::path::Path;

use super::MANIFEST;
use super::data::DataFiles;
use super::inflate::inflate;
use super::manifest::parse;
use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::format::files_beside;
use crate::storage::Files;
use torch_pickle::pickle::Unknown;

/// The maximum length of a manifest in bytes. The manifest of a million shards has about 700 MB.
const MAX_BYTES: u64 = 4 << 30;

/// Reads a snapshot.
///
/// # Errors
/// `Malformed`, `Missing`, `Coverage`, `Conflict`, `Unsupported`, `Io`.
pub fn read(files: &mut Files, folder: &Path, unknown: Unknown) -> Result<Catalog> {
    let path = folder.join(MANIFEST);
    let file = files.add(&path)?;
    let len = files.len_bytes(file);
    if len > MAX_BYTES {
        return Err(Error::malformed(&path, "content", format!("at most {MAX_BYTES} bytes"), format!("{len} bytes")));
    }
    let manifest = parse(&path, &files.read(file, 0, len)?)?;
    let names: Vec<&str> = manifest.files.iter().map(String::as_str).collect();
    let paths = files_beside(&path, "manifest", &names)?;
    let ids = paths.into_iter().map(|path| files.add(path)).collect::<Result<_>>()?;
    let mut catalog = Catalog::empty();
    let data = DataFiles { files, manifest: &path, ids, unknown };
    catalog.state = inflate(&data, &manifest.entries, &mut catalog)?;
    Ok(catalog)
}
