//! `Partial`: which of the source's summands each rank of a target gets, and what was reduced on the way.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::catalog::{Catalog, Reservation, Reserved};
use crate::error::{Error, Result};
use crate::layout::partial::Share;
use crate::layout::rules::{OnMesh, Shared};
use crate::layout::{DeviceMesh, Dims, LayoutError, comma_list};
use crate::quantity::count;

/// Say of every tensor that ranks of the target hold as summands which of the source's each gets. All others get values.
///
/// # Errors
/// `Unsupported` where there is no way from one to the other.
pub fn share(source: &Catalog, mesh: &DeviceMesh, reservation: &mut Reservation) -> Result<()> {
    for tensor in &mut reservation.tensors {
        let Some(shared) = tensor.shared.as_ref().filter(|shared| shared.is_partial()) else { continue };
        tensor.shares = shares(source, mesh, tensor, shared).map_err(|error| {
            let hint = match error {
                LayoutError::NoSummands { .. } => "P(sum), P(avg), P(max) and P(min) can be made of a value",
                _ => "reduce it: give it S or R placements",
            };
            Error::unsupported(format!("{}: {error}", tensor.entry.fqn), hint)
        })?;
    }
    Ok(())
}

/// One a chunk; those that are equal are kept once.
fn shares(
    source: &Catalog,
    mesh: &DeviceMesh,
    tensor: &Reserved,
    shared: &Shared,
) -> Result<Vec<Arc<Share>>, LayoutError> {
    let entry = source.tensor(tensor.source);
    let from = entry.sharding.as_ref().map(|sharding| source.on_mesh(sharding));
    let to = OnMesh { mesh, shared };
    let mut known: HashMap<Share, Arc<Share>> = HashMap::new();
    let each = (0..tensor.entry.chunks.len()).map(|chunk| {
        let rank = tensor.entry.chunks.rank(chunk).expect("chunks of rank files have ranks");
        let at: Dims = mesh.coordinate(rank).expect("they are ranks of the mesh");
        let share = Share::of(&entry.shape, from, to, &at)?;
        Ok(known.entry(share.clone()).or_insert_with(|| Arc::new(share)).clone())
    });
    each.collect()
}

/// `3 tensors reduced: 1 P(avg),P(sum), 2 P(sum)`
pub fn note(source: &Catalog, reservation: &Reservation) -> Option<String> {
    let mut reduced: BTreeMap<String, usize> = BTreeMap::new();
    for tensor in &reservation.tensors {
        let entry = source.tensor(tensor.source);
        let several = || tensor.shares.iter().any(|share| share.summands.len() > 1);
        let Some(sharding) = &entry.sharding else { continue };
        if entry.summands.is_none() || !tensor.shares.is_empty() && !several() {
            continue;
        }
        let partial = sharding.shared.placements.iter().copied().filter(|placement| placement.is_partial());
        let ops = comma_list(&partial.collect::<Vec<_>>());
        *reduced.entry(ops).or_default() += 1;
    }
    let total: usize = reduced.values().sum();
    let list: Vec<String> = reduced.iter().map(|(ops, number)| format!("{number} {ops}")).collect();
    (total > 0).then(|| format!("{} reduced: {}", count(total, "tensor"), list.join(", ")))
}
