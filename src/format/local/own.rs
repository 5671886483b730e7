//! Assigns each value that differs between ranks to the ranks of the target.
//!
//! If the values of several ranks differ only in the content of tensors (the state of a random number generator), these
//! values become a single value, and each tensor in the value has different content on each rank. If values differ in
//! another way, they stay separate values, each with a list of its ranks.

use std::collections::BTreeMap;

use crate::catalog::path::{self, LeafAction};
use crate::catalog::{Catalog, RankValue, TensorId, Value};
use crate::layout::Rank;

/// The tensors of the target that have different content on each rank. The ids of these tensors begin after the last id
/// of the source's tensors.
#[derive(Debug)]
pub struct PerRankTensors {
    first: usize,
    /// For each tensor whose content differs between ranks, a map from a rank to the source tensor with the content for
    /// this rank.
    by_rank: Vec<BTreeMap<Rank, TensorId>>,
}

impl PerRankTensors {
    /// Returns, for each rank, the source tensor that gives the content of tensor `id`. Returns `None` if `id` is
    /// itself a source tensor.
    pub fn get(&self, id: TensorId) -> Option<&BTreeMap<Rank, TensorId>> {
        self.by_rank.get((id.0 as usize).checked_sub(self.first)?)
    }

    fn push(&mut self, by_rank: BTreeMap<Rank, TensorId>) -> TensorId {
        self.by_rank.push(by_rank);
        TensorId(u32::try_from(self.first + self.by_rank.len() - 1).expect("fewer than 2^32 tensors"))
    }
}

/// Returns the state dict for a target of `world_size` ranks, and the tensors of this state dict whose content differs
/// between ranks. Rank `r` of the target gets the value that [`RankValue::value_for`] chooses.
pub fn assign_to_ranks(source: &Catalog, state: &Value, world_size: u32) -> (Value, PerRankTensors) {
    let mut state = state.clone();
    let mut own = PerRankTensors { first: source.tensors.len(), by_rank: Vec::new() };
    path::edit_leaves(&mut state, &mut |_, leaf| {
        let Value::Other(rank_values) = leaf else { return LeafAction::Keep };
        let mut groups: Vec<Vec<(Rank, &Value)>> = Vec::new();
        for rank in (0..world_size).map(Rank) {
            let Some(value) = RankValue::value_for(rank_values, rank) else { return LeafAction::Remove };
            match groups.iter_mut().find(|group| same_but_content(source, group[0].1, value)) {
                Some(group) => group.push((rank, value)),
                None => groups.push(vec![(rank, value)]),
            }
        }
        let mut rank_values: Vec<RankValue> = groups.iter().map(|group| merge_group(group, &mut own)).collect();
        *leaf = if rank_values.len() == 1 { rank_values.remove(0).value } else { Value::Other(rank_values) };
        LeafAction::Keep
    });
    (state, own)
}

/// Returns whether two values are equal except for the content of tensors.
fn same_but_content(source: &Catalog, one: &Value, other: &Value) -> bool {
    let kinds = |value: &Value| -> Vec<_> {
        let kind = |id| (source.tensor(id).dtype, source.tensor(id).shape.clone());
        value.tensor_ids().into_iter().map(kind).collect()
    };
    one.same_but_tensors(other) && kinds(one) == kinds(other)
}

fn merge_group(group: &[(Rank, &Value)], own: &mut PerRankTensors) -> RankValue {
    let ids: Vec<(Rank, Vec<TensorId>)> = group.iter().map(|(rank, value)| (*rank, value.tensor_ids())).collect();
    let mut value = group[0].1.clone();
    let mut at = 0;
    value.map_tensors(&mut |_| {
        at += 1;
        own.push(ids.iter().map(|(rank, ids)| (*rank, ids[at - 1])).collect())
    });
    RankValue { value, ranks: group.iter().map(|(rank, _)| *rank).collect() }
}
