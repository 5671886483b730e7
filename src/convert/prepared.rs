//! A conversion with everything decided, and the check of its destination.

use std::path::Path;

use super::nesting::refuse_nesting;
use super::replaceable::check_replaceable;
use super::source::ConversionSource;
use crate::catalog::{Fqn, Reservation};
use crate::convert::options::ConvertOptions;
use crate::error::Result;
use crate::exec::Extents;
use crate::exec::division::{even_share, own_rank_files};
use crate::exec::sidecar_files::{SidecarFile, check_distinct};
use crate::format::Format;
use crate::launch::Part;
use crate::publish::DestinationKind;
use crate::storage::lookup;

/// A conversion with everything decided: the files of the destination are laid out, and nothing is written.
pub struct Prepared {
    pub source: ConversionSource,
    pub reservation: Reservation,
    /// Files that go to the destination as they are.
    pub carried: Vec<SidecarFile>,
    pub shape: DestinationKind,
    pub to: Format,
    /// Names that are not written but recorded as others: alias to kept.
    pub tied: Vec<(Fqn, Fqn)>,
    /// Further lines for the user.
    pub notes: Vec<String>,
}

impl Prepared {
    /// Returns the bytes of all output files and of the files that are copied along.
    pub fn len_bytes(&self) -> u64 {
        self.reservation.len_bytes() + self.carried.iter().map(|file| file.len).sum::<u64>()
    }

    /// Returns the ranges of the output that a part writes.
    pub fn division(&self, part: Part) -> Extents {
        let divide = if self.source.is_exchanged() { own_rank_files } else { even_share };
        divide(&self.reservation.files, part)
    }
}

/// Checks that DST may be written to, as far as a look shows that does not ask who works on it.
///
/// # Errors
/// `Usage` where it may not.
pub fn check_destination(conversion: &Prepared, args: &ConvertOptions, destination: &Path) -> Result<()> {
    let read = conversion.source.paths_read();
    read.iter().try_for_each(|(name, path)| refuse_nesting(name, path, destination))?;
    for (_, path) in &read {
        if lookup::is_file(path)? {
            // An index stands for the files it names.
            let files = &conversion.source.checkpoint.files;
            files.ids().try_for_each(|id| refuse_nesting("the source", files.path(id), destination))?;
        }
    }
    if args.execute.overwrite {
        check_replaceable(destination, conversion.shape, &conversion.carried)?;
    }
    check_distinct(&conversion.reservation.files, &conversion.carried)
}
