//! `Partial` placements: assigns the source's partial values to the ranks of the target, and reports which tensors are
//! reduced.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use indexmap::IndexMap;

use crate::catalog::{Catalog, Reservation, Reserved};
use crate::error::{Error, Result};
use crate::layout::distinct_tiles::{MeshPlacement, SharedTensor};
use crate::layout::partial::Share;
use crate::layout::{DeviceMesh, Dims, LayoutError, Placement, ReduceOp};
use crate::quantity::count;

/// Sets, for each target rank, which partial values of the source the rank combines into its own partial value. Applies
/// to tensors with a `Partial` placement in the target. For all other tensors, the partial values of the source are
/// reduced to the value of the tensor.
///
/// # Errors
/// `Unsupported` if the source's placements cannot be converted to the target's.
pub fn share(source: &Catalog, mesh: &DeviceMesh, reservation: &mut Reservation) -> Result<()> {
    for tensor in &mut reservation.tensors {
        let Some(shared) = tensor.shared.as_ref().filter(|shared| shared.is_partial()) else { continue };
        tensor.shares = shares(source, mesh, tensor, shared).map_err(|error| {
            let hint = match error {
                LayoutError::NoPartialValues { .. } => {
                    "use P(sum), P(avg), P(max) or P(min), for which dtshard computes the partial values"
                }
                _ => "reduce the tensor: use S or R placements for it",
            };
            Error::unsupported(format!("{}: {error}", tensor.entry.fqn), hint)
        })?;
    }
    Ok(())
}

/// Returns, for each chunk of a tensor in the target, how the partial value of the chunk's rank is computed: which
/// partial values of the source are reduced, and by which number the result is divided. Equal entries are stored once.
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

/// Returns notes about the tensors that are reduced, and about whole values that are divided into partial values.
pub fn notes(source: &Catalog, reservation: &Reservation) -> Vec<String> {
    reduced(source, reservation).into_iter().chain(divided(reservation)).collect()
}

/// Returns a note such as `3 tensors are reduced: 1 with P(avg) on dp and cp; 2 with P(sum) on dp`.
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
    let list: Vec<String> = reduced.iter().map(|(ops, number)| format!("{number} with {ops}")).collect();
    (total > 0).then(|| {
        let are = if total == 1 { "is" } else { "are" };
        format!("{} {are} reduced: {}", count(total, "tensor"), list.join("; "))
    })
}

/// Describes a partial placement with its mesh dimensions, for example `P(avg) on dp and cp`.
fn summed(MeshPlacement { mesh, shared }: MeshPlacement<'_>) -> String {
    let mut dims: IndexMap<String, Vec<String>> = IndexMap::new();
    for (dim, placement) in shared.placements.iter().enumerate().filter(|(_, placement)| placement.is_partial()) {
        let name = mesh.names().map_or_else(|| format!("dim {dim}"), |names| names[dim].clone());
        dims.entry(placement.to_string()).or_default().push(name);
    }
    let each = dims.into_iter().map(|(op, dims)| format!("{op} on {}", dims.join(" and ")));
    each.collect::<Vec<_>>().join(", ")
}

/// Returns notes such as `3 tensors with P(sum) are computed from whole values, which are divided by 3 and rounded`. A
/// division without rounding needs no note: divisions of floats by powers of two are exact, and integers with a
/// remainder are refused.
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
        format!(
            "{} with P(sum) are computed from whole values, which are divided by {divisor} and rounded",
            count(number, "tensor")
        )
    };
    divided.into_iter().map(note).collect()
}
