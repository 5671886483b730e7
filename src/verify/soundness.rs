//! Soundness of one checkpoint: coverage, replicas and stored checksums.

use std::collections::HashSet;

use super::findings::Findings;
use crate::catalog::{Catalog, Path, TensorEntry, TensorId, path, state_dict};
use crate::convert::Run;
use crate::convert::source_checks;
use crate::convert::source_options::input;
use crate::error::{Error, FormatError, Result};
use crate::exec::compare;
use crate::format::Checkpoint;
use crate::progress::Task;

/// Checks that chunks cover every element of each tensor exactly once, that replicas are equal, and that stored
/// checksums match. Checks only the tensors and objects of `selected`, but all checksums. Adds each problem to `found`.
pub fn sound(checkpoint: &Checkpoint, selected: &Catalog, run: &Run<'_>, found: &mut Findings) -> Result<()> {
    let catalog = &checkpoint.catalog;
    let (is_in_source, is_selected) = (tensors_of(catalog), tensors_of(selected));
    let is_left_out = |id: TensorId| is_in_source.contains(&id) && !is_selected.contains(&id);
    found.not_comparable.extend(catalog.dropped.iter().map(|name| format!("{name}, dropped")));
    for conflict in selected.conflicts() {
        found.absorb("", conflict)?;
    }
    for (name, error) in source_checks::sums(checkpoint, run) {
        found.absorb(&name, error)?;
    }
    let mut plain_replicas = 0;
    let kept = (0..).map(TensorId).zip(&catalog.tensors).filter(|(id, _)| !is_left_out(*id)).map(|(_, entry)| entry);
    let replica_bytes = kept.filter(|entry| entry.chunks.len() > 1).map(TensorEntry::len_bytes).sum();
    let progress = Task::start(run.progress, "comparing replicas", replica_bytes);
    for (id, entry) in (0..).map(TensorId).zip(&catalog.tensors) {
        if let Some(why) = &entry.unreadable {
            found.not_comparable.push(format!("{}, {}", entry.fqn, why.kind));
            continue;
        }
        if is_left_out(id) {
            continue;
        }
        let located = compare::check_locations(input(checkpoint), entry);
        if let Err(Error::Format(FormatError::Unsupported { what, .. })) = &located {
            // The metadata of a DCP directory does not have the class of a tensor; the data file has it.
            found.not_comparable.push(what.clone());
            continue;
        }
        let checked = located.and_then(|()| {
            if state_dict::is_random_state(entry.fqn.as_str()) {
                return Ok(None);
            }
            compare::replica_difference(input(checkpoint), entry, &run.options, &progress, &run.stop)
        });
        match checked {
            Ok(None) => {}
            Ok(Some(pair)) => {
                let (first, second) = (entry.chunk_name(pair.first), entry.chunk_name(pair.second));
                let index = pair.index(entry);
                let detail = format!("{first} and {second} differ, {}", source_checks::position(&index));
                found.add_at(&index, entry.fqn.as_str(), "replica", detail);
                plain_replicas += usize::from(!entry.is_shared());
            }
            Err(error) => found.absorb(entry.fqn.as_str(), error)?,
        }
        found.tensors += 1;
        found.bytes += entry.len_bytes();
    }
    if plain_replicas > 0 {
        // Only for rank files, the user can declare a layout.
        found.hints.push(String::from(if checkpoint.format.has_rank_files() {
            "plain tensors are treated as replicas; if they are shards, declare the layout with options::src_mesh and \
             options::src_placements or options::src_plan; if they are partial values, use options::reduce"
        } else {
            "ranks have different values of a tensor that is not sharded: use options::on_conflict to choose a value in a \
             conversion, or options::exclude to leave the tensor out"
        }));
    }
    Ok(())
}

/// Returns the tensors in the state dict of a catalog.
fn tensors_of(catalog: &Catalog) -> HashSet<TensorId> {
    let mut found = HashSet::new();
    path::tensors(&catalog.state, &Path::default(), &mut |_, id| {
        found.insert(id);
    });
    found
}
