//! Checking the CRC-32s that torch.save archives carry: of whole files, and of every item of DCP data files.
//!
//! torch.load never looks at them, so a flipped bit in a file loads in silence there.

use std::collections::BTreeMap;
use std::io;

use super::archive::ArchiveSource;
use crate::catalog::{Catalog, FileLocation, Fqn};
use crate::error::Result;
use crate::storage::{FileRange, Files};

/// The archives of a checkpoint, those of single tensors with their names; none where the format has no checksums.
#[must_use]
pub fn archives(catalog: &Catalog) -> Vec<(FileRange, Option<&Fqn>)> {
    let mut archives: BTreeMap<FileRange, Option<&Fqn>> =
        catalog.archives.iter().map(|stretch| (*stretch, None)).collect();
    for entry in &catalog.tensors {
        for index in 0..entry.chunks.len() {
            if let FileLocation::Item(stretch) = entry.chunks.location(index) {
                archives.insert(stretch, Some(&entry.fqn));
            }
        }
    }
    archives.into_iter().collect()
}

/// Check every record of an archive whose writer computed sums.
///
/// # Errors
/// `Malformed` naming the record, `Io`, or what `each_block` returns, which is told of every block that is read.
pub fn check(files: &Files, stretch: FileRange, each_block: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
    let source = ArchiveSource::new(files, stretch.file);
    let mut each_block = |len| each_block(len).map_err(io::Error::other);
    source.archive(stretch)?.check(&source, &mut each_block).map_err(|error| source.error(error))
}
