//! Checking the CRC-32s that torch.save archives carry: of whole files, and of every item of DCP data files.
//!
//! torch.load never looks at them, so a flipped bit in a file loads in silence there.

use std::collections::BTreeSet;

use super::zip::Archive;
use super::{Checkpoint, Format};
use crate::catalog::Place;
use crate::error::Result;
use crate::storage::{Files, Stretch};

/// The archives of a checkpoint; none where the format has no checksums.
#[must_use]
pub fn archives(checkpoint: &Checkpoint) -> Vec<Stretch> {
    match checkpoint.format {
        Format::Safetensors => Vec::new(),
        Format::Torch | Format::TorchRanks => checkpoint.files.ids().map(|file| checkpoint.files.whole(file)).collect(),
        Format::Dcp => {
            let tensors = checkpoint.catalog.tensors.iter();
            let places = tensors.flat_map(|entry| (0..entry.chunks.len()).map(|index| entry.chunks.place(index)));
            let items: BTreeSet<Stretch> = places
                .filter_map(|place| match place {
                    Place::Item(stretch) => Some(stretch),
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
    let archive = Archive::read(files, stretch)?;
    // All zero: the writer did not compute them (an empty record's sum is zero anyway).
    if archive.records().iter().all(|(_, record)| record.crc == 0) {
        return Ok(());
    }
    for (name, _) in archive.records() {
        archive.check_record(files, name, each_block)?;
    }
    Ok(())
}
