//! Soundness of one checkpoint: coverage, replicas and stored checksums.

use super::findings::Findings;
use crate::catalog::{TensorEntry, state_dict};
use crate::convert::Run;
use crate::convert::source_checks;
use crate::convert::source_options::input;
use crate::error::Result;
use crate::exec::compare;
use crate::format::Checkpoint;
use crate::progress::Task;

/// Checks that chunks cover every element of each tensor exactly once, that replicas are equal, and that stored
/// checksums match.
pub fn sound(checkpoint: &Checkpoint, run: &Run<'_>, found: &mut Findings) -> Result<()> {
    let catalog = &checkpoint.catalog;
    found.not_comparable.extend(catalog.dropped.iter().map(|name| format!("{name}, dropped")));
    for conflict in catalog.conflicts() {
        found.absorb("", conflict)?;
    }
    for (name, error) in source_checks::sums(checkpoint, run) {
        found.absorb(&name, error)?;
    }
    let mut plain_replicas = 0;
    let replicas = catalog.tensors.iter().filter(|entry| entry.chunks.len() > 1);
    let progress = Task::start(run.progress, "comparing replicas", replicas.map(TensorEntry::len_bytes).sum());
    for entry in &catalog.tensors {
        if let Some(why) = &entry.unreadable {
            found.not_comparable.push(format!("{}, {}", entry.fqn, why.kind));
            continue;
        }
        let checked = compare::check_locations(input(checkpoint), entry).and_then(|()| {
            if state_dict::is_random_state(entry.fqn.as_str()) {
                return Ok(None);
            }
            compare::replica_difference(input(checkpoint), entry, &run.options, &progress, &run.stop)
        });
        match checked {
            Ok(None) => {}
            Ok(Some(pair)) => {
                let (first, second) = (entry.chunk_name(pair.first), entry.chunk_name(pair.second));
                let detail = format!("{first} and {second} differ, {}", source_checks::position(&pair.index(entry)));
                found.add(entry.fqn.as_str(), "replica", detail);
                plain_replicas += usize::from(!entry.is_shared());
            }
            Err(error) => found.absorb(entry.fqn.as_str(), error)?,
        }
        found.tensors += 1;
        found.bytes += entry.len_bytes();
    }
    if plain_replicas > 0 {
        found.hints.push(String::from(
            "plain tensors are treated as replicas; if they are shards, declare the layout with options::src_mesh and \
             options::src_placements or options::src_plan; if they are partial values, use options::reduce",
        ));
    }
    Ok(())
}
