//! `--verify`: what was written is read back before anybody can see it.

use std::path::Path;

use rayon::prelude::*;

use super::convert::Conversion;
use super::input;
use super::progress::Progress;
use super::run::Run;
use crate::catalog::{Catalog, OutputFile};
use crate::error::{Error, Result};
use crate::exec::literals::first_difference;
use crate::exec::{Input, Silent, compare};
use crate::format::resolve;
use crate::storage::Files;

/// Compare what was written with the source, and what lies between tensors with what was laid out.
///
/// # Errors
/// `Conflict`, `Malformed` where they differ, `Io`.
pub fn read_back(conversion: &Conversion<'_>, folder: &Path, run: &Run<'_>) -> Result<()> {
    let checkpoint = &conversion.source.checkpoint;
    let mut files = Files::new(checkpoint.files.io());
    for file in &conversion.reservation.files {
        files.add(folder.join(&file.path))?;
    }
    check_literals(conversion, folder)?;
    let catalog = Catalog::empty();
    let written = Input { files: &files, catalog: &catalog, resolve: &resolve };
    let progress = Progress::start(run.printer, "verifying", conversion.reservation.payload_bytes());
    for tensor in &conversion.reservation.tensors {
        let left = (input(checkpoint), checkpoint.catalog.tensor(tensor.source));
        let right = (written, &tensor.entry);
        let found = if tensor.shares.is_empty() {
            compare::first_difference(left, right, tensor.dtype(), &run.options, &progress, &run.stop)?
                .map(|difference| difference.detail(tensor.entry.numel()))
        } else {
            compare::share_difference(left, written, tensor, &run.options, &progress, &run.stop)?
                .map(|chunk| format!("{} is not as it should be", tensor.entry.chunk_name(chunk)))
        };
        // Rank files have copies of their own of what is replicated.
        let found = match found {
            None if tensor.shares.is_empty() => {
                compare::replica_difference(written, &tensor.entry, &run.options, &Silent, &run.stop)?
                    .map(|difference| format!("{} is not as the others", tensor.entry.chunk_name(difference.second)))
            }
            found => found,
        };
        if let Some(detail) = found {
            return Err(Error::Conflict {
                fqn: tensor.entry.fqn.to_string(),
                what: "a tensor",
                between: "the source and what was written".into(),
                detail,
                hint: Some("memory or disk is at fault; nothing was published. --resume would find the same again, --restart writes anew".into()),
            });
        }
    }
    Ok(())
}

/// Headers, pickles and directories; a run that went on with what an earlier one left has not written all of them.
fn check_literals(conversion: &Conversion<'_>, folder: &Path) -> Result<()> {
    let differing = |file: &OutputFile| {
        let path = folder.join(&file.path);
        first_difference(file, &path).map(|found| found.map(|offset| (path, offset)))
    };
    let found: Vec<Result<_>> = conversion.reservation.files.par_iter().map(differing).collect();
    match found.into_iter().find_map(Result::transpose).transpose()? {
        None => Ok(()),
        Some((path, offset)) => {
            Err(Error::malformed(&path, format!("byte {offset}"), "what was laid out", "another byte"))
        }
    }
}
