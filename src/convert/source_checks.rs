//! Checks that read the data of a source: stored checksums against the data, and replicas of a tensor against each
//! other.
//!
//! Each check reports which tensor or file is wrong. The progress display counts checked bytes.

use rayon::prelude::*;

use super::peers::Peers;
use super::run::Run;
use super::source_options::input;
use crate::catalog::{Class, Dtype, Fqn, TensorEntry, TensorId};
use crate::error::{CatalogError, Error, Result};
use crate::exec::compare::{self, ReplicaDifference};
use crate::exec::{Reporter, Silent};
use crate::format::{Checkpoint, checksum};
use crate::launch::Part;
use crate::progress::Task;
use crate::storage::FileRange;

/// Checks every stored checksum against its data. Returns the name of each wrong file or item, with the error. The
/// processes of a run divide the files; each process checks only files that it can read.
pub fn sums(checkpoint: &Checkpoint, run: &Run<'_>) -> Vec<(String, Error)> {
    let Part { index, of } = run.launch.part;
    let archives = checksum::archives(&checkpoint.catalog);
    let all: Vec<u32> = (0..of).collect();
    let is_own = |(number, (archive, _)): &(usize, (FileRange, Option<&Fqn>))| {
        let seen_by = checkpoint.files.seen_by(archive.file).unwrap_or(&all);
        seen_by.get(number % seen_by.len().max(1)) == Some(&index)
    };
    let archives: Vec<_> = archives.into_iter().enumerate().filter(is_own).map(|(_, archive)| archive).collect();
    let total = archives.iter().map(|(archive, _)| archive.len).sum();
    let progress = Task::start(run.progress, "checking sums", total);
    let outcomes: Vec<Result<()>> = archives
        .par_iter()
        .map(|(archive, _)| {
            let mut summed = 0;
            checksum::check(&checkpoint.files, *archive, &mut |bytes| {
                summed += bytes;
                progress.advance(bytes);
                run.stop.check()
            })?;
            // The bytes between zip records have no checksum.
            progress.advance(archive.len.saturating_sub(summed));
            Ok(())
        })
        .collect();
    let name = |index: usize| {
        let (archive, fqn) = &archives[index];
        fqn.map_or_else(|| checkpoint.files.path(archive.file).display().to_string(), ToString::to_string)
    };
    let wrong = outcomes.into_iter().enumerate().filter_map(|(index, outcome)| Some((index, outcome.err()?)));
    wrong.map(|(index, error)| (name(index), error)).collect()
}

/// The replicas that a check compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replicas {
    /// Only replicas of plain tensors: several ranks store the complete tensor, but no metadata states that the stored
    /// tensors are replicas.
    Plain,
    /// All replicas: of plain tensors, DTensors and ShardedTensors.
    All,
}

impl Replicas {
    fn covers(self, entry: &TensorEntry) -> bool {
        entry.chunks.len() > 1 && (self == Self::All || entry.class == Class::Tensor)
    }
}

/// Returns the first difference of each of `tensors` whose replicas differ. With `peers`, also compares replicas in files
/// that no single process sees; the call is then collective.
///
/// # Errors
/// Errors from reading: `Coverage`, `Malformed`, `Io`, `Stopped`.
pub fn differing(
    checkpoint: &Checkpoint,
    tensors: &[TensorId],
    which: Replicas,
    peers: Option<&Peers>,
    run: &Run<'_>,
) -> Result<Vec<(TensorId, ReplicaDifference)>> {
    let tensors: Vec<(TensorId, &TensorEntry)> = (checkpoint.catalog.with_sources(tensors).iter())
        .map(|id| (*id, checkpoint.catalog.tensor(*id)))
        .filter(|(_, entry)| which.covers(entry))
        .collect();
    let total = tensors.iter().map(|(_, entry)| entry.len_bytes() * (entry.chunks.len() as u64 - 1)).sum();
    let progress = Task::start(run.progress, "comparing replicas", total);
    if let Some(peers) = peers {
        let ids: Vec<TensorId> = tensors.iter().map(|(id, _)| *id).collect();
        return peers.differing(checkpoint, &ids, &progress, run);
    }
    let mut found = Vec::new();
    for (id, entry) in tensors {
        let difference = compare::replica_difference(input(checkpoint), entry, &run.options, &progress, &run.stop)?;
        found.extend(difference.map(|difference| (id, difference)));
    }
    Ok(found)
}

/// Describes the first difference between two tensors after a cast to `dtype`, or returns `None` if they are equal.
///
/// # Errors
/// Errors from reading.
pub fn difference(checkpoint: &Checkpoint, pair: [TensorId; 2], dtype: Dtype, run: &Run<'_>) -> Result<Option<String>> {
    let [left, right] = pair.map(|id| (input(checkpoint), checkpoint.catalog.tensor(id)));
    let found = compare::first_difference(left, right, dtype, &run.options, &Silent, &run.stop)?;
    Ok(found.map(|difference| difference.detail(&left.1.shape)))
}

/// Hint for a conflict between ranks that the user can resolve by choosing the value of one rank.
const CHOICE: &str = "set options::on_conflict: rank0 keeps the lowest rank's value";

/// Describes the index of the first difference: `first difference at [2, 1]`, or `in the only element` for a scalar.
pub fn position(index: &[u64]) -> String {
    if index.is_empty() { String::from("in the only element") } else { format!("first difference at index {index:?}") }
}

/// Returns the error for a tensor whose replicas differ. With `peers`, the error names the processes that see the
/// replicas.
pub fn replica_conflict(
    checkpoint: &Checkpoint,
    id: TensorId,
    difference: &ReplicaDifference,
    peers: Option<&Peers>,
) -> Error {
    let entry = checkpoint.catalog.tensor(id);
    let chunks = [difference.first, difference.second];
    let listed = match peers.and_then(|peers| peers.whereabouts(checkpoint, entry, chunks)) {
        Some(places) => {
            format!("{places}; copy both files into one folder, and `dtshard verify` lists all such tensors")
        }
        None => String::from("`dtshard verify` lists all such tensors"),
    };
    let (first, second) = (entry.chunk_name(difference.first), entry.chunk_name(difference.second));
    Error::Catalog(CatalogError::Conflict {
        fqn: entry.fqn.to_string(),
        what: if entry.class == Class::Tensor { "a plain tensor" } else { "a replica" },
        between: format!("{first} and {second}"),
        detail: position(&difference.index(entry)),
        hint: Some(match (entry.class, &entry.sharding) {
            (Class::Tensor, Some(_)) if !checkpoint.catalog.model_parallel_groups.is_empty() => format!(
                "the files record that these ranks hold replicas: check that all files come from one save of one job; or \
                 {CHOICE}; {listed}"
            ),
            (Class::Tensor, Some(_)) => String::from(
                "the declared layout makes these ranks replicas: if they hold different shards, declare them with \
                 options::src_placements; if they hold partial values, use options::reduce",
            ),
            (Class::Tensor, None) if !checkpoint.format.has_rank_files() => {
                format!("{CHOICE}, per-rank keeps the values of all ranks, drop leaves the tensor out; {listed}")
            }
            (Class::Tensor, None) => format!(
                "{CHOICE}, per-rank keeps the values of all ranks, drop leaves the tensor out; if the ranks hold \
                 shards of the tensor, declare them with options::src_mesh and options::src_placements; {listed}"
            ),
            _ => format!("{CHOICE}, drop leaves the tensor out; {listed}"),
        }),
    })
}
