//! Checking the CRC-32s that torch.save archives carry: of whole files, and of every item of DCP data files.
//!
//! torch.load never looks at them, so a flipped bit in a file loads in silence there.

use std::collections::BTreeSet;

use super::zip::Archive;
use super::{Checkpoint, Format};
use crate::catalog::Place;
use crate::error::Result;
use crate::storage::{FileId, Files};

/// A stretch of a file that is one archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stretch {
    pub file: FileId,
    pub offset: u64,
    pub len: u64,
}

/// The archives of a checkpoint; none where the format has no checksums.
#[must_use]
pub fn archives(checkpoint: &Checkpoint) -> Vec<Stretch> {
    match checkpoint.format {
        Format::Safetensors => Vec::new(),
        Format::Torch | Format::TorchRanks => {
            let whole = |file| Stretch { file, offset: 0, len: checkpoint.files.len_bytes(file) };
            checkpoint.files.ids().map(whole).collect()
        }
        Format::Dcp => {
            let tensors = checkpoint.catalog.tensors.iter();
            let places = tensors.flat_map(|entry| (0..entry.chunks.len()).map(|index| entry.chunks.place(index)));
            let items: BTreeSet<Stretch> = places
                .filter_map(|place| match place {
                    Place::Item { file, offset, len } => Some(Stretch { file, offset, len }),
                    _ => None,
                })
                .collect();
            items.into_iter().collect()
        }
    }
}

/// Check every record of an archive whose writer computed sums.
///
/// # Errors
/// `Malformed` naming the record, `Io`, or what `each_block` returns, which is told of every block that is read.
pub fn check(files: &Files, stretch: Stretch, each_block: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
    let archive = Archive::read(files, stretch.file, stretch.offset, stretch.len)?;
    // All zero: the writer did not compute them (an empty record's sum is zero anyway).
    if archive.records().iter().all(|(_, record)| record.crc == 0) {
        return Ok(());
    }
    for (name, _) in archive.records() {
        archive.check_record(files, name, each_block)?;
    }
    Ok(())
}
