//! Verification for `--verify`: reads the written files back and compares them with the source, before they are
//! published.

use std::ops::Range;

use rayon::prelude::*;

use super::prepared::Prepared;
use super::run::Run;
use super::source_options::input;
use crate::catalog::{CRC_BYTES, Catalog, OutputFile};
use crate::error::{CatalogError, Error, Result};
use crate::exec::checksums::{ChecksumMismatch, first_mismatch};
use crate::exec::compare_headers::first_difference;
use crate::exec::sidecar_files::is_copied;
use crate::exec::{Extents, Input, Silent, compare};
use crate::format::resolve;
use crate::progress::Task;
use crate::storage::{AnchoredPath, Files};

/// Differences between the written files and the expected content.
pub struct Mismatch {
    /// Error for the first difference.
    pub error: Error,
    /// Byte ranges of the output files that must be written again. Empty if a sidecar file differs.
    pub bytes: Extents,
}

/// Compares written tensors with the source, the bytes between tensors with the layout, checksums with their data, and
/// sidecar files with their originals. Returns `None` if there is no difference. `hint` is the hint of the error in the
/// result.
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
        // All tensors are compared, so that the next run writes all differing ranges again.
        let (mut first, mut bytes) = (None, Extents::new());
        // A tensor without chunks belongs to a rank that the target does not have, so it is in no file.
        for tensor in conversion.reservation.tensors.iter().filter(|tensor| !tensor.entry.chunks.is_empty()) {
            let left = (input(checkpoint), checkpoint.catalog.tensor(tensor.source));
            let right = (written, &tensor.entry);
            let found = if tensor.shares.is_empty() {
                compare::first_difference(left, right, tensor.dtype(), &run.options, &progress, &run.stop)?
                    .map(|difference| difference.detail(&tensor.entry.shape))
            } else {
                compare::share_difference(left, written, tensor, &run.options, &progress, &run.stop)?
                    .map(|chunk| format!("{} differs from the expected content", tensor.entry.chunk_name(chunk)))
            };
            // Every rank file has its own copy of a replicated tensor, so the copies are also compared.
            let found = match found {
                None if tensor.shares.is_empty() => {
                    compare::replica_difference(written, &tensor.entry, &run.options, &Silent, &run.stop)?.map(
                        |difference| {
                            format!("{} differs from the other replicas", tensor.entry.chunk_name(difference.second))
                        },
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

    /// Compares the bytes that are not tensor data: headers, pickles, zip directories, checksums and sidecar files.
    /// Returns the first difference. These bytes may come from an earlier run, because a resumed run keeps bytes that
    /// are already written.
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
                let message = format!("{} differs from the file that was copied", folder.join(&file.to).display());
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
            let message = format!("{}: byte {offset} differs from the planned header", path.display());
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
