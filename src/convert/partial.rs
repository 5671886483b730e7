//! `Partial`: which of the source's summands each rank of a target gets, and what was reduced on the way.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use indexmap::IndexMap;

use crate::catalog::{Catalog, Reservation, Reserved};
use crate::error::{Error, Result};
use crate::layout::partial::Share;
use crate::layout::shards::{MeshPlacement, SharedTensor};
use crate::layout::{DeviceMesh, Dims, LayoutError, Placement, ReduceOp};
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
                LayoutError::NoPartialValues { .. } => "P(sum), P(avg), P(max) and P(min) can be made of a value",
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
    shared: &SharedTensor,
) -> Result<Vec<Arc<Share>>, LayoutError> {
    let entry = source.tensor(tensor.source);
    let from = entry.sharding.as_ref().map(|sharding| source.on_mesh(sharding));
    let to = MeshPlacement { mesh, shared };
    let mut known: HashMap<Share, Arc<Share>> = HashMap::new();
    let each = (0..tensor.entry.chunks.len()).map(|chunk| {
        let rank = tensor.entry.chunks.rank(chunk).expect("chunks of rank files have ranks");
        let at: Dims = mesh.coordinate(rank).expect("they are ranks of the mesh");
        let share = Share::new(&entry.shape, from, to, &at)?;
        Ok(known.entry(share.clone()).or_insert_with(|| Arc::new(share)).clone())
    });
    each.collect()
}

/// What to tell: what was reduced, and what was divided to be summed again.
pub fn notes(source: &Catalog, reservation: &Reservation) -> Vec<String> {
    reduced(source, reservation).into_iter().chain(divided(reservation)).collect()
}

/// `3 tensors reduced: 1 of P(avg) on dp and cp; 2 of P(sum) on dp`
fn reduced(source: &Catalog, reservation: &Reservation) -> Option<String> {
    let mut reduced: BTreeMap<String, usize> = BTreeMap::new();
    for tensor in &reservation.tensors {
        let entry = source.tensor(tensor.source);
        let several = || tensor.shares.iter().any(|share| share.partial_values.len() > 1);
        let Some(sharding) = &entry.sharding else { continue };
        if entry.partial_values.is_none() || !tensor.shares.is_empty() && !several() {
            continue;
        }
        *reduced.entry(summed(source.on_mesh(sharding))).or_default() += 1;
    }
    let total: usize = reduced.values().sum();
    let list: Vec<String> = reduced.iter().map(|(ops, number)| format!("{number} of {ops}")).collect();
    (total > 0).then(|| format!("{} reduced: {}", count(total, "tensor"), list.join("; ")))
}

/// `P(avg) on dp and cp`
fn summed(MeshPlacement { mesh, shared }: MeshPlacement<'_>) -> String {
    let mut dims: IndexMap<String, Vec<String>> = IndexMap::new();
    for (dim, placement) in shared.placements.iter().enumerate().filter(|(_, placement)| placement.is_partial()) {
        let name = mesh.names().map_or_else(|| format!("dim {dim}"), |names| names[dim].clone());
        dims.entry(placement.to_string()).or_default().push(name);
    }
    let each = dims.into_iter().map(|(op, dims)| format!("{op} on {}", dims.join(" and ")));
    each.collect::<Vec<_>>().join(", ")
}

/// `3 tensors of P(sum) made of values: divided by 3, rounded`. Integers with a remainder are refused, and halves of
/// floats are exact.
fn divided(reservation: &Reservation) -> Vec<String> {
    let sums = |shared: &SharedTensor| shared.placements.contains(&Placement::Partial(ReduceOp::Sum));
    let mut divided: BTreeMap<u64, usize> = BTreeMap::new();
    for tensor in reservation.tensors.iter().filter(|tensor| tensor.shared.as_deref().is_some_and(sums)) {
        let rounds = |divisor: &u64| tensor.entry.dtype.is_float() && !divisor.is_power_of_two();
        if let Some(divisor) = tensor.shares.iter().map(|share| share.divisor).find(rounds) {
            *divided.entry(divisor).or_default() += 1;
        }
    }
    let note = |(divisor, number)| {
        format!("{} of P(sum) made of values: divided by {divisor}, rounded", count(number, "tensor"))
    };
    divided.into_iter().map(note).collect()
}
