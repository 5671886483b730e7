//! Verifies the CRC-32s in `torch.save` archives. An archive is a complete file, or one item of a DCP data file. Unit
//! of lengths: bytes.
//!
//! `torch.load` never verifies the CRC-32s, so `torch.load` loads a file with a flipped bit without an error.

use std::collections::BTreeMap;
use std::io;

use super::archive::ArchiveSource;
use crate::catalog::{Catalog, FileLocation, Fqn};
use crate::error::Result;
use crate::storage::{FileRange, Files};

/// Returns the byte range of each `torch.save` archive in a checkpoint. If the archive is an item of a DCP data file
/// and stores a tensor, the entry also has the name of this tensor; otherwise the name is `None`. The list is empty if
/// the format has no `torch.save` archives.
pub fn archives(catalog: &Catalog) -> Vec<(FileRange, Option<&Fqn>)> {
    let mut archives: BTreeMap<FileRange, Option<&Fqn>> =
        catalog.archives.iter().map(|file_range| (*file_range, None)).collect();
    for entry in &catalog.tensors {
        for index in 0..entry.chunks.len() {
            if let FileLocation::Item(file_range) = entry.chunks.location(index) {
                archives.insert(file_range, Some(&entry.fqn));
            }
        }
    }
    archives.into_iter().collect()
}

/// Verifies the CRC-32 of every zip record in the archive at `file_range`. Zip records without a CRC-32 pass, because
/// PyTorch can save without checksums. Calls `each_block` with the length of every block that is read.
///
/// # Errors
/// `Malformed` naming the zip record whose CRC-32 is wrong; `Io`; the error of `each_block`.
pub fn check(files: &Files, file_range: FileRange, each_block: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
    let source = ArchiveSource::new(files, file_range.file);
    let mut each_block = |len| each_block(len).map_err(io::Error::other);
    source.archive(file_range)?.check(&source, &mut each_block).map_err(|error| source.error(error))
}
