//! The last step of planning, which all conversions share: checks of the layout of the destination, and the choice of
//! the bucket size (the maximum bytes that a process sends in one exchange round).

use rayon::prelude::*;

use super::dequantize;
use super::estimate::room_for_rounds;
use super::options::{ConvertOptions, OnConflict};
use super::prepared::Prepared;
use super::run::Run;
use super::source_options::refuse_without_tensors;
use crate::catalog::{Reservation, TensorId};
use crate::error::{Error, Result};

/// Completes a plan: frees the memory of the selection, checks the layout of the destination and, if processes exchange
/// data, agrees with the other processes on the bucket size.
///
/// # Errors
/// `Usage` for a result that is too large or has no tensors, `Coverage` for a source tensor with gaps, and errors from
/// the other processes.
pub fn complete(prepared: &mut Prepared, args: &ConvertOptions, run: &Run<'_>) -> Result<()> {
    prepared.source.drop_selection();
    if let Some(dtype) = args.select.map.dequantize {
        let note = dequantize::rewrite_config(&mut prepared.carried, &mut prepared.reservation, dtype)?;
        prepared.notes.extend(note);
    }
    let checked = check_len(&prepared.reservation)
        .and_then(|()| check_tensors(prepared, args))
        .and_then(|()| check_coverage(prepared));
    let chosen = checked.and_then(|()| choose_round_length(prepared, args, run));
    chosen.map_err(|error| prepared.failed(error))
}

/// Chooses the largest bucket size (the limit of an exchange round) with which the buffers of the rounds and the
/// headers of DST fit into memory. Does nothing if processes exchange no data, otherwise collective.
fn choose_round_length(prepared: &mut Prepared, args: &ConvertOptions, run: &Run<'_>) -> Result<()> {
    if !prepared.source.is_exchanged() {
        return Ok(());
    }
    let room = room_for_rounds(prepared, &run.options, args.source.max_memory);
    prepared.source.peers.as_mut().map_or(Ok(()), |peers| peers.agree_on_bucket(room, run.progress))
}

/// Checks that the total length of DST is below 2^62 bytes. A tensor of the source may have any declared size, and
/// every rank may get a copy of the tensor. After this check, sums of file lengths cannot overflow.
fn check_len(reservation: &Reservation) -> Result<()> {
    let total: u128 = reservation.files.iter().map(|file| u128::from(file.len)).sum();
    if total < 1 << 62 {
        return Ok(());
    }
    Err(Error::usage(
        format!("the files of DST would have {total} bytes in total: no file system can store 2^62 bytes"),
        "SRC may contain expanded (stride-0) tensors; make them contiguous before saving",
    ))
}

/// Checks for every source tensor that its chunks cover each element exactly once, apart from replicas. A gap is then
/// an error before any byte is copied.
fn check_coverage(prepared: &Prepared) -> Result<()> {
    /// Minimum number of tensors that one parallel task checks.
    const TENSORS: usize = 1 << 10;
    let mut sources: Vec<TensorId> = prepared.reservation.tensors.iter().map(|tensor| tensor.source).collect();
    sources.sort_unstable();
    sources.dedup();
    let catalog = &prepared.source.checkpoint.catalog;
    let sources = catalog.with_sources(&sources);
    let check = |id: &TensorId| catalog.tensor(*id).tilings().err();
    sources.par_iter().with_min_len(TENSORS).find_map_first(check).map_or(Ok(()), Err)
}

/// Checks that the result has at least one tensor. A result without tensors is allowed in two cases: `--on-conflict
/// drop` is given, which may leave out all tensors; or options select names or series.
fn check_tensors(prepared: &Prepared, args: &ConvertOptions) -> Result<()> {
    if !prepared.reservation.tensors.is_empty() || args.checks.on_conflict == Some(OnConflict::Drop) {
        return Ok(());
    }
    refuse_without_tensors(&args.src, &prepared.source.checkpoint, &args.source, &args.select)
}
