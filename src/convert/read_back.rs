//! `--verify`: what was written is read back before anybody can see it.

use std::ops::Range;

use rayon::prelude::*;

use super::prepared::Prepared;
use super::reading::input;
use super::run::Run;
use crate::catalog::{CRC_BYTES, Catalog, OutputFile};
use crate::error::{CatalogError, Error, Result};
use crate::exec::checksums::{ChecksumMismatch, first_mismatch};
use crate::exec::header_bytes::first_difference;
use crate::exec::sidecar_files::is_copied;
use crate::exec::{Extents, Input, Silent, compare};
use crate::format::resolve;
use crate::progress::Task;
use crate::storage::{AnchoredPath, Files};

/// What is not as it should be.
pub struct Mismatch {
    /// Of the first that was found.
    pub error: Error,
    /// Where all of it lies, in files that are written; nowhere if it is in one that is carried.
    pub bytes: Extents,
}

/// Compare what was written with the source, what lies between tensors with what was laid out, sums with what they are of,
/// and what was carried with what it is of. `hint` says what to do where something differs, of which the first is given.
///
/// # Errors
/// `Io`, `Stopped`.
pub fn read_back(conversion: &Prepared, folder: &AnchoredPath, hint: &str, run: &Run<'_>) -> Result<Option<Mismatch>> {
    let look = ReadBack { conversion, folder, hint, run };
    if let Some(wrong) = look.around_tensors()? {
        return Ok(Some(wrong));
    }
    look.at_tensors()
}

struct ReadBack<'a> {
    conversion: &'a Prepared,
    folder: &'a AnchoredPath,
    hint: &'a str,
    run: &'a Run<'a>,
}

impl ReadBack<'_> {
    fn at_tensors(&self) -> Result<Option<Mismatch>> {
        let Self { conversion, folder, run, .. } = *self;
        let checkpoint = &conversion.source.checkpoint;
        let mut files = Files::new(checkpoint.files.io());
        for file in &conversion.reservation.files {
            files.add(&folder.join(&file.path))?;
        }
        let catalog = Catalog::empty();
        let written = Input { files: &files, catalog: &catalog, resolve: &resolve };
        let progress = Task::start(run.progress, "verifying", conversion.reservation.payload_bytes());
        // All are looked at, so that all that is wrong is written again at once.
        let (mut first, mut bytes) = (None, Extents::new());
        // A value of a rank that the target does not have is in no file.
        for tensor in conversion.reservation.tensors.iter().filter(|tensor| !tensor.entry.chunks.is_empty()) {
            let left = (input(checkpoint), checkpoint.catalog.tensor(tensor.source));
            let right = (written, &tensor.entry);
            let found = if tensor.shares.is_empty() {
                compare::first_difference(left, right, tensor.dtype(), &run.options, &progress, &run.stop)?
                    .map(|difference| difference.detail(&tensor.entry.shape))
            } else {
                compare::share_difference(left, written, tensor, &run.options, &progress, &run.stop)?
                    .map(|chunk| format!("{} is not as it should be", tensor.entry.chunk_name(chunk)))
            };
            // Rank files have copies of their own of what is replicated.
            let found = match found {
                None if tensor.shares.is_empty() => {
                    compare::replica_difference(written, &tensor.entry, &run.options, &Silent, &run.stop)?.map(
                        |difference| format!("{} is not as the others", tensor.entry.chunk_name(difference.second)),
                    )
                }
                found => found,
            };
            if let Some(detail) = found {
                first.get_or_insert_with(|| {
                    Error::Catalog(CatalogError::Conflict {
                        fqn: tensor.entry.fqn.to_string(),
                        what: "a tensor",
                        between: "the source and what was written".into(),
                        detail,
                        hint: Some(self.hint.into()),
                    })
                });
                for chunk in 0..tensor.entry.chunks.len() {
                    if let Some((file, offset)) = tensor.file_offset(chunk) {
                        bytes.insert(file, offset..offset + tensor.chunk_bytes(chunk));
                    }
                }
            }
        }
        Ok(first.map(|error| Mismatch { error, bytes }))
    }

    /// Headers, pickles and directories, of which one run has not written all where it went on with what an earlier one
    /// left; sums; and files that are carried.
    fn around_tensors(&self) -> Result<Option<Mismatch>> {
        let Self { conversion, folder, .. } = *self;
        let written = &conversion.reservation.files;
        let found: Vec<Result<Option<Mismatch>>> =
            written.par_iter().enumerate().map(|(index, file)| self.around_tensors_of(index, file)).collect();
        let found = found.into_iter().find_map(Result::transpose).transpose()?;
        if found.is_some() {
            return Ok(found);
        }
        for file in &conversion.carried {
            if !is_copied(file, folder, true)? {
                let message = format!("{} is not what was copied there", folder.join(&file.to).display());
                let error = Error::usage(message, self.hint);
                return Ok(Some(Mismatch { error, bytes: Extents::new() }));
            }
        }
        Ok(None)
    }

    fn around_tensors_of(&self, index: usize, file: &OutputFile) -> Result<Option<Mismatch>> {
        let path = self.folder.join(&file.path);
        let index = u32::try_from(index).expect("fewer than 2^32 files");
        let wrong = |at: Range<u64>, error| {
            let mut bytes = Extents::new();
            bytes.insert(index, at);
            Mismatch { error, bytes }
        };
        if let Some(offset) = first_difference(file, &path)? {
            let message = format!("{}: byte {offset} is not what was laid out", path.display());
            return Ok(Some(wrong(offset..offset + 1, Error::usage(message, self.hint))));
        }
        Ok(first_mismatch(file, &path, &self.run.stop)?.map(|ChecksumMismatch { range: of, site, expected, found }| {
            let message = format!(
                "{}: CRC-32 of bytes {} to {}, at byte {site}: expected {expected:08x}, found {found:08x}",
                path.display(),
                of.start,
                of.end
            );
            let mut wrong = wrong(of, Error::usage(message, self.hint));
            wrong.bytes.insert(index, site..site + CRC_BYTES);
            wrong
        }))
    }
}
