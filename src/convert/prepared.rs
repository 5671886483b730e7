//! A fully planned conversion, and the check of its destination. All sizes and offsets are in bytes.

use std::path::Path;

use super::nesting::refuse_nesting;
use super::replaceable::check_replaceable;
use super::source::ConversionSource;
use crate::catalog::{Fqn, Reservation};
use crate::convert::options::ConvertOptions;
use crate::error::{Error, Result};
use crate::exec::Extents;
use crate::exec::division::{even_share, own_rank_files};
use crate::exec::sidecar_files::{SidecarFile, check_distinct};
use crate::format::Format;
use crate::launch::Part;
use crate::publish::DestinationKind;
use crate::storage::lookup;

/// A fully planned conversion: the files of the destination are laid out, and nothing is written yet.
pub struct Prepared {
    /// Opened source, with the selected names.
    pub source: ConversionSource,
    /// Layout of the output files and their tensors.
    pub reservation: Reservation,
    /// Sidecar files that are copied to the destination unchanged.
    pub carried: Vec<SidecarFile>,
    /// Kind of the destination: one file or a folder.
    pub shape: DestinationKind,
    /// Format of the destination.
    pub to: Format,
    /// Pairs of tied names (alias, kept): the alias is only recorded, and the tensor is written under the name `kept`.
    pub tied: Vec<(Fqn, Fqn)>,
    /// Notes for the user from planning.
    pub notes: Vec<String>,
}

impl Prepared {
    /// Returns the total length of all output files and sidecar files, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.reservation.len_bytes() + self.carried.iter().map(|file| file.len).sum::<u64>()
    }

    /// Returns the byte ranges of the output files that the process of this part writes. Sidecar files are not
    /// included.
    pub fn division(&self, part: Part) -> Extents {
        let divide = if self.source.is_exchanged() { own_rank_files } else { even_share };
        divide(&self.reservation.files, part)
    }

    /// Adds two facts to an error: the checkpoint, and the node of the process that the error names. Informs the other
    /// processes why this process ends.
    pub fn failed(&mut self, error: Error) -> Error {
        let error = self.source.locate(error);
        if let Some(peers) = self.source.peers.take() {
            self.source.has_parted = true;
            peers.fail(&error);
        }
        error
    }
}

/// Checks that DST may be written. Does not check whether another run works on it.
///
/// # Errors
/// `Usage` if DST overlaps with a checkpoint that is read, if it may not be replaced, or if two of its files have one
/// path.
pub fn check_destination(conversion: &Prepared, args: &ConvertOptions, destination: &Path) -> Result<()> {
    let read = conversion.source.paths_read();
    read.iter().try_for_each(|(name, path)| refuse_nesting(name, path, destination))?;
    for (_, path) in &read {
        if lookup::is_file(path)? {
            // If the path is an index file, the files that it names must not be overwritten either.
            let files = &conversion.source.checkpoint.files;
            files.ids().try_for_each(|id| refuse_nesting("the source", files.path(id), destination))?;
        }
    }
    if args.execute.overwrite {
        check_replaceable(destination, conversion.shape, &conversion.carried)?;
    }
    check_distinct(&conversion.reservation.files, &conversion.carried)
}
